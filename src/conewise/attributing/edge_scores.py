"""First-order effects of edges: edge attribution patching, and its integration along the inputs.

What an edge changes is what its writer would write more; the gradient is that by what its reader alone reads
of the stream, through the reader's own norm and projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.attributing.work import Work
from conewise.circuits.head_slices import HeadSlices, by_head, head_slices
from conewise.circuits.stacked_walk import Walks
from conewise.edges.edge_facts import EdgeFacts
from conewise.errors import EdgeError, SweepError
from conewise.locations.places import EdgePlace, Place
from conewise.locations.selectors import Cell
from conewise.program.tensors import Tensor, computing
from conewise.runs.tape import Branch, Recorded
from conewise.structure.components import Reader
from conewise.sweeps.planning.shapes.layout import repeated

Gradients = dict[tuple[str, str], Tensor]
"""Gradients by what readers read, by entry and slot: [head, batch, pos, d_model], with one head at least."""

Site = tuple[str, int | None, str]

AT_ONCE = 1 << 26
"""So many numbers of stacked streams are differentiated through at a time."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The readers of one entry whose values are parts of one node."""

    entry: str
    slot: str
    node: str
    site: tuple[str, int | None, str]
    axis: str | None
    heads: int


class EdgeScores:
    """The effects of some edges, of the gradients by what their readers read."""

    def __init__(self, work: Work, cells: Sequence[Cell]) -> None:
        self._work, self._cells = work, tuple(cells)
        self._sets = [[_edge(place) for place in cell.places] for cell in self._cells]
        self._places = [place for edges in self._sets for place in edges]
        edges = work.batch.edges
        self.facts: dict[str, EdgeFacts] = {
            entry: edges.facts_at(entry) for entry in dict.fromkeys(place.entry for place in self._places)
        }
        self.slots = tuple(self._found_slots())
        self._by_entry: dict[str, list[Slot]] = {}
        for one in self.slots:
            self._by_entry.setdefault(one.entry, []).append(one)
        self._branches = {
            (one.entry, one.slot): branch for one in self.slots if (branch := self._branch(one)) is not None
        }

        self._walks: dict[int, Walks] = {}
        self._slices: dict[tuple[str, str], HeadSlices] = {
            (one.entry, one.slot): slices
            for one in self.slots
            if (one.entry, one.slot) not in self._branches and (slices := self._found_slices(one)) is not None
        }

    def _found_slots(self) -> Sequence[Slot]:
        wanted = {(place.entry, (place.name, place.layer, place.stack)) for place in self._places}
        found: dict[tuple[str, str], list[Reader]] = {}
        for entry, facts in self.facts.items():
            for reader in facts.components.entries[entry]:
                if (entry, reader.site) in wanted:
                    found.setdefault((entry, reader.slot), []).append(reader)
        return [
            Slot(entry, slot, readers[0].node, readers[0].site, readers[0].axis, len(readers))
            for (entry, slot), readers in found.items()
        ]

    def _branch(self, slot: Slot) -> Branch | None:
        """What a slot with one reader computes of the stream, where nothing else reads it on the way."""
        if slot.heads > 1 or slot.axis is not None:
            return None
        readers = self._work.model.program.readers
        own = frozenset(self.facts[slot.entry].readers.records(slot.entry, [slot.slot]))
        for name in own - {slot.node}:
            if not own.issuperset(one.name for one in readers.get(name, ())):
                return None
        return Branch(f"{slot.entry} read by {slot.slot}", slot.entry, own) if slot.node in own else None

    def gradients(self, given: Mapping[str, Tensor]) -> list[tuple[Gradients, bool]]:
        """For each metric the gradients by what readers read, and whether it is one number for all prompts.

        `given` are other values than the base's at some nodes.
        """
        work = self._work
        others = [one for one in self.slots if (one.entry, one.slot) not in self._branches]
        nodes = [*given, *self.facts, *(one.node for one in others)]
        values = work.record(nodes, given=given, branches=tuple(self._branches.values()))
        by_branch = [values[branch.name] for branch in self._branches.values()]
        found = []
        for number, metric in enumerate(work.metrics):
            measured = work.measure(metric, values)
            wanted = [*by_branch, *(values[one.node] for one in others)]
            is_last = number == len(work.metrics) - 1
            gradients = work.gradients(measured, wanted, is_last=is_last)
            own: Gradients = {}
            for key, gradient in zip(self._branches, gradients, strict=False):
                own[key] = self._shown(key[0], gradient)
            by_norm: dict[tuple[str, str], list[tuple[Slot, HeadSlices, Tensor]]] = {}
            for one, gradient in zip(others, gradients[len(by_branch) :], strict=True):
                slices = self._slices.get((one.entry, one.slot))
                if slices is None:
                    own[one.entry, one.slot] = self._through(one, gradient, values)
                else:
                    by_norm.setdefault((one.entry, slices.operand), []).append((one, slices, gradient))
            for (entry, operand), some in by_norm.items():
                own |= self._through_norm(entry, operand, some, values)
            found.append((own, measured.is_shared))
        return found

    def _shown(self, entry: str, gradient: Tensor) -> Tensor:
        """[1, batch, pos, d_model] of a gradient by the stream's value."""
        return self.facts[entry].parts.shown(self._work.read, entry, gradient)[None]

    def _through(self, slot: Slot, gradient: Tensor, values: Recorded) -> Tensor:
        """The gradients by what each head of a slot reads, of the gradient by the slot's node."""
        work, facts = self._work, self.facts[slot.entry]

        def read(name: str) -> Any:
            return values[name].detach() if name in values else work.read(name)

        stream = facts.parts.stream(read, slot.entry)
        at_once = max(1, AT_ONCE // max(1, stream.numel() + gradient.numel()))
        rows = []
        for first in range(0, slot.heads, at_once):
            heads = range(first, min(first + at_once, slot.heads))
            with torch.enable_grad():
                copies = stream.repeat(len(heads), 1, 1).requires_grad_()
                (made,) = facts.readers.recorded(slot.entry, (slot.slot,), copies, read).values()
                dim = work.shape.layout.batch_dim.get(slot.node) or 0
                each = made.unflatten(dim, (len(heads), -1)).movedim(dim, 0)  # type: ignore[no-untyped-call]
                (row,) = torch.autograd.grad(each, copies, self._apart(slot, gradient, heads))
            rows.append(row.view(len(heads), *stream.shape))
            work.count(2 * len(heads) * facts.readers.count(slot.entry, (slot.slot,)))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _found_slices(self, slot: Slot) -> HeadSlices | None:
        """A slot's projection by head, where it is one product whose rows are batch and positions."""
        work, facts = self._work, self.facts[slot.entry]
        layout, axis = work.shape.layout, slot.axis
        if axis is None or layout.batch_dim.get(slot.entry) != 0:
            return None
        key = id(facts)
        if key not in self._walks:
            wiring = facts.components.wiring
            self._walks[key] = Walks(work.model.program, wiring, layout, (), work.read)
        view = work.model.locate(Place(*slot.site)).view
        with computing():
            found = head_slices(
                facts.components.wiring,
                self._walks[key],
                layout,
                work.read,
                slot.entry,
                slot.node,
                view,
                axis,
            )
        is_plain = found is not None and layout.batch_dim.get(found.operand) == 0
        return found if is_plain and len(found.weight) == slot.heads else None  # type: ignore[union-attr]

    def _through_norm(
        self,
        entry: str,
        operand: str,
        some: Sequence[tuple[Slot, HeadSlices, Tensor]],
        values: Recorded,
    ) -> Gradients:
        """The gradients by what heads read, where slots read one norm: projections by head, the norm once."""
        work, facts = self._work, self.facts[entry]
        stacks = []
        for slot, slices, gradient in some:
            view = work.model.locate(Place(*slot.site)).view
            assert slot.axis is not None
            own = by_head(view, gradient, work.base._sizes, slot.axis).permute(2, 0, 1, 3)
            stacks.append(torch.bmm(own.flatten(1, 2), slices.weight.detach().transpose(1, 2)))
        stack = torch.cat(stacks)
        value = values[entry].detach()
        stream = facts.parts.shown(work.read, entry, value)
        if operand != entry:
            with torch.enable_grad():
                copies = repeated(value, 0, len(stack)).clone().requires_grad_()
                walk = some[0][1].norm
                made = self._walks[id(facts)].run(walk, {entry: copies}, len(stack))[operand]
                (found,) = torch.autograd.grad(made, copies, stack.reshape(made.shape))
            work.count(2 * len(stack) * walk.records)
        else:
            found = stack
        rows = found.view(len(stack), *stream.shape)
        sizes = [slot.heads for slot, _, _ in some]
        return {
            (entry, slot.slot): part
            for (slot, _, _), part in zip(some, torch.split(rows, sizes), strict=True)
        }

    def _apart(self, slot: Slot, gradient: Tensor, heads: range) -> Tensor:
        """[head, *the node's shape]: the gradient with one head each, and zeros for the others."""
        if slot.axis is None:
            return gradient[None]
        view, sizes = self._work.model.locate(Place(*slot.site)).view, self._work.base._sizes
        stack = gradient.new_zeros((len(heads), *gradient.shape))
        own, target = view.present(gradient, sizes), view.present(stack, sizes, leading=1)
        dim = view.axes.index(slot.axis)
        for row, head in enumerate(heads):
            target[row].select(dim, head).copy_(own.select(dim, head))
        return stack

    def effects(self, gradients: Gradients, *, is_shared: bool) -> Tensor:
        """[cell, prompt] in float64: what writers would write more, times the gradients."""
        by_pos = any("pos" in place.part for place in self._places)
        starts: dict[tuple[str, Site], tuple[int, int]] = {}
        rows: list[Tensor] = []
        count = 0
        for entry, slots in self._by_entry.items():
            writers = self.facts[entry].components.entries[entry][0].writers
            more = self._work.batch.edges.changes_at(entry)[:writers]
            stack = torch.cat([gradients[entry, one.slot] for one in slots])
            where = "hwbp" if by_pos else "hwb"
            found = torch.einsum(f"wbpd,hbpd->{where}", more.to(stack.dtype), stack)
            rows.append(found.double().cpu().flatten(0, 1))
            for one in slots:
                starts[entry, one.site] = count, writers
                count += one.heads * writers
        table = torch.cat(rows)
        numbers = [self._numbers(edges, starts) for edges in self._sets]
        if all(len(one) == 1 for one in numbers):
            effects = table[[one[0] for one in numbers]]
        else:
            effects = torch.stack([table[one].sum(0) for one in numbers])
        if by_pos:
            effects = self._at_positions(table, numbers)
        return effects.sum(-1, keepdim=True).expand_as(effects) if is_shared else effects

    def _numbers(
        self, edges: Sequence[EdgePlace], starts: Mapping[tuple[str, Site], tuple[int, int]]
    ) -> list[int]:
        """The rows of the table that are a set of edges."""
        found = []
        for place in edges:
            start, writers = starts[place.entry, (place.name, place.layer, place.stack)]
            first = start + writers * int(place.part.get("head", place.part.get("kv_head", 0)))  # type: ignore[arg-type]
            found += [first + writer for writer in (place.writer, *place.also)]
        return found

    def _at_positions(self, table: Tensor, numbers: Sequence[Sequence[int]]) -> Tensor:
        """[cell, prompt] of a table with positions: each edge at its own position, or at all of them."""
        rows = []
        for edges, own in zip(self._sets, numbers, strict=True):
            positions = [place.part.get("pos") for place in edges for _ in (place.writer, *place.also)]
            parts = [
                table[row].sum(-1) if pos is None else table[row][:, pos]
                for row, pos in zip(own, positions, strict=True)
            ]
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows)


def _edge(place: Place) -> EdgePlace:
    """A place as an edge. Raises SweepError where it is none, or a path through live components."""
    if not isinstance(place, EdgePlace) or place.live:
        raise SweepError(
            f"{place} is not a direct edge, and attribution is to direct edges: take `model.edges()`."
        )
    if not isinstance(place.part.get("pos", 0), int):
        raise SweepError(f"{place}: an edge is attributed to at one position, or at all of them.")
    return place


def eap(work: Work, cells: Sequence[Cell]) -> Tensor:
    """Edge attribution patching: [metric, cell, prompt].

    (part of the source − part of the base) · the gradient in the base, by what the reader alone reads.
    """
    scores = EdgeScores(work, cells)
    return torch.stack([scores.effects(own, is_shared=shared) for own, shared in scores.gradients({})])


def eap_inputs(work: Work, cells: Sequence[Cell], steps: int) -> Tensor:
    """EAP with integrated gradients along the inputs (Hanna et al. 2024): [metric, cell, prompt].

    The stream as it enters the first layer goes from the base's to the source's, base + k/steps · (source −
    base) for k = 0, ..., steps − 1, and all behind it is computed; the gradients of `eap` are averaged there.
    With one step it is `eap`.
    """
    scores = EdgeScores(work, cells)
    facts = {id(one): one for one in scores.facts.values()}
    if work.batch.source is None:
        raise SweepError(
            "'eap-ig' goes along a line from the base's inputs to the source's: give a run as the source, or "
            "take method='eap'."
        )
    if len(facts) != 1:
        raise EdgeError("'eap-ig' is of edges of one stack: attribute to those of each stack alone.")
    (own,) = facts.values()
    node = own.components.writers[0].node
    (base,), (source,) = work.base.demand([node]), work.batch.source.demand([node])
    total: list[Gradients] = []
    shared: list[bool] = []
    for step in range(steps):
        found = scores.gradients({node: base + (step / steps) * (source - base)})
        if not total:
            total, shared = [gradients for gradients, _ in found], [one for _, one in found]
        else:
            for kept, (gradients, _) in zip(total, found, strict=True):
                for key, gradient in gradients.items():
                    kept[key] = kept[key] + gradient
    return torch.stack(
        [
            scores.effects({key: one / steps for key, one in own_total.items()}, is_shared=is_shared)
            for own_total, is_shared in zip(total, shared, strict=True)
        ]
    )
