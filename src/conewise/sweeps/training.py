"""Fits: interventions with parameters, trained at many places at once, each in a world of its own.

A step of training is one differentiable pass of a sweep: what lies in front of a place is the baseline's and
is not computed again, each node behind it once for a stack of worlds. The loss of a world is its own, so that
the gradients of all worlds are those of as many trainings one after another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from conewise.anatomy.places import Place, as_place
from conewise.anatomy.selectors import POSITIONS, SelectorLike
from conewise.arguments import Positive, PositiveNumber, Seed, Share, as_bytes, checked, shown_bytes
from conewise.errors import (
    ArgumentError,
    BudgetError,
    MissingSiteError,
    PatchError,
    PromptError,
    SweepError,
    WeightsChangedError,
    describe,
)
from conewise.extras import needs
from conewise.files import as_path, is_there, write_whole
from conewise.jobs.digests import inputs_digest
from conewise.jobs.progress import bar
from conewise.jobs.runnable import How, Runnable
from conewise.program.foreign import within_memory
from conewise.program.tensors import Tensor, as_constant, computing, recording
from conewise.runs.captured import Captured
from conewise.runs.inputs import inputs_like
from conewise.runs.interventions import Intervention
from conewise.runs.learned import KINDS, TRAINED, Learned, Moment, Stacks, Trained, as_learned, mixed
from conewise.runs.metrics import Metric, applied, at_run
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun, bound
from conewise.status import Phases
from conewise.sweeps.execution.batch import Batch, Site
from conewise.sweeps.execution.executors import WavefrontExecutor
from conewise.sweeps.execution.fills import PassFills, Values
from conewise.sweeps.execution.reading import PHASES
from conewise.sweeps.execution.wavefront import kernels_of_passes
from conewise.sweeps.planning.compiler import DEFAULT_MEMORY
from conewise.sweeps.planning.costs import versions
from conewise.sweeps.planning.passes import PassProgram
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import StoredCut
from conewise.sweeps.storage.provenance import model_digest
from conewise.sweeps.sweep import Sweep, _part_shape
from conewise.templates import Heatmap, heading, shown
from conewise.text.tokens import AnswerReader
from conewise.threads import Turn, one_thread

if TYPE_CHECKING:
    import pandas as pd

FILE = "fit.safetensors"
"""The file of a fit: its parameters, and what is known of it; of one under way, the optimizer's state too."""

SAVE_EVERY = 10.0
"""Seconds from one writing of a fit under way to the next."""

BATCH = 16
"""The examples of a step, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Example:
    """A base, a source of the same shape, and the token that the interchange should give."""

    base: Mapping[str, Tensor]
    source: Mapping[str, Tensor]
    label: int

    @property
    def shape(self) -> tuple[Any, ...]:
        """Examples of one shape are trained together."""
        return tuple((name, tuple(value.shape), value.dtype) for name, value in self.base.items())


def read_examples(model: Captured, given: Sequence[Any], what: str) -> list[Example]:
    """Examples as people write them: (base, source, label), or mappings with these names."""
    found = []
    for number, one in enumerate(given):
        if isinstance(one, Mapping) and one.keys() >= {"base", "source", "label"}:
            one = one["base"], one["source"], one["label"]  # noqa: PLW2901  # the same, in order
        if not isinstance(one, tuple | list) or len(one) != 3:
            raise PromptError(
                f"{what} {number} is {describe(one)}: write (base, source, label), the label being the token "
                "that the interchange should give."
            )
        base, source = (_inputs(model, side, f"{what} {number}") for side in one[:2])
        if [value.shape for value in base.values()] != [value.shape for value in source.values()]:
            raise PromptError(
                f"{what} {number}: base and source differ in shape, so that positions would not mean the "
                f"same. {_shapes(base)} and {_shapes(source)}: pad or cut them to one length."
            )
        found.append(Example(base, source, _label(model, one[2], f"{what} {number}")))
    return found


def _inputs(model: Captured, given: Any, what: str) -> dict[str, Tensor]:
    if isinstance(given, Tensor | list) and not (isinstance(given, list) and isinstance(given[0], str)):
        tokens = torch.as_tensor(given)
        given = {model.program.inputs[0].name: tokens if tokens.ndim > 1 else tokens[None]}
    inputs = bound(model, (), inputs_like(model, given, what))
    return dict(inputs)


def _shapes(inputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())


def _label(model: Captured, given: Any, what: str) -> int:
    if isinstance(given, str):
        if model.tokenizer is None:
            raise PromptError(f"{what}: the label {given!r} is a text, and the model has no tokenizer.")
        return AnswerReader(model.tokenizer).token(given, "", what)
    label = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
    if isinstance(label, bool) or not isinstance(label, int) or label < 0:
        raise PromptError(f"{what}: a label is a token, its number or its text, and not {describe(given)}.")
    return label


def joined(examples: Sequence[Example], side: str) -> dict[str, Tensor]:
    """The inputs of examples of one shape, one behind the other."""
    rows = [getattr(one, side) for one in examples]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


# -- one step --------------------------------------------------------------------------------------


class Labels:
    """The labels, and the two numbers that are made of logits [world, prompt, token]."""

    def __init__(self) -> None:
        self.now = torch.zeros(0, dtype=torch.long)
        self.metrics = Metric("loss", self.loss), Metric("right", self.right)

    def loss(self, logits: Tensor) -> Tensor:
        """Cross-entropy of the labels, [world, prompt]."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = self.now.expand(wide.shape[:2])
        losses = torch.nn.functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape)

    def right(self, logits: Tensor) -> Tensor:
        """True where the label has the largest logit, [world, prompt]."""
        return logits.argmax(-1) == self.now


class LearnedValues(Values):
    """Puts in what learned interventions make of what is there and of the source; for one pass at a time."""

    def __init__(
        self, batch: Batch, kind: Learned, ready: Mapping[int, Stacks], rows: Sequence[tuple[int, int]]
    ) -> None:
        """`ready` are prepared parameters by width, `rows` the width and the row of each cell."""
        super().__init__(batch, ())
        self.learning = self
        self._kind, self._ready, self._rows_of = kind, ready, rows
        self.order: Sequence[int] = ()

    def source(self, site: Site) -> Tensor | None:
        """The source's value of a whole site."""
        source = self.batch.source
        return None if source is None or not self._kind.takes_source else source.read(Place(*site))

    def made(self, worlds: Sequence[int], present: Tensor, source: Tensor | None) -> Tensor:
        """[world, ...]: what these worlds of the pass put in."""
        rows = [self._rows_of[self.order[world]] for world in worlds]
        numbers = [row for _, row in rows]
        first, ready = numbers[0], self._ready[rows[0][0]]
        if numbers == list(range(first, first + len(numbers))):
            own = {name: value[first : first + len(numbers)] for name, value in ready.items()}
        else:
            index = torch.tensor(numbers, device=present.device)
            own = {name: value.index_select(0, index) for name, value in ready.items()}
        return mixed(self._kind, own, present, source)


class Shaped:
    """What trains examples of one shape: the plan of their passes, and what follows it."""

    def __init__(self, fit: Fit, examples: Sequence[Example], batch: int, budget: int) -> None:
        self.labels = fit.labels
        model, self._kind = fit.model, fit.kind
        put = Intervention(fit.kind.name, _unused, (fit.kind.name,), is_function=True)
        self.batch = min(batch, len(examples))
        inputs = joined([examples[0]] * self.batch, "base")
        self.sweep = Sweep(model, fit.sites, base=inputs, source=put, metric=fit.labels.metrics[0])
        self.plan, self.bytes = _cut_for(self.sweep, budget)
        compiled = self.plan.compiled
        assert compiled is not None
        self.model, self.compiled, self._put = model, compiled, put
        self.facts: ShapeFacts = facts_of(model).shape(inputs)
        self._executor = WavefrontExecutor(
            model, compiled, self.facts, self.sweep.spec, facts_of(model).rules
        )
        self._fills = [
            PassFills(compiled, one, self.sweep.spec.cells, model.locate) for one in compiled.passes
        ]

    def run(
        self, examples: Sequence[Example], ready: Mapping[int, Stacks], rows: Any, *, records: bool
    ) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
        """For each pass its cells, their loss, and where nothing is recorded whether they are right."""
        model, device = self.model, facts_of(self.model)
        inputs = [joined(examples, side) for side in ("base", "source")]
        asked = Batch(InputRun(model, inputs[0]), InputRun(model, inputs[1]), self._put)
        with ExitStack() as under_way, kernels_of_passes(device.device, None):
            with computing():
                batch, _ = self._executor._computed(asked)
            for run in batch.runs:
                under_way.enter_context(run.trusted())
            values = LearnedValues(batch, self._kind, ready, rows)
            plain = self._executor.reader(batch)

            def read(name: str) -> Any:
                return as_constant(plain(name))

            target, count = device.target(self.labels.metrics[0]), len(examples)
            metrics = [at_run(one, model, inputs[0], target) for one in self.labels.metrics]
            where = next(iter(ready.values()))
            self.labels.now = torch.tensor(
                [one.label for one in examples], device=next(iter(where.values())).device
            )
            for one, fills in zip(self.compiled.passes, self._fills, strict=True):
                values.order = self.compiled.order[one.first : one.first + one.worlds]
                outputs = self._executor.recorded(one.program, read, fills, values, records=records)
                with recording() if records else computing():
                    stack = device.read.arranged(target, outputs[target], one.worlds, count)
                    loss = applied(metrics[0], count, stack)
                    right = loss if records else applied(metrics[1], count, stack)  # not counted in training
                yield values.order, loss, right


def _unused(place: Place, base: Reading) -> Tensor:
    raise AssertionError(f"{place} of {base} is patched by a fit alone")


def recorded_bytes(program: PassProgram, facts: ShapeFacts) -> int:
    """The bytes that a pass holds at most when it is recorded: all that it computes, and the way back."""
    costs, aliases = facts.costs, facts.memory_layout.aliases
    total = largest = 0
    for step in program.steps:
        own = costs.bytes_of_copy(step.node, rows=step.rows)
        if step.worlds and step.node not in aliases:
            total += step.count * own
        if step.put is not None:  # what is there before, what is put there, and both
            total += 3 * sum(stop - start for start, stop in step.put.fresh) * costs.bytes_of_copy(step.node)
            total += step.count * own
        largest = max(largest, step.count * own)
    for one in program.targets:
        own = program.worlds * costs.bytes_of_copy(one.node, rows=one.rows)
        total, largest = total + own, max(largest, own)
    return total + 3 * largest


def _cut_for(sweep: Sweep, budget: int) -> tuple[SweepPlan, int]:
    """The plan of a step whose passes, recorded, fit a budget, and the bytes of the largest pass."""
    batch, cut = sweep.batch(0), None
    facts = sweep.facts.shape(batch.base.inputs)
    while True:
        plan = sweep._planned(batch, None, "wavefront", cut)
        compiled = plan.compiled
        assert compiled is not None
        taken = [recorded_bytes(compiled.programs[one.program], facts) for one in compiled.passes]
        if max(taken) <= budget:
            return plan, max(taken)
        chunks: list[int] = []
        for one, own in zip(compiled.passes, taken, strict=True):
            if own > budget and one.worlds == 1:
                raise BudgetError(
                    "one world of a step of training takes " + shown_bytes(own), shown_bytes(budget), own
                )
            parts = min(one.worlds, -(-own // budget))
            ends = [one.worlds * (part + 1) // parts for part in range(parts)]
            chunks += [end - start for start, end in zip([0, *ends], ends, strict=False)]
        cut = StoredCut("wavefront", tuple(chunks))


# -- the job ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FitPlan:
    """The cost of a fit: its worlds, steps, examples, and the memory and FLOPs of a step's forward passes."""

    worlds: int
    steps: int
    examples: int
    held_out: int
    passes: int
    flops: int
    full_flops: int
    peak_bytes: int
    parameters: int

    def __str__(self) -> str:
        return (
            f"{self.steps:,} steps over {self.worlds:,} worlds in {self.passes} "
            f"pass{'es' if self.passes > 1 else ''}: {self.examples:,} examples to train, {self.held_out:,} "
            f"held out; {self.parameters:,} parameters, up to {shown_bytes(self.peak_bytes)} for a recorded "
            f"pass, {self.full_flops / max(self.flops, 1):.2g}× less work than full forwards"
        )


@checked
@one_thread
class Fit(Runnable["Fitted"]):
    """A training job for an intervention at each of several places; see `Model.fit`."""

    def __init__(
        self,
        model: Captured,
        kind: Learned | Intervention,
        sites: SelectorLike,
        examples: Sequence[Any],
        *,
        steps: Positive = 200,
        batch: Positive = BATCH,
        learning_rate: PositiveNumber = 5e-3,
        held_out: Share | Sequence[Any] = 0.25,
        seed: Seed = 0,
    ) -> None:
        self.model, self.kind, self.sites = model, as_learned(kind), sites
        self.steps, self.batch, self.learning_rate, self.seed = steps, batch, learning_rate, seed
        self.labels = Labels()
        found = read_examples(model, examples, "example")
        if isinstance(held_out, float | int):
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
            count = min(round(held_out * len(found)), len(found) - 1)
            self.held_out = [found[number] for number in sorted(order[:count])] if found else []
            found = [found[number] for number in sorted(order[max(count, 0) :])]
        else:
            self.held_out = read_examples(model, held_out, "held-out example")
        if not found:
            raise PromptError("no examples: give (base, source, label) for each.")
        self.examples = found
        first = self._shaped(DEFAULT_MEMORY)[0]
        target = first.facts.records[facts_of(model).target(self.labels.metrics[0])]
        tokens = (target.shape or (0,))[-1]
        for one in (*self.examples, *self.held_out):
            if isinstance(tokens, int) and one.label >= tokens:
                raise PromptError(f"the label {one.label} is no token: the model has {tokens}, from 0.")
        self.cells, self.spreads = first.sweep.cells, first.sweep.spreads
        self._widths = [self._width(cell.places, first) for cell in self.cells]

    @property
    def _turn(self) -> Turn:
        return self.model._turn

    def _width(self, places: Sequence[Place], shaped: Shaped) -> int:
        """The features of a place. Raises PatchError for one that nothing can be learned at."""
        if len(places) != 1:
            raise PatchError(f"{' + '.join(map(str, places))}: a fit has one place for each world.")
        found = self.model.locate(places[0])
        axes: Sequence[str] = found.part_axes
        if not axes or axes[-1] != found.view.axes[-1] or axes[-1] in POSITIONS | {"batch"}:
            raise PatchError(
                f"{places[0]} has the axes {', '.join(axes) or 'none'}, and what is learned acts on all "
                "features of a place: choose a site whose last axis is features, and leave that axis out."
            )
        width = _part_shape(found, shaped.facts)[-1]
        self.kind.expect_width(width, places[0])
        return width

    def _shaped(self, budget: int) -> list[Shaped]:
        """What trains the examples of each shape, in the order in which shapes come."""
        shapes: dict[Any, list[Example]] = {}
        for one in self.examples:
            shapes.setdefault(one.shape, []).append(one)
        self._of_shape = shapes
        return [Shaped(self, own, self.batch, budget) for own in shapes.values()]

    def plan(self, max_memory: int | str | None = None) -> FitPlan:
        """Return the cost of the fit; nothing is trained."""
        shaped = self._shaped(as_bytes(max_memory) or DEFAULT_MEMORY)
        first = max(shaped, key=lambda one: one.bytes)
        return FitPlan(
            len(self.cells),
            self.steps,
            len(self.examples),
            len(self.held_out),
            len(first.compiled.passes),
            first.plan.flops,
            first.plan.full_flops,
            first.bytes,
            sum(value.numel() for stacks in self._begun().values() for value in stacks.values()),
        )

    def _begun(self) -> dict[int, dict[str, Tensor]]:
        """The parameters to begin with, by width: the same for the same seed on every device."""
        found = {}
        for width in dict.fromkeys(self._widths):
            generator = torch.Generator().manual_seed(self.seed)
            found[width] = self.kind.begin(self._widths.count(width), width, generator)
        return found

    @cached_property
    def _rows(self) -> list[tuple[int, int]]:
        """The width of each cell, and its row among those of that width."""
        seen: dict[int, int] = {}
        rows = []
        for width in self._widths:
            rows.append((width, seen.get(width, 0)))
            seen[width] = seen.get(width, 0) + 1
        return rows

    def batches(self, epoch: int) -> list[tuple[int, list[Example]]]:
        """The batches of an epoch in their order: the number of their shape, and their examples."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        found: list[tuple[int, list[Example]]] = []
        for number, own in enumerate(self._of_shape.values()):
            size = min(self.batch, len(own))
            order = torch.randperm(len(own), generator=generator).tolist()
            order += order[: -len(order) % size]  # the last one is filled up
            found += [
                (number, [own[one] for one in order[first : first + size]])
                for first in range(0, len(order), size)
            ]
        shuffled = torch.randperm(len(found), generator=generator).tolist()
        return [found[number] for number in shuffled]

    @within_memory("this fit")
    def _run(self, how: How) -> Fitted:
        if how.workers is not None:
            raise ArgumentError("a fit runs in one process: leave `workers` out.")
        before = self.model.weights.whole_contents()
        where = None if how.out is None else as_path(how.out)
        state = _State(self, where, resume=how.resume)
        shaped = self._shaped(how.max_memory or DEFAULT_MEMORY)
        phases, device = Phases(PHASES), facts_of(self.model).device
        with bar(how.progress, self.steps, device) as tell:
            tell.begin(phases)
            tell(state.step)
            while state.step < self.steps:
                loss = state.losses[state.step - 1].mean().item() if state.step else float("nan")
                with phases.during("passes", f"step {state.step + 1}, loss {loss:.3g}"):
                    self._step(state, shaped)
                tell(1)
                state.save(SAVE_EVERY)
            with phases.during("passes", "held-out pairs"):
                accuracy, held_loss = self._evaluated(state, shaped)
        changed = self.model.weights.changed(before.whole, self.model.weights.whole_contents().whole)
        if changed:
            raise WeightsChangedError(
                f"the weights of {self.model.name} were written to during the fit: {changed}."
            )
        state.save(0.0)
        found = self._result(state, accuracy, held_loss)
        if where is not None:
            found.save(where)
        return found

    def _step(self, state: _State, shaped: Sequence[Shaped]) -> None:
        """One step: the gradients of all worlds, pass by pass, and one step of the optimizer for all."""
        per_epoch = sum(-(-len(own) // min(self.batch, len(own))) for own in self._of_shape.values())
        epoch, place = divmod(state.step, per_epoch)
        number, examples = self.batches(epoch)[place]
        generator = torch.Generator().manual_seed(self.seed * 7_000_003 + state.step)
        moment = Moment(state.step / self.steps, generator)
        with recording():
            made = {width: self.kind.prepared(own, moment) for width, own in state.parameters.items()}
            ready = {
                width: {name: value.detach().requires_grad_() for name, value in own.items()}
                for width, own in made.items()
            }
            losses = torch.zeros(len(self.cells))
            for cells, loss, _ in shaped[number].run(examples, ready, self._rows, records=True):
                own = loss.mean(1)
                losses[list(cells)] = own.detach().float().cpu()
                torch.autograd.backward([own.sum()])
            outputs = [value for own in made.values() for value in own.values()]
            grads = [value.grad for own in ready.values() for value in own.values()]
            for stacks in state.parameters.values():
                if (penalty := self.kind.penalty(stacks)) is not None:
                    outputs, grads = [*outputs, penalty.sum()], [*grads, None]
            used = [
                (o, g)
                for o, g in zip(outputs, grads, strict=True)
                if o.requires_grad and (g is not None or o.ndim == 0)
            ]
            torch.autograd.backward([o for o, _ in used], [g for _, g in used])
        _expect_finite(losses, state.step, self.cells)
        state.note(losses)

    def _evaluated(self, state: _State, shaped: Sequence[Shaped]) -> tuple[Tensor, Tensor]:
        """The accuracy and the loss of each cell on the held-out pairs; NaN where there are none."""
        count = len(self.cells)
        right, loss, seen = (
            torch.zeros(count, dtype=torch.float64),
            torch.zeros(count, dtype=torch.float64),
            0,
        )
        with computing():
            ready = {w: self.kind.prepared(own, TRAINED) for w, own in state.parameters.items()}
        of = dict(zip(self._of_shape, shaped, strict=True))
        groups: dict[Any, list[Example]] = {}
        for one in self.held_out:
            groups.setdefault(one.shape, []).append(one)
        for shape, own in groups.items():
            if shape not in of:
                of[shape] = Shaped(self, own, self.batch, max(one.bytes for one in shaped))
            size = of[shape].batch
            for first in range(0, len(own), size):
                some = own[first : first + size]
                filled = some + [some[-1]] * (size - len(some))
                for cells, lost, hit in of[shape].run(filled, ready, self._rows, records=False):
                    right[list(cells)] += hit[:, : len(some)].sum(1).double().cpu()
                    loss[list(cells)] += lost[:, : len(some)].double().sum(1).cpu()
                seen += len(some)
        return right / seen if seen else right * float("nan"), loss / seen if seen else loss * float("nan")

    def _result(self, state: _State, accuracy: Tensor, loss: Tensor) -> Fitted:
        spread = self.spreads[0] if len(self.spreads) == 1 else None
        axes = spread.axes if spread is not None else ("site",)
        coordinates = (
            {axis: list(spread.labels_of(place)) for place, axis in enumerate(axes)}
            if spread is not None
            else {"site": [cell.name for cell in self.cells]}
        )
        shape = spread.shape if spread is not None else (len(self.cells),)
        return Fitted(
            self.kind,
            tuple(cell.name for cell in self.cells),
            tuple(cell.places[0] for cell in self.cells),
            axes,
            coordinates,
            accuracy.reshape(shape),
            loss.reshape(shape),
            state.losses.clone(),
            {
                width: {n: v.detach().cpu().clone() for n, v in own.items()}
                for width, own in state.parameters.items()
            },
            tuple(self._rows),
            len(self.held_out),
            dict(self.identity),
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that the result depends on, as plain values."""
        digest, facts = model_digest(self.model), facts_of(self.model)

        def of(examples: Sequence[Example]) -> str:
            flat = {
                f"{number} {side} {name}": value
                for number, one in enumerate(examples)
                for side in ("base", "source")
                for name, value in getattr(one, side).items()
            }
            return inputs_digest({**flat, "labels": torch.tensor([one.label for one in examples])})

        start = inputs_digest(dict(self.kind.start)) if self.kind.start else ""
        return {
            "model": self.model.name,
            "weights": digest.weights,
            "program": digest.program,
            "intervention": [
                self.kind.name,
                start,
                *(str(v) for v in vars(self.kind).values() if isinstance(v, float | int)),
            ],
            "sites": [cell.name for cell in self.cells],
            "examples": of(self.examples),
            "held_out": of(self.held_out),
            "steps": self.steps,
            "batch": self.batch,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "dtype": str(facts.dtype),
            "device": str(facts.device),
            "versions": versions(),
        }

    def __repr__(self) -> str:
        return (
            f"Fit of {self.kind.name} at {len(self.cells)} places of {self.model.name}: {self.steps} steps, "
            f"{len(self.examples)} examples, {len(self.held_out)} held out"
        )


def _expect_finite(losses: Tensor, step: int, cells: Sequence[Any]) -> None:
    if not bool(torch.isfinite(losses).all()):
        bad = int((~torch.isfinite(losses)).nonzero()[0])
        raise SweepError(
            f"the loss at {cells[bad].name} is {float(losses[bad])} in step {step + 1}: the model puts out "
            "NaN or infinity, or the learning rate is too large. Nothing of this step was kept."
        )


class _State:
    """A fit under way: parameters, their optimizer, the losses so far; and the file that it goes on from."""

    def __init__(self, fit: Fit, folder: Path | None, *, resume: bool) -> None:
        self._fit, self._path, self._saved = fit, None if folder is None else folder / FILE, time.monotonic()
        device = facts_of(fit.model).device
        begun, known = fit._begun(), None
        if self._path is not None and is_there(self._path, Path.is_file):
            if not resume:
                raise SweepError(f"{folder} has a fit: go on with resume=True, or give another folder.")
            known, about = read_file(self._path)
            fitting = json.loads(json.dumps(fit.identity))
            other = [name for name, value in fitting.items() if about["identity"].get(name) != value]
            if other:
                raise SweepError(
                    f"{folder} has a fit of something else: {', '.join(other)} differ. Give another folder."
                )
        self.parameters = {
            width: {
                name: (value if known is None else known[f"parameters/{width}/{name}"])
                .to(device)
                .requires_grad_()
                for name, value in own.items()
            }
            for width, own in begun.items()
        }
        self._flat = [(f"{w}/{n}", v) for w, own in self.parameters.items() for n, v in own.items()]
        self.optimizer = torch.optim.Adam([value for _, value in self._flat], lr=fit.learning_rate)
        self.losses = torch.full((fit.steps, len(fit.cells)), float("nan"))
        self.step = 0
        if known is not None:
            self.step, self.losses = int(about["step"]), known["losses"]
            for name, value in self._flat if self.step else ():
                if f"mean/{name}" in known:
                    self.optimizer.state[value] = {
                        "step": torch.tensor(float(self.step)),
                        "exp_avg": known[f"mean/{name}"].to(device),
                        "exp_avg_sq": known[f"square/{name}"].to(device),
                    }

    def note(self, losses: Tensor) -> None:
        """Take a step by the gradients that are there, and note the losses before it."""
        self.losses[self.step] = losses
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def save(self, every: float) -> None:
        """Write all, so that it can go on from here, where the last time is so many seconds ago."""
        if self._path is None or time.monotonic() - self._saved < every:
            return
        tensors = {"losses": self.losses}
        for name, value in self._flat:
            tensors[f"parameters/{name}"] = value.detach().cpu()
            state = self.optimizer.state.get(value)
            if state:
                tensors[f"mean/{name}"] = state["exp_avg"].cpu()
                tensors[f"square/{name}"] = state["exp_avg_sq"].cpu()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._path, tensors, {"step": self.step, "identity": self._fit.identity})
        self._saved = time.monotonic()


def write_file(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors, and plain values beside them, whole or not at all."""
    plain = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
    write_whole(path, save(plain, {"conewise fit": json.dumps(about)}))


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_file` wrote. Raises SweepError for what it did not, or is damaged."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["conewise fit"])
        return load_file(path), about
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise SweepError(f"{path} is no fit, or is damaged: {error}.") from None


# -- the result ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Fitted:
    """Trained interventions, one for each place: `fitted["resid_post", 3]`, and their quality.

    `accuracy` and `loss` are measured on the held-out pairs, with the axes `axes`: the share of pairs in
    which the intervention makes the label the likeliest token, and the label's cross-entropy. `losses` are
    those of training, [step, place], in the order of `names`.
    """

    kind: Learned
    names: tuple[str, ...]
    places: tuple[Place, ...]
    axes: tuple[str, ...]
    coordinates: dict[str, list[str]]
    accuracy: Tensor
    loss: Tensor
    losses: Tensor
    parameters: dict[int, dict[str, Tensor]]
    rows: tuple[tuple[int, int], ...]
    held_out: int
    origin: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, place: Any) -> Trained:
        """The trained intervention of a place: its name, `cw.site(...)`, or (kind, layer) if that is one."""
        wanted = as_place(place)
        found = [n for n, one in enumerate(self.places) if one == wanted or str(one) == str(place)]
        if not found and not wanted.part:
            found = [
                n for n, one in enumerate(self.places) if (one.name, one.layer) == (wanted.name, wanted.layer)
            ]
        if len(found) != 1:
            raise MissingSiteError(
                f"{len(found) or 'no'} trained interventions at {wanted}: there are {len(self.names)}, "
                f"{', '.join(self.names[:3])}{', ...' if len(self.names) > 3 else ''}."
            )
        width, row = self.rows[found[0]]
        own = {name: value[row].clone() for name, value in self.parameters[width].items()}
        return Trained(self.kind, own, self.names[found[0]], float(self.accuracy.reshape(-1)[found[0]]))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    @property
    def best(self) -> Trained:
        """The trained intervention with the highest accuracy; ties are broken by the lowest loss."""
        accuracy, loss = self.accuracy.reshape(-1).tolist(), self.loss.reshape(-1).tolist()
        return self[self.names[max(range(len(self)), key=lambda n: (accuracy[n], -loss[n]))]]

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row for each place: name, held-out accuracy and loss, and the last loss of training."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        last = self.losses[-1].tolist() if len(self.losses) else [float("nan")] * len(self)
        own = {"accuracy": self.accuracy.reshape(-1).tolist(), "loss": self.loss.reshape(-1).tolist()}
        return pd.DataFrame({"site": list(self.names), **own, "training_loss": last})

    def equals(self, other: object) -> bool:
        """Return True if another fit has the same interventions, accuracies and losses, bit for bit."""
        if not isinstance(other, Fitted) or self.names != other.names:
            return False
        mine, theirs = self._tensors(), other._tensors()
        return mine.keys() == theirs.keys() and all(
            torch.equal(value.nan_to_num(nan=-1.0), theirs[name].nan_to_num(nan=-1.0))
            for name, value in mine.items()
        )

    def save(self, folder: str | Path) -> None:
        """Save the interventions to a folder, as safetensors; `cw.open(folder)` reads it."""
        where = as_path(folder)
        where.mkdir(parents=True, exist_ok=True)
        about = {name: getattr(self, name) for name in ("names", "axes", "coordinates", "rows", "held_out")}
        about |= {
            "kind": [type(self.kind).__name__, {n: v for n, v in vars(self.kind).items() if n != "start"}],
            "places": [
                [one.name, one.layer, one.stack, {axis: _plain(part) for axis, part in one.part.items()}]
                for one in self.places
            ],
            "identity": self.origin,
            "step": len(self.losses),
        }
        write_file(where / FILE, self._tensors(), about)

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **{f"parameters/{w}/{name}": v for w, own in self.parameters.items() for name, v in own.items()},
            "accuracy": self.accuracy,
            "loss": self.loss,
            "losses": self.losses,
        }

    def __repr__(self) -> str:
        best = self.best
        return (
            f"{self.kind.name} trained at {len(self)} places: best at {best.place}, which gives the label in "
            f"{best.accuracy:.1%} of {self.held_out} held-out pairs"
        )

    def _repr_html_(self) -> str:
        rows = self.accuracy.reshape(len(self.accuracy) if self.axes else 1, -1).tolist()
        names = self.coordinates.get(self.axes[0], []) if self.axes else []
        inner = self.coordinates.get(self.axes[1], []) if len(self.axes) == 2 else []
        drawn = Heatmap(
            rows,
            names if len(names) == len(rows) else [str(number) for number in range(len(rows))],
            inner if len(inner) == len(rows[0]) else [str(number) for number in range(len(rows[0]))],
            told=[[f"{one:.1%}" for one in row] for row in rows],
            row_title=self.axes[0] if self.axes else "",
            column_title=" × ".join(self.axes[1:]),
            title="accuracy on held-out pairs",
            largest=1.0,
        )
        return shown(heading("Fitted", repr(self)), drawn.html())


def _plain(index: Any) -> Any:
    """A part of an axis as JSON has it."""
    if isinstance(index, slice):
        return [index.start, index.stop, index.step, "slice"]
    return index if isinstance(index, int) else list(index)


def _index(plain: Any) -> Any:
    """A part of an axis of what `_plain` made of it."""
    if isinstance(plain, int):
        return plain
    return slice(*plain[:3]) if plain[-1:] == ["slice"] else tuple(plain)


def is_fit(folder: Path) -> bool:
    """True if a folder has a fit."""
    return is_there(folder / FILE, Path.is_file)


def load_fit(folder: Path) -> Fitted:
    """Read what `Fitted.save` wrote. Raises SweepError for a fit that has not ended."""
    tensors, about = read_file(folder / FILE)
    if "names" not in about:
        raise SweepError(
            f"{folder} has a fit that stopped at step {about.get('step')}: go on with "
            "`fit.run(out=..., resume=True)`."
        )
    name, options = about["kind"]
    kind = object.__new__(KINDS[name])
    for option, value in {**options, "start": {}}.items():
        object.__setattr__(kind, option, value)
    parameters: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("parameters/"):
            _, width, own = key.split("/")
            parameters.setdefault(int(width), {})[own] = value
    places = tuple(
        Place(n, layer, stack, {axis: _index(plain) for axis, plain in part.items()})
        for n, layer, stack, part in about["places"]
    )
    return Fitted(
        kind,
        tuple(about["names"]),
        places,
        tuple(about["axes"]),
        about["coordinates"],
        tensors["accuracy"],
        tensors["loss"],
        tensors["losses"],
        parameters,
        tuple((int(w), int(r)) for w, r in about["rows"]),
        about["held_out"],
        about["identity"],
    )
