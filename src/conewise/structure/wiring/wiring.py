"""A program seen as a graph: what depends on what, and what its products and weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from torch import Tensor, int8

from conewise.program.operations import CONTRACTIONS, CONVOLUTIONS, LOOKUPS, REARRANGEMENTS, RECURRENT
from conewise.program.records import ModuleCall, Program, Record, Ref
from conewise.program.sizes import Size
from conewise.structure.axes.placements import Placements, placements_of


def _is_quantised(value: Tensor) -> bool:
    """True for a buffer that holds a weight as integers: it is multiplied with scales where it is read."""
    return value.dtype == int8 and value.ndim > 1


class Wiring:
    """Answers questions about a program's graph; made once per program, changes nothing."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.records, self.order = program.record_of, program.order
        self.readers, self.varying = program.readers, program.varying
        parametric = {one.name for one in program.sources if one.is_parameter or _is_quantised(one.value)}
        for record in program.records:
            if record.name not in self.varying and not parametric.isdisjoint(record.inputs):
                parametric.add(record.name)
        self.parametric = frozenset(parametric)
        """The names whose values depend on weights and on no input."""

    def operands(self, record: Record) -> list[str]:
        """The varying inputs of a record, in order."""
        return [name for name in record.inputs if name in self.varying]

    def is_linear(self, record: Record) -> bool:
        """Whether the record multiplies one varying value with a weight."""
        return (
            record.op in CONTRACTIONS
            and len(self.operands(record)) == 1
            and any(name in self.parametric for name in record.inputs)
        )

    def is_weighted(self, record: Record) -> bool:
        """Whether the record multiplies a varying value with weights, of whatever form."""
        if self.is_linear(record) or "grouped_mm" in record.op:
            return True
        if record.op in CONTRACTIONS:
            return any(self._is_chosen_weight(name) for name in self._factors(record))
        return record.op in CONVOLUTIONS | RECURRENT

    def _is_chosen_weight(self, name: str) -> bool:
        """Whether the value is some rows of a weight: that of an expert, for each position its own."""
        record = self.records.get(name)
        while record is not None and record.op in REARRANGEMENTS:
            record = self.records.get(record.inputs[0])
        return record is not None and record.op in LOOKUPS and record.inputs[0] in self.parametric

    def is_product(self, record: Record) -> bool:
        """Whether the record is a matrix product of two varying values."""
        return record.op in CONTRACTIONS and len(self._factors(record)) == 2

    def _factors(self, record: Record) -> list[str]:
        positional = record.args[1:] if record.op == "baddbmm" else record.args
        flat = [leaf for arg in positional for leaf in (arg if isinstance(arg, list) else [arg])]
        return [leaf.name for leaf in flat if isinstance(leaf, Ref) and leaf.name in self.varying]

    def factors(self, record: Record) -> tuple[str, str]:
        """The two varying factors of a product."""
        left, right = self._factors(record)
        return left, right

    def shape(self, name: str) -> tuple[Size, ...] | None:
        """The shape of a record or of an input."""
        return self.program.shapes.get(name)

    def upward(self, start: str, stop: Callable[[Record], bool]) -> Iterator[Record]:
        """Varying records that `start` depends on, nearest first; nothing above a `stop` record.

        The stop records themselves are given, `start` too.
        """
        queue, seen = [start], {start}
        while queue:
            name = max(queue, key=lambda n: self.order.get(n, -1))
            queue.remove(name)
            record = self.records.get(name)
            if record is None:
                continue
            yield record
            if not stop(record):
                for other in self.operands(record):
                    if other not in seen:
                        seen.add(other)
                        queue.append(other)

    def cone(self, start: str, members: frozenset[str] | None = None) -> frozenset[str]:
        """The names that depend on `start`, itself not included; within `members` if given."""
        cone: set[str] = set()
        queue = [start]
        while queue:
            for reader in self.readers.get(queue.pop(), ()):
                if reader.name not in cone and (members is None or reader.name in members):
                    cone.add(reader.name)
                    queue.append(reader.name)
        return frozenset(cone)

    def above(
        self, name: str, members: frozenset[str], until: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        """`name` and the varying records that it depends on: within `members`, not of `until` nor past it."""
        found: set[str] = set()
        queue = [name]
        while queue:
            current = queue.pop()
            if current in members and current not in until and current not in found:
                found.add(current)
                queue += self.operands(self.records[current])
        return frozenset(found)

    def members(self, call: ModuleCall) -> frozenset[str]:
        """The records that were made under one call of a module; all of them for the root."""
        return frozenset(self.records) if not call.path else self._by_call.get(call, frozenset())

    @property
    def batch(self) -> Placements:
        """Where the batch lies in each value."""
        return placements_of(self.program, self.program.dimensions.batch)

    @cached_property
    def _by_call(self) -> dict[ModuleCall, frozenset[str]]:
        found: dict[ModuleCall, set[str]] = {}
        for record in self.program.records:
            for call in record.modules:
                found.setdefault(call, set()).add(record.name)
        return {call: frozenset(names) for call, names in found.items()}
