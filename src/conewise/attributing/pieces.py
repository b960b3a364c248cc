"""Pieces of an attribution: prompts that are computed at a time, as many as fit the memory budget."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from conewise.attributing.costs import Counts, counts_of
from conewise.attributing.edge_table import EdgeTable
from conewise.attributing.methods import Cells, Method
from conewise.attributing.work import Work
from conewise.errors import BudgetError, SweepError
from conewise.program.build import run_sources
from conewise.program.rehearsal import peak_of
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.reactive.world import World
from conewise.runs.captured import Captured
from conewise.runs.input_run import InputRun
from conewise.runs.interventions.interventions import as_intervention
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.runs.run import Run
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.execution.ledger import SweepLedger
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.planner import tail_of
from conewise.sweeps.planning.schedule import no_room
from conewise.sweeps.planning.spec import SweepSpec
from conewise.sweeps.sweep import Sweep


@dataclass(frozen=True, slots=True)
class Piece:
    """Some prompts of one batch, `rows` of it; all of them where it is None."""

    number: int
    rows: range | None
    counts: Counts

    def spec(self, sweep: Sweep) -> SweepSpec:
        """What is asked of these prompts."""
        return replace(sweep.spec, metrics=self._metrics(sweep))

    def _metrics(self, sweep: Sweep) -> tuple[Metric, ...]:
        found, rows = sweep._batches.metrics(self.number), self.rows
        if rows is None:
            return found
        return tuple(
            one if one.prompts is None or one.of_prompts is None else one.of_prompts(rows) for one in found
        )

    def batch(self, sweep: Sweep) -> Batch:
        """The base with these prompts alone, and what is put into it."""
        whole = sweep.batch(self.number)
        if self.rows is None:
            return whole
        model, (_, given) = sweep.model, sweep._batches.given(self.number)
        base = InputRun(model, rows_of(model, whole.base.inputs, self.rows))
        if whole.source is None:
            return Batch(base, None, as_intervention(given, model), metrics=self._metrics(sweep))
        source = InputRun(model, rows_of(model, whole.source.inputs, self.rows))
        return Batch(base, source, as_intervention(source, model), metrics=self._metrics(sweep))


def pieces_of(
    sweep: Sweep, method: Method, cells: Cells, steps: int, max_memory: int | None
) -> tuple[Piece, ...]:
    """All batches, cut into pieces of prompts that take no more than `max_memory` each.

    Raises BudgetError where a batch takes more and cannot be cut, or one prompt alone does.
    """
    found: list[Piece] = []
    refused: list[BudgetError] = []
    for number in range(sweep.batches):
        inputs = _inputs(sweep, number)
        spec = replace(sweep.spec, metrics=sweep._batches.metrics(number))

        def piece(
            rows: range | None,
            number: int = number,
            inputs: Mapping[str, Tensor] = inputs,
            spec: SweepSpec = spec,
        ) -> Piece:
            own = inputs if rows is None else rows_of(sweep.model, inputs, rows)
            return Piece(number, rows, counts_of(method, cells, spec, own, steps))

        def peak(one: Piece) -> int:
            return peak_bytes(sweep, method, cells, steps, one)

        whole = piece(None)
        if max_memory is None or (together := peak(whole)) <= max_memory:
            found.append(whole)
            continue
        prompts = facts_of(sweep.model).read.prompts(inputs)
        reason = "it is one prompt" if prompts < 2 else _obstacle(sweep, number)
        if reason:
            what = f"batch {number} cannot be cut into fewer prompts ({reason}), and it"
            refused.append(no_room(together, max_memory, what))
            continue
        at_once = max(1, min(prompts - 1, prompts * max_memory // together))
        while (most := peak(piece(range(at_once)))) > max_memory and at_once > 1:
            at_once = at_once * 3 // 4 or 1
        if most > max_memory:
            # Runs that are there already may take less than one prompt, whose run is computed anew.
            what = "one prompt alone" if most < together else f"batch {number}"
            refused.append(no_room(min(most, together), max_memory, what))
            continue
        starts = range(0, prompts, at_once)
        found += [piece(range(first, min(first + at_once, prompts))) for first in starts]
    if refused:
        raise max(refused, key=lambda error: error.least)
    return tuple(found)


# -- memory ------------------------------------------------------------------------------------

ENOUGH = 3
"""Steps along a line that a rehearsal takes: the later ones hold what the third does."""
_PEAKS = "_attribution_peaks"
KNOWN = 64
"""How many peaks are kept with a model."""


def peak_bytes(sweep: Sweep, method: Method, cells: Cells, steps: int, piece: Piece) -> int:
    """Return the most that a piece holds at a time beside the model and the runs that were given.

    Its passes are rehearsed, once for inputs of one shape.
    """
    model, key = sweep.model, _alike(sweep, method, cells, steps, piece)
    known: dict[Hashable, tuple[object, int]] = vars(model).setdefault(_PEAKS, {})
    if key in known and known[key][0] is sweep.cells:
        return known[key][1]
    batch = _untouched(model, piece.batch(sweep))

    def compute() -> None:
        own, spec = _untouched(model, batch), piece.spec(sweep)
        with ExitStack() as trusting:
            for run in (own.base, own.source):
                if run is not None:
                    trusting.enter_context(run.trusted())
            work = Work(own, spec, SweepLedger(), cells.reads, Sums(()), is_one_pass=method.is_one_pass)
            method.scores(work, cells, min(steps, ENOUGH))

    # What is found out about the model, and kept with it, is found out before: it would count once only.
    peak_of(compute)
    found = peak_of(compute)
    if key is not None:
        if len(known) >= KNOWN:
            known.clear()
        known[key] = sweep.cells, found
    return found


def _alike(sweep: Sweep, method: Method, cells: Cells, steps: int, piece: Piece) -> Hashable | None:
    """All that the memory of a piece depends on, beside the cells; None where that is not known."""
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
    taken = method.name, min(steps, ENOUGH), rows, len(spec.tokens), metrics, *shapes, *tails
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

    for run in (batch.base, batch.source):
        if run is not None and run not in made:
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


def _inputs(sweep: Sweep, number: int) -> Mapping[str, Tensor]:
    """The inputs of a batch's base. What makes its runs when asked is asked for them."""
    base, _ = sweep._batches.given(number)
    if isinstance(base, Reading):
        return base.inputs
    if isinstance(base, Mapping):
        return sweep.model.signature.bind((), base)
    return sweep.batch(number).base.inputs


def _obstacle(sweep: Sweep, number: int) -> str:
    """Why a batch cannot be cut into fewer prompts; empty where it can."""
    model, whole = sweep.model, sweep.batch(number)
    if model.batch_is_fixed or not model.program.dimensions.batch:
        return "the model's batch is of one size"
    for name, run in (("base", whole.base), ("source", whole.source)):
        if run is not None and not isinstance(run, Run):
            return f"the {name} is a world with patches. Give the prompts one by one, as a list of bases"
    put = whole.intervention
    if whole.source is None and put.described != ("zero",):
        return (
            f"what {put.name} puts in may depend on all prompts. Give a list of bases, of a few prompts each"
        )
    for metric in whole.metrics:
        if metric.whole or (metric.prompts is not None and metric.of_prompts is None):
            return (
                f"the metric {metric.name!r} is a function of all prompts' outputs. Give a list of bases, of "
                "a few prompts each"
            )
    return ""


def full_counts(sweep: Sweep, piece: Piece) -> tuple[int, int]:
    """The node evaluations and FLOPs of a full forward for each world of a piece."""
    model, inputs = sweep.model, _inputs(sweep, piece.number)
    if piece.rows is not None:
        inputs = rows_of(model, inputs, piece.rows)
    names = [record.name for record in model.program.records]
    each = sum(map(facts_of(model).shape(inputs).costs.flops, names))
    return len(sweep.cells) * len(names), len(sweep.cells) * each


def part_of(sweep: Sweep, method: Method, cells: Cells, steps: int, piece: Piece, rows: range) -> Piece:
    """Some prompts of a piece. Raises SweepError where it cannot be cut."""
    reason = _obstacle(sweep, piece.number)
    if reason:
        raise SweepError(f"batch {piece.number} cannot be cut into fewer prompts: {reason}.")
    inputs = _inputs(sweep, piece.number)
    spec = replace(sweep.spec, metrics=sweep._batches.metrics(piece.number))
    own = rows_of(sweep.model, inputs, rows)
    return Piece(piece.number, rows, counts_of(method, cells, spec, own, steps))


def rows_in(sweep: Sweep, piece: Piece) -> range:
    """The prompts of a piece, by their numbers in its batch."""
    if piece.rows is not None:
        return piece.rows
    return range(facts_of(sweep.model).read.prompts(_inputs(sweep, piece.number)))


def prompts_at_once(pieces: Sequence[Piece]) -> int | None:
    """The most prompts of a piece that is a part of a batch; None where batches are whole."""
    return max((len(one.rows) for one in pieces if one.rows is not None), default=None)
