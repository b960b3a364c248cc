"""The run of an attribution: piece after piece, each computed or found in the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from conewise.attributing.approximation import Approximation, Later
from conewise.attributing.pieces import Asked, Counts, Piece, counted_words, full_counts
from conewise.attributing.work import Work
from conewise.errors import WeightsChangedError
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents
from conewise.runs.fillings import joined
from conewise.status import Phases
from conewise.sweeps.execution.growth import SMALL, watching
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.planning.plan import Lazy, SweepPlan
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.running import trusting
from conewise.sweeps.storage.provenance import lazy_provenance
from conewise.sweeps.storage.store import Recorder

EVALUATOR = "gradients"


@dataclass(frozen=True, slots=True)
class Estimated:
    """What a piece is: values [metric, cell, prompt], metrics of base and source, and the passes it took."""

    values: Tensor
    base: Tensor
    source: Tensor | None
    counts: Counts


def estimate(
    asked: Asked,
    piece: Piece,
    weights: Contents,
    phases: Phases,
    ledger: SweepLedger,
    stored: Tensor | None = None,
) -> Estimated:
    """Compute a piece; where its values are stored, those of base and source alone."""
    sweep, during = asked.sweep, phases.during
    with during("baselines"):
        batch = piece.batch(sweep)
        batch.expect_possible(sweep.spec.cells)
    with trusting(batch, weights, phases):
        work = Work(
            batch,
            piece.spec(sweep),
            ledger,
            asked.cells.reads,
            weights.whole,
            is_one_pass=asked.method.is_one_pass,
        )
        if stored is None:
            budget = asked.max_memory
            planned = SMALL if budget is None else asked.peak_of(piece)
            with during("passes"), watching(facts_of(sweep.model).devices, planned, budget) as watch:
                effects = asked.method.scores(work, asked.cells, asked.steps)
            ledger.note_memory(watch.peak, watch.reserved)
        with during("baselines"):
            base, source = work.numbers("base"), work.numbers("source")
    assert base is not None
    values = effects + base[:, None] if stored is None else stored.transpose(0, 1)
    return Estimated(values, base, source, Counts(work.forwards, work.backwards, 0, work.flops))


@dataclass(slots=True)
class AttributionRun:
    """An attribution under way: what was found of each piece, and what it took."""

    asked: Asked
    weights: Contents
    phases: Phases
    ledger: SweepLedger = field(default_factory=SweepLedger)
    found: dict[int, Estimated] = field(default_factory=dict)
    full: tuple[int, int] = (0, 0)
    done: Counts = field(default_factory=Counts)

    def compute(self, number: int, record: Recorder) -> None:
        """One piece: computed, or found in the store."""
        asked, sweep = self.asked, self.asked.sweep
        piece = asked.pieces[number]
        stored = self.stored(number, record)
        found = estimate(asked, piece, self.weights, self.phases, self.ledger, stored)
        self.take(number, found, record, is_stored=stored is not None)
        if (
            len(asked.pieces) > 1
            and piece.number != asked.pieces[min(number + 1, len(asked.pieces) - 1)].number
        ):
            sweep._batches.forget()

    def stored(self, number: int, record: Recorder) -> Tensor | None:
        """The values [cell, metric, prompt] of a piece, where they are stored."""
        with self.phases.during("storing"):
            return record.get(number, 0, len(self.asked.sweep.cells)) if record.keeps else None

    def take(self, number: int, found: Estimated, record: Recorder, *, is_stored: bool) -> None:
        """Keep what was found of a piece, and store it where it is not yet."""
        asked, during = self.asked, self.phases.during
        counts = asked.pieces[number].counts
        if record.keeps:
            with during("storing"):
                record.begin(
                    number, self._plan(counts, asked.peak_of(asked.pieces[number])), found.base, found.source
                )
            if not is_stored:
                self.expect_unchanged()
                with during("storing"):
                    record.put(number, 0, found.values.transpose(0, 1))
        if is_stored:
            self.ledger.resumed += len(asked.sweep.cells)
            self.ledger.node_evaluations += counts.node_evaluations
            self.ledger.launches += counts.node_evaluations
            self.done += Counts(counts.forwards, counts.backwards, 0, counts.flops)
        else:
            self.done += found.counts
        self.found[number] = found
        nodes, flops = full_counts(asked.sweep, asked.pieces[number])
        self.full = self.full[0] + nodes, self.full[1] + flops

    def expect_unchanged(self) -> None:
        """Raise WeightsChangedError where a weight was written to since the run began."""
        weights = self.asked.sweep.model.weights
        with self.phases.during("weights"):
            changed = weights.changed(self.weights.whole, weights.contents().whole)
        if changed:
            raise WeightsChangedError(
                f"the weights of {self.asked.sweep.model.name} were written to meanwhile: {changed}. Effects "
                "are of no one model, and there is no result. Leave the weights alone until it has ended."
            )

    def _plan(self, counts: Counts, peak: int) -> SweepPlan:
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
            peak_bytes=peak,
            max_memory=self.asked.max_memory,
            chunks=(len(sweep.cells),),
            evaluator=EVALUATOR,
            why=f"approximate, {described}: {passes} over parts of the program",
            seconds=None,
        )

    def result(self) -> Approximation:
        """All pieces together."""
        asked, sweep, ledger = self.asked, self.asked.sweep, self.ledger
        self.expect_unchanged()
        ledger.phases = self.phases.seconds()
        ledger.seconds = sum(ledger.phases.values())
        counted = Counts(
            self.done.forwards,
            self.done.backwards,
            ledger.node_evaluations,
            self.done.flops,
        )
        found = [self.found[number] for number in range(len(asked.pieces))]
        known = [one.source for one in found if one.source is not None]
        per_prompt, base_rows = joined([one.values for one in found]), joined([one.base for one in found])
        source_rows = joined(known) if len(known) == len(found) else None
        identified = lazy_provenance(sweep.model, sweep.spec, sweep._given, self.weights.whole)
        said = asked.said
        return Approximation(
            Later(lambda: self._plan(counted, asked.peak_bytes())),  # type: ignore[arg-type]
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
