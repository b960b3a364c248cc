"""What metrics read of a run: the nodes, and how much of each has to be computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conewise.program.tensors import Tensor
from conewise.runs.metrics import Metric, most_behind
from conewise.sweeps.planning.model_facts import ModelFacts
from conewise.sweeps.planning.shapes.shape_facts import ShapeFacts
from conewise.sweeps.planning.spec import SweepSpec


@dataclass(frozen=True, slots=True)
class ReadOut:
    """How metrics read: the nodes, whether the last position alone, how many columns of a product.

    `taken` has what each metric takes for one number of what it reads, in bytes; see `Metric.copies`.
    """

    targets: tuple[str, ...]
    last: bool
    columns: tuple[tuple[str, int], ...] = ()
    taken: tuple[tuple[str, bool, int], ...] = ()


def readout(facts: ModelFacts, spec: SweepSpec, shape: ShapeFacts) -> ReadOut:
    """What the metrics of a spec read of runs of one shape."""
    targets = facts.targets(spec.metrics)
    columns: tuple[tuple[str, int], ...] = ()
    if len(targets) == 1 and spec.reads_few_tokens and is_product(targets[0], facts, shape):
        columns = ((targets[0], len(spec.tokens)),)
    taken = tuple(
        (facts.target(metric), metric.last, metric.copies)
        for metric in spec.metrics
        if not metric.whole and metric.copies
    )
    last = spec.reads_last(lambda metric: facts.read.has_last(facts.target(metric)))
    return ReadOut(targets, last, columns, taken)


def tail_of(facts: ModelFacts, metrics: Sequence[Metric], inputs: Mapping[str, Tensor]) -> int:
    """How many of the last positions metrics read of a run that read one each."""
    read = (most_behind(one, facts.program, inputs, facts.target(one)) for one in metrics)
    return 1 + max(read, default=0)


def is_product(target: str, facts: ModelFacts, shape: ShapeFacts) -> bool:
    """Whether an output is a product with a weight, of which a few columns can be computed alone."""
    record = shape.records.get(target)
    return (
        record is not None
        and record.op == "linear"
        and len(record.inputs) == len(record.args)
        and shape.layout.varying.isdisjoint(record.inputs[1:])
        and facts.read.ends_in_tokens(target)
    )
