"""Recurrences over positions, written out step by step: the states of a state-space model such as Mamba."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from conewise.anatomy.axes import Axis, View, view_of
from conewise.anatomy.wiring import Wiring
from conewise.program.records import ADDITIONS, NUMBER_KEEPING, Record, Ref

WRITE, READ = "ssm_write", "ssm_read"


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A state h that is computed position by position, h[t] = a[t]·h[t-1] + u[t], in a layer.

    `nodes` are the node of u (`ssm_write`) and of the weights with which the output reads each entry of the
    state (`ssm_read`), each with its view.
    """

    layer: int
    nodes: dict[str, tuple[str, View]]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step: what it adds is entry `at` along `dim` of `written`."""

    written: str
    dim: int
    at: int
    before: str
    state: str


def find_recurrences(wiring: Wiring) -> list[Recurrence]:
    """The recurrences whose steps are each a product and a sum, one in each numbered layer; in order."""
    chains: dict[tuple[str, int], list[_Step]] = {}
    for record in wiring.program.records:
        for step in _steps(wiring, record):
            chains.setdefault((step.written, step.dim), []).append(step)
    found = [one for steps in chains.values() if (one := _recurrence(wiring, steps)) is not None]
    count = Counter(one.layer for one in found)
    return [one for one in found if count[one.layer] == 1]


def _steps(wiring: Wiring, record: Record) -> Iterator[_Step]:
    """The step that a sum is, if it adds an entry to the product of a like entry with what was before."""
    if record.op not in ADDITIONS or len(record.inputs) != 2:
        return
    for added, carried in (record.inputs, record.inputs[::-1]):
        entry, product = wiring.records.get(added), wiring.records.get(carried)
        if entry is None or product is None or entry.op != "select" or product.op != "mul":
            continue
        for decay, before in (product.inputs, product.inputs[::-1]) if len(product.inputs) == 2 else ():
            factor = wiring.records.get(decay)
            if factor is not None and factor.op == "select" and factor.args[1:3] == entry.args[1:3]:
                dim, at = entry.args[1:3]
                yield _Step(entry.inputs[0], int(dim), int(at), before, record.name)


def _recurrence(wiring: Wiring, steps: list[_Step]) -> Recurrence | None:
    """The recurrence of steps that follow each other through all positions; None where they do not."""
    written, dim = steps[0].written, steps[0].dim
    shape, call = wiring.shape(written), _layer_of(wiring, written)
    follow = all(step.before == last.state for last, step in pairwise(steps))
    if (
        call is None
        or shape is None
        or len(shape) != 4
        or [step.at for step in steps] != list(range(len(steps)))
        or len(steps) < 2
        or shape[dim] != len(steps)
        or not follow
        or not _is_batch_first(wiring, written)
        or dim not in {1, 2}
    ):
        return None
    channel = 3 - dim
    names = {0: "batch", dim: "pos", channel: "channel", 3: "state"}
    read = _read_with(wiring, steps[0])
    if read is None:  # what is contracted is not known, and so not which axis is the state's
        return None
    sizes = wiring.program.sizes
    write = view_of(
        tuple((Axis(names[at], size),) for at, size in enumerate(shape)),
        ("batch", "pos", "channel", "state"),
        sizes,
    )
    nodes = {} if write is None else {WRITE: (written, write)}
    weights = wiring.shape(read)
    if weights is not None and len(weights) == 3 and weights[1:] == (shape[dim], shape[3]):
        plain = tuple((Axis(n, s),) for n, s in zip(("batch", "pos", "state"), weights, strict=True))
        view = view_of(plain, ("batch", "pos", "state"), sizes)
        if view is not None and _is_batch_first(wiring, read):
            nodes[READ] = (read, view)
    return Recurrence(call, nodes)


def _read_with(wiring: Wiring, step: _Step) -> str | None:
    """The value whose entry of a step multiplies its state, along the state's last axis; None if unclear."""
    waiting = [step.state]
    while waiting:
        name = waiting.pop()
        for reader in wiring.readers.get(name, ()):
            if reader.op in NUMBER_KEEPING:
                waiting.append(reader.name)
            factors = [arg.name for arg in reader.args if isinstance(arg, Ref)]
            if reader.op not in {"matmul", "bmm"} or factors[:1] != [name]:
                continue
            other = wiring.records.get(factors[1])
            while other is not None and other.op in NUMBER_KEEPING:
                other = wiring.records.get(other.inputs[0])
            if other is not None and other.op == "select" and other.args[1:3] == (1, step.at):
                return other.inputs[0]
    return None


def _is_batch_first(wiring: Wiring, name: str) -> bool:
    """True if the first dimension of a value is the batch, and nothing else is in it."""
    if not wiring.program.dimensions.batch:
        return not wiring.program.dimensions.is_unbatched
    placement = wiring.batch.of(name)
    return placement is not None and (placement.dim, placement.outer, placement.inner) == (0, 1, 1)


def _layer_of(wiring: Wiring, name: str) -> int | None:
    """The number of the outermost numbered module that computes a value."""
    ends = (call.path.rpartition(".")[2] for call in wiring.records[name].modules)
    return next((int(end) for end in ends if end.isdigit()), None)
