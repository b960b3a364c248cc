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
from conewise.edges.edge_facts import EdgeFacts
from conewise.errors import EdgeError, SweepError
from conewise.locations.places import EdgePlace, Place
from conewise.locations.selectors import Cell
from conewise.program.tensors import Tensor
from conewise.runs.tape import Branch, Recorded
from conewise.structure.components import Reader

Gradients = dict[tuple[str, str], Tensor]
"""Gradients by what readers read, by entry and slot: [head, batch, pos, d_model], with one head at least."""

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
        self._branches = {
            (one.entry, one.slot): branch for one in self.slots if (branch := self._branch(one)) is not None
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
            for one, gradient in zip(others, gradients[len(by_branch) :], strict=True):
                own[one.entry, one.slot] = self._through(one, gradient, values)
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
        rows: dict[tuple[str, tuple[str, int | None, str]], Tensor] = {}
        for slot in self.slots:
            more = self._work.batch.edges.changes_at(slot.entry)
            gradient = gradients[slot.entry, slot.slot]
            where = "hwbp" if by_pos else "hwb"
            found = torch.einsum(f"wbpd,hbpd->{where}", more.to(gradient.dtype), gradient)
            rows[slot.entry, slot.site] = found.double().cpu()
        numbers = []
        for edges in self._sets:
            parts = [self._row(place, rows, by_pos=by_pos) for place in edges]
            numbers.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        effects = torch.stack(numbers)
        return effects.sum(-1, keepdim=True).expand_as(effects) if is_shared else effects

    def _row(
        self,
        place: EdgePlace,
        rows: Mapping[tuple[str, tuple[str, int | None, str]], Tensor],
        *,
        by_pos: bool,
    ) -> Tensor:
        """[prompt]: the effect of one edge, or of several into one reader."""
        found = rows[place.entry, (place.name, place.layer, place.stack)]
        own = found[place.part.get("head", place.part.get("kv_head", 0))]
        row = own[[place.writer, *place.also]].sum(0) if place.also else own[place.writer]
        if by_pos:
            row = row[:, place.part["pos"]] if "pos" in place.part else row.sum(-1)
        return row


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
