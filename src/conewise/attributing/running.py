"""The job of an attribution: each piece, some prompts of a batch, is computed as one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conewise.arguments import shown_bytes
from conewise.attributing.approximation import Approximation, Later
from conewise.attributing.pieces import (
    Asked,
    Counts,
    Piece,
    counted_words,
    full_counts,
    method_of,
    part_of,
    rows_in,
)
from conewise.attributing.work import Work
from conewise.errors import SweepError
from conewise.jobs.job import Ahead, BatchPlan, Computed, Computing, Job, JobRun
from conewise.jobs.scheduling import Share
from conewise.jobs.store import Request
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents
from conewise.runs.captured import Captured
from conewise.status import Phases
from conewise.sweeps.execution.growth import SMALL, watching
from conewise.sweeps.execution.reading import PHASES, SweepLedger
from conewise.sweeps.planning.plan import Lazy, SweepPlan
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.spec import StoredCut
from conewise.sweeps.running import trusting
from conewise.sweeps.storage.provenance import lazy_provenance
from conewise.sweeps.sweep import Sweep

EVALUATOR = "gradients"


class AttributionJob(Job[Approximation]):
    """One run of an attribution: its batches are pieces, of one chunk each."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked.sweep.model, len(asked.sweep.cells), len(asked.pieces))
        self.asked, self.max_memory = asked, asked.max_memory

    def begin(self, weights: Contents, phases: Phases) -> None:
        """Begin: forget what was found out, and was run, with other weights."""
        super().begin(weights, phases)
        self.asked.sweep._expect_weights(weights.whole)

    def stored(self) -> Request:
        """Return what identifies the attribution."""
        return self.asked.stored(self.weights)

    def here(self) -> PieceComputing:
        """Return what computes pieces in this process."""
        return PieceComputing(self.asked, self.weights, self.phases)

    def elsewhere(self) -> tuple[Callable[..., Computing], dict[str, Any]]:
        """Return what makes the same of a worker's own model."""
        asked = self.asked
        how = {"method": asked.method.name, "steps": asked.steps, "pieces": asked.pieces}
        return PieceComputing.of, {"asked": asked.sweep._asked(), **how}

    def plan(self, batch: int, cut: Callable[[str], StoredCut | None]) -> BatchPlan:
        """Return the plan of a piece, which is known already."""
        del cut
        piece, cells = self.asked.pieces[batch], range(self.cells)
        own = StoredCut(EVALUATOR, (self.cells,))
        prompts = partial(rows_in, self.asked.sweep, piece)
        return BatchPlan(own, self.max_memory, [cells], [piece.counts.flops], cells, prompts=prompts)

    def forget(self) -> None:
        """Forget the runs that were made of inputs."""
        self.asked.sweep.forget()

    def left(self, batch: int) -> None:
        """Forget a batch with its last piece."""
        pieces = self.asked.pieces
        if pieces[batch].number != pieces[min(batch + 1, len(pieces) - 1)].number:
            self.forget()

    def forget_all(self) -> None:
        """Forget all that was found out: what weights it is of is not known."""
        self.asked.sweep.facts.forget()
        self.forget()

    def result(self, run: JobRun[Approximation]) -> Approximation:
        """Return all pieces together. Raises SweepError where one could not be computed."""
        asked, sweep, ledger = self.asked, self.asked.sweep, run.ledger
        if run.missing:
            said = [f"batch {asked.pieces[one.batch].number}: {one.why}" for one in run.missing]
            left = f"; {len(said) - 3} more" if len(said) > 3 else ""
            raise SweepError(
                f"{len(said)} of {len(asked.pieces)} pieces of this attribution could not be computed "
                f"({'; '.join(said[:3])}{left})."
            )
        full = [full_counts(sweep, piece) for piece in asked.pieces]
        counts = sum(run.counts, Counts(node_evaluations=ledger.node_evaluations))
        values = [run.values(number).transpose(0, 1) for number in range(self.batches)]
        bases = [one.base for one in run.batches if one.base is not None]
        sources = [one.source for one in run.batches if one.source is not None]
        per_prompt, base_rows = torch.cat(values, dim=-1), torch.cat(bases, dim=-1)
        source_rows = torch.cat(sources, dim=-1) if len(sources) == len(bases) else None
        identified = lazy_provenance(sweep.model, sweep.spec, sweep._given, self.weights.whole)
        said_of = asked.said
        return Approximation(
            Later(lambda: self._plan(counts, full)),  # type: ignore[arg-type]
            ledger,
            sweep.spreads,
            tuple(one.name for one in sweep.metrics),
            per_prompt.mean(-1),
            per_prompt,
            base_rows.mean(-1),
            None if source_rows is None else source_rows.mean(-1),
            Lazy(lambda: {**identified, "attribution": said_of}),
            None,
            sweep,
            base_rows,
            source_rows,
            self.weights.whole,
            asked.described,
        )

    def _plan(self, counts: Counts, full: Sequence[tuple[int, int]]) -> SweepPlan:
        """Return what was computed, as the plan of a sweep."""
        passes = (
            f"{counted_words(counts.forwards, 'forward')} and {counted_words(counts.backwards, 'backward')}"
        )
        return SweepPlan(
            worlds=self.cells,
            batches=self.asked.sweep.batches,
            node_evaluations=counts.node_evaluations,
            full_evaluations=sum(nodes for nodes, _ in full),
            launches=counts.node_evaluations,
            flops=counts.flops,
            full_flops=sum(flops for _, flops in full),
            peak_bytes=self.asked.peak_bytes(),
            max_memory=self.max_memory,
            chunks=(self.cells,),
            evaluator=EVALUATOR,
            why=f"approximate, {self.asked.described}: {passes} over parts of the program",
            seconds=None,
        )


class PieceComputing(Computing):
    """Computes pieces of an attribution, in this process and in a worker."""

    def __init__(self, asked: Asked, weights: Contents | None = None, phases: Phases | None = None) -> None:
        super().__init__()
        self.asked, self.phases, self._weights = asked, phases or Phases(PHASES), weights

    @classmethod
    def of(
        cls, model: Captured, asked: dict[str, Any], method: str, steps: int, pieces: tuple[Piece, ...]
    ) -> PieceComputing:
        """Return that of a worker."""
        sweep, chosen = Sweep(model, **asked), method_of(method)
        return cls(Asked(sweep, chosen, chosen.cells(model, sweep.cells), steps, None, pieces))

    def rest(self) -> None:
        """Let go of the batch that is under way."""
        super().rest()
        self.asked.sweep.forget()

    def lacking(self, share: Share, memory: int | None) -> str:
        """Return what is lacking where a piece is known not to fit into this worker; else nothing."""
        if memory is None or not share.chunks:
            return ""
        taken = self.asked.peak_of(self.piece(share))
        if taken <= memory:
            return ""
        return f"these prompts take up to {shown_bytes(taken)}, and this worker has {shown_bytes(memory)}"

    def piece(self, share: Share) -> Piece:
        """Return the piece of a share: some of its prompts, where it does not fit as a whole."""
        asked, piece = self.asked, self.asked.pieces[share.batch]
        if share.worlds is None:
            return piece
        rows = range(share.first, share.first + share.worlds)
        return part_of(asked.sweep, asked.method, asked.cells, asked.steps, piece, rows)

    @contextmanager
    def begin(self, batch: int) -> Iterator[PieceUnderWay]:
        """Begin with a piece: it is computed when it is asked for."""
        del batch
        yield PieceUnderWay(self, self._weights or self.asked.sweep.model.weights.contents())


@dataclass(frozen=True, slots=True)
class PieceUnderWay:
    """A piece of an attribution."""

    of: PieceComputing
    weights: Contents

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count nothing: what is resumed is counted with the baselines."""

    def compute(self, share: Share, ledger: SweepLedger, memory: int | None, ahead: Ahead = None) -> Computed:
        """Compute a piece, or some of its prompts; without chunks, base and source alone."""
        del memory, ahead
        asked, sweep, during = self.of.asked, self.of.asked.sweep, self.of.phases.during
        piece, rows = self.of.piece(share), list[Tensor]()
        with during("baselines"):
            batch = piece.batch(sweep)
            batch.expect_possible(sweep.spec.cells)
        with trusting(batch, self.weights, self.of.phases):
            work = Work(
                batch,
                piece.spec(sweep),
                ledger,
                asked.cells.reads,
                self.weights.whole,
                is_one_pass=asked.method.is_one_pass,
            )
            if share.chunks:
                budget = asked.max_memory
                planned = SMALL if budget is None else asked.peak_of(piece)
                with during("passes"), watching(facts_of(sweep.model).devices, planned, budget) as watch:
                    effects = asked.method.scores(work, asked.cells, asked.steps)
                ledger.note_memory(watch.peak, watch.reserved)
            with during("baselines"):
                base, source = work.numbers("base"), work.numbers("source")
        assert base is not None
        counts = Counts(work.forwards, work.backwards, 0, work.flops)
        if share.chunks:
            rows.append((effects + base[:, None]).transpose(0, 1))
        else:  # it was computed before, and is resumed
            own = piece.counts
            ledger.node_evaluations += own.node_evaluations
            ledger.launches += own.node_evaluations
            counts = Counts(own.forwards, own.backwards, 0, own.flops)
        return Computed((row for row in rows), lambda: base, lambda: source, lambda: counts)
