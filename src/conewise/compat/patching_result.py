"""The result of a sweep in the manner of TransformerLens, with more than one number for each cell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from conewise.extras import needs

Tensor = torch.Tensor

ROW_BY_ROW = frozenset(
    {"bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "to"}
)
"""Functions that change each position on its own: their result may be watched in place of the logits."""
ALONG_THE_VOCABULARY = frozenset({"log_softmax", "softmax"})
"""The same, if the dimension is the last one."""


class ReadsMoreError(Exception):
    """Something else than the last position was read of logits that hold no other."""


class LastPosition(Tensor):
    """Logits [prompt, pos, vocabulary] of which only the last position is real: reading another one raises.

    Sizes, dtype and device may be asked for. What is taken of the last position is an ordinary tensor.
    """

    @classmethod
    def of(cls, last: Tensor, length: int) -> LastPosition:
        """The logits [prompt, vocabulary] of the last of `length` positions."""
        return last[:, None].expand(-1, length, -1).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every use of such a tensor comes by here."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        logits = args[0] if args else None
        # The first argument is the only one that may be watched: `gather` by logits reads all of them.
        if not isinstance(logits, cls) or any(isinstance(arg, cls) for arg in (*args[1:], *options.values())):
            raise ReadsMoreError(name)
        with torch._C.DisableTorchFunctionSubclass():
            plain = logits.as_subclass(Tensor)
            if name == "__getitem__":
                if not reads_last(args[1], plain.shape):
                    raise ReadsMoreError(name)
                return plain[args[1]]
            found = func(plain, *args[1:], **options)
            if not isinstance(found, Tensor):
                if name in {"__get__", "dim", "numel", "size", "__len__", "is_floating_point"}:
                    return found
                raise ReadsMoreError(name)
            along = options.get("dim", args[1] if len(args) > 1 else None)
            if name in ROW_BY_ROW or (name in ALONG_THE_VOCABULARY and along in {-1, plain.ndim - 1}):
                return found.as_subclass(cls)
            raise ReadsMoreError(name)


def reads_last(index: Any, shape: Sequence[int]) -> bool:
    """True if an index into [prompt, pos, vocabulary] reads the last position and no other."""
    entries = list(index) if isinstance(index, tuple) else [index]
    masks = {torch.bool, torch.uint8}
    if any(one is None or isinstance(one, bool) or getattr(one, "dtype", None) in masks for one in entries):
        return False
    for place, entry in enumerate(entries):
        if entry is Ellipsis:
            entries[place : place + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
            break
    if len(entries) < 2:
        return False
    entry, length = entries[1], shape[1]
    if isinstance(entry, slice):
        return list(range(length))[entry] == [length - 1]
    numbers = torch.as_tensor(entry).reshape(-1).tolist()
    return bool(numbers) and all(number in {-1, length - 1} for number in numbers)


def reads_only_last(function: Callable[[Tensor], Any], logits: Tensor) -> bool:
    """True if a function of these logits reads their last position alone, as far as this one call shows."""
    try:
        with torch.no_grad():
            function(LastPosition.of(logits[:, -1], logits.shape[1]))
    except ReadsMoreError:
        return False
    return True


@dataclass(frozen=True)
class PatchingResult:
    """Values laid out as [metric?, *axes, prompt?].

    The metric axis is there with `has_metric_axis` (metrics were given as a mapping), the prompt axis unless
    `reduced`. The axes between are `axis_names`, or one flat axis where an `index_df` was given. `baseline`
    is the corrupted run's own metric, [metric?, prompt?].
    """

    values: Tensor
    axis_names: list[str]
    index_df: Any
    metric_names: list[str]
    reduced: bool
    baseline: Tensor | None = None
    has_metric_axis: bool = False
    patch_type_names: list[str] | None = None

    def __getitem__(self, metric_name: str) -> PatchingResult:
        """One metric's result."""
        if metric_name not in self.metric_names:
            raise KeyError(f"no metric {metric_name!r}; there are {', '.join(self.metric_names)}")
        if not self.has_metric_axis:
            return self
        number = self.metric_names.index(metric_name)
        baseline = None if self.baseline is None else self.baseline[number]
        return replace(
            self,
            values=self.values[number],
            metric_names=[metric_name],
            baseline=baseline,
            has_metric_axis=False,
        )

    def mean(self) -> Tensor:
        """The mean over prompts of each cell."""
        return self.values if self.reduced else self.values.mean(-1)

    def stderr(self) -> Tensor:
        """The standard error of that mean."""
        if self.reduced:
            raise ValueError("the standard error needs the values of each prompt: sweep with reduce='none'.")
        deviation: Tensor = self.values.std(-1)
        return deviation / math.sqrt(self.values.shape[-1])

    def effect(self) -> Tensor:
        """The change of each patch: the values minus the corrupted run's."""
        return self.values - self._spread(self._expected_baseline())

    def normalized(self, clean_baseline: Tensor) -> Tensor:
        """The values with 0 for the corrupted run and 1 for the clean one, whose metric this is."""
        corrupted = self._expected_baseline()
        clean = torch.as_tensor(clean_baseline).to(corrupted)
        if clean.shape != corrupted.shape:
            raise ValueError(
                f"the clean metric has shape {tuple(clean.shape)}; expected the corrupted one's, "
                f"{tuple(corrupted.shape)}."
            )
        return self.effect() / self._spread(clean - corrupted)

    def to_dataframe(self) -> Any:
        """One row for each metric, cell and prompt."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        cells = self.index_df.to_dict("records")
        table = self.values.detach().cpu().reshape(len(self.metric_names), len(cells), -1).tolist()
        rows = []
        for name, of_metric in zip(self.metric_names, table, strict=True):
            for cell, values in zip(cells, of_metric, strict=True):
                named = {"metric": name, **cell}
                if self.patch_type_names is not None:
                    named["patch_type_name"] = self.patch_type_names[int(cell["patch_type"])]
                for prompt, value in enumerate(values):
                    example = {} if self.reduced else {"example": prompt}
                    rows.append({**named, **example, "value": value})
        return pd.DataFrame(rows)

    def _expected_baseline(self) -> Tensor:
        if self.baseline is None:
            raise ValueError("no baseline to compare with: sweep with baseline=True.")
        return self.baseline

    def _spread(self, baseline: Tensor) -> Tensor:
        """Something shaped like the baseline, at every cell."""
        lead = int(self.has_metric_axis)
        cells = self.values.ndim - baseline.ndim
        return baseline.reshape(*baseline.shape[:lead], *[1] * cells, *baseline.shape[lead:])


def stacked_types(
    results: Sequence[PatchingResult], axes: Sequence[str], names: Sequence[str]
) -> PatchingResult:
    """Several results as one, along a first axis `patch_type`, each with its axes in the order `axes`.

    Where one has fewer heads than another (heads of keys that several heads share), zeros fill it up.
    """
    first = results[0]
    lead = int(first.has_metric_axis)
    values = [_permuted(one, lead, axes) for one in results]
    if "head" in axes:
        dim = lead + list(axes).index("head")
        heads = max(value.shape[dim] for value in values)
        values = [_filled_up(value, dim, heads) for value in values]
    together = torch.stack(values, lead)
    columns = ["patch_type", *axes]
    index = ranges_frame(together.shape[lead : lead + len(columns)], columns)
    return replace(first, values=together, axis_names=columns, index_df=index, patch_type_names=list(names))


_SAME_AXIS = {"head_index": "head", "dest_pos": "pos"}


def _permuted(result: PatchingResult, lead: int, axes: Sequence[str]) -> Tensor:
    own = [_SAME_AXIS.get(name, name) for name in result.axis_names]
    cells = [lead + own.index(axis) for axis in axes]
    return result.values.permute(*range(lead), *cells, *range(lead + len(axes), result.values.ndim))


def _filled_up(value: Tensor, dim: int, length: int) -> Tensor:
    shape = [*value.shape[:dim], length - value.shape[dim], *value.shape[dim + 1 :]]
    return torch.cat([value, value.new_zeros(shape)], dim)


def ranges_frame(lengths: Sequence[int], names: Sequence[str]) -> Any:
    """A DataFrame of every combination of indices below `lengths`, the last one running fastest."""
    with needs("tables"):
        import pandas as pd  # noqa: PLC0415

    return pd.DataFrame(list(itertools.product(*map(range, lengths))), columns=list(names))
