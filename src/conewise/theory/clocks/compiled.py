"""Compiled sweeps, in the terms of the wall clock: one walk for a plan, one launch for all its worlds."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.theory.clocks.wallclock import expect_cones, expect_constants
from conewise.theory.weights import (
    Weight,
    answer_ratio,
    any_float,
    exact,
    expect_count,
    expect_number,
    expect_weight,
    ratio,
    shown,
    total,
)


def compiled_ratio(
    cones: Iterable[Weight],
    nodes: Weight,
    a: Weight,
    beta: Weight,
    *,
    runs: int = 1,
    launch: Weight = 0,
    launches: Weight | None = None,
) -> Fraction | float:
    """ρ in time where plans are compiled: full runs, planned once, over a sweep that is planned once.

    docs/theory.md#compiled-plans. A plan walks the graph, β·N, and serves `runs` runs of all worlds; a node
    takes `a`, of which the part `launch` is paid once for all worlds that are computed together. A
    sweep of K worlds launches `launches` times, each node once where all worlds are one stack: the
    weight of the union of the cones; less where one launch computes several nodes, more where the worlds are
    several stacks. None: once for each world, as one after another do.

        ρ = (R·K·a·N + β·N) / (R·((a − λ)·Σ cone + λ·launches) + β·N)

    With R·K = 1 it is `wallclock_ratio`; as R·K grows, β is paid by ever more demands.
    """
    sizes, N = expect_cones(cones, nodes)
    per_node, per_graph = expect_constants(a, beta)
    together = _expect_launch(launch, per_node)
    count, spread = expect_count(runs, "the number of runs"), total(sizes)
    often = spread if launches is None else expect_weight(launches, "the number of launches")
    if often > spread or (often == 0 and spread > 0):
        raise TheoryError(
            f"the sweep launches {shown(often)}; that is more than nothing and no more than all cones "
            f"together, {shown(spread)}."
        )
    walk = exact(per_graph) * exact(N)
    apart = exact(per_node) - exact(together)
    spent = count * (apart * spread + exact(together) * exact(often)) + walk
    if not sizes or spent == 0:
        raise TheoryError("the sweep takes no time, so its ratio has no value: no cones, or all of size 0.")
    full = count * len(sizes) * exact(per_node) * exact(N) + walk
    return answer_ratio(ratio(full, spent), any_float([*sizes, N, per_node, per_graph, together, often]))


def compiled_ceiling(
    a: Weight, launch: Weight = 0, mean_fraction: Weight = Fraction(1, 2)
) -> Fraction | float:
    """The limit of `compiled_ratio` as worlds grow in number: a / ((a − λ)·E[U]).

    docs/theory.md#compiled-plans. Without stacking, λ = 0, it is 1/E[U], and the limit of ever more runs too:
    2 for the uniform profile, whatever β was. E[U] is the mean share of the graph that lies below a site.
    """
    per_node, _ = expect_constants(a, 0)
    together = _expect_launch(launch, per_node)
    share = expect_number(mean_fraction, "the mean fraction")
    if not 0 < share <= 1:
        raise TheoryError(
            f"the mean fraction is {shown(share)}; it is the part of a graph that lies below a site, more "
            "than 0 and at most 1."
        )
    if together == per_node:
        raise TheoryError(
            "a node takes nothing but its launch, which all worlds share: the ratio grows with their number "
            "and has no limit."
        )
    limit = ratio(exact(per_node), (exact(per_node) - exact(together)) * exact(share))
    return answer_ratio(limit, any_float([per_node, together, share]))


def _expect_launch(launch: object, per_node: Weight) -> Weight:
    together = expect_weight(launch, "`launch`")
    if together > per_node:
        raise TheoryError(
            f"`launch` is {shown(together)}, and a node takes {shown(per_node)} in all, its launch included."
        )
    return together
