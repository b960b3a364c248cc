"""`python -m benchmarks [--slow]`: the engine's table. Each module's rows stand beside what they time."""

from __future__ import annotations

import sys

from benchmarks import bench_demand, bench_graph, bench_world
from benchmarks.harness import print_table


def main() -> None:
    slow = "--slow" in sys.argv[1:]
    print_table(
        "The reactive engine",
        [*bench_demand.lines(slow=slow), *bench_graph.lines(), *bench_world.lines()],
    )


if __name__ == "__main__":
    main()
