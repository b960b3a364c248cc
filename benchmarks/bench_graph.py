"""The graph: grafts that do not pay for the graph's size, and all cones at once."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Callable

import conewise as cw
from benchmarks.graphs import add_one, chain, layered
from benchmarks.harness import Line, at_most, interleaved, seconds
from conewise.reactive.graph import cone_sizes


def graft_bookkeeping() -> Line:
    """Grafting one block near the end and taking it out again, in a valid world: no demand."""

    def prepared(length: int) -> Callable[[], None]:
        graph = chain(length)
        world = cw.World(graph, keep_sites=False)
        last = f"n{length - 1}"
        assert world.demand(last) == length
        edge, block = (f"n{length - 11}", f"n{length - 10}"), cw.chain(add_one)

        def run() -> None:
            for _ in range(50):
                graph.remove(graph.graft(edge, block))

        def check() -> None:
            graft = graph.graft(edge, block)
            assert world.demand(last) == length + 1
            graph.remove(graft)
            assert world.demand(last) == length

        check()
        return run

    large, small = interleaved(prepared(400_000), prepared(400), rounds=41)
    note = f"{large / 50 * 1e6:.1f} us against {small / 50 * 1e6:.1f} us, graft and removal"
    return at_most("bookkeeping of one graft: 400,000 nodes / 400 nodes", large / small, 1.5, note)


def all_cone_sizes() -> Line:
    """Exact sizes of all cones of a layered DAG of 100,000 nodes, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_graph"]
    took, peak = map(
        float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )
    return Line(
        "exact sizes of all cones, layered DAG of 100,000 nodes",
        "<= 30 s, 4 GiB",
        f"{took:.1f} s, {peak:.2f} GiB",
        took <= 30 and peak <= 4,
        "300,000 edges; the peak is the whole process's; 50 cones checked by search",
    )


def lines() -> list[Line]:
    return [graft_bookkeeping(), all_cone_sizes()]


if __name__ == "__main__":
    graph = layered(100, 1_000, fan_in=3, seed=0)
    sizes: dict[str, int] = {}
    took = seconds(lambda: sizes.update(cone_sizes(graph)))
    for site in random.Random(1).sample(graph.sites, 50):
        assert sizes[site] == len(graph.cone(site)), site
    print(took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
