"""Affine walks: the records between some values and another one, as far as these are affine in the values.

A norm is affine once its scale is given. So a value that is made of the starts by other than affine steps may
still be a factor, where it is one number for all features: its value is then read off a run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from conewise.program.operations import (
    ADDITIONS,
    CONCATENATIONS,
    CONTRACTIONS,
    NORMS,
    NUMBER_KEEPING,
    SCALINGS,
    SELECTIONS,
)
from conewise.program.records import SIZES, Record, Ref
from conewise.structure.wiring.wiring import Wiring

SAME = NUMBER_KEEPING | {"alias", "detach", "lift_fresh_copy", "copy"}
"""Operations that return the numbers they are given."""

_OF_ONE = SAME | SELECTIONS | {"neg", "sum", "mean", "repeat", "cumsum", "flip", "roll"}
"""Operations that are linear in their first argument."""


@dataclass(frozen=True, slots=True)
class Step:
    """One record of a walk. `carried` are its inputs that the walk computes; all others are a run's.

    `linear` is the record without what it adds of itself: numbers are 0, and for the inputs of `added` zeros
    are to be put in. `is_norm` says that it is a fused norm, whose scale is to be taken from the run.
    """

    record: Record
    linear: Record
    carried: tuple[str, ...]
    added: tuple[str, ...] = ()
    is_norm: bool = False

    @property
    def keeps_numbers(self) -> bool:
        """Whether the values are the same numbers behind it, in another form at most."""
        return self.record.op in SAME

    @property
    def is_sum(self) -> bool:
        """Whether it adds values up as they are."""
        return self.record.op == "add" and self.record.kwargs.get("alpha", 1) == 1


@dataclass(frozen=True, slots=True)
class Walk:
    """The steps from the starts to `end`, in order. `bent` is a record on the way that is not affine."""

    end: str
    steps: tuple[Step, ...]
    bent: Record | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether each start's numbers are in the end as they are: only sums and other forms lie between."""
        return all(step.keeps_numbers or step.is_sum for step in self.steps)


def walk_to(wiring: Wiring, starts: Collection[str], end: str) -> Walk:
    """The affine walk from `starts` to `end`."""
    everything, begun = frozenset(wiring.records), frozenset(starts)
    if end in begun:
        return Walk(end, ())
    above = wiring.above(end, everything, begun)
    steps: dict[str, Step] = {}
    bent: dict[str, Record] = {}
    for name in sorted(above, key=wiring.order.__getitem__):
        record = wiring.records[name]
        # Of what type_as reads, the second says a dtype, and no number.
        reads = record.inputs[:1] if record.op == "type_as" else record.inputs
        carried = tuple(read for read in reads if read in begun or read in steps)
        curved = tuple(read for read in reads if read in bent)
        if not carried and not curved:
            continue
        step = (
            _step(record, carried, curved) if carried and all(_is_scale(wiring, c) for c in curved) else None
        )
        if step is not None:
            steps[name] = step
        else:
            bent[name] = bent[curved[0]] if curved else record
    if end not in steps:
        return Walk(end, (), bent.get(end))
    return Walk(end, _needed(steps, end))


def _needed(steps: dict[str, Step], end: str) -> tuple[Step, ...]:
    needed, queue = {end}, [end]
    while queue:
        for name in steps[queue.pop()].carried:
            if name in steps and name not in needed:
                needed.add(name)
                queue.append(name)
    return tuple(step for name, step in steps.items() if name in needed)


def _is_scale(wiring: Wiring, name: str) -> bool:
    """Whether a value is one number for all features."""
    shape = wiring.shape(name)
    return bool(shape) and shape is not None and shape[-1] == 1


def _step(record: Record, carried: tuple[str, ...], curved: tuple[str, ...]) -> Step | None:
    """The record as a step, or None where it is not affine in what is carried."""
    op, args = record.op, record.args
    if op in SCALINGS:
        is_one = len(carried) == 1 and _occurrences(args, carried[0]) == 1
        is_over = op == "div" and args[0] != Ref(carried[0])
        rounds = record.kwargs.get("rounding_mode") is not None
        return Step(record, record, carried) if is_one and not is_over and not rounds else None
    if curved:
        return None
    if op in _OF_ONE:
        return Step(record, record, carried) if args[0] == Ref(carried[0]) and len(carried) == 1 else None
    if op in ADDITIONS:
        return _with_zeros(record, carried)
    if op in CONCATENATIONS | {"stack"}:
        return Step(record, record, carried, _others(carried, args[0]))
    if op == "where" and len(args) == 3 and args[0] not in map(Ref, carried):
        return _with_zeros(record, carried, (args[0],))
    if op == "masked_fill" and args[0] == Ref(carried[0]) and len(carried) == 1:
        return _with_zeros(record, carried, (args[1],))
    if op in CONTRACTIONS:
        return _product(record, carried)
    if op in NORMS:
        only = len(carried) == 1 and args[0] == Ref(carried[0]) and _occurrences(args, carried[0]) == 1
        return Step(record, record, carried, is_norm=True) if only else None
    return None


def _product(record: Record, carried: tuple[str, ...]) -> Step | None:
    """A product with one carried factor; what it adds to the product is set to zero."""
    at = {"linear": 2, "addmm": 0, "baddbmm": 0}.get(record.op)
    bias = record.args[at] if at is not None and len(record.args) > at else record.kwargs.get("bias")
    if len(carried) != 1 or bias == Ref(carried[0]) or _occurrences(record.leaves(), carried[0]) != 1:
        return None
    return Step(record, record, carried, (bias.name,) if isinstance(bias, Ref) else ())


def _with_zeros(record: Record, carried: tuple[str, ...], kept: tuple[Any, ...] = ()) -> Step:
    """A record of which the arguments that are neither carried nor kept are zero."""
    added = tuple(n for n in _others(carried, record.args) if Ref(n) not in kept)
    args = tuple(
        0 if isinstance(arg, int | float) and not isinstance(arg, bool) else arg for arg in record.args
    )
    return Step(record, replace(record, args=args), carried, added)


def _others(carried: tuple[str, ...], template: Any) -> tuple[str, ...]:
    leaves = [leaf.name for leaf in template if isinstance(leaf, Ref)]
    return tuple(name for name in dict.fromkeys(leaves) if name not in carried and name != SIZES)


def _occurrences(leaves: Any, name: str) -> int:
    return sum(leaf == Ref(name) for leaf in leaves)
