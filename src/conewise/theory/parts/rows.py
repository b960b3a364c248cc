"""Rows of any graph: what a patch at one position makes stale, where some nodes read other positions.

The closed forms of `positions` are of uniform stacks; this is of any graph, in one pass over it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from conewise.errors import TheoryError
from conewise.graph.graph import Graph, Site
from conewise.theory.parts.positions import Computed, Rows, is_last, is_row_by_row
from conewise.theory.weights import (
    Demand,
    expect_count,
    expect_demand,
    expect_flag,
    expect_graph,
    expect_items,
    expect_mapping,
    expect_site,
    expect_sites,
    expect_size,
    shown,
)

Mixes = Mapping[Site, Collection[Site]]


def row_costs(
    graph: Graph,
    sites: Iterable[tuple[Site, int]],
    positions: int,
    mixes: Mixes,
    demand: Demand = None,
    rows: Rows = "last",
    *,
    causal: bool = True,
    computed: Computed = "row by row",
) -> tuple[int, ...]:
    """The node-rows that each patch, at a site and a position counted from 0, makes stale.

    docs/theory.md#positions. Every node has one row for each of the `positions`. It reads its inputs row by
    row, but for those that `mixes` names for it: of these it reads the rows up to its own, or all of them
    where it is not `causal`. Of what is demanded, all rows are, or the last. Computed "from the first on", as
    a wavefront does, a node that changes is computed at every row from the first that does, or at the last
    one if no other is wanted and no node behind it mixes: a bound of what has to be.
    """
    T = expect_count(positions, "`positions`")
    table, mixing = expect_graph(graph).table, _expect_mixes(graph, mixes)
    expect_size(T * len(table.order), "node-rows")
    looks_back = expect_flag(causal, "`causal`")
    exact = is_row_by_row(computed)
    wanted = _wanted(graph, T, mixing, expect_demand(demand), is_last(rows), looks_back, exact)
    last = 1 << (T - 1)
    found = []
    for site, at in _expect_places(graph, sites, T):
        changed: dict[int, int] = {site: 1 << at}
        for node in table.sorted(table.cone((site,))):
            reached = 0
            for read in table.inputs[node]:
                rows_of = changed.get(read, 0)
                reached |= _after(rows_of, T, looks_back) if read in mixing.get(node, ()) else rows_of
            changed[node] = reached
        del changed[site]
        reached_rows = {node: rows_of for node, rows_of in changed.items() if wanted.get(node)}
        if exact:
            found.append(sum((rows_of & wanted[node]).bit_count() for node, rows_of in reached_rows.items()))
        else:
            found.append(
                sum(
                    1 if wanted[node] == last else T - ((rows_of & -rows_of).bit_length() - 1)
                    for node, rows_of in reached_rows.items()
                )
            )
    return tuple(found)


def _wanted(
    graph: Graph,
    T: int,
    mixing: Mapping[int, frozenset[int]],
    demand: tuple[Site, ...] | None,
    last: bool,
    looks_back: bool,
    exact: bool,
) -> dict[int, int]:
    """The rows of each node that a demand depends on, as bits; where not `exact`, all rows of what mixes."""
    table, every = graph.table, (1 << T) - 1
    ends = graph.numbers(graph.computed if demand is None else demand)
    found = dict.fromkeys(ends, 1 << (T - 1) if last else every)
    for node in reversed(table.sorted(table.support(ends, ()))):
        rows = found[node] = found[node] if exact or not mixing.get(node) else every
        for read in table.inputs[node]:
            seen = rows
            if read in mixing.get(node, ()):
                seen = (1 << rows.bit_length()) - 1 if looks_back else every
            found[read] = found.get(read, 0) | seen
    return found


def _after(rows: int, T: int, looks_back: bool) -> int:
    """The rows that see one of `rows`."""
    every = (1 << T) - 1
    if not rows or not looks_back:
        return every if rows else 0
    return every & ~((rows & -rows) - 1)


def _expect_mixes(graph: Graph, mixes: object) -> dict[int, frozenset[int]]:
    given = expect_mapping(mixes, "`mixes`", "for each node that reads other rows, the inputs it does so of")
    found = {}
    for node, inputs in given.items():
        names = expect_sites(inputs, f"the inputs of {node!r} that other rows are read of")
        number = graph.number(expect_site(node, "a node of `mixes`"))
        found[number] = frozenset(graph.numbers(names))
        if not found[number] <= set(graph.table.inputs[number]):
            raise TheoryError(
                f"`mixes` says that {node!r} reads {', '.join(map(repr, names))}, and its inputs are "
                f"{', '.join(map(repr, graph.inputs(node))) or 'none'}. Name some of these."
            )
    return found


def _expect_places(graph: Graph, sites: object, T: int) -> list[tuple[int, int]]:
    found = []
    for one in expect_items(sites, "the list of sites", "a site and a position for each patch"):
        pair = expect_items(one, "a patch", "a site and a position")
        if len(pair) != 2:
            raise TheoryError(f"a patch is {shown(one)}; it is a site and a position.")
        site, at = graph.number(expect_site(pair[0], "the site")), expect_count(pair[1], "the position", 0)
        if at >= T:
            raise TheoryError(f"position {shown(at)}: there are {shown(T)}, counted from 0.")
        found.append((site, at))
    return found
