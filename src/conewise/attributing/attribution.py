"""Attribution: what every patch of a sweep would do, estimated by gradients, as a result like a sweep's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conewise.amounts import as_bytes
from conewise.attributing.approximation import Approximation
from conewise.attributing.costs import Counts
from conewise.attributing.hybrid import hybrid
from conewise.attributing.methods import HYBRID, Cells, Method, method_of
from conewise.attributing.pieces import Piece, pieces_of, prompts_at_once
from conewise.attributing.plan import AttributionPlan, counted_words
from conewise.attributing.work import Work
from conewise.capturing.foreign import within_memory
from conewise.edges.edge_facts import edge_facts
from conewise.errors import Argument, SweepError, WeightsChangedError
from conewise.locations.edge_sets import with_named
from conewise.locations.places import EdgePlace
from conewise.locations.selectors import SelectorLike
from conewise.phases import Phases
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents
from conewise.runs.captured import Captured
from conewise.runs.filling import joined
from conewise.sweeps.execution.growth import watching
from conewise.sweeps.execution.ledger import PHASES, SweepLedger
from conewise.sweeps.planning.lazy import Lazy
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.progress import Shown, bar
from conewise.sweeps.running import trusting
from conewise.sweeps.storage.provenance import lazy_provenance, provenance
from conewise.sweeps.storage.store import Recorder, StoredSweep, recorder
from conewise.sweeps.sweep import Sweep

TOP, SAMPLE = 10, 20
"""How many of the largest cells `hybrid` looks for, and of how many it learns how far gradients are off."""

EVALUATOR = "gradients"


@within_memory("this attribution")
def attribution(
    model: Captured,
    sites: SelectorLike,
    *,
    base: Any,
    source: Any,
    metric: Any,
    method: str = "atp",
    steps: int | None = None,
    top: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    max_memory: int | str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | Callable[[int, int], None] | None = None,
) -> Approximation:
    """Estimate by gradients what `model.sweep(sites, ...)` would find: a result of the same cells.

    `sites`, `base`, `source` and `metric` are those of a sweep. The result's `effect` is the attribution,
    and a value is the base's metric plus that: an approximation, which plots, tables, files and pages say.

    `method` is, for sites, "atp" (attribution patching), "atp*" (with both of its corrections) or "ig"
    (integrated gradients, with `steps`); for edges "eap", "eap-ig" (along the inputs, with `steps`) or
    "eap-ig-activations" (along what each layer writes, with `steps`); for both "relp" (relevance patching).
    "hybrid" ranks by "atp" or "eap", computes `sample` cells exactly at random (20), and then cells from the
    top down, until none that is left can belong to the `top` largest (10) by the error of the sample; `exact`
    names them.

    `max_memory`: so many prompts are computed at a time that no more is held; see `attribution_plan`.
    `out`, `resume` and `progress` as in `Sweep.run`: a batch, or what of it is computed at a time, is stored
    when it is done.
    """
    sweep = sweep_of(model, sites, base=base, source=source, metric=metric)
    return estimated(
        sweep,
        method,
        steps,
        top=top,
        sample=sample,
        seed=seed,
        max_memory=max_memory,
        out=out,
        resume=resume,
        progress=progress,
    )


def attribution_plan(
    model: Captured,
    sites: SelectorLike,
    *,
    base: Any,
    source: Any,
    metric: Any,
    method: str = "atp",
    steps: int | None = None,
    max_memory: int | str | None = None,
) -> AttributionPlan:
    """What `attribution` would take with these arguments: passes, nodes, FLOPs, memory; nothing is computed.

    Of "hybrid" it is what ranking takes; how many worlds are computed after that is not known before.
    """
    return planned(sweep_of(model, sites, base=base, source=source, metric=metric), method, steps, max_memory)


def sweep_of(model: Captured, sites: SelectorLike, *, base: Any, source: Any, metric: Any) -> Sweep:
    """The sweep whose effects are estimated."""
    named = with_named(sites, lambda stack: edge_facts(model, stack).components, model.locate)
    return Sweep(model, named, base=base, source=source, metric=metric)


def planned(
    sweep: Sweep, method: str, steps: int | None = None, max_memory: int | str | None = None
) -> AttributionPlan:
    """What an attribution would take: see `attribution_plan`."""
    _expect_one_source(sweep)
    if method == HYBRID:
        _expect_no_steps(steps)
        method = _ranking(sweep)
    asked = _Asked.of(sweep, method, steps, max_memory)
    return asked.plan


def estimated(
    sweep: Sweep,
    method: str,
    steps: int | None = None,
    *,
    top: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    max_memory: int | str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Shown = None,
) -> Approximation:
    """What a sweep would find, estimated by a method: see `attribution`."""
    _expect_one_source(sweep)
    if method == HYBRID:
        _expect_no_steps(steps)
        if out is not None or resume:
            raise SweepError(
                "'hybrid' is not stored, since what it computes depends on what it found: leave out ",
                Argument("out"),
                ", or take another method and check it.",
            )
        count = min(_cells(top, TOP, 1, "top"), len(sweep.cells))
        drawn = _cells(sample, SAMPLE, 2, "sample")
        first = _Asked.of(sweep, _ranking(sweep), None, max_memory).run(None, resume=False, progress=progress)
        return hybrid(first, count, drawn, seed, max_memory)
    if top is not None or sample is not None:
        raise SweepError("`top` and `sample` are of method='hybrid'; others compute no cell exactly.")
    asked = _Asked.of(sweep, method, steps, max_memory)
    return asked.run(out, resume=resume, progress=progress)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is estimated, how, and in which pieces."""

    sweep: Sweep
    method: Method
    cells: Cells
    steps: int
    max_memory: int | None
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, sweep: Sweep, method: str, steps: int | None, max_memory: int | str | None) -> _Asked:
        chosen, budget = method_of(method), as_bytes(max_memory)
        count = chosen.steps(steps)
        cells = chosen.cells(sweep.model, sweep.cells)
        return cls(sweep, chosen, cells, count, budget, pieces_of(sweep, chosen, cells, count, budget))

    @property
    def described(self) -> str:
        return self.method.described(self.steps)

    @property
    def plan(self) -> AttributionPlan:
        return AttributionPlan(
            self.described,
            len(self.sweep.cells),
            self.sweep.batches,
            len(self.pieces),
            prompts_at_once(self.pieces),
            self.max_memory,
            sum((piece.counts for piece in self.pieces), Counts()),
        )

    def run(self, out: str | Path | None, *, resume: bool, progress: Shown) -> Approximation:
        """The result, piece by piece."""
        sweep, phases = self.sweep, Phases(PHASES)

        def attempt(weights: Contents) -> Approximation:
            tell.begin(phases)
            sweep._expect_weights(weights.whole)
            run = _Run(self, weights, phases)
            with ExitStack() as recording:
                with phases.during("storing"):
                    record = recording.enter_context(recorder(self._stored(weights), out, resume))
                for number in range(len(self.pieces)):
                    run.compute(number, record)
                    tell(len(sweep.cells))
            return run.result()

        total = len(sweep.cells) * len(self.pieces)
        with bar(progress, total, facts_of(sweep.model).device) as tell:
            tell.begin(phases)
            result = sweep._with_weights(attempt, phases, is_stored=out is not None)
        assert isinstance(result, Approximation)
        return result

    @property
    def said(self) -> dict[str, Any]:
        """The method, as provenance says it."""
        steps = {} if self.method.default_steps is None else {"steps": self.steps}
        return {"method": self.method.name, **steps}

    def _stored(self, weights: Contents) -> StoredSweep:
        sweep = self.sweep

        def identity() -> dict[str, Any]:
            own = provenance(sweep.model, sweep.spec, sweep._given, weights.whole, strict=True)
            at_once = prompts_at_once(self.pieces)
            return {**own, "attribution": self.said, "prompts at once": at_once or "all"}

        def order() -> list[str]:
            return [cell.name for cell in sweep.cells]

        device = facts_of(sweep.model).device
        return StoredSweep(len(sweep.cells), len(self.pieces), identity, order, device)


@dataclass(slots=True)
class _Run:
    """An attribution under way: what was found of each piece, and what it took."""

    asked: _Asked
    weights: Contents
    phases: Phases
    ledger: SweepLedger = field(default_factory=SweepLedger)
    values: list[Tensor] = field(default_factory=list)
    bases: list[Tensor] = field(default_factory=list)
    sources: list[Tensor | None] = field(default_factory=list)
    full: tuple[int, int] = (0, 0)
    done: Counts = field(default_factory=Counts)

    def compute(self, number: int, record: Recorder) -> None:
        """One piece: computed, or found in the store."""
        asked, sweep = self.asked, self.asked.sweep
        piece, during = asked.pieces[number], self.phases.during
        with during("baselines"):
            batch = piece.batch(sweep)
            batch.expect_possible(sweep.spec.cells)
        devices, planned = facts_of(sweep.model).devices, piece.counts.peak_bytes
        with trusting(batch, self.weights, self.phases):
            work = Work(
                batch,
                piece.spec(sweep),
                self.ledger,
                asked.cells.reads,
                self.weights.whole,
                is_one_pass=asked.method.is_one_pass,
            )
            with during("storing"):
                stored = record.get(number, 0, len(sweep.cells)) if record.keeps else None
            if stored is None:
                with during("passes"), watching(devices, planned, asked.max_memory) as watch:
                    effects = asked.method.scores(work, asked.cells, asked.steps)
                self.ledger.note_memory(watch.peak, watch.reserved)
                self.done += Counts(work.forwards, work.backwards, 0, work.flops)
            with during("baselines"):
                base, source = work.numbers("base"), work.numbers("source")
            assert base is not None
            if record.keeps:
                with during("storing"):
                    record.begin(number, self._plan(piece.counts, asked.max_memory), base, source)
            if stored is None:
                values = effects + base[:, None]
                if record.keeps:
                    self._expect_unchanged()
                    with during("storing"):
                        record.put(number, 0, values.transpose(0, 1))
            else:
                values = stored.transpose(0, 1)
                self.ledger.resumed += len(sweep.cells)
                self.ledger.node_evaluations += piece.counts.node_evaluations
                self.ledger.launches += piece.counts.node_evaluations
                self.done += Counts(piece.counts.forwards, piece.counts.backwards, 0, piece.counts.flops)
            self.values.append(values)
            self.bases.append(base)
            self.sources.append(source)
            self._count_full(work)
        if (
            len(asked.pieces) > 1
            and piece.number != asked.pieces[min(number + 1, len(asked.pieces) - 1)].number
        ):
            sweep._batches.forget()

    def _count_full(self, work: Work) -> None:
        """The node evaluations and FLOPs of a full forward for each world of a piece."""
        names = [record.name for record in work.model.program.records]
        worlds = len(self.asked.sweep.cells)
        nodes, flops = self.full
        each = sum(map(work.shape.costs.flops, names))
        self.full = nodes + worlds * len(names), flops + worlds * each

    def _expect_unchanged(self) -> None:
        """Raise WeightsChangedError where a weight was written to since the run began."""
        weights = self.asked.sweep.model.weights
        with self.phases.during("weights"):
            changed = weights.changed(self.weights.whole, weights.contents().whole)
        if changed:
            raise WeightsChangedError(
                f"the weights of {self.asked.sweep.model.name} were written to meanwhile: {changed}. Effects "
                "are of no one model, and there is no result. Leave the weights alone until it has ended."
            )

    def _plan(self, counts: Counts, max_memory: int | None) -> SweepPlan:
        sweep, described = self.asked.sweep, self.asked.described
        passes = (
            f"{counted_words(counts.forwards, 'forward')} and {counted_words(counts.backwards, 'backward')}"
        )
        return SweepPlan(
            worlds=len(sweep.cells),
            batches=sweep.batches,
            node_evaluations=counts.node_evaluations,
            full_evaluations=self.full[0],
            launches=counts.node_evaluations,
            flops=counts.flops,
            full_flops=self.full[1],
            peak_bytes=counts.peak_bytes,
            max_memory=max_memory,
            chunks=(len(sweep.cells),),
            evaluator=EVALUATOR,
            why=f"approximate, {described}: {passes} over parts of the program",
            seconds=None,
        )

    def result(self) -> Approximation:
        """All pieces together."""
        asked, sweep, ledger = self.asked, self.asked.sweep, self.ledger
        self._expect_unchanged()
        ledger.phases = self.phases.seconds()
        ledger.seconds = sum(ledger.phases.values())
        counted = Counts(
            self.done.forwards,
            self.done.backwards,
            ledger.node_evaluations,
            self.done.flops,
            max(piece.counts.peak_bytes for piece in asked.pieces),
        )
        known = [one for one in self.sources if one is not None]
        per_prompt, base_rows = joined(self.values), joined(self.bases)
        source_rows = joined(known) if len(known) == len(self.sources) else None
        identified = lazy_provenance(sweep.model, sweep.spec, sweep._given, self.weights.whole)
        said = asked.said
        return Approximation(
            self._plan(counted, asked.max_memory),
            ledger,
            sweep.spreads,
            tuple(one.name for one in sweep.metrics),
            per_prompt.mean(-1),
            per_prompt,
            base_rows.mean(-1),
            None if source_rows is None else source_rows.mean(-1),
            Lazy(lambda: {**identified, "attribution": said}),
            None,
            sweep,
            base_rows,
            source_rows,
            self.weights.whole,
            asked.described,
        )


def _ranking(sweep: Sweep) -> str:
    """What `hybrid` ranks by."""
    is_edge = any(isinstance(place, EdgePlace) for place in sweep.cells[0].places)
    return "eap" if is_edge else "atp"


def _expect_one_source(sweep: Sweep) -> None:
    if len(sweep.own):
        raise SweepError(
            "attribution is by one source for all cells, and here cells have sources of their own. Run the "
            "sweep itself, or attribute to places with `source=`."
        )
    put = sweep.batch(0).intervention
    if put.expect_base is not None:
        raise SweepError(f"{put.name} puts in what no gradient tells the effect of: run the sweep itself.")


def _expect_no_steps(steps: int | None) -> None:
    if steps is not None:
        raise SweepError(f"'hybrid' takes one gradient, and no steps: leave out steps={steps!r}.")


def _cells(given: int | None, default: int, least: int, what: str) -> int:
    if given is None:
        return default
    if isinstance(given, bool) or given < least:
        raise SweepError(f"{what} is a number of cells of at least {least}, and not {given!r}.")
    return given
