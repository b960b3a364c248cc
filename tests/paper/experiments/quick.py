"""Each experiment at a size that takes a moment: the same code as the real run, run once for all tests."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from conewise.paper import experiments
from conewise.paper.experiments.e9 import Size
from conewise.paper.experiments.result import Result

SMALL = Size(2, 2, 8, sites="6", predicted="2.145", wallclock="2.121", distance="1.14", cpu_width=8)

SIZES: Mapping[str, Mapping[str, Any]] = {
    "locality": {"sizes": (60, 200), "rounds": 1},
    "e4": {"depths": (20, 40)},
    "e5": {"depths": (10, 20), "joint": (5, 10, 20)},
    "e7": {},
    "drift": {"mutations": 1000, "graph_sizes": (400, 1000)},
    "compiled": {"depths": (1,), "rounds": 1},
    "e9": {"sizes": [SMALL]},
    "skips": {"layers": 24, "periods": (4, 12, 24)},
    "growth": {"steps": 8},
    "index": {"names": ("vit",)},
    "edges": {"names": ("gpt2",), "depths": (2,)},
    "greedy": {"names": ("gpt2",), "lines": ((4, 2),)},
    "positions": {"sizes": ((2, 3), (1, 1)), "models": (("gpt2", 1, 3),)},
    "wavefront": {"depths": (1,), "rounds": 1},
    "backward": {"names": ("four towers",)},
}


_run = experiments.run
"""The real one, also where a test has put `quick` in its place."""


@cache
def quick(name: str) -> Result:
    return _run(name, **SIZES[name])
