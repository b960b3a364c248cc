"""The changes that a patch makes to a reverse pass, counted on a run and as a graph with gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from conewise.anatomy.placements import Outputs
from conewise.anatomy.selectors import SelectorLike, as_selectors
from conewise.errors import GradientError, MissingSiteError
from conewise.paper.theory.backward import ReverseCost, reverse_cost, sites_with_gradients
from conewise.program.records import SIZES
from conewise.program.tensors import Tensor, recordable, recording
from conewise.program.walk import compile_rule, form_of
from conewise.reactive.gradients import GRADIENT, OUTPUT, Read, Vjp
from conewise.reactive.graph import Graph
from conewise.runs.gradients import Tape, lengths_of, located_places, node_of
from conewise.runs.metrics import Metric, expect_prompts, nodes_read
from conewise.runs.spreading import spread
from conewise.templates import aligned, table

Rule = Callable[..., Any]
REFUSED = ("cannot have requires_grad True", "Autograd not support dtype")
"""Torch's messages where there is no gradient by an input: an average beside the weights, whole numbers."""


class Parts(tuple[Any, ...]):
    """The gradient of a value that is several tensors: one for each, None where nothing flows."""

    __slots__ = ()

    def __add__(self, other: object) -> Parts:
        """Part by part, and not one behind the other."""
        assert isinstance(other, Parts)
        return Parts(b if a is None else a if b is None else a + b for a, b in zip(self, other, strict=True))


class TorchRule:
    """A rule over tensors, whose vector-Jacobian products are those of torch's autograd.

    What they read is found out on `values`, one for each input, and holds for values of their shapes.
    """

    def __init__(
        self, rule: Rule, values: Sequence[Any], reads: Sequence[tuple[Read, ...] | None] | None = None
    ) -> None:
        self.rule = rule
        self.reads = tuple(reads_of(rule, values) if reads is None else reads)
        self.vjps = tuple(
            None if found is None else Vjp(_product(rule, index, found, values), found)
            for index, found in enumerate(self.reads)
        )

    def __call__(self, *values: Any) -> Any:
        """Compute the rule."""
        return self.rule(*values)


def reads_of(rule: Rule, values: Sequence[Any]) -> list[tuple[Read, ...] | None]:
    """For each input what the product towards it reads; None where it has no gradient."""
    return [_reads(rule, values, index) for index in range(len(values))]


def _reads(rule: Rule, values: Sequence[Any], index: int) -> tuple[Read, ...] | None:
    if not any(_is_differentiable(tensor) for tensor in _tensors(values[index])):
        return None
    copies = [_copied(value) for value in values]
    try:
        output, saved = _recorded(rule, copies, index)
    except RuntimeError as error:
        if any(reason in str(error) for reason in REFUSED):
            return None
        raise
    if not any(tensor.requires_grad for tensor in _tensors(output)):
        return None
    owners: dict[int, Read] = {_place(tensor): OUTPUT for tensor in _tensors(output)}
    owners |= {_place(tensor): at for at, value in enumerate(copies) for tensor in _tensors(value)}
    found = {owners[_place(tensor)] for tensor in saved if _place(tensor) in owners}
    if made := [at for at, tensor in enumerate(saved) if _place(tensor) not in owners and tensor.numel()]:
        found |= {other for other in range(len(values)) if _changes(rule, values, index, other, saved, made)}
    return (GRADIENT, *sorted(found, key=lambda read: (isinstance(read, str), read)))


def _changes(
    rule: Rule, values: Sequence[Any], index: int, other: int, saved: Sequence[Tensor], made: Sequence[int]
) -> bool:
    """True if something that is made on the way depends on another input."""
    if not any(_is_differentiable(tensor) for tensor in _tensors(values[other])):
        return False
    for change in (torch.neg, _random):
        copies = [_copied(value, change if at == other else None) for at, value in enumerate(values)]
        _, again = _recorded(rule, copies, index)
        if len(again) != len(saved) or any(not _same(saved[at], again[at]) for at in made):
            return True
    return False


def _recorded(rule: Rule, values: list[Any], index: int) -> tuple[Any, list[Tensor]]:
    """Return a rule's output, and what is saved for its gradient by one input."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    values[index] = _leaf(values[index])
    with recording(), saved_tensors_hooks(pack, lambda tensor: tensor):
        return rule(*values), saved


def _product(rule: Rule, index: int, reads: tuple[Read, ...], values: Sequence[Any]) -> Callable[..., Any]:
    """The gradient by one input, as a function of what it reads; every other number is NaN in it."""

    def product(*given: Any) -> Any:
        known = dict(zip(reads, given, strict=True))
        inputs = [known[at] if at in known else _unreadable(value) for at, value in enumerate(values)]
        leaf = inputs[index] = _leaf(inputs[index])
        output: Any = None

        def unpack(tensor: Tensor) -> Tensor:
            """The output is the one that is given: a patch may stand there."""
            if OUTPUT in known:
                for own, patched in zip(_tensors(output), _tensors(known[OUTPUT]), strict=True):
                    if _place(tensor) == _place(own) and tensor.shape == own.shape:
                        return patched.detach()
            return tensor

        with recording(), saved_tensors_hooks(lambda tensor: tensor, unpack):
            output = rule(*inputs)
            return _pulled_back(output, leaf, known[GRADIENT])

    return product


def _pulled_back(output: Any, leaf: Any, gradient: Any) -> Any:
    """The gradient by a leaf, or by each of several."""
    gradients = gradient if isinstance(gradient, Parts) else (gradient,)
    pairs = [
        (tensor, torch.as_tensor(one, dtype=tensor.dtype, device=tensor.device).expand_as(tensor))
        for tensor, one in zip(_tensors(output), gradients, strict=True)
        if one is not None and tensor.requires_grad
    ]
    leaves = [tensor for tensor in _tensors(leaf) if tensor.requires_grad]
    found: Sequence[Tensor | None] = (
        torch.autograd.grad(
            [tensor for tensor, _ in pairs], leaves, [one for _, one in pairs], allow_unused=True
        )
        if pairs
        else [None] * len(leaves)
    )
    if isinstance(leaf, Tensor):
        (only,) = found
        return torch.zeros_like(leaf) if only is None else only
    remaining = iter(found)
    return Parts(next(remaining) if tensor.requires_grad else None for tensor in _tensors(leaf))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(one, change) for one in value) if isinstance(value, tuple | list) else value


def _copied(value: Any, change: Callable[[Tensor], Tensor] | None = None) -> Any:
    """A copy that shares memory with nothing else; its numbers changed, where they are any."""
    return _mapped(value, lambda one: (change(one) if change and _is_differentiable(one) else one).clone())


def _leaf(value: Any) -> Any:
    def leaf(tensor: Tensor) -> Tensor:
        found: Tensor = recordable(tensor).detach()
        return found.requires_grad_() if _is_differentiable(found) else found

    return _mapped(value, leaf)


def _unreadable(value: Any) -> Any:
    return _mapped(value, lambda one: torch.full_like(one, torch.nan) if _is_differentiable(one) else one)


def _random(tensor: Tensor) -> Tensor:
    generator = torch.Generator(tensor.device).manual_seed(tensor.numel())
    return torch.empty_like(tensor).normal_(generator=generator)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


METRIC = "$metric"
"""The name of the node that stands for the metric."""


@dataclass(frozen=True, slots=True)
class ReverseGraph:
    """A graph of what a metric depends on, `METRIC` last; names are those of the program."""

    graph: Graph
    parameters: tuple[str, ...]


def reverse_graph(tape: Tape, metric: Metric, inputs: Mapping[str, Tensor]) -> ReverseGraph:
    """The graph of a run under a metric; every rule has vector-Jacobian products by torch's autograd."""
    model, program = tape.model, tape.model.program
    targets = nodes_read(tape.model.program, metric)
    needed = set(model.graph.names(model.support(tuple(sorted(set(targets))))))
    graph, known = Graph(), dict[Hashable, list[tuple[Read, ...] | None]]()

    def value(name: str) -> Any:
        return tape.sizes if name == SIZES else tape.value(name)

    for node in model.graph:
        if node.site not in needed:
            continue
        if model.graph.is_source(node.site):
            graph.source(node.site, value(node.site))
            continue
        record = program.record_of[node.site]
        rule, values = compile_rule(record), [value(name) for name in node.inputs]
        target, code, constants = form_of(record)
        key = (target, code, repr(constants), *map(_form, values))
        if key not in known:
            try:
                known[key] = reads_of(rule, values)
            except (RuntimeError, NotImplementedError) as error:
                raise GradientError(
                    f"what the gradient of {record.name!r} ({record.op}) reads cannot be found out: {error}"
                ) from error
        graph.node(node.site, TorchRule(rule, values, known[key]), node.inputs)

    graph.node(METRIC, _measured(tape, metric, targets, inputs), targets)
    parameters = tuple(one.name for one in program.sources if one.is_parameter and one.name in graph)
    return ReverseGraph(graph, parameters)


def _measured(
    tape: Tape, metric: Metric, targets: tuple[str, ...], inputs: Mapping[str, Tensor]
) -> TorchRule:
    """The metric as a rule over the outputs. Raises GradientError where it has no gradient by any of them."""
    outputs = [tape.value(name) for name in targets]

    def rule(*values: Any) -> Any:
        return tape.measure(metric, dict(zip(targets, values, strict=True)), inputs).total

    def or_no_gradient(*values: Any) -> Any:
        try:
            return rule(*values)
        except GradientError:  # by this output alone: another one is what it reads
            return torch.zeros(())

    rule(*(one.detach().requires_grad_(one.is_floating_point()) for one in outputs))
    return TorchRule(rule, outputs, reads_of(or_no_gradient, outputs))


def _form(value: Any) -> Hashable:
    """Return what of a value decides which numbers a gradient reads: all but its numbers."""
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


@dataclass(frozen=True, slots=True)
class Stale:
    """The nodes that a patch makes stale: of the forward pass, of the reverse pass, and its share of that."""

    forward: int
    backward: int
    share: Fraction


class BackwardCost(Mapping[str, Stale]):
    """The counts of what patches make stale of a metric and of its gradients, by the name of their cells.

    `forward` and `backward` are the nodes of full passes: a node of the reverse pass is what flows along one
    edge, or the sum where several meet. `share` is the part of the reverse pass that a patch makes stale, on
    average; `ratio` full passes over what is computed again, and `forward_ratio` the same of the forward pass
    alone. Counted from the graph, and from what torch saves for each operation's gradient.
    """

    def __init__(self, metric: str, by: str, names: tuple[str, ...], cost: ReverseCost) -> None:
        self.metric, self.by, self.names, self.cost = metric, by, names, cost
        self.forward, self.backward, self.share = cost.forward, cost.backward, cost.share
        self.ratio, self.forward_ratio = cost.ratio, cost.forward_ratio
        counts = zip(cost.stale_forward, cost.stale_backward, cost.shares, strict=True)
        self._found = dict(zip(names, (Stale(*one) for one in counts), strict=True))

    def __getitem__(self, cell: str) -> Stale:
        """Return what the patch of one cell makes stale."""
        if str(cell) not in self._found:
            raise MissingSiteError(
                f"no patch at {cell} was counted: those at {len(self)} cells were, {self.names[0]} the first."
            )
        return self._found[str(cell)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def rows(self) -> list[tuple[str, str]]:
        """The counts as lines of a table."""
        least, most = min(self.cost.shares), max(self.cost.shares)
        spent = sum(self.cost.stale_forward) / len(self) / self.forward
        return [
            ("reverse pass", f"of {self.metric} by {self.by}: {self.backward:,} nodes"),
            ("forward pass", f"{self.forward:,} nodes"),
            ("patches", f"{len(self):,}"),
            (
                "stale of the reverse pass",
                f"{float(self.share):.1%} ({float(least):.1%} to {float(most):.1%})",
            ),
            ("stale of the forward pass", f"{spent:.1%}"),
            (
                "full passes over the sweep",
                f"{float(self.ratio):.3f} (forward alone {float(self.forward_ratio):.3f})",
            ),
        ]

    def __str__(self) -> str:
        return "\n".join(aligned(self.rows()))

    def __repr__(self) -> str:
        return (
            f"BackwardCost of {len(self):,} patches: {float(self.share):.1%} of a reverse pass of "
            f"{self.backward:,} nodes, ρ = {float(self.ratio):.3f}"
        )

    def _repr_html_(self) -> str:
        return table(self.rows())


def backward_cost_of(
    tape: Tape, metric: Metric, sites: SelectorLike, inputs: Mapping[str, Tensor], *, weights: bool
) -> BackwardCost:
    """Count what a patch of each cell of `sites` makes stale, by the gradients by them, or by the weights."""
    expect_prompts(metric, Outputs(tape.model.program).prompts(inputs), "this run")
    found = spread(as_selectors(sites), tape.model, [lambda one: lengths_of(tape, one)])
    located = located_places(tape.model, (place for places in found.places for place in places))
    patches = [sorted({node_of(located[place]) for place in places}) for places in found.places]
    both = reverse_graph(tape, metric, inputs)
    behind = sites_with_gradients(both.graph, METRIC)
    nodes = dict.fromkeys(both.parameters if weights else (node for patch in patches for node in patch))
    wrt = [node for node in nodes if node in behind]
    for name, patch in zip(found.names, patches, strict=True):
        if not weights and behind.isdisjoint(patch):
            raise GradientError(
                f"the metric {metric.name!r} has no gradient by {name}: it does not depend on it, or what "
                "lies between has no derivative. Leave it out."
            )
    if not wrt:
        raise GradientError(f"the metric {metric.name!r} has no gradient by any weight of the model.")
    cost = reverse_cost(both.graph, [[n for n in one if n in both.graph] for one in patches], METRIC, wrt)
    by = f"{len(wrt):,} {'weights' if weights else 'values'}"
    return BackwardCost(metric.name, by, found.names, cost)
