"""Values of a run, by the graph's own names, each read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conewise.runs.reading import Reading


def reader(run: Reading) -> Callable[[str], Any]:
    """Reads values of a run by the graph's own names, each once."""
    known: dict[str, Any] = {}

    def read(name: str) -> Any:
        if name not in known:
            (known[name],) = run.demand([name])
        return known[name]

    return read
