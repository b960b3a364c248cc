"""A sweep as a worker has it: it runs chunks of the plans that it was told, each as a local run would."""

from __future__ import annotations

from typing import Any

from conewise.amounts import shown_bytes
from conewise.fleets.outcomes import Done
from conewise.fleets.shares import Share
from conewise.fleets.swept import Swept
from conewise.garbage import uncollected
from conewise.phases import Phases
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.execution.executors import Execution, Executor
from conewise.sweeps.execution.growth import watching
from conewise.sweeps.execution.ledger import PHASES, SweepLedger
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.planning.planner import Planner
from conewise.sweeps.planning.spec import SweepSpec
from conewise.sweeps.running import Options, Running, executor_for
from conewise.sweeps.storage.store import NullStore


class SweepShares:
    """Runs shares of a sweep: `kind` makes the sweep of what it was asked."""

    def __init__(self, model: Captured, kind: Any, asked: dict[str, Any]) -> None:
        self._sweep: Swept = kind(model, **asked)
        self._plans: dict[int, SweepPlan] = {}
        self._at: int | None = None
        self._under_way: tuple[Batch, Executor, Execution] | None = None

    def know_plan(self, batch: int, text: str) -> None:
        """Be told the plan of a batch."""
        self._plans[batch] = SweepPlan.from_json(text)

    def rest(self) -> None:
        """Let go of the baselines."""
        self._at = self._under_way = None

    def run(self, share: Share, memory: int | None) -> Done:
        """Run a share."""
        batch, _, execution = self._begun(share.batch)
        plan = self._plans[share.batch]
        ledger, rows = SweepLedger(), list[Tensor]()
        with watching(facts_of(self._sweep.model).devices, plan.peak_bytes, memory) as watch:
            if share.worlds is not None:
                rows.append(self._part(plan, batch, share, ledger, memory))
            else:
                for chunk in share.chunks:
                    rows.append(execution.start(chunk, ledger, watch)())
        base, source = execution.base, execution.source
        return Done(
            tuple(row.double().cpu().numpy() for row in rows),
            base.double().cpu().numpy(),
            None if source is None else source.double().cpu().numpy(),
            ledger.node_evaluations,
            ledger.launches,
            0.0,
            watch.peak,
        )

    def lacking(self, share: Share, memory: int | None) -> str:
        """What is lacking where a whole chunk is known not to fit into this worker; else nothing."""
        plan = self._plans[share.batch]
        if memory is None or share.worlds is not None or not share.chunks or plan.peak_bytes <= memory:
            return ""
        return f"a chunk takes {shown_bytes(plan.peak_bytes)}, and this worker has {shown_bytes(memory)}"

    def _begun(self, number: int) -> tuple[Batch, Executor, Execution]:
        """A batch under way: its baselines are computed once for all shares of it that follow."""
        if self._at != number or self._under_way is None:
            self._at = self._under_way = None
            sweep, plan = self._sweep, self._plans[number]
            with uncollected():
                batch = sweep.batch(number)
                executor = executor_for(sweep.model, sweep.spec, plan, batch)
                for put in (batch.intervention, *batch.own):
                    if put.begin is not None:
                        put.begin(sweep.model.weights.contents().whole)
                reader = MetricReader(facts_of(sweep.model), batch.metrics, sweep.spec.tokens, batch.base)
                execution = executor.over(batch, reader)
            self._at, self._under_way = number, (batch, executor, execution)
        return self._under_way

    def _part(
        self, plan: SweepPlan, batch: Batch, share: Share, ledger: SweepLedger, memory: int | None
    ) -> Tensor:
        """Some worlds of a chunk, cut anew to fit."""
        assert plan.compiled is not None
        assert share.worlds is not None
        sweep, spec = self._sweep, self._sweep.spec
        numbers = plan.compiled.order[share.first : share.first + share.worlds]
        own = SweepSpec(
            tuple(spec.cells[number] for number in numbers),
            tuple(spec.names[number] for number in numbers),
            spec.metrics,
            spec.precision,
            spec.is_function,
            spec.from_run,
        )
        planner = Planner(sweep.model, own)

        def planned(given: Batch, max_memory: int | None, evaluator: str, cut: Any = None) -> SweepPlan:
            return planner.plan(given.base, given.source, max_memory=max_memory, evaluator=evaluator, cut=cut)

        weights = sweep.model.weights.whole_contents()
        running = Running(sweep.model, own, _One(batch), planned, weights, Phases(PHASES))  # type: ignore[arg-type]
        found = running.run(Options(plan.evaluator, memory, None), NullStore(), lambda _: None)
        ledger.node_evaluations += found.ledger.node_evaluations
        ledger.launches += found.ledger.launches
        return found.per_prompt.transpose(0, 1)


class _One:
    """One batch, as a run wants its batches."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> Batch:
        assert number == 0
        return self._batch

    def forget(self) -> None:
        """There is nothing to be forgotten."""
