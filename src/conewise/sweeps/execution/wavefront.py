"""The wavefront: all worlds of a sweep in one pass; each node is computed once, for a stack of worlds.

A node's stack holds just the worlds in which it was changed. What it reads and is not changed there comes
from the baseline, repeated without a copy where the batch is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from conewise.program.operations import ATTENTION
from conewise.program.records import SIZES, Program, Record, Ref
from conewise.program.rules import Rule, compile_rule
from conewise.structure.selections import resolved
from conewise.structure.views import View
from conewise.sweeps.planning.fusing import Fusion, product_then_bias
from conewise.sweeps.planning.regions import (
    WHOLE,
    Regions,
    attention_argument,
    causal_rule,
    is_causal_mask,
    repeated_rule,
    unmasked_rule,
)
from conewise.sweeps.planning.stacking import (
    Constants,
    Layout,
    Tensor,
    compile_stacked_rule,
    index_tensor,
    masked_rows,
    members,
    positions_in,
    repeated,
)


@dataclass(frozen=True, slots=True)
class Fill:
    """What one world puts into (a part of) a node's value: a tensor, or a function of what was there."""

    view: View
    part: Mapping[str, Any]
    value: Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class WaveStep:
    """Compute `node` in `worlds`; then drop `drop`, which nothing reads any more.

    With `fusion`, a chain of nodes that ends there is computed at once. `rise`: the bytes that are taken
    meanwhile, beyond what was held before.
    """

    node: str
    worlds: int
    drop: tuple[str, ...]
    fusion: Fusion | None = None
    rise: int = 0


@dataclass(frozen=True, slots=True)
class Stack:
    """The values of a node in the worlds of a mask, in the order of the worlds."""

    worlds: int
    value: Any


class Wavefront:
    """Evaluates schedules over one baseline. `read(name)` gives the baseline's value of a node.

    `regions` are the nodes of which only some last positions are computed.
    `columns` are nodes that multiply with a weight, and the columns of theirs that anything reads.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        read: Callable[[str], Any],
        regions: Regions = WHOLE,
        columns: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.layout = layout
        self._columns = {name: tuple(picked) for name, picked in columns.items()}
        self._narrow: dict[tuple[str, str], Tensor] = {}
        self.regions = regions
        self._read = read
        self._inputs = {record.name: record.inputs for record in program.records}
        self._rules: dict[str, Rule] = {}
        self._records = {record.name: record for record in program.records}
        self._base: dict[str, Any] = {}
        self._constants = Constants(layout, read)

    def rebase(self, read: Callable[[str], Any]) -> None:
        """Read another baseline of the same shape from now on."""
        self._read = read
        self._constants.rebase(read)

    @torch.no_grad()
    def run(
        self,
        steps: Sequence[WaveStep],
        patched: Mapping[str, int],
        fills: Mapping[tuple[str, int], Sequence[Fill]],
        targets: Sequence[str],
        worlds: int,
        room_for: Callable[[int], None] | None = None,
        reading: int = 0,
    ) -> dict[str, Tensor]:
        """The values of `targets` in all `worlds`, stacked.

        `patched` says which worlds patch a node, `fills` what they put there, by node and world. Before each
        step `room_for` is told what it takes, and at last what `reading` the targets takes.
        """
        stacks: dict[str, Stack] = {}
        waiting = dict(patched)
        for step in steps:
            if room_for is not None:
                room_for(step.rise)
            for read in self._inputs_of(step):
                if read in waiting and read not in stacks:
                    stacks[read] = self._patched(read, waiting.pop(read), None, fills)
            value = self._computed(step, stacks)
            stack = Stack(step.worlds, value)
            if step.node in waiting:
                stack = self._patched(step.node, waiting.pop(step.node), stack, fills)
            stacks[step.node] = stack
            for name in step.drop:
                stacks.pop(name, None)
        if room_for is not None:
            room_for(reading)
        for target in targets:
            if target in waiting:
                stacks[target] = self._patched(target, waiting.pop(target), stacks.get(target), fills)
        return {
            target: self._operand(target, worlds, stacks, self.regions.wanted_of(target))
            for target in targets
        }

    def _computed(self, step: WaveStep, stacks: Mapping[str, Stack]) -> Any:
        node = step.node
        rows = self.regions.of(node)
        rule = self._rules.get(node)
        if rule is None:
            rule = self._rules[node] = step.fusion.rule if step.fusion else self._rule(node, rows)
        count = step.worlds.bit_count()
        values = [
            self.layout.sizes(count, rows)
            if name == SIZES
            else self._operand(name, step.worlds, stacks, self.regions.wanted(node, name))
            for name in self._inputs_of(step)
        ]
        if node in self._columns:
            values = [
                value if name in self.layout.varying else self._narrowed(node, name, value)
                for name, value in zip(self._inputs[node], values, strict=True)
            ]
        value = rule(*values)
        if self._records[node].op == "getitem":
            # Several tensors are not aligned to the worlds that want one of them; the one taken out is.
            value = self._aligned(node, value, stacks[self._inputs[node][0]].worlds, step.worlds, rows)
        return value

    def _inputs_of(self, step: WaveStep) -> tuple[str, ...]:
        return step.fusion.inputs if step.fusion else self._inputs[step.node]

    def _rule(self, node: str, rows: int | None) -> Rule:
        record = self._records[node]
        if record.op != ATTENTION:
            return product_then_bias(record) or compile_stacked_rule(record)
        if record.kwargs.get("enable_gqa"):
            return repeated_rule(record, lambda plain: self._attention_rule(plain, rows))
        return self._attention_rule(record, rows)

    def _attention_rule(self, record: Record, rows: int | None) -> Rule:
        mask = attention_argument(record, "attn_mask")
        if rows is None and isinstance(mask, Ref) and mask.name not in self.layout.varying:
            return unmasked_rule(record) if is_causal_mask(self._read(mask.name)) else compile_rule(record)
        if rows is not None and attention_argument(record, "is_causal"):
            key = record.inputs[1]
            return causal_rule(record, rows, self.layout.length(key), self._read(key).device)
        return compile_rule(record)

    def _operand(self, name: str, worlds: int, stacks: Mapping[str, Stack], rows: int | None) -> Any:
        """What a node that is computed in `worlds` reads of `name`: its last `rows` positions."""
        stack = stacks.get(name)
        count = worlds.bit_count()
        if stack is None:
            return self._baseline(name, count, rows)
        value = stack.value
        if not isinstance(value, torch.Tensor):
            return value
        have = self.regions.of(name)
        if rows is not None and rows != have:
            value = self.layout.tail(name, value, rows, have)
            have = rows
        value = self._aligned(name, value, stack.worlds, worlds, have)
        if rows is None and have is not None:
            value = self.layout.extended(name, self._base_value(name, None), value, have)
        return value

    def _aligned(self, name: str, value: Tensor, have: int, want: int, rows: int | None) -> Tensor:
        if have == want:
            return value
        dim = self.layout.batch_dim[name]
        assert dim is not None, f"{name} was changed, yet has no batch"
        each = value.shape[dim] // have.bit_count()
        shared = have & want
        if shared != have:
            value = masked_rows(value, dim, each, [p for p in positions_in(want, have) if p >= 0])
        if shared == want:
            return value
        missing = (want & ~have).bit_count()
        base = self._baseline(name, missing, rows)
        both = torch.cat([value, base], dim)
        if want & ((1 << shared.bit_length()) - 1) == shared:
            return both
        order, spare = [], shared.bit_count()
        for place in positions_in(want, shared):
            order.append(place if place >= 0 else spare)
            spare += place < 0
        return masked_rows(both, dim, each, order)

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

    def _narrowed(self, node: str, name: str, weight: Any) -> Any:
        """The rows of a weight that make the wanted columns; kept, since weights do not change."""
        key = node, name
        if not isinstance(weight, torch.Tensor):
            return weight
        if key not in self._narrow:
            self._narrow[key] = weight.index_select(0, index_tensor(self._columns[node], weight.device))
        return self._narrow[key]

    def _base_value(self, name: str, rows: int | None) -> Any:
        value = self._read(name)
        if name in self._columns:
            value = value.index_select(-1, index_tensor(self._columns[name], value.device))
        if rows is not None and isinstance(value, torch.Tensor):
            value = self.layout.tail(name, value, rows)
        return value

    def _patched(
        self,
        node: str,
        worlds: int,
        stack: Stack | None,
        fills: Mapping[tuple[str, int], Sequence[Fill]],
    ) -> Stack:
        """The stack of a node with the worlds that patch it: fresh rows, or changed ones."""
        dim = self.layout.batch_dim[node]
        assert dim is not None
        present = 0 if stack is None else stack.worlds
        fresh = worlds & ~present
        rows: Tensor | None = None
        if fresh:
            rows = self._filled(node, fresh, fills)
        if stack is None:
            assert rows is not None
            return Stack(fresh, rows)
        value = stack.value
        again = worlds & present
        if again:
            value = self._refilled(node, value, present, again, fills)
        if rows is None:
            return Stack(present, value)
        return self._merged(node, Stack(present, value), Stack(fresh, rows))

    def _merged(self, node: str, one: Stack, other: Stack) -> Stack:
        dim = self.layout.batch_dim[node]
        assert dim is not None
        both = torch.cat([one.value, other.value], dim)
        union = one.worlds | other.worlds
        if one.worlds.bit_length() <= (other.worlds & -other.worlds).bit_length() - 1:
            return Stack(union, both)
        rows = one.value.shape[dim] // one.worlds.bit_count()
        first = one.worlds.bit_count()
        order = [
            p if p >= 0 else first + q
            for p, q in zip(positions_in(union, one.worlds), positions_in(union, other.worlds), strict=True)
        ]
        return Stack(union, masked_rows(both, dim, rows, order))

    def _filled(self, node: str, worlds: int, fills: Mapping[tuple[str, int], Sequence[Fill]]) -> Tensor:
        """Rows of the baseline with each world's parts put in."""
        dim = self.layout.batch_dim[node]
        assert dim is not None
        count = worlds.bit_count()
        base = self._read(node)
        rows = repeated(base, dim, count)
        if count == 1 or base.shape[dim] == 1:
            rows = rows.clone(memory_format=torch.contiguous_format)  # else it is a copy already
        own = members(worlds)
        if not self._fill_at_once(node, rows, own, fills):
            self._fill_one_by_one(node, rows, own, range(count), fills)
        kept = self.regions.of(node)
        return rows if kept is None else self.layout.tail(node, rows, kept)

    def _refilled(
        self,
        node: str,
        value: Tensor,
        present: int,
        worlds: int,
        fills: Mapping[tuple[str, int], Sequence[Fill]],
    ) -> Tensor:
        kept = self.regions.of(node)
        whole = value.clone() if kept is None else self.layout.extended(node, self._read(node), value, kept)
        self._fill_one_by_one(node, whole, members(worlds), positions_in(worlds, present), fills)
        return whole if kept is None else self.layout.tail(node, whole, kept)

    def _fill_one_by_one(
        self,
        node: str,
        rows: Tensor,
        members: Sequence[int],
        places: Sequence[int],
        fills: Mapping[tuple[str, int], Sequence[Fill]],
    ) -> None:
        dim = self.layout.batch_dim[node]
        assert dim is not None
        batch = self._read(node).shape[dim]
        sizes = self.layout.sizes(1)
        for world, place in zip(members, places, strict=True):
            row = rows.narrow(dim, place * batch, batch)
            for fill in fills[node, world]:
                shown = fill.view.present(row, sizes)
                index = resolved(fill.view.axes, fill.part, shown.shape)
                value = (
                    fill.value if isinstance(fill.value, torch.Tensor) else fill.value(shown[index].clone())
                )
                shown[index] = value

    def _fill_at_once(
        self,
        node: str,
        rows: Tensor,
        members: Sequence[int],
        fills: Mapping[tuple[str, int], Sequence[Fill]],
    ) -> bool:
        """All worlds in one indexed write, where each fills one part and all parts are selected alike."""
        first = fills[node, members[0]][0]
        axes = [axis for axis, index in first.part.items() if isinstance(index, int)]
        for world in members:
            own = fills[node, world]
            if len(own) != 1 or own[0].view is not first.view or not isinstance(own[0].value, torch.Tensor):
                return False
            if set(own[0].part) != set(axes) or not all(isinstance(own[0].part[a], int) for a in axes):
                return False
        dim = self.layout.batch_dim[node]
        # Only a batch that leads its dimension is stacked where the view shows it.
        if first.view.axes[0] != "batch" or "batch" in axes or first.view.packing[dim or 0][:1] != ("batch",):
            return False
        count = len(members)
        shown = first.view.present(rows, self.layout.sizes(count))
        shown = shown.unflatten(0, (count, shown.shape[0] // count))  # type: ignore[no-untyped-call]
        values = torch.stack([fills[node, world][0].value for world in members])  # type: ignore[misc]
        index: list[Any] = [index_tensor(tuple(range(count)), rows.device)]
        for axis in first.view.axes:
            if axis in axes:
                picks = tuple(int(fills[node, world][0].part[axis]) for world in members)
                index.append(index_tensor(picks, rows.device))
            else:
                index.append(slice(None))
        shown[tuple(index)] = values
        return True
