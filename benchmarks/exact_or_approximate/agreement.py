"""How far approximate effects are off exact ones, as plain numbers with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.exact_or_approximate.pieces import Effects, Numbers
from conewise.attributing.approximation import (
    LEVEL,
    Comparison,
    SampleError,
    largest,
    pearson,
    share_bound,
    spearman,
)

Chosen = npt.NDArray[np.int64]

RESAMPLES = 1000
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


def interval(of: Callable[[Chosen], float], count: int) -> list[float]:
    """A bootstrap interval at 95 %: a statistic of `count` things, drawn anew with replacement."""
    generator = np.random.default_rng(0)
    found = [of(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    return [float(end) for end in np.quantile(found, ENDS)]


def compared(approx: Effects, exact: Effects, method: str, sizes: Sequence[int]) -> dict[str, Any]:
    """The comparison of mean effects of all cells; `sizes` are where ranks are compared.

    Of a method that was computed for some of the prompts, those are compared. The interval is over prompts,
    where there are several: as many are drawn anew, for both sides alike.
    """
    assert approx.names == exact.names
    prompts = approx.per_prompt.shape[-1]
    exact = exact.of_prompts(slice(0, prompts))
    sizes = [min(size, len(exact.names)) for size in sizes]
    one = Comparison(exact.names, approx.mean, exact.mean, "", method, sizes[-1])
    found = {
        "pairs": prompts,
        "cells": len(exact.names),
        "pearson": one.pearson,
        "pearson_without_largest": _without_largest(approx.mean, exact.mean),
        "spearman": one.spearman,
        "kendall": one.kendall,
        "sign_errors": len(one.sign_errors),
        "sign_errors_of_largest": {
            "of": sizes[-1],
            "names": list(one.sign_errors_at_k),
        },
        "ranks": [ranks(approx.mean, exact.mean, exact.names, size) for size in sizes],
        "size": size_of(approx.mean, exact.mean, sizes[0]),
        "largest": first_of(approx.mean, exact.mean, exact.names),
        "worst": [list(row) for row in one.worst(5)],
        "flops_of_exact": approx.flops / exact.flops,
    }
    if prompts > 1:
        single = [spearman(approx.per_prompt[:, at], exact.per_prompt[:, at]) for at in range(prompts)]
        found["spearman_interval"] = interval(
            lambda drawn: spearman(approx.per_prompt[:, drawn].mean(-1), exact.per_prompt[:, drawn].mean(-1)),
            prompts,
        )
        found["spearman_of_one_prompt"] = [min(single), float(np.median(single)), max(single)]
    return found


def _without_largest(approx: Numbers, exact: Numbers) -> float:
    """The correlation of all cells but the one with the largest exact effect, on which it may hang."""
    others = np.arange(len(exact)) != largest(exact, 1)[0]
    return pearson(approx[others], exact[others])


def ranks(approx: Numbers, exact: Numbers, names: Sequence[str], size: int) -> dict[str, Any]:
    """Which of the `size` largest exact effects are not among as many largest approximate ones."""
    place = {number: rank for rank, number in enumerate(largest(approx, len(approx)), start=1)}
    missed = [number for number in largest(exact, size) if place[number] > size]
    return {
        "k": size,
        "overlap": 1 - len(missed) / size,
        "missed": [
            {
                "name": names[number],
                "rank": place[number],
                "approx": float(approx[number]),
                "exact": float(exact[number]),
            }
            for number in missed[:10]
        ],
    }


def first_of(approx: Numbers, exact: Numbers, names: Sequence[str]) -> list[list[Any]]:
    """The ten largest exact effects: name, approximate effect, exact effect."""
    return [[names[at], float(approx[at]), float(exact[at])] for at in largest(exact, 10)]


def size_of(approx: Numbers, exact: Numbers, count: int) -> float:
    """The median share of an exact effect that the method gives, over the largest exact ones."""
    first = largest(exact, count)
    return float(np.median(approx[first] / exact[first]))


def of_a_sample(
    approx: Effects,
    exact: Effects,
    drawn: Sequence[str],
    picked: Sequence[str],
    method: str,
    sizes: Sequence[int],
) -> dict[str, Any]:
    """Effects of some cells beside the exact ones: of those `drawn` of all at random, and of those `picked`.

    Correlations are those of the sample, with intervals over its cells. Ranks are among the cells that were
    computed, so that overlaps are upper bounds: `beyond_at_most` says how many that were not picked may be
    larger than the k-th of them, at 95 %.
    """
    names, drawn = exact.names, tuple(drawn)
    left, right = approx.at(drawn), exact.at(drawn)
    one = Comparison(drawn, left, right, "", method, 1)
    every, number = approx.mean, {name: at for at, name in enumerate(approx.names)}
    mine, theirs = approx.at(names), exact.mean
    # Of others nothing is known, and none of them is counted among the largest.
    known = np.zeros(len(every))
    known[[number[name] for name in names]] = theirs
    order = largest(every, len(every))
    others = [at for at, name in enumerate(drawn) if name not in set(picked)]
    rows = []
    for size in sizes:
        row = ranks(every, known, approx.names, min(size, len(names)))
        least = float(np.sort(np.abs(theirs))[-row["k"]])
        over = int((np.abs(right[others]) > least).sum())
        row |= {
            "least": least,
            "of_sample": over,
            "beyond_at_most": share_bound(over, len(others), LEVEL) * (len(every) - len(picked)),
        }
        first = [approx.names[at] for at in order[: row["k"]]]
        row["sign_errors_of_its_own"] = (
            int((approx.at(tuple(first)) * exact.at(tuple(first)) < 0).sum())
            if set(first) <= set(names)
            else None
        )
        rows.append(row)
    return {
        "cells": len(every),
        "computed": len(names),
        "sample": len(drawn),
        "pearson": one.pearson,
        "pearson_interval": interval(lambda at: pearson(left[at], right[at]), len(drawn)),
        "spearman": one.spearman,
        "spearman_interval": interval(lambda at: spearman(left[at], right[at]), len(drawn)),
        "kendall": one.kendall,
        "sign_errors": len(one.sign_errors) / len(drawn),
        "sign_errors_interval": interval(lambda at: float((left[at] * right[at] < 0).mean()), len(drawn)),
        "off": _off(left, right),
        "interval": held(approx, exact, drawn, picked),
        "ranks": rows,
        "size": size_of(mine, theirs, sizes[-1]),
        "largest": first_of(mine, theirs, names),
        "worst": [list(row) for row in Comparison(names, mine, theirs, "", method, 1).worst(5)],
    }


def _off(approx: Numbers, exact: Numbers) -> float:
    """The mean size of errors, as a share of the mean size of exact effects."""
    return float(np.abs(approx - exact).mean() / np.abs(exact).mean())


def held(approx: Effects, exact: Effects, drawn: Sequence[str], picked: Sequence[str]) -> dict[str, float]:
    """How often `check`'s interval, made of half the sample, holds for the other half and for the picked."""
    half = len(drawn) // 2
    first, second = tuple(drawn[:half]), tuple(drawn[half:])
    error = SampleError.of((exact.at(first) - approx.at(first)).tolist())

    def within(names: tuple[str, ...]) -> float:
        return float((np.abs(exact.at(names) - approx.at(names) - error.bias) <= error.reach).mean())

    return {
        "reach": error.reach,
        "holds_for_others": within(second),
        "holds_for_picked": within(tuple(picked)),
    }
