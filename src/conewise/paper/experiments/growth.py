"""Growth during training: a network that is trained while blocks are grafted into it, counted step by step.

Claim (the remark on growing a network mid-training): a growth schedule is accounted for as any sequence of
grafts. Each graft costs what the closed form says of the graph before training began; each step costs what
depends on the parameters; a graft of residual blocks with zero weights leaves the loss as it was, bit for
bit, and the loss goes on falling.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from conewise.paper import ops
from conewise.paper.experiments.result import Progress, Result, Row, silent, versions
from conewise.paper.theory.grafts import GraftAt, interleaved_cost
from conewise.paper.theory.sweeps import sweep_cost
from conewise.reactive.gradients import Gradients, gradients
from conewise.reactive.graph import Block, Graph, Site, block
from conewise.reactive.world import World

Array = npt.NDArray[np.float64]

SEED = 0
LAYERS, WIDTH, INNER, EXAMPLES = 4, 8, 16, 64
STEPS, RATE = 60, 0.15

ORDER = (2, 0, 3, 1)
"""After which layers blocks are grafted, one after each round of steps; not upstream first."""


@dataclass(slots=True)
class Course:
    """A training course: the loss and the counts of every step, and of every graft."""

    losses: list[float] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    grafts: list[tuple[int, int]] = field(default_factory=list)
    reversals: list[tuple[int, int]] = field(default_factory=list)
    grown_at: list[int] = field(default_factory=list)
    loss_changed: int = 0


def run(progress: Progress = silent, steps: int = STEPS) -> Result:
    """Train and grow; then train as long without growing, from the same beginning."""
    started = time.perf_counter()
    grown = train(ORDER, steps, progress)
    plain = train((), steps * (len(ORDER) + 1))
    rounds = [grown.losses[first : first + steps] for first in range(0, len(grown.losses), steps)]
    rows = [
        Row(
            f"nodes recomputed by {len(grown.steps)} steps, for the loss and the gradients that are read",
            None,
            sum(predicted for predicted, _ in grown.steps),
            sum(measured for _, measured in grown.steps),
            unit="nodes",
        ),
        Row(
            f"of {len(grown.steps)} steps, those that recomputed another number",
            None,
            0,
            sum(predicted != measured for predicted, measured in grown.steps),
        ),
    ]
    pairs = zip(ORDER, grown.grafts, grown.reversals, strict=True)
    for number, (layer, (predicted, measured), (fresh, counted)) in enumerate(pairs, start=1):
        at = f"graft {number} of {len(ORDER)}, after layer {layer + 1}"
        rows.append(Row(f"{at}, nodes recomputed for the loss", None, predicted, measured, unit="nodes"))
        rows.append(Row(f"{at}, gradient nodes computed anew", None, fresh, counted, unit="nodes"))
    rows += [
        Row("grafts that changed the loss in a bit", None, 0, grown.loss_changed),
        Row(
            f"of {len(rounds)} rounds of {steps} steps, those in which the loss did not fall",
            None,
            0,
            sum(losses[-1] >= losses[0] for losses in rounds),
        ),
        Row("loss at the beginning", None, None, grown.losses[0], exact=False),
        Row("loss in the end, grown", None, None, grown.losses[-1], exact=False),
        Row("loss in the end, as many steps without growth", None, None, plain.losses[-1], exact=False),
    ]
    rows += [
        Row(
            f"step {number}, nodes recomputed",
            None,
            predicted,
            measured,
            unit="nodes",
            detail=True,
            facts={"step": number, "loss": loss},
        )
        for number, ((predicted, measured), loss) in enumerate(
            zip(grown.steps, grown.losses, strict=True), start=1
        )
    ]
    return Result(
        name="growth",
        title="A network that grows while it is trained",
        claim=(
            "Blocks grafted during training cost what the closed form says of the graph before it, and each "
            "step costs what depends on the parameters it sets; the grafts leave the loss as it was, bit for "
            "bit, and it goes on falling."
        ),
        rows=rows,
        compared=(
            "the nodes recomputed by every step and every graft equal the theory's exactly; the loss is the "
            "same in every bit before and after each graft, and falls in every round. Losses are reported"
        ),
        notes=(
            (
                f"A residual network of {LAYERS} layers over numpy, its gradients nodes of the same graph, "
                f"fitted to a deeper one by gradient descent on all {EXAMPLES} examples. After each {steps} "
                "steps a block x + f(x), whose last weights are zero, is grafted after a layer, in the order "
                f"{', '.join(str(layer + 1) for layer in ORDER)}; the first {steps // 4} steps then train "
                "the fresh block alone."
            ),
            (
                "A step sets the parameters that are trained, and demands the loss and the gradients that "
                "the next step reads: what depends on these parameters is computed. A graft takes the "
                "gradients out, puts the block in, demands the loss, and builds the gradients again; what "
                "the loss costs is predicted from the graph before the first step, by the formula for "
                "interleaved grafts."
            ),
        ),
        seed=SEED,
        seconds=time.perf_counter() - started,
        versions=versions(),
        series={
            "grown": grown.losses,
            "plain": plain.losses,
            "grown_at": grown.grown_at,
            "nodes": [measured for _, measured in grown.steps],
        },
    )


def network(seed: int = SEED) -> tuple[Graph, Site, list[Site], list[Site]]:
    """A residual network with its examples: the graph, its loss, its parameters, the ends of its layers."""
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
    """What is to be learnt: a deeper network's answers."""
    for _ in range(2 * LAYERS):
        x = x + np.tanh(x @ random.normal(size=(WIDTH, WIDTH)) * 0.4)
    answers: Array = x / np.abs(x).max()
    return answers


def residual_block(random: np.random.Generator) -> Block:
    """The block x + tanh(x·U)·V with V zero: the identity, until it learns."""
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
    """`steps` steps, then a graft, and so on for each place of `order`; then `steps` more.

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
    """One step of gradient descent: sets the parameters `now`, and demands what the next step reads."""
    slopes = world.demand([grads[site] for site in now])
    demand = (loss, *(grads[site] for site in then))
    with world.ledger.interval() as ledger:
        for site, slope in zip(now, slopes, strict=True):
            world.set(site, world.demand(site) - RATE * slope)
        course.losses.append(float(world.demand(demand)[0]))
    predicted = sweep_cost(world.graph, [tuple(now)], demand)
    course.steps.append((int(predicted), ledger.count("recomputed")))
