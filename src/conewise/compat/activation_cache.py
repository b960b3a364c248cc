"""A cache of activations by hook names, with the stacks of the residual stream that people take from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import numpy as np
import torch

from conewise.compat.hook_table import BIASES, POST_NORMS, Entry, HookTable
from conewise.compat.hooked_text import HookedText
from conewise.compat.matrices import Norm
from conewise.errors import MissingSiteError
from conewise.program.tensors import writes_to
from conewise.runs.reading import Reading

Tensor = torch.Tensor
Stack = Any
"""A tensor, or with `return_labels` a pair of it and a list of labels."""


def to_numpy(tensor: Any) -> Any:
    """A tensor, a list, a tuple, a number or an array as a numpy array."""
    if isinstance(tensor, torch.Tensor):
        plain = tensor.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    if isinstance(tensor, np.ndarray | list | tuple | int | float | bool):
        return np.asarray(tensor)
    raise ValueError(f"expected a tensor, a list, a number or an array, and not {type(tensor).__name__}.")


class Slice:
    """Entries along one dimension; a number drops the dimension.

    A tuple is the arguments of Python's `slice`: (5,) is :5, (1, 5) is 1:5. A list, an array or a tensor of
    numbers (or of booleans) takes these entries. None takes all.
    """

    def __init__(self, input_slice: Any = None) -> None:
        self.slice, self.mode = _index(input_slice)

    @classmethod
    def unwrap(cls, slice_input: Any) -> Slice:
        """A slice of what was given; a number becomes a list of one, so that the dimension stays."""
        if isinstance(slice_input, Slice):
            return slice_input
        made = cls(slice_input)
        return cls([made.slice]) if made.mode == "int" else made

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """These entries of a tensor, along one of its dimensions."""
        whole: list[Any] = [slice(None)] * tensor.ndim
        whole[dim] = self.slice
        return tensor[tuple(whole)]

    def indices(self, max_ctx: int | None = None) -> Any:
        """The numbers of the entries, along a dimension of this length."""
        if self.mode == "int":
            return torch.tensor([self.slice]).numpy()
        if max_ctx is None:
            raise ValueError("max_ctx is needed: which entries these are depends on how many there are.")
        return torch.arange(max_ctx)[self.slice].numpy()

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode}"


def _index(given: Any) -> tuple[Any, str]:
    if given is None:
        return slice(None), "identity"
    if isinstance(given, Slice):
        return given.slice, given.mode
    if isinstance(given, slice):
        return given, "slice"
    if isinstance(given, tuple):
        return slice(*given), "slice"
    if not isinstance(given, bool) and hasattr(given, "__index__") and getattr(given, "ndim", 0) == 0:
        return operator.index(given), "int"
    if isinstance(given, list) or hasattr(given, "__array__"):
        return torch.as_tensor(given), "array"
    raise ValueError(
        f"a slice is a number, a tuple (start, stop), a list of numbers or None, and {given!r} is none of "
        "these."
    )


class RunValues(Mapping[str, Tensor]):
    """The values of a run by hook names, each read when it is asked for.

    What is handed out is a copy, which stays here: whoever writes to it finds it changed later, and the run
    is as it was. `recorded` are values that were kept when the run was made, as reading them again is not the
    same.
    """

    def __init__(
        self, run: Reading, table: HookTable, names: list[str], recorded: Mapping[str, Tensor] | None = None
    ) -> None:
        self.run, self._table, self._names = run, table, dict.fromkeys(names)
        self._recorded = dict(recorded or {})
        self._handed: dict[str, tuple[Tensor, int]] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._handed:
            value = self.peek(name).clone()
            self._handed[name] = value, writes_to(value)
        return self._handed[name][0]

    def peek(self, name: str) -> Tensor:
        """A value for code that writes to nothing; no copy of it is kept."""
        if name in self._handed:
            return self._handed[name][0]
        if name in self._recorded:
            return self._recorded[name]
        if name not in self._table.entries:
            raise KeyError(name)
        return self._table.entries[name].read(self.run)

    @property
    def is_as_run(self) -> bool:
        """True if every value is still the run's own."""
        return not self._recorded and all(writes_to(value) == was for value, was in self._handed.values())

    def __contains__(self, name: object) -> bool:
        return name in self._table.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ActivationCache:
    """Activations of a run by hook names: `cache["blocks.3.attn.hook_z"]`, `cache["z", 3]`, `cache["z", -1]`.

    `cache_dict` is a mapping from full names to tensors; that of a run reads a value when it is asked for.

    Stacks of the residual stream are [component, ..., d_model]. The weights are the module's own, so a norm
    is applied with its gain: `apply_ln_to_stack` returns gain · (x − mean) / scale, with the scale of the
    run.
    """

    def __init__(
        self, cache_dict: Mapping[str, Tensor], model: HookedText, has_batch_dim: bool = True
    ) -> None:
        self.cache_dict, self.model, self.has_batch_dim = cache_dict, model, has_batch_dim

    # -- as a mapping ------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Tensor:
        """The value of a full name, of a short one ("k6"), or of (kind, layer) or (kind, layer, part)."""
        return self._value(key, self.cache_dict.__getitem__)

    def _peek(self, key: Any) -> Tensor:
        """The same for code that writes to nothing."""
        values = self.cache_dict
        return self._value(key, values.peek if isinstance(values, RunValues) else values.__getitem__)

    def _value(self, key: Any, read: Callable[[str], Tensor]) -> Tensor:
        if isinstance(key, str) and key in self.cache_dict:
            return read(key)
        name = self._name(key)
        try:
            return read(name)
        except KeyError:
            raise KeyError(
                f"{name} is not in this cache of {len(self.cache_dict)} names. Run with it among the "
                "names that `names_filter` lets through."
            ) from None

    def _name(self, key: Any) -> str:
        parts = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, tuple) else None
        if parts is None or not parts or not isinstance(parts[0], str) or len(parts) > 3:
            raise KeyError(
                f"a key is a hook's name, (kind, layer) or (kind, layer, part), and {key!r} is none of these."
            )
        try:
            return self._found(*parts).name
        except MissingSiteError as error:
            raise KeyError(str(error)) from error
        except TypeError as error:
            raise KeyError(f"a layer is a number, and {parts[1]!r} is none.") from error

    def _found(self, name: str, layer: Any = None, part: Any = None) -> Entry:
        return self.model.table.find(name, None if layer is None else operator.index(layer), part)

    def __contains__(self, key: object) -> bool:
        try:
            return self._name(key) in self.cache_dict
        except KeyError:
            return key in self.cache_dict

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __len__(self) -> int:
        return len(self.cache_dict)

    def keys(self) -> KeysView[str]:
        """Return the full names."""
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Tensor]:
        """Return the tensors."""
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and tensors."""
        return self.cache_dict.items()

    def __repr__(self) -> str:
        return f"ActivationCache with keys {list(self.cache_dict)}"

    @property
    def has_embed(self) -> bool:
        """True if the cache has token embeddings."""
        return "hook_embed" in self.cache_dict

    @property
    def has_pos_embed(self) -> bool:
        """True if the cache has positional embeddings."""
        return "hook_pos_embed" in self.cache_dict

    def to(self, device: Any) -> ActivationCache:
        """Move every tensor to another device, in place, and return this cache."""
        self.cache_dict = {name: value.to(device) for name, value in self.items()}
        return self

    def remove_batch_dim(self) -> ActivationCache:
        """Remove the batch dimension, which must have length 1, in place, and return this cache."""
        if self.has_batch_dim:
            for name, value in self.items():
                if value.shape[0] != 1:
                    raise AssertionError(
                        f"only a cache of one prompt can do without their dimension; {name} has "
                        f"{value.shape[0]}."
                    )
            self.cache_dict = {name: value[0] for name, value in self.items()}
            self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> ActivationCache:
        """Return a cache of some of the prompts."""
        chosen = Slice(batch_slice)
        if not self.has_batch_dim and chosen.mode != "identity":
            raise AssertionError("this cache has no dimension of prompts to select from.")
        values = {name: chosen.apply(value, 0) for name, value in self.items()}
        return ActivationCache(values, self.model, self.has_batch_dim and chosen.mode != "int")

    # -- stacks of the residual stream ---------------------------------------------------------------

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Stack:
        """Return the stream at the input of each block up to `layer`, [component, ..., d_model].

        By default, all layers are included. `incl_mid` adds the stream between attention and MLP; `mlp_input`
        adds the middle of the block `layer`. With `apply_ln` for the whole stream, the final norm is applied
        to each entry by itself, gain and bias included, as for a logit lens; for an earlier layer, see
        `apply_ln_to_stack`.
        """
        last, at = self._layers(layer), Slice(pos_slice)
        names: list[tuple[tuple[str, int], str]] = []
        for number in range(last + 1):
            if number == self.model.cfg.n_layers:
                names.append((("resid_post", number - 1), "final_post"))
                continue
            names.append((("resid_pre", number), f"{number}_pre"))
            if (incl_mid and number < last) or (mlp_input and number == last):
                names.append((("resid_mid", number), f"{number}_mid"))
        stack = torch.stack([at.apply(self._peek(name), -2) for name, _ in names])
        if apply_ln:
            is_final = last == self.model.cfg.n_layers
            stack = self.apply_ln_to_stack(stack, last, mlp_input, pos_slice, recompute_ln=is_final)
        return (stack, [label for _, label in names]) if return_labels else stack

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Stack:
        """Return the terms of the stream before `layer`, [component, ..., d_model]; they add up to it.

        They are the embeddings and the outputs of attention and MLPs; `mode` "attn" or "mlp" omits the
        others. `mlp_input` adds the attention of `layer` itself.
        """
        if mode not in {"all", "attn", "mlp"}:
            raise ValueError(f"mode is 'all', 'attn' or 'mlp', and {mode!r} is none of these.")
        self._expect_sum()
        last, at = self._layers(layer), Slice(pos_slice)
        names: list[tuple[Any, str]] = []
        if incl_embeds:
            names += [
                (f"hook_{one}", one) for one in ("embed", "pos_embed") if f"hook_{one}" in self.cache_dict
            ]
        for number in range(last):
            names += [((kind, number), f"{number}_{kind}") for kind in self._added(number, mode)]
        if mlp_input and mode != "mlp":
            names.append((("attn_out", last), f"{last}_attn_out"))
        values = [at.apply(self._peek(name), -2) for name, _ in names]
        stack = torch.stack(values) if values else self._nothing(at)
        stack = self.apply_ln_to_stack(stack, last, mlp_input, pos_slice) if apply_ln else stack
        return (stack, [label for _, label in names]) if return_labels else stack

    def stack_head_results(
        self,
        layer: int | None = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
    ) -> Stack:
        """Return the contribution of each head before `layer` to the stream, [layer · head, ..., d_model].

        Biases are not included. If attention is normed or scaled before it is added to the stream (Gemma 2,
        OLMo 2, Granite), so are its heads, with the scale of the run; `cache["result", 3]` holds them before
        that. `incl_remainder` adds the rest of the stream at that place, so that the stack adds up to it.
        """
        last, at = self._layers(layer), Slice(pos_slice)
        parts = [self._heads(number, at) for number in range(last)]
        stack = torch.cat(parts) if parts else self._nothing(at)
        labels = [f"L{number}H{head}" for number, part in enumerate(parts) for head in range(len(part))]
        if incl_remainder:
            stack = self._with_remainder(stack, labels, self._before(last), at)
        stack = self.apply_ln_to_stack(stack, last, pos_slice=pos_slice) if apply_ln else stack
        return (stack, labels) if return_labels else stack

    def stack_activation(
        self, activation_name: str, layer: int | None = -1, sublayer_type: str | None = None
    ) -> Tensor:
        """Return one kind of activation in every layer before `layer`, [layer, ...]."""
        last = self._layers(layer)
        return torch.stack([self._peek((activation_name, number, sublayer_type)) for number in range(last)])

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Any = None,
        pos_slice: Any = None,
        project_output_onto: Tensor | None = None,
    ) -> Tensor:
        """Return the contribution of each neuron of a layer to the stream, [..., neuron, d_model].

        The bias is not included. If the MLP is normed or scaled before it is added to the stream, so are its
        neurons, with the scale of the run. With `project_output_onto`, [d_model] or [d_model, n], the product
        with it is returned.
        """
        neurons, at = Slice(neuron_slice), Slice(pos_slice)
        active = neurons.apply(at.apply(self._peek(("post", layer)), -2), -1)
        scale = self._scale_of("mlp_out", layer, at)
        active = active if scale is None else active / scale
        weight = neurons.apply(self.model.weight("W_out", layer), 0)
        weight = self.model.table.written("mlp_out", layer).parts(weight, None)
        if project_output_onto is None:
            return active[..., None] * weight
        made: Tensor = weight @ project_output_onto
        return active * made if project_output_onto.ndim == 1 else active[..., None] * made

    def stack_neuron_results(
        self,
        layer: int | None,
        pos_slice: Any = None,
        neuron_slice: Any = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
    ) -> Stack:
        """Return the contribution of each neuron before `layer`, [layer · neuron, ..., d_model]."""
        last, at = self._layers(layer), Slice(pos_slice)
        neurons = Slice.unwrap(neuron_slice)
        parts = [self.get_neuron_results(n, neurons, pos_slice).movedim(-2, 0) for n in range(last)]
        stack = torch.cat(parts) if parts else self._nothing(at)
        width = self.model.cfg.d_mlp or 0
        labels = [f"L{number}N{one}" for number in range(last) for one in neurons.indices(width).tolist()]
        if incl_remainder:
            stack = self._with_remainder(stack, labels, self._before(last), at)
        stack = self.apply_ln_to_stack(stack, last, pos_slice=pos_slice) if apply_ln else stack
        return (stack, labels) if return_labels else stack

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
    ) -> Stack:
        """Return heads, neurons (or MLPs), embeddings and biases that add up to the stream before `layer`."""
        self._expect_sum()
        last, at = self._layers(layer), Slice(pos_slice)
        heads, labels = self.stack_head_results(last + mlp_input, return_labels=True, pos_slice=pos_slice)
        parts = [heads]
        if expand_neurons:
            more, names = self.stack_neuron_results(last, pos_slice, return_labels=True)
        else:
            more, names = self.decompose_resid(
                last, mode="mlp", pos_slice=pos_slice, incl_embeds=False, return_labels=True
            )
        parts, labels = [*parts, more], [*labels, *names]
        for one in ("embed", "pos_embed"):
            if f"hook_{one}" in self.cache_dict:
                parts.append(at.apply(self._peek(f"hook_{one}"), -2)[None])
                labels.append(one)
        biases = heads.new_zeros(1, *heads.shape[1:])
        for number in range(last + mlp_input):
            biases += self._constant("attn_out", number, at)
            if expand_neurons and number < last and "mlp_out" in self._added(number, "mlp"):
                biases += self._constant("mlp_out", number, at)
        parts.append(biases)
        labels.append("bias")
        stack = torch.cat(parts)
        stack = self.apply_ln_to_stack(stack, last, mlp_input, pos_slice) if apply_ln else stack
        return (stack, labels) if return_labels else stack

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Tensor:
        """Apply the norm before a layer to parts of the stream, with the scale of the run.

        This is linear: the parts of a whole add up to the norm's output minus its bias. `layer` None, -1 or
        n_layers is the unembedding's norm. The gain is applied, as it is not folded into the weights that
        come next. With `recompute_ln`, for the final norm alone, each part is normed by itself.

        `pos_slice` has already been applied to the stack, and `batch_slice` has not.
        """
        self._expect_sum()
        last = self._layers(layer)
        is_final = last == self.model.cfg.n_layers
        where = "ln_final" if is_final else f"blocks.{last}.{'ln2' if mlp_input else 'ln1'}"
        norm = self._norm(where)
        rows = Slice(batch_slice)
        if has_batch_dim and rows.mode != "identity":
            residual_stack = rows.apply(residual_stack, 1)
        if recompute_ln and is_final:
            return norm(residual_stack)
        scale = Slice(pos_slice).apply(self._peek(f"{where}.hook_scale"), -2)
        if self.has_batch_dim and rows.mode != "identity":
            scale = rows.apply(scale, 0)
        return norm.centered(residual_stack) / scale * norm.w

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """Return the contribution of each part of the stream to the logits of tokens.

        Parts pass through the run's final norm. With `incorrect_tokens`, the result is the contribution to
        the difference of the two logits. Tokens are text, a number, one for each prompt [prompt], or [prompt,
        pos]. The parts of the whole stream add up to the logit minus the share of biases: the final norm's,
        and the unembedding's. Logits are those of the unembedding: later scales (Cohere, Granite) or caps
        (Gemma 2) are not applied.
        """
        directions = self.model.tokens_to_residual_directions(tokens)
        if incorrect_tokens is not None:
            others = self.model.tokens_to_residual_directions(incorrect_tokens)
            if others.shape != directions.shape:
                raise ValueError(
                    f"tokens and incorrect_tokens go together: these are directions of the shapes "
                    f"{tuple(directions.shape)} and {tuple(others.shape)}."
                )
            directions = directions - others
        stack = self.apply_ln_to_stack(
            residual_stack, -1, pos_slice=pos_slice, batch_slice=batch_slice, has_batch_dim=has_batch_dim
        )
        is_per_prompt = directions.ndim == 2 and stack.ndim == 4 and len(directions) == stack.shape[1]
        if is_per_prompt and has_batch_dim and Slice(batch_slice).mode != "int":
            directions = directions.unsqueeze(-2)
        try:
            return (stack * directions).sum(-1)
        except RuntimeError as error:
            raise ValueError(
                f"directions {tuple(directions.shape)} do not go with parts {tuple(stack.shape)}: tokens are "
                "one, one for each prompt, or one for each prompt and position."
            ) from error

    def compute_head_results(self) -> None:
        """Add the contribution of each head to the cache; the cache of a run has it already."""
        if not isinstance(self.cache_dict, RunValues):
            made = {f"blocks.{n}.attn.hook_result": self._result(n) for n in range(self.model.cfg.n_layers)}
            self.cache_dict = {**self.cache_dict, **made}

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Switch torch's recording of gradients on or off: `torch.set_grad_enabled(mode)`."""
        torch.set_grad_enabled(mode)

    # -- parts of these --------------------------------------------------------------------------------

    def _layers(self, layer: int | None) -> int:
        """Return the number of layers that are meant; None and -1 mean all of them."""
        whole = self.model.cfg.n_layers
        if layer is None or layer == -1:
            return whole
        if not 0 <= layer <= whole:
            raise ValueError(f"layer is 0 to {whole}, or None or -1 for all layers, and not {layer}.")
        return layer

    def _added(self, layer: int, mode: str) -> list[str]:
        """The kinds that a layer adds to the stream."""
        table = self.model.table.entries
        kinds = {"all": ("attn_out", "mlp_out"), "attn": ("attn_out",), "mlp": ("mlp_out",)}[mode]
        return [kind for kind in kinds if f"blocks.{layer}.hook_{kind}" in table]

    def _result(self, layer: int) -> Tensor:
        """Return what each head adds to the stream: of z, where the cache has nothing else."""
        if f"blocks.{layer}.attn.hook_result" in self.cache_dict:
            return self._peek(("result", layer))
        return torch.einsum("...hd,hdm->...hm", self._peek(("z", layer)), self.model.weight("W_O", layer))

    def _heads(self, layer: int, at: Slice) -> Tensor:
        """Return what each head adds to the stream, [head, ..., d_model]."""
        parts = at.apply(self._result(layer), -3).movedim(-2, 0)
        return self.model.table.written("attn_out", layer).parts(parts, self._scale_of("attn_out", layer, at))

    def _constant(self, kind: str, layer: int, at: Slice) -> Tensor:
        """Return what a layer adds to the stream beside its heads or neurons."""
        written, bias = self.model.table.written(kind, layer), self.model.weight(BIASES[kind], layer)
        return written.constant(bias, self._scale_of(kind, layer, at))

    def _scale_of(self, kind: str, layer: int, at: Slice) -> Tensor | None:
        """Return what the norm between an output projection and the stream divides by; None without one.

        Of z or neurons, where the cache has nothing else.
        """
        norm = self.model.table.written(kind, layer).norm
        if norm is None:
            return None
        name = f"blocks.{layer}.{POST_NORMS[kind]}.hook_scale"
        if name in self.cache_dict:
            return at.apply(self._peek(name), -2)
        if kind == "attn_out":
            whole = self._result(layer).sum(-2)
        else:
            whole = self._peek(("post", layer)) @ self.model.weight("W_out", layer)
        return at.apply(norm.scale(whole + self.model.weight(BIASES[kind], layer)), -2)

    def _before(self, layer: int) -> tuple[str, int]:
        """The stream in front of a layer."""
        return ("resid_pre", layer) if layer < self.model.cfg.n_layers else ("resid_post", layer - 1)

    def _expect_sum(self) -> None:
        """Refuse parts of a stream that no parts add up to."""
        if not self.model.table.is_summed:
            raise ValueError(
                "the stream of this model is normed from block to block, so it is no sum of what blocks "
                "added to it, and has no parts. Single values are there: `cache['attn_out', 3]`."
            )

    def _with_remainder(self, stack: Tensor, labels: list[str], whole: tuple[str, int], at: Slice) -> Tensor:
        self._expect_sum()
        labels.append("remainder")
        rest = at.apply(self._peek(whole), -2) - stack.sum(0)
        return torch.cat([stack, rest[None]])

    def _nothing(self, at: Slice) -> Tensor:
        """No components, of the right shape."""
        like = at.apply(self._peek(("resid_pre", 0)), -2)
        return like.new_zeros((0, *like.shape))

    def _norm(self, where: str) -> Norm:
        norm = self.model.table.norms.get(where)
        if norm is None:
            raise ValueError(
                f"{where} is no norm of which gain and scale are known, so it cannot be applied to parts of "
                "the stream."
            )
        return norm
