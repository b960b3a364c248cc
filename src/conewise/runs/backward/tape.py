"""A part of a run computed again under torch's autograd: metrics are differentiated by its values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch

from conewise.errors import ConewiseError, GradientError, MetricError
from conewise.locations.located import Located
from conewise.program.records import SIZES, Program, Record
from conewise.program.streaming import assembled, described_fields, field_names, output_names
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric, applied, applied_whole
from conewise.structure.axes.outputs import Outputs
from conewise.structure.relevance import Relevance

Tensor = torch.Tensor
Read = Callable[[str], Any]
Recorded = dict[str, Any]
"""Values of nodes, by name, as torch's autograd has recorded them."""

_OF_SHAPES = ("like", "new_zeros", "new_ones", "new_full", "new_empty")
"""Operations that read the shape of a value and not its numbers, by the ends of their names."""


class Applied(Protocol):
    """A patch that stands in a run."""

    @property
    def found(self) -> Located:
        """Where."""

    @property
    def part(self) -> Tensor | Callable[[Tensor], Tensor]:
        """What is there instead."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Some records read another name for a value, so that the gradient by what they alone read is known."""

    name: str
    value: str
    records: frozenset[str]


@dataclass(frozen=True, slots=True)
class Narrow:
    """How much of an output is computed: a product with a weight, of which metrics read a part alone.

    `tail` takes the last position of what `target` reads, where that is enough; `tokens` are the columns that
    are computed, where metrics read no others.
    """

    target: str
    tail: Callable[[str, Tensor], Tensor] | None
    tokens: tuple[int, ...] = ()

    def inputs(self, record: Record, inputs: Sequence[Any]) -> list[Any]:
        """What the product reads: its rows, and the rows of its weight."""
        rows, *weights = inputs
        if self.tail is not None:
            rows = self.tail(record.inputs[0], rows)
        if self.tokens:
            index = torch.tensor(self.tokens, device=weights[0].device)
            weights = [weight.index_select(0, index) for weight in weights]
        return [rows, *weights]

    def metric(self, metric: Metric) -> Metric:
        """The same metric, of the columns that there are."""
        if not self.tokens or metric.among is None:
            return metric
        return metric.among({token: at for at, token in enumerate(self.tokens)})


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric of recorded values, `numbers` [prompt]; `is_shared`: one number stands for all prompts."""

    metric: Metric
    numbers: Tensor
    is_shared: bool

    @property
    def total(self) -> Tensor:
        """The number whose gradients are those of each prompt: prompts do not read each other."""
        return self.numbers[0] if self.is_shared else self.numbers.sum()


class Tape:
    """Computes what lies behind some nodes of a run again, recorded.

    `read` gives the values of the run, `sizes` are its sizes, `standing(node)` the patches that stand in it.
    Weights are constants: nothing is recorded for their sake, and the module's parameters get no gradients.

    `is_fresh`: the run is not computed yet, and `read` knows its inputs, its sizes and the weights alone.
    Then all that is needed is computed, once, and recorded from the nodes on.
    """

    def __init__(
        self,
        model: Captured,
        read: Read,
        sizes: tuple[int, ...],
        standing: Callable[[str], Sequence[Applied]] = lambda _: (),
        *,
        is_fresh: bool = False,
    ) -> None:
        self.model, self.sizes, self.is_fresh = model, sizes, is_fresh
        self._read, self._standing = read, standing
        self._program: Program = model.program
        self._rules, self._number = model.graph.table.rules, model.graph.number
        self._outputs = Outputs(model.program)

    def value(self, node: str) -> Any:
        """The value of a node in the run."""
        return self._read(node)

    def record(
        self,
        nodes: Collection[str],
        targets: Collection[str],
        *,
        given: Mapping[str, Tensor] = MappingProxyType({}),
        branches: Sequence[Branch] = (),
        keep: Collection[str] = (),
        narrow: Narrow | None = None,
        relevance: Relevance | None = None,
    ) -> Recorded:
        """The values of `nodes`, `targets` and `keep`, and of the names of `branches`.

        `given` are other values than the run's for some of `nodes`; these are constants then, whatever lies
        in front of them. Of the target of `narrow` a part alone is computed. With `relevance` what is
        recorded is that, by its rules. Raises GradientError where a node's value has no gradient.
        """
        wanted = {*nodes, *targets, *keep}
        behind = self.model.behind(nodes, wanted)
        again = frozenset(behind) - given.keys()
        order = self._order(wanted, given) if self.is_fresh else behind
        reads: dict[tuple[str, str], str] = {
            (record, branch.value): branch.name for branch in branches for record in branch.records
        }
        by_value: dict[str, list[str]] = {}
        for branch in branches:
            by_value.setdefault(branch.value, []).append(branch.name)
        values: Recorded = {}
        begins = {name for name in nodes if name not in again}

        def note(name: str, value: Any) -> None:
            values[name] = value
            for other in by_value.get(name, ()):
                values[other] = value.view_as(value)

        entries = {} if relevance is None else relevance.entries
        last = self._last_reads(order, wanted, entries)
        computed = frozenset(order)
        with torch.enable_grad():
            for name in (*nodes, *given):
                if name not in again and name not in values and (name in given or name not in computed):
                    note(name, self._leaf(name, given[name] if name in given else self._read(name)))
            for name in order:
                if name not in values:
                    record = self._program.record_of[name]
                    inputs = [self._input(values, reads.get((name, i), i)) for i in record.inputs]
                    if narrow is not None and name == narrow.target:
                        inputs = narrow.inputs(record, inputs)
                    if relevance is None or name not in relevance.rules:
                        value = self._computed(record, inputs)
                    else:
                        entry = self._input(values, entries[name]) if name in entries else None
                        value = self._edited(record, relevance.rules[name](self._rule(name), inputs, entry))
                    note(name, self._leaf(name, value) if name in begins else value)
                    del inputs, value
                for done in last.get(name, ()):
                    values.pop(done, None)
        for name in (*targets, *keep):
            if name not in values:
                values[name] = self._input(values, name)
        return values

    def _order(self, wanted: Collection[str], given: Collection[str]) -> tuple[str, ...]:
        """All records that are computed for some values of a run of which nothing is known, in order."""
        graph = self.model.graph
        needed = self.model.support(tuple(sorted(wanted)), tuple(given))
        order = graph.table.sorted(node for node in needed if graph.table.rules[node] is not None)
        return tuple(name for name in graph.names(order) if name not in given)

    def _last_reads(
        self, behind: Sequence[str], wanted: Collection[str], entries: Mapping[str, str]
    ) -> dict[str, list[str]]:
        """Values that nothing reads any more, by the record that read them last.

        `entries` are what some records read beside their inputs.
        """
        last: dict[str, str] = {}
        for name in behind:
            last |= dict.fromkeys(self._program.record_of[name].inputs, name)
            if name in entries:
                last[entries[name]] = name
        computed = frozenset(behind) - set(wanted)
        done: dict[str, list[str]] = {}
        for name, reader in last.items():
            if name in computed:
                done.setdefault(reader, []).append(name)
        return done

    def _leaf(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            held = str(value.dtype) if isinstance(value, Tensor) else "several tensors"
            raise GradientError(
                f"{name!r} holds {held}, by which nothing can be differentiated. Ask for gradients by sites "
                "that hold floating-point numbers."
            )
        return value.detach().requires_grad_()

    def _input(self, values: Recorded, name: str) -> Any:
        if name in values:
            return values[name]
        if name == SIZES:
            return self.sizes
        value = self._read(name)
        return value.detach() if isinstance(value, Tensor) and value.requires_grad else value

    def _computed(self, record: Record, inputs: Sequence[Any]) -> Any:
        try:
            value = self._rule(record.name)(*inputs)
        except (RuntimeError, NotImplementedError) as error:
            raise GradientError(f"{_described(record)} cannot be recorded for gradients: {error}") from error
        if isinstance(value, Tensor):
            if any(value is one for one in inputs):
                value = value.view_as(value)  # a value of its own, with a gradient of its own
            if value.is_floating_point() and not value.requires_grad and _depends(record, inputs):
                raise GradientError(
                    f"{_described(record)} has no derivative: what lies in front of it has no "
                    "gradient. Attribute to sites behind it, or sweep exactly."
                )
        return self._edited(record, value)

    def _rule(self, name: str) -> Callable[..., Any]:
        rule = self._rules[self._number(name)]
        assert rule is not None
        return rule

    def _edited(self, record: Record, value: Any) -> Any:
        """A record's value with the patches that stand there."""
        for edit in self._standing(record.name):
            if edit.found.result is not None:
                raise GradientError(
                    f"{record.name!r} is computed under a patch of 'result', through which no gradients are "
                    "known. Patch 'z' in its place."
                )
            present = edit.found.read(value, self.sizes)
            part = edit.part if isinstance(edit.part, Tensor) else edit.part(present.clone())
            value = edit.found.view.replace(value, edit.found.part, part, self.sizes)
        return value

    # -- metrics -------------------------------------------------------------------------------

    def targets(self, metric: Metric) -> tuple[str, ...]:
        """The nodes that a metric reads. Raises MetricError for an output that is not there."""
        program = self._program
        everything = output_names(program)
        if metric.whole:
            return everything
        named = field_names(program, metric.output) or everything
        if len(named) != 1:
            raise MetricError(
                f"the metric {metric.name!r} reads {metric.output!r}, and the model's outputs are "
                f"{described_fields(program)}."
            )
        return named

    def measure(
        self, metric: Metric, values: Recorded, inputs: Mapping[str, Tensor], narrow: Narrow | None = None
    ) -> Measured:
        """A metric of recorded values. Raises GradientError where it is no function that torch records.

        `narrow` is how much of its output was computed.
        """
        with torch.enable_grad(), _naming(metric):
            numbers, is_shared = self.applied(metric, values, inputs, narrow)
        targets = self.targets(metric)
        if not numbers.requires_grad and any(_is_recorded(values[name]) for name in targets):
            raise GradientError(
                f"the metric {metric.name!r} has no gradient: it leaves torch, or is constant around the "
                "outputs (a rank, a comparison). Compute it by differentiable functions of the outputs."
            )
        return Measured(metric, numbers, is_shared)

    def applied(
        self, metric: Metric, values: Recorded, inputs: Mapping[str, Tensor], narrow: Narrow | None = None
    ) -> tuple[Tensor, bool]:
        """A metric of values, [prompt], and whether it is one number for all prompts."""
        prompts, targets = self._outputs.prompts(inputs), self.targets(metric)
        if metric.whole:
            found = metric.compute(assembled(self._program, values, self.sizes))
            is_shared = not isinstance(found, Tensor) or found.ndim == 0
            return applied_whole(replace(metric, compute=lambda _: found), None, prompts)[0], is_shared
        stack = self._outputs.arranged(targets[0], values[targets[0]], 1, prompts)
        return applied(metric if narrow is None else narrow.metric(metric), stack)[0], False

    def gradients(
        self, measured: Measured, values: Sequence[Tensor], *, is_last: bool = True
    ) -> tuple[Tensor, ...]:
        """The gradients of a metric by recorded values; zeros by those that it does not depend on.

        `is_last`: nothing is differentiated through this record again.
        """
        if not measured.numbers.requires_grad:
            return tuple(torch.zeros_like(value) for value in values)
        with _naming(measured.metric):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                measured.total, list(values), allow_unused=True, retain_graph=not is_last
            )
        return tuple(
            torch.zeros_like(value) if one is None else one for one, value in zip(found, values, strict=True)
        )


@contextmanager
def _naming(metric: Metric) -> Iterator[None]:
    """Errors of torch as an error that says which metric was differentiated."""
    try:
        yield
    except ConewiseError:
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise GradientError(f"the metric {metric.name!r} cannot be differentiated: {error}") from error


def _is_recorded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _depends(record: Record, inputs: Sequence[Any]) -> bool:
    """Whether an operation reads the numbers of a recorded value."""
    return any(map(_is_recorded, inputs)) and not record.op.endswith(_OF_SHAPES)


def _described(record: Record) -> str:
    where = f", {record.modules[-1]}" if record.modules and str(record.modules[-1]) else ""
    return f"{record.name!r} ({record.op}{where})"
