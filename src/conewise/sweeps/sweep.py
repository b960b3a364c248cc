"""A sweep: many worlds, one baseline, one demand. Planned before it runs, exact, in one pass if possible."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from conewise.anatomy.axes import resolved, selected
from conewise.anatomy.components import Edges
from conewise.anatomy.padding import has_mask, hides_some, shown_positions
from conewise.anatomy.places import EdgePlace, Place, SourcedPlace
from conewise.anatomy.selectors import (
    Cell,
    Pairs,
    Selector,
    SelectorLike,
    SourcedCell,
    SourcedCells,
    Sources,
    Spread,
    as_selectors,
    with_sources,
)
from conewise.anatomy.sites import Located
from conewise.arguments import Count, as_bytes, checked, expect
from conewise.errors import Argument, BudgetError, MetricError, NoEffectWarning, SweepError
from conewise.jobs.job import run_job, run_jobs
from conewise.jobs.runnable import How, Runnable
from conewise.jobs.store import Request
from conewise.program.foreign import within_memory
from conewise.program.streaming import reads_of
from conewise.program.tensors import SPLIT, Tensor, expect_precision
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.runs.interventions import OwnSources
from conewise.runs.metric_words import as_metrics
from conewise.runs.metrics import Metric, Vector
from conewise.runs.reading import Reading
from conewise.runs.spreading import spread
from conewise.sweeps.batches import Base, Batches
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.execution.reading import MetricReader, SweepLedger
from conewise.sweeps.planning.patching import axis_lengths, counted_from_front, expect_swept, place_groups
from conewise.sweeps.planning.plan import Lazy, SweepPlan
from conewise.sweeps.planning.planner import Planner, facts_of
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import StoredCut, SweepSpec
from conewise.sweeps.recheck import Rerun
from conewise.sweeps.result import Result
from conewise.sweeps.running import Options, SweepJob, calibration_of
from conewise.sweeps.storage.provenance import Given, lazy_provenance, plain_spec, provenance
from conewise.templates import heading
from conewise.threads import Turn, gc_paused, one_thread


@contextmanager
def _unreported() -> Iterator[None]:
    """Without warnings of patches without effect: a sweep reads more than a patch of its base reaches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        yield


def _is_from_end(given: Any) -> bool:
    """True if positions are counted from the end somewhere in what was given as sites."""
    chosen: list[Any]
    match given:
        case Selector():
            chosen = [given.choices.get(axis) for axis in ("pos", "query_pos")]
        case Place():
            chosen = [given.part.get(axis) for axis in ("pos", "query_pos")]
        case Edges() | SourcedCell():
            return any(map(_is_from_end, given.places))
        case SourcedCells():
            return _is_from_end(given.of)
        case Pairs():
            return any(map(_is_from_end, given.of.parts))
        case _:
            return any(map(_is_from_end, given))
    numbers = [n for one in chosen for n in (one if isinstance(one, tuple | list) else [one])]
    return any("-" in one if isinstance(one, str) else isinstance(one, int) and one < 0 for one in numbers)


def _part_shape(found: Located, facts: ShapeFacts) -> tuple[int, ...]:
    """The shape of the part that a place means, in runs of one shape."""
    lengths = axis_lengths(found, facts)
    return tuple(
        selected(found.part[axis], lengths[axis]) if axis in found.part else lengths[axis]
        for axis in found.part_axes
    )


@checked
@one_thread
class Sweep(Runnable[Result]):
    """Patch every cell in a world of its own, and read the metric there.

    `base` is the run that is changed, and `source` provides the patched values (a run, or an intervention). A
    base can be a world that already has patches: they apply in every world of the sweep.

    `precision="tf32"` multiplies float32 on a CUDA device in TF32, as a wavefront; TF32 is never used unless
    requested. `precision="split"` multiplies it in three bfloat16 parts if that is faster, at about float32's
    error.

    Besides the options of every job, `run` takes: `evaluator` ("auto", "serial", "wavefront"); `verify`, the
    number of random cells to check against plain full forwards of the module; `plan`, a plan that `plan`
    made, with its evaluator and its memory budget: a different `evaluator`, or a `max_memory` that is too
    small for it, raises an error.

    Finished chunks are stored in `out` as they finish, and a resumed run keeps its original chunks. The
    ledger of the result has the seconds of each phase. The weights have to be those that base and source were
    computed with: all their bits are read at the end, at the start if they were not read before, and before
    anything is stored. Raises WeightsChangedError if a weight changed.
    """

    @_unreported()
    @within_memory("the baseline of this sweep")
    @gc_paused()
    def __init__(
        self,
        model: Captured,
        sites: SelectorLike,
        *,
        base: Base,
        source: Any,
        metric: Any,
        precision: str | None = None,
    ) -> None:
        self.model = model
        self.facts = facts_of(model)
        elsewhere = (device for device in self.facts.devices if device.type != "cuda")
        expect_precision(precision, next(elsewhere, self.facts.device), self.facts.dtype)
        if precision == SPLIT and reads_of(model.program).stream is not None:
            raise SweepError(
                "products in parts keep those of all weights on the device, and this model's weights stream. "
                "Leave ",
                Argument("precision", precision),
                " out, or load the model whole.",
            )
        self.precision = precision
        self.selectors = as_selectors(sites)
        if isinstance(source, Sources):
            self.selectors, source = with_sources(self.selectors, source), None
        self.metrics = as_metrics(metric, model)
        names = [one.name for one in self.metrics]
        if not names:
            raise SweepError("no metric: give one, or a list of several.")
        if len(set(names)) != len(names):
            raise SweepError(f"two metrics are named {names!r}; give each its own with `name=`.")
        self.own = OwnSources(model)
        self._batches = Batches(model, base, source, self.own, self.metrics)
        first = self.batch(0)
        self.is_function = first.intervention.is_function
        shapes = self._batches.shapes or [first.base.inputs]
        lengths = [partial(axis_lengths, facts=self.facts.shape(inputs)) for inputs in shapes]
        found = spread(self.selectors, model, lengths, self.own.sourced)
        self.spreads: tuple[Spread, ...] = found.spreads
        self.cells: tuple[Cell, ...] = found.cells
        self.spec = SweepSpec(
            found.places,
            found.names,
            self.metrics,
            precision,
            self.is_function,
            first.source is not None,
        )
        self.vectors = self._vectors(shapes)
        self._expect_places(lengths)
        self._expect_tokens()
        self._expect_sources(source)
        self._planner = Planner(model, self.spec)

    def _vectors(self, shapes: Sequence[Mapping[str, Tensor]]) -> tuple[Vector, ...]:
        """The axes of each metric, none for one that is a number. Raises where that depends on the batch."""
        found = [
            tuple(
                vector or Vector(metric.name, (), ())
                for metric in self.metrics
                for vector in [vector_of(metric, self.facts.shape(inputs))]
            )
            for inputs in shapes
        ]
        for first, other in zip(found[0], found[-1], strict=True):
            if any(one != found[0] for one in found):
                raise MetricError(
                    f"a metric has as many numbers in each batch, and {first.name!r} has {first.shape} in "
                    f"one and {other.shape} in another. Give a position, `pos=-1`, or batches of one length."
                )
        return found[0]

    def _expect_places(self, lengths: Sequence[Callable[[Located], dict[str, int]]]) -> None:
        """Raise for places that were written one by one and are not there, or that no node holds."""
        for part, found in zip(self.selectors.parts, self.spreads, strict=True):
            is_family = isinstance(part, Selector | Edges)
            cells = found.cells[:1] if is_family else found.cells
            if is_family or not isinstance(cells[0].places[0], EdgePlace):
                groups = place_groups(
                    [self.model.each_call(cell.places) for cell in cells], self.model.locate
                )
                expect_swept(groups)
                for group in groups:
                    for one in lengths:
                        counted_from_front(group, one(group.located))
                    put = self.batch(0).intervention if group.sources is None else self.own[group.sources[0]]
                    if put.expect_kind is not None:
                        put.expect_kind(group.place, group.located)

    def _expect_tokens(self) -> None:
        """Raise SweepError where a position that is counted from the end is padding of some prompt."""
        program, spreads = self.model.program, zip(self.selectors.parts, self.spreads, strict=True)
        known = self._batches.known_inputs() if has_mask(program) else []
        padded = [(inputs, of) for inputs, of in known if hides_some(program, inputs)]
        if not padded:
            return
        cells = [cell for part, found in spreads if _is_from_end(part) for cell in found.cells]
        for inputs, of in padded:
            for place in (place for cell in cells for place in cell.places):
                found = self.model.locate(place)
                shown = shown_positions(program, inputs, found.node, found.site.stack)
                at = place.part.get("pos", place.part.get("query_pos"))
                if shown is None or not isinstance(at, int) or bool(shown[:, at].all()):
                    continue
                prompt = int((~shown[:, at]).nonzero()[0])
                raise SweepError(
                    f"{of}{place}: its position was counted from the end of the batch, where prompt {prompt} "
                    "has padding. Pad on the left, so that the last position is that of every prompt, or "
                    "sweep prompts of one length at a time."
                )

    def _expect_sources(self, source: Any) -> None:
        """Raise where a cell has no source, or one that does not fit its place in some base."""
        if source is None:
            places = (place for cell in self.cells for place in cell.places)
            bare = next((place for place in places if not isinstance(place, SourcedPlace)), None)
            if bare is not None:
                raise SweepError(
                    f"no source for {bare}: give the sweep one, `source=...` (a run, inputs, 'zero', 'mean', "
                    "an intervention), or give each cell its own, `cw.cell(place, source=...)`."
                )
        if len(self.own):
            own = [place for places in self.spec.cells for place in places if isinstance(place, SourcedPlace)]
            for inputs, of in self._batches.known_inputs():
                shape = partial(_part_shape, facts=self.facts.shape(inputs))
                self.own.expect_fitting(own, shape, inputs, of)

    # -- what is swept -----------------------------------------------------------------------

    @property
    def _turn(self) -> Turn:
        return self.model._turn

    @property
    def batches(self) -> int:
        """The number of baselines."""
        return len(self._batches)

    def batch(self, number: int) -> Batch:
        """Return a baseline by number, and the source patched into it; runs the model on them if needed."""
        if not 0 <= number < max(self.batches, 1):
            raise SweepError(f"no batch {number}: there are {self.batches}, from 0.")
        return self._batches[number]

    def forget(self) -> None:
        """Drop the runs that were computed from inputs; the next access computes them again."""
        self._batches.forget()

    def of_cells(self, numbers: Sequence[int]) -> Sweep:
        """Return the same sweep over some of its cells, by number, in that order."""
        picked = []
        for given in numbers:
            if not 0 <= (number := expect("numbers", given, "int")) < len(self.cells):
                raise SweepError(f"no cell {number}: there are {len(self.cells)}, from 0.")
            picked.append(number)
        sites = [[self._as_given(place) for place in self.cells[number].places] for number in picked]
        return Sweep(self.model, **{**self._asked(), "sites": sites})

    def _as_given(self, place: Place) -> Place | SourcedCell:
        """A place as it was given: with its own source, where it has one."""
        if not isinstance(place, SourcedPlace):
            return place
        bare = Place(place.name, place.layer, place.stack, place.part)
        return SourcedCell((bare,), self.own.given[place.number], place.label)

    def targets(self) -> tuple[str, ...]:
        """The nodes that the metrics read."""
        return self.facts.targets(self.metrics)

    def read_metrics(self, run: Reading) -> Tensor:
        """Return every metric of a run, as [metric, prompt] in float64."""
        return MetricReader(self.facts, self.metrics).of_run(run)

    def provenance(self, *, strict: bool = False) -> dict[str, Any]:
        """Return everything that the numbers depend on, as plain values: equal sweeps have equal provenance.

        Parts that cannot be identified for certain are marked; with `strict` they raise IdentityError.
        """
        return provenance(self.model, self.spec, self._given, strict=strict)

    @property
    def _given(self) -> Given:
        """The base and source of each batch as they were given, and the cells' own sources."""
        return Given(self._batches.all_given(), self.own)

    # -- plan --------------------------------------------------------------------------------

    @_unreported()
    @within_memory("planning this sweep")
    def plan(self, max_memory: int | str | None = None, evaluator: str = "auto") -> SweepPlan:
        """Return the steps of the sweep and their cost; nothing is computed.

        If there are several batches, the first stands for all; a result has the plan of those that were run.
        """
        self._expect_weights(self.model.weights.contents().whole)
        return self._planned(self.batch(0), self.model._budget(as_bytes(max_memory)), evaluator)

    def expect_room(self, max_memory: int, evaluator: str) -> None:
        """Raise BudgetError before any batch runs if one needs too much memory, however it is split.

        Batches of one shape need the same memory. Batches whose runs are computed on demand are not checked.
        """
        shapes: dict[Any, int] = {}
        for number, (inputs, _) in enumerate(self._batches.known_inputs()):
            shapes.setdefault(tuple((name, value.shape) for name, value in inputs.items()), number)
        expect_each(lambda number: self._planned(self.batch(number), max_memory, evaluator), shapes.values())

    def _expect_weights(self, now: Sums) -> None:
        """Forget what was found out, and what was run, with other weights than these."""
        for metric in self.metrics:
            if metric.reference is not None:
                metric.reference.expect_current(metric.name)
        self.facts.expect_weights(now)
        self._batches.expect_weights(now)

    def _asked(self) -> dict[str, Any]:
        """Return the arguments of this sweep, as `Sweep` takes them beside the model."""
        given = self._batches.all_given()
        bases, sources = [base for base, _ in given], [source for _, source in given]
        return {
            "sites": self.selectors,
            "base": bases[0] if len(given) == 1 else bases,
            "source": sources[0] if len(given) == 1 else sources,
            "metric": list(self.metrics),
            "precision": self.precision,
        }

    def _planned(
        self, batch: Batch, max_memory: int | None, evaluator: str, cut: StoredCut | None = None
    ) -> SweepPlan:
        """The plan for a batch; `cut` is how a run that is resumed was cut."""
        with gc_paused():
            plan = self._planner.plan(
                batch.base,
                batch.source,
                batches=self.batches,
                max_memory=max_memory,
                evaluator=evaluator,
                cut=cut,
            )
        seconds = calibration_of(self.model).seconds(plan.evaluator, plan.launches, plan.flops)
        own = self.model.name, self.selectors, self.metrics, self.precision
        spec = Lazy(lambda: plain_spec(*own, self._batches.all_given(), self.own))
        return replace(plan, seconds=seconds, spec=spec, sweep=self)

    # -- run ---------------------------------------------------------------------------------

    @checked
    @_unreported()
    @within_memory("this sweep")
    def _run(
        self, how: How, *, evaluator: str = "auto", verify: Count = 0, plan: SweepPlan | None = None
    ) -> Result:
        how = replace(how, max_memory=self.model._budget(how.max_memory))
        result: Result = run_job(SweepJob(self, Options.of(evaluator, how.max_memory, plan)), how)
        return replace(result, verification=result.verify(n=verify)) if verify else result

    def _result(
        self,
        plan: Any,
        ledger: SweepLedger,
        per_prompt: Tensor,
        baselines: tuple[Tensor, Tensor | None],
        weights: Sums,
        kind: type[Result] = Result,
        **more: Any,
    ) -> Any:
        """Return what a run found: [metric, cell, prompt], and [metric, prompt] of base and source."""
        base, source = baselines
        return kind(
            plan,
            ledger,
            self.spreads,
            tuple(name for vector in self.vectors for name in vector.names),
            per_prompt.mean(-1),
            per_prompt,
            base.mean(-1),
            None if source is None else source.mean(-1),
            lazy_provenance(self.model, self.spec, self._given, weights),
            sweep=self,
            base_per_prompt=base,
            source_per_prompt=source,
            weights=weights,
            vectors=self.vectors if any(vector.axes for vector in self.vectors) else (),
            **more,
        )

    def _stored(self, weights: Sums) -> Request:
        """Return the identity of this sweep, for a store."""

        def identity() -> dict[str, Any]:
            return provenance(self.model, self.spec, self._given, weights, strict=True)

        def order() -> list[str]:
            first = self.batch(0)
            return [self.cells[number].name for number in self._planner.order(first.base, first.source)]

        return Request(len(self.cells), self.batches, identity, order, self.facts.device)

    def rerun(self) -> Rerun:
        """Return a function that runs cells of a result again, by the module itself."""
        targets = tuple(
            "" if metric.whole or metric.reads else self.facts.target(metric) for metric in self.metrics
        )
        batches = tuple(partial(self.batch, number) for number in range(self.batches))
        return Rerun(self.model, self.cells, batches, targets, self.metrics, self.precision)

    def __repr__(self) -> str:
        parts = " + ".join(
            str(part)
            if isinstance(part, Selector)
            else f"{len(part)} {spread.name}"
            if isinstance(part, tuple)
            else repr(part)
            for part, spread in zip(self.selectors.parts, self.spreads, strict=True)
        )
        metrics = ", ".join(metric.name for metric in self.metrics)
        return f"Sweep over {parts}: {len(self.cells)} worlds of {self.model.name}, reading {metrics}"

    def _repr_html_(self) -> str:
        return heading("Sweep", repr(self).removeprefix("Sweep "))


def vector_of(metric: Metric, shape: ShapeFacts) -> Vector | None:
    """The axes of a metric in runs of one shape; None for one that is a number.

    Raises MissingSiteError where a site has no such part.
    """
    lengths = [axis_lengths(one, shape) for one in metric.found]
    for one, own in zip(metric.found, lengths, strict=True):
        resolved(one.view.axes, one.part, [own[axis] for axis in one.view.axes])
    return metric.vector and metric.vector(lengths)


def expect_each(plan: Callable[[int], object], numbers: Iterable[int]) -> None:
    """Plan each; raise the BudgetError that names the most, which would do for all."""
    refused: list[BudgetError] = []
    for number in numbers:
        try:
            plan(number)
        except BudgetError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: error.least)


def swept_together(
    sweeps: Sequence[Sweep], folders: Sequence[str | Path | None], how: How, options: Options
) -> list[Result]:
    """Return the results of several sweeps of one model by workers: shares of all of them stand in one line.

    Each is stored in its folder. The seconds of all are told by the first.
    """
    jobs = [SweepJob(sweep, options) for sweep in sweeps]
    with _unreported():
        return run_jobs(jobs, folders, how)
