"""Statistics of two lists of numbers, and of a sample: correlations of values and ranks, bounds of shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def pearson(one: Numbers, other: Numbers) -> float:
    """The correlation of values; NaN where one of the lists is constant."""
    left, right = one - one.mean(), other - other.mean()
    size = math.sqrt(float((left**2).sum()) * float((right**2).sum()))
    return float((left * right).sum()) / size if size else math.nan


def spearman(one: Numbers, other: Numbers) -> float:
    """The correlation of ranks; equal values share theirs."""
    return pearson(_ranks(one), _ranks(other))


def kendall(one: Numbers, other: Numbers) -> float:
    """Kendall's τ-b: how many pairs stand in the same order less how many do not, ties counted out."""
    order = np.lexsort((other, one))
    left, right = one[order], other[order]
    pairs = len(one) * (len(one) - 1) // 2
    ties_left, ties_right = _tied(left), _tied(np.sort(right))
    both = _tied_rows(left, right)
    swaps = _inversions(right)
    size = math.sqrt((pairs - ties_left) * (pairs - ties_right))
    return (pairs - ties_left - ties_right + both - 2 * swaps) / size if size else math.nan


def _ranks(values: Numbers) -> Numbers:
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values), dtype=np.float64)
    _, group = np.unique(values, return_inverse=True)
    sums = np.bincount(group, weights=ranks)
    return np.asarray((sums / np.bincount(group))[group])


def _tied(ordered: Numbers) -> int:
    """How many pairs of a sorted list are equal."""
    _, counts = np.unique(ordered, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def _tied_rows(one: Numbers, other: Numbers) -> int:
    _, counts = np.unique(np.stack([one, other]), axis=1, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(values: Numbers) -> int:
    """How many pairs of a list stand in the wrong order, by merging sorted halves."""
    if len(values) < 2:
        return 0
    middle = len(values) // 2
    first, second = values[:middle], values[middle:]
    inside = _inversions(first) + _inversions(second)
    before = np.sort(first)
    return inside + int((len(before) - np.searchsorted(before, second, side="right")).sum())


def share_bound(found: int, tried: int, level: float) -> float:
    """The largest share of which `found` or fewer of `tried` would still be seen, with 1 − level."""
    if found >= tried:
        return 1.0
    low, high = found / tried, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(found, tried, middle) > 1 - level else (low, middle)
    return high


def _at_most(found: int, tried: int, share: float) -> float:
    """How likely so many or fewer are; by logarithms, since ways to draw a large sample are too many."""
    ways = math.lgamma(tried + 1)
    return sum(
        math.exp(
            ways
            - math.lgamma(one + 1)
            - math.lgamma(tried - one + 1)
            + one * math.log(share)
            + (tried - one) * math.log1p(-share)
        )
        for one in range(found + 1)
    )


def largest(values: Sequence[float] | Numbers, count: int) -> list[int]:
    """The numbers of the largest values, either way, the first of equal ones first."""
    return sorted(range(len(values)), key=lambda number: -abs(float(values[number])))[:count]
