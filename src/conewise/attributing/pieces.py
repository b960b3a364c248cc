"""The plan of an attribution: methods, costs, and the pieces in which it is computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from conewise.anatomy.places import EdgePlace
from conewise.anatomy.selectors import Cell
from conewise.arguments import as_bytes, shown_bytes
from conewise.attributing import replayed
from conewise.attributing.edge_scores import (
    EdgeScores,
    EdgeTable,
    eap_activations,
    eap_inputs,
    information_flow,
)
from conewise.attributing.node_scores import PatchedSites, SiteEffects, atp_star, integrated
from conewise.attributing.relevance import GradientInteractions, Relevance
from conewise.attributing.work import Counts, Work
from conewise.errors import BudgetError, SweepError
from conewise.jobs.store import Request
from conewise.program.rehearsal import peak_of
from conewise.program.tensors import Tensor
from conewise.program.walk import run_sources
from conewise.program.weights import Contents, Sums
from conewise.reactive.world import World
from conewise.runs.captured import Captured
from conewise.runs.interventions import as_intervention
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun, Run
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.planning.planner import facts_of, keep, tail_of
from conewise.sweeps.planning.schedule import no_room
from conewise.sweeps.planning.spec import SweepSpec
from conewise.sweeps.storage.provenance import provenance
from conewise.sweeps.sweep import Sweep
from conewise.templates import aligned, heading, shown, table

Cells = PatchedSites | EdgeTable
"""The cells of an attribution, by the sites that they patch or by the ends of their edges."""

Scores = Callable[[Work, Any, int], Tensor]

HYBRID = "hybrid"

KEPT = 8
"""The cells of so many attributions are kept with a model."""
_CELLS = "_attributed_cells"


@dataclass(frozen=True, slots=True)
class Method:
    """A way to estimate effects: `of_sites` and `of_edges` score cells of a kind, [metric, cell, prompt].

    `default_steps` where it takes several. Where these are kinds of `OnePass`, by the `rules`, one forward is
    recorded, whatever the cells.
    """

    name: str
    of_sites: Scores | type[SiteEffects] | None = None
    of_edges: Scores | type[EdgeScores] | None = None
    default_steps: int | None = None
    rules: type[Relevance] | None = None

    @property
    def is_one_pass(self) -> bool:
        """True if one forward is recorded."""
        return isinstance(self.of_sites or self.of_edges, type)

    def described(self, steps: int) -> str:
        """The method in words."""
        return self.name if self.default_steps is None else f"{self.name}, {steps} steps"

    def scores(self, work: Work, cells: Cells, steps: int) -> Tensor:
        """[metric, cell, prompt]: the estimated effects of one batch."""
        own: Any = self.of_edges if isinstance(cells, EdgeTable) else self.of_sites
        if not self.is_one_pass:
            found: Tensor = own(work, cells, steps)
            return found
        return replayed.effects(work, self.name, cells.cells, lambda one: own(one, cells, self.rules))

    def steps(self, given: int | None) -> int:
        """Return the number of steps. Raises SweepError for a method without, and for a wrong number."""
        if self.default_steps is None:
            if given is not None:
                raise SweepError(
                    f"{self.name!r} takes one gradient, and no steps: leave out steps={given!r}."
                )
            return 1
        if given is None:
            return self.default_steps
        if not 1 <= given <= MOST_STEPS:
            raise SweepError(f"steps is a number from 1 to {MOST_STEPS:,}, and not {given!r}.")
        return given

    def cells(self, model: Captured, cells: tuple[Cell, ...]) -> Cells:
        """The cells as it reads them, which are kept while these are: a new pair of prompts finds them.

        Raises SweepError for a kind of cells that it does not attribute to.
        """
        kept: OrderedDict[int, Cells] = vars(model).setdefault(_CELLS, OrderedDict())
        known = kept.get(id(cells))
        is_fitting = (self.of_edges if isinstance(known, EdgeTable) else self.of_sites) is not None
        if known is not None and known.given is cells and is_fitting:
            return known
        found = EdgeTable(model, cells) if self._are_edges(cells) else PatchedSites(model, cells)
        keep(kept, id(cells), found, KEPT)
        return found

    def _are_edges(self, cells: Sequence[Cell]) -> bool:
        for cell in cells:
            is_edge = any(isinstance(place, EdgePlace) for place in cell.places)
            if (self.of_edges if is_edge else self.of_sites) is None:
                these = "edges" if is_edge else "sites"
                of_these = [
                    one.name for one in METHODS.values() if (one.of_edges if is_edge else one.of_sites)
                ]
                raise SweepError(
                    f"{self.name!r} attributes to {'sites' if is_edge else 'edges'}, and {cell.name} "
                    f"is {'an edge' if is_edge else 'a site'}: for {these} there are {', '.join(of_these)}."
                )
            if is_edge != isinstance(cells[0].places[0], EdgePlace):
                raise SweepError(
                    f"{cells[0].name} and {cell.name} are an edge and a site: attribute to edges and to "
                    "sites one after the other."
                )
        return isinstance(cells[0].places[0], EdgePlace)


MOST_STEPS = 1_000_000
"""More steps than that would not end."""

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("atp", SiteEffects),
        Method("atp*", atp_star),
        Method("ig", integrated, default_steps=10),
        Method("relp", SiteEffects, EdgeScores, rules=Relevance),
        Method("eap", of_edges=EdgeScores),
        Method("eap-ig", of_edges=eap_inputs, default_steps=5),
        Method("eap-ig-source", of_edges=partial(eap_inputs, first=1), default_steps=5),
        Method("ifr", of_edges=information_flow),
        Method("gim", SiteEffects, EdgeScores, rules=GradientInteractions),
        Method("eap-ig-activations", of_edges=eap_activations, default_steps=5),
    )
}
"""The methods, by name."""


STEPS_FROM = ("base", "source")
"""The end of the line that the steps of EAP-IG include."""


def with_steps_from(name: str, given: str | None) -> str:
    """The method whose steps include that end. Raises SweepError where a method has no such choice."""
    if given is None:
        return name
    if given not in STEPS_FROM or name != "eap-ig":
        raise SweepError(
            f"steps_from={given!r} with method={name!r}: the steps of 'eap-ig' include the end of the "
            "'base' (the default) or that of the 'source' (as EAP-IG's own code does since February 2025)."
        )
    return "eap-ig-source" if given == "source" else name


def method_of(name: str) -> Method:
    """The method of that name. Raises SweepError with those that there are."""
    if name not in METHODS:
        raise SweepError(f"no method {name!r} of attribution; there are {', '.join((*METHODS, HYBRID))}.")
    return METHODS[name]


@dataclass(frozen=True, slots=True, repr=False)
class AttributionPlan(Counts):
    """The cost of an attribution: `forwards` and `backwards` are passes that are recorded, each over a part.

    Base and source are computed beside them, where they are inputs and not runs. `node_evaluations` counts a
    node once for each pass that computes it and once for each backward pass through it, as the ledger of the
    result does. `pieces` are how many times some prompts are computed together: as many as there are batches,
    more where `max_memory` cuts these into `prompts_at_once`. `peak_bytes` is the most that is held at once,
    beside the model and the runs that were given.
    """

    method: str = ""
    cells: int = 0
    batches: int = 1
    pieces: int = 1
    prompts_at_once: int | None = None
    max_memory: int | None = None
    peak_bytes: int = 0

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as lines of a table."""
        pieces = "" if self.pieces == self.batches else f" in {self.pieces:,} pieces"
        at_once = f", up to {self.prompts_at_once:,} prompts at a time" if self.prompts_at_once else ""
        budget = f" of {shown_bytes(self.max_memory)}" if self.max_memory else ""
        return [
            ("method", self.method),
            ("cells", f"{self.cells:,}"),
            ("batches", f"{self.batches:,}{pieces}{at_once}"),
            ("passes", self.passes()),
            ("node evaluations", f"{self.node_evaluations:,}"),
            ("FLOPs", f"{self.flops:.3g}"),
            ("peak memory", f"{shown_bytes(self.peak_bytes)}{budget}"),
        ]

    def __repr__(self) -> str:
        return f"AttributionPlan by {self.method} of {self.cells:,} cells: {self.passes()}"

    def __str__(self) -> str:
        return "\n".join(aligned(self.rows()))

    def _repr_html_(self) -> str:
        return shown(heading(repr(self)), table(self.rows()))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some prompts of one batch, `rows` of it; all of them where it is None."""

    number: int
    rows: range | None = None

    def spec(self, sweep: Sweep) -> SweepSpec:
        """Return what is asked of these prompts."""
        return replace(sweep.spec, metrics=self._metrics(sweep))

    def _metrics(self, sweep: Sweep) -> tuple[Metric, ...]:
        found, rows = sweep._batches.metrics(self.number), self.rows
        if rows is None:
            return found
        return tuple(
            one if one.prompts is None or one.of_prompts is None else one.of_prompts(rows) for one in found
        )

    def batch(self, sweep: Sweep) -> Batch:
        """Return the base with these prompts alone, and what is put into it."""
        whole = sweep.batch(self.number)
        if self.rows is None:
            return whole
        model, (_, given) = sweep.model, sweep._batches.given(self.number)
        base = InputRun(model, rows_of(model, whole.base.inputs, self.rows))
        source = None
        if whole.source is not None:
            given = source = InputRun(model, rows_of(model, whole.source.inputs, self.rows))
        return Batch(base, source, as_intervention(given, model), metrics=self._metrics(sweep))


ENOUGH = 3
"""Steps along a line that a rehearsal takes: each of the later ones takes what the third does."""

_REHEARSED = "_attributions_rehearsed"

KNOWN = 64
"""The number of rehearsals that are kept with a model."""


@dataclass(frozen=True)
class AttributionRequest:
    """A request to estimate the effects of a sweep's `cells` by a method, in `pieces`."""

    sweep: Sweep
    method: Method
    cells: Cells
    steps: int
    max_memory: int | None = None
    pieces: tuple[Piece, ...] = ()
    _rehearsed: dict[Piece, tuple[int, Counts]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, sweep: Sweep, method: str, steps: int | None, max_memory: int | str | None
    ) -> AttributionRequest:
        """Return the request to estimate what a sweep would find. Raises SweepError for what cannot be."""
        sweep.model.expect_program("attribute effects")
        chosen = method_of(method)
        count, cells = chosen.steps(steps), chosen.cells(sweep.model, sweep.cells)
        found = cls(sweep, chosen, cells, count, as_bytes(max_memory))
        return replace(found, pieces=found._cut())

    @property
    def described(self) -> str:
        """The method in words."""
        return self.method.described(self.steps)

    @property
    def provenance(self) -> dict[str, Any]:
        """The method, as provenance has it."""
        steps = {} if self.method.default_steps is None else {"steps": self.steps}
        return {"method": self.method.name, **steps}

    @property
    def plan(self) -> AttributionPlan:
        """The cost of it."""
        return AttributionPlan(
            **asdict(sum(map(self.counts_of, self.pieces), Counts())),
            method=self.described,
            cells=len(self.sweep.cells),
            batches=self.sweep.batches,
            pieces=len(self.pieces),
            prompts_at_once=self._prompts_at_once,
            max_memory=self.max_memory,
            peak_bytes=self.peak_bytes(),
        )

    @property
    def _prompts_at_once(self) -> int | None:
        """The most prompts of a piece that is a part of a batch; None where batches are whole."""
        return max((len(one.rows) for one in self.pieces if one.rows is not None), default=None)

    def stored(self, weights: Contents) -> Request:
        """Return what a store has to know of it."""
        sweep = self.sweep

        def identity() -> dict[str, Any]:
            own = provenance(sweep.model, sweep.spec, sweep._given, weights.whole, strict=True)
            return {**own, "attribution": self.provenance, "prompts at once": self._prompts_at_once or "all"}

        def order() -> list[str]:
            return [cell.name for cell in sweep.cells]

        device = facts_of(sweep.model).device
        return Request(len(sweep.cells), len(self.pieces), identity, order, device, "attribution")

    # -- pieces ------------------------------------------------------------------------------------

    def _cut(self) -> tuple[Piece, ...]:
        """All batches, cut into pieces of prompts that take no more than `max_memory` each.

        Raises BudgetError where a batch takes more and cannot be cut, or one prompt alone does.
        """
        found: list[Piece] = []
        refused: list[BudgetError] = []
        for number in range(self.sweep.batches):
            try:
                found += self._cut_batch(number)
            except BudgetError as error:
                refused.append(error)
        if refused:
            raise max(refused, key=lambda error: error.least)
        return tuple(found)

    def _cut_batch(self, number: int) -> list[Piece]:
        whole, budget = Piece(number), self.max_memory
        if budget is None or (together := self.peak_of(whole)) <= budget:
            return [whole]
        prompts = len(self.rows_in(whole))
        if reason := "it is one prompt" if prompts < 2 else self._obstacle(number):
            what = f"batch {number} cannot be cut into fewer prompts ({reason}), and it"
            raise no_room(together, budget, what)
        at_once = max(1, min(prompts - 1, prompts * budget // together))
        while (most := self.peak_of(Piece(number, range(at_once)))) > budget and at_once > 1:
            at_once = at_once * 3 // 4 or 1
        if most > budget:
            # Runs that are there already may take less than one prompt, whose run is computed anew.
            what = "one prompt alone" if most < together else f"batch {number}"
            raise no_room(min(most, together), budget, what)
        starts = range(0, prompts, at_once)
        return [Piece(number, range(first, min(first + at_once, prompts))) for first in starts]

    def part_of(self, piece: Piece, rows: range) -> Piece:
        """Return some prompts of a piece. Raises SweepError where it cannot be cut."""
        if reason := self._obstacle(piece.number):
            raise SweepError(f"batch {piece.number} cannot be cut into fewer prompts: {reason}.")
        return Piece(piece.number, rows)

    def rows_in(self, piece: Piece) -> range:
        """Return the prompts of a piece, by their numbers in its batch."""
        if piece.rows is not None:
            return piece.rows
        return range(facts_of(self.sweep.model).read.prompts(self.inputs(piece)))

    def inputs(self, piece: Piece) -> Mapping[str, Tensor]:
        """Return the inputs of a piece's base. What makes its runs when asked is asked for them."""
        model, (base, _) = self.sweep.model, self.sweep._batches.given(piece.number)
        if isinstance(base, Reading):
            inputs = base.inputs
        elif isinstance(base, Mapping):
            inputs = model.signature.bind((), base)
        else:
            inputs = self.sweep.batch(piece.number).base.inputs
        return inputs if piece.rows is None else rows_of(model, inputs, piece.rows)

    def _obstacle(self, number: int) -> str:
        """Return why a batch cannot be cut into fewer prompts; empty where it can."""
        model, whole = self.sweep.model, self.sweep.batch(number)
        if model.batch_is_fixed or not model.program.dimensions.batch:
            return "the model's batch is of one size"
        for name, run in (("base", whole.base), ("source", whole.source)):
            if run is not None and not isinstance(run, Run):
                return f"the {name} is a world with patches. Give the prompts one by one, as a list of bases"
        put = whole.intervention
        few = "Give a list of bases, of a few prompts each"
        if whole.source is None and put.described != ("zero",):
            return f"what {put.name} puts in may depend on all prompts. {few}"
        for metric in whole.metrics:
            if metric.whole or (metric.prompts is not None and metric.of_prompts is None):
                return f"the metric {metric.name!r} is a function of all prompts' outputs. {few}"
        return ""

    # -- costs -------------------------------------------------------------------------------------

    def full_counts(self, piece: Piece) -> tuple[int, int]:
        """Return the node evaluations and FLOPs of a full forward for each world of a piece."""
        model = self.sweep.model
        names = [record.name for record in model.program.records]
        each = sum(map(facts_of(model).shape(self.inputs(piece)).costs.flops, names))
        return len(self.sweep.cells) * len(names), len(self.sweep.cells) * each

    def peak_bytes(self) -> int:
        """Return the most that a piece holds at a time."""
        return max(map(self.peak_of, self.pieces))

    def peak_of(self, piece: Piece) -> int:
        """Return the most that a piece holds at a time beside the model and the runs that were given."""
        return self._rehearse(piece)[0]

    def counts_of(self, piece: Piece) -> Counts:
        """Return the passes of a piece, and what they compute."""
        return self._rehearse(piece)[1]

    def _rehearse(self, piece: Piece) -> tuple[int, Counts]:
        """Follow the passes of a piece over tensors without numbers, once for inputs of one shape."""
        sweep, model = self.sweep, self.sweep.model
        if piece in self._rehearsed:
            return self._rehearsed[piece]
        key = self._alike(piece)
        known: dict[Hashable, tuple[object, tuple[int, Counts]]] = vars(model).setdefault(_REHEARSED, {})
        if key in known and known[key][0] is sweep.cells:
            return known[key][1]
        batch = _untouched(model, piece.batch(sweep))

        def rehearsed(steps: int) -> tuple[int, Counts]:
            counts = Counts()

            def compute() -> None:
                nonlocal counts
                own, spec = _untouched(model, batch), piece.spec(sweep)
                with ExitStack() as trusting:
                    for run in own.runs:
                        trusting.enter_context(run.trusted())
                    one_pass = self.method.is_one_pass
                    work = Work(own, spec, self.cells.reads, Sums(()), is_one_pass=one_pass)
                    self.method.scores(work, self.cells, steps)
                counts = work.counts

            peak = peak_of(compute)
            return peak, counts

        # What is found out about the model, and kept with it, is found out before: it would count once only.
        steps = min(self.steps, ENOUGH)
        _, before = rehearsed(min(self.steps, ENOUGH - 1))
        peak, counts = rehearsed(steps)
        found = peak, counts.plus(counts, self.steps - steps).plus(before, steps - self.steps)
        self._rehearsed[piece] = found
        if key is not None:
            if len(known) >= KNOWN:
                known.clear()
            known[key] = sweep.cells, found
        return found

    def _alike(self, piece: Piece) -> Hashable | None:
        """All that the cost of a piece depends on, beside the cells; None where that is not known."""
        sweep, cells = self.sweep, self.cells
        base, source = sweep._batches.given(piece.number)
        runs = [one for one in (base, source) if isinstance(one, Mapping)]
        if len(runs) < 2 - (isinstance(source, str) and source == "zero"):
            return None
        spec, facts = piece.spec(sweep), facts_of(sweep.model)
        given = [sweep.model.signature.bind((), one) for one in runs]
        shapes = [tuple((name, tuple(value.shape)) for name, value in one.items()) for one in given]
        tails = [tail_of(facts, spec.metrics, one) for one in given]
        metrics = tuple(
            (one.described[0], one.pos, one.output) if one.described and not one.whole else one
            for one in spec.metrics
        )
        rows = None if piece.rows is None else len(piece.rows)
        taken = self.method.name, self.steps, rows, len(spec.tokens), metrics, *shapes, *tails
        is_known = len(cells.projections) if isinstance(cells, EdgeTable) else 0
        return id(sweep.cells), is_known, taken


def _untouched(model: Captured, batch: Batch) -> Batch:
    """The same batch with runs of which nothing is computed beyond what those that were given hold."""
    made: dict[Reading, Reading] = {}

    def same(run: Reading) -> Reading:
        if isinstance(run, InputRun):
            return InputRun(model, dict(run.inputs))
        if not isinstance(run, Run):
            run.demand(
                list(model.program.record_of)
            )  # a world with patches computes all that it will be asked
            return run
        world = run.world
        names = [*model.program.record_of, *run_sources(model.program, dict(run.inputs))]
        held = {name: world.demand(name) for name in names if not world.is_stale(name)}
        return Run(model, World.partial(model.graph, held), run._sizes, run.inputs)

    for run in batch.runs:
        if run not in made:
            made[run] = same(run)
    source = None if batch.source is None else made[batch.source]
    put = batch.intervention
    if source is not None and put.is_run:
        put = as_intervention(source, model)
    return replace(batch, base=made[batch.base], source=source, intervention=put)


def rows_of(model: Captured, inputs: Mapping[str, Tensor], rows: range) -> dict[str, Tensor]:
    """Some prompts of inputs."""
    batch, found = model.program.dimensions.batch, dict(inputs)
    for leaf in model.program.inputs:
        for dim, size in enumerate(leaf.shape):
            if str(size) in batch and leaf.name in found:
                found[leaf.name] = found[leaf.name].narrow(dim, rows.start, len(rows))
    return found
