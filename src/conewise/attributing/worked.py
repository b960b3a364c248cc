"""Attribution by workers: a piece, some prompts of a batch, is a share. The driver stores what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from conewise.arguments import shown_bytes
from conewise.attributing.approximation import Approximation
from conewise.attributing.pieces import Asked, Counts, Piece, method_of, part_of, rows_in
from conewise.attributing.running import AttributionRun, Estimated, estimate
from conewise.errors import SweepError
from conewise.jobs.payload import packed
from conewise.jobs.progress import Told, follow_workers
from conewise.jobs.scheduling import ChunkCost, Done, Failed, Fleet, Share, Work
from conewise.program.tensors import Tensor
from conewise.program.weights import Contents
from conewise.runs.captured import Captured
from conewise.status import Phases
from conewise.sweeps.execution.reading import PHASES, SweepLedger
from conewise.sweeps.storage.store import Recorder, recorder
from conewise.sweeps.sweep import Sweep


class PieceShares:
    """An attribution as a worker has it: it computes pieces, each as a local run would."""

    def __init__(
        self, model: Captured, asked: dict[str, Any], method: str, steps: int, pieces: tuple[Piece, ...]
    ) -> None:
        sweep, chosen = Sweep(model, **asked), method_of(method)
        self._asked = Asked(sweep, chosen, chosen.cells(model, sweep.cells), steps, None, pieces)

    def know_plan(self, batch: int, text: str) -> None:
        """There are no plans: a piece says all."""
        del batch, text

    def rest(self) -> None:
        """Let go of the first batch."""
        self._asked.sweep._batches.forget()

    def lacking(self, share: Share, memory: int | None) -> str:
        """What is lacking where a piece is known not to fit into this worker; else nothing."""
        if memory is None or not share.chunks:
            return ""
        piece = self._asked.pieces[share.batch] if share.worlds is None else self._part(share)
        taken = self._asked.peak_of(piece)
        if taken <= memory:
            return ""
        return f"these prompts take up to {shown_bytes(taken)}, and this worker has {shown_bytes(memory)}"

    def run(self, share: Share, memory: int | None) -> Done:
        """Compute a piece, or some of its prompts; without chunks, base and source alone."""
        del memory
        asked, ledger = self._asked, SweepLedger()
        piece = asked.pieces[share.batch] if share.worlds is None else self._part(share)
        stored = None if share.chunks else torch.empty(0, 0)
        weights = asked.sweep.model.weights.contents()
        found = estimate(asked, piece, weights, Phases(PHASES), ledger, stored)
        asked.sweep._batches.forget()
        return Done(
            (found.values.transpose(0, 1).numpy(),) if share.chunks else (),
            found.base.numpy(),
            None if found.source is None else found.source.numpy(),
            ledger.node_evaluations,
            ledger.launches,
            0.0,
            ledger.peak_bytes,
        )

    def _part(self, share: Share) -> Piece:
        """Some prompts of a piece that does not fit as a whole."""
        asked, piece = self._asked, self._asked.pieces[share.batch]
        assert share.worlds is not None
        rows = range(share.first, share.first + share.worlds)
        return part_of(asked.sweep, asked.method, asked.cells, asked.steps, piece, rows)


class AttributionJob:
    """An attribution as the driver has it."""

    def __init__(
        self,
        asked: Asked,
        record: Recorder,
        tell: Callable[[int], None],
        weights: Contents,
        phases: Phases,
    ) -> None:
        self._asked, self._record, self._tell = asked, record, tell
        self._run = AttributionRun(asked, weights, phases)
        self._stored: dict[int, Tensor] = {}
        self._parts: dict[int, dict[int, Done]] = {}
        self._failed: dict[int, str] = {}
        sweep = asked.sweep
        given = {
            "asked": sweep.asked(),
            "method": asked.method.name,
            "steps": asked.steps,
            "pieces": asked.pieces,
        }
        self.work = Work(sweep.model, packed((PieceShares, given), sweep.model))

    def wanted(self) -> tuple[list[ChunkCost], list[Share]]:
        """The pieces that are not stored, and of those that are the metrics of base and source."""
        chunks: list[ChunkCost] = []
        baselines: list[Share] = []
        cells = len(self._asked.sweep.cells)
        for number, piece in enumerate(self._asked.pieces):
            stored = self._run.stored(number, self._record)
            if stored is None:
                chunks.append(ChunkCost(number, 0, cells, piece.counts.flops))
            else:
                self._stored[number] = stored
                baselines.append(Share(number, (), 0))
        return chunks, baselines

    def worlds_of(self, share: Share) -> tuple[int, int]:
        """Which prompts of its batch a share has: pieces are cut by prompts, as worlds share their passes."""
        if share.worlds is not None:
            return share.first, share.worlds
        rows = rows_in(self._asked.sweep, self._asked.pieces[share.batch])
        return rows.start, len(rows)

    def done(self, share: Share, found: Done) -> int:
        """Keep what came back, and store the pieces that are whole."""
        number, ledger, cells = share.batch, self._run.ledger, len(self._asked.sweep.cells)
        ledger.compute_seconds += found.seconds
        ledger.node_evaluations += found.node_evaluations
        ledger.launches += found.launches
        ledger.note_memory(found.peak_bytes, None)
        parts = {share.first: found}
        if share.worlds is not None:
            parts = self._parts.setdefault(number, {})
            parts[share.first] = found
            _, prompts = self.worlds_of(Share(number, (0,), 0))
            if sum(one.rows[0].shape[-1] for one in parts.values()) < prompts:
                return 0
        own = [parts[first] for first in sorted(parts)]
        stored = self._stored.get(number)
        if stored is None:
            stored = torch.cat([torch.tensor(one.rows[0]) for one in own], -1)
        base = torch.cat([torch.tensor(one.base) for one in own], -1)
        sources = [torch.tensor(one.source) for one in own if one.source is not None]
        counts = self._asked.pieces[number].counts
        taken = Counts(counts.forwards, counts.backwards, 0, counts.flops)
        whole = Estimated(stored.transpose(0, 1), base, torch.cat(sources, -1) if sources else None, taken)
        self._run.take(number, whole, self._record, is_stored=number in self._stored)
        self._tell(cells)
        return cells

    def given_up(self, share: Share, failed: Failed) -> None:
        """A piece will not be there."""
        if share.batch not in self._failed:
            self._tell(len(self._asked.sweep.cells))
        self._failed.setdefault(share.batch, failed.said)

    def result(self) -> Approximation:
        """All pieces together. Raises SweepError where one could not be computed; the others are stored."""
        if self._failed:
            pieces = self._asked.pieces
            said = [f"batch {pieces[number].number}: {why}" for number, why in self._failed.items()]
            left = f"; {len(said) - 3} more" if len(said) > 3 else ""
            raise SweepError(
                f"{len(said)} of {len(pieces)} pieces of this attribution could not be computed "
                f"({'; '.join(said[:3])}{left})."
            )
        return self._run.result()


def estimate_together(
    asked: Sequence[Asked],
    executor: Fleet,
    folders: Sequence[str | Path | None],
    tell: Told,
    *,
    resume: bool,
    phases: Phases,
) -> list[Approximation]:
    """Several attributions to one model by workers: pieces of all of them stand in one line.

    Each is stored in its folder. The seconds of all are told by the first.
    """
    model = asked[0].sweep.model
    tell.begin(phases)
    with phases.during("weights"):
        weights = model.weights.whole_contents()
    jobs: list[AttributionJob] = []
    with ExitStack() as recording:
        for one, out in zip(asked, folders, strict=True):
            one.sweep._expect_weights(weights.whole)
            with phases.during("storing"):
                record = recording.enter_context(recorder(one.stored(weights), out, resume))
            jobs.append(AttributionJob(one, record, tell, weights, phases))
        with phases.during("passes"):
            executor.run(jobs, lambda ledger: follow_workers(tell, ledger))
        results = [job.result() for job in jobs]
    for result in results[1:]:
        result.ledger.phases = dict.fromkeys(result.ledger.phases, 0.0)
        result.ledger.seconds = 0.0
    return results
