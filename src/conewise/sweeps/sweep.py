"""A sweep: many worlds, one baseline, one demand. Planned before it runs, exact, in one pass if possible."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from conewise.amounts import as_bytes
from conewise.capturing.foreign import within_memory
from conewise.checks.witness import Rerun
from conewise.errors import Argument, NoEffectWarning, SweepError, WeightsChangedError, describe
from conewise.identity.digests import inputs_digest
from conewise.locations.selectors import Cell, SelectorLike, Spread, as_selectors
from conewise.markup import heading
from conewise.program.precision import expect_precision
from conewise.program.tensors import Tensor, computing
from conewise.program.weights import Contents, Sums
from conewise.runs.baseline import baseline
from conewise.runs.captured import Captured
from conewise.runs.filling import joined, reordered
from conewise.runs.interventions import as_intervention
from conewise.runs.metrics import as_metric, expect_prompts
from conewise.runs.run import Reading
from conewise.runs.spreading import spread
from conewise.sweeps.calibration import calibration_of
from conewise.sweeps.execution.batch import Batch, reader
from conewise.sweeps.execution.executors import Executor, SerialExecutor, WavefrontExecutor
from conewise.sweeps.execution.growth import watching
from conewise.sweeps.execution.ledger import SweepLedger
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.planning.compiled import Compiled
from conewise.sweeps.planning.compiler import (
    Compilation,
    Conditions,
    Costing,
    ReadOut,
    StandingEdit,
    StoredCut,
)
from conewise.sweeps.planning.costs import versions
from conewise.sweeps.planning.fill_tables import PlaceGroup, expect_swept, place_groups
from conewise.sweeps.planning.first_change import first_difference
from conewise.sweeps.planning.lazy import Lazy
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.plan import SweepPlan, of_batches
from conewise.sweeps.planning.shape_facts import ShapeFacts
from conewise.sweeps.planning.spec import SweepSpec
from conewise.sweeps.progress import bar
from conewise.sweeps.result import Result
from conewise.sweeps.storage.identifying import Identifying
from conewise.sweeps.storage.model_digest import model_digest
from conewise.sweeps.storage.plan_spec import plain_spec
from conewise.sweeps.storage.store import StoredSweep, recorder


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
        self._first: Batch | None = None
        self._first_made: Sums | None = None
        first = self._batch(0)
        self.is_function = first.intervention.is_function
        self.spreads: tuple[Spread, ...] = spread(self.selectors, first.base)
        self.cells: tuple[Cell, ...] = tuple(cell for part in self.spreads for cell in part.cells)
        self.spec = SweepSpec(
            tuple(cell.places for cell in self.cells),
            tuple(cell.name for cell in self.cells),
            self.metrics,
            precision,
            self.is_function,
            first.source is not None,
        )
        self._groups: list[PlaceGroup] | None = None
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
        """One batch. The first is kept until it was run, so that inputs are run once."""
        if place == 0 and self._first is not None:
            return self._first
        base, source = self._given(place)
        base = self._as_run(base)
        if isinstance(source, Mapping):
            source = self._as_run(source)
        if base.model is not self.model:
            raise SweepError(f"base is a run of another model ({base.model.name}), not of {self.model.name}.")
        run = source if isinstance(source, Reading) else None
        if run is not None:
            self._expect_alike(base, run)
        batch = Batch(base, run, as_intervention(source, self.model))
        if place == 0:
            self._first, self._first_made = batch, self.model.weights.contents().whole
        return batch

    def _forget_own_runs(self, weights: Sums) -> None:
        """Forget runs of inputs that were made with other weights; those that were given are not ours."""
        base, source = self._given(0)
        is_own = isinstance(base, Mapping) or isinstance(source, Mapping)
        if is_own and self._first_made != weights:
            self._first = None

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
        return self.facts.targets(self.metrics)

    def read_metrics(self, run: Any) -> Tensor:
        """Every metric of a run, as [metric, prompt] in float64."""
        return MetricReader(self.facts, self.metrics).of_run(run)

    # -- plan --------------------------------------------------------------------------------

    @_unreported()
    @within_memory("planning this sweep")
    def plan(self, max_memory: int | str | None = None, evaluator: str = "auto") -> SweepPlan:
        """What the sweep will compute, step by step, and at what cost; nothing of it is computed.

        Of several batches the first stands for all; a result has the plan of those that were run.
        """
        weights = self.model.weights.contents().whole
        self.facts.expect_weights(weights)
        self._forget_own_runs(weights)
        return self._planned(self._batch(0), as_bytes(max_memory), evaluator)

    def _planned(
        self, batch: Batch, max_memory: int | None, evaluator: str, cut: StoredCut | None = None
    ) -> SweepPlan:
        """The plan for a batch; `cut` is how a run that is resumed was cut."""
        shape = self.facts.shape(batch.base.inputs)
        conditions = self._conditions(batch, shape, max_memory, evaluator, cut)
        key = self.spec.identity, tuple(shape.layout.symbols.items()), conditions
        if key not in self.facts.plans:
            self.facts.keep_plan(key, self._compilation(shape, conditions).compiled())
        compiled, costing = self.facts.plans[key]
        evaluator = "wavefront" if compiled.passes else "serial"
        if evaluator == "serial" and self.precision:
            otherwise = "" if conditions.obstacle else ", or run it as a wavefront"
            raise SweepError(
                f"a serial run is a full re-run bit for bit, and {self.precision} rounds more. Leave ",
                Argument("precision"),
                f" out{otherwise}.",
            )
        return self._plan_of(compiled, costing, evaluator, conditions)

    def _plan_of(
        self, compiled: Compiled, costing: Costing, evaluator: str, conditions: Conditions
    ) -> SweepPlan:
        batches, serial = self.batches, evaluator == "serial"
        rounding = "TF32" if self.precision else "batched kernels"
        why = (
            conditions.obstacle
            or ("one world after another, bit for bit a full re-run" if serial else "")
            or f"all worlds in one pass, equal up to the rounding of {rounding}"
        )
        flops = costing.flops * batches
        return SweepPlan(
            worlds=len(self.cells),
            batches=batches,
            node_evaluations=costing.node_evaluations * batches,
            full_evaluations=costing.full_evaluations * batches,
            launches=costing.launches * batches,
            flops=flops,
            full_flops=costing.full_flops * batches,
            peak_bytes=costing.peak_bytes,
            max_memory=conditions.max_memory,
            chunks=(1,) * len(self.cells) if serial else tuple(one.worlds for one in compiled.passes),
            evaluator=evaluator,
            why=why,
            seconds=calibration_of(self.model).seconds(evaluator, flops),
            compiled=compiled,
            spec=Lazy(self._plain_spec),
            sweep=self,
        )

    def _plain_spec(self) -> dict[str, Any]:
        given = [self._given(number) for number in range(self.batches)]
        return plain_spec(self.model.name, self.selectors, self.metrics, self.precision, given)

    def _compilation(self, shape: ShapeFacts, conditions: Conditions) -> Compilation:
        spec, facts, targets = self.spec, self.facts, self.targets()
        if self._groups is None:
            self._groups = place_groups(spec.cells, self.model.locate)
            expect_swept(self._groups)
        columns: tuple[tuple[str, int], ...] = ()
        if len(targets) == 1 and spec.reads_few_tokens and self._is_product(targets[0], shape):
            columns = ((targets[0], len(spec.tokens)),)
        taken = tuple(
            (facts.target(metric), metric.last, metric.copies)
            for metric in self.metrics
            if not metric.whole and metric.copies
        )
        last = spec.reads_last(lambda metric: facts.read.has_last(facts.target(metric)))
        return Compilation(
            self.model.graph,
            shape,
            self._groups,
            spec.names,
            ReadOut(targets, last, columns, taken),
            conditions,
            is_function=spec.is_function,
            from_run=spec.from_run,
        )

    def _is_product(self, target: str, shape: ShapeFacts) -> bool:
        """Whether an output is a product with a weight, of which a few columns can be computed alone."""
        record = shape.records.get(target)
        return (
            record is not None
            and record.op == "linear"
            and len(record.inputs) == len(record.args)
            and shape.layout.varying.isdisjoint(record.inputs[1:])
            and self.facts.read.ends_in_tokens(target)
        )

    def _conditions(
        self,
        batch: Batch,
        shape: ShapeFacts,
        max_memory: int | None,
        evaluator: str,
        cut: StoredCut | None,
    ) -> Conditions:
        """What the plan depends on besides spec and shape: read off the runs, before anything is planned."""
        read, edits = reader(batch.base), []
        for number, edit in enumerate(batch.base.edits):
            site = edit.place.name, edit.place.layer, edit.place.stack
            is_function = not isinstance(edit.part, Tensor)
            edits.append(StandingEdit(number, edit.node, edit.covers, is_function, site))
        first, differing = 0, frozenset[str]()
        if batch.source is not None:
            first, differing = first_difference(batch.base, batch.source, shape.finder, shape.layout)
        with computing():
            masks = tuple(sorted(shape.masks(read).items(), key=lambda item: item[0]))
        conditions = Conditions(first, differing, masks, tuple(edits), "", max_memory, evaluator, cut)
        return replace(conditions, obstacle=self._obstacle(batch, shape, conditions, read))

    def _obstacle(
        self, batch: Batch, shape: ShapeFacts, conditions: Conditions, read: Callable[[str], Any]
    ) -> str:
        """Why the worlds cannot be stacked, or nothing."""
        model = self.model
        if any(edit.found.result is not None for edit in batch.base.edits):
            return "the base patches `result`, which is no node of the graph"
        if model.batch_is_fixed:
            known = model.program.dimensions
            is_open = known.doubt or known.is_unbatched
            return model.batch_is_fixed if is_open else "the batch size is fixed in this capture"
        key = self.spec.identity, tuple(shape.layout.symbols.items()), conditions.edits
        if key not in self.facts.mixing:
            schedule = self._compilation(shape, conditions).schedule_of(range(len(self.cells)))
            self.facts.mixing[key] = self._mixing(
                shape, schedule.patched, [n for n, _ in schedule.steps], read
            )
        return self.facts.mixing[key]

    def _mixing(
        self, shape: ShapeFacts, patched: Iterable[str], computed: Sequence[str], read: Callable[[str], Any]
    ) -> str:
        for node in patched:
            if shape.layout.batch_dim.get(node) is None:
                return f"{node!r} is patched and has no batch along which worlds could be stacked"
        with computing():
            mixing = shape.mixing(tuple(computed), read)
        return f"{mixing!r} mixes the rows of the batch" if mixing else ""

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
        plan: SweepPlan | None = None,
    ) -> Result:
        """Run the plan: the one that is given, or else the one that `plan` would make.

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
        self.facts.expect_weights(weights.whole)
        self._forget_own_runs(weights.whole)
        try:
            self._read = weights.whole
            how = _How(evaluator, as_bytes(max_memory), plan)
            result = self._run(started, weights, how, out, resume, progress)
        finally:
            self._read = None
        if verify:
            result = replace(result, verification=result.verify(n=verify))
        return result

    def _run(
        self,
        started: float,
        weights: Contents,
        how: _How,
        out: str | Path | None,
        resume: bool,
        progress: bool | Callable[[int, int], None] | None,
    ) -> Result:
        values: list[Tensor] = []
        base_values: list[Tensor] = []
        source_values: list[Tensor | None] = []
        ledger = SweepLedger()
        plans: list[SweepPlan] = []
        metrics = MetricReader(self.facts, self.metrics, self.spec.tokens)
        with (
            recorder(self._stored(), out, resume) as record,
            bar(progress, len(self.cells) * self.batches, self.facts.device) as tell,
        ):
            for number in range(self.batches):
                batch = self._batch(number)
                with self._trusting(batch, weights):
                    cut = record.cut(number, how.asked)
                    plan = self._plan_for(number, batch, how, cut)
                    plans.append(plan)
                    base_values.append(metrics.of_baseline(batch.base, "base"))
                    source = batch.source
                    source_values.append(None if source is None else metrics.of_baseline(source, "source"))
                    record.begin(number, plan, base_values[-1], source_values[-1])
                    executor, resumed = self._executor(batch, plan, metrics), ledger.resumed
                    rows: list[Tensor] = []
                    with watching(self.facts.device, plan.peak_bytes, how.max_memory) as watch:
                        for chunk, worlds in enumerate(executor.chunks):
                            stored = record.get(number, chunk, len(worlds))
                            if stored is None:
                                stored = executor.run(chunk, batch, ledger, watch)
                                if out is not None:
                                    self._expect_unchanged(weights)
                                record.put(number, chunk, stored)
                            else:
                                executor.count(chunk, ledger)
                                ledger.resumed += len(worlds)
                            rows.append(stored)
                            tell(len(worlds))
                    if ledger.resumed - resumed < len(self.cells):
                        ledger.note_memory(watch.peak, watch.reserved)
                    assert plan.compiled is not None
                    values.append(reordered(rows, plan.compiled.order))
                del batch  # before the next one is made
                if self.batches > 1:
                    self._first = None
            self._expect_unchanged(weights)
        plan = of_batches(plans)
        ledger.seconds = time.perf_counter() - started
        if not ledger.resumed:
            calibration_of(self.model).note(plan.evaluator, plan.flops, ledger.compute_seconds)
        return self._result(plan, ledger, values, base_values, source_values, weights.whole)

    def _result(
        self,
        plan: SweepPlan,
        ledger: SweepLedger,
        values: Sequence[Tensor],
        base: Sequence[Tensor],
        source: Sequence[Tensor | None],
        weights: Sums,
    ) -> Result:
        """A result from the numbers of each batch, [cell, metric, prompt]."""
        per_prompt, bases = joined([numbers.transpose(0, 1) for numbers in values]), joined(list(base))
        known = [one for one in source if one is not None]
        sources = joined(known) if len(known) == len(source) else None
        return Result(
            plan,
            ledger,
            self.spreads,
            tuple(metric.name for metric in self.metrics),
            per_prompt.mean(-1),
            per_prompt,
            bases.mean(-1),
            None if sources is None else sources.mean(-1),
            self.provenance_of_run(weights),
            None,
            self,
            bases,
            sources,
            weights,
        )

    def rerun(self) -> Rerun:
        """What is run again where cells of a result are checked by the module itself."""
        targets = tuple("" if metric.whole else self.facts.target(metric) for metric in self.metrics)
        batches = tuple(partial(self._batch, number) for number in range(self.batches))
        return Rerun(self.model, self.cells, batches, self.metrics, targets, self.precision)

    def _plan_for(self, number: int, batch: Batch, how: _How, cut: StoredCut | None) -> SweepPlan:
        """The plan of a batch: the one that was given, where it is for runs of this shape."""
        given = how.plan
        if given is None or number:
            asked = how.asked if given is None else given.evaluator
            return self._planned(batch, how.max_memory, asked, cut)
        assert given.compiled is not None
        shape = tuple(self.facts.shape(batch.base.inputs).layout.symbols.items())
        if given.worlds != len(self.cells) or given.compiled.symbols != shape:
            raise SweepError(
                f"this plan is of {given.worlds} worlds and inputs of sizes {dict(given.compiled.symbols)}; "
                f"the sweep has {len(self.cells)} worlds and sizes {dict(shape)}. Plan it again."
            )
        chunks = given.chunks if given.evaluator == "wavefront" else None
        if cut is not None and (cut.evaluator, cut.chunks) != (given.evaluator, chunks or cut.chunks):
            raise SweepError(
                "the stored run was cut into other chunks than this plan has, and would round differently. "
                "Resume it without a plan, or start again in another folder."
            )
        return given

    def _executor(self, batch: Batch, plan: SweepPlan, metrics: MetricReader) -> Executor:
        """What runs a plan; kept with the model, so that runs of the same shape find it."""
        compiled = plan.compiled
        assert compiled is not None
        if plan.evaluator == "serial":
            return SerialExecutor(compiled, self.spec, metrics)
        shape = self.facts.shape(batch.base.inputs)
        tokens = self.spec.tokens if compiled.columns else ()
        key = id(compiled), tokens, self.precision
        known = self.facts.executors.get(key)
        if known is None or known.compiled is not compiled:
            known = WavefrontExecutor(self.model, compiled, shape, self.spec, metrics)
            self.facts.keep_executor(key, known)
        return known.reads(metrics)

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

    def _stored(self) -> StoredSweep:
        """What a store has to know of this sweep."""
        return StoredSweep(
            len(self.cells),
            self.batches,
            lambda: self.provenance(strict=True),
            self._names_by_world,
            self.facts.device,
        )

    def _names_by_world(self) -> list[str]:
        """The names of the cells, in the order of the worlds."""
        batch = self._batch(0)
        shape = self.facts.shape(batch.base.inputs)
        order = self._compilation(shape, self._conditions(batch, shape, None, "auto", None)).order.cells
        return [self.cells[number].name for number in order]

    def provenance(self, *, strict: bool = False) -> dict[str, Any]:
        """All that the numbers depend on, as plain values: equal sweeps have equal provenance.

        What cannot be identified for certain says so; with `strict` it raises IdentityError.
        """
        return self._with_digest(self._identified(strict), self._read)

    def provenance_of_run(self, weights: Sums) -> Mapping[str, Any]:
        """The same for a run that was made with these weights; they are hashed when it is first read."""
        identified = self._identified(strict=False)

        def made() -> dict[str, Any]:
            return self._with_digest(identified, weights)

        return Lazy(made)

    def _with_digest(self, identified: dict[str, Any], weights: Sums | None) -> dict[str, Any]:
        digest = model_digest(self.model, weights)
        model = {
            "model": self.model.name,
            "program": digest.program,
            "weights": digest.weights,
            **({"constants": digest.constants} if digest.constants else {}),
        }
        return {**model, **identified}

    def _identified(self, strict: bool) -> dict[str, Any]:
        """All that the numbers depend on besides the model."""
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
        return {
            "dtype": str(self.facts.dtype),
            "device": str(self.facts.device),
            **({} if self.precision is None else {"precision": self.precision}),
            "sites": list(self.spec.names),
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


@dataclass(frozen=True, slots=True)
class _How:
    """How a run was asked for: `asked` is the evaluator, `plan` the plan that was given."""

    asked: str
    max_memory: int | None
    plan: SweepPlan | None
