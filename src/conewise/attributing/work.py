"""Recorded parts of runs, and what they cost: every forward and backward pass is counted as it is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from conewise.attributing.relevance import Relevance
from conewise.errors import GradientError
from conewise.program.records import SIZES
from conewise.program.rehearsal import is_rehearsal
from conewise.program.tensors import Tensor, recordable
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.runs.gradients import Branch, Measured, Narrow, Recorded, Tape
from conewise.runs.interventions import as_intervention
from conewise.runs.metrics import fetched
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun, PassRun
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.planning.planner import facts_of, is_product, readout, tail_of
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import SweepSpec

_RELEVANCE = "_relevance"


@dataclass(frozen=True, slots=True)
class Counts:
    """The cost of some passes."""

    forwards: int = 0
    backwards: int = 0
    node_evaluations: int = 0
    flops: int = 0

    def __add__(self, other: Counts) -> Counts:
        return self.plus(other)

    def plus(self, other: Counts, times: int = 1) -> Counts:
        """Return these, and others so many times."""
        pairs = zip(astuple(self)[:4], astuple(other)[:4], strict=True)
        return Counts(*(one + times * more for one, more in pairs))

    def passes(self, joint: str = ", ") -> str:
        """Return how many passes there are, in words."""
        named = ((self.forwards, "forward"), (self.backwards, "backward"))
        return joint.join(f"{count:,} {what} pass{'' if count == 1 else 'es'}" for count, what in named)


class Work:
    """The recorded passes of an attribution over parts of the base's program, for one batch.

    Runs that were given as inputs are computed here, and of their values those of `reads` are kept. With
    `is_one_pass`, one forward alone is recorded, which is the base's own: with the source's and a backward
    pass that is all. Else passes read the base as it is, and all of its values are kept.

    `counts` has a node once for each pass that computes it, and once for each backward pass through it; FLOPs
    likewise, a backward pass by each input that is differentiated. `weights` are those that all is
    computed with.

    With `columns`, where the tokens stand that metrics read, the device's work is being recorded: metrics are
    left out, and nothing is looked at on the host. `may_replay`: recorded work may be replayed instead.
    """

    def __init__(
        self,
        batch: Batch,
        spec: SweepSpec,
        reads: Collection[str],
        weights: Sums,
        *,
        is_one_pass: bool,
        columns: Tensor | None = None,
        may_replay: bool = False,
    ) -> None:
        self.metrics, self.weights, self.counts = spec.metrics, weights, Counts()
        self.spec, self.given, self.is_recording = spec, batch, columns is not None
        self.may_replay = may_replay
        self.model = batch.base.model
        self.inputs = batch.base.inputs
        self.facts = facts_of(self.model)
        self.shape = self.facts.shape(self.inputs)
        self.prompts = self.facts.read.prompts(self.inputs)
        self.targets = self.facts.targets(self.metrics)
        self._batch, self.reads = batch, tuple(dict.fromkeys(reads))
        self._is_one_pass = is_one_pass
        self.tail = max(tail_of(self.facts, self.metrics, run.inputs) for run in batch.runs)
        self.narrowest = narrowest(self.model, spec, self.shape, self.tail)
        if self.narrowest is not None and columns is not None:
            self.narrowest = replace(self.narrowest, columns=columns)
        self.narrow: Narrow | None = None
        self._numbers: dict[str, Tensor] = {}
        self._known: dict[str, Any] = {}
        self.behind: tuple[str, ...] = ()

    # -- the runs ------------------------------------------------------------------------------

    @property
    def batch(self) -> Batch:
        """The base and what is put into it, computed as far as they are read."""
        self._compute_source()
        if self._is_one_pass and isinstance(self._batch.base, InputRun):
            self._replace(base=self._forward(self._batch.base, "base"))
        return self._batch

    @property
    def base(self) -> Reading:
        """The run that is changed."""
        return self.batch.base

    @property
    def has_source(self) -> bool:
        """True if the values of another run are put in."""
        return self._batch.source is not None and self._batch.intervention.is_run

    def read(self, name: str) -> Any:
        """The value of a node in the base, or of a weight; each is read once."""
        weights = self.model.program.source_values
        if name in weights:
            return recordable(weights[name])
        if name not in self._known:
            (self._known[name],) = self.base.demand([name])
        return self._known[name]

    def numbers(self, which: str) -> Tensor | None:
        """[metric, prompt] in float64: the metrics of the base or the source; None where there is none."""
        if which not in self._numbers:
            run = self.batch.base if which == "base" else self.batch.source
            if run is None:
                return None
            # The pass that computed the run has read them of its narrow output, as a resumed job does.
            if which not in self._numbers:
                self._numbers[which] = MetricReader(self.facts, self.metrics).of_run(run)
        return self._numbers[which]

    def note(self, which: str, numbers: Tensor) -> None:
        """Take note of the metrics of the base or the source."""
        self._numbers[which] = numbers

    def _compute_source(self) -> None:
        source = self._batch.source
        if source is not None and isinstance(source, InputRun):
            self._replace(source=self._forward(source, "source"))

    def _forward(self, run: Reading, which: str) -> PassRun:
        """A run of which nothing was computed, with the values that are read of it."""
        tape, narrow = self.tape_of(run), self.narrowed(self.reads)
        try:
            values = tape.record((), self.targets, keep=self.reads, narrow=narrow)
        except GradientError:
            _ = run.world  # says which operation it was, and what it was given
            raise
        return self._noted(run, which, tape, values, narrow)

    def _noted(
        self, run: Reading, which: str, tape: Tape, values: Recorded, narrow: Narrow | None
    ) -> PassRun:
        """A run with the values that a pass has of it, those of which it computed all; its metrics."""
        assert isinstance(run, InputRun)
        kept = ((name, values[name]) for name in (*self.reads, *self.targets))
        own = {name: one.detach() if isinstance(one, Tensor) else one for name, one in kept}
        if not self.is_recording:
            self.note_numbers(which, tape, own, run.inputs, narrow)
            if narrow is not None:
                del own[narrow.target]
        return PassRun(run, {**own, **run.inputs})

    def note_numbers(
        self,
        which: str,
        tape: Tape,
        values: Recorded,
        inputs: Mapping[str, Tensor],
        narrow: Narrow | None,
    ) -> None:
        """Read the metrics of the base or the source off the values of a pass."""
        with torch.no_grad():
            rows = [tape.applied(metric, values, inputs, narrow)[0] for metric in self.metrics]
        found = [fetched(one, row) for one, row in zip(self.metrics, rows, strict=True)]
        self._numbers[which] = torch.stack(found)

    def _replace(self, base: Reading | None = None, source: Reading | None = None) -> None:
        old = self._batch
        put = old.intervention if source is None else as_intervention(source, self.model)
        self._batch = replace(old, base=base or old.base, source=source or old.source, intervention=put)

    def tape_of(self, run: Reading) -> Tape:
        """Return what records the values of a run."""
        if not isinstance(run, InputRun) or (run is self._batch.base and not self._is_one_pass):
            return run._tape()
        weights, inputs, sizes = self.model.program.source_values, run.inputs, run._sizes

        def read(name: str) -> Any:
            return sizes if name == SIZES else inputs[name] if name in inputs else weights[name]

        return Tape(self.model, read, sizes, is_fresh=True)

    # -- passes --------------------------------------------------------------------------------

    def record(
        self,
        nodes: Collection[str],
        *,
        given: Mapping[str, Tensor] = MappingProxyType({}),
        branches: Sequence[Branch] = (),
        keep: Collection[str] = (),
        relevance: Relevance | None = None,
    ) -> Recorded:
        """A forward pass over what lies behind `nodes`: see `Tape.record`."""
        self._compute_source()  # before anything is recorded, which takes memory
        nodes = tuple(dict.fromkeys(nodes))
        tape = self.tape_of(self._batch.base)
        behind = tuple(name for name in self.model.behind(nodes, self.targets) if name not in given)
        if relevance is not None:
            relevance.expect(nodes, behind)
        self.expect_apart(behind)
        is_first = self._is_one_pass and not given and isinstance(self._batch.base, InputRun)
        also = (*keep, *self.reads) if is_first else tuple(keep)
        self._tape = tape if is_first else self.base._tape()
        self.narrow = self.narrowed((*nodes, *also))
        values = self._tape.record(
            nodes,
            self.targets,
            given=given,
            branches=branches,
            keep=also,
            narrow=self.narrow,
            relevance=relevance,
        )
        if is_first:
            base = self._batch.base
            self._replace(base=self._noted(base, "base", tape, values, self.narrow))
        self.behind = behind
        self.counts += Counts(1, 0, len(behind), sum(map(self.shape.costs.flops, behind)))
        return values

    def measured(self, values: Recorded) -> Iterator[tuple[Measured, bool]]:
        """Yield each metric of the values of the last pass, one after another, and whether it is the last."""
        for number, metric in enumerate(self.metrics):
            measured = self._tape.measure(metric, values, self.inputs, self.narrow)
            yield measured, number == len(self.metrics) - 1

    def gradients(
        self, measured: Measured, values: Sequence[Tensor], *, is_last: bool = True
    ) -> tuple[Tensor, ...]:
        """A backward pass through the last forward pass, which costs it once for each input of a node."""
        inside, records, flops = frozenset(self.behind), self.shape.records, self.shape.costs.flops
        each = (
            max(1, sum(one in inside for one in records[name].inputs)) * flops(name) for name in self.behind
        )
        self.counts += Counts(0, 1, len(self.behind), sum(each))
        return self._tape.gradients(measured, values, is_last=is_last)

    def relevance(self, kind: type[Relevance] | None) -> Relevance | None:
        """The rules of a kind for what the metrics read, found once for a model."""
        if kind is None:
            return None
        known: dict[tuple[Any, ...], Relevance] = vars(self.model).setdefault(_RELEVANCE, {})
        key = kind.__name__, self.targets
        if key not in known:
            layers = self.model.site_table.model_layers
            attentions = [one for layer in layers for one in (layer.attention, layer.cross) if one]
            known[key] = kind(self.model.program, attentions, self.targets)
        return known[key]

    def count(self, evaluations: int) -> None:
        """Count nodes that were computed beside passes."""
        self.counts += Counts(node_evaluations=evaluations)

    def narrowed(self, kept: Collection[str]) -> Narrow | None:
        """Return the part of the metrics' output that suffices; None where all of it is computed."""
        narrow = self.narrowest
        if narrow is None or narrow.target in kept or self._batch.base._edits_at(narrow.target):
            return None
        return narrow

    def expect_apart(self, nodes: tuple[str, ...]) -> None:
        """Raise GradientError where prompts read each other: their gradients cannot be told apart."""
        if self.prompts == 1 or self.model.batch_is_fixed or is_rehearsal() or self.is_recording:
            return
        base, weights = self._batch.base, self.model.program.source_values
        if isinstance(base, InputRun) and not base.is_computed:
            base = InputRun(self.model, dict(base.inputs))  # what is asked once is not held after it
        with base.trusted():
            mixing = self.shape.mixing(
                nodes, lambda name: weights[name] if name in weights else base.demand(name)[0]
            )
        if mixing:
            raise GradientError(
                f"{mixing!r} mixes the prompts of a batch, so that a gradient is not of one prompt alone. "
                "Give the prompts one by one: a list of bases, and a list of sources."
            )

    def by_prompt(self, is_shared: bool, effects: Tensor) -> Tensor:
        """Effects [cell, prompt] as a metric has them: what one number for all prompts has is their sum."""
        return effects.sum(-1, keepdim=True).expand_as(effects) if is_shared else effects


class OnePass(ABC):
    """Effects by one recorded forward, and a backward pass for each metric.

    Its parts are apart, so that a device's work can be recorded: `forward` and `backward` compute on the
    device alone, `finish` on the host alone.
    """

    def __init__(self, work: Work, rules: type[Relevance] | None = None) -> None:
        self._work, self._relevance = work, work.relevance(rules)

    @property
    def is_apart(self) -> bool:
        """True if its parts can be told apart."""
        return True

    @abstractmethod
    def forward(self) -> Recorded:
        """Return the recorded values, once what backward passes read besides is computed."""

    @abstractmethod
    def wanted(self) -> list[Tensor]:
        """Return the recorded values by which is differentiated."""

    @abstractmethod
    def backward(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the numbers that effects are made of, given the gradients by what is `wanted`."""

    @abstractmethod
    def finish(self, numbers: Tensor) -> Tensor:
        """[cell, prompt] in float64, of the numbers on the host."""

    @abstractmethod
    def has_nan(self) -> Tensor:
        """True if what is put in has a NaN, which is refused."""

    def scored(self, gradients: Sequence[Tensor]) -> Tensor:
        """[cell, prompt] in float64, given the gradients by what is `wanted`."""
        return self.finish(self.backward(gradients).cpu())

    def effects(self) -> Tensor:
        """[metric, cell, prompt]."""
        values, rows = self.forward(), []
        for measured, is_last in self._work.measured(values):
            gradients = self._work.gradients(measured, self.wanted(), is_last=is_last)
            rows.append(self._work.by_prompt(measured.is_shared, self.scored(gradients)))
        return torch.stack(rows)


def narrowest(model: Captured, spec: SweepSpec, shape: ShapeFacts, tail: int) -> Narrow | None:
    """The least of the output that the metrics can do with; None where they need all of it.

    `tail` is how many of the last positions they read, where each reads one.
    """
    facts = facts_of(model)
    asked = readout(facts, spec, shape)
    if len(asked.targets) != 1 or any(metric.whole for metric in spec.metrics):
        return None
    (target,) = asked.targets
    if not is_product(target, facts, shape) or model.program.readers.get(target):
        return None
    layout, rows = shape.layout, shape.records[target].inputs[0]
    pos = layout.pos_dim.get(rows)
    has_tail = asked.last == asked.targets and pos is not None and pos != layout.batch_dim.get(rows)
    tokens = spec.tokens if asked.columns else ()
    if not has_tail and not tokens:
        return None
    return Narrow(target, (lambda name, value: layout.tail(name, value, tail)) if has_tail else None, tokens)
