"""E7: what a sequence of grafts that stay costs, in a given order, and as a batch.

Claim (Theorem "exact interleaved cost", Proposition "batched grafting"): with a demand after each graft
an order costs the isolated sum plus an overcount Δ, which is 0 upstream first and h·K(K−1)/2 downstream
first; without demands in between all orders cost the same: the union of the cones and the fresh nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from conewise.paper.experiments.e4 import relu
from conewise.paper.experiments.result import Progress, Result, Row, patch_cost, silent, versions, warm
from conewise.paper.theory.grafts import (
    GraftAt,
    batched_cost,
    interleaved_cost,
    isolated_cost,
    order_extremes,
)
from conewise.paper.theory.sweeps import sweep_cost
from conewise.reactive.graph import Block, Edge, Graft, Graph, Site, chain

NODES, SITES, FRESH = 400, 6, 20
Order = tuple[int, ...]
Way = Literal["edge", "after"]


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of the paper's table: the cost of each graft, and Δ."""

    order: Order
    costs: tuple[str, ...]
    overcount: str


# Sites are counted from the shallowest. The paper prints no permutation for its random order; its costs
# allow one only: without an overcount the six cost 363, 306, 249, 191, 134, 77, from which the printed
# ones differ by 20 for each deeper site that was grafted before.
PAPER: dict[str, Printed] = {
    "shallowest-first": Printed((0, 1, 2, 3, 4, 5), ("363", "306", "249", "191", "134", "77"), "0"),
    "deepest-first": Printed((5, 4, 3, 2, 1, 0), ("77", "154", "231", "309", "386", "463"), "300"),
    "random": Printed((2, 3, 0, 5, 4, 1), ("249", "191", "403", "77", "154", "386"), "140"),
}
PAPER_BATCHED = "463"
PAPER_ISOLATED = "1320"
PAPER_UNION = "343"
PAPER_FRESH = "120"
PAPER_GRAFTS = "18"


def run(progress: Progress = silent) -> Result:
    """The three orders, interleaved and batched, as grafts on an edge and as grafts after a node."""
    started = time.perf_counter()
    rows: list[Row] = []
    total = 4 * len(PAPER)
    for name, printed in PAPER.items():
        on_edge, after = _interleaved(printed.order, "edge"), _interleaved(printed.order, "after")
        graph, sites = build()
        predicted = interleaved_cost(graph, _planned(sites, "edge"), printed.order)
        again = interleaved_cost(graph, _planned(sites, "after"), printed.order)
        assert predicted == again, "on a chain a node has one reader, so both kinds of graft are one"
        for step, place in enumerate(printed.order):
            rows.append(
                Row(
                    name=f"{name}, graft {step + 1} of {SITES}, at {sites[place]}",
                    paper=printed.costs[step],
                    predicted=predicted.costs[step],
                    measured=_agreed(on_edge[step], after[step]),
                    unit="nodes",
                    facts={
                        "order": name,
                        "step": step + 1,
                        "site": sites[place],
                        "invalidated": on_edge[step].invalidated,
                        "fresh": on_edge[step].fresh,
                        "recomputed": on_edge[step].recomputed,
                        "recomputed_after_node": after[step].recomputed,
                    },
                )
            )
        spent = sum(cost.recomputed for cost in on_edge)
        alone = sum(cost.recomputed for cost in _isolated())
        rows.append(
            Row(
                name=f"{name}, overcount Δ",
                paper=printed.overcount,
                predicted=predicted.overcount,
                measured=spent - alone,
                unit="nodes",
                facts={"order": name, "interleaved": spent, "isolated": alone},
            )
        )
        progress(len(rows), total * 2)
    for name, printed in PAPER.items():
        graph, sites = build()
        rows.append(
            Row(
                name=f"{name}, batched",
                paper=PAPER_BATCHED,
                predicted=batched_cost(graph, _planned(sites, "edge")),
                measured=_agreed(_batched(printed.order, "edge"), _batched(printed.order, "after")),
                unit="nodes",
                facts={"order": name},
            )
        )
    grafts = [row for row in rows if "step" in row.facts]
    rows.append(
        Row(
            "grafts of the three orders that cost what the closed form says",
            PAPER_GRAFTS,
            len(PAPER) * SITES,
            sum(row.measured == row.predicted for row in grafts),
        )
    )
    rows.extend(_summary())
    progress(1, 1)
    return Result(
        name="e7",
        title="Sequences of grafts, interleaved and batched",
        claim=(
            "With a demand after each graft an order costs the isolated sum plus Δ ≥ 0: 0 upstream first, "
            "h·K(K−1)/2 downstream first. As a batch every order costs the union of the cones plus the "
            "fresh nodes."
        ),
        rows=rows,
        compared="every count equals the theory's and the paper's, at zero tolerance",
        notes=(
            (
                "A graft's cost is what the ledger has as recomputed by the demand that follows; it equals "
                "the nodes that the graft invalidated plus its fresh ones, and is the same for a graft on "
                "the edge behind a site and for one after the site."
            ),
            "Δ is the interleaved total less the total of the six grafts made each on a graph of its own.",
            "The order of the paper's random permutation is the only one that has the printed costs.",
        ),
        seconds=time.perf_counter() - started,
        versions=versions(),
    )


@dataclass(frozen=True, slots=True)
class GraftCost:
    """What the ledger has about one graft, or a batch, and the demand that followed."""

    invalidated: int
    fresh: int
    recomputed: int


def build() -> tuple[Graph, tuple[Site, ...]]:
    """A chain of 400 computed nodes, and six sites at even depths."""
    graph = Graph()
    last = graph.source("x", 1.0)
    for number in range(1, NODES + 1):
        last = graph.node(f"n{number}", relu, [last])
    return graph, tuple(f"n{round(NODES * k / (SITES + 1))}" for k in range(1, SITES + 1))


def block() -> Block:
    """Twenty fresh nodes."""
    return chain(*[relu] * FRESH)


def _edge_behind(site: Site) -> Edge:
    return site, f"n{int(site[1:]) + 1}"


def _planned(sites: tuple[Site, ...], way: Way) -> list[GraftAt]:
    return [GraftAt(_edge_behind(site) if way == "edge" else site, FRESH) for site in sites]


def _grafting(graph: Graph, way: Way) -> Callable[[Site], Graft]:
    if way == "edge":
        return lambda site: graph.graft(_edge_behind(site), block())
    return lambda site: graph.graft_after(site, block())


def _interleaved(order: Order, way: Way) -> list[GraftCost]:
    """One graft after the other on one graph, with a demand after each."""
    graph, sites = build()
    world, graft = warm(graph, f"n{NODES}"), _grafting(graph, way)
    costs = []
    for place in order:
        with world.ledger.interval() as ledger:
            fresh = graft(sites[place]).sites
            world.demand(f"n{NODES}")
        costs.append(GraftCost(ledger.count("invalidated"), len(fresh), ledger.count("recomputed")))
    return costs


def _isolated() -> list[GraftCost]:
    """Each graft on a graph of its own."""
    return [cost for place in range(SITES) for cost in _interleaved((place,), "edge")]


def _batched(order: Order, way: Way) -> GraftCost:
    """All grafts, then one demand."""
    graph, sites = build()
    world, graft = warm(graph, f"n{NODES}"), _grafting(graph, way)
    with world.ledger.interval() as ledger:
        fresh = sum(len(graft(sites[place]).sites) for place in order)
        world.demand(f"n{NODES}")
    return GraftCost(ledger.count("invalidated"), fresh, ledger.count("recomputed"))


def _agreed(one: GraftCost, other: GraftCost) -> int:
    """The cost that all witnesses agree on, or -1, which matches nothing."""
    witnesses = {cost.recomputed for cost in (one, other)}
    witnesses |= {cost.invalidated + cost.fresh for cost in (one, other)}
    return witnesses.pop() if len(witnesses) == 1 else -1


def _summary() -> list[Row]:
    """The totals that the paper's text prints around its table."""
    graph, sites = build()
    planned = _planned(sites, "edge")
    extremes = order_extremes(graph, planned)
    batch = _batched(PAPER["random"].order, "edge")
    spent = {
        name: sum(cost.recomputed for cost in _interleaved(order, "edge"))
        for name, order in (("least", extremes.best), ("most", extremes.worst))
    }
    alone = sum(cost.recomputed for cost in _isolated())
    return [
        Row(
            "isolated sum of the six grafts",
            PAPER_ISOLATED,
            isolated_cost(graph, planned),
            alone,
            unit="nodes",
        ),
        Row(
            "original nodes invalidated by the batch",
            PAPER_UNION,
            batched_cost(graph, planned) - SITES * FRESH,
            batch.invalidated,
            unit="nodes",
        ),
        Row(
            "cone of the shallowest site, which holds the other cones",
            PAPER_UNION,
            sweep_cost(graph, [sites[0]]),
            patch_cost(warm(graph, f"n{NODES}"), sites[0], 2.0, f"n{NODES}").recomputed,
            unit="nodes",
        ),
        Row(
            "fresh nodes of the batch",
            PAPER_FRESH,
            batched_cost(graph, planned) - batched_cost(graph, [GraftAt(graft.at, 0) for graft in planned]),
            batch.fresh,
            unit="nodes",
        ),
        Row(
            "least Δ over all orders, in the order that theory calls best",
            "0",
            extremes.least,
            spent["least"] - alone,
            unit="nodes",
        ),
        Row(
            "most Δ over all orders, in the order that theory calls worst",
            "300",
            extremes.most,
            spent["most"] - alone,
            unit="nodes",
        ),
    ]
