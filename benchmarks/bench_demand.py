"""Demand: what the engine adds to the bare calls, and what it does not pay for."""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from loman import Computation
from reaktiv import Computed, Signal

import conewise as cw
from benchmarks.graphs import chain, mix, random_dag
from benchmarks.harness import Line, at_least, at_most, interleaved, seconds

LENGTH = 100_000


def cold_demand() -> Line:
    """A full demand of a long chain, against the bare loop over the same ops."""
    graph = chain(LENGTH)
    last, ops = graph.sites[-1], [node.rule for node in graph if node.rule is not None]
    worlds: list[cw.World] = []

    def ours() -> None:
        assert worlds.pop().demand(last) == LENGTH

    def bare() -> None:
        value = 0.0
        for op in ops:
            value = op(value)
        assert value == LENGTH

    rounds = 15
    worlds.extend(cw.World(graph) for _ in range(rounds + 1))
    demand, loop = interleaved(ours, bare, rounds=rounds)
    note = f"{demand / LENGTH * 1e9:.0f} ns a node, the bare call {loop / LENGTH * 1e9:.0f} ns"
    return at_most("full demand of a chain of 100,000 / bare loop over the ops", demand / loop, 6, note)


def short_cone_in_a_large_graph() -> Line:
    """Patch and demand of a cone of ten nodes: the graph around it must not matter."""

    def prepared(length: int) -> Callable[[], None]:
        world = cw.World(chain(length), keep_sites=False)
        site, last = f"n{length - 11}", f"n{length - 1}"
        assert world.demand(last) == length
        values = iter(range(1 << 60))

        def run() -> None:
            for _ in range(100):
                value = next(values)
                world.patch(site, float(value))
                assert world.demand(last) == value + 10

        return run

    large, small = interleaved(prepared(1_000_000), prepared(1_000), rounds=41)
    note = f"{large / 100 * 1e6:.1f} us against {small / 100 * 1e6:.1f} us"
    return at_most("patch + demand of a cone of 10: 1,000,000 nodes / 1,000 nodes", large / small, 1.5, note)


def beta_over_a() -> Line:
    """Demand time = a * cone + beta * graph + intercept, by least squares; beta/a of the paper is 0.129.

    (It prints a and an intercept for 412 nodes, which it reads as beta * 412.)
    """
    rows, times = [], []
    for size in (400, 2_000, 10_000, 50_000, 100_000):
        world = cw.World(chain(size), keep_sites=False)
        last = f"n{size - 1}"
        world.demand(last)
        for cone in (50, 100, 200, 300, 399):
            site = f"n{size - 1 - cone}"

            def once(world: cw.World = world, site: str = site, last: str = last) -> float:
                world.patch(site, 0.0)
                return seconds(lambda: world.demand(last))

            times.append(statistics.median(once() for _ in range(41)))
            rows.append((cone, size, 1.0))
            world.restore(site)
    (a, beta, _), *_ = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)
    ratio = abs(float(beta)) / float(a)
    note = f"a = {a * 1e9:.0f} ns, beta = {beta * 1e9:.4f} ns a node (absolute value taken)"
    return Line(
        "beta / a, fitted over graphs of 400 to 100,000 nodes",
        "<= 0.001",
        f"{ratio:.6f}",
        ratio <= 0.001,
        note,
    )


class Contest:
    """One random DAG in three engines: change the source x, demand the last node."""

    def __init__(self, size: int) -> None:
        wiring = random_dag(size, reach=50, seed=0)
        self.last = f"n{size - 1}"
        self.values = iter(range(2, 1 << 60))
        self.answers: dict[str, tuple[float, float]] = {}
        self.calls = 0

        self.graph, self.computation = cw.Graph(), Computation()
        self.cells: dict[str, Any] = {}
        for source in "xy":
            self.graph.source(source, 1.0)
            self.computation.add_node(source, value=1.0)
            self.cells[source] = Signal(1.0)
        for place, (one, other) in enumerate(wiring):
            name = f"n{place}"
            self.graph.node(name, mix, [one, other])
            self.computation.add_node(name, mix, args=[one, other])
            self.cells[name] = self._cell(self.cells[one], self.cells[other])
            # Evaluated as it is made: a first evaluation from the end would recurse to the front.
            self.cells[name]()
        self.world = cw.World(self.graph, keep_sites=False)
        self.world.demand(self.last)
        self.needed = len(set(self.graph.cone("x")) & set(self.graph.support(self.last)))

    def _cell(self, one: Any, other: Any) -> Any:
        def compute() -> float:
            self.calls += 1
            return mix(one(), other())

        return Computed(compute)

    def ours(self) -> None:
        value = float(next(self.values))
        self.world.set("x", value)
        self.answers["ours"] = value, self.world.demand(self.last)

    def loman(self) -> None:
        value = float(next(self.values))
        self.computation.insert("x", value)
        self.computation.compute(self.last)
        self.answers["loman"] = value, self.computation.value(self.last)

    def reaktiv(self) -> None:
        value = float(next(self.values))
        self.cells["x"].set(value)
        self.answers["reaktiv"] = value, self.cells[self.last]()

    def check(self) -> None:
        """The same answers, and the same nodes recomputed."""
        for value, answer in self.answers.values():
            self.world.set("x", value)
            assert self.world.demand(self.last) == answer
        self.world.ledger.clear()
        self.ours()
        assert self.world.ledger.count("recomputed") == self.needed
        self.calls = 0
        self.reaktiv()
        assert self.calls == self.needed


def against_reaktiv() -> Line:
    contest = Contest(10_000)
    ours, reaktiv = interleaved(contest.ours, contest.reaktiv, rounds=9)
    contest.check()
    note = f"{contest.needed:,} nodes recomputed: {ours * 1e3:.1f} ms against {reaktiv * 1e3:.1f} ms"
    return at_least("set a source + demand, random DAG of 10,000: reaktiv / ours", reaktiv / ours, 5, note)


def against_loman(size: int, rounds: int) -> Line:
    """Loman marks all descendants anew after every node: quadratic, so the full size takes minutes."""
    contest = Contest(size)
    ours, loman = interleaved(contest.ours, contest.loman, rounds=rounds)
    contest.check()
    note = f"{contest.needed:,} nodes recomputed: {ours * 1e3:.2f} ms against {loman * 1e3:.0f} ms"
    return at_least(f"set a source + demand, random DAG of {size:,}: loman / ours", loman / ours, 1.5, note)


def lines(*, slow: bool) -> list[Line]:
    size, rounds = (10_000, 1) if slow else (1_000, 3)
    return [
        cold_demand(),
        short_cone_in_a_large_graph(),
        beta_over_a(),
        against_loman(size, rounds),
        _in_a_deep_stack(against_reaktiv),
    ]


def _in_a_deep_stack(work: Callable[[], Line]) -> Line:
    """Reaktiv recurses from the last node to the first: it needs room for that, the others do not."""
    limit, size = sys.getrecursionlimit(), threading.stack_size(1 << 29)
    sys.setrecursionlimit(1_000_000)
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
