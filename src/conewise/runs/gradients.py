"""Gradients of a metric by the sites of a run, under torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import EdgePlace, Place, as_place
from conewise.anatomy.selectors import SelectorLike, as_selectors
from conewise.anatomy.sites import Located
from conewise.attributing.relevance import Relevance
from conewise.errors import ConewiseError, GradientError, MissingSiteError
from conewise.program.records import SIZES, Program, Record
from conewise.program.tensors import Tensor, recordable, recording
from conewise.program.walk import Read, WalkStep, assembled, plan_walk
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric, applied, at_run, expect_prompts, nodes_read
from conewise.runs.spreading import spread
from conewise.runs.values import Edit, applied_in_turn

Recorded = dict[str, Any]
"""Values of nodes, by name, as torch's autograd has recorded them."""

_OF_SHAPES = ("like", "new_zeros", "new_ones", "new_full", "new_empty")
"""Operations that read the shape of a value and not its numbers, by the ends of their names."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Some records read another name for a value, so that the gradient by what they alone read is known."""

    name: str
    value: str
    records: frozenset[str]


@dataclass(frozen=True, slots=True)
class Narrow:
    """The computed part of an output: a product with a weight, of which metrics read a part alone.

    `tail` takes the last positions of what `target` reads, where that is enough; `tokens` are the columns
    that are computed, where metrics read no others; `columns` are the same where they lie on the device.
    """

    target: str
    tail: Callable[[str, Tensor], Tensor] | None
    tokens: tuple[int, ...] = ()
    columns: Tensor | None = None

    def inputs(self, record: Record, inputs: Sequence[Any]) -> list[Any]:
        """Return what the product reads: its rows, and the rows of its weight."""
        rows, *weights = inputs
        if self.tail is not None:
            rows = self.tail(record.inputs[0], rows).contiguous()  # rows that lie together are one product
        if self.tokens:
            index = self.columns
            if index is None:
                index = torch.tensor(self.tokens, device=weights[0].device)
            weights = [weight.index_select(0, index) for weight in weights]
        return [rows, *weights]

    def metric(self, metric: Metric) -> Metric:
        """The same metric, of the columns that there are."""
        if not self.tokens or metric.among is None:
            return metric
        columns = {token: at for at, token in enumerate(self.tokens)}
        return replace(metric.among(columns), behind=metric.behind)


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
        standing: Callable[[str], Sequence[Edit]] = lambda _: (),
        *,
        is_fresh: bool = False,
    ) -> None:
        model.expect_program("compute gradients")
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
        other = {(record, one.value): one.name for one in branches for record in one.records}
        entries = {} if relevance is None else relevance.entries
        by_value: dict[str, list[str]] = {}
        for branch in branches:
            by_value.setdefault(branch.value, []).append(branch.name)
        begins = {name for name in nodes if name not in again}
        values: Recorded = {}

        def noted(name: str, value: Any) -> Any:
            values.update({one: value.view_as(value) for one in by_value.get(name, ())})
            return value

        def compute(step: WalkStep, operands: list[Any], _: Recorded) -> Any:
            name, record = step.node, self._program.record_of[step.node]
            if narrow is not None and name == narrow.target:
                operands = narrow.inputs(record, operands)
            if relevance is None or name not in relevance.rules:
                value = self._computed(record, operands)
            else:
                entry = self._input(values, entries[name]) if name in entries else None
                value = self._edited(record, relevance.rules[name](step.rule, operands, entry))
            return noted(name, self._leaf(name, value) if name in begins else value)

        computed = frozenset(order)
        with recording():
            for name in (*nodes, *given):
                if name not in again and name not in values and (name in given or name not in computed):
                    value = given[name] if name in given else self._read(name)
                    values[name] = noted(name, self._leaf(name, value))
            steps = (
                (name, tuple(other.get((name, one), one) for one in self._program.record_of[name].inputs))
                for name in order
                if name not in values
            )
            walk = plan_walk(
                ((name, inputs, self._rule(name)) for name, inputs in steps), wanted, also_reads=entries
            )
            walk.run(values, lambda name: self._input(values, name), compute)
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

    def _leaf(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            held = str(value.dtype) if isinstance(value, Tensor) else "several tensors"
            raise GradientError(
                f"{name!r} holds {held}, by which nothing can be differentiated. Ask for gradients by sites "
                "that hold floating-point numbers."
            )
        leaf: Tensor = recordable(value).detach()
        return leaf.requires_grad_()

    def _input(self, values: Recorded, name: str) -> Any:
        if name in values:
            return values[name]
        if name == SIZES:
            return self.sizes
        value = recordable(self._read(name))
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
        edits = self._standing(record.name)
        if any(edit.found.result is not None for edit in edits):
            raise GradientError(
                f"{record.name!r} is computed under a patch of 'result', through which no gradients are "
                "known. Patch 'z' in its place."
            )
        return applied_in_turn(edits, value, self.sizes)

    # -- metrics -------------------------------------------------------------------------------

    def measure(
        self, metric: Metric, values: Recorded, inputs: Mapping[str, Tensor], narrow: Narrow | None = None
    ) -> Measured:
        """A metric of recorded values. Raises GradientError where it is no function that torch records.

        `narrow` is how much of its output was computed.
        """
        with recording(), _naming(metric):
            numbers, is_shared = self.applied(metric, values, inputs, narrow)
        targets = nodes_read(self._program, metric)
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
        prompts, target = self._outputs.prompts(inputs), nodes_read(self._program, metric)[0]
        metric, returned = at_run(metric, self.model, inputs, target), list[Any]()
        if narrow is not None and metric.is_of_output:
            metric = narrow.metric(metric)

        def compute(*given: Any) -> Any:
            returned.append(metric.compute(*given))
            return returned[0]

        numbers = applied(
            replace(metric, compute=compute),
            prompts,
            self._outputs.arranged(target, values[target], 1, prompts) if metric.is_of_output else None,
            lambda one: one.view.present(values[one.node], self.sizes)[None],
            assembled(self._program, values, self.sizes) if metric.whole else None,
        )[0]
        if numbers.ndim > 1:
            raise GradientError(
                f"the metric {metric.name!r} is {numbers[0].numel()} numbers, and gradients are of one. "
                "Say which (`cw.site(..., latent=7)`), or give a direction: `cw.read(site, direction=v)`."
            )
        return numbers, metric.whole and not getattr(returned[0], "ndim", 0)

    def gradients(
        self, measured: Measured, values: Sequence[Tensor], *, is_last: bool = True
    ) -> tuple[Tensor, ...]:
        """The gradients of a metric by recorded values; zeros by those that it does not depend on.

        `is_last`: nothing is differentiated through this record again.
        """
        if not measured.numbers.requires_grad:
            return tuple(torch.zeros_like(value) for value in values)
        with recording(), _naming(measured.metric):
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
    """True if an operation reads the numbers of a recorded value."""
    return any(map(_is_recorded, inputs)) and not record.op.endswith(_OF_SHAPES)


def _described(record: Record) -> str:
    where = f", {record.modules[-1]}" if record.modules and str(record.modules[-1]) else ""
    return f"{record.name!r} ({record.op}{where})"


class Gradients(Mapping[Place, Tensor]):
    """Gradients of one metric, by place: `gradients["z", 2]`, `gradients[cw.site("z", layer=2, head=1)]`.

    Each has the natural axes of its place, minus those that it selects by a number. `metric` is the metric's
    name, `numbers` its values, [prompt].
    """

    def __init__(self, metric: str, numbers: Tensor, found: Mapping[Place, Tensor]) -> None:
        self.metric, self.numbers, self._found = metric, numbers, dict(found)

    def __getitem__(self, place: object) -> Tensor:
        """The gradient by one of the places that were asked for."""
        place = as_place(place)
        if place not in self._found:
            known = [str(one) for one in self._found]
            shown = ", ".join(known if len(known) <= 4 else [*known[:3], "..."])
            raise MissingSiteError(
                f"no gradient by {place}: those by {len(known)} places are known ({shown})."
            )
        return self._found[place]

    def __contains__(self, place: object) -> bool:
        return as_place(place) in self._found

    def __iter__(self) -> Iterator[Place]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Gradients of {self.metric} by {len(self)} places"


def gradients_of(tape: Tape, metric: Metric, sites: SelectorLike, inputs: Mapping[str, Tensor]) -> Gradients:
    """The gradients of a metric by every place of `sites`."""
    model = tape.model
    expect_prompts(metric, Outputs(model.program).prompts(inputs), "this run")
    cells = spread(as_selectors(sites), model, [lambda found: lengths_of(tape, found)]).cells
    located = located_places(model, (place for cell in cells for place in cell.places))
    nodes = tuple(dict.fromkeys(node_of(found) for found in located.values()))
    values = tape.record(nodes, nodes_read(tape.model.program, metric))
    measured = tape.measure(metric, values, inputs)
    by_node = dict(zip(nodes, tape.gradients(measured, [values[node] for node in nodes]), strict=True))
    shown = {
        place: found.view.read(shown_gradient(tape, found, by_node[node_of(found)]), found.part, tape.sizes)
        for place, found in located.items()
    }
    return Gradients(metric.name, measured.numbers.detach(), shown)


def located_places(model: Captured, places: Iterable[Place]) -> dict[Place, Located]:
    """Every place once, found in the model. Raises MissingSiteError for an edge, which is no site."""
    found: dict[Place, Located] = {}
    for place in places:
        if isinstance(place, EdgePlace):
            raise MissingSiteError(
                f"{place} is an edge, and gradients are by sites. Attribute to edges with "
                "`model.attribute(edges, ..., method='eap')`."
            )
        if place not in found:
            found[place] = model.locate(place)
    return found


def node_of(found: Located) -> str:
    """The node by whose value is differentiated: for `result` the sum of all heads' shares."""
    return found.node if found.result is None else found.result.projection.name


def lengths_of(tape: Tape, found: Located) -> dict[str, int]:
    """The lengths of the natural axes of a site."""
    view = found.view if found.result is None else found.z_view
    shape = view.present(tape.value(found.node), tape.sizes).shape
    lengths = dict(zip(view.axes, shape, strict=True))
    if found.result is not None:
        lengths["d_model"] = tape.value(found.result.projection.name).shape[-1]
    return {axis: lengths[axis] for axis in found.view.axes}


def shown_gradient(tape: Tape, found: Located, gradient: Tensor) -> Tensor:
    """The gradient by a node's value as the site's view reads it; the shares of heads all have the sum's."""
    if found.result is None:
        return gradient
    lengths = lengths_of(tape, found)
    batch, pos, heads, width = (lengths[axis] for axis in ("batch", "pos", "head", "d_model"))
    if found.result.is_pos_first:
        by_pos = gradient.reshape(pos, batch, width).transpose(0, 1)
    else:
        by_pos = gradient.reshape(batch, pos, width)
    return by_pos.unsqueeze(2).expand(batch, pos, heads, width)
