"""The experiments by name, each loaded only when it runs: some need torch, the others start at once."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from conewise.errors import UnknownExperimentError
from conewise.paper.experiments.result import Progress, Result, silent

NAMES = (
    *("locality", "e4", "e5", "e7", "drift", "compiled", "e9", "skips", "growth", "index"),
    *("edges", "greedy", "positions", "wavefront", "backward"),
)
HOMES = {name: f"conewise.paper.experiments.{name}" for name in NAMES}
"""The module of each."""


def choose(names: Sequence[str]) -> tuple[str, ...]:
    """The names asked for, in the order of the paper, each once; "all", or none at all, is every one."""
    for name in names:
        if name != "all" and name not in NAMES:
            raise UnknownExperimentError(name, NAMES)
    if not names or "all" in names:
        return NAMES
    return tuple(name for name in NAMES if name in names)


def run(name: str, progress: Progress = silent) -> Result:
    """Run one experiment."""
    (chosen,) = choose([name])
    module = importlib.import_module(HOMES[chosen])
    result: Result = module.run(progress)
    return result
