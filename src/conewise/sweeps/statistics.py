"""Statistics over prompts: how far the mean effect of a cell can be trusted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from conewise.errors import SweepError
from conewise.program.tensors import Tensor

LEVEL, RESAMPLES, FEW = 0.95, 10_000, 5
MOST_RESAMPLES = 1_000_000
AT_ONCE = 1 << 22
"""The numbers that are held at a time: of cells and choices of signs, and of choices and prompts."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the effect of each cell over prompts, shaped like `Result.values`.

    `mean` is the effect, averaged over prompts, and `sem` its standard error. `low` and `high` are the
    interval of `level` by Student's t: the mean ± t · sem, with one degree of freedom fewer than there are
    prompts. Its coverage is `level` if effects are normally distributed, and slightly lower if they are
    skewed; `note` warns if there are too few prompts to tell. `p` is that of a two-sided paired permutation
    test: the frequency with which the mean is at least as far from 0 when the sign of each prompt's effect is
    chosen at random. All sign patterns are used if there are no more than `resamples` of them (`is_exact`); p
    is not corrected for the number of cells.
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

    @property
    def note(self) -> str:
        """A caveat if there are fewer than five prompts; else empty."""
        if self.prompts >= FEW:
            return ""
        return (
            f"{self.prompts} prompts: the intervals take effects to be normally distributed, and p is "
            f"{2 ** (1 - self.prompts):.3g} or more whatever they are"
        )

    def shaped(self, shape: Callable[[Tensor], Tensor]) -> Statistics:
        """The same in another shape."""
        mean, sem, low, high, p = map(shape, (self.mean, self.sem, self.low, self.high, self.p))
        return replace(self, mean=mean, sem=sem, low=low, high=high, p=p)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.mean.shape)) or "1"
        note = f" ({self.note})" if self.note else ""
        return f"Statistics of {shape} effects over {self.prompts} prompts: mean, sem, low, high, p{note}"


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
    if (
        isinstance(resamples, bool)
        or not isinstance(resamples, int)
        or not (1 <= resamples <= MOST_RESAMPLES)
    ):
        raise SweepError(f"resamples is {resamples!r}; it is a number from 1 to {MOST_RESAMPLES:,}.")
    effects = effects.to("cpu", torch.float64)
    is_exact = 2**prompts <= resamples
    choices = 2**prompts if is_exact else resamples
    mean = effects.mean(-1)
    p = torch.full((cells,), math.nan, dtype=torch.float64, device="cpu")
    for rows in _chunks(cells, choices):
        # Sums of the same numbers in another order differ by rounding, and are as large.
        least = mean[rows].abs() - 1e-12 * effects[rows].abs().amax(-1)
        means = torch.zeros(len(least), choices, dtype=torch.float64, device="cpu")
        for some, signs in _all_signs(prompts) if is_exact else _random_signs(prompts, choices, seed):
            means.addmm_(effects[rows, some], signs, alpha=1 / prompts)
        counts = (means.abs_() >= least[:, None]).sum(-1).double()
        p[rows] = counts / choices if is_exact else (counts + 1) / (choices + 1)
    is_finite = effects.isfinite().all(-1)
    p = torch.where(is_finite, p, math.nan)
    sem = torch.where(is_finite, effects.std(-1) / math.sqrt(prompts), math.nan)
    reach = student_quantile(level, prompts - 1) * sem
    return Statistics(mean, sem, mean - reach, mean + reach, p, prompts, float(level), resamples, is_exact)


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, AT_ONCE // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _all_signs(prompts: int) -> Iterator[tuple[slice, Tensor]]:
    """Every choice of signs, [prompt, choice], of some prompts at a time."""
    choices = torch.arange(2**prompts, device="cpu")
    for some in _chunks(prompts, 4 * 2**prompts):
        numbers = torch.arange(prompts, device="cpu")[some]
        yield some, ((choices >> numbers[:, None]) & 1).double().mul_(2).sub_(1)


def _random_signs(prompts: int, count: int, seed: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield `count` choices of signs, [prompt, choice], some prompts at a time; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed + 1)
    for some in _chunks(prompts, 4 * count):
        drawn = len(range(prompts)[some])
        yield (
            some,
            torch.randint(2, (drawn, count), generator=generator, device="cpu").double().mul_(2).sub_(1),
        )


@functools.cache
def student_quantile(level: float, freedom: int) -> float:
    """The t within which a share `level` of Student's distribution lies, on both sides of 0."""
    low, high = 0.0, 1e7
    for _ in range(90):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _student_share(t: float, freedom: int) -> float:
    """The share of Student's distribution within −t and t: a finite sum, for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if freedom == 1:
        return 2 * angle / math.pi
    total = term = cosine if freedom % 2 else 1.0
    for number in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
