"""The forward of worlds with removed edges that fits a model and its runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.anatomy.padding import shown_positions, shown_rows
from conewise.arguments import as_bytes
from conewise.circuits.masked_forward import Ablated, Forward, Mask, MaskedForward, Numbers, Stage, can_stack
from conewise.circuits.pruned_forward import PrunedForward
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import CircuitError, describe
from conewise.runs.captured import Captured
from conewise.runs.inputs import inputs_like, is_text
from conewise.runs.interventions import Intervention
from conewise.runs.metrics import Metric, as_metric, expect_prompts
from conewise.runs.reading import Reading
from conewise.runs.run import baseline
from conewise.sweeps.execution.kernels import kernels_of_passes
from conewise.sweeps.planning.planner import facts_of


@dataclass(frozen=True, slots=True, eq=False)
class WorldsPart:
    """Worlds to be evaluated.

    With a `stage`, they are the one that has `current`, [reader, writer], removed, but for edges [world,
    reader of the stage, writer], which are those and more; without one they have edges [world, reader,
    writer] removed.
    """

    removed: Mask
    current: Mask
    stage: int | None = None

    def __len__(self) -> int:
        return len(self.removed)

    def some(self, first: int, count: int) -> WorldsPart:
        """So many of its worlds, from `first` on."""
        return WorldsPart(self.removed[first : first + count], self.current, self.stage)


class FollowingForward:
    """Evaluates parts, one behind the other.

    Going on from a world that was in the part before costs nothing. One that was not is evaluated as one more
    world of the next part, and gone on from behind that. Where the worlds of a part differ in a single
    reader, which is computed in each of them anyway, it can wait until a part is about another stage.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._removed: Mask | None = None
        self._stage: Stage | None = None
        self._last: tuple[Stage, Mask] | None = None

    def values(self, part: WorldsPart) -> Numbers:
        """[world, prompt]: the metric of each world."""
        if part.stage is None:
            return self._forward.values(part.removed)
        stage = self._forward.stages[part.stage]
        if stage is not self._stage:  # from the base, as every search begins a stage
            self._go_to(part.current, self._forward.stages)
            self._stage = stage
        behind = self._behind(part.current)
        is_single = len(stage.readers) == 1
        if behind and (
            behind != [stage] or self._has(stage, part.current) or (not is_single and self._is_full(part))
        ):
            self._go_to(part.current, behind)
            behind = []
        if not behind or is_single:
            return self._below(stage, part.removed)
        found = self._below(stage, np.concatenate([part.current[None, stage.rows], part.removed]))
        self._go_to(part.current, behind)
        return found[1:]

    def _behind(self, current: Mask) -> list[Stage]:
        """The stages in which more is removed than in the world that was gone on from.

        All of them at first, and where something is not removed any more.
        """
        stages, known = self._forward.stages, self._removed
        if known is None or (known & ~current).any():
            return list(stages)
        return [stage for stage in stages if (known[stage.rows] != current[stage.rows]).any()]

    def _is_full(self, part: WorldsPart) -> bool:
        """True if one more world would not fit into memory."""
        assert part.stage is not None
        return len(part) >= self._forward.most(part.stage)

    def _below(self, stage: Stage, removed: Mask) -> Numbers:
        self._last = stage, removed
        return self._forward.below(stage.number, removed)

    def _has(self, stage: Stage, current: Mask) -> bool:
        """True if the world is one of those that were evaluated last."""
        if self._last is None or self._last[0] != stage:
            return False
        return bool((self._last[1] == current[stage.rows]).all((1, 2)).any())

    def _go_to(self, current: Mask, behind: Sequence[Stage]) -> None:
        """Let the world be the current one, which differs in some stages from the one before."""
        if len(behind) == 1:
            self._forward.adopt(behind[0].number, current[behind[0].rows])
        else:
            self._forward.begin(current)
        self._removed, self._last = current.copy(), None


class WorldsExecutor(Protocol):
    """Workers that evaluate worlds with removed edges beyond this process."""

    def forward(self, asked: Asked, own: Forward) -> AbstractContextManager[Forward]:
        """The forward by workers; `own` is this process's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about worlds with removed edges: runs, a metric, what removed edges carry."""

    model: Captured
    graph: EdgeGraph
    base: Reading
    source: Reading | None
    metric: Metric
    ablation: str
    max_memory: int | None

    @contextmanager
    def forward(self, pool: WorldsExecutor | None = None) -> Iterator[Forward]:
        """The forward, by workers where there are some; weights and runs are checked before and after."""
        facts = edge_facts(self.model)
        with ExitStack() as checked:
            checked.enter_context(kernels_of_passes(facts_of(self.model).device, None))
            for run in dict.fromkeys(one for one in (self.base, self.source) if one is not None):
                checked.enter_context(run.checked_once())
                facts.parts.check(run)
            ablated = Ablated(facts, self.ablation, self.base, self.source)
            is_fast = facts.parts.is_carried_unchanged and can_stack(self.base)
            kind = PrunedForward if is_fast else MaskedForward
            own = kind(facts, self.base, ablated, self.metric, self.max_memory)
            yield own if pool is None else checked.enter_context(pool.forward(self, own))

    @property
    def carried(self) -> Any:
        """What removed edges carry, as `asked` takes it."""
        if self.ablation == "resample":
            return self.source
        return self.ablation if self.source is None else (self.ablation, self.source)

    @property
    def there(self) -> Mask:
        """The writers that each reader reads, [reader, writer]."""
        counts = np.array([one.writers for one in self.graph.readers])
        found: Mask = np.arange(len(self.graph.writers)) < counts[:, None]
        return found

    def removed_without(self, edges: Iterable[str]) -> Mask:
        """Return what is removed where only these edges are kept. Raise CircuitError for what is no edge."""
        kept = np.zeros_like(self.there)
        numbers = self.graph.numbers(edges)
        kept[self.graph.edge_readers[numbers], self.graph.edge_writers[numbers]] = True
        found: Mask = self.there & ~kept
        return found


def graph_of(model: Captured) -> EdgeGraph:
    """The graph of a model's components. Raises EdgeError where it has none, CircuitError for no model."""
    if not isinstance(model, Captured):
        raise CircuitError(
            f"circuits are found in a captured model, and {describe(model)} is none: `cw.capture(module, "
            "...)` makes one."
        )
    components = edge_facts(model).components
    shape = model.program.shapes[components.readers[-1].entry]
    return EdgeGraph.of(components, width=None if shape is None else int(shape[-1]))


def asked(
    model: Captured,
    *,
    base: Any,
    source: Any,
    metric: Any,
    max_memory: int | str | None = None,
) -> Asked:
    """Look at all that was given before anything is computed. Raises CircuitError, EdgeError, MetricError.

    `source` is what removed edges carry: what they do in a run (or inputs, or texts), "zero", "mean" (over
    the base's prompts and positions), or `cw.mean(...)` over one batch.
    """
    model._capture_for(base)
    graph = graph_of(model)
    if isinstance(metric, list | tuple):
        raise CircuitError("a circuit is found and evaluated by one metric; give one, not a list.")
    one = as_metric(metric, model)
    ablation, source = _carried(source)
    base, source = _run(model, base, "base"), _run(model, source, "source")
    if base is None:
        raise CircuitError("there is no `base`: give the run whose behaviour is to be kept.")
    if base.edits:
        raise CircuitError(
            f"something is patched in the base ({base.edits[0].place}); edges are removed from a plain run. "
            "Give `model.run(...)`."
        )
    if source is not None and ablation == "resample":
        _expect_alike(base, source, edge_facts(model).components.readers[-1].entry)
    expect_prompts(one, facts_of(model).read.prompts(base.inputs), "base")
    return Asked(model, graph, base, source, one, ablation, as_bytes(max_memory))


def _carried(source: Any) -> tuple[str, Any]:
    """Return what removed edges carry, as `Ablated` calls it, and the run that it is taken from."""
    match source:
        case "zero" | "mean":
            return source, None
        case ("mean", batch):  # as workers are told of it
            return "mean", batch
        case Intervention(described=("mean", False, [batch], _)):
            return "mean", batch
        case Intervention():
            raise CircuitError(
                f"removed edges carry what they do in a run, 'zero', 'mean' or `cw.mean(model, [batch])`, "
                f"and {source.name} is none of these."
            )
    return "resample", source


def _run(model: Captured, given: Any, name: str) -> Reading | None:
    if isinstance(given, Mapping) or is_text(given):
        given = baseline(model, (), inputs_like(model, given))
    if given is not None and not isinstance(given, Reading):
        raise CircuitError(
            f"`{name}` is a run, or the inputs of one, or texts, and {describe(given)} is none of them. "
            "Several prompts are one batch: `model.run(input_ids=...)` with a row for each."
        )
    if given is not None:
        model.expect_own(f"{name} is a run", given.model)
    return given


def _expect_alike(base: Reading, source: Reading, entry: str) -> None:
    for name, value in base.inputs.items():
        other = source.inputs.get(name)
        if other is not None and other.shape != value.shape:
            raise CircuitError(
                f"base and source differ in shape: {name!r} is {tuple(value.shape)} in the base and "
                f"{tuple(other.shape)} in the source. Pad or cut the prompts to one length, so that a "
                "position means the same in both."
            )
    program = base.model.program
    given = shown_positions(program, source.inputs, entry)
    if given is not None and bool((shown_rows(program, base.inputs, entry) & ~given).any()):
        raise CircuitError(
            "the source has padding where the base has tokens, and removed edges carry what the source has "
            "there. Pad both to the same lengths, on the same side, or ablate with zeros or means."
        )
