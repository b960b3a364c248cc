"""A compiled sweep: passes, what each consists of, what worlds put where, what it costs. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conewise.locations.places import Writers
from conewise.sweeps.planning.passes.fill_tables import EdgeFill, FillTable, OwnFill
from conewise.sweeps.planning.passes.instructions import PassProgram, pass_program, to_plain
from conewise.sweeps.planning.passes.worlds import Ranges


@dataclass(frozen=True, slots=True)
class Pass:
    """Worlds that are computed together: the first, how many, the first position that they change.

    `program` is the number of what is done; equal passes have the same.
    """

    first: int
    worlds: int
    start: int
    program: int


@dataclass(frozen=True, slots=True)
class Costing:
    """What a compiled sweep costs, for one batch.

    `kept_bytes` are those of `peak_bytes` that parts of weights take, for as long as the model is there.
    """

    node_evaluations: int
    full_evaluations: int
    launches: int
    flops: int
    full_flops: int
    peak_bytes: int
    kept_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    """What a sweep computes, for runs of one shape.

    `symbols` are the sizes of the inputs, `targets` the nodes that metrics read, `order` the cell of each
    world. `steps` says which nodes are computed in which worlds, whichever way; `passes` how a wavefront does
    it, none where the plan is serial. `fills` says what worlds put where. `columns` are the products of which
    only so many columns are computed.
    """

    symbols: tuple[tuple[str, int], ...]
    targets: tuple[str, ...]
    order: tuple[int, ...]
    steps: tuple[tuple[str, Ranges], ...]
    passes: tuple[Pass, ...]
    programs: tuple[PassProgram, ...]
    fills: tuple[FillTable, ...]
    columns: tuple[tuple[str, int], ...] = ()

    def work(self) -> Compiled:
        """The same without what steps take of memory: that depends on the machine, its threads for one."""
        bare = (replace(program, rises=(), reading=0, peak=0) for program in self.programs)
        return replace(self, programs=tuple(bare))

    def to_plain(self) -> dict[str, Any]:
        """As lists and mappings."""
        return {
            "symbols": dict(self.symbols),
            "targets": list(self.targets),
            "order": list(self.order),
            "steps": [[node, [list(one) for one in worlds]] for node, worlds in self.steps],
            "passes": [[one.first, one.worlds, one.start, one.program] for one in self.passes],
            "programs": [to_plain(program) for program in self.programs],
            "fills": [_table_to_plain(table) for table in self.fills],
            "columns": dict(self.columns),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Compiled:
        """From what `to_plain` made of it."""
        return cls(
            tuple(plain["symbols"].items()),
            tuple(plain["targets"]),
            tuple(plain["order"]),
            tuple((node, tuple((a, b) for a, b in worlds)) for node, worlds in plain["steps"]),
            tuple(Pass(*one) for one in plain["passes"]),
            tuple(pass_program(one) for one in plain["programs"]),
            tuple(_table(one) for one in plain["fills"]),
            tuple(plain["columns"].items()),
        )


def _table_to_plain(table: FillTable) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "node": table.node,
        "site": list(table.site),
        "ordinal": table.ordinal,
        "worlds": list(table.worlds),
        "axes": list(table.axes),
        "index": [list(along) for along in table.index],
        "fixed": [[axis, [kind, list(one)]] for axis, (kind, one) in table.fixed],
    }
    if (edges := table.edges) is not None:
        plain["edges"] = [list(edges.writers), edges.entry, edges.work, edges.at_once, edges.live]
    if table.own is not None:
        plain["own"] = [list(table.own.sources), table.own.how]
    return plain if table.edit is None else {**plain, "edit": table.edit}


def _table(plain: Mapping[str, Any]) -> FillTable:
    name, layer, stack = plain["site"]
    return FillTable(
        plain["node"],
        (name, layer, stack),
        plain["ordinal"],
        tuple(plain["worlds"]),
        tuple(plain["axes"]),
        tuple(tuple(along) for along in plain["index"]),
        tuple((axis, (kind, tuple(one))) for axis, (kind, one) in plain["fixed"]),
        plain.get("edit"),
        None if plain.get("edges") is None else EdgeFill(_writers(plain["edges"][0]), *plain["edges"][1:]),
        None if plain.get("own") is None else OwnFill(tuple(plain["own"][0]), plain["own"][1]),
    )


def _writers(plain: Sequence[Any]) -> tuple[Writers, ...]:
    """The writers of each world: all are numbers, or all are several numbers."""
    return tuple(map(tuple, plain)) if plain and isinstance(plain[0], Sequence) else tuple(plain)
