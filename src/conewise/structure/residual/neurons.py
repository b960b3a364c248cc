"""Neurons: what an MLP holds between its two projections, before and after the activation."""

from __future__ import annotations

from conewise.program.operations import CASTS, REARRANGEMENTS, SELECTIONS
from conewise.program.records import Record
from conewise.structure.residual.branches import Branch, is_elementwise, projections
from conewise.structure.wiring.wiring import Wiring


def find_neurons(wiring: Wiring, branch: Branch) -> dict[str, str]:
    """pre, post and (of a gated MLP) pre_linear: the neurons before and after the activation and the gate.

    Empty where the branch is not one projection up (or two, one of which gates the other), elementwise
    operations, and one projection down.
    """
    members = frozenset(record.name for record in branch.records)
    if projections(wiring, branch, branch.entries) != 2:
        return {}

    def is_down(record: Record) -> bool:
        return wiring.is_weighted(record)

    down = [
        r for r in wiring.upward(branch.term, lambda r: is_down(r) or r.name not in members) if is_down(r)
    ]
    if len(down) != 1 or not wiring.is_linear(down[0]):
        return {}
    post = _unflattened(wiring, wiring.operands(down[0])[0])
    edges = _projected(wiring, post, members)
    if post not in members or not 1 <= len(edges) <= 2 or not _is_elementwise_between(wiring, post, edges):
        return {}
    if any((wiring.shape(edge) or ())[-1:] != (wiring.shape(post) or ())[-1:] for edge in edges):
        return {}
    if len(edges) == 1:
        return {"pre": edges[0], "post": post}
    gate = _gate(wiring, post, edges)
    return {"pre": gate[0], "pre_linear": gate[1], "post": post} if gate else {}


def _is_elementwise_between(wiring: Wiring, post: str, edges: list[str]) -> bool:
    between = list(wiring.upward(post, lambda record: record.name in edges))
    return post not in edges and all(
        is_elementwise(record) or record.op in REARRANGEMENTS
        for record in between
        if record.name not in edges
    )


def _unflattened(wiring: Wiring, name: str) -> str:
    """The value before it was flattened to two dimensions for a projection, if it was."""
    record = wiring.records.get(name)
    shape = wiring.shape(name)
    while record is not None and record.op in REARRANGEMENTS and shape and len(shape) == 2:
        name = wiring.operands(record)[0]
        record, shape = wiring.records.get(name), wiring.shape(name)
    return name


def _projected(wiring: Wiring, post: str, members: frozenset[str]) -> list[str]:
    """The last rearranged values of projections that `post` is computed from."""

    def is_edge(record: Record) -> bool:
        current = record
        while current.op in REARRANGEMENTS | SELECTIONS and current.name in members:
            operand = wiring.operands(current)
            if not operand or operand[0] not in wiring.records:
                return True
            current = wiring.records[operand[0]]
        return wiring.is_linear(current) or current.name not in members

    return [record.name for record in wiring.upward(post, is_edge) if is_edge(record)]


def _gate(wiring: Wiring, post: str, edges: list[str]) -> tuple[str, str] | None:
    """(gate, other) when `post` is the product of an activated projection and a plain one."""
    record = wiring.records[post]
    while record.op in REARRANGEMENTS | CASTS:
        record = wiring.records[wiring.operands(record)[0]]
    if record.op != "mul":
        return None
    plain = [edge for edge in edges if edge in wiring.operands(record)]
    return (next(e for e in edges if e != plain[0]), plain[0]) if len(plain) == 1 else None
