"""The paper's experiments by name, each loaded only when it runs: some need torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from conewise.errors import UnknownExperimentError
from conewise.paper.experiments.result import Progress, Result, silent

HOMES = {
    "locality": "locality",
    "e4": "layered",
    "e5": "layered",
    "e7": "grafts",
    "drift": "drift",
    "compiled": "sweeps",
    "e9": "e9",
    "skips": "layered",
    "growth": "grafts",
    "index": "index",
    "edges": "edges",
    "greedy": "edges",
    "positions": "positions",
    "wavefront": "sweeps",
    "backward": "backward",
}
"""The module of each, which has a function of that name."""

NAMES = tuple(HOMES)


def choose(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names asked for, each once, in the order of the paper; "all", or no name, is every one."""
    for name in names:
        if name != "all" and name not in NAMES:
            raise UnknownExperimentError(name, NAMES)
    if not names or "all" in names:
        return NAMES
    return tuple(name for name in NAMES if name in names)


def run(name: str, progress: Progress = silent, **sizes: Any) -> Result:
    """Run one experiment; `sizes` are its own, for a smaller run than the paper's."""
    (chosen,) = choose([name])
    module = importlib.import_module(f"conewise.paper.experiments.{HOMES[chosen]}")
    result: Result = getattr(module, chosen)(progress, **sizes)
    return result
