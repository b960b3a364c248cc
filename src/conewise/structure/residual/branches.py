"""Branches: what lies between the residual stream and a term that is added to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from conewise.program.operations import (
    CONCATENATIONS,
    ELEMENTWISE,
    LINEAR,
    NORMS,
    PADS,
    REARRANGEMENTS,
    SCALINGS,
    SELECTIONS,
    STATISTICS,
)
from conewise.program.records import Record
from conewise.structure.wiring.wiring import Wiring


def is_elementwise(record: Record) -> bool:
    """Whether each element of the value is made of the elements in its place alone."""
    return record.op in ELEMENTWISE or torch.Tag.pointwise in getattr(record.target, "tags", ())


def is_light(record: Record) -> bool:
    """Whether the record is part of a norm, a scaling, a cast or a rearrangement: it mixes no weight in."""
    return is_elementwise(record) or record.op in REARRANGEMENTS | NORMS | STATISTICS


def is_rearranging(record: Record) -> bool:
    """Whether the record is light, or takes parts of values and puts them together again."""
    return is_light(record) or record.op in SELECTIONS | CONCATENATIONS | PADS | {"stack", "repeat"}


@dataclass(frozen=True, slots=True)
class Branch:
    """The records between some values of the stream and a `term`, inputs first.

    `entries` are the values of the stream that it reads, `foreign` the other values from outside.
    """

    term: str
    records: tuple[Record, ...]
    entries: tuple[str, ...]
    foreign: tuple[str, ...]


def branch_of(wiring: Wiring, term: str, members: frozenset[str], stream: Collection[str]) -> Branch:
    """The branch that ends in `term`; `stream` are the values of the stream."""
    inside = wiring.above(term, members, frozenset(stream))
    records = tuple(record for record in wiring.program.records if record.name in inside)
    read = dict.fromkeys(name for record in records for name in wiring.operands(record))
    outside = [name for name in read if name not in inside]
    if term not in inside:
        outside.append(term)
    return Branch(
        term,
        records,
        tuple(name for name in outside if name in stream),
        tuple(name for name in outside if name not in stream),
    )


def projections(wiring: Wiring, branch: Branch, start: Collection[str]) -> int:
    """How many projections lie one behind the other between `start` and the term.

    Those without a nonlinearity between count as one.
    """
    states: dict[str, tuple[int, bool]] = dict.fromkeys(start, (0, False))
    for record in branch.records:
        reads = [name for name in wiring.operands(record) if name in states]
        if not reads or record.name in states:
            continue
        count, is_bent = max(states[name] for name in reads)
        if wiring.is_weighted(record):
            count, is_bent = (count + 1, False) if is_bent or not count else (count, False)
        elif not _is_linear_map(wiring, record):
            is_bent = True
        states[record.name] = count, is_bent
    return states.get(branch.term, (0, False))[0]


def _is_linear_map(wiring: Wiring, record: Record) -> bool:
    if record.op in SCALINGS:
        return len(wiring.operands(record)) == 1
    return record.op in LINEAR
