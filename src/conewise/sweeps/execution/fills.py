"""Fills: what worlds put into values, a few gathers and indexed writes for each node, by the fill tables.

This is the vectorised form of `runs/values.py`, which replaces a part of one value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

import torch

from conewise.anatomy.axes import resolved
from conewise.anatomy.places import Place
from conewise.anatomy.sites import Located
from conewise.errors import NAN_OF_PADDING, PatchError
from conewise.program.tensors import brought, has_nan
from conewise.runs.interventions import Intervention
from conewise.runs.values import Edit
from conewise.sweeps.execution.batch import Batch, PartFunction, Site
from conewise.sweeps.planning.patching import FillTable
from conewise.sweeps.planning.plan import Compiled, Pass
from conewise.sweeps.planning.schedule import Ranges, members

Tensor = torch.Tensor


class Learning(Protocol):
    """What worlds put in where that is learned: made of what is there, and of the source's value."""

    def source(self, site: Site) -> Tensor | None:
        """The source's value of a whole site; None where nothing is taken from one."""

    def made(self, worlds: Sequence[int], present: Tensor, source: Tensor | None) -> Tensor:
        """Return [world, ...]: what these worlds of the pass put in."""


class Values:
    """The values that the worlds of a batch put in. `sites` are all that are put into.

    `learning` makes them where they are learned. `wholes` are kept from batch to batch where the source's
    values lie in the same memory each time.
    """

    def __init__(
        self,
        batch: Batch,
        sites: Sequence[Site],
        wholes: dict[Site, Tensor | None] | None = None,
        *,
        is_later: bool = False,
    ) -> None:
        """With `is_later`, the source is still to be computed: it is looked at behind the first pass."""
        self.batch = batch
        self._wholes = wholes if wholes is not None and batch.intervention.is_run else {}
        self.learning: Learning | None = None
        self._own: dict[Any, Tensor | None] = {}
        self._looked_at: list[Site] = []
        self._flags: Tensor | None = None
        self._suspicious: frozenset[Site] | None = None
        self._sites = sites if batch.intervention.is_run else ()
        if not is_later:
            self._look()

    def _look(self) -> None:
        """Begin to look for NaN in what is put in."""
        sites, self._sites = self._sites, ()
        if sites:
            found = {site: whole for site in sites if (whole := self.whole(site)) is not None}
            floats = {s: one for s, one in found.items() if one.is_floating_point() and one.numel()}
            self._looked_at, self._flags = list(floats), nan_flags(list(floats.values()))

    def expect_no_nan(self, fills: PassFills) -> None:
        """Raise PatchError where a pass put NaN in. Waits for the device."""
        if self._suspicious is None:
            self._look()
            flags = [] if self._flags is None else self._flags.tolist()
            marked = zip(self._looked_at, flags, strict=False)
            self._suspicious = frozenset(site for site, flag in marked if flag)
        if self._suspicious:
            fills.expect_no_nan(self, self._suspicious)

    def whole(self, site: Site) -> Tensor | None:
        """Return the value of a whole site in natural axes, of which parts are taken; None without one."""
        if site not in self._wholes:
            self._wholes[site] = self._whole_of(self.batch.intervention, site)
        return self._wholes[site]

    def _whole_of(self, put: Intervention, site: Site) -> Tensor | None:
        if put.whole is None:
            return None
        place, base = Place(*site), self.batch.base
        found = put.whole(place, base)
        base.model.locate(place).expect(found, base.read(place), place)
        return found

    def in_slots(self, wholes: dict[Site, Tensor | None]) -> Values:
        """Return the same with whole sites from slots, which are written to before each replay."""
        found = copy(self)
        found._wholes = wholes
        return found

    def own_whole(self, site: Site, source: int) -> Tensor | None:
        """Return the same of a cell's own source; None where it has NaN in it, or no whole value."""
        key = site, source
        if key not in self._own:
            put = self.batch.own[source]
            found = self._whole_of(put, site)
            if found is not None and put.is_run and has_nan(found):
                found = None  # part by part: those without NaN are put in
            self._own[key] = found
        return self._own[key]

    def own_rows(self, located: Located, sources: tuple[int, ...], like: Tensor) -> Tensor:
        """Return values or shifts of sources, a row for each, with a dimension for each axis of the part.

        They have the dtype of `like`, and lie where it lies. A dimension of length 1 stands for all.
        """
        key = sources, len(located.part_axes), like.dtype, like.device
        found = self._own.get(key)
        if found is None:
            rows = [_row(self.batch.own[number], like) for number in sources]
            found = self._own[key] = _stacked(rows, len(located.part_axes))
        return found

    def part(self, place: Place) -> Tensor | PartFunction:
        """Return what is put at one place, where there is no whole value."""
        base = self.batch.base
        part = self.batch.part(place)
        if isinstance(part, Tensor):
            base.model.locate(place).expect(part, base.read(place), place)
        return part


def _row(put: Intervention, like: Tensor) -> Tensor:
    """Return the value or the shift of a source, as it is put into a tensor like that."""
    if put.shift is not None:
        return put.scale * put.shift.to(like.device, like.dtype)
    assert put.value is not None
    return put.value if isinstance(put.value, Tensor) else like.new_full((), put.value)


def _stacked(rows: list[Tensor], dims: int) -> Tensor:
    """Values for parts of so many axes, one behind the other: each has the last of them, or fewer."""
    spread = [row.reshape((*[1] * (dims - row.ndim), *row.shape)) for row in rows]
    if len({row.shape for row in spread}) > 1:
        widest = [max(sizes) for sizes in zip(*(row.shape for row in spread), strict=True)]
        spread = [row.expand(widest) for row in spread]
    return torch.stack(spread)


class PassFills:
    """The fill tables of one pass, ready to be written; what does not depend on values is kept."""

    def __init__(
        self,
        compiled: Compiled,
        one: Pass,
        cells: Sequence[Sequence[Place]],
        locate: Callable[[Place], Located],
        edits: Sequence[Edit] = (),
    ) -> None:
        """`cells` has the places of each cell, as they were written, `edits` what stands in the base."""
        self._tables: dict[str, list[tuple[FillTable, Located]]] = {}
        for whole in sorted(compiled.fills, key=lambda table: table.ordinal):
            if (table := whole.of(one.first, one.worlds)) is not None:
                located = edits[table.edit].found if table.edit is not None else locate(Place(*table.site))
                self._tables.setdefault(table.node, []).append((table, located))
        self._cells = [cells[cell] for cell in compiled.order[one.first : one.first + one.worlds]]
        self._rows: dict[tuple[str, Ranges], list[_Rows]] = {}

        own = [table for tables in self._tables.values() for table, _ in tables]
        self.sites = list(dict.fromkeys(table.site for table in own if table.is_source))
        """The sites whose whole values are read."""
        self.is_of_source = all(table.is_source for table in own)
        """True if the sweep's source is all that is put in: no edge, no edit of the base, no other source."""

    def expect_no_nan(self, values: Values, sites: Collection[Site]) -> None:
        """Raise PatchError where what is put in has NaN in it; `sites` are those that have some somewhere."""
        for found in self._rows.values():
            for rows in found:
                rows.expect_no_nan(values, sites)

    def write(
        self,
        node: str,
        stack: Tensor,
        worlds: Ranges,
        values: Values,
        sizes: Sequence[int],
    ) -> None:
        """Write what `worlds` put into `node`; `stack` is [world, ...], one for each of them, in order.

        `sizes` are those of one world.
        """
        key = node, worlds
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self._rows_of(node, worlds, stack.device)
        for rows in found:
            rows.write(stack, values, sizes)

    def _rows_of(self, node: str, worlds: Ranges, device: torch.device) -> list[_Rows]:
        place_of = {world: place for place, world in enumerate(members(worlds))}
        found = []
        for table, located in self._tables[node]:
            own = [number for number, world in enumerate(table.worlds) if world in place_of]
            if own:
                places = [place_of[table.worlds[number]] for number in own]
                found.append(_Rows(table, located, self._cells, own, places, device))
        return found


class _Rows:
    """Rows of a table, and the places of their worlds in a stack."""

    def __init__(
        self,
        table: FillTable,
        located: Located,
        cells: Sequence[Sequence[Place]],
        numbers: Sequence[int],
        places: Sequence[int],
        device: torch.device,
    ) -> None:
        """`cells` has the places of each world of the pass, as they were written."""
        self._table, self._located, self._cells = table, located, cells
        self._numbers, self._places, self._device = numbers, places, device
        self._view = view = located.view
        self._fixed = table.part
        # Axes that are selected come first, both in what is read and in what is written.
        self._selected = [axis for axis in view.axes if axis in table.axes or axis in self._fixed]
        self._numbered = {
            axis: [along[number] for number in numbers]
            for axis, along in zip(table.axes, table.index, strict=True)
        }
        order = [view.axes.index(axis) for axis in self._selected]
        self._order = (*order, *(dim for dim in range(len(view.axes)) if dim not in order))
        # Of edges the writers, of cells' own sources these, each once; and which of them each world has.
        beside: Sequence[Any] = table.edges.writers if table.edges is not None else ()
        beside = table.own.sources if table.own is not None else beside
        chosen = [beside[number] for number in numbers] if beside else []
        self._given: tuple[Any, ...] = tuple(sorted(set(chosen)))
        row_of = {one: row for row, one in enumerate(self._given)}
        self._from = brought(torch.tensor([row_of[one] for one in chosen], dtype=torch.long), device)
        self._index: tuple[Tensor, ...] | None = None
        self._at = brought(torch.tensor(list(places), dtype=torch.long), device)
        self._written: tuple[Tensor, ...] = ()
        self._found_for: tuple[Any, ...] = ()
        self._target: tuple[Any, ...] = (), (), 0

    def _place_of(self, number: int) -> Place:
        """The place of the world that stands at `number` in the table, as it was written."""
        return self._cells[self._table.worlds[number]][self._table.ordinal]

    def write(self, stack: Tensor, values: Values, sizes: Sequence[int]) -> None:
        target = self._selected_first(stack, sizes)
        if values.learning is not None:
            target, made = self._learned(stack, sizes, values.learning)
            target.index_put_(self._written, made.to(target.dtype))
            return
        put = self._put(target, values, stack)
        if put is None:
            self._write_each(self._view.present(stack, sizes, leading=1), values)
            return
        # By one call: an assignment to an index is taken apart in steps.
        target.index_put_(self._written, put if put.dtype == target.dtype else put.to(target.dtype))

    def _selected_first(self, stack: Tensor, sizes: Sequence[int]) -> Tensor:
        """The stack in natural axes, the selected ones first behind the worlds; it shares memory with it.

        How it lies in memory depends on the stack's own shape and strides alone, and is found out once.
        """
        if self._found_for != (stack.shape, stack.stride()):
            shown = self._view.present(stack, sizes, leading=1)
            index = self._indices(shown.shape[1:])
            self._written = (self._at.reshape(-1, *[1] * (index[0].dim() - 1 if index else 0)), *index)
            target = shown.permute(0, *(1 + dim for dim in self._order))
            offset = target.storage_offset() - stack.storage_offset()
            self._found_for = stack.shape, stack.stride()
            self._target = target.shape, target.stride(), offset
        shape, strides, offset = self._target
        if not offset:
            return stack.as_strided(shape, strides)
        return stack.as_strided(shape, strides, stack.storage_offset() + offset)

    def _put(self, target: Tensor, values: Values, stack: Tensor) -> Tensor | None:
        """Return what these worlds put in, one behind the other; None where it is made world by world."""
        table, (at, *index) = self._table, self._written
        if table.edges is not None:
            edges, site = table.edges, table.site
            made = values.batch.edges.of_edges(site, self._given, edges.at_once, edges.live)
            source = made.permute(0, *(1 + dim for dim in self._order))
            return _read_at(source, (self._from.reshape(at.shape), *index))
        whole: Tensor | None = None
        if table.is_source:
            whole = values.whole(table.site)
        elif table.own is not None and table.own.how in {"value", "shift"}:
            located = replace(self._located, part=self._place_of(self._numbers[0]).part)
            rows = values.own_rows(located, self._given, stack)
            # Selected axes come first in the target; those of one number are none of the part's.
            left = located.part_axes
            order = [axis for axis in self._selected if axis not in self._numbered]
            order += [axis for axis in left if axis not in order]
            put = rows.permute(0, *(1 + left.index(axis) for axis in order))[self._from]
            return target[self._written].add_(put) if table.own.how == "shift" else put
        elif table.own is not None:
            whole = values.own_whole(table.site, self._given[0])
        if whole is None:
            return None
        source = whole.permute(self._order)
        return _read_at(source, index) if index else source

    def _learned(self, stack: Tensor, sizes: Sequence[int], learning: Learning) -> tuple[Tensor, Tensor]:
        """The target, and what is made of what is there; gradients go through both where torch records."""
        shown = self._view.present(stack, sizes, leading=1)
        target, index = shown.permute(0, *(1 + dim for dim in self._order)), self._written[1:]
        present, whole = target[self._written], learning.source(self._table.site)
        if whole is not None:
            source = whole.permute(self._order)
            whole = (source[index] if index else source[None]).expand(present.shape)
        worlds = [self._table.worlds[number] for number in self._numbers]
        return target, learning.made(worlds, present, whole)

    def expect_no_nan(self, values: Values, sites: Collection[Site]) -> None:
        """Raise PatchError where one of these rows puts NaN in, of those that put from `sites`."""
        table = self._table
        whole = values.whole(table.site) if table.is_source and table.site in sites else None
        if whole is None:
            return
        index = self._indices(whole.shape)
        source = whole.permute(self._order)
        put = source[index] if index else source
        for row, number in enumerate(self._numbers):
            if bool(torch.isnan(put[row] if self._numbered else put).any()):
                place = self._place_of(number)
                raise PatchError(
                    f"the source's value at {place} has NaN in it; nothing was patched. {NAN_OF_PADDING}"
                )

    def _indices(self, shape: Sequence[int]) -> tuple[Tensor, ...]:
        """For each selected axis its indices, one for each world or the same for all, ready to broadcast."""
        if self._index is None:
            lengths = dict(zip(self._view.axes, shape, strict=True))
            spread = [axis for axis in self._selected if axis not in self._numbered]
            found = []
            for axis in self._selected:
                if axis in self._numbered:
                    numbers = torch.tensor(self._numbered[axis], dtype=torch.long)
                    found.append(numbers.reshape(-1, *[1] * len(spread)))
                    continue
                (chosen,) = resolved((axis,), {axis: self._fixed[axis]}, (lengths[axis],))
                along = torch.arange(lengths[axis])[chosen].reshape(-1)
                behind = len(spread) - 1 - spread.index(axis)
                found.append(along.reshape(1, *[1] * spread.index(axis), -1, *[1] * behind))
            self._index = tuple(brought(one, self._device) for one in found)
        return self._index

    def _write_each(self, shown: Tensor, values: Values) -> None:
        """Write world by world: functions of the value that is present there, and edits made again."""
        located, edit = self._located, self._table.edit
        again: Any = None if edit is None else values.batch.base.edits[edit].part
        for number, place in zip(self._numbers, self._places, strict=True):
            where = self._place_of(number) if edit is None else None
            part = again if where is None else values.part(where)
            own = shown[place]
            selection = located.part if where is None else where.part
            index = resolved(self._view.axes, selection, own.shape)
            if not isinstance(part, torch.Tensor):
                present = own[index].clone()
                part = part(present)
                if where is not None:
                    located.expect(part, present, where)
            own[index] = part


_read_at: Callable[[Tensor, Sequence[Tensor]], Tensor] = torch.ops.aten.index.Tensor


def nan_flags(wholes: Sequence[Tensor]) -> Tensor | None:
    """Return a flag for each of these that has NaN in it; None without any. One device is not waited for."""
    if not wholes:
        return None
    on: dict[torch.device, list[int]] = {}
    for number, whole in enumerate(wholes):
        on.setdefault(whole.device, []).append(number)
    if len(on) == 1:
        return _are_nan(wholes)
    # Fetched at once: a model that lies on several devices waits for them at every boundary.
    flags = torch.empty(len(wholes), dtype=torch.bool)
    for numbers in on.values():
        flags[numbers] = _are_nan([wholes[number] for number in numbers]).cpu()
    return flags


def _are_nan(wholes: Sequence[Tensor]) -> Tensor:
    # The largest magnitude is NaN where any number is; looking at each would take memory.
    return torch.stack(torch._foreach_norm(list(wholes), torch.inf)).isnan()
