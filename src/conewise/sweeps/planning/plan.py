"""The plan of a sweep: a value without tensors that says what is computed, in order, at what cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

from conewise.arguments import checked, shown_bytes
from conewise.errors import SweepError
from conewise.files import Format, parse_json
from conewise.sweeps.planning.passes import PassProgram
from conewise.sweeps.planning.patching import FillTable, read_in
from conewise.sweeps.planning.schedule import Ranges, count_of
from conewise.sweeps.storage.codec import decoded, plain
from conewise.templates import aligned, bars, folded, lead, note, shown, table

FORMAT = Format("conewise plan", 1)

SERIAL_GROUP = 16
"""The number of worlds of a serial run that are one chunk, so that storing is cheap."""


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """Costs of a sweep, known before it runs.

    `node_evaluations` counts a node once for each world that computes it: the ledger of the run counts the
    same. `full_evaluations` is what full re-runs would compute, `ratio` (ρ) their quotient. `launches` counts
    each node once for each chunk, and a chain that one kernel computes as one. These counts and `flops` are
    those of all batches, `worlds` and `chunks` those of one. `peak_bytes` is what the run takes at most
    beside the model and the baseline; the ledger has what was measured. `seconds` is an estimate, and None
    where nothing was timed on this device. `moved_bytes` are those of weights that stream to the device for
    the passes, 0 where they lie there.
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
    moved_bytes: int = 0

    @property
    def ratio(self) -> float:
        """ρ: full re-runs over the sweep, in node evaluations."""
        return self.full_evaluations / self.node_evaluations if self.node_evaluations else float("inf")

    def costs(self) -> dict[str, Any]:
        """The costs alone, as plain values."""
        found = {one.name: getattr(self, one.name) for one in fields(PlanCosts)}
        return found if self.moved_bytes else {k: v for k, v in found.items() if k != "moved_bytes"}

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
            *([("weights moved", shown_bytes(self.moved_bytes))] if self.moved_bytes else []),
            ("evaluator", f"{self.evaluator}: {self.why}"),
            ("estimated time", "not calibrated" if self.seconds is None else f"{self.seconds:.2g} s"),
        ]

    def __str__(self) -> str:
        return "\n".join(aligned(self.rows()))

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


COUNTED = ("node_evaluations", "full_evaluations", "launches", "flops", "full_flops", "moved_bytes")
"""The costs that are those of all batches."""


class Plannable(Protocol):
    """A model: it makes the sweep that a plan was made for."""

    def planned(self, plan: Any) -> Any:
        """Return the sweep of a plan."""


@dataclass(frozen=True, slots=True, repr=False)
class SweepPlan(PlanCosts):
    """A sweep, step by step, before any of it is computed; and its costs, see `PlanCosts`.

    `compiled` holds the passes, and the contents of each. `spec` describes the purpose of the plan in plain
    values: the program, the cells, metrics and inputs, as far as they can be written as plain values. With
    it, a plan that was read from JSON runs on a model without the original sweep: `plan.run(model)`. Plans
    are equal if all of these are equal; the plan of a saved result has its costs alone.
    """

    compiled: Compiled | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    sweep: Any = field(default=None, compare=False)

    @checked
    def run(self, model: Plannable | None = None, **options: Any) -> Any:
        """Run the plan, and return the same result as `sweep.run()`. `options` are those of `Sweep.run`."""
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
        """Return the plan as JSON; `SweepPlan.from_json` reads it."""
        header = FORMAT.header(writer=False)  # plans are equal, as text too, whoever wrote them
        found: dict[str, Any] = {**header, **self.costs(), "ratio": self.ratio, "spec": dict(self.spec)}
        if self.compiled is not None:
            found["compiled"] = self.compiled.to_plain()
        return _lines(found)

    @classmethod
    def from_json(cls, text: str) -> SweepPlan:
        """Read a plan that `to_json` wrote. Raises FormatError for a plan of a newer version."""
        try:
            given = FORMAT.expect(parse_json(text), "this plan")
            compiled = Compiled.from_plain(given["compiled"]) if "compiled" in given else None
            spec = decoded(given.get("spec", {}), dict[str, Any], "spec")
            found = cls(**decoded(given, PlanCosts, "it").costs(), compiled=compiled, spec=spec)
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
        counted += sum(compiled.of_readers(one)[0] for one in compiled.together)
        assert counted * self.batches == self.node_evaluations, "the steps are what is counted"


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


def chunks_of(plan: SweepPlan) -> tuple[list[range], list[int]]:
    """Return the worlds of each chunk of a batch's plan, and what it costs, in FLOPs."""
    assert plan.compiled is not None
    compiled, chunks = plan.compiled, plan.compiled.chunks
    if plan.evaluator == "serial":
        return chunks, [plan.flops // plan.batches * len(one) // len(compiled.order) for one in chunks]
    return chunks, [compiled.programs[one.program].flops for one in compiled.passes]


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
        **{name: sum(getattr(plan, name) for plan in plans) // count for name in COUNTED},
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

    as_row: ClassVar[bool] = True

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

    @property
    def chunks(self) -> list[range]:
        """The worlds of each chunk: of a pass, or so many that are computed one after another."""
        worlds = len(self.order)
        if self.passes:
            return [range(one.first, one.first + one.worlds) for one in self.passes]
        return [range(at, min(at + SERIAL_GROUP, worlds)) for at in range(0, worlds, SERIAL_GROUP)]

    def of_readers(self, worlds: range) -> tuple[int, int]:
        """Return how many nodes readers of edges compute for worlds of one pass, and in how many launches."""
        found = list(read_in(self.fills, worlds))
        return sum(one.writers * one.work for one in found), sum(one.calls * one.work for one in found)

    @property
    def together(self) -> list[range]:
        """The worlds that are computed together: those of a pass, or each alone."""
        return self.chunks if self.passes else [range(at, at + 1) for at in range(len(self.order))]

    def work(self) -> Compiled:
        """The same without what steps take of memory: that depends on the machine, its threads for one."""
        bare = (replace(program, rises=(), reading=0, peak=0) for program in self.programs)
        return replace(self, programs=tuple(bare))

    def to_plain(self) -> dict[str, Any]:
        """Return lists and mappings."""
        return {**plain(self), "symbols": dict(self.symbols), "columns": dict(self.columns)}

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> Compiled:
        """Return what `to_plain` made these of."""
        pairs = {name: list(given[name].items()) for name in ("symbols", "columns")}
        found: Compiled = decoded({**given, **pairs}, cls, "it")
        return found


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
