"""A run and a metric as a graph whose rules know their gradients: what `gradients` and the theory take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conewise.errors import GradientError
from conewise.program.records import SIZES
from conewise.program.rules import compile_rule, form_of
from conewise.program.tensors import Tensor
from conewise.reactive.graph import Graph
from conewise.reactive.vjp import Read
from conewise.runs.backward.products import TorchRule, reads_of
from conewise.runs.backward.tape import Tape
from conewise.runs.metrics import Metric, nodes_read

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
    """What of a value decides which numbers a gradient reads: all but its numbers."""
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value
