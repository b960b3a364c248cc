"""What a circuit is asked about: runs, a metric, what removed edges carry; and the forward that fits them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.anatomy.padding import shown_positions, shown_rows
from conewise.arguments import as_bytes
from conewise.circuits.masked_forward import (
    Ablated,
    Forward,
    MaskedForward,
    Numbers,
    can_stack,
)
from conewise.circuits.pruned_forward import PrunedForward
from conewise.circuits.replaced_parts import Mask, edge_facts
from conewise.errors import Argument, CircuitError, describe
from conewise.program.rehearsal import as_numpy
from conewise.program.tensors import Tensor, brought
from conewise.runs.captured import Captured
from conewise.runs.inputs import inputs_like, is_text
from conewise.runs.interventions import Intervention
from conewise.runs.metric_words import as_metric
from conewise.runs.metrics import Metric, expect_prompts
from conewise.runs.reading import Reading
from conewise.runs.run import baseline
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.execution.wavefront import kernels_of_passes
from conewise.sweeps.planning.planner import facts_of
from conewise.text.prompts import TokenizedPrompts, as_pairs, tokenize
from conewise.threads import Turn


class WorldsExecutor(Protocol):
    """Workers that evaluate worlds with removed edges beyond this process."""

    def forward(self, question: CircuitQuestion, own: Forward) -> AbstractContextManager[Forward]:
        """The forward by workers; `own` is this process's."""


class GroupedForward:
    """The forward over prompts of several lengths: one for each group, which sees the same edges removed."""

    def __init__(self, forwards: Sequence[Forward], order: Sequence[int] | None) -> None:
        self._forwards, self._order = list(forwards), order
        self.stages, self.moved, self.shape = forwards[0].stages, forwards[0].moved, forwards[0].shape
        self.epsilon = max(one.epsilon for one in forwards)

    @property
    def node_evaluations(self) -> int:
        """The values computed so far, in all groups."""
        return sum(one.node_evaluations for one in self._forwards)

    @node_evaluations.setter
    def node_evaluations(self, count: int) -> None:
        self._forwards[0].node_evaluations += count - self.node_evaluations

    def most(self, stage: int, removed: Mask | None = None) -> int:
        """The number of worlds that fit into memory at once, whatever the group."""
        return min(one.most(stage, removed) for one in self._forwards)

    def search_bytes(self, *, speculative: bool = True) -> tuple[int, int]:
        """Return the bytes held for all worlds of a search, and the most that a step takes beside them."""
        each = [one.search_bytes(speculative=speculative) for one in self._forwards]
        return sum(held for held, _ in each), max(step for _, step in each)

    @property
    def few(self) -> int:
        """The number of worlds that take hardly longer than one."""
        return min(one.few for one in self._forwards)

    def values(self, removed: Mask) -> Numbers:
        """[world, prompt] of worlds with edges [world, reader, writer] removed."""
        return self._together(lambda one: one.values(removed))

    def begin(self, removed: Mask) -> Numbers:
        """Let a world be the current one; its metric as [prompt]."""
        return self._together(lambda one: one.begin(removed))

    def below(self, stage: int, removed: Mask) -> Numbers:
        """[world, prompt] of worlds that are the current one but for edges into one stage."""
        return self._together(lambda one: one.below(stage, removed))

    def adopt(self, stage: int, removed: Mask) -> None:
        """Let the world with these edges removed be the current one."""
        for one in self._forwards:
            one.adopt(stage, removed)

    def _together(self, values: Callable[[Forward], Numbers]) -> Numbers:
        found = np.concatenate([values(one) for one in self._forwards], -1)
        return found if self._order is None else found[..., self._order]


@dataclass(frozen=True, slots=True)
class CircuitQuestion:
    """A question about worlds with removed edges: runs, a metric, what removed edges carry.

    `numbers` are those of its prompts where there are prompts of several lengths, and `more` has the question
    of each other length. A mean is taken `over` the runs of all of them; `templates` and `constants` are what
    `Ablated` reads.
    """

    model: Captured
    graph: EdgeGraph
    base: Reading
    source: Reading | None
    metric: Metric
    ablation: str
    max_memory: int | None
    numbers: tuple[int, ...] = ()
    over: tuple[Reading, ...] = ()
    templates: tuple[str, ...] = ()
    constants: Tensor | None = None
    more: tuple[CircuitQuestion, ...] = ()

    @property
    def _turn(self) -> Turn:
        return self.model._turn

    @property
    def groups(self) -> tuple[CircuitQuestion, ...]:
        """The question of each group of prompts, this one first."""
        return self, *self.more

    @property
    def order(self) -> list[int] | None:
        """The place of each prompt among those of all groups; None where they stand in order."""
        numbers = [number for one in self.groups for number in one.numbers]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        return None if order == list(range(len(order))) else order

    @property
    def described_ablation(self) -> str:
        """A text of what removed edges carry: equal texts mean the same."""
        if self.constants is None:
            return " ".join([self.ablation, *(self.templates if self.ablation == "mean-template" else ())])
        held = self.constants.detach().cpu().numpy().tobytes()
        return f"{self.ablation} {hashlib.sha256(held).hexdigest()}"

    @contextmanager
    def forward(self, pool: WorldsExecutor | None = None) -> Iterator[Forward]:
        """The forward over all groups, by workers where there are some."""
        if pool is not None and (self.more or self.ablation in {"mean-template", "optimal"}):
            raise CircuitError(
                "prompts of several lengths and means by template are evaluated in this process: leave out ",
                Argument("workers"),
                ".",
            )
        if not self.more:
            with self._forward(pool) as own:
                yield own
            return
        with ExitStack() as all_of_them:
            groups = (replace(one, max_memory=self.max_memory) for one in self.groups)
            yield GroupedForward(
                [all_of_them.enter_context(one._forward(None)) for one in groups], self.order
            )

    @contextmanager
    def _forward(
        self, pool: WorldsExecutor | None, kind: type[MaskedForward | PrunedForward] | None = None
    ) -> Iterator[Forward]:
        """The forward of this group; weights and runs are checked before and after."""
        facts = edge_facts(self.model)
        with ExitStack() as checked:
            checked.enter_context(kernels_of_passes(facts_of(self.model).device, None))
            runs = (self.base, self.source, *self.over)
            for run in dict.fromkeys(one for one in runs if one is not None):
                checked.enter_context(run.checked_once())
            for run in self.over:
                if run is not self.base:
                    facts.parts.check(run)
            ablated = Ablated(
                facts,
                self.ablation,
                self.base,
                self.source,
                over=self.over,
                templates=self.templates,
                constants=self.constants,
            )
            ablated.check()
            # A metric of sites is read off all nodes; the fast way knows what leads to the logits.
            is_fast = facts.parts.is_carried_unchanged and can_stack(self.base) and not self.metric.reads
            chosen = kind or (PrunedForward if is_fast else MaskedForward)
            own = chosen(facts, self.base, ablated, self.metric, self.max_memory)
            yield own if pool is None else checked.enter_context(pool.forward(self, own))

    @property
    def ends_in_source(self) -> bool:
        """True if a model without any edge computes what it does in the source: tokens alone differ."""
        if self.source is None or self.ablation != "resample":
            return False
        return len(self.base.inputs) == len(self.source.inputs) == 1

    def of_neurons(self, circuits: Sequence[tuple[Mask, NDArray[np.bool_]]]) -> Numbers:
        """[circuit, prompt]: the metric where edges are removed, and features [writer, d_model] are kept.

        What a writer writes into its other features is its ablated part, for every reader.
        """
        found = []
        for one in self.groups:
            with one._forward(None, MaskedForward) as forward:
                assert isinstance(forward, MaskedForward)
                rows = []
                for removed, kept in circuits:
                    forward.neurons = brought(torch.from_numpy(kept), facts_of(self.model).device)
                    rows.append(forward.values(removed[None])[0])
                found.append(np.stack(rows))
        values: Numbers = np.concatenate(found, -1)
        return values if self.order is None else values[:, self.order]

    def of_runs(self, runs: Sequence[Reading | None]) -> Numbers:
        """[prompt]: the metric of a run of each group."""
        found = []
        for one, run in zip(self.groups, runs, strict=True):
            assert run is not None
            found.append(MetricReader(facts_of(self.model), (one.metric,)).of_run(run)[0])
        values: Numbers = np.concatenate([as_numpy(row) for row in found])
        return values if self.order is None else values[self.order]

    @property
    def carried(self) -> Any:
        """The values that removed edges carry, as `circuit_question` takes them."""
        if self.ablation == "resample":
            return self.source
        return self.ablation if self.source is None else (self.ablation, self.source)


def circuit_question(
    model: Captured,
    *,
    base: Any = None,
    source: Any = None,
    metric: Any = None,
    prompts: Any = None,
    max_memory: int | str | None = None,
) -> CircuitQuestion:
    """Look at all that was given before anything is computed. Raises CircuitError, EdgeError, MetricError.

    `source` is what removed edges carry: what they do in a run (or inputs, or texts), "zero", "mean" (over
    the base's prompts and positions), "mean-positional" or "mean-template" (over the base's prompts, at each
    position), or `cw.mean(...)` over one batch, or an optimal ablation. `prompts`, in the place of `base`,
    are pairs of any lengths: the clean ones are the base, and the corrupted ones the source unless another
    is given. Their metric is "logit_diff" by default, or "prob" or "kl".
    """
    if prompts is not None:
        return _of_prompts(model, prompts, base=base, source=source, metric=metric, max_memory=max_memory)
    model._capture_for(base)
    graph = edge_facts(model).graph
    if isinstance(metric, list | tuple):
        raise CircuitError("a circuit is found and evaluated by one metric; give one, not a list.")
    if metric is None:
        raise CircuitError("there is no `metric`: give one, for one `cw.logit_diff(...)`.")
    one = as_metric(metric, model)
    constants = source.constants_of(model) if isinstance(source, OptimalAblation) else None
    ablation, source = ("optimal", None) if constants is not None else _carried(source)
    base, source = _run(model, base, "base"), _run(model, source, "source")
    if base is None:
        raise CircuitError("there is no `base`: give the run whose behaviour is to be kept, or `prompts`.")
    if base.edits:
        raise CircuitError(
            f"something is patched in the base ({base.edits[0].place}); edges are removed from a plain run. "
            "Give `model.run(...)`."
        )
    if source is not None and ablation == "resample":
        _expect_alike(base, source, edge_facts(model).components.readers[-1].entry)
    expect_prompts(one, facts_of(model).read.prompts(base.inputs), "base")
    return CircuitQuestion(
        model, graph, base, source, one, ablation, as_bytes(max_memory), constants=constants
    )


@dataclass(frozen=True, eq=False, repr=False)
class OptimalAblation:
    """A constant for each writer, learned so that a circuit is as near to its model as it can be.

    `values` are [writer, d_model] in the order of `writers`, `losses` the distance at each step of the
    training. As the `source` of evaluations and searches it is what removed edges carry.
    """

    of: str
    writers: tuple[str, ...]
    values: Tensor
    losses: tuple[float, ...]

    def __repr__(self) -> str:
        return (
            f"OptimalAblation of {len(self.writers)} writers of {self.of}: distance {self.losses[0]:.4g} "
            f"with means, {self.losses[-1]:.4g} after {len(self.losses)} steps"
        )

    def constants_of(self, model: Captured) -> Tensor:
        """[writer, d_model] for a model. Raises CircuitError where it has other writers."""
        graph = edge_facts(model).graph
        if self.writers != tuple(one.name for one in graph.writers) or graph.width not in (
            None,
            self.values.shape[1],
        ):
            raise CircuitError(
                f"these constants are of {len(self.writers)} writers of {self.of}, of {self.values.shape[1]} "
                f"features, and {model.name} has {graph}. Learn its own: `circuit.optimal_ablation(prompts)`."
            )
        return self.values.to(facts_of(model).device)


def read_prompts(model: Captured, prompts: Any) -> TokenizedPrompts:
    """The prompts in the tokens of a model, which is captured by them if it was not before."""
    if isinstance(prompts, TokenizedPrompts):
        return prompts
    read = tokenize(as_pairs(prompts), model.tokenizer)
    model._capture_for([read.pairs[number].clean for number in read.groups[0][:2]])
    return read


def _of_prompts(
    model: Captured, prompts: Any, *, base: Any, source: Any, metric: Any, max_memory: int | str | None
) -> CircuitQuestion:
    """The same for pairs of prompts: a question for each length."""
    if base is not None:
        raise CircuitError("the clean prompts are the base: give `prompts`, or `base` and `source`.")
    read, wanted = read_prompts(model, prompts), "logit_diff" if metric is None else metric
    device = facts_of(model).input_device
    groups = []
    for group, numbers in enumerate(read.groups):
        clean = baseline(model, (), read.inputs_of(group, "clean", device))
        put = read.inputs_of(group, "corrupted", device) if source is None else source
        if isinstance(wanted, str):
            own = read.metric(group, wanted, clean)
        else:
            own = as_metric(wanted, model)
            own = own if own.prompts is None or own.of_prompts is None else own.of_prompts(numbers)
        one = circuit_question(model, base=clean, source=put, metric=own, max_memory=max_memory)
        groups.append(
            replace(one, numbers=numbers, templates=tuple(read.pairs[number].template for number in numbers))
        )
    over = tuple(one.base for one in groups) if source == "mean" else ()
    return replace(groups[0], over=over, more=tuple(replace(one, over=over) for one in groups[1:]))


def _carried(source: Any) -> tuple[str, Any]:
    """Return what removed edges carry, as `Ablated` calls it, and the run that it is taken from."""
    match source:
        # An array cannot be compared with a text.
        case str() if source in {"zero", "mean", "mean-positional", "mean-template"}:
            return source, None
        case (str("mean"), batch):  # as workers are told of it
            return "mean", batch
        case Intervention(described=("mean", False, [batch], _)):
            return "mean", batch
        case Intervention():
            raise CircuitError(
                f"removed edges carry what they do in a run, 'zero', 'mean', 'mean-positional', "
                f"'mean-template' or `cw.mean(model, [batch])`, and {source.name} is none of these."
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
