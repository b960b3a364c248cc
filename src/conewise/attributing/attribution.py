"""Attribution: what every patch of a sweep would do, estimated by gradients, as a result like a sweep's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from conewise.attributing.approximation import Approximation
from conewise.attributing.edge_scores import eap, eap_inputs
from conewise.attributing.hybrid import hybrid
from conewise.attributing.node_scores import atp, integrated
from conewise.attributing.star_scores import atp_star
from conewise.attributing.work import Work
from conewise.capturing.foreign import within_memory
from conewise.edges.edge_facts import edge_facts
from conewise.errors import SweepError
from conewise.locations.edge_sets import with_named
from conewise.locations.places import EdgePlace
from conewise.locations.selectors import Cell, SelectorLike
from conewise.phases import Phases
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
from conewise.runs.filling import joined
from conewise.sweeps.execution.ledger import PHASES, SweepLedger
from conewise.sweeps.planning.lazy import Lazy
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.storage.provenance import Given, lazy_provenance
from conewise.sweeps.sweep import Sweep

Scores = Callable[[Work, Sequence[Cell], int], Tensor]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to estimate effects: `scores` are [metric, cell, prompt]; `steps` where it takes several."""

    name: str
    scores: Scores
    of_edges: bool
    default_steps: int | None = None

    def described(self, steps: int) -> str:
        """The method in words."""
        return self.name if self.default_steps is None else f"{self.name}, {steps} steps"


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("atp", lambda work, cells, _: atp(work, cells), of_edges=False),
        Method("atp*", lambda work, cells, _: atp_star(work, cells), of_edges=False),
        Method("ig", integrated, of_edges=False, default_steps=10),
        Method("eap", lambda work, cells, _: eap(work, cells), of_edges=True),
        Method("eap-ig", eap_inputs, of_edges=True, default_steps=5),
    )
}
"""The methods, by name."""


HYBRID = "hybrid"
TOP, SAMPLE = 10, 20
"""How many cells `hybrid` makes certain of, and of how many it learns how far gradients are off."""


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
) -> Approximation:
    """Estimate by gradients what `model.sweep(sites, ...)` would find: a result of the same cells.

    `sites`, `base`, `source` and `metric` are those of a sweep. The result's `effect` is the attribution,
    and a value is the base's metric plus that: an approximation, which plots, tables, files and pages say.

    `method` is, for sites, "atp" (attribution patching), "atp*" (with both of its corrections) or "ig"
    (integrated gradients, with `steps`); for edges "eap" or "eap-ig" (with `steps`). "hybrid" ranks by "atp"
    or "eap", computes `sample` cells exactly at random (20), and then cells from the top down, until none
    that is left can belong to the `top` largest (10) by the error of the sample; `exact` names them.
    """
    named = with_named(sites, lambda stack: edge_facts(model, stack).components, model.locate)
    sweep = Sweep(model, named, base=base, source=source, metric=metric)
    return estimated(sweep, method, steps, top=top, sample=sample, seed=seed)


def estimated(
    sweep: Sweep,
    method: str,
    steps: int | None = None,
    *,
    top: int | None = None,
    sample: int | None = None,
    seed: int = 0,
) -> Approximation:
    """What a sweep would find, estimated by a method: see `attribution`."""
    if len(sweep.own):
        raise SweepError(
            "attribution is by one source for all cells, and here cells have sources of their own. Run the "
            "sweep itself, or attribute to places with `source=`."
        )
    if method == HYBRID:
        if steps is not None:
            raise SweepError(f"'hybrid' takes one gradient, and no steps: leave out steps={steps!r}.")
        is_edge = any(isinstance(place, EdgePlace) for place in sweep.cells[0].places)
        count = min(_cells(top, TOP, 1, "top"), len(sweep.cells))
        drawn = _cells(sample, SAMPLE, 2, "sample")
        return hybrid(_by_gradients(sweep, "eap" if is_edge else "atp", None), count, drawn, seed)
    if top is not None or sample is not None:
        raise SweepError("`top` and `sample` are of method='hybrid'; others compute no cell exactly.")
    return _by_gradients(sweep, method, steps)


def _by_gradients(sweep: Sweep, method: str, steps: int | None) -> Approximation:
    """What a sweep would find, by gradients alone."""
    model = sweep.model
    chosen = _method(method)
    count = _steps(chosen, steps)
    _expect_kind(chosen, sweep.cells)
    phases, ledger = Phases(PHASES), SweepLedger()
    with phases.during("weights"):
        weights = model.weights.assumed() or model.weights.whole_contents()
    values: list[Tensor] = []
    bases: list[Tensor] = []
    sources: list[Tensor | None] = []
    flops = peak = forwards = backwards = 0
    full: list[tuple[int, int]] = []
    for number in range(sweep.batches):
        batch = sweep.batch(number)
        readings = [run for run in (batch.base, batch.source, *batch.intervention.runs) if run is not None]
        with ExitStack() as checked:
            with phases.during("baselines"):
                for reading in dict.fromkeys(readings):
                    checked.enter_context(reading.checked_once())
                own = sweep.read_metrics(batch.base, batch.metrics)
                sources.append(
                    None if batch.source is None else sweep.read_metrics(batch.source, batch.metrics)
                )
            bases.append(own)
            with phases.during("passes"):
                work = Work(batch, batch.metrics, ledger)
                effects = chosen.scores(work, sweep.cells, count)
            values.append(effects + own[:, None])
        flops, peak = flops + work.flops, max(peak, work.peak_bytes)
        forwards, backwards = forwards + work.forwards, backwards + work.backwards
        full.append(_full_costs(work, len(sweep.cells)))
        if sweep.batches > 1:
            sweep._batches.forget()
    ledger.phases = phases.seconds()
    ledger.seconds = sum(ledger.phases.values())
    described = chosen.described(count)
    plan = SweepPlan(
        worlds=len(sweep.cells),
        batches=sweep.batches,
        node_evaluations=ledger.node_evaluations,
        full_evaluations=sum(nodes for nodes, _ in full),
        launches=ledger.launches,
        flops=flops,
        full_flops=sum(one for _, one in full),
        peak_bytes=peak,
        max_memory=None,
        chunks=(len(sweep.cells),),
        evaluator="gradients",
        why=f"approximate, {described}: {_counted(forwards, 'forward')} and {_counted(backwards, 'backward')}"
        " over parts of the program",
        seconds=None,
    )
    known = [one for one in sources if one is not None]
    per_prompt, base_rows = joined(values), joined(bases)
    source_rows = joined(known) if len(known) == len(sources) else None
    given = Given(sweep._batches.all_given())
    identified = lazy_provenance(model, sweep.spec, given, weights.whole)
    said = {"method": chosen.name, **({} if chosen.default_steps is None else {"steps": count})}
    return Approximation(
        plan,
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
        weights.whole,
        described,
    )


def _cells(given: int | None, default: int, least: int, what: str) -> int:
    if given is None:
        return default
    if isinstance(given, bool) or given < least:
        raise SweepError(f"{what} is a number of cells of at least {least}, and not {given!r}.")
    return given


def _method(name: str) -> Method:
    if name not in METHODS:
        raise SweepError(f"no method {name!r} of attribution; there are {', '.join((*METHODS, HYBRID))}.")
    return METHODS[name]


def _steps(method: Method, steps: int | None) -> int:
    if method.default_steps is None:
        if steps is not None:
            raise SweepError(f"{method.name!r} takes one gradient, and no steps: leave out steps={steps!r}.")
        return 1
    if steps is None:
        return method.default_steps
    if isinstance(steps, bool) or steps < 1:
        raise SweepError(f"steps is a number of at least 1, and not {steps!r}.")
    return steps


def _expect_kind(method: Method, cells: Sequence[Cell]) -> None:
    """Raise SweepError where edges are given to a method of sites, or the other way round."""
    for cell in cells:
        is_edge = any(isinstance(place, EdgePlace) for place in cell.places)
        if is_edge != method.of_edges:
            of_these = ", ".join(one.name for one in METHODS.values() if one.of_edges == is_edge)
            raise SweepError(
                f"{method.name!r} attributes to {'edges' if method.of_edges else 'sites'}, and {cell.name} "
                f"is {'an edge' if is_edge else 'a site'}: for {'edges' if is_edge else 'sites'} there are "
                f"{of_these or 'none'}."
            )


def _full_costs(work: Work, worlds: int) -> tuple[int, int]:
    """The node evaluations and FLOPs of a full forward for each world."""
    model, costs = work.model, work.shape.costs
    names = [record.name for record in model.program.records]
    return worlds * len(names), worlds * sum(costs.flops(name) for name in names)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what} pass{'' if count == 1 else 'es'}"
