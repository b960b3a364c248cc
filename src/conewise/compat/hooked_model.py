"""A model as a TransformerLens notebook uses it: text, caches, hooks and weights over a captured module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from conewise.compat.activation_cache import ActivationCache, RunValues, Slice
from conewise.compat.hook_points import (
    HookPoint,
    HookRegistry,
    Hooks,
    NamesFilter,
    as_filter,
    hooked,
    recorded_logits,
)
from conewise.compat.hook_table import Change, HookTable
from conewise.compat.hooked_text import HookedText, lm_cross_entropy_loss
from conewise.compat.hooked_weights import HookedConfig
from conewise.compat.matrices import Matrices
from conewise.errors import PatchError
from conewise.model import Model, capture
from conewise.program.export import unwrapped
from conewise.program.tensors import recordable, recording
from conewise.runs.reading import Reading
from conewise.runs.run import Run
from conewise.threads import Turn, one_module, one_thread

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("center_unembed", "center_writing_weights", "fold_value_biases", "process_weights_"),
            *("load_and_process_state_dict", "refactor_factored_attn_matrices"),
        ),
        "weights stay as the module has them",
    ),
    "all_composition_scores": "multiply `QK` and `OV`, which are FactoredMatrix",
    "boot_transformers": "load the model with `cw.load(name, attn_implementation='eager')`",
    "cache_all": "use `run_with_cache`",
    "cache_some": "use `run_with_cache(names_filter=...)`",
    "check_hooks_to_add": "every hook may be added",
    "cpu": "load the model where it shall be: `cw.load(name, device='cpu')`",
    "cuda": "load the model where it shall be: `cw.load(name, device='cuda')`",
    "enable_compatibility_mode": "weights stay as the module has them; hook names are those of the mode",
    "fold_layer_norm": "weights stay as the module has them; norms are applied with their gains",
    "freeze_attention_patterns": "hook 'attn.hook_pattern' with a function that returns the patterns to keep",
    "generate": "use `model.module.generate(tokens, ...)`, the module's own",
    "init_weights": "the module comes with weights",
    "input_to_embed": "use `model.embed(tokens)`",
    "load_state_dict": "load them into `model.module`, and make the HookedModel anew",
    "mod_dict": "hook points are in `hook_dict`, modules in `model.module.named_modules()`",
    "mps": "load the model where it shall be: `cw.load(name, device='mps')`",
    "sample_datapoint": "datasets are loaded with the library `datasets`",
    "set_tokenizer": "give the tokenizer when the model is made: `HookedModel(module, tokenizer)`",
    "set_ungroup_grouped_query_attention": "keys and values keep their own heads; repeat them with "
    "`repeat_interleave`",
    "setup": "nothing is left to set up",
    "state_dict": "use `model.module.state_dict()`",
    "to": "load the model where it shall be, `cw.load(name, device=..., dtype=...)`",
    "train": "a captured module stays in eval mode",
    "train_step": "train `model.module`, and make the HookedModel anew",
}


def reason_for(name: str) -> str:
    """Return the message about a name that a HookedModel does not have."""
    if name in INSTEAD:
        return f"a HookedModel has no {name!r}: {INSTEAD[name]}."
    return (
        f"a HookedModel has no {name!r}. The module itself is `model.module`, the captured model "
        "`model.captured`; docs/transformer-lens.md lists what there is."
    )


Tensor = torch.Tensor

KEPT_RUNS = 2
"""So many runs stay in memory: hooks on the same tokens then cost what lies behind them."""

RETURN_TYPES = ("logits", "loss", "both", None)


class HookedModel(HookRegistry, HookedText):
    """A Hugging Face model under the names of TransformerLens's HookedTransformer.

    `HookedModel(cw.load("gpt2", attn_implementation="eager"))`, or `HookedModel(module, tokenizer)`. The
    module is captured and not changed: its weights are not folded, centred or split, and no hook is left on
    it. `captured` is the captured model, which works with the rest of Conewise.

    Hooks are called between the steps of a cached run: a second call on the same tokens computes only the
    values downstream of the hooks.
    """

    def __init__(
        self, loaded: Any, tokenizer: Any = None, *, name: str | None = None, default_prepend_bos: bool = True
    ) -> None:
        captured = loaded if isinstance(loaded, Model) else None
        if captured is not None:
            tokenizer = captured.tokenizer if tokenizer is None else tokenizer
            name = captured.label if name is None else name
        module = unwrapped(loaded if captured is None else captured.module)
        if not isinstance(module, nn.Module):
            raise TypeError(
                "a HookedModel is made of a loaded model (`cw.load(...)`), a module or a captured model, and "
                f"not of {type(loaded).__name__}."
            )
        self.module: Any = module
        self.captured = capture(module, input_ids=_example(module)) if captured is None else captured
        self._runs: list[tuple[Tensor, Run]] = []
        self._probe_run: Run | None = None
        self._matrices = Matrices(self.captured, self._probe)
        self.table = HookTable(self.captured, self._probe(), self._matrices)
        self.cfg = HookedConfig(self.table, self._probe(), tokenizer, name or self.captured.name)
        self.cfg.default_prepend_bos = default_prepend_bos
        self._tokenizer = tokenizer
        self.cfg.tokenizer_prepends_bos = tokenizer is not None and self._tokenizer_prepends_bos()
        self.hook_dict: dict[str, HookPoint] = {
            entry.name: HookPoint(entry.name, entry.layer) for entry in self.table.entries.values()
        }

    def __getattr__(self, name: str) -> Any:
        if isinstance(getattr(type(self), name, None), property):
            return getattr(type(self), name).fget(self)  # once more, for the error that it raised
        raise AttributeError(reason_for(name))

    def __repr__(self) -> str:
        return f"HookedModel of {self.captured.name}: {len(self.hook_dict)} hooks"

    # -- running -----------------------------------------------------------------------------------

    @property
    def _turn(self) -> Turn:
        return self.captured._turn

    @one_thread
    def __call__(
        self,
        input: Any,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        stop_at_layer: int | None = None,
        **others: Any,
    ) -> Any:
        """The logits [prompt, pos, d_vocab] of text or tokens; or the next tokens' loss, or both, or None.

        With `stop_at_layer`, the stream as it enters that layer. Without hooks this is the module's own
        forward.
        """
        _expect_no_more(others)
        _expect_return_type(return_type)
        tokens = self.input_tokens(input, prepend_bos, padding_side)
        if stop_at_layer is None and not self._is_hooked("fwd") and not self._is_hooked("bwd"):
            with one_module():
                logits = self.module(input_ids=tokens, use_cache=False).logits
            return _returned(logits, tokens, return_type, loss_per_token)
        if self._is_hooked("bwd"):
            if stop_at_layer is not None:
                raise ValueError(
                    "backward hooks are on, and stop_at_layer returns no logits to go back from."
                )
            with recording():
                return _returned(self._recorded(tokens), recordable(tokens), return_type, loss_per_token)
        reading, _ = self._reading(tokens, {}, self.n_before(stop_at_layer))
        return self._output(reading, tokens, return_type, loss_per_token, stop_at_layer)

    forward = __call__

    @one_thread
    def run_with_cache(
        self,
        input: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: NamesFilter = None,
        device: Any = None,
        incl_bwd: bool = False,
        pos_slice: Any = None,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        stop_at_layer: int | None = None,
        reset_hooks_end: bool = True,  # noqa: ARG002  # no hooks are added that could stay
        clear_contexts: bool = False,
        **others: Any,
    ) -> tuple[Any, Any]:
        """Return the model's output, and a cache of its activations by hook names.

        Values are read from the run when they are requested, except with `names_filter`, `pos_slice` or
        `device`: then only the selected values are kept, and the run is not. Added hooks apply.
        """
        _expect_no_more(others)
        _expect_return_type(return_type)
        tokens = self.input_tokens(input, prepend_bos, padding_side)
        is_wanted = as_filter(names_filter, self.table.full)
        is_asked = names_filter is not None and not callable(names_filter)
        names = [name for name in self.table if (is_asked or self.is_listed(name)) and is_wanted(name)]
        before = self.n_before(stop_at_layer)
        names = [name for name in names if self._is_before(name, before)]
        reading, recorded = self._reading(tokens, dict.fromkeys(names), before)
        output = self._output(reading, tokens, return_type, loss_per_token, stop_at_layer)
        values: Mapping[str, Tensor] = RunValues(reading, self.table, names, recorded)
        if names_filter is not None or pos_slice is not None or device is not None or before is not None:
            at, of_queries = Slice.unwrap(pos_slice), ("hook_pattern", "hook_attn_scores")
            dims = {name: -2 if name.endswith(of_queries) else 1 for name in names}
            values = {name: at.apply(value, dims[name]).to(device) for name, value in values.items()}
        if incl_bwd:
            values = {**values, **self._gradients(tokens, names, return_type)}
        cache = ActivationCache(values, self)
        if remove_batch_dim:
            cache.remove_batch_dim()
        if clear_contexts:
            self.clear_contexts()
        return output, cache if return_cache_object else dict(cache.items())

    @one_thread
    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Call the model with functions `hook(value, hook)` that are called with named values.

        A name is a hook's name or a function of names. The return value of a function replaces the value; if
        it returns None, the value is used as the function left it, including in-place writes.
        """
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*model_args, **model_kwargs)

    def input_tokens(
        self, given: Any, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> Tensor:
        """Return the model's input as tokens [prompt, pos]."""
        if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], str)):
            return self.to_tokens(given, prepend_bos, padding_side)
        tokens = torch.as_tensor(given)
        if tokens.is_floating_point():
            raise TypeError(
                f"the input is text or tokens, and not {tokens.dtype}: a run cannot start in the middle of "
                "the model. Hook 'blocks.N.hook_resid_pre' to put another stream in."
            )
        if tokens.ndim not in {1, 2}:
            raise ValueError(f"tokens are [pos] or [prompt, pos], and these are {tuple(tokens.shape)}.")
        return (tokens[None] if tokens.ndim == 1 else tokens).to(self.cfg.device, torch.long)

    def reading(self, tokens: Any) -> Reading:
        """Return the run on text or tokens, patched with the added hooks; sweeps start from it."""
        run = self._run(self.input_tokens(tokens))
        changes = {name: point.called for name, point in self.hook_dict.items() if point.has_hooks("fwd")}
        if not changes:
            return run
        # Once by themselves: what they read of caches is at hand then, in the middle of a world's demand.
        hooked(run, self.table, changes, self._functions(changes))
        world = run.fork()
        for place, change in self.table.edits(changes):
            world.patch(place, change)
        return world

    def _reading(
        self, tokens: Tensor, wanted: Mapping[str, None], before: int | None = None
    ) -> tuple[Reading, Mapping[str, Tensor]]:
        """A run, or a fork of it with all hooks in force; and values that cannot be read again from there.

        Every hook is called once, also where nothing asks for its value.
        """
        run = self._run(tokens)
        points = {
            name: point
            for name, point in self.hook_dict.items()
            if point.has_hooks("fwd") and self._is_before(name, before)
        }
        if not points:
            return run, {}
        recorded: dict[str, Tensor] = {}
        shared = self._names_beside(points) if wanted else frozenset()
        changes: dict[str, Change] = {
            name: _calling(self.hook_dict[name], recorded)
            for name in self.table
            if name in points or (name in shared and name in wanted)
        }
        return hooked(run, self.table, changes, self._functions(points)), recorded

    def _functions(self, names: Iterable[str]) -> list[Any]:
        """The functions that are called with values of these names."""
        return [handle.function for name in names for handle in self.hook_dict[name].fwd_hooks]

    def _gradients(self, tokens: Tensor, names: list[str], return_type: str | None) -> dict[str, Tensor]:
        """The gradients of the loss by sites, by their names with "_grad" behind."""
        if return_type != "loss":
            raise ValueError("incl_bwd goes with return_type='loss', of which the gradients are.")
        found: dict[str, Tensor] = {}

        def keep(gradient: Tensor, hook: HookPoint) -> None:
            found[f"{hook.name}_grad"] = gradient

        sites = [name for name in names if self.table.entries[name].is_site]
        with self.hooks(bwd_hooks=[(name, keep) for name in sites]), recording():
            lm_cross_entropy_loss(self._recorded(tokens), recordable(tokens)).backward()  # type: ignore[no-untyped-call]
        return found

    def _recorded(self, tokens: Tensor) -> Tensor:
        """The logits, recorded for a backward pass that calls backward hooks; forward hooks are in force."""
        changes = {name: point.called for name, point in self.hook_dict.items() if point.has_hooks("fwd")}
        points = {name: point for name, point in self.hook_dict.items() if point.has_hooks("bwd")}
        return recorded_logits(self._run(tokens), self.table, changes, points)

    def _names_beside(self, points: Mapping[str, HookPoint]) -> frozenset[str]:
        """Names of nodes that a hook of another name changes: read afterwards, they would be changed too."""
        found: set[str] = set()
        for names in self._names_by_node.values():
            if any(name in points for name in names):
                found.update(names)
        return frozenset(found)

    @cached_property
    def _names_by_node(self) -> dict[str, list[str]]:
        by_node: dict[str, list[str]] = {}
        for name, entry in self.table.entries.items():
            for place in entry.touches:
                by_node.setdefault(self.captured.locate(place).node, []).append(name)
        return by_node

    def _output(
        self,
        reading: Reading,
        tokens: Tensor,
        return_type: str | None,
        per_token: bool,
        stop_at_layer: int | None = None,
    ) -> Any:
        before = self.n_before(stop_at_layer)
        if before is not None and before < self.cfg.n_layers:
            return reading.read(("resid_pre", before)).clone()
        if before is not None:
            return reading.read(("resid_post", before - 1)).clone()
        with recording() if reading._is_recorded else nullcontext():
            return _returned(reading.logits.clone(), tokens, return_type, per_token)

    def _run(self, tokens: Tensor) -> Run:
        """The run of these tokens: a kept one where there is one, of the weights that the module has now."""
        for known, run in self._runs:
            if known.shape == tokens.shape and torch.equal(known, tokens) and _is_current(run):
                return run
        run = self.captured.run(input_ids=tokens)
        self._runs = [(tokens.clone(), run), *self._runs][:KEPT_RUNS]
        return run

    def _probe(self) -> Run:
        """A short run, with the weights that the module has now."""
        if self._probe_run is None or not _is_current(self._probe_run):
            self._probe_run = self.captured.run(input_ids=_example(self.module))
        return self._probe_run

    def n_before(self, stop_at_layer: int | None) -> int | None:
        """Return the number of layers that are computed."""
        if stop_at_layer is None:
            return None
        found = stop_at_layer + self.cfg.n_layers if stop_at_layer < 0 else stop_at_layer
        if not 0 <= found <= self.cfg.n_layers:
            raise ValueError(f"stop_at_layer is 0 to {self.cfg.n_layers}, and not {stop_at_layer}.")
        return found

    def _is_before(self, name: str, layer: int | None) -> bool:
        """True if a value is computed where the model stops at this layer."""
        entry = self.table.entries[name]
        if layer is None:
            return True
        return entry.layer < layer if entry.layer is not None else not name.startswith("ln_final")

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """List each head's contribution to the stream in caches. It can be read and hooked at any time."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """List the input of each head in caches. It can be read and hooked at any time."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """List the inputs of queries, keys and values in caches. They can be hooked at any time."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """List the input of the norm before each MLP in caches. It can be hooked at any time."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def loss_fn(
        self, logits: Tensor, tokens: Tensor, attention_mask: Tensor | None = None, per_token: bool = False
    ) -> Tensor:
        """Return the next-token loss."""
        return lm_cross_entropy_loss(logits, tokens, attention_mask, per_token)

    def eval(self) -> HookedModel:
        """Return the model itself, which is always in eval mode."""
        return self

    def parameters(self) -> Any:
        """Return the module's parameters."""
        return self.module.parameters()

    def named_parameters(self) -> Any:
        """Return the module's parameters by its own names."""
        return self.module.named_parameters()


def _example(module: nn.Module) -> Tensor:
    """A few tokens that every vocabulary has."""
    return torch.arange(8, device=next(module.parameters()).device)[None] % 7


def _is_current(run: Run) -> bool:
    """True if a run is of the weights that the module has now."""
    try:
        run.check()
    except PatchError:  # weights were written to, or values of the run
        return False
    return True


def _calling(point: HookPoint, recorded: dict[str, Tensor]) -> Change:
    def change(value: Tensor) -> Tensor:
        changed = point.called(value)
        recorded[point.name] = changed
        return changed

    return change


def _returned(logits: Tensor, tokens: Tensor, return_type: str | None, per_token: bool) -> Any:
    if return_type == "logits":
        return logits
    if return_type is None:
        return None
    loss = lm_cross_entropy_loss(logits, tokens, per_token=per_token)
    return loss if return_type == "loss" else (logits, loss)


def _expect_return_type(return_type: str | None) -> None:
    if return_type not in RETURN_TYPES:
        raise ValueError(
            f"return_type is 'logits', 'loss', 'both' or None, and {return_type!r} is none of these."
        )


def _expect_no_more(others: Mapping[str, Any]) -> None:
    """Refuse arguments that TransformerLens takes and this does not, with what to do."""
    for name, value in others.items():
        if value is None or value is False:
            continue
        raise TypeError(f"{name} is not taken here. {_ELSEWHERE.get(name, 'Leave it out.')}")


_ELSEWHERE = {
    "attention_mask": "Give prompts of one length, or pad on the right; capture the module with its mask, "
    "`cw.capture(module, input_ids=..., attention_mask=...)`, for all else.",
    "start_at_layer": "Hook 'blocks.N.hook_resid_pre' with a function that returns the stream.",
    "past_kv_cache": "The model is run on whole prompts.",
}


def test_prompt(
    prompt: str,
    answer: str | list[str],
    model: HookedModel,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Print how likely a model finds an answer, token by token; of several, the first token of each.

    A space is put in front of an answer that has none, unless it is said otherwise.
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    if prepend_space_to_answer:
        answers = [one if one.startswith(" ") else f" {one}" for one in answers]
    tokens = model.to_tokens(prompt, prepend_bos=prepend_bos)
    shown = model.to_str_tokens(prompt, prepend_bos=prepend_bos)
    ranks: list[list[tuple[str, int]]] = []
    if print_details:
        print("Tokenized prompt:", shown)
        split = [model.to_str_tokens(one, prepend_bos=False) for one in answers]
        print("Tokenized answer:" if len(answers) == 1 else "Tokenized answers:", split)
    for one in answers:
        wanted = model.to_tokens(one, prepend_bos=False)[0]
        wanted = wanted if len(answers) == 1 else wanted[:1]
        logits = model.reading(torch.cat([tokens[0], wanted])[None]).logits[0]
        found = []
        for place, token in enumerate(wanted.tolist()):
            at = logits[tokens.shape[1] - 1 + place]
            rank = int((at > at[token]).sum())
            found.append((model.to_single_str_token(token), rank))
            if print_details:
                print(_line(f"Rank: {rank:<8}", model, at, token))
                for number, other in enumerate(at.topk(min(top_k, len(at))).indices.tolist()):
                    print(_line(f"Top {number}th token.", model, at, other))
        ranks.append(found)
    print("Ranks of the answer tokens:", ranks[0] if len(answers) == 1 else ranks)


test_prompt.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test by its name


def _line(what: str, model: HookedModel, logits: torch.Tensor, token: int) -> str:
    prob = float(logits.softmax(-1)[token])
    text = model.to_single_str_token(token)
    return f"{what} Logit: {float(logits[token]):5.2f} Prob: {prob:6.2%} Token: |{text}|"
