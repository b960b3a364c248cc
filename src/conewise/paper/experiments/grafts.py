"""Grafts that stay: sequences of them, interleaved and batched (E7), and a network that grows in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from conewise.paper import ops
from conewise.paper.experiments.layered import relu
from conewise.paper.experiments.result import (
    Progress,
    Result,
    Row,
    agreed,
    experiment,
    rows_of,
    silent,
    sweep,
    tracked,
    warm,
)
from conewise.paper.theory.grafts import (
    GraftAt,
    batched_cost,
    interleaved_cost,
    isolated_cost,
    order_extremes,
)
from conewise.paper.theory.sweeps import sweep_cost
from conewise.reactive.gradients import Gradients, gradients
from conewise.reactive.graph import Block, Edge, Graph, Site, block, chain
from conewise.reactive.world import World

# -- E7: what a sequence of grafts that stay costs, in a given order, and as a batch ---------------

NODES, SITES, FRESH = 400, 6, 20
Order = tuple[int, ...]
Way = Literal["edge", "after"]
WAYS: tuple[Way, Way] = ("edge", "after")


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


@experiment("Sequences of grafts, interleaved and batched")
def e7(progress: Progress = silent) -> Result:
    """Make the three orders, interleaved and batched, as grafts on an edge and as grafts after a node.

    Claim (Theorem "exact interleaved cost", Proposition "batched grafting"): With a demand after each graft
    an order costs the isolated sum plus Δ ≥ 0: 0 upstream first, h·K(K−1)/2 downstream first. As a batch
    every order costs the union of the cones plus the fresh nodes.

    Compared: every count equals the theory's and the paper's, at zero tolerance.
    """
    graph, sites = build()
    planned = _planned(sites, "edge")
    alone = sum(cost.recomputed for place in range(SITES) for cost in _made((place,), "edge"))
    total, batches, rows, right = batched_cost(graph, planned), list[Row](), list[Row](), 0
    for name, printed in tracked(list(PAPER.items()), progress):
        on_edge, after = (_made(printed.order, way) for way in WAYS)
        predicted = interleaved_cost(graph, planned, printed.order)
        again = interleaved_cost(graph, _planned(sites, "after"), printed.order)
        assert predicted == again, "on a chain a node has one reader, so both kinds of graft are one"
        for step, place in enumerate(printed.order):
            made = on_edge[step]
            facts = {"order": name, "step": step + 1, "site": sites[place], **asdict(made)}
            facts["recomputed_after_node"] = after[step].recomputed
            at, cost = f"{name}, graft {step + 1} of {SITES}, at {sites[place]}", _agreed(made, after[step])
            row = Row(at, predicted.costs[step], cost, printed.costs[step], unit="nodes", facts=facts)
            rows.append(row)
            right += row.measured == row.predicted
        spent = sum(cost.recomputed for cost in on_edge)
        facts = {"order": name, "interleaved": spent, "isolated": alone}
        over = f"{name}, overcount Δ"
        rows.append(
            Row(over, predicted.overcount, spent - alone, printed.overcount, unit="nodes", facts=facts)
        )
        measured = _agreed(*(_made(printed.order, way, at_once=True)[0] for way in WAYS))
        batches.append(Row(f"{name}, batched", total, measured, "463", unit="nodes", facts={"order": name}))
    costs = "grafts of the three orders that cost what the closed form says"
    return Result(
        [*rows, *batches, Row(costs, len(PAPER) * SITES, right, "18"), *_summary(graph, sites, alone)],
        """
        A graft's cost is what the ledger has as recomputed by the demand that follows; it equals the nodes
        that the graft invalidated plus its fresh ones, and is the same for a graft on the edge behind a site
        and for one after the site.

        Δ is the interleaved total less the total of the six grafts made each on a graph of its own.

        The order of the paper's random permutation is the only one that has the printed costs.
        """,
    )


@dataclass(frozen=True, slots=True)
class GraftCost:
    """The counts of the ledger for one graft, or a batch, and the demand that followed."""

    invalidated: int
    fresh: int
    recomputed: int


def build() -> tuple[Graph, tuple[Site, ...]]:
    """Build a chain of 400 computed nodes; returns six sites at even depths, too."""
    graph = Graph()
    last = graph.source("x", 1.0)
    for number in range(1, NODES + 1):
        last = graph.node(f"n{number}", relu, [last])
    return graph, tuple(f"n{round(NODES * k / (SITES + 1))}" for k in range(1, SITES + 1))


def _edge_behind(site: Site) -> Edge:
    return site, f"n{int(site[1:]) + 1}"


def _planned(sites: tuple[Site, ...], way: Way) -> list[GraftAt]:
    return [GraftAt(_edge_behind(site) if way == "edge" else site, FRESH) for site in sites]


def _made(order: Order, way: Way, *, at_once: bool = False) -> list[GraftCost]:
    """Make the grafts on one graph, one after the other with a demand after each, or `at_once` with one."""
    graph, sites = build()
    world, costs = warm(graph, f"n{NODES}"), []
    for places in [order] if at_once else [(place,) for place in order]:
        with world.ledger.interval() as ledger:
            fresh = 0
            for site in (sites[place] for place in places):
                is_edge = way == "edge"
                made = (
                    graph.graft(_edge_behind(site), chain(*[relu] * FRESH))
                    if is_edge
                    else graph.graft_after(site, chain(*[relu] * FRESH))
                )
                fresh += len(made.sites)
            world.demand(f"n{NODES}")
        costs.append(GraftCost(ledger.count("invalidated"), fresh, ledger.count("recomputed")))
    return costs


def _agreed(*made: GraftCost) -> int:
    """Return the cost that all witnesses agree on: recomputed, and invalidated with the fresh nodes."""
    return agreed({found for cost in made for found in (cost.recomputed, cost.invalidated + cost.fresh)})


def _summary(graph: Graph, sites: tuple[Site, ...], alone: int) -> list[Row]:
    """Return the totals that the paper's text prints around its table."""
    planned = _planned(sites, "edge")
    extremes, predicted = order_extremes(graph, planned), batched_cost(graph, planned)
    (batch,) = _made(PAPER["random"].order, "edge", at_once=True)
    least, most = (
        sum(cost.recomputed for cost in _made(order, "edge")) - alone
        for order in (extremes.best, extremes.worst)
    )
    shallowest = sweep(graph, sites[:1], f"n{NODES}").recomputed
    without_fresh = batched_cost(graph, [GraftAt(graft.at, 0) for graft in planned])
    cone = "cone of the shallowest site, which holds the other cones"
    figures = [
        ("isolated sum of the six grafts", isolated_cost(graph, planned), alone, "1320"),
        ("original nodes invalidated by the batch", predicted - SITES * FRESH, batch.invalidated, "343"),
        (cone, sweep_cost(graph, [sites[0]]), shallowest, "343"),
        ("fresh nodes of the batch", predicted - without_fresh, batch.fresh, "120"),
        ("least Δ over all orders, in the order that theory calls best", extremes.least, least, "0"),
        ("most Δ over all orders, in the order that theory calls worst", extremes.most, most, "300"),
    ]
    return [Row(*figure, unit="nodes") for figure in figures]


# -- Growth during training: a network that is trained while blocks are grafted into it ------------

Array = npt.NDArray[np.float64]

SEED = 0
LAYERS, WIDTH, INNER, EXAMPLES = 4, 8, 16, 64
STEPS, RATE = 60, 0.15

ORDER = (2, 0, 3, 1)
"""After which layers blocks are grafted, one after each round of steps; not upstream first."""


@dataclass(slots=True)
class Course:
    """A training course: the loss of every step; (predicted, measured) of every step and of every graft."""

    losses: list[float] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    grafts: list[tuple[int, int]] = field(default_factory=list)
    reversals: list[tuple[int, int]] = field(default_factory=list)
    grown_at: list[int] = field(default_factory=list)
    loss_changed: int = 0


@experiment("A network that grows while it is trained")
def growth(progress: Progress = silent, steps: int = STEPS) -> Result:
    """Train and grow; then train as long without growing, from the same beginning.

    Claim (the remark on growing a network mid-training): Blocks grafted during training cost what the closed
    form says of the graph before it, and each step costs what depends on the parameters it sets; the grafts
    leave the loss as it was, bit for bit, and it goes on falling.

    Compared: the nodes recomputed by every step and every graft equal the theory's exactly; the loss is the
    same in every bit before and after each graft, and falls in every round. Losses are reported.
    """
    grown = train(ORDER, steps, progress)
    plain = train((), steps * (len(ORDER) + 1))
    rounds = [grown.losses[first : first + steps] for first in range(0, len(grown.losses), steps)]
    count, (planned, counted) = len(grown.steps), map(sum, zip(*grown.steps, strict=True))
    spent = f"nodes recomputed by {count} steps, for the loss and the gradients that are read"
    other = sum(predicted != measured for predicted, measured in grown.steps)
    rows = [
        Row(spent, planned, counted, unit="nodes"),
        Row(f"of {count} steps, those that recomputed another number", 0, other),
    ]
    made = zip(ORDER, grown.grafts, grown.reversals, strict=True)
    for number, (layer, graft, reversal) in enumerate(made, start=1):
        figures = ("nodes recomputed for the loss", *graft), ("gradient nodes computed anew", *reversal)
        rows += rows_of(f"graft {number} of {len(ORDER)}, after layer {layer + 1}", *figures, unit="nodes")
    rising = len(rounds) - sum(losses[-1] < losses[0] for losses in rounds)
    rows += [
        Row("grafts that changed the loss in a bit", 0, grown.loss_changed),
        Row(f"of {len(rounds)} rounds of {steps} steps, those in which the loss did not fall", 0, rising),
        Row("loss at the beginning", None, grown.losses[0], exact=False),
        Row("loss in the end, grown", None, grown.losses[-1], exact=False),
        Row("loss in the end, as many steps without growth", None, plain.losses[-1], exact=False),
    ]
    from conewise.paper.experiments import captured_growth  # noqa: PLC0415 - the others need no torch

    more, series = captured_growth.rows(min(steps, captured_growth.STEPS))
    rows += more
    for number, (counts, loss) in enumerate(zip(grown.steps, grown.losses, strict=True), start=1):
        name, facts = f"step {number}, nodes recomputed", {"step": number, "loss": loss}
        rows.append(Row(name, *counts, unit="nodes", detail=True, facts=facts))
    return Result(
        rows,
        f"""
        A residual network of {LAYERS} layers over numpy, its gradients nodes of the same graph, fitted to a
        deeper one by gradient descent on all {EXAMPLES} examples. After each {steps} steps a block x + f(x),
        whose last weights are zero, is grafted after a layer, in the order
        {", ".join(str(layer + 1) for layer in ORDER)}; the first {steps // 4} steps then train the fresh
        block alone.

        A step sets the parameters that are trained, and demands the loss and the gradients that the next step
        reads: what depends on these parameters is computed. A graft takes the gradients out, puts the block
        in, demands the loss, and builds the gradients again; what the loss costs is predicted from the graph
        before the first step, by the formula for interleaved grafts.

        The captured one is the tiny model's shape with random weights, trained to repeat half a line. After
        each round a block is grafted in by surgery, and the operated model is trained on. Between the steps
        each head and each MLP is put to zero by a sweep, of which the figure has the largest effect.
        """,
        SEED,
        series={
            "grown": grown.losses,
            "plain": plain.losses,
            "grown_at": grown.grown_at,
            "nodes": [measured for _, measured in grown.steps],
            **series,
        },
    )


def network(seed: int = SEED) -> tuple[Graph, Site, list[Site], list[Site]]:
    """Build a residual network with its examples: the graph, its loss, its parameters, its layers' ends."""
    random = np.random.default_rng(seed)
    graph, params, ends = Graph(), [], []
    x = random.normal(size=(EXAMPLES, WIDTH))
    stream = graph.source("x", x)
    graph.source("target", _teacher(x, random))
    for layer in range(1, LAYERS + 1):
        params.append(graph.source(f"w{layer}", random.normal(size=(WIDTH, WIDTH)) * 0.3, param=True))
        product = graph.node(f"layer{layer}.product", ops.linear, [stream, params[-1]])
        acted = graph.node(f"layer{layer}.tanh", ops.tanh, [product])
        stream = graph.node(f"layer{layer}.sum", ops.add, [stream, acted])
        ends.append(stream)
    params.append(graph.source("readout.weight", random.normal(size=(WIDTH, WIDTH)) * 0.3, param=True))
    readout = graph.node("readout", ops.linear, [stream, params[-1]])
    return graph, graph.node("loss", ops.mse, [readout, "target"]), params, ends


def _teacher(x: Array, random: np.random.Generator) -> Array:
    """Return the answers of a deeper network, which are to be learnt."""
    for _ in range(2 * LAYERS):
        x = x + np.tanh(x @ random.normal(size=(WIDTH, WIDTH)) * 0.4)
    answers: Array = x / np.abs(x).max()
    return answers


def residual_block(random: np.random.Generator) -> Block:
    """Return the block x + tanh(x·U)·V with V zero: the identity, until it learns."""
    inside = Graph()
    inside.source("in")
    inside.source("up", random.normal(size=(WIDTH, INNER)) * 0.5, param=True)
    inside.source("down", np.zeros((INNER, WIDTH)), param=True)
    inside.node("product", ops.linear, ["in", "up"])
    inside.node("tanh", ops.tanh, ["product"])
    inside.node("f", ops.linear, ["tanh", "down"])
    inside.node("sum", ops.add, ["in", "f"])
    return block(inside, entry="in")


def train(order: Sequence[int], steps: int, progress: Progress = silent) -> Course:
    """Take `steps` steps, then a graft, and so on for each place of `order`; then `steps` more.

    After a graft the first quarter of the steps trains the fresh block alone.
    """
    graph, loss, params, ends = network()
    random = np.random.default_rng(SEED + 1)
    blocks = [residual_block(random) for _ in order]
    grafts = [GraftAt(ends[layer], made) for layer, made in zip(order, blocks, strict=True)]
    predicted = interleaved_cost(graph, grafts, demand=loss).costs
    world, course = World(graph, keep_sites=False), Course()
    grads = gradients(graph, loss, params)
    world.demand((loss, *grads.values()))
    trained = [list(params)] * (steps + 1)
    for number in range(len(order) + 1):
        for now, then in pairwise(trained):
            _step(world, loss, grads, now, then, course)
        progress(number + 1, len(order) + 1)
        if number < len(order):
            before = np.asarray(world.demand(loss)).tobytes()
            grads.remove()
            with world.ledger.interval() as ledger:
                graft = graph.graft_after(ends[order[number]], blocks[number])
                after = np.asarray(world.demand(loss)).tobytes()
            course.grafts.append((int(predicted[number]), ledger.count("recomputed")))
            course.loss_changed += before != after
            course.grown_at.append(len(course.losses))
            fresh = [site for site in graft.sources if site in graph.params]
            params += fresh
            trained = [fresh] * (steps // 4) + [list(params)] * (steps - steps // 4 + 1)
            forward = len(graph.computed)
            grads = gradients(graph, loss, params)
            with world.ledger.interval() as ledger:
                world.demand(tuple(grads.values()))
            course.reversals.append((len(graph.computed) - forward, ledger.count("recomputed")))
    return course


def _step(
    world: World, loss: Site, grads: Gradients, now: Sequence[Site], then: Sequence[Site], course: Course
) -> None:
    """Take one step of gradient descent: set the parameters `now`, and demand what the next step reads."""
    slopes = world.demand([grads[site] for site in now])
    demand = (loss, *(grads[site] for site in then))
    with world.ledger.interval() as ledger:
        for site, slope in zip(now, slopes, strict=True):
            world.set(site, world.demand(site) - RATE * slope)
        course.losses.append(float(world.demand(demand)[0]))
    predicted = sweep_cost(world.graph, [tuple(now)], demand)
    course.steps.append((int(predicted), ledger.count("recomputed")))
