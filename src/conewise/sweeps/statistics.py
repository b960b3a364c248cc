"""Statistics over prompts: how far the mean effect of a cell can be trusted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from conewise.errors import SweepError
from conewise.program.tensors import Tensor

LEVEL, RESAMPLES = 0.95, 10_000
AT_ONCE = 1 << 22
"""How many numbers are held at a time, for cells and resamples."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """What the prompts say of the effect of each cell, shaped like `Result.values`.

    `mean` is the effect, averaged over prompts, and `sem` the standard error of that. `low` and `high` are
    the percentile bootstrap interval of `level`: prompts drawn with replacement, `resamples` times, the same
    for all cells. `p` is of a paired permutation test: how often the mean is at least as far from 0, either
    way, where the sign of each prompt's effect is chosen at random. All signs are tried where there are no
    more than `resamples` of them (`is_exact`); p is not corrected for the number of cells.
    """

    mean: Tensor
    sem: Tensor
    low: Tensor
    high: Tensor
    p: Tensor
    prompts: int
    level: float
    resamples: int
    is_exact: bool

    def shaped(self, shape: Callable[[Tensor], Tensor]) -> Statistics:
        """The same in another shape."""
        mean, sem, low, high, p = map(shape, (self.mean, self.sem, self.low, self.high, self.p))
        return replace(self, mean=mean, sem=sem, low=low, high=high, p=p)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.mean.shape)) or "1"
        return f"Statistics of {shape} effects over {self.prompts} prompts: mean, sem, low, high, p"


def statistics_of(
    effects: Tensor, *, level: Any = LEVEL, resamples: Any = RESAMPLES, seed: int = 0
) -> Statistics:
    """The statistics of effects [cell, prompt]; cells with an infinite effect have NaN but for the mean.

    Raises SweepError where there is one prompt only, or for a level or a number that is none.
    """
    cells, prompts = effects.shape
    if prompts < 2:
        raise SweepError(
            "statistics over prompts need two or more of them, and this result has one. Ask about more."
        )
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise SweepError(f"level is {level!r}; it is a share between 0 and 1, such as 0.95.")
    if isinstance(resamples, bool) or not isinstance(resamples, int) or resamples < 1:
        raise SweepError(f"resamples is {resamples!r}; it is a number of 1 or more.")
    effects = effects.to("cpu", torch.float64)
    drawn = _drawn(prompts, resamples, seed)
    is_exact = 2**prompts <= resamples
    signs = _all_signs(prompts) if is_exact else _random_signs(prompts, resamples, seed)
    mean = effects.mean(-1)
    low, high, p = (torch.full((cells,), math.nan, dtype=torch.float64) for _ in range(3))
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    for rows in _chunks(cells, max(drawn.shape[1], signs.shape[1])):
        low[rows], high[rows] = torch.quantile(effects[rows] @ drawn, ends, dim=-1)
        # Sums of the same numbers in another order differ by rounding, and are as large.
        least = mean[rows].abs() - 1e-12 * effects[rows].abs().amax(-1)
        counts = ((effects[rows] @ signs).abs() >= least[:, None]).sum(-1).double()
        p[rows] = counts / signs.shape[1] if is_exact else (counts + 1) / (signs.shape[1] + 1)
    is_finite = effects.isfinite().all(-1)
    low, high, p = (torch.where(is_finite, row, math.nan) for row in (low, high, p))
    sem = torch.where(is_finite, effects.std(-1) / math.sqrt(prompts), math.nan)
    return Statistics(mean, sem, low, high, p, prompts, float(level), resamples, is_exact)


def _chunks(cells: int, columns: int) -> Iterator[slice]:
    step = max(1, AT_ONCE // columns)
    return (slice(start, start + step) for start in range(0, cells, step))


def _drawn(prompts: int, resamples: int, seed: int) -> Tensor:
    """The weight of each prompt in the mean of each resample: [prompt, resample]."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(prompts, (resamples, prompts), generator=generator)
    counts = torch.zeros(resamples, prompts, dtype=torch.float64)
    counts.scatter_add_(1, picked, torch.ones_like(picked, dtype=torch.float64))
    return counts.T / prompts


def _all_signs(prompts: int) -> Tensor:
    """Every choice of signs, each over the number of prompts: [prompt, choice]."""
    rows = list(itertools.product((-1.0, 1.0), repeat=prompts))
    return torch.tensor(rows, dtype=torch.float64).T / prompts


def _random_signs(prompts: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    coins = torch.randint(2, (prompts, count), generator=generator)
    return (2.0 * coins - 1.0).double() / prompts
