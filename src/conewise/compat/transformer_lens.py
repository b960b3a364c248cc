"""The names that a TransformerLens notebook imports, over captured models: an import and one line change.

    import conewise as cw
    from conewise.compat.transformer_lens import HookedModel
    import conewise.compat.transformer_lens as patching      # and as utils

    model = HookedModel(cw.load("gpt2", attn_implementation="eager"))
    clean_logits, clean_cache = model.run_with_cache(clean_tokens)
    patching.get_act_patch_resid_pre(model, corrupted_tokens, clean_cache, metric)      # [layer, pos]

The names are those of `transformer_lens`, `transformer_lens.patching` and `transformer_lens.utils`.

Each sweep `get_act_patch_...` has the arguments and the shapes that it has there. `model` is a `HookedModel`
or a captured model, `clean_cache` its cache on the clean tokens, a run, or a mapping from hook names to
tensors. All cells are one pass, which computes only what lies below each patch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from conewise.anatomy.axes import resolved
from conewise.anatomy.places import Place
from conewise.compat.activation_cache import ActivationCache, RunValues, Slice, to_numpy
from conewise.compat.hook_points import HookPoint
from conewise.compat.hook_table import OTHER_NAMES, get_act_name
from conewise.compat.hooked_model import HookedModel, test_prompt
from conewise.compat.hooked_text import lm_accuracy, lm_cross_entropy_loss
from conewise.compat.hooked_weights import HookedConfig
from conewise.compat.matrices import FactoredMatrix
from conewise.compat.patching_result import (
    LastPosition,
    PatchingResult,
    ReadsMoreError,
    ranges_frame,
    reads_only_last,
    stacked_types,
)
from conewise.errors import MetricError, NoEffectWarning, PatchError
from conewise.model import Model
from conewise.runs.captured import Captured
from conewise.runs.interventions import Intervention, as_intervention
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.sweeps.sweep import Sweep

__all__ = [
    "ActivationCache",
    "FactoredMatrix",
    "HookPoint",
    "HookedConfig",
    "HookedModel",
    "PatchingResult",
    "Slice",
    "generic_activation_patch",
    "get_act_name",
    "get_act_patch_attn_head_all_pos_every",
    "get_act_patch_attn_head_by_pos_every",
    "get_act_patch_attn_head_k_all_pos",
    "get_act_patch_attn_head_k_by_pos",
    "get_act_patch_attn_head_out_all_pos",
    "get_act_patch_attn_head_out_by_pos",
    "get_act_patch_attn_head_pattern_all_pos",
    "get_act_patch_attn_head_pattern_by_pos",
    "get_act_patch_attn_head_pattern_dest_src_pos",
    "get_act_patch_attn_head_q_all_pos",
    "get_act_patch_attn_head_q_by_pos",
    "get_act_patch_attn_head_v_all_pos",
    "get_act_patch_attn_head_v_by_pos",
    "get_act_patch_attn_out",
    "get_act_patch_block_every",
    "get_act_patch_mlp_out",
    "get_act_patch_resid_mid",
    "get_act_patch_resid_pre",
    "layer_head_dest_src_pos_pattern_patch_setter",
    "layer_head_pattern_patch_setter",
    "layer_head_pos_pattern_patch_setter",
    "layer_head_vector_patch_setter",
    "layer_pos_head_vector_patch_setter",
    "layer_pos_patch_setter",
    "lm_accuracy",
    "lm_cross_entropy_loss",
    "make_df_from_ranges",
    "test_prompt",
    "to_numpy",
]

Tensor = torch.Tensor
Setter = Callable[[Tensor, Sequence[int], Tensor], Tensor]
Tokens = Tensor | Mapping[str, Any] | Reading
Cache = Reading | ActivationCache | Mapping[str, Tensor]
AnyModel = HookedModel | Model
Function = Callable[[Tensor], Any]
Metrics = Function | Metric | Mapping[str, Function | Metric]

make_df_from_ranges = ranges_frame


# -- what of an activation is patched, by the indices of a cell ------------------------------


SELECTED: dict[Setter, tuple[str, ...]] = {}
"""The axes that each setter of this module selects on, one for each index after the layer."""


def _setter(of: str, **dims: int) -> Setter:
    """Return a function that patches the activation `of`, at a layer and an index along each of `dims`."""

    def patch(corrupted: Tensor, index: Sequence[int], clean: Tensor) -> Tensor:
        where: list[Any] = [slice(None)] * corrupted.ndim
        for dim, number in zip(dims.values(), index[1:], strict=True):
            where[dim] = number
        corrupted[tuple(where)] = clean[tuple(where)]
        return corrupted

    patch.__doc__ = f"Patch {of} at index = [{', '.join(('layer', *dims))}]."
    SELECTED[patch] = tuple(dims)
    return patch


_VECTORS, _PATTERNS = "[batch, pos, head, ...]", "an attention pattern [batch, head, query_pos, key_pos]"

layer_pos_patch_setter = _setter("[batch, pos, ...]", pos=1)
layer_pos_head_vector_patch_setter = _setter(_VECTORS, pos=1, head=2)
layer_head_vector_patch_setter = _setter(_VECTORS, head=2)
layer_head_pattern_patch_setter = _setter(_PATTERNS, head=1)
layer_head_pos_pattern_patch_setter = _setter(_PATTERNS, head=1, query_pos=2)
layer_head_dest_src_pos_pattern_patch_setter = _setter(_PATTERNS, head=1, query_pos=2, key_pos=3)


# -- one sweep ---------------------------------------------------------------------------------


def generic_activation_patch(
    model: AnyModel,
    corrupted_tokens: Tokens,
    clean_cache: Cache,
    patching_metric: Metrics,
    patch_setter: Setter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: Any = None,
    return_index_df: bool = False,
    *,
    reduce: str = "scalar",
    baseline: bool = False,
    plan: bool = False,
    evaluator: str = "auto",
    max_memory: int | str | None = None,
    progress: bool | Callable[[int, int], None] | None = None,
) -> Any:
    """Patch clean activations into the corrupted run, one cell at a time, and read the metric.

    The cells are the rows of `index_df` (the first column is the layer), or all combinations along
    `index_axis_names`: layer, pos, head (head_index), dest_pos, src_pos. Returns a tensor with these axes, or
    with one element for each row; a `PatchingResult` with reduce="none", baseline=True or a mapping of
    metrics. `patching_metric` takes the logits [batch, pos, d_vocab] and returns a number; with reduce "mean"
    or "none", one for each prompt. A metric of Conewise (`cw.logit_diff(...)`) may be given as well.

    With `plan`, nothing is patched: the plan of the sweep is returned, which says what it will cost, and
    whose `run()` runs it.

    With a `patch_setter` of this module, all cells are evaluated as `evaluator` and `max_memory` say. Any
    other function may be given: its cells are evaluated one after another.
    """
    if reduce not in {"scalar", "mean", "none"}:
        raise ValueError(f"reduce is 'scalar', 'mean' or 'none', and {reduce!r} is none of these.")
    is_result = isinstance(patching_metric, Mapping) or reduce == "none" or baseline
    if is_result and return_index_df:
        raise ValueError("return_index_df goes with a tensor; a PatchingResult carries its index_df.")
    if (index_df is None) == (index_axis_names is None):
        raise ValueError("give either index_axis_names or index_df: the cells are those of one of them.")
    kind = OTHER_NAMES.get(activation_name, activation_name)
    base = _as_run(model, corrupted_tokens)
    axes: list[str] = []
    if index_df is None:
        axes = list(index_axis_names or ())
        lengths = [_length(base, kind, axis) for axis in axes]
        index_df = ranges_frame(lengths, axes)
    else:
        lengths = [len(index_df)]
    functions, per_prompt = _named(patching_metric), reduce != "scalar"
    cells = [[int(number) for number in row] for row in index_df.itertuples(index=False)]
    patches = _Patches(base, _source(base, clean_cache), patch_setter, kind, cells)
    if plan:
        sweep = patches.sweep(_metrics(functions, base, per_prompt, watching=True))
        return sweep.plan(max_memory, evaluator)
    options = {"evaluator": evaluator, "max_memory": max_memory, "progress": progress}
    try:
        table, own = patches.run(_metrics(functions, base, per_prompt, watching=True), options)
    except ReadsMoreError:  # in this world, a metric took another way than in the base
        table, own = patches.run(_metrics(functions, base, per_prompt, watching=False), options)
    if reduce != "none":
        table, own = table.mean(-1), own.mean(-1)
    where = next(iter(base.inputs.values())).device
    result = PatchingResult(
        values=table.reshape(len(table), *lengths, *table.shape[2:]).to(where, torch.float32),
        axis_names=axes,
        index_df=index_df,
        metric_names=list(functions),
        reduced=reduce != "none",
        baseline=own.to(where, torch.float32) if baseline else None,
        has_metric_axis=True,
    )
    if not isinstance(patching_metric, Mapping):
        result = result[result.metric_names[0]]
    if is_result:
        return result
    return (result.values, index_df) if return_index_df else result.values


@dataclass(frozen=True)
class _Patches:
    """The cells of one sweep: a setter and a kind of activation, and the runs between which it patches."""

    base: Reading
    source: Reading | Intervention
    setter: Setter
    kind: str
    cells: Sequence[Sequence[int]]

    def sweep(self, metrics: Sequence[Metric]) -> Sweep:
        """Return all cells as one sweep. Raises ValueError where the setter is none of this module's."""
        if self.setter not in SELECTED:
            raise ValueError(
                f"{getattr(self.setter, '__name__', self.setter)} is a patch setter of your own: its cells "
                "are evaluated one after another, without a plan. Leave out plan=True, or use a setter of "
                "this module."
            )
        places = [_place(self.base.model, self.kind, cell, SELECTED[self.setter]) for cell in self.cells]
        return Sweep(self.base.model, places, base=self.base, source=self.source, metric=list(metrics))

    def run(self, metrics: Sequence[Metric], options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the metrics of all cells, [metric, cell, prompt], and of the base, [metric, prompt].

        Cells whose setter is any function are evaluated one by one, each in a fork of the base.
        """
        if self.setter in SELECTED:
            sweep = self.sweep(metrics)
            return sweep.run(**options).per_prompt, sweep.read_metrics(self.base)
        base, source = self.base, as_intervention(self.source, self.base.model)
        first = Place(self.kind, self.cells[0][0])
        sweep = Sweep(base.model, [first], base=base, source=source, metric=list(metrics))
        rows = []
        for cell in self.cells:
            place = Place(self.kind, cell[0])
            clean = source.part(place, base)
            with warnings.catch_warnings(), base.fork() as world:
                warnings.simplefilter("ignore", NoEffectWarning)  # a cell may well be the same in both runs
                world.patch(place, partial(self._set, list(cell), clean))
                rows.append(sweep.read_metrics(world))
        return torch.stack(rows, 1), sweep.read_metrics(base)

    def _set(self, cell: list[int], clean: Any, present: Tensor) -> Tensor:
        return self.setter(present, cell, clean)


def _as_run(model: AnyModel, tokens: Tokens) -> Reading:
    captured = model.captured if isinstance(model, HookedModel) else model
    if isinstance(tokens, Reading):
        captured.expect_own("the corrupted run is one", tokens.model)
        return tokens
    if isinstance(tokens, Mapping):
        return captured.run(**tokens)
    return model.reading(tokens) if isinstance(model, HookedModel) else model.run(tokens)


def _source(base: Reading, cache: Cache) -> Reading | Intervention:
    """Return the source of the clean values: a run, where the cache is that of one and nothing else."""
    if isinstance(cache, Reading):
        return cache
    values = cache.cache_dict if isinstance(cache, ActivationCache) else cache
    if isinstance(values, RunValues) and values.is_as_run:
        return values.run
    return _from_mapping(base.model, values)


def _from_mapping(model: Captured, cache: Mapping[str, Tensor]) -> Intervention:
    """The clean values, from a mapping of hook names to tensors."""

    def part(place: Place, base: Reading) -> Tensor:
        found = model.locate(place)
        try:
            whole = cache[found.site.name]
        except KeyError:
            raise PatchError(f"the clean cache has no {found.site.name!r}, which is to be patched.") from None
        present = base.read(Place(place.name, place.layer, place.stack))
        if whole.shape != present.shape:
            raise PatchError(
                f"the clean cache's {found.site.name!r} has shape {tuple(whole.shape)}, and this model's is "
                f"{tuple(present.shape)} ({', '.join(found.view.axes)})."
            )
        return whole[resolved(found.view.axes, place.part, whole.shape)]

    return Intervention("clean cache", part)


def _place(model: Captured, kind: str, cell: Sequence[int], axes: Sequence[str]) -> Place:
    layer, *indices = cell
    if len(indices) != len(axes):
        raise PatchError(
            f"a cell has the indices {list(cell)}; this patch setter takes the layer, {', '.join(axes)}."
        )
    own = model.locate(Place(kind, layer)).view.axes
    named = ["kv_head" if axis == "head" and "kv_head" in own else axis for axis in axes]
    return Place(kind, layer, part=MappingProxyType(dict(zip(named, indices, strict=True))))


def _length(base: Reading, kind: str, axis: str) -> int:
    """Return the length of an axis, as TransformerLens names it."""
    layers = base.model.sites.layers(kind)
    if axis == "layer":
        if not layers:
            base.model.locate(Place(kind, 0))  # says why there is none
        return len(layers)
    place = Place(kind, layers[0] if layers else 0)
    lengths = dict(zip(base.model.locate(place).view.axes, base.read(place).shape, strict=True))
    own = {"dest_pos": "query_pos", "src_pos": "key_pos", "head_index": "head"}.get(axis, axis)
    if own == "head" and "kv_head" in lengths:
        own = "kv_head"
    if own not in lengths:
        raise PatchError(f"{kind} has no axis {axis!r}; its axes are {', '.join(lengths)}.")
    return int(lengths[own])


# -- metrics -----------------------------------------------------------------------------------


def _metrics(
    functions: Mapping[str, Function | Metric], base: Reading, per_prompt: bool, *, watching: bool
) -> list[Metric]:
    logits = base.outputs if isinstance(base.outputs, Tensor) else base.logits
    return [_metric(name, one, logits, per_prompt, watching) for name, one in functions.items()]


def _named(given: Metrics) -> dict[str, Function | Metric]:
    if not isinstance(given, Mapping):
        return {"metric": given}
    if not given:
        raise ValueError("a mapping of metrics has at least one.")
    return dict(given)


def _metric(name: str, given: Function | Metric, logits: Tensor, per_prompt: bool, watching: bool) -> Metric:
    """A function of one world's logits as a metric of a sweep."""
    if isinstance(given, Metric):
        return replace(given, name=name, tokens=(), among=None)
    batch, length = logits.shape[:2]
    is_last = watching and logits.ndim == 3 and reads_only_last(given, logits)

    def compute(stack: Tensor) -> Tensor:
        rows = []
        for own in stack:
            found = given(LastPosition.of(own, length) if is_last else own)
            rows.append(_checked(name, torch.as_tensor(found), batch, per_prompt))
        return torch.stack(rows)

    return Metric(name, compute, last=is_last, pos=(-1,))


def _checked(name: str, found: Tensor, batch: int, per_prompt: bool) -> Tensor:
    if per_prompt and found.shape != (batch,):
        raise MetricError(
            f"the metric {name!r} returned shape {tuple(found.shape)}; expected one number for each of the "
            f"{batch} prompts, shape ({batch},), as reduce='mean' and 'none' go by prompts."
        )
    if not per_prompt and found.ndim != 0:
        raise MetricError(
            f"the metric {name!r} returned shape {tuple(found.shape)}; expected one number. Keep one for "
            "each prompt with reduce='none', or average them with reduce='mean'."
        )
    return found.detach().expand(batch)


# -- the sweeps people ask for by name -----------------------------------------------------------


def _sweep(kind: str, setter: Setter, axes: str, what: str) -> Callable[..., Any]:
    def sweep(
        model: AnyModel,
        corrupted_tokens: Tokens,
        clean_cache: Cache,
        patching_metric: Metrics,
        **options: Any,
    ) -> Any:
        return generic_activation_patch(
            model, corrupted_tokens, clean_cache, patching_metric, setter, kind, axes.split(), **options
        )

    sweep.__doc__ = f"Patch {what}: [{', '.join(axes.split())}]. See `generic_activation_patch`."
    return sweep


_stream = partial(_sweep, setter=layer_pos_patch_setter, axes="layer pos")
_by_pos = partial(_sweep, setter=layer_pos_head_vector_patch_setter, axes="layer pos head")
_all_pos = partial(_sweep, setter=layer_head_vector_patch_setter, axes="layer head")
_pattern = partial(_sweep, "pattern")

get_act_patch_resid_pre = _stream("resid_pre", what="the residual stream as it enters each block")
get_act_patch_resid_mid = _stream("resid_mid", what="the residual stream between attention and MLP")
get_act_patch_attn_out = _stream("attn_out", what="what attention adds to the stream")
get_act_patch_mlp_out = _stream("mlp_out", what="what each MLP adds to the stream")

get_act_patch_attn_head_out_by_pos = _by_pos("z", what="each head's output at each position")
get_act_patch_attn_head_q_by_pos = _by_pos("q", what="each head's query at each position")
get_act_patch_attn_head_k_by_pos = _by_pos("k", what="each head's key at each position")
get_act_patch_attn_head_v_by_pos = _by_pos("v", what="each head's value at each position")
get_act_patch_attn_head_pattern_by_pos = _pattern(
    layer_head_pos_pattern_patch_setter, "layer head_index dest_pos", "each row of each head's pattern"
)
get_act_patch_attn_head_pattern_dest_src_pos = _pattern(
    layer_head_dest_src_pos_pattern_patch_setter,
    "layer head_index dest_pos src_pos",
    "each entry of each head's pattern",
)

get_act_patch_attn_head_out_all_pos = _all_pos("z", what="each head's output")
get_act_patch_attn_head_q_all_pos = _all_pos("q", what="each head's queries")
get_act_patch_attn_head_k_all_pos = _all_pos("k", what="each head's keys")
get_act_patch_attn_head_v_all_pos = _all_pos("v", what="each head's values")
get_act_patch_attn_head_pattern_all_pos = _pattern(
    layer_head_pattern_patch_setter, "layer head_index", "each head's attention pattern"
)


def _every(axes: str, what: str, **sweeps: Callable[..., Any]) -> Callable[..., Any]:
    def every(
        model: AnyModel, corrupted_tokens: Tokens, clean_cache: Cache, metric: Metrics, **options: Any
    ) -> Any:
        base, metrics = _as_run(model, corrupted_tokens), _named(metric)
        results = [sweep(model, base, clean_cache, metrics, **options) for sweep in sweeps.values()]
        if options.get("plan"):
            return dict(zip(sweeps, results, strict=True))
        together = stacked_types(results, axes.split(), list(sweeps))
        if isinstance(metric, Mapping):
            return together
        together = together["metric"]
        is_result = options.get("reduce") == "none" or options.get("baseline")
        return together if is_result else together.values

    every.__doc__ = f"Patch {what}: [patch_type = {len(sweeps)}, {', '.join(axes.split())}]." + (
        " Where several heads share keys and values, the rows of k and v have zeros behind the last of them."
        if "k" in sweeps
        else ""
    )
    return every


get_act_patch_block_every = _every(
    "layer pos",
    "resid_pre, attn_out and mlp_out",
    resid_pre=get_act_patch_resid_pre,
    attn_out=get_act_patch_attn_out,
    mlp_out=get_act_patch_mlp_out,
)
get_act_patch_attn_head_all_pos_every = _every(
    "layer head",
    "each head's output, queries, keys, values and pattern",
    out=get_act_patch_attn_head_out_all_pos,
    q=get_act_patch_attn_head_q_all_pos,
    k=get_act_patch_attn_head_k_all_pos,
    v=get_act_patch_attn_head_v_all_pos,
    pattern=get_act_patch_attn_head_pattern_all_pos,
)
get_act_patch_attn_head_by_pos_every = _every(
    "layer pos head",
    "the same at each position",
    out=get_act_patch_attn_head_out_by_pos,
    q=get_act_patch_attn_head_q_by_pos,
    k=get_act_patch_attn_head_k_by_pos,
    v=get_act_patch_attn_head_v_by_pos,
    pattern=get_act_patch_attn_head_pattern_by_pos,
)
