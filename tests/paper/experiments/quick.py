"""Each experiment at a size that takes a moment: the same code as the real run, run once for all tests."""

from functools import cache

from conewise.paper.experiments import (
    backward,
    compiled,
    drift,
    e4,
    e5,
    e7,
    e9,
    edges,
    greedy,
    growth,
    index,
    locality,
    positions,
    skips,
    wavefront,
)
from conewise.paper.experiments.e9 import Size
from conewise.paper.experiments.result import Result

SMALL = Size(2, 2, 8, sites="6", predicted="2.145", wallclock="2.121", distance="1.14", cpu_width=8)


@cache
def quick(name: str) -> Result:
    if name == "locality":
        return locality.run(sizes=(60, 200), rounds=1)
    if name == "e4":
        return e4.run(depths=(20, 40))
    if name == "e5":
        return e5.run(depths=(10, 20))
    if name == "e7":
        return e7.run()
    if name == "drift":
        return drift.run(mutations=1000, graph_sizes=(400, 1000))
    if name == "e9":
        return e9.run(sizes=[SMALL])
    if name == "growth":
        return growth.run(steps=8)
    if name == "compiled":
        return compiled.run(depths=(1,), rounds=1)
    if name == "edges":
        return edges.run(names=("gpt2",), depths=(2,))
    if name == "greedy":
        return greedy.run(names=("gpt2",), lines=((4, 2),))
    if name == "positions":
        return positions.run(sizes=((2, 3), (1, 1)), models=(("gpt2", 1, 3),))
    if name == "wavefront":
        return wavefront.run(depths=(1,), rounds=1)
    if name == "backward":
        return backward.run(names=("four towers",))
    if name == "index":
        return index.run(names=("vit",))
    assert name == "skips"
    return skips.run(layers=24, periods=(4, 12, 24))
