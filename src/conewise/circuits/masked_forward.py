"""Worlds with removed edges: each reader that lost edges sees the stream of its world, corrected.

A reader sees the current parts of the writers whose edges to it are kept, and the ablated ones of those whose
are removed. Current parts move with the world, so this is no patch with a fixed value: it is a graft, one
correction in front of each reader that lost edges. Here it is computed node by node, for a stack of worlds,
of any model whose stream has parts. `PrunedForward` computes the same faster where parts are carried
unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conewise.anatomy.axes import View
from conewise.anatomy.components import Reader
from conewise.anatomy.padding import shown_entries
from conewise.anatomy.places import Place
from conewise.circuits.replaced_parts import (
    EdgeFacts,
    Mask,
    mixed,
    mixed_by_world,
    numbers_of,
    wide,
    with_residue,
)
from conewise.circuits.walks import StackedValues
from conewise.errors import NAN_OF_PADDING, Argument, CircuitError
from conewise.program.rehearsal import as_numpy, bytes_of, peak_of
from conewise.program.tensors import computing, mean_of
from conewise.program.walk import Read, Rule, WalkStep, plan_walk, support
from conewise.runs.interventions import PARTS
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.runs.values import reader
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.planning.compiler import DEFAULT_MEMORY
from conewise.sweeps.planning.layout import compile_stacked_rule
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.schedule import no_room


@dataclass(frozen=True, slots=True)
class Stage:
    """The attention of a layer, its MLP, or the logits. None of its readers reads what another one leads to.

    `first` is the number of its first reader; `kind` is "attention", "mlp" or "logits".
    """

    number: int
    kind: str
    first: int
    readers: tuple[Reader, ...]

    @property
    def rows(self) -> slice:
        """The numbers of its readers."""
        return slice(self.first, self.first + len(self.readers))

    @property
    def name(self) -> str:
        """The stage in words."""
        if self.kind == "logits":
            return "the logits"
        what = "attention" if self.kind == "attention" else "the MLP"
        return f"{what} of layer {self.readers[0].layer}"


def stages_of(readers: Sequence[Reader]) -> tuple[Stage, ...]:
    """The stages of all readers, which stand in the order of computation."""
    groups: list[tuple[tuple[str, int | None], list[Reader]]] = []
    for one in readers:
        kind = "attention" if one.slot in ("q", "k", "v") else one.slot
        if not groups or groups[-1][0] != (kind, one.layer):
            groups.append(((kind, one.layer), []))
        groups[-1][1].append(one)
    found: list[Stage] = []
    first = 0
    for (kind, _), group in groups:
        found.append(Stage(len(found), kind, first, tuple(group)))
        first += len(group)
    return tuple(found)


def layers_of(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Return the stages from the last to the first, in lists that end with an attention."""
    found: list[list[Stage]] = [[]]
    for stage in reversed(stages):
        found[-1].append(stage)
        if stage.kind == "attention":
            found.append([])
    return found


ABLATIONS = ("resample", "zero", "mean", "mean-positional", "mean-template", "optimal")
WITHIN = ("mean-positional", "mean-template")
"""Means of each position, over the prompts of one length, or over those of one template among them."""


class Ablated:
    """The parts that removed edges carry, wherever the stream is read.

    `resample`: the parts of `source`, a run of the same shape as `base`. `zero`: nothing. `mean`: each
    writer's mean over the prompts and positions of `source`, or of `base` where there is none; over those of
    all runs of `over` where some are given. `mean-positional`: the mean at each position; `mean-template`:
    the same over the prompts of the same template, of which there is one for each in `templates`. Means are
    taken without padding. `optimal`: `constants`, [writer, d_model].
    """

    def __init__(
        self,
        facts: EdgeFacts,
        ablation: str,
        base: Reading,
        source: Reading | None,
        *,
        over: Sequence[Reading] = (),
        templates: Sequence[str] = (),
        constants: Tensor | None = None,
    ) -> None:
        if ablation not in ABLATIONS:
            raise CircuitError(f"{ablation!r} is none of {', '.join(map(repr, ABLATIONS))}.")
        if ablation == "resample" and source is None:
            raise CircuitError(
                "an edge that is removed carries what the source has there, and there is no `source`. Give a "
                "run on other prompts, or ",
                Argument("source", "zero"),
                " or ",
                Argument("source", "mean"),
                ".",
            )
        self.ablation = ablation
        self._parts, self._entry = facts.parts, facts.components.readers[-1].entry
        self._run = base if source is None else source
        self._over = tuple(over) or (self._run,)
        self._templates, self._constants = tuple(templates), constants
        self.read = reader(base)
        """Reads values of the base, each once."""
        self._read = self.read if self._run is base else reader(self._run)
        self._known: dict[str, Tensor] = {}

    @property
    def is_shared(self) -> bool:
        """True if removed edges carry the same for all prompts and positions."""
        return self.ablation in ("zero", "mean", "optimal")

    def check(self) -> None:
        """Compare the parts of base and source with their streams; see `StreamParts.check`."""
        for read in dict.fromkeys((self.read, self._read)):
            self._parts.check(read)

    def at(self, entry: str) -> Tensor:
        """[writer, batch, pos, d_model]: what removed edges carry at a value of the stream."""
        if self._parts.is_carried_unchanged:
            count = self._parts.components.entries[entry][0].writers
            return self.whole[:count]
        if entry not in self._known:
            self._known[entry] = self._made(lambda read: self._parts.parts(read, entry))
        return self._known[entry]

    @property
    def whole(self) -> Tensor:
        """The parts of all writers, where they do not depend on where the stream is read."""
        if "" not in self._known:
            self._known[""] = self._made(self._parts.parts)
        return self._known[""]

    def stream(self, entry: str, constant: Tensor) -> Tensor:
        """[batch, pos, d_model]: what a reader sees that lost every edge: parts carried unchanged.

        `constant` is what no writer wrote; the source's own stream has it already.
        """
        if self.ablation == "resample":
            return self._parts.stream(self._read, entry)
        return self.at(entry).sum(0, dtype=wide(constant.dtype)) + constant

    def _made(self, parts: Callable[[Callable[[str], Tensor]], Tensor]) -> Tensor:
        with computing():
            if self.ablation == "zero":
                return torch.zeros_like(parts(self.read))
            if self._constants is not None:
                own = parts(self.read)
                return self._constants[: len(own), None, None].to(own).expand_as(own)
            if self.ablation == "mean":
                return self._mean(parts).expand_as(parts(self.read))
            found = self._sound(parts(self._read))
            if self.ablation == "resample":
                return found
            if self._shown(self._run, found) is not None:
                raise CircuitError(
                    f"the ablation {self.ablation!r} takes means position by position, and these prompts are "
                    "padded. Give prompts as rows, which are grouped by length, or ablate with 'mean'."
                )
            return self._within(found)

    def _mean(self, parts: Callable[[Callable[[str], Tensor]], Tensor]) -> Tensor:
        """[writer, 1, 1, d_model]: the mean over prompts and positions of all runs."""
        means, counts = [], []
        for run in self._over:
            found = self._sound(parts(reader(run)))
            shown = self._shown(run, found)
            means.append(mean_of(found, PARTS, shown)[:, :1, :1])
            counts.append(
                found[0, ..., 0].numel() if shown is None else int(shown.expand_as(found)[0, ..., 0].sum())
            )
        if len(means) == 1:
            return means[0]
        whole = sum(mean.double() * count for mean, count in zip(means, counts, strict=True))
        assert isinstance(whole, torch.Tensor)
        return (whole / sum(counts)).to(means[0].dtype)

    def _within(self, found: Tensor) -> Tensor:
        """[writer, batch, pos, d_model]: means of each position over prompts."""
        if self.ablation == "mean-positional":
            return found.mean(1, keepdim=True).expand_as(found)
        out = torch.empty_like(found)
        for template in dict.fromkeys(self._templates):
            rows = [number for number, one in enumerate(self._templates) if one == template]
            out[:, rows] = found[:, rows].mean(1, keepdim=True)
        return out

    def _shown(self, run: Reading, found: Tensor) -> Tensor | None:
        return shown_entries(run.model.program, run.inputs, PARTS, found.shape, self._entry)

    def _sound(self, found: Tensor) -> Tensor:
        if torch.isnan(found).any():
            raise CircuitError(
                f"the source has NaN in what its components write; nothing can be removed. {NAN_OF_PADDING}"
            )
        return found


def moved_by(facts: EdgeFacts) -> tuple[tuple[int, ...], ...]:
    """For each reader, the numbers of the writers whose parts are others where it sees another stream.

    These are the head or the MLP that it is a part of. Where a norm lies behind the output projection, its
    scale is that of all heads, and all heads of the layer move together; where sums are normed, so does all
    that follows.
    """
    graph = facts.graph
    if not facts.parts.is_carried_unchanged:
        count = len(graph.writers)
        return tuple(tuple(range(min(fed), count)) if fed else () for fed in graph.fed)
    together: dict[int, tuple[int, ...]] = {}
    for shares in facts.parts.heads:
        if not shares.is_plain:
            together |= dict.fromkeys(shares.heads.rows, tuple(shares.heads.rows))
    return tuple(
        tuple(dict.fromkeys(moved for one in fed for moved in together.get(one, (one,)))) for fed in graph.fed
    )


Numbers = NDArray[np.float64]


class Forward(Protocol):
    """Computes a metric in worlds with removed edges.

    One of the worlds is the current one: what is computed `below` a stage reads the values of that world.
    `node_evaluations` counts the values computed so far, corrections included.
    """

    stages: tuple[Stage, ...]
    node_evaluations: int
    epsilon: float
    """The unit of rounding of the model's numbers."""
    moved: tuple[tuple[int, ...], ...]
    """For each reader, the writers whose parts depend on what it sees."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of readers and of writers."""

    def most(self, stage: int, removed: Mask | None = None) -> int:
        """Return the number of worlds that differ from a stage on and fit into memory at once.

        They are others than the current one, or than the one that has edges [reader, writer] removed.
        """

    @property
    def few(self) -> int:
        """The number of worlds that take hardly longer than one: starting an operation has a cost."""

    def search_bytes(self, *, speculative: bool = True) -> tuple[int, int]:
        """Return the bytes held for all worlds of a search, and the most that a step takes beside them."""

    def values(self, removed: Mask) -> Numbers:
        """[world, prompt] of worlds with edges [world, reader, writer] removed, computed from the base."""

    def begin(self, removed: Mask) -> Numbers:
        """Let the world with edges [reader, writer] removed be the current one; its metric as [prompt]."""

    def below(self, stage: int, removed: Mask) -> Numbers:
        """[world, prompt] of worlds that are the current one but for edges into the readers of one stage.

        Edges [world, reader of the stage, writer] are removed, those that are in the current world among
        them: what nothing reads there is not known. At most `most(stage)` worlds.
        """

    def adopt(self, stage: int, removed: Mask) -> None:
        """Let the world that has edges [reader of the stage, writer] removed be the current one."""


class MaskedForward:
    """Node by node, over the values of `base`: what others are compared with."""

    def __init__(
        self, facts: EdgeFacts, base: Reading, ablated: Ablated, metric: Metric, max_memory: int | None = None
    ) -> None:
        model = base.model
        self.components, self.ablated = facts.components, ablated
        self.stages = stages_of(self.components.readers)
        self.node_evaluations = 0
        self.epsilon = torch.finfo(ablated.at(self.components.readers[-1].entry).dtype).eps
        # What is read inside the model may be read of any component, whoever else reads that.
        self.moved = tuple(() for _ in self.components.readers) if metric.reads else moved_by(facts)
        self._facts, self._model = facts, model
        self._read = ablated.read
        self._values = StackedValues(model.program)
        self._layout = self._values.layout(self._read)
        swept = facts_of(model)
        self._metrics = MetricReader(swept, (metric,), base=base)
        self._targets = swept.targets((metric,))
        self._records = {one.name: compile_stacked_rule(one) for one in support(model.program, self._targets)}
        self._views = {
            one.node: _view(model.locate(Place(*one.site)).view, one) for one in self.components.readers
        }
        self._budget = max_memory
        self._is_stackable = can_stack(base)
        self._prompts = swept.read.prompts(base.inputs)
        self.neurons: Tensor | None = None
        """Of what each writer writes, [writer, d_model], the features that stay; None for all."""
        self._removed: Mask = np.zeros(self.shape, dtype=bool)
        self._current: Mapping[str, Any] = {}
        parts = [ablated.at(entry) for entry in self.components.entries][-1]
        values = sum(model.estimated_bytes(base.inputs).values())
        self._bound = values + 3 * parts.numel() * parts.element_size()
        if max_memory is not None:
            # What is found in a rehearsal has no numbers: what is kept of the base is read before it.
            for one in {one for _, inputs, _ in self._moved(self._views) for one in inputs}:
                self._read(one)
            for one in self._facts.reads:
                self._read(one)
            expect_room(self.peak_bytes(1), max_memory)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of readers and of writers."""
        return len(self.components.readers), len(self.components.writers)

    def most(self, stage: int, removed: Mask | None = None) -> int:
        """Return how many worlds fit into memory at once; without a budget, by a bound on what each takes."""
        del stage, removed
        if not self._is_stackable:
            return 1
        if self._budget is None:
            return max(1, DEFAULT_MEMORY // self._bound)
        one, two = self._taken
        held = bytes_of(leaf for leaf in self._current.values() if isinstance(leaf, torch.Tensor))
        return max(1, 1 + (self._budget - held - one) // max(two - one, 1))

    @functools.cached_property
    def _taken(self) -> tuple[int, int]:
        """The bytes that one world and two worlds hold."""
        return self.peak_bytes(1), self.peak_bytes(2)

    def peak_bytes(self, worlds: int) -> int:
        """Return the most that so many worlds without any edge hold at once: it is rehearsed."""
        count, removed = self.node_evaluations, np.ones((worlds, *self.shape), dtype=bool)
        found = peak_of(lambda: self._metric(removed, {}, 0))
        self.node_evaluations = count
        return found

    def search_bytes(self, *, speculative: bool = True) -> tuple[int, int]:
        """Return the bytes held for all worlds of a search, and the most that a step takes beside them."""
        one, two = self._taken
        worlds = max(1, min(self.few + 1, self.most(0))) if speculative else 1
        return bytes_of([self.ablated.at(self.components.readers[-1].entry)]), one + (worlds - 1) * (
            two - one
        )

    @property
    def few(self) -> int:
        """The number of worlds that take hardly longer than one does."""
        return few_of(self.ablated.at(self.components.readers[0].entry)[0])

    def values(self, removed: Mask) -> Numbers:
        """[world, prompt] of worlds with edges [world, reader, writer] removed."""
        many = self.most(0)
        found = [self._metric(removed[at : at + many], {}, 0)[0] for at in range(0, len(removed), many)]
        return np.concatenate(found) if found else np.zeros((0, self._prompts))

    def begin(self, removed: Mask) -> Numbers:
        """Let a world be the current one."""
        self._current = {}
        found, self._current = self._metric(removed[None], {}, 0, keep=self._records.keys())
        self._removed = removed.copy()
        values: Numbers = found[0]
        return values

    def below(self, stage: int, removed: Mask) -> Numbers:
        """[world, prompt] of worlds that are the current one but for edges into one stage."""
        whole = np.repeat(self._removed[None], len(removed), 0)
        whole[:, self.stages[stage].rows] = removed
        return self._metric(whole, self._current, self.stages[stage].first)[0]

    def adopt(self, stage: int, removed: Mask) -> None:
        """Let the world with these edges removed be the current one."""
        whole = self._removed.copy()
        whole[self.stages[stage].rows] = removed
        if not np.array_equal(whole, self._removed):
            self.begin(whole)

    # -- one stack of worlds -----------------------------------------------------------------------

    def _metric(
        self, removed: Mask, current: Mapping[str, Any], first: int, keep: Collection[str] = ()
    ) -> tuple[Numbers, dict[str, Any]]:
        """The metric of each world, and the values of `keep` that are others than in the current world."""
        worlds, values = len(removed), dict[str, Any]()

        def before(name: str) -> Any:
            return current[name] if name in current else self._read(name)

        def now(name: str) -> Any:
            return values[name] if name in values else before(name)

        corrected: dict[str, list[int]] = {}
        for number, one in enumerate(self.components.readers[first:], first):
            if removed[:, number].any() or self.neurons is not None:
                corrected.setdefault(one.node, []).append(number)

        def compute(step: WalkStep, operands: list[Any], values: dict[str, Any]) -> Any:
            if step.inputs:
                values[step.node] = step.rule(*operands)
                self.node_evaluations += worlds
            if step.node not in corrected:
                return values[step.node]
            self.node_evaluations += worlds * len(corrected[step.node])
            return self._corrected(corrected[step.node], removed, self._values.reading(now, worlds))

        walk = plan_walk(self._moved(corrected), {*keep, *self._facts.reads, *self._targets})
        with computing():
            walk.run(values, self._values.reading(before, worlds), compute)
            read = self._values.reading(now, worlds)
            outputs = {name: read(name) for name in self._targets}
            found = self._metrics.of_stack(outputs, worlds, self._layout, {}, self._prompts)()
        return as_numpy(found[:, 0]), values

    def _moved(self, corrected: Collection[str]) -> Iterator[tuple[str, tuple[str, ...], Rule]]:
        """The steps where these nodes are corrected; one that is moved by nothing else reads nothing."""
        moved = set[str]()
        for name, rule in self._records.items():
            inputs = self._model.program.record_of[name].inputs
            if not moved.isdisjoint(inputs) or name in corrected:
                yield name, () if moved.isdisjoint(inputs) else inputs, rule
                moved.add(name)

    def _corrected(self, numbers: Sequence[int], removed: Mask, read: Read) -> Tensor:
        """The value at the node of some readers, each of them computed from a stream of its own."""
        readers = [self.components.readers[number] for number in numbers]
        node, entry, slot = readers[0].node, readers[0].entry, readers[0].slot
        value: Tensor = read(node).clone(memory_format=torch.contiguous_format)
        known, ablated, worlds = self._facts.parts, self.ablated.at(entry), len(removed)
        shape, sizes = (worlds, *ablated.shape[1:]), self._layout.sizes(worlds)
        parts = known.parts(read, entry).reshape(len(ablated), *shape)
        stream, constant = (one(read, entry).reshape(shape) for one in (known.stream, known.constant))
        residue = stream - constant - parts.sum(0, dtype=wide(parts.dtype))
        replaced = self.ablated.stream(entry, constant).expand(shape) if known.is_carried_unchanged else None
        whole_stream: Tensor | None = stream
        if self.neurons is not None:
            stays = self.neurons[: len(parts), None, None, None]
            parts, whole_stream = torch.where(stays, parts, ablated[:, None]), None
        for number, one in zip(numbers, readers, strict=True):
            lost = removed[:, number, : len(parts)]
            total = mixed_by_world(~lost[:, None], parts)[0] + mixed(lost, ablated) + constant
            own = with_residue(total, residue, stream)
            for rows, whole in ((~lost.any(1), whole_stream), (lost.all(1), replaced)):
                if whole is not None and np.any(rows):
                    chosen = numbers_of(rows, own.device)
                    own[chosen] = whole[chosen].to(own.dtype)
            own = own.to(stream.dtype).flatten(0, 1)
            found = self._facts.readers.values(entry, [slot], own, self._read)[slot]
            view = self._views[node]
            if view is None or one.head is None:
                return found
            at = view.axes.index(str(one.axis))
            view.present(value, sizes).select(at, one.head).copy_(
                view.present(found, sizes).select(at, one.head)
            )
        return value


def can_stack(base: Reading) -> bool:
    """True if worlds of a run can lie along the batch: its size may vary, and its rows do not mix."""
    model = base.model
    nodes = tuple(name for name in model.program.record_of if name in model.program.varying)
    shape = facts_of(model).shape(base.inputs)
    return bool(model.program.dimensions.batch) and not shape.mixing(nodes, reader(base))


def expect_room(least: int, budget: int | None) -> None:
    """Raise SweepError where a world with no edge removed, which takes the most, is beyond the budget."""
    if budget is not None and least > budget:
        raise no_room(least, budget)


def few_of(stream: Tensor) -> int:
    """Return the number of streams like this one that take hardly longer than one does, on their device."""
    numbers = 1 << (22 if stream.is_cuda else 16)
    return max(8, min(numbers // max(stream.numel(), 1), 512))


def _view(view: View, one: Reader) -> View | None:
    """Return how heads lie in a reader's node; None where the reader is all of it."""
    if one.axis is None:
        return None
    if one.axis not in view.axes:
        raise CircuitError(f"{one.name}: where its heads lie in {one.node!r} is not known.")
    return view
