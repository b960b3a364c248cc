"""A sweep: many worlds, one baseline, one demand. Planned before it runs, exact, in one pass if possible."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conewise.amounts import as_bytes
from conewise.capturing.foreign import within_memory
from conewise.errors import MetricError, NoEffectWarning, SweepError, WeightsChangedError, describe
from conewise.identity.digests import inputs_digest
from conewise.locations.selectors import Cell, SelectorLike, Spread, as_selectors
from conewise.markup import heading
from conewise.program.precision import expect_precision
from conewise.program.tensors import Tensor, computing
from conewise.program.weights import Contents, Sums
from conewise.runs.baseline import baseline
from conewise.runs.captured import Captured
from conewise.runs.filling import stacked
from conewise.runs.interventions import Intervention, as_intervention
from conewise.runs.metrics import Metric, as_metric, expect_prompts, measured, measured_whole
from conewise.runs.run import Reading, Run
from conewise.runs.spreading import spread
from conewise.sweeps.execution.evaluating import Evaluators
from conewise.sweeps.execution.growth import watching
from conewise.sweeps.facts import facts_of
from conewise.sweeps.plan import SweepPlan, of_batches
from conewise.sweeps.planning.costs import versions
from conewise.sweeps.planning.passes import grouped
from conewise.sweeps.planning.planning import Planner
from conewise.sweeps.planning.stacking import members
from conewise.sweeps.result import Result, SweepLedger
from conewise.sweeps.storage.identifying import Identifying


@dataclass(frozen=True)
class Batch:
    """One baseline of a sweep, and what is put into it.

    It is lasting where both are runs that were given as such: a run never changes.
    """

    base: Reading
    source: Reading | None
    intervention: Intervention
    is_lasting: bool = False

    def is_same(self, other: Batch) -> bool:
        """Whether the other one is made of the same runs."""
        return self.base is other.base and self.source is other.source


@contextmanager
def _unreported() -> Iterator[None]:
    """Without warnings of patches without effect: a sweep reads more than a patch of its base reaches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        yield


class Sweep:
    """Patch every cell in a world of its own, and read the metric there.

    `base` is the run that is changed, `source` where the values come from (a run, or an intervention).
    A base may be a world, in which something is patched already: its patches stand in every world of the
    sweep.

    `precision="tf32"` multiplies float32 on a CUDA device in TF32, as a wavefront; nothing does so unasked.
    """

    @_unreported()
    @within_memory("the baseline of this sweep")
    def __init__(
        self,
        model: Captured,
        sites: SelectorLike,
        *,
        base: Reading | Mapping[str, Any] | Iterable[Mapping[str, Any] | Reading],
        source: Any,
        metric: Any,
        precision: str | None = None,
    ) -> None:
        self.model = model
        self.facts = facts_of(model)
        expect_precision(precision, self.facts.device, self.facts.dtype)
        self.precision = precision
        self.selectors = as_selectors(sites)
        self.metrics = tuple(
            as_metric(one) for one in (metric if isinstance(metric, list | tuple) else [metric])
        )
        names = [one.name for one in self.metrics]
        if not names:
            raise SweepError("no metric: give one, or a list of several.")
        if len(set(names)) != len(names):
            raise SweepError(f"two metrics are named {names!r}; give each its own with `name=`.")
        self._base, self._source = base, source
        self._expect_answers()
        first = self._batch(0)
        self.is_function = first.intervention.is_function
        self.spreads: tuple[Spread, ...] = spread(self.selectors, first.base)
        self.cells: tuple[Cell, ...] = tuple(cell for part in self.spreads for cell in part.cells)
        self.planner = Planner(self)
        self.evaluators = Evaluators(self)
        self._planned_with: Sums | None = None
        self._read: Sums | None = None

    # -- what is swept -----------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """How many baselines there are."""
        return len(self._base) if isinstance(self._base, Sequence) else 1

    def _given(self, place: int) -> tuple[Any, Any]:
        """What was given as base and source of one batch."""
        base: Any = self._base
        source: Any = self._source
        if isinstance(base, Reading):
            return base, source
        if not isinstance(base, Sequence) or isinstance(base, str):
            base = [base]
        if not base:
            raise SweepError("base is a run, or a list of runs or of inputs; it has at least one.")
        if isinstance(source, list | tuple):
            if len(source) != len(base):
                raise SweepError(f"base has {len(base)} batches and source {len(source)}; they go in pairs.")
            source = source[place]
        return base[place], source

    def _batch(self, place: int) -> Batch:
        base, source = self._given(place)
        is_lasting = self.batches == 1 and isinstance(base, Run) and isinstance(source, Run)
        base = self._as_run(base)
        if isinstance(source, Mapping):
            source = self._as_run(source)
        if base.model is not self.model:
            raise SweepError(f"base is a run of another model ({base.model.name}), not of {self.model.name}.")
        run = source if isinstance(source, Reading) else None
        if run is not None:
            self._expect_alike(base, run)
        return Batch(base, run, as_intervention(source, self.model), is_lasting)

    def _as_run(self, given: Any) -> Reading:
        if isinstance(given, Reading):
            return given
        if not isinstance(given, Mapping):
            raise SweepError(
                f"base is a run, or a list of runs or of inputs, and {describe(given)} is neither. Inputs "
                "are written as for `model.run`: {'input_ids': ...}."
            )
        return baseline(self.model, (), given)

    def _expect_alike(self, base: Reading, source: Reading) -> None:
        for name, value in base.inputs.items():
            other = source.inputs.get(name)
            if other is not None and other.shape != value.shape:
                raise SweepError(
                    f"base and source differ in shape: {name!r} is {tuple(value.shape)} in the base and "
                    f"{tuple(other.shape)} in the source. Pad or cut the prompts to one length, so that "
                    "position means the same in both."
                )

    def _expect_answers(self) -> None:
        """Raise MetricError where a metric has answers for another number of prompts, before any is run."""
        if isinstance(self._base, Reading | Mapping | list | tuple):  # others make their runs when asked
            for number in range(self.batches):
                given, _ = self._given(number)
                inputs: Mapping[str, Tensor] = {}
                if isinstance(given, Reading):
                    inputs = given.inputs
                elif isinstance(given, Mapping):
                    inputs = self.model.signature.bind((), given)
                where = "base" if self.batches == 1 else f"batch {number} of base"
                for metric in self.metrics if inputs else ():
                    expect_prompts(metric, self.facts.read.prompts(inputs), where)

    def targets(self) -> tuple[str, ...]:
        """The nodes that the metrics read."""
        fields = self.facts.fields
        names: list[str] = []
        for metric in self.metrics:
            if metric.whole:
                names += self.facts.outputs
            elif metric.output in fields:
                names.append(fields[metric.output])
            elif len(self.facts.outputs) == 1:
                names.append(self.facts.outputs[0])
            else:
                raise SweepError(
                    f"the metric {metric.name!r} reads {metric.output!r}, and the model's outputs are "
                    f"{', '.join(fields)}."
                )
        return tuple(dict.fromkeys(names))

    # -- plan --------------------------------------------------------------------------------

    @_unreported()
    @within_memory("planning this sweep")
    def plan(self, max_memory: int | str | None = None, evaluator: str = "auto") -> SweepPlan:
        """What the sweep will compute, and at what cost; nothing of it is computed.

        Of several batches the first stands for all; a result has the plan of those that were run.
        """
        self._plan_with(self.model.weights.contents().whole)
        return self.planner.plan(self._batch(0), as_bytes(max_memory), evaluator)[0]

    def _plan_with(self, weights: Sums) -> None:
        """Forget what was found out and planned with other weights."""
        self.facts.expect_weights(weights)
        if self._planned_with not in (None, weights):
            self.planner, self.evaluators = Planner(self), Evaluators(self)
        self._planned_with = weights

    @property
    def _order(self) -> tuple[int, ...]:
        """The number of the cell of each world."""
        return self.planner.arrangement.order

    # -- run ---------------------------------------------------------------------------------

    @_unreported()
    @within_memory("this sweep")
    def run(
        self,
        *,
        evaluator: str = "auto",
        max_memory: int | str | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        progress: bool | Callable[[int, int], None] | None = None,
        verify: int = 0,
    ) -> Result:
        """Run the plan.

        `out`: a folder; finished chunks are stored there as they finish, and `resume=True` goes on where a
        run was cut off, with the chunks that it was cut into. `progress`: True shows a bar on stderr, False
        nothing; None shows one if stderr is a terminal or a notebook and the run takes more than a second; a
        function is called with (cells done, cells in all). `verify`: check so many random cells against
        plain full forwards of the module.

        The weights have to be those that base and source were made with: all their bits are read at the start
        and at the end, and before anything is stored. Raises WeightsChangedError where one changed.
        """
        started = time.perf_counter()
        weights = self.model.weights.whole_contents()
        self._plan_with(weights.whole)
        try:
            self._read = weights.whole
            result = self._run(started, weights, evaluator, max_memory, out, resume, progress)
        finally:
            self._read = None
        if verify:
            result = replace(result, verification=result.verify(n=verify))
        return result

    def _run(
        self,
        started: float,
        weights: Contents,
        evaluator: str,
        max_memory: int | str | None,
        out: str | Path | None,
        resume: bool,
        progress: bool | Callable[[int, int], None] | None,
    ) -> Result:
        budget = as_bytes(max_memory)
        values: list[Any] = []
        base_values: list[Tensor] = []
        source_values: list[Tensor | None] = []
        ledger = SweepLedger()
        plans: list[SweepPlan] = []
        with self._recorder(out, resume) as recorder, self._bar(progress) as tell:
            for number in range(self.batches):
                batch = self._batch(number)
                with self._trusting(batch, weights):
                    plan, chunks = self.planner.plan(
                        batch, budget, evaluator, recorder.agreed(number, evaluator)
                    )
                    plans.append(plan)
                    prepared = self.planner.prepare(batch)
                    base_values.append(self._read_of(batch.base, "base"))
                    source_values.append(
                        None if batch.source is None else self._read_of(batch.source, "source")
                    )
                    recorder.begin(number, plan, base_values[-1], source_values[-1])
                    rows: dict[int, Tensor] = {}
                    serial, resumed = plan.evaluator == "serial", ledger.resumed
                    evaluate = self.evaluators.serial if serial else self.evaluators.wavefront
                    with watching(self.facts.device, plan.peak_bytes, budget) as watch:
                        for piece, chunk in grouped(chunks, plan.evaluator):
                            stored = recorder.get(number, piece, len(chunk))
                            if stored is None:
                                stored = evaluate(prepared, batch, chunk, ledger, watch)
                                if out is not None:
                                    self._expect_unchanged(weights)
                                recorder.put(number, piece, stored)
                            else:
                                done = prepared.schedule.of(chunk.worlds).node_evaluations
                                ledger.node_evaluations += done
                                ledger.launches += (
                                    done if serial else self.evaluators.wave(prepared, batch, chunk).launches
                                )
                                ledger.resumed += len(chunk)
                            rows.update(zip(members(chunk.worlds), stored, strict=True))
                            tell(len(chunk))
                    if ledger.resumed - resumed < len(self.cells):
                        ledger.note_memory(watch.peak, watch.reserved)
                    values.append([rows[world] for world in range(len(self.cells))])
                del batch  # before the next one is made
            self._expect_unchanged(weights)
        plan = of_batches(plans)
        ledger.seconds = time.perf_counter() - started
        if not ledger.resumed and ledger.compute_seconds > 0:
            self.facts.rates[plan.evaluator] = plan.flops / ledger.compute_seconds
        return Result.of(self, plan, ledger, values, base_values, source_values)

    @contextmanager
    def _trusting(self, batch: Batch, weights: Contents) -> Iterator[None]:
        """Check that all runs of a batch were made with these weights; meanwhile, do not look for writes."""
        put = batch.intervention
        readings = [run for run in (batch.base, batch.source, *put.runs) if run is not None]
        with ExitStack() as trusting:
            for reading in readings:
                reading.check(weights)
                trusting.enter_context(reading.trusted())
            if put.begin is not None:
                put.begin(weights.whole)
            yield

    def _expect_unchanged(self, weights: Contents) -> None:
        """Raise WeightsChangedError where a weight was written to since the run began."""
        changed = self.model.weights.changed(weights.whole, self.model.weights.whole_contents().whole)
        if changed:
            raise WeightsChangedError(
                f"the weights of {self.model.name} were written to while the sweep ran: {changed}. Its cells "
                "are of no one model, and there is no result. Leave the weights alone until it has ended."
            )

    def _recorder(self, out: str | Path | None, resume: bool) -> Any:
        from conewise.sweeps.storage.store import recorder  # noqa: PLC0415  # needed by long runs only

        return recorder(self, out, resume)

    def _bar(self, progress: bool | Callable[[int, int], None] | None) -> Any:
        from conewise.sweeps.progress import bar  # noqa: PLC0415  # needed where it is shown only

        return bar(progress, len(self.cells) * self.batches, self.facts.device)

    def _read_of(self, run: Reading, which: str) -> Tensor:
        """Every metric of the base or the source itself."""
        try:
            return self._read_metrics(run)
        except MetricError as error:
            raise MetricError(f"in the {which} itself: {error}") from error

    def _read_metrics(self, run: Any) -> Tensor:
        """Every metric of a run, as [metric, prompt] in float64."""
        return stacked([self._metric_of(metric, run) for metric in self.metrics])

    def _metric_of(self, metric: Metric, run: Any) -> Tensor:
        batch = self._prompts(run)
        with computing():
            if metric.whole:
                return measured_whole(metric, run.outputs, batch)[0]
            target = self._target(metric)
            (value,) = run.demand([target])
            return measured(metric, self.facts.read.arranged(target, value, 1, batch))[0]

    def _prompts(self, run: Reading) -> int:
        """How many prompts a run has."""
        return self.facts.read.prompts(run.inputs)

    def _target(self, metric: Metric) -> str:
        fields = self.facts.fields
        return fields.get(metric.output, self.facts.outputs[0])

    def provenance(self, *, strict: bool = False) -> dict[str, Any]:
        """All that the numbers depend on, as plain values: equal sweeps have equal provenance.

        What cannot be identified for certain says so; with `strict` it raises IdentityError.
        """
        identify = Identifying(strict)
        batches = []
        for number in range(self.batches):
            base, source = self._given(number)
            is_run = isinstance(source, Reading | Mapping)
            put = None if is_run else as_intervention(source, self.model)
            batches.append(
                {
                    "base": self._digest(base, identify),
                    "source": self._digest(source, identify) if is_run else None,
                    "patch": ["source"] if put is None else identify.patch(put),
                }
            )
        read = self.model.weights.whole_contents().whole if self._read is None else self._read
        fingerprint, constants = self.facts.digests(read)
        return {
            "model": self.model.name,
            "program": self.facts.program,
            "weights": fingerprint,
            **({"constants": constants} if constants else {}),
            "dtype": str(self.facts.dtype),
            "device": str(self.facts.device),
            **({} if self.precision is None else {"precision": self.precision}),
            "sites": [cell.name for cell in self.cells],
            "metrics": [identify.metric(metric) for metric in self.metrics],
            "batches": batches,
            "versions": versions(),
        }

    def _digest(self, given: Reading | Mapping[str, Any], identify: Identifying) -> str:
        """A digest of the inputs, and of what is patched in them; nothing is run for it."""
        if not isinstance(given, Reading):
            return inputs_digest(self.model.signature.bind((), given))
        values, functions = dict(given.inputs), []
        for number, edit in enumerate(given.edits):
            if isinstance(edit.part, Tensor):
                values[f"{number} {edit.place}"] = edit.part
            else:
                functions.append(f"{number} {edit.place} {identify.edit(edit)}")
        return " + ".join([inputs_digest(values), *functions])

    def __repr__(self) -> str:
        parts = " + ".join(
            str(part) if not isinstance(part, tuple) else f"{len(part)} sites"
            for part in self.selectors.parts
        )
        metrics = ", ".join(metric.name for metric in self.metrics)
        return f"Sweep over {parts}: {len(self.cells)} worlds of {self.model.name}, reading {metrics}"

    def _repr_html_(self) -> str:
        return heading("Sweep", repr(self).removeprefix("Sweep "))
