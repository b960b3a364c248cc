"""The plan of a sweep: a value without tensors that says what is computed, in order, at what cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from conewise.anatomy.places import Writers
from conewise.arguments import checked, shown_bytes
from conewise.errors import SweepError
from conewise.files import Format, parse_json
from conewise.sweeps.planning.fill_tables import EdgeFill, FillTable, OwnFill, read_in
from conewise.sweeps.planning.passes import PassProgram, from_plain, to_plain
from conewise.sweeps.planning.schedule import Ranges, count_of
from conewise.templates import bars, folded, lead, note, shown, table

FORMAT = Format("conewise plan", 1)


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """Costs of a sweep, known before it runs.

    `node_evaluations` counts a node once for each world that computes it: the ledger of the run counts the
    same. `full_evaluations` is what full re-runs would compute, `ratio` (ρ) their quotient. `launches` counts
    each node once for each chunk, and a chain that one kernel computes as one. These counts and `flops` are
    those of all batches, `worlds` and `chunks` those of one. `peak_bytes` is what the run takes at most
    beside the model and the baseline; the ledger has what was measured. `seconds` is an estimate, and None
    where nothing was timed on this device.
    """

    worlds: int
    batches: int
    node_evaluations: int
    full_evaluations: int
    launches: int
    flops: int
    full_flops: int
    peak_bytes: int
    max_memory: int | None
    chunks: tuple[int, ...]
    evaluator: str
    why: str
    seconds: float | None

    @property
    def ratio(self) -> float:
        """ρ: full re-runs over the sweep, in node evaluations."""
        return self.full_evaluations / self.node_evaluations if self.node_evaluations else float("inf")

    def costs(self) -> dict[str, Any]:
        """The costs alone, as plain values."""
        return {one.name: getattr(self, one.name) for one in fields(PlanCosts)}

    def rows(self) -> list[tuple[str, str]]:
        """The plan as lines of a table."""
        return [
            (
                "worlds",
                f"{self.worlds:,}" + (f", for each of {self.batches} batches" if self.batches > 1 else ""),
            ),
            ("node evaluations", f"{self.node_evaluations:,}"),
            ("full re-runs", f"{self.full_evaluations:,} (ρ = {self.ratio:.3f})"),
            ("kernel launches", f"{self.launches:,}"),
            ("FLOPs", f"{self.flops:.3g} (full re-runs {self.full_flops:.3g})"),
            (
                "peak memory",
                shown_bytes(self.peak_bytes)
                + (f" of {shown_bytes(self.max_memory)}" if self.max_memory else ""),
            ),
            (
                "chunks",
                f"{len(self.chunks)}" + (f" of up to {max(self.chunks)} worlds" if self.chunks else ""),
            ),
            ("evaluator", f"{self.evaluator}: {self.why}"),
            ("estimated time", "not calibrated" if self.seconds is None else f"{self.seconds:.2g} s"),
        ]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {value}" for label, value in self.rows())

    def __repr__(self) -> str:
        batches = f" for each of {self.batches} batches" if self.batches > 1 else ""
        seconds = "" if self.seconds is None else f", about {self.seconds:.2g} s"
        return (
            f"SweepPlan of {self.worlds:,} worlds{batches}: {self.node_evaluations:,} node evaluations "
            f"(ρ = {self.ratio:.3f}), {self.flops:.3g} FLOPs, peak {shown_bytes(self.peak_bytes)}, "
            f"{self.evaluator}{seconds}"
        )

    def _repr_html_(self) -> str:
        done, full = self.node_evaluations, self.full_evaluations
        compared = [("this sweep", float(done), f"{done:,}"), ("full re-runs", float(full), f"{full:,}")]
        saved = f"{self.worlds:,} worlds, {self.ratio:.2f} times fewer node evaluations than full re-runs"
        memory = f"at most {shown_bytes(self.peak_bytes)} of memory, by the {self.evaluator} evaluator"
        return shown(lead(saved), note(memory), bars(compared), folded("The whole plan", table(self.rows())))


class Plannable(Protocol):
    """A model: it makes the sweep that a plan was made for."""

    def planned(self, plan: Any) -> Any:
        """Return the sweep of a plan."""


@dataclass(frozen=True, slots=True, repr=False)
class SweepPlan(PlanCosts):
    """A sweep, step by step, before any of it is computed; and its costs, see `PlanCosts`.

    `compiled` has the passes, and what each consists of. `spec` says what the plan is for, in plain values:
    the program, the cells, metrics and inputs, as far as they can be written down; with it, a plan that was
    read from JSON runs on a model without the sweep that it was made by: `plan.run(model)`.

    Plans are equal where all of that is; a plan of a saved result has its costs alone.
    """

    compiled: Compiled | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    sweep: Any = field(default=None, compare=False)

    @checked
    def run(self, model: Plannable | None = None, **options: Any) -> Any:
        """Run it: the result that `sweep.run()` gives. `options` are those of `Sweep.run`."""
        if self.compiled is None:
            raise SweepError(
                "a plan of a saved result, or of several batches together, has no steps: make the sweep or "
                "the question again, and run that."
            )
        if self.sweep is not None and model is None:
            return self.sweep.run(plan=self, **options)
        if model is None:
            raise SweepError("this plan was read from JSON and has no model at hand: plan.run(model).")
        return model.planned(self).run(plan=self, **options)

    def to_json(self) -> str:
        """The plan as JSON; `SweepPlan.from_json` reads it."""
        header = FORMAT.header(writer=False)  # plans are equal, as text too, whoever wrote them
        plain: dict[str, Any] = {**header, **self.costs(), "ratio": self.ratio, "spec": dict(self.spec)}
        if self.compiled is not None:
            plain["compiled"] = self.compiled.to_plain()
        return _lines(plain)

    @classmethod
    def from_json(cls, text: str) -> SweepPlan:
        """The plan that `to_json` wrote. Raises FormatError for one of a newer version."""
        try:
            plain = FORMAT.expect(parse_json(text), "this plan")
            costs = {one.name: _expect(plain[one.name], one.name, str(one.type)) for one in fields(PlanCosts)}
            costs["chunks"] = tuple(costs["chunks"])
            compiled = Compiled.from_plain(plain["compiled"]) if "compiled" in plain else None
            found = cls(**costs, compiled=compiled, spec=_expect(plain.get("spec", {}), "spec", "dict"))
            found.check()
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise SweepError(
                f"this is no plan of a sweep ({type(error).__name__}: {error}). Give what `plan.to_json()` "
                "wrote."
            ) from None
        return found

    def check(self) -> None:
        """Assert that the parts of the plan agree."""
        if self.compiled is None:
            return
        compiled = self.compiled
        cells = len(compiled.order)  # before a range: a file may say any number of worlds
        assert cells == self.worlds, "the order has every cell once"
        assert sorted(compiled.order) == list(range(cells)), "the order has every cell once"
        assert sum(self.chunks) == self.worlds, "the chunks are all worlds"
        if self.evaluator == "wavefront":
            assert [one.worlds for one in compiled.passes] == list(self.chunks), "a pass for each chunk"
            firsts = [one.first for one in compiled.passes]
            assert firsts == [sum(self.chunks[:place]) for place in range(len(firsts))], "passes in order"
            for one in compiled.passes:
                program = compiled.programs[one.program]
                assert program.worlds == one.worlds, "a program of as many worlds"
                assert len(program.rises) == len(program.steps), "memory of every step"
            counted = sum(compiled.programs[one.program].node_evaluations for one in compiled.passes)
        else:
            counted = sum(count_of(worlds) for _, worlds in compiled.steps)
        chunks = [range(one.first, one.first + one.worlds) for one in compiled.passes]
        chunks = chunks or [range(world, world + 1) for world in range(len(compiled.order))]
        counted += sum(read.writers * read.work for one in chunks for read in read_in(compiled.fills, one))
        assert counted * self.batches == self.node_evaluations, "the steps are what is counted"


def _expect(value: Any, name: str, kind: str) -> Any:
    """A value of a plan that was read, of the type that it is declared with."""
    of_kind = {
        "int": type(value) is int,
        "int | None": value is None or type(value) is int,
        "float | None": value is None or type(value) in (int, float),
        "str": isinstance(value, str),
        "tuple[int, ...]": isinstance(value, list) and all(type(one) is int for one in value),
        "dict": isinstance(value, dict),
    }
    if not of_kind[kind]:
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def _lines(plain: Mapping[str, Any]) -> str:
    """JSON with a line for each step, so that a change of plan shows in a diff."""
    parts = []
    for name, value in plain.items():
        if name != "compiled":
            parts.append(f'"{name}": {json.dumps(value, sort_keys=True)}')
            continue
        inner = []
        for key, one in value.items():
            if key == "programs":
                inner.append(f'"programs": [{",".join(map(_program_lines, one))}]')
            elif key in {"steps", "fills"}:
                rows = ",\n   ".join(json.dumps(row) for row in one)
                inner.append(f'"{key}": [\n   {rows}]')
            else:
                inner.append(f'"{key}": {json.dumps(one)}')
        parts.append('"compiled": {\n  ' + ",\n  ".join(inner) + "}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _program_lines(program: Mapping[str, Any]) -> str:
    rows = []
    for key, one in program.items():
        if key == "steps":
            steps = ",\n     ".join(json.dumps(step) for step in one)
            rows.append(f'"steps": [\n     {steps}]')
        else:
            rows.append(f'"{key}": {json.dumps(one)}')
    return "\n   {" + ",\n    ".join(rows) + "}"


def of_batches(plans: Sequence[SweepPlan]) -> SweepPlan:
    """The plan of a run, from one for each batch that takes all others to be like it.

    `chunks` are those of the batch that is cut most.
    """
    count = len(plans)
    if count == 1:
        return plans[0]
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    return replace(
        plans[0],
        compiled=None,  # each batch has its own
        node_evaluations=sum(plan.node_evaluations for plan in plans) // count,
        full_evaluations=sum(plan.full_evaluations for plan in plans) // count,
        launches=sum(plan.launches for plan in plans) // count,
        flops=sum(plan.flops for plan in plans) // count,
        full_flops=sum(plan.full_flops for plan in plans) // count,
        peak_bytes=max(plan.peak_bytes for plan in plans),
        chunks=max((plan.chunks for plan in plans), key=len),
        seconds=sum(seconds) / count if len(seconds) == count else None,
    )


def as_json(value: Any) -> str:
    """Any plain value as JSON, keys sorted: equal values have equal text."""
    return json.dumps(value, sort_keys=True, default=str)


# ------------------------------------------------------------------------------------------
# A compiled sweep: passes, what each consists of, what worlds put where, what it costs. Plain data.


@dataclass(frozen=True, slots=True)
class Pass:
    """Worlds that are computed together: the first, how many, the first position that they change.

    `program` is the number of what is done; equal passes have the same.
    """

    first: int
    worlds: int
    start: int
    program: int


@dataclass(frozen=True)
class Compiled:
    """The steps of a plan, for runs of one shape.

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
            tuple(from_plain(PassProgram, one) for one in plain["programs"]),
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


# ------------------------------------------------------------------------------------------
# Plain values that are made when they are first asked for.


class Lazy(Mapping[str, Any]):
    """A mapping that is made when it is first read, and then kept."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make: Callable[[], dict[str, Any]] | None = make
        self._made: dict[str, Any] = {}

    def _values(self) -> dict[str, Any]:
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made

    def __getitem__(self, name: str) -> Any:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._values() == dict(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._values())
