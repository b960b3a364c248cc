"""All kinds of jobs over one small model, as one table: the same is tested of each."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import conewise as cw
from conewise.jobs.store import FILE
from conewise.model import Model
from tests.jobs.fleet_cases import BUDGET, HEADS, ids, small_model
from tests.text.test_questions import pairs, question

METRIC, OTHER = cw.logit_diff(answer=3, wrong=5), cw.logit_diff(answer=4, wrong=5)
SEVERAL = [{"input_ids": ids(seed)} for seed in (1, 2, 3)]


@cache
def model() -> Model:
    return small_model()


@dataclass(frozen=True)
class Kind:
    """`run` takes the metric and how it is run; `total` is what progress counts to, `unit` what it counts."""

    run: Callable[..., Any]
    total: Callable[[Any], int]
    unit: str = "cells"


def sweep(metric: Any = METRIC, **how: Any) -> Any:
    made = model().sweep(HEADS, base=SEVERAL, source=SEVERAL[::-1], metric=metric)
    return made.run(max_memory=BUDGET, **how)


def attribution(metric: Any = METRIC, **how: Any) -> Any:
    return model().attribute(HEADS, base=SEVERAL, source=SEVERAL[::-1], metric=metric).run(**how)


def search(metric: Any = METRIC, **how: Any) -> Any:
    base, source = SEVERAL[:2]
    return model().find_circuit(base=base, source=source, metric=metric, threshold=0.05).run(**how)


def groups(metric: Any = METRIC, **how: Any) -> Any:
    name = "logit_diff" if metric is METRIC else "prob"
    return question(pairs(), metric=name).run(max_memory="300kB", **how)


def trace(metric: Any = METRIC, **how: Any) -> Any:
    made = model().causal_trace(ids(1, batch=1), subject=[1, 2], metric=metric, n=3, together=1)
    return made.run(**how)


KINDS = {
    "sweep": Kind(sweep, lambda found: 3 * len(found.cells)),
    "attribution": Kind(attribution, lambda found: 3 * len(found.cells)),
    "search": Kind(search, lambda found: len(found.log), "decisions"),
    "trace": Kind(trace, lambda found: 3 * len(found.result.cells)),
    "groups": Kind(groups, lambda found: 2 * len(found.cells)),
}


def stored(folder: Path) -> int:
    """How many rows are stored in a folder, and in those in it."""
    found = 0
    for path in folder.rglob(FILE):
        with closing(sqlite3.connect(path)) as connection:
            for (shape,) in connection.execute("SELECT shape FROM chunks"):
                found += int(shape.strip("[").split(",")[0])
    return found


def same(one: Any, other: Any) -> bool:
    """Equal in every bit; for searches by workers, whose metrics may round otherwise, in every decision."""
    if isinstance(one, cw.Circuit):
        return [(a.edge, a.kept) for a in one.log] == [(b.edge, b.kept) for b in other.log]
    equal: bool = one.equals(other)
    return equal
