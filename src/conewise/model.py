"""A captured model: any `nn.Module` as a reactive graph, to be run, patched, swept and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import torch

from conewise.anatomy.components import Components, Edges, Receivers, Senders, paths_of
from conewise.anatomy.places import Index, PlaceLike, Places
from conewise.anatomy.selectors import Selector, SelectorLike
from conewise.arguments import Positive, PositiveNumber, Samples, Seed, Share, checked, expect
from conewise.attributing.attribution import attribute
from conewise.checks.verify import Verification, verify
from conewise.circuits.acdc import find_circuit
from conewise.circuits.features import feature_graph
from conewise.circuits.replaced_parts import edge_facts, model_edges
from conewise.circuits.tracing import causal_trace
from conewise.errors import ArgumentError, CaptureError, PromptError, SweepError, describe
from conewise.generation.sweep import Writing, WritingSweep, writing
from conewise.jobs.digests import fingerprint
from conewise.program.calls import forward_parameters
from conewise.program.export import unwrapped
from conewise.program.foreign import within_memory
from conewise.program.kept import Shelf
from conewise.program.streamed_modules import with_streams
from conewise.program.tensors import Tensor
from conewise.runs.activations import Activations, activations
from conewise.runs.captured import Captured
from conewise.runs.generate import Patches, Positions, Prompt, Written, generate
from conewise.runs.inputs import is_text, token_rows, tokens_of
from conewise.runs.interventions import Intervention
from conewise.runs.learned import Learned
from conewise.runs.reading import Reading
from conewise.runs.run import Keep, Run, baseline
from conewise.runs.splicing import active, splice_step, splicing
from conewise.runs.spreading import with_named
from conewise.status import status_line
from conewise.surgery.module import ProgramModule
from conewise.sweeps.batches import Base
from conewise.sweeps.execution.wavefront import load_kernels
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.storage.provenance import asked_by
from conewise.sweeps.sweep import Sweep
from conewise.sweeps.training import Fit
from conewise.templates import heading
from conewise.text.ask import ask
from conewise.text.tokens import expect_decodes
from conewise.threads import Turn, one_module, one_thread

CAPTURED = frozenset(
    {
        *("program", "signature", "batch_is_fixed", "graph", "state", "weights", "fidelity", "site_table"),
        *("phases", "splices", "operated_from", "_built", "_again", "_behind", "_supports", "_bytes"),
    }
)
"""The attributes that a model has once it is captured."""


_CACHE = "`run = model.run(text)`: `run['resid_post', 2]` is an activation, `run.logits` the output"
_PATCH = "`with run.fork() as world: world.patch(site, value)` for one change, `model.sweep(...)` for many"
_MODULE = "`model.module`, the PyTorch module"
_CONFIG = "`model.n_layers`, `model.n_heads`, or `model.module.config`"
ELSEWHERE = {
    **dict.fromkeys(("run_with_cache", "forward", "cache", "activations"), _CACHE),
    **dict.fromkeys(("run_with_hooks", "hooks", "add_hook", "trace", "patch", "ablate"), _PATCH),
    **dict.fromkeys(("to_tokens", "to_string", "to_str_tokens", "tokenize"), "`model.tokenizer`"),
    **dict.fromkeys(
        ("cfg", "config", "d_model", "d_head", "d_vocab", "d_mlp", "n_ctx", "num_layers", "vocab_size"),
        _CONFIG,
    ),
    **dict.fromkeys(("device", "dtype", "to", "eval", "cuda", "parameters", "state_dict"), _MODULE),
}
"""Names that models of other libraries have, and what to use instead here."""


@checked
@one_thread
class Model(Captured):
    """A module as a graph of its operations, with the module's own weights.

    The module is only read: no hook, buffer or attribute is left on it. The graph holds its
    tensors themselves, so a later change of a weight in place is a change of the model: runs that were made
    before are refused from then on, and new ones have the new weights. A module whose tensors were replaced
    by others (`module.w = nn.Parameter(...)`, `load_state_dict(..., assign=True)`, `module.to(dtype)`) is to
    be captured again, and says so. `fidelity` says how the graph compares with the module on the example.

    What `cw.load` gives is captured when it is first used, with the first inputs that it is given as the
    example, or with eight tokens where something else is asked first. It computes the logits of all
    positions. A model that takes further inputs than those, such as a mask, is captured with all of them:
    `cw.capture(model, input_ids=..., attention_mask=...)`.
    """

    @classmethod
    def _loaded(
        cls, module: Any, tokenizer: Any, label: str, origin: str, shelf: Shelf | None = None
    ) -> Model:
        """A model that is captured when it is first used; its program may lie on a shelf of the cache."""
        model = object.__new__(cls)
        model._shelf = shelf
        model.module, model.tokenizer, model.label, model.origin = module, tokenizer, label, origin
        model.name, model._batch_dim, model._turn = type(module).__name__, None, Turn()
        model._is_waiting = True
        return model

    def __getattr__(self, name: str) -> Any:
        """Capture a loaded model where something is read that only a captured one has."""
        if name not in CAPTURED or self.is_captured:
            hint = f" Use {ELSEWHERE[name]}." if name in ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}")
        self._capture_for(None)
        return getattr(self, name)

    @property
    def is_captured(self) -> bool:
        """True once the model is a graph; what `cw.load` gives is captured when it is first used."""
        return not vars(self).get("_is_waiting")

    def _capture_for(self, given: Any) -> None:
        """Capture a loaded model, with the first inputs that it is given; a captured one stays as it is."""
        if not self.is_captured:
            self._capture_now(given)

    def _capture_now(self, given: Any) -> None:
        with one_module():
            if self.is_captured:
                return  # another thread did so meanwhile
            self._is_waiting, before = False, vars(self).copy()
            try:
                self._capture((), self._first_example(given))
                load_kernels(self)
            except BaseException:
                vars(self).clear()
                vars(self).update(before, _is_waiting=True)
                raise

    def _first_example(self, given: Any) -> Mapping[str, Any]:
        """The arguments that the model is captured with; a module is not built for them if it need not be."""
        entry = self._shelf.any() if self._shelf is not None and self._is_unbuilt else None
        if self._shelf is None or entry is None or entry.needs_module:
            return _example(self.module, given, self)
        return _example_of(entry.forward.parameters, self._shelf.device, given, self)

    @within_memory("this run")
    def run(self, /, *args: Any, keep: Keep = None, **kwargs: Any) -> Run:
        """Run the model on one input, and return the baseline: the module's outputs, and every site's value.

        `keep` says which values stay in memory. "all": all of them. A list of places (a bare kind
        such as "z" is all of its layers): just what patches at these places will read. A number of
        bytes, or text like "500MB": as many as are estimated to fit, beginning with those that patches
        at the model's named sites read; the outputs always stay. None: everything if it fits into 1 GiB,
        otherwise what patches at the named sites read. Other values are recomputed when they are
        read; results do not depend on `keep`.

        On a CUDA device a small run is computed when something of it is first read, with the weights and the
        precision of now: a sweep computes base and source together.

        A model that has its tokenizer takes texts: `run("...")`, or several of one length.
        """
        self._capture_for(args[0] if len(args) == 1 and is_text(args[0]) else kwargs)
        return baseline(self, args, kwargs, keep)

    @overload
    def sweep(
        self,
        sites: SelectorLike,
        *,
        base: Base,
        source: Any = None,
        metric: Any = None,
        precision: str | None = None,
        generate: None = None,
    ) -> Sweep: ...
    @overload
    def sweep(
        self,
        sites: SelectorLike,
        *,
        base: Any,
        source: Any = None,
        metric: Any = None,
        precision: str | None = None,
        generate: int | Writing,
    ) -> WritingSweep: ...
    def sweep(
        self,
        sites: SelectorLike,
        *,
        base: Any,
        source: Any = None,
        metric: Any = None,
        precision: str | None = None,
        generate: int | Writing | None = None,
    ) -> Sweep | WritingSweep:
        """Patch each of `sites` in a world of its own, and evaluate `metric` there.

        `base` is the run that is changed, or its inputs, or several of either; or texts, where the model was
        captured with its tokenizer. `source` is where the values come from: a run or inputs of the same
        shape, an intervention such as `cw.mean(...)`, "zero", "mean" (over each base's own prompts and
        positions), or a function of what is there. It can be left out where every cell has a source of
        its own: `cw.cell(place, source=...)`, `cw.cells(place, sources={...})`. `metric` is one metric or a
        list of them: `cw.logit_diff(...)`, or a function of the outputs. See `Sweep`.

        Sites are selectors, places, names ("L2H1", "z[layer=2, head=1]", "blocks.2.attn.hook_z"), edges
        (`model.edges()`, or by name: "a0.h1->m2", "L0H1->mlp_out[layer=2]"), or a list of them; a list in
        that list is patched together, in one world. If several edges of one world lead into the same
        reader, all of them are patched. Edges in one world raise an error if one changes what the reader of
        another sees, because a reader is patched with its value in the base. `Circuit.evaluate` removes
        edges with every reader live.

        With `generate`, a number of tokens or `cw.writing(...)`, the model generates text in each world, and
        the result is `WrittenTexts`. A metric is then a function of texts, and can be left out.
        """
        if generate is not None:
            self._capture_for(None)
            how = writing(generate) if isinstance(generate, int) else generate
            if precision is not None:
                raise ArgumentError(
                    "`precision` is for sweeps that read logits; leave it out with `generate`."
                )
            return WritingSweep(
                self, with_named(sites, self), base=base, source=source, writing=how, judge=metric
            )
        if metric is None:
            raise SweepError(
                "no metric: say what is read in each world, such as `metric=cw.logit_diff(...)`, or let each "
                "write, `generate=20`."
            )
        self._capture_for(base)
        return Sweep(
            self, with_named(sites, self), base=base, source=source, metric=metric, precision=precision
        )

    def fit(
        self,
        intervention: Learned | Intervention,
        sites: SelectorLike,
        examples: Sequence[Any],
        *,
        steps: Positive = 200,
        batch: Positive = 16,
        learning_rate: PositiveNumber = 5e-3,
        held_out: Share | Sequence[Any] = 0.25,
        seed: Seed = 0,
    ) -> Fit:
        """Train an intervention at every one of `sites`, each in a world of its own: distributed alignment.

        `intervention` is `cw.rotation(k)`, `cw.boundless()`, `cw.learned_mask()`, `cw.low_rank(k)`, or
        `cw.add(vector)`, which begins with that vector. An example is (base, source, label): two inputs of
        one length, as texts, tokens or a mapping, and the token that the base should give once the
        intervention has taken its part from the source. The loss is the label's cross-entropy at the last
        position.

        Every step draws `batch` examples of one length, and is one differentiable pass over all worlds; Adam
        with this `learning_rate` steps in each of them by its own loss. `held_out` is the share of examples
        that is not trained on, or other examples, on which the accuracy of every place is counted. What is
        random depends on `seed` alone. `fit.run(...)` returns the trained interventions; with `out`, it goes
        on where it was cut off. `max_memory` is what a recorded pass may take: worlds are cut to fit.
        """
        self._capture_for(_first_base(examples))
        return Fit(
            self,
            intervention,
            with_named(sites, self),
            examples,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            held_out=held_out,
            seed=seed,
        )

    def activations(
        self,
        texts: Sequence[Any],
        sites: Selector | PlaceLike,
        pos: int | str | Sequence[int] = -1,
        *,
        batch: Positive = 32,
        out: str | Path | None = None,
        progress: bool | Callable[[int, int], None] | None = None,
    ) -> Activations:
        """Read the values of a site for any number of texts of any lengths, as one array: for probes, say.

        `sites` is `cw.sites("resid_post", layer=":")`, one place, or a site's name; the array's axes are
        text, then those of the site: [text, layer, d_model]. `pos` is a position, which may count from
        each text's own end, or several (an axis `pos` behind the texts); "mean" is that over
        all of a text's positions, and "all" gives a row for each token. Texts may be rows of tokens.

        Texts of one length are run together, at most `batch` at a time, up to the last site and no further.
        With `out`, a path that ends in .npy, the array is written there as it is computed, and never held.
        """
        has_text = isinstance(texts, list | tuple) and len(texts) > 0 and isinstance(texts[0], str)
        self._capture_for(texts[0] if has_text else None)
        with within_memory("these activations"):
            return activations(self, texts, sites, pos, batch, out, progress)

    ask = ask
    attribute = attribute
    causal_trace = causal_trace
    feature_graph = feature_graph
    find_circuit = find_circuit

    def components(self, stack: str = "") -> Components:
        """Who writes into the residual stream, and who reads it: heads, MLPs, what enters and what leaves.

        `stack` says of which stack, where there are several. Raises EdgeError where the model has none.
        """
        return edge_facts(self, stack).components

    def edges(self, *, pos: int | Sequence[int] | None = None, stack: str = "") -> Edges:
        """Every edge between components: what a head, an MLP or the logits read of what another one wrote.

        With `pos`, a number or several, there is an edge for each of these positions: the reader sees another
        part there alone. `stack` tells encoder from decoder where there are two. Raises EdgeError where the
        architecture has no such edges, and says which feature is in the way.
        """
        return model_edges(self, pos, stack)

    def paths(
        self,
        senders: Senders,
        receivers: Receivers,
        *,
        freeze: str = "all",
        base: Base,
        source: Any,
        metric: Any,
        stack: str = "",
    ) -> Sweep:
        """Path patching: what goes from each sender to each receiver, and then on to the metric.

        In the world of a pair the receiver is patched with what it would be if the sender put out what it
        does in the source, with what lies between them frozen as in the base, or live: `freeze="all"` leaves
        the direct path alone (an edge), "attention" freezes heads while MLPs are live, "none" nothing. All
        behind the receiver is live. Senders are writers such as `a0.h1`, `m3` and `input`, receivers are
        readers such as `a9.h6<q>`, `m5` and `logits`; names may hold `*`, and a set of receivers is patched
        together. The plan counts the worlds; what live components compute for senders comes on top.
        """
        self._capture_for(base)
        facts = edge_facts(self, stack)
        cells = paths_of(facts.components, senders, receivers, freeze)
        _ = facts.parts  # raises where what components wrote cannot be told apart
        return Sweep(self, cells, base=base, source=source, metric=metric)

    def splice(
        self,
        place: PlaceLike,
        dictionary: Any = None,
        *,
        encode: Callable[[Tensor], Tensor] | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        reads: PlaceLike | None = None,
        name: str = "sae",
        also: Sequence[str] = (),
        skips: bool | None = None,
    ) -> Model:
        """A model with a dictionary at a place: a sparse autoencoder, or a transcoder with `reads`.

        `dictionary` has the functions `encode` and `decode`, which may be given themselves: `encode` makes
        latents [..., latent] of the value [..., d] at the place, `decode` makes a value of them. What the
        dictionary misses of the value, its error term, is added, so that the outputs are those of this model,
        bit for bit, which is checked on the example. A transcoder reads the value at `reads`, and writes at
        its place. `cw.dictionary(folder)` reads one from files.

        With `skips`, `decode(latents, value)` gets the value that was read too: the skip connection of a
        transcoder, which stays when latents are patched. A cross-layer transcoder is spliced layer by layer:
        with `also`, the names of dictionaries in front, `decode(latents, *others)` gets their latents too,
        `others` in the order of the names, and the value read behind them where it `skips`.

        The new model has the sites `sae.latents` (with the axis `latent`), `sae.reconstruction`, `sae.error`,
        `sae.output` and `sae.input`, and all those of this one: what was the value at the place is the
        output of the dictionary. This model, and its module, stay as they are.
        """
        step = splice_step(place, dictionary, encode, decode, reads, name, also, skips)
        with (
            within_memory("splicing a dictionary into this model"),
            one_module(),
            status_line(f"splicing {name}") as doing,
        ):
            doing("exporting")
            made = splicing(self, step)
            model = self._made_of(step, made, doing)
            doing("comparing")
            model.splices = MappingProxyType({**self.splices, name: made.checked(self, model)})
        model.phases = doing.seconds()
        return model

    def to_module(self) -> ProgramModule:
        """The model as an `nn.Module`, equal bit for bit: to be stored, trained or exported.

        It has the weights that the program needs, by the names that they have in the model, and no others;
        they are the model's own until one of the two is moved, copied or trained. It is called as the module
        was, and returns what that returns. It draws no random numbers: dropout is off, as in the capture.
        """
        self.expect_program("make a module of this model")
        self.weights.expect_captured()
        return ProgramModule(self.program, self.signature)

    def active(
        self, name: str, run: Reading, *, top: int | None = None, pos: Index | None = None
    ) -> tuple[int, ...]:
        """The latents of the dictionary `name` that are not zero somewhere in a run, the strongest first.

        At most so many with `top`; with `pos`, those that are active at these positions. They are a choice:
        `cw.sites("sae.latents", latent=model.active("sae", run))`.
        """
        return active(self, name, run, top=top, pos=pos)

    def generate(
        self,
        prompt: Prompt,
        n: int,
        patches: Patches = (),
        *,
        pos: Positions = "all",
        when: Callable[[int], bool] | None = None,
        read: PlaceLike | Places | Sequence[PlaceLike | Places] = (),
        tokenizer: Any = None,
        **options: Any,
    ) -> Written:
        """Generate up to `n` tokens after a prompt while patches are applied (steering).

        The module's own `generate` runs, with a cache unless its `generation_config.use_cache` or an option
        says otherwise, and with its `options` (`do_sample=True`, `num_beams=4`, `stop_strings=["."]`; greedy
        unless they say otherwise). Patches are pairs (place, value), applied in this order by
        hooks that are removed afterwards. A value is `cw.add(vector, 2.0)`, "zero", a function of what
        would have been there, or, where the place names its positions, a tensor or another run.

        `pos="all"` patches the prompt and the generated text; "new" only positions after the prompt, so
        that the first generated token is unchanged. A place that names positions, counted from
        0, is patched at those. `when` is called with the number of each step and says if patches apply in it:
        step 0 reads the prompt, step 1 the first generated token, and so on.

        `read` names places whose values are kept, as patches left them: `read=[("resid_post", 2)]`, then
        `written["resid_post", 2]` [batch, pos, d_model], with all positions of the prompt and of what was
        written but for the last token. Of attention patterns, the whole square is put together.

        The prompt is text (several texts, of different lengths too), where the model was captured with its
        tokenizer or one is given; or token ids [batch, pos], or inputs by name. An encoder reads it all at
        once, and its sites are patched then; the decoder's prompt is the token that it begins with.
        """
        reads = tokenizer if tokenizer is not None else getattr(self, "tokenizer", None)
        with within_memory("writing with this model"):
            return generate(self, prompt, n, patches, pos, reads, when, options, read)

    def planned(self, plan: SweepPlan) -> Sweep:
        """Make the sweep that a plan is for, from the sites, metrics and inputs that the plan holds."""
        return Sweep(self, **asked_by(plan.spec, lambda inputs: baseline(self, (), inputs)))

    def fingerprint(self) -> str:
        """Compute the SHA-256 of the module's architecture and its current weights."""
        return fingerprint(self.module)

    def __repr__(self) -> str:
        return super().__repr__() if self.is_captured else f"Model {self._described()}"

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self.is_captured else heading("Model", self._described())

    def _described(self) -> str:
        weights = sum(weight.numel() for weight in self.module.parameters())
        tokenizer = "no tokenizer" if self.tokenizer is None else "its tokenizer"
        return f"{self.label}: {self.name} of {weights:,} weights, and {tokenizer} ({self.origin})"

    def verify(self, *, seed: int = 0, n: Samples = 3) -> Verification:
        """Check the graph against the module itself, on random inputs; see `Verification`."""
        with within_memory("verifying this model"):
            return verify(self, seed=seed, n=n)


def capture(module: Any, /, *args: Any, batch_dim: Any = None, tokenizer: Any = None, **kwargs: Any) -> Model:
    """Turn any `nn.Module` into a graph, by tracing it on the example arguments.

    The batch size may vary from run to run, and so may the number of positions if the module allows it. The
    batch dimension of the inputs is inferred from the computation; if that is not possible, give `batch_dim`
    (a module whose own `forward` takes an argument `batch_dim` gets it instead).
    Hugging Face models are captured with `use_cache=False`; give `logits_to_keep=1` to compute the last
    position's logits only. `DataParallel`, `DistributedDataParallel` and what `torch.compile` gives stand for
    the module inside. Raises CaptureError with torch's reason and what to do, where the module is not
    one graph.

    With a `tokenizer`, the model takes texts wherever it takes inputs: `model.run("...")`. A language model
    then needs no example, and a text is one. What `cw.load` gives may stand for the module with its
    tokenizer: it is captured anew, at once.
    """
    module = unwrapped(module)
    if not isinstance(module, Model | torch.nn.Module):
        load = f" Load it first: cw.load({module!r})." if isinstance(module, str) else ""
        raise CaptureError(
            f"cw.capture takes an nn.Module, or what cw.load gives, and this is {describe(module)}.{load}"
        )
    label = origin = ""
    module = module if isinstance(module, Model) else with_streams(module)
    if isinstance(module, Model):
        tokenizer = module.tokenizer if tokenizer is None else tokenizer
        label, origin, module = module.label, module.origin, module.module
    parameters = inspect.signature(module.forward).parameters if hasattr(module, "forward") else {}
    if batch_dim is not None and "batch_dim" in parameters:
        kwargs, batch_dim = {**kwargs, "batch_dim": batch_dim}, None
    if tokenizer is not None and "tokenizer" in parameters:
        kwargs, tokenizer = {**kwargs, "tokenizer": tokenizer}, None
    expect_decodes(tokenizer)
    expect("batch_dim", batch_dim, "int | None")
    given = args[0] if args else kwargs.get("input_ids")
    if is_text(given):
        if tokenizer is None:
            raise PromptError(
                "a text was given as the example, and no tokenizer to read it with. Give one with "
                "`tokenizer=`, or tokens: `input_ids=...`."
            )
        tokens = tokens_of(tokenizer, given).to(_device(module))
        args = (tokens, *args[1:]) if args else args
        kwargs = kwargs if args else {**kwargs, "input_ids": tokens}
    elif not args and given is None and tokenizer is not None:
        kwargs = {**_example(module), **kwargs}
    with within_memory("capturing this module"):
        model = Model(module, args, kwargs, batch_dim=batch_dim, tokenizer=tokenizer, label=label)
        model.origin = origin
        load_kernels(model)
    return model


EXAMPLE = tuple(range(8))
"""The tokens that a language model is captured with where none are given; any do, their number may vary."""

PROMPTS = 2
"""So many of the first inputs of a loaded model are the example: a capture computes it."""


def _example(module: Any, given: Any = None, reader: Any = None) -> Mapping[str, Any]:
    """Return the arguments that a language model is captured with: those of its first inputs, or tokens."""
    is_two = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    parameters = {} if is_two else forward_parameters(module)
    return _example_of(parameters, _device(module), given, reader)


def _example_of(parameters: Collection[str], device: Any, given: Any, reader: Any) -> Mapping[str, Any]:
    """Return these arguments for a forward that takes `parameters`.

    Of a batch, `PROMPTS` rows are taken. `reader` has the tokenizer.
    """
    one = given[0] if isinstance(given, list | tuple) and given and not is_text(given) else given
    if is_text(one) and getattr(reader, "tokenizer", None) is not None:
        texts = [one] if isinstance(one, str) else list(one[:PROMPTS])
        return {"input_ids": tokens_of(reader.tokenizer, texts).to(device)}
    if isinstance(one, Mapping) and one:
        batches = {len(value) for value in one.values() if isinstance(value, Tensor) and value.ndim}
        rows = PROMPTS if len(batches) == 1 else None
        is_cut = {name: isinstance(value, Tensor) and value.ndim > 0 for name, value in one.items()}
        return {name: value[:rows] if is_cut[name] else value for name, value in one.items()}
    if "input_ids" not in parameters:
        return {}
    return {"input_ids": token_rows([EXAMPLE], device)}


def _first_base(examples: Any) -> Any:
    """The base of the first example, as far as it can be told."""
    first = examples[0] if isinstance(examples, list | tuple) and examples else None
    if isinstance(first, Mapping):
        return first.get("base")
    return first[0] if isinstance(first, list | tuple) and first else None


def _device(module: Any) -> Any:
    first = next(iter(module.parameters()), None)
    return None if first is None else first.device
