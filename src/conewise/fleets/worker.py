"""A worker: it has a model of its own, keeps the sweeps that it was told of, and runs shares of their plans.

It is the same class in a process of this machine and as an actor of Ray.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conewise.amounts import shown_bytes
from conewise.errors import ConewiseError, NoEffectWarning
from conewise.fleets.payload import Payload, unpacked
from conewise.fleets.recipe import Recipe, prepared
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

Numbers = NDArray[np.float64]

DIED, MEMORY, OWN = "died", "memory", "own"
"""How a share can fail: its worker is gone, it did not fit into memory, or it raised an error of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is, and what setting it up took."""

    host: str
    process: int
    device: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """A share that was run: for each of its chunks the metrics [world, metric, prompt], and what it took.

    `base` and `source` are the metrics of the baselines.
    """

    rows: tuple[Numbers, ...]
    base: Numbers
    source: Numbers | None
    node_evaluations: int
    launches: int
    seconds: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A share that was not run: which way it failed, and what was said."""

    kind: str
    said: str
    error: str = ""


class Worker:
    """Runs shares.

    `device` is where its model goes, None for the driver's; `memory` is all that chunks may take.
    """

    def __init__(
        self, device: str | None = None, threads: int | None = None, memory: int | None = None
    ) -> None:
        self.device, self.memory = device, memory
        if threads is not None:
            torch.set_num_threads(threads)
        self._models: dict[str, Captured] = {}
        self._sweeps: dict[str, Swept] = {}
        self._plans: dict[tuple[str, int], SweepPlan] = {}
        self._at: tuple[str, int] | None = None
        self._under_way: tuple[Batch, Executor, Execution] | None = None

    def prepare(self, key: str, recipe: Recipe) -> Place:
        """Load and capture a model, once."""
        started = time.perf_counter()
        if key not in self._models:
            self._models[key] = prepared(recipe, self.device)
        device = str(facts_of(self._models[key]).device)
        return Place(socket.gethostname(), os.getpid(), device, time.perf_counter() - started)

    def know_sweep(self, key: str, model: str, payload: Payload) -> None:
        """Be told what is swept, with which model."""
        if key not in self._sweeps:
            own = self._models[model]
            where = None if self.device is None else torch.device(self.device)
            kind, asked = unpacked(payload, own, where)
            self._sweeps[key] = kind(own, **asked)

    def know_plan(self, key: str, batch: int, text: str) -> None:
        """Be told the plan of a batch."""
        self._plans[key, batch] = SweepPlan.from_json(text)

    def forget(self, key: str) -> None:
        """Forget a sweep that has ended."""
        self._sweeps.pop(key, None)
        self._at = self._under_way = None
        for known in [one for one in self._plans if one[0] == key]:
            del self._plans[known]

    def run(self, key: str, share: Share) -> Done | Failed:
        """Run a share. What goes wrong with it is returned, not raised."""
        started = time.perf_counter()
        lack = self._lack_of_room(key, share)
        if lack:
            return Failed(MEMORY, lack)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # a sweep has cells without effect
                return self._run(key, share, started)
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._at = self._under_way = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return Failed(MEMORY, str(error) or type(error).__name__)
        except Exception as error:  # noqa: BLE001  # it ends this share, and leaves the others running
            is_ours = isinstance(error, ConewiseError)
            said = str(error) if is_ours else f"{type(error).__name__}: {error}"
            return Failed(OWN, said, type(error).__name__)

    def _run(self, key: str, share: Share, started: float) -> Done:
        batch, _, execution = self._begun(key, share.batch)
        sweep, plan = self._sweeps[key], self._plans[key, share.batch]
        ledger, rows = SweepLedger(), list[Tensor]()
        with watching(facts_of(sweep.model).devices, plan.peak_bytes, self.memory) as watch:
            if share.worlds is not None:
                rows.append(self._part(sweep, plan, batch, share, ledger))
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
            time.perf_counter() - started,
            watch.peak,
        )

    def _begun(self, key: str, number: int) -> tuple[Batch, Executor, Execution]:
        """A batch under way: its baselines are computed once for all shares of it that follow."""
        if self._at != (key, number) or self._under_way is None:
            self._at = self._under_way = None
            sweep, plan = self._sweeps[key], self._plans[key, number]
            with uncollected():
                batch = sweep.batch(number)
                executor = executor_for(sweep.model, sweep.spec, plan, batch)
                put = batch.intervention
                if put.begin is not None:
                    put.begin(sweep.model.weights.contents().whole)
                execution = executor.over(
                    batch, MetricReader(facts_of(sweep.model), sweep.spec.metrics, sweep.spec.tokens)
                )
            self._at, self._under_way = (key, number), (batch, executor, execution)
        return self._under_way

    def _part(self, sweep: Swept, plan: SweepPlan, batch: Batch, share: Share, ledger: SweepLedger) -> Tensor:
        """Some worlds of a chunk, cut anew to fit."""
        assert plan.compiled is not None
        assert share.worlds is not None
        spec = sweep.spec
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
        found = running.run(Options(plan.evaluator, self.memory, None), NullStore(), lambda _: None)
        ledger.node_evaluations += found.ledger.node_evaluations
        ledger.launches += found.ledger.launches
        return found.per_prompt.transpose(0, 1)

    def _lack_of_room(self, key: str, share: Share) -> str:
        """What is lacking where a whole chunk is known not to fit into this worker; else nothing."""
        plan = self._plans[key, share.batch]
        if (
            self.memory is None
            or share.worlds is not None
            or not share.chunks
            or plan.peak_bytes <= self.memory
        ):
            return ""
        taken, there = shown_bytes(plan.peak_bytes), shown_bytes(self.memory)
        return f"a chunk takes {taken}, and this worker has {there}"


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
