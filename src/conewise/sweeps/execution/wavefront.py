"""The wavefront: follows a pass of a plan over tensors; each node is computed once, for a stack of worlds.

A node's stack holds just the worlds in which it was changed. What it reads and is not changed there comes
from the baseline, repeated without a copy where the batch is one row. What is to be done was decided when the
pass was built; here it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from conewise.program.operations import ATTENTION
from conewise.program.precision import SPLIT
from conewise.program.records import SIZES, Program, Record
from conewise.program.rules import Rule, compile_rule
from conewise.sweeps.execution.fills import PassFills, Values
from conewise.sweeps.planning.passes.instructions import Alignment, PassProgram, Put, Read, Step
from conewise.sweeps.planning.passes.worlds import Ranges, count_of
from conewise.sweeps.planning.shapes.attention_rules import causal_rule, repeated_rule, unmasked_rule
from conewise.sweeps.planning.shapes.fusing import Fusion, product_then_bias
from conewise.sweeps.planning.shapes.layout import (
    Constants,
    Layout,
    compile_stacked_rule,
    repeated,
)
from conewise.sweeps.planning.shapes.split_rules import SplitWeights

Tensor = torch.Tensor
ReadValue = Callable[[str], Any]
"""The baseline's value of a node, by its name."""
NOTHING: Mapping[str, Tensor] = MappingProxyType({})


_STACK, _WEIGHT, _SIZES, _OTHERWISE = range(4)
"""What a step reads: a stack as it is, a weight, the sizes; or what has to be brought to its worlds."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A step, and what is found out about it once."""

    step: Step
    count: int
    sizes: tuple[int, ...]
    rule: Rule
    reads: tuple[tuple[int, Read], ...]
    is_aligned: bool


class Wavefront:
    """Runs passes over baselines of one shape.

    `plain` are rules of records that know no shape, kept; `split_weights` are the parts of weights, where a
    plan has products in parts.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        fusions: Sequence[Fusion] = (),
        plain: dict[str, Rule] | None = None,
        split_weights: SplitWeights | None = None,
    ) -> None:
        self.layout = layout
        self._plain = {} if plain is None else plain
        self._columns: Mapping[str, Tensor] = NOTHING
        self._fusions = {(fusion.node, fusion.inside): fusion for fusion in fusions}
        self._records = program.record_of
        self._rules: dict[tuple[str, int | None, str, tuple[str, ...]], Rule] = {}
        self._constants = Constants(layout, _unread)
        self._split_weights = split_weights
        self._read: ReadValue = _unread
        self._ready: dict[int, _Ready] = {}

    @torch.no_grad()
    def run(
        self,
        program: PassProgram,
        read: ReadValue,
        fills: PassFills | None = None,
        values: Values | None = None,
        room_for: Callable[[int], None] | None = None,
        *,
        given: Mapping[str, Tensor] = NOTHING,
        columns: Mapping[str, Tensor] = NOTHING,
    ) -> dict[str, Tensor]:
        """The values of the targets in all worlds of the pass, stacked.

        `room_for` is told before each step what it takes. `given` are stacks that the pass begins with.
        `columns` are nodes that multiply with a weight, and the columns of theirs that anything reads.
        """
        self._read, self._columns = read, columns
        self._constants.rebase(read)
        try:
            return self._run(program, dict(given), fills, values, room_for or _no_watch)
        finally:
            # A dataset is streamed: no baseline is kept for the next.
            self._read, self._columns = _unread, NOTHING
            self._constants.rebase(_unread)

    def _run(
        self,
        program: PassProgram,
        stacks: dict[str, Any],
        fills: PassFills | None,
        values: Values | None,
        room_for: Callable[[int], None],
    ) -> dict[str, Tensor]:
        for step, rise in zip(program.steps, program.rises, strict=True):
            room_for(rise)
            if step.worlds:
                stacks[step.node] = self._computed(step, stacks)
            if step.put is not None:
                assert fills is not None
                assert values is not None
                stacks[step.node] = self._put(step.put, stacks.pop(step.node, None), fills, values)
            for name in step.drop:
                del stacks[name]
        room_for(program.reading)
        return {one.node: self._operand(one, program.worlds, stacks) for one in program.targets}

    def _computed(self, step: Step, stacks: Mapping[str, Any]) -> Any:
        ready = self._ready.get(id(step))
        if ready is None or ready.step is not step:
            ready = self._ready[id(step)] = self._made_ready(step)
        operands = []
        for way, one in ready.reads:
            if way == _STACK:
                operands.append(stacks[one.node])
            elif way == _WEIGHT:
                operands.append(self._read(one.node))
            elif way == _SIZES:
                operands.append(ready.sizes)
            else:
                operands.append(self._operand(one, ready.count, stacks))
        if step.node in self._columns:
            operands = [
                value if one.node in self.layout.varying else self._narrowed(step.node, value)
                for one, value in zip(step.reads, operands, strict=True)
            ]
        value = ready.rule(*operands)
        return value if ready.is_aligned else self._aligned(step.node, value, step.align, step.rows)

    def _made_ready(self, step: Step) -> _Ready:
        """All of a step that is the same in each run."""
        sizes = self.layout.sizes(step.count, step.rows)
        reads = tuple((self._way(one), one) for one in step.reads)
        return _Ready(step, step.count, sizes, self._rule(step), reads, step.align.is_nothing)

    def _way(self, one: Read) -> int:
        if one.node == SIZES:
            return _SIZES
        if one.stacked:
            return _STACK if one.align.is_nothing and one.rows == one.have else _OTHERWISE
        is_weight = one.node not in self.layout.varying and one.node not in self._records
        return _WEIGHT if is_weight and self.layout.pos_dim.get(one.node) is None else _OTHERWISE

    def _rule(self, step: Step) -> Rule:
        key = step.node, step.rows, step.kernel, step.inside
        rule = self._rules.get(key)
        if rule is None:
            if step.inside:
                rule = self._fusions[step.node, frozenset(step.inside)].rule
            else:
                rule = self._plain_rule(self._records[step.node], step.rows, step.kernel)
            self._rules[key] = rule
        return rule

    def _plain_rule(self, record: Record, rows: int | None, kernel: str) -> Rule:
        if kernel == SPLIT and self._split_weights is not None:
            rule = self._split_weights.rule(record)
            if rule is not None:
                return rule
        if record.op != ATTENTION:
            if record.name not in self._plain:
                self._plain[record.name] = product_then_bias(record) or compile_stacked_rule(record)
            return self._plain[record.name]
        if record.kwargs.get("enable_gqa"):
            return repeated_rule(record, lambda plain: self._attention_rule(plain, rows, kernel))
        return self._attention_rule(record, rows, kernel)

    def _attention_rule(self, record: Record, rows: int | None, kernel: str) -> Rule:
        if kernel == "causal":
            return unmasked_rule(record)
        if kernel == "last rows":
            assert rows is not None
            key = record.inputs[1]
            return causal_rule(record, rows, self.layout.length(key), self._read(key).device)
        return compile_rule(record)

    # -- what a step reads -----------------------------------------------------------------------

    def _operand(self, one: Read, count: int, stacks: Mapping[str, Any]) -> Any:
        """What a step of `count` worlds gets for one of its inputs."""
        if not one.stacked:
            return self._baseline(one.node, count, one.rows)
        value, have = stacks[one.node], one.have
        if not isinstance(value, torch.Tensor):
            return value
        if one.rows is not None and one.rows != have:
            value = self.layout.tail(one.node, value, one.rows, have)
            have = one.rows
        if not one.align.is_nothing:
            value = self._aligned(one.node, value, one.align, have)
        if one.rows is None and have is not None:
            value = self.layout.extended(one.node, self._base_value(one.node, None), value, have)
        return value

    def _aligned(self, name: str, value: Tensor, align: Alignment, rows: int | None) -> Tensor:
        """A stack brought to the worlds of a reader."""
        dim = self.layout.batch_dim[name]
        assert dim is not None, f"{name} was changed, yet has no batch"
        each = value.shape[dim] // align.worlds
        if align.pick is not None:
            value = picked(value, dim, each, align.pick)
        if align.add:
            value = torch.cat([value, self._baseline(name, align.add, rows)], dim)
        return value if align.order is None else picked(value, dim, each, align.order)

    def _baseline(self, name: str, count: int, rows: int | None) -> Any:
        """The baseline's value for `count` worlds, its last `rows` positions."""
        if name not in self.layout.varying:
            value = self._constants.stacked(name, count)
            if rows is not None and isinstance(value, torch.Tensor):
                value = self.layout.tail(name, value, rows)
            return value
        value = self._base_value(name, rows)
        dim = self.layout.batch_dim.get(name)
        if dim is None or not isinstance(value, torch.Tensor):
            return value
        return repeated(value, dim, count)

    def _narrowed(self, node: str, weight: Any) -> Any:
        """The rows of a weight that make the wanted columns."""
        return weight.index_select(0, self._columns[node]) if isinstance(weight, torch.Tensor) else weight

    def _base_value(self, name: str, rows: int | None) -> Any:
        value = self._read(name)
        if name in self._columns:
            value = value.index_select(-1, self._columns[name])
        if rows is not None and isinstance(value, torch.Tensor):
            value = self.layout.tail(name, value, rows)
        return value

    # -- what worlds put in ----------------------------------------------------------------------

    def _put(self, put: Put, value: Tensor | None, fills: PassFills, values: Values) -> Tensor:
        """The stack of a node with the worlds that patch it: fresh rows, or changed ones.

        Nothing else holds the old stack, so that it goes as soon as there is a new one.
        """
        dim = self.layout.batch_dim[put.node]
        assert dim is not None
        if put.again:
            assert value is not None
            value = self._changed(put, value, fills, values)
        if not put.fresh:
            assert value is not None
            return value
        rows = self._fresh(put, dim, fills, values)
        if value is None:
            return rows
        both = torch.cat([value, rows], dim)
        if put.order is None:
            return both
        worlds = sum(stop - start for start, stop in put.order)
        return picked(both, dim, both.shape[dim] // worlds, put.order)

    def _fresh(self, put: Put, dim: int, fills: PassFills, values: Values) -> Tensor:
        """The rows of worlds that begin with the baseline's value, and what they put into it."""
        node, layout, base, count = put.node, self.layout, self._read(put.node), count_of(put.fresh)
        rows = repeated(base, dim, count)
        if count == 1 or base.shape[dim] == 1:
            rows = rows.clone(memory_format=torch.contiguous_format)  # else it is a copy already
        each = rows.unflatten(dim, (-1, base.shape[dim])).movedim(dim, 0)  # type: ignore[no-untyped-call]
        fills.write(node, each, put.fresh, values, layout.sizes(1))
        return rows if put.rows is None else layout.tail(node, rows, put.rows)

    def _changed(self, put: Put, value: Tensor, fills: PassFills, values: Values) -> Tensor:
        """A stack with what some of its worlds put into it."""
        node, layout = put.node, self.layout
        dim = layout.batch_dim[node]
        assert dim is not None
        base = self._read(node)
        whole = value if put.rows is None else layout.extended(node, base, value, put.rows)
        if whole is value:  # it may be a view of another node's stack
            whole = value.clone()
        each = whole.unflatten(dim, (-1, base.shape[dim])).movedim(dim, 0)  # type: ignore[no-untyped-call]
        if len(put.places) == 1 and put.places[0] == (0, each.shape[0]):
            fills.write(node, each, put.again, values, layout.sizes(1))
        elif len(put.places) == 1:
            start, stop = put.places[0]
            fills.write(node, each[start:stop], put.again, values, layout.sizes(1))
        else:
            at = _index_of(put.places, 1, value.device)
            own = each.index_select(0, at)
            fills.write(node, own, put.again, values, layout.sizes(1))
            each.index_copy_(0, at, own)
            del own
        return whole if put.rows is None else layout.tail(node, whole, put.rows)


def picked(value: Tensor, dim: int, each: int, places: Ranges) -> Tensor:
    """The worlds at some places of a stack, in that order; `each` has so many rows along `dim`."""
    if len(places) == 1:
        start, stop = places[0]
        return value.narrow(dim, start * each, (stop - start) * each)
    return value.index_select(dim, _index_of(places, each, value.device))


_INDICES: dict[tuple[Ranges, int, torch.device], Tensor] = {}


def _index_of(places: Ranges, each: int, device: torch.device) -> Tensor:
    """Rows of worlds as indices; kept, since making them waits for the device and cannot be captured."""
    key = places, each, device
    if key not in _INDICES:
        if len(_INDICES) >= 4096:
            _INDICES.clear()
        rows = [torch.arange(start * each, stop * each) for start, stop in places]
        _INDICES[key] = torch.cat(rows).to(device)
    return _INDICES[key]


def _unread(name: str) -> Any:
    raise AssertionError(f"{name} is read between two runs")


def _no_watch(taken: int) -> None:
    del taken
