"""What a sweep in the manner of TransformerLens returns when more than one number a cell is asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from conewise.extras import needs

Tensor = torch.Tensor


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
        """What each patch changes: the values minus the corrupted run's."""
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
