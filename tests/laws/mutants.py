"""Wrong formulas, each of which somebody could believe. The laws must refute every one of them.

Each answers a question that a law answers, for value patches or for a graft; `test_mutants.py` shows
that the shared strategy tells it from the right answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from conewise.paper.theory import (
    ReaderAt,
    RowStack,
    greedy_cost,
    reverse_cost,
    row_costs,
    speculation,
    stack_peak,
)
from conewise.reactive.graph import Graph
from tests.laws.oracle import cone, support, wiring
from tests.laws.row_graphs import RowGraph

Reads = Mapping[str, Sequence[str]]


def plain_union_of_cones(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """Forgets that a patched site inside another's cone is given, and so is not recomputed."""
    return cone(reads, patch) & support(reads, demand, cut=patch)


def support_not_cut_at_patches(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """Forgets that nothing above a patched site is wanted on its account."""
    return (cone(reads, patch) - set(patch)) & support(reads, demand)


def whole_cone_whatever_is_demanded(
    reads: Reads, patch: Collection[str], demand: Collection[str]
) -> set[str]:
    """Forgets that only what is demanded is computed."""
    return cone(reads, patch) - set(patch)


def cone_of_the_first_patch(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """Takes the cone of the first patch alone for the cone of all."""
    return (cone(reads, list(patch)[:1]) - set(patch)) & support(reads, demand, cut=patch)


def rules_like_values(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """For rules in place of values: forgets that such a site is itself computed, and from what it reads."""
    return (cone(reads, patch) - set(patch)) & support(reads, demand, cut=patch)


def rules_that_hide_what_is_above(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """For rules in place of values: forgets that such a site reads its inputs, so that they are wanted."""
    return (cone(reads, patch) | set(patch)) & support(reads, demand, cut=patch)


def edge_graft_invalidates_the_cone_of_its_input(reads: Reads, edge: tuple[str, str]) -> set[str]:
    """Forgets that the other readers of u see no change: V⁺ᵤ instead of {w} ∪ V⁺_w."""
    return cone(reads, [edge[0]])


def edge_graft_invalidates_the_cone_of_its_reader_alone(reads: Reads, edge: tuple[str, str]) -> set[str]:
    """Forgets w itself: V⁺_w instead of {w} ∪ V⁺_w."""
    return cone(reads, [edge[1]])


def edges_for_their_cones_alone(graph: Graph, readers: Sequence[ReaderAt], output: str) -> int:
    """Forgets what a reader computes of a changed stream before its site has a value."""
    return sum(one.writers * one.parts * _behind(graph, one.site, output) for one in readers)


def edges_with_a_reader_s_work_for_each(graph: Graph, readers: Sequence[ReaderAt], output: str) -> int:
    """Forgets that the heads of a layer share what is computed of a changed stream."""
    return sum(
        one.writers * one.parts * (_between(graph, one) + _behind(graph, one.site, output)) for one in readers
    )


def edges_from_the_cone_of_their_entry(graph: Graph, readers: Sequence[ReaderAt], output: str) -> int:
    """Takes an edge for a patch of the stream, which all its other readers would see too."""
    return sum(one.writers * one.parts * _behind(graph, one.entry, output) for one in readers)


def _behind(graph: Graph, site: str, output: str) -> int:
    return len(cone(wiring(graph), [site]) & support(wiring(graph), [output]))


def _between(graph: Graph, reader: ReaderAt) -> int:
    reads = wiring(graph)
    return len(cone(reads, [reader.entry]) & support(reads, [reader.site], cut=[reader.entry]))


def edges_between_components(layers: int, heads: int, kv_heads: int, mlp: bool, parallel: bool) -> int:
    """Counts pairs of components, and forgets that a head reads by queries, keys and values."""
    before = [1 + layer * (heads + mlp) for layer in range(layers + 1)]
    return (
        sum(seen * (heads + mlp) for seen in before[:-1])
        + before[-1]
        + layers * heads * (mlp and not parallel)
    )


def edges_with_keys_for_every_head(layers: int, heads: int, kv_heads: int, mlp: bool, parallel: bool) -> int:
    """Forgets that grouped queries share their keys and values."""
    before = [1 + layer * (heads + mlp) for layer in range(layers + 1)]
    return (
        sum(seen * (3 * heads + mlp) for seen in before[:-1])
        + before[-1]
        + layers * heads * (mlp and not parallel)
    )


def edges_of_parallel_blocks_in_a_row(
    layers: int, heads: int, kv_heads: int, mlp: bool, parallel: bool
) -> int:
    """Forgets that the MLP of a parallel block does not read the heads beside it."""
    before = [1 + layer * (heads + mlp) for layer in range(layers + 1)]
    return (
        sum(seen * (heads + 2 * kv_heads + mlp) for seen in before[:-1]) + before[-1] + (layers * heads * mlp)
    )


def searches_without_corrections_behind(
    graph: Graph,
    readers: Sequence[str],
    visits: Sequence[int],
    kept: Collection[int],
    demand: Collection[str],
) -> int:
    """Forgets that what was removed before stands behind a reader, and is computed again."""
    costs = (_behind_any(graph, readers[at], demand) for at in visits)
    return sum(cost + (cost > 0) for cost in costs)


def searches_that_correct_what_is_kept(
    graph: Graph,
    readers: Sequence[str],
    visits: Sequence[int],
    kept: Collection[int],
    demand: Collection[str],
) -> int:
    """Takes an edge that is kept for one that left a correction."""
    return int(greedy_cost(graph, readers, visits, (), demand).total)


def searches_with_one_correction_for_each_edge(
    graph: Graph,
    readers: Sequence[str],
    visits: Sequence[int],
    kept: Collection[int],
    demand: Collection[str],
) -> int:
    """Forgets that a reader has one correction, however many edges it lost."""
    spent, behind = 0, list[str]()
    for trial, at in enumerate(visits):
        cost = _behind_any(graph, readers[at], demand)
        below = cone(wiring(graph), [readers[at]])
        met = [one for one in behind if one in below or one == readers[at]]
        spent += cost + (cost > 0) + sum(_behind_any(graph, one, demand) > 0 for one in met)
        if trial not in kept:
            behind.append(readers[at])
    return spent


def _behind_any(graph: Graph, site: str, demand: Collection[str]) -> int:
    reads = wiring(graph)
    return len(cone(reads, [site]) & support(reads, demand))


def worlds_by_the_mean_advance(candidates: int, width: int, right: Fraction) -> Fraction:
    """Divides by what a stack decides on average, as if the line had no end."""
    return candidates * Fraction(width + 1) / sum(right**step for step in range(width))


def worlds_without_the_current_one(candidates: int, width: int, right: Fraction) -> Fraction:
    """Forgets the world that the others are compared with."""
    found = speculation(candidates, width, right)
    return Fraction(found.worlds) - (Fraction(found.stacks) if width > 1 else 0)


def worlds_as_if_every_guess_were_right(candidates: int, width: int, right: Fraction) -> Fraction:
    """Forgets what is thrown away behind a wrong guess."""
    return Fraction(speculation(candidates, width, 1).worlds)


def rows_of_whole_layers(stack: RowStack) -> int:
    """Every layer behind a patch at all its later rows, and forgets that the first is read row by row."""
    L, T = stack.layers, stack.positions
    return sum(
        ((L - 1 - i) * stack.layer + stack.terminal) * (T - t if stack.causal else T)
        for i in range(L)
        for t in range(T)
    )


def rows_as_if_all_were_demanded(stack: RowStack) -> int:
    """Forgets that of the last layer one row is read, but for its keys."""
    return stack.sweep("all")


def rows_as_if_the_last_layer_were_one_row(stack: RowStack) -> int:
    """Forgets that the last row reads the keys of all others."""
    found = 0
    for i in range(stack.layers):
        for t in range(stack.positions):
            rows = stack.positions - t if stack.causal else stack.positions
            extra = stack.keys * (rows - 1) if i < stack.layers - 2 else 0
            found += stack.cost(i, t) - extra
    return found


def rows_as_if_attention_looked_both_ways(stack: RowStack) -> int:
    """Forgets that earlier positions do not see a later patch."""
    return replace(stack, causal=False).sweep()


def launches_as_if_cones_were_nested(
    graph: Graph, sites: Sequence[str], at_once: int, demand: Collection[str]
) -> int:
    """Takes the largest cone of a stack for the union of all."""
    cones = [_behind_any(graph, site, demand) for site in sites]
    return sum(max(cones[first : first + at_once]) for first in range(0, len(cones), at_once))


def launches_by_division(graph: Graph, sites: Sequence[str], at_once: int, demand: Collection[str]) -> int:
    """As if every launch had as many worlds as fit."""
    return -(-sum(_behind_any(graph, site, demand) for site in sites) // at_once)


def launches_of_one_stack(graph: Graph, sites: Sequence[str], at_once: int, demand: Collection[str]) -> int:
    """Forgets that each stack launches for itself."""
    reads = wiring(graph)
    return len(set().union(*(cone(reads, [site]) & support(reads, demand) for site in sites)))


def peak_as_the_largest_launch(graph: Graph, sites: Sequence[str], demand: Collection[str]) -> int:
    """Forgets what waits for a later launch."""
    return int(stack_peak(graph, sites, None, demand).bound)


def peak_of_all_that_is_computed(graph: Graph, sites: Sequence[str], demand: Collection[str]) -> int:
    """Forgets that what nobody reads any more is dropped."""
    return sum(_behind_any(graph, site, demand) + 1 for site in sites)


def gradients_above_the_site(graph: Graph, site: str, loss: str, wrt: Collection[str]) -> int:
    """The paper's set: takes V⁻ ∪ {s} for the gradients that change."""
    above = {site, *graph.upstream(site)}
    return sum(
        len(ways) + (len(ways) > 1) for node, ways in _products(graph, loss, wrt).items() if node in above
    )


def gradients_all_of_them(graph: Graph, site: str, loss: str, wrt: Collection[str]) -> int:
    """Takes every network for a dense one."""
    return reverse_cost(graph, [site], loss, wrt).backward


def gradients_behind_any_product(graph: Graph, site: str, loss: str, wrt: Collection[str]) -> int:
    """Forgets that a product reads what *it* needs, and not all that its operation's others need."""
    changed = {site, *graph.cone(site)}
    stale: set[str] = set()
    found = 0
    for node, ways in _products(graph, loss, wrt).items():
        met = sum(
            reader in stale or not changed.isdisjoint({reader, *graph.inputs(reader)}) for reader in ways
        )
        if met:
            stale.add(node)
            found += met + (len(ways) > 1)
    return found


def gradients_without_their_sums(graph: Graph, site: str, loss: str, wrt: Collection[str]) -> int:
    """Forgets that what arrives by several ways is added up."""
    ways = _products(graph, loss, wrt)
    cost = reverse_cost(graph, [site], loss, wrt)
    return cost.stale_backward[0] - sum(len(one) > 1 for one in ways.values()) * (cost.stale_backward[0] > 0)


def _products(graph: Graph, loss: str, wrt: Collection[str]) -> dict[str, list[str]]:
    """The readers through which the gradient of each node comes, outputs first."""

    def ends(site: str) -> list[str]:
        rule = graph.rule(site)
        vjps = getattr(rule, "vjps")  # noqa: B009  # a rule is any function
        return [read for at, read in enumerate(graph.inputs(site)) if vjps[at] is not None]

    leading = {loss}
    for site in reversed(graph.computed):
        leading.update(ends(site) if site in leading else ())
    span = set(wrt)
    for site in graph.computed:
        if site in leading and not span.isdisjoint(ends(site)):
            span.add(site)
    found: dict[str, list[str]] = {}
    for node in reversed([site for site in graph.sites if site in span and site != loss]):
        readers = [site for site in graph.computed if site in span for read in ends(site) if read == node]
        found[node] = readers
    return found


def rows_from_the_patch_on(given: RowGraph) -> int:
    """Takes what a wavefront computes, every node from the patch on, for what has to be."""
    return _rows(given, computed="from the first on")


def rows_without_mixing(given: RowGraph) -> int:
    """Forgets that other rows are read."""
    return _rows(replace(given, mixes=(frozenset[int](),) * len(given.mixes)))


def rows_that_all_read_all(given: RowGraph) -> int:
    """Takes every node for one that reads other rows of all its inputs."""
    return _rows(replace(given, mixes=tuple(map(frozenset, given.reads))))


def _rows(given: RowGraph, **options: Any) -> int:
    place = (str(given.patch[0]), given.patch[1])
    demand = list(map(str, given.demand))
    (found,) = row_costs(
        given.graph(),
        [place],
        given.positions,
        given.named(),
        demand,
        given.rows,
        causal=given.causal,
        **options,
    )
    return found


DEMAND_MUTANTS = [
    plain_union_of_cones,
    support_not_cut_at_patches,
    whole_cone_whatever_is_demanded,
    cone_of_the_first_patch,
]
RULE_MUTANTS = [rules_like_values, rules_that_hide_what_is_above]
GRAFT_MUTANTS = [
    edge_graft_invalidates_the_cone_of_its_input,
    edge_graft_invalidates_the_cone_of_its_reader_alone,
]
EDGE_COST_MUTANTS = [
    edges_for_their_cones_alone,
    edges_with_a_reader_s_work_for_each,
    edges_from_the_cone_of_their_entry,
]
EDGE_COUNT_MUTANTS = [
    edges_between_components,
    edges_with_keys_for_every_head,
    edges_of_parallel_blocks_in_a_row,
]
GREEDY_MUTANTS = [
    searches_without_corrections_behind,
    searches_that_correct_what_is_kept,
    searches_with_one_correction_for_each_edge,
]
SPECULATION_MUTANTS = [
    worlds_by_the_mean_advance,
    worlds_without_the_current_one,
    worlds_as_if_every_guess_were_right,
]
POSITION_MUTANTS = [
    rows_of_whole_layers,
    rows_as_if_all_were_demanded,
    rows_as_if_the_last_layer_were_one_row,
    rows_as_if_attention_looked_both_ways,
]
LAUNCH_MUTANTS = [
    launches_as_if_cones_were_nested,
    launches_by_division,
    launches_of_one_stack,
]
PEAK_MUTANTS = [peak_as_the_largest_launch, peak_of_all_that_is_computed]
REVERSE_MUTANTS = [
    gradients_above_the_site,
    gradients_all_of_them,
    gradients_behind_any_product,
    gradients_without_their_sums,
]
ROW_MUTANTS = [rows_from_the_patch_on, rows_without_mixing, rows_that_all_read_all]
