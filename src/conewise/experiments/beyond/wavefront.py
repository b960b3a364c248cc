"""Wavefronts: how often stacks of worlds launch, and what they hold, counted on a captured model.

Claim: worlds in the order of depth, B at once, launch between Σ|cone|/B and Σ|cone|/B + |∪cone| times, so
that c/(ε·u) worlds at once leave less than a share ε of the work to be saved, whatever the model; and
launching nodes depth by depth can hold many times what going branch by branch does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

from conewise.capturing.quiet import quiet
from conewise.experiments.result import Progress, Result, Row, silent, versions
from conewise.graph.graph import Graph
from conewise.locations.selectors import sites
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.runs.metrics import logit_diff
from conewise.sweeps.sweep import Sweep
from conewise.theory.sweeps import sweep_cost
from conewise.theory.wavefront import saturating_worlds, stack_launches, stack_peak

SEED, POSITIONS = 0, 5
DEPTHS, WIDTHS = (2, 5), (1, 2, 3, 5, 8, 13, 1000)
BRANCHES, WIDE = (2, 4, 8), 16


def run(progress: Progress = silent, depths: Sequence[int] = DEPTHS) -> Result:
    """Count launches of stacks of every width on the plan of a sweep over all heads and MLPs."""
    started = time.perf_counter()
    rows: list[Row] = []
    for done, depth in enumerate(depths, start=1):
        rows += _launched(depth)
        progress(done, len(depths))
    rows += [row for branches in BRANCHES for row in _held(branches)]
    return Result(
        name="wavefront",
        title="Stacks of worlds",
        claim=(
            "In the order of depth, stacks of B worlds launch between Σ|cone|/B and Σ|cone|/B + |∪cone| "
            "times; depth by depth holds n times what branch by branch does."
        ),
        rows=rows,
        compared="launches by plan, and what stacks hold, equal the theory exactly",
        notes=(
            (
                "Launches are nodes that some world of a stack computes, by the plan's list of the worlds of "
                "each node; kernels that compute several nodes at once launch less often."
            ),
            (
                "With a launch that takes 20 times what a world does, "
                f"{saturating_worlds(20, 1, Fraction(1, 10))} worlds at once leave less than a "
                "tenth of the work to be saved."
            ),
            (
                "Branches: one site, n branches of a wide node and a narrow one, and their sum; values are "
                "counted while the nodes are launched in either order."
            ),
        ),
        seed=SEED,
        seconds=time.perf_counter() - started,
        versions=versions("torch", "transformers"),
    )


def _launched(depth: int) -> list[Row]:
    sweep = _sweep(depth)
    graph, demand = sweep.model.graph, sweep.targets()
    compiled = sweep.plan(evaluator="wavefront").compiled
    assert compiled is not None, "a planned sweep is compiled"
    nodes = [sweep.model.locate(place).node for cell in sweep.cells for place in cell.places]
    ordered = [nodes[cell] for cell in compiled.order]
    work, union = sweep_cost(graph, nodes, demand), stack_launches(graph, nodes, len(nodes), demand)
    found = []
    for width in sorted({min(width, len(nodes)) for width in WIDTHS}):
        chunks = [range(first, min(first + width, len(nodes))) for first in range(0, len(nodes), width)]
        measured = sum(
            any(begin < chunk.stop and chunk.start < end for begin, end in worlds)
            for chunk in chunks
            for _, worlds in compiled.steps
        )
        found.append(
            Row(
                f"{depth} layers, {len(nodes)} worlds, {width} at once, launches",
                None,
                stack_launches(graph, ordered, width, demand),
                measured,
                facts={
                    "layers": depth,
                    "width": width,
                    "least": float(Fraction(work) / width),
                    "most": float(Fraction(work) / width + Fraction(union)),
                },
            )
        )
    return found


def _sweep(depth: int) -> Sweep:
    """All heads and MLPs."""
    architecture = ARCHITECTURES["gpt2"]
    with quiet():
        model = Model(architecture.make(depth, SEED), (), architecture.example(POSITIONS, SEED))
    found: Sweep = model.sweep(
        sites("z", layer=":", head=":") + sites("mlp_out", layer=":"),
        base=model.run(**architecture.example(POSITIONS, SEED + 1)),
        source=model.run(**architecture.example(POSITIONS, SEED + 2)),
        metric=logit_diff(1, 2),
    )
    return found


def _held(branches: int) -> list[Row]:
    graph, sizes = fan(branches, WIDE)
    numbers = range(branches)
    orders = {
        "depth by depth": [*(f"wide{at}" for at in numbers), *(f"narrow{at}" for at in numbers), "sum"],
        "branch by branch": [*(name for at in numbers for name in (f"wide{at}", f"narrow{at}")), "sum"],
    }
    return [
        Row(
            f"{branches} branches, {how}, values held",
            None,
            stack_peak(graph, ["site"], order, "sum", sizes).peak,
            walked(graph, order, sizes),
            facts={"branches": branches, "order": how},
        )
        for how, order in orders.items()
    ]


def fan(branches: int, wide: int) -> tuple[Graph, dict[str, int]]:
    """Branches of a wide node and a narrow one, from one site, added up at the end; and sizes of values."""
    graph = Graph()
    site = graph.node("site", _sum, [graph.source("x", 1)])
    for at in range(branches):
        graph.node(f"narrow{at}", _sum, [graph.node(f"wide{at}", _sum, [site])])
    graph.node("sum", _sum, [f"narrow{at}" for at in range(branches)])
    return graph, {name: wide if name.startswith("wide") else 1 for name in graph.computed}


def walked(graph: Graph, order: Sequence[str], sizes: dict[str, int]) -> int:
    """The most that is held while nodes are computed in that order, from one site that is given."""
    values, most = {"site": 1}, 0
    for at, name in enumerate(order):
        values[name] = graph.rule(name)(*(values[read] for read in graph.inputs(name)))
        most = max(most, sum(sizes[one] for one in values))
        wanted = {read for later in order[at + 1 :] for read in graph.inputs(later)} | {order[-1]}
        values = {one: value for one, value in values.items() if one in wanted}
    return most


def _sum(*values: int) -> int:
    return sum(values)
