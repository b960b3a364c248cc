"""Worlds: the memory of a fork is what its changes touch."""

from __future__ import annotations

import tracemalloc

import conewise as cw
from benchmarks.graphs import chain
from benchmarks.harness import Line


def fork_memory() -> Line:
    """Bytes of a fork that patches one site and demands its cone, in a graph of a million nodes."""
    length = 1_000_000
    base = cw.World(chain(length))
    last = f"n{length - 1}"
    base.demand(last)

    def bytes_of_a_fork(cone: int) -> float:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        forks = [base.fork() for _ in range(100)]
        for fork in forks:
            fork.patch(f"n{length - 1 - cone}", 0.0)
            assert fork.demand(last) == cone
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return used / len(forks)

    bytes_of_a_fork(10)
    ten, hundred, thousand = bytes_of_a_fork(10), bytes_of_a_fork(100), bytes_of_a_fork(1_000)
    slope = (thousand - hundred) / 900
    return Line(
        "memory of a fork with a cone of 10 in a graph of 1,000,000 nodes",
        "O(cone)",
        f"{ten / 1024:.1f} KiB",
        ten < 16 * 1024 and thousand < 1024 * 1024,
        f"cone of 100: {hundred / 1024:.1f} KiB, of 1,000: {thousand / 1024:.1f} KiB, "
        f"so {slope:.0f} bytes a node of the cone",
    )


def lines() -> list[Line]:
    return [fork_memory()]
