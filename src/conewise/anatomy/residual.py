"""The residual stream: its sums, branches and layers, and their numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy  # type: ignore[import-untyped]

from conewise.anatomy.positionwise import is_light, is_rearranging
from conewise.anatomy.wiring import Wiring, reached
from conewise.program.records import NUMBER_KEEPING, ModuleCall, Record, Ref
from conewise.program.sizes import Size, is_equal


@dataclass(frozen=True, slots=True)
class LayerNumber:
    """The number of a layer: the path of the list, and the number there; '' and None for none.

    `is_ambiguous` where the path holds other numbers too, and nothing says which is the layer's.
    """

    path: str = ""
    number: int | None = None
    is_ambiguous: bool = False

    def is_of(self, call: ModuleCall) -> bool:
        """True if the call is that of the numbered module itself."""
        return self.number is not None and call.path == f"{self.path}.{self.number}".removeprefix(".")

    def holds(self, call: ModuleCall) -> bool | None:
        """True if a module belongs to the layer, by the numbers in its path; None where there are none."""
        if self.number is None:
            return None
        front = f"{self.path}." if self.path else ""
        if call.path.startswith(front) and call.path[len(front) :].split(".")[0].isdigit():
            return int(call.path[len(front) :].split(".")[0]) == self.number
        numbers = [int(part) for part in call.path.split(".") if part.isdigit()]
        return self.number in numbers if numbers else None


def numbers_of(calls: Sequence[ModuleCall]) -> list[LayerNumber]:
    """Find where each layer is numbered: by the number that differs from layer to layer, else by the last."""
    paths = [call.path.split(".") for call in calls]
    templates = [["#" if part.isdigit() else part for part in path] for path in paths]
    found: list[LayerNumber] = []
    for path, template in zip(paths, templates, strict=True):
        alike = [other for other, its in zip(paths, templates, strict=True) if its == template]
        numbers = [at for at, part in enumerate(path) if part.isdigit()]
        differing = [at for at in numbers if len({other[at] for other in alike}) > 1]
        chosen = differing if len(differing) == 1 else numbers[-1:]
        if not chosen:
            found.append(LayerNumber())
            continue
        at = chosen[0]
        ambiguous = len(numbers) > 1 and not differing
        found.append(LayerNumber(".".join(path[:at]), int(path[at]), ambiguous))
    return found


def short_names(stacks: Sequence[str]) -> dict[str, str]:
    """A name for each of several stacks: the first part of its path that no other has at the same depth."""

    def short(stack: str) -> str:
        for i, part in enumerate(stack.split(".")):
            if all(other == stack or other.split(".")[i : i + 1] != [part] for other in stacks):
                return part
        return stack

    return {stack: short(stack) if len(set(stacks)) > 1 else "" for stack in stacks}


@dataclass(frozen=True, slots=True)
class Addition:
    """One sum along the stream: `total` is `carried` plus every one of `terms`.

    `carried` is made of `source`, an earlier value of the stream, without any weight: it is that value, or a
    norm of it, or it scaled. A term may itself be a sum, of values that nothing else reads.
    """

    total: str
    carried: str
    source: str
    terms: tuple[str, ...]


class Stream:
    """The additions among some records of a program: those of a layer, or all.

    An addition is known by its form: x + f(x), where f has weights. Nothing is assumed of module names, nor
    of what enters: the sum of two embeddings is no addition, because neither is made of the other.
    """

    def __init__(self, wiring: Wiring, members: frozenset[str]) -> None:
        self.wiring = wiring
        self.members = members
        self._additions: dict[str, Addition | None] = {}

    def first_with(self, core: str) -> Addition | None:
        """The addition of an attention's result to the stream that it reads; None where there is none."""
        cone, above = self.wiring.cone(core, self.members), self.wiring.above(core, self.members)
        for total in self.totals:
            found = self.addition(total) if total in cone else None
            if found is None or found.carried in cone or found.carried == core:
                continue
            between = self.wiring.cone(found.source, self.members) & above
            if any(self.wiring.is_weighted(self.wiring.records[name]) for name in between):
                return found
        return None

    def behind(self, additions: Sequence[Addition]) -> list[Addition]:
        """The additions to the last total of `additions`, which follow each other along the stream.

        Usually one. Several are a stream that forks; none of them is a step within a term of another.
        """
        values = {value for one in additions for value in (one.source, one.total)}
        last = additions[-1].total
        cone = self.wiring.cone(last, self.members)
        found: list[Addition] = []
        for total in self.totals:
            if total in cone:
                addition = self.addition(total)
                if addition is None or addition.source != last:
                    addition = self._added_late(total, last, values)
                if addition is not None:
                    found.append(addition)
        inside = {
            name
            for other in found
            for term in other.terms
            for name in self.wiring.above(term, self.members, {other.source})
        }
        return [one for one in found if one.total not in inside]

    def _added_late(self, total: str, last: str, values: Collection[str]) -> Addition | None:
        """The stream plus a branch that was computed from an earlier value of it."""
        one, other = self.sums[total]
        for carried, term in ((one, other), (other, one)):
            if self.source(carried) == last:
                branch = self.wiring.above(term, self.members, {last})
                read = {name for one in branch for name in self.wiring.operands(self.wiring.records[one])}
                if not read.isdisjoint(values):
                    return Addition(total, carried, last, (term,))
        return None

    # -- sums ----------------------------------------------------------------------------------

    @cached_property
    def sums(self) -> dict[str, tuple[str, str]]:
        """Every sum of two varying values of one shape, with its operands."""
        found: dict[str, tuple[str, str]] = {}
        for record in self.wiring.program.records:
            if record.name in self.members and (operands := summed(self.wiring, record)):
                found[record.name] = operands
        return found

    @cached_property
    def totals(self) -> tuple[str, ...]:
        """The sums that are no mere step of another one, in order."""
        return tuple(name for name in self.sums if not self.is_step(name))

    def is_step(self, name: str) -> bool:
        """True if a value is a sum that only another sum reads."""
        readers = self.wiring.readers.get(name, ())
        return (
            name in self.sums
            and len(readers) == 1
            and readers[0].name in self.sums
            and Ref(name) not in self.wiring.program.outputs
        )

    def operands(self, name: str) -> tuple[str, str] | None:
        """Return the two values that a step adds up; None where `name` is no step."""
        return self.sums[name] if self.is_step(name) else None

    def addition(self, total: str) -> Addition | None:
        """The sum as an addition to a stream; None where it is none."""
        if total not in self._additions:
            self._additions[total] = self._addition(total) if total in self.sums else None
        return self._additions[total]

    def _addition(self, total: str) -> Addition | None:
        one, other = self.sums[total]
        for carried, term in ((one, other), (other, one)):
            source = self.source(carried)
            if source is None:
                continue
            between = self.wiring.cone(source, self.members) & self.wiring.above(term, self.members, {source})
            # The term is made of the source by more than norms, scaling and rearrangement.
            if any(not is_rearranging(self.wiring.records[name]) for name in between):
                return Addition(total, carried, source, (term,))
        for step, term in ((one, other), (other, one)):
            inner = self.addition(step) if self.is_step(step) else None
            if inner is not None:
                return Addition(total, inner.carried, inner.source, (*inner.terms, term))
        return None

    def source(self, name: str) -> str | None:
        """The one value of the stream that `name` is made of without any weight; None where there is none."""
        if self.is_step(name):
            return None
        shape, records, stops = self.wiring.shape(name), self.wiring.records, set()

        def onward(current: str) -> list[str]:
            record = records.get(current)
            if record is None or current not in self.members or current in self.sums or not is_light(record):
                if are_alike(self.wiring.shape(current), shape):
                    stops.add(current)
                return []
            return self.wiring.operands(record)

        reached([name], onward)
        return stops.pop() if len(stops) == 1 else None

    def unchanged(self, name: str) -> str:
        """The value that `name` is, before it was rearranged or cast."""
        record = self.wiring.records.get(name)
        while record is not None and name in self.members and record.op in NUMBER_KEEPING:
            name = self.wiring.operands(record)[0]
            record = self.wiring.records.get(name)
        return name


def summed(wiring: Wiring, record: Record) -> tuple[str, str] | None:
    """The two varying values of one shape that the record adds up, or None."""
    if record.op != "add" or len(record.args) < 2 or record.kwargs.get("alpha", 1) != 1:
        return None
    names = [leaf.name for leaf in record.leaves() if isinstance(leaf, Ref)]
    if len(set(names)) != 2 or len(names) != 2 or not wiring.varying.issuperset(names):
        return None
    first, second = names
    shape = wiring.shape(first)
    return (first, second) if shape and len(shape) >= 2 and are_alike(shape, wiring.shape(second)) else None


def are_alike(one: tuple[Size, ...] | None, other: tuple[Size, ...] | None) -> bool:
    """True if values of these shapes have the same elements, rearranged at most.

    Sizes that vary need not be written alike: a sum of two of them takes them for equal.
    """
    if not one or not other:
        return False
    if len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return all(a == b if isinstance(a, int) and isinstance(b, int) else 1 not in {a, b} for a, b in pairs)
    elements = (math.prod(shape, start=sympy.Integer(1)) for shape in (one, other))
    return one[-1] == other[-1] and is_equal(*elements)
