"""First-order effects of edges: edge attribution patching, and its integration along a line.

What an edge changes is what its writer would write more; the gradient is that by what its reader alone reads
of the stream, through the reader's own norm and projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from conewise.anatomy.components import Reader
from conewise.anatomy.places import EdgePlace, Place
from conewise.anatomy.selectors import Cell
from conewise.attributing.relevance import Relevance
from conewise.attributing.work import OnePass, Work
from conewise.circuits.replaced_parts import EdgeFacts
from conewise.circuits.walks import HeadSlices, Walks, by_head, head_slices
from conewise.errors import EdgeError, SweepError
from conewise.program.rehearsal import is_rehearsal
from conewise.program.tensors import Tensor, computing, recording
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.runs.gradients import Branch, Recorded
from conewise.sweeps.execution.batch import edge_stacks
from conewise.sweeps.planning.layout import repeated

Site = tuple[str, int | None, str]


@dataclass(frozen=True, slots=True)
class Slot:
    """The readers of one entry whose values are parts of one node."""

    entry: str
    slot: str
    node: str
    site: Site
    axis: str | None
    heads: int

    @property
    def key(self) -> tuple[str, str]:
        """The key of the slot: its entry and its name."""
        return self.entry, self.slot


@dataclass(slots=True)
class Projections:
    """The projections of slots by head, for runs of one shape: `walks` lead through the norms before them."""

    weights: Sums
    walks: dict[str, Walks]
    slices: dict[tuple[str, str], HeadSlices]


class EdgeTable:
    """The readers that some edges lead into, and the row of each edge in a table of all their writers.

    Rows are ordered by entry, slot and head of the reader, then by writer. Raises SweepError where a cell is
    no direct edge, EdgeError where it is none of this model.
    """

    def __init__(self, model: Captured, cells: tuple[Cell, ...]) -> None:
        self.model, self.cells, self.given = model, cells, cells
        sets = [[_edge(place) for place in cell.places] for cell in cells]
        known = {entry: facts for facts in edge_stacks(model) for entry in facts.components.entries}
        self.facts: dict[str, EdgeFacts] = {}
        for entry in dict.fromkeys(place.entry for edges in sets for place in edges):
            if entry not in known:
                raise EdgeError(
                    f"no edge of this model reads the stream at {entry!r}: it was made for another."
                )
            self.facts[entry] = known[entry]
        self.slots = tuple(self._slots(sets))
        self.by_entry: dict[str, list[Slot]] = {}
        for one in self.slots:
            self.by_entry.setdefault(one.entry, []).append(one)
        self.branches = {one.key: branch for one in self.slots if (branch := self._branch(one)) is not None}
        self.others = tuple(one for one in self.slots if one.key not in self.branches)
        self.projections: dict[object, Projections] = {}
        self._number(sets)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The values of a run that its edges are made of."""
        stacks = {id(facts): facts for facts in self.facts.values()}.values()
        names = [name for facts in stacks for name in facts.reads]
        inside = self.model.program.record_of
        return tuple(
            name for name in dict.fromkeys([*names, *(one.node for one in self.slots)]) if name in inside
        )

    def writers(self, entry: str) -> int:
        """Return the number of writers that are read there."""
        return self.facts[entry].components.entries[entry][0].writers

    def _slots(self, sets: Sequence[Sequence[EdgePlace]]) -> Sequence[Slot]:
        wanted = {(place.entry, _site(place)) for edges in sets for place in edges}
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
        """Return the branch that a slot with one reader computes, where nothing else reads it."""
        if slot.heads > 1 or slot.axis is not None:
            return None
        readers = self.model.program.readers
        own = frozenset(self.facts[slot.entry].readers.records(slot.entry, [slot.slot]))
        for name in own - {slot.node}:
            if not own.issuperset(one.name for one in readers.get(name, ())):
                return None
        return Branch(f"{slot.entry} read by {slot.slot}", slot.entry, own) if slot.node in own else None

    # -- rows ----------------------------------------------------------------------------------

    def _number(self, sets: Sequence[Sequence[EdgePlace]]) -> None:
        """Find the row of every edge: `rows`; `cell_of` and `positions` where cells are more than one row."""
        starts: dict[tuple[str, Site], tuple[int, int]] = {}
        count = 0
        for entry, slots in self.by_entry.items():
            for one in slots:
                starts[entry, one.site] = count, self.writers(entry)
                count += one.heads * self.writers(entry)
        self.count = count
        rows: list[int] = []
        cells: list[int] = []
        positions: list[int | None] = []
        for number, edges in enumerate(sets):
            for place in edges:
                start, writers = starts[place.entry, _site(place)]
                head: int = place.part.get("head", place.part.get("kv_head", 0))  # type: ignore[assignment]
                for writer in (place.writer, *place.also):
                    rows.append(start + writers * head + writer)
                    cells.append(number)
                    positions.append(place.part.get("pos"))  # type: ignore[arg-type]
        self.rows = torch.tensor(rows, dtype=torch.long)
        self.cell_of = None if cells == list(range(len(sets))) else torch.tensor(cells, dtype=torch.long)
        self.positions = None if all(pos is None for pos in positions) else tuple(positions)

    def by_cell(self, table: Tensor) -> Tensor:
        """[cell, prompt] of effects by row, [row, prompt] or with positions [row, prompt, pos]."""
        found = table[self.rows]
        if self.positions is not None:
            own = [
                row.sum(-1) if pos is None else row[:, pos]
                for row, pos in zip(found, self.positions, strict=True)
            ]
            found = torch.stack(own)
        if self.cell_of is None:
            return found
        return found.new_zeros(len(self.cells), found.shape[1]).index_add_(0, self.cell_of, found)


def _site(place: Place) -> Site:
    return place.name, place.layer, place.stack


def _edge(place: Place) -> EdgePlace:
    """A place as an edge. Raises SweepError where it is none, or a path through live components."""
    if not isinstance(place, EdgePlace) or place.live:
        raise SweepError(
            f"{place} is not a direct edge, and attribution is to direct edges: take `model.edges()`."
        )
    if not isinstance(place.part.get("pos", 0), int):
        raise SweepError(f"{place}: an edge is attributed to at one position, or at all of them.")
    return place


AT_ONCE = 1 << 26
"""The numbers of stacked streams that are differentiated through at a time."""


class EdgeScores(OnePass):
    """Edge attribution patching, of the gradients by what the readers of edges read.

    (part of the source − part of the base) · the gradient in the base, by what the reader alone reads; with
    `rules`, what these pass back stands in its place. By those of relevance patching, edges into queries and
    keys have none: attention's pattern is a constant.
    """

    def __init__(self, work: Work, table: EdgeTable, rules: type[Relevance] | None = None) -> None:
        super().__init__(work, rules)
        self._table = table

    def forward(
        self, given: Mapping[str, Tensor] = MappingProxyType({}), of: range | None = None
    ) -> Recorded:
        """See `OnePass`. `given` are other values than the base's at some nodes.

        `of`: the effects of some writers alone, by the gradients of readers behind them; those of others are
        0.
        """
        work, table = self._work, self._table
        self._of = of
        self._entries = [entry for entry in table.facts if of is None or of.start < table.writers(entry)]
        branches = {key: branch for key, branch in table.branches.items() if key[0] in self._entries}
        others = [one for one in table.others if one.entry in self._entries]
        nodes = [*given, *self._entries, *(one.node for one in others)]
        values = work.record(nodes, given=given, branches=tuple(branches.values()), relevance=self._relevance)
        self._wanted = {key: values[branch.name] for key, branch in branches.items()}
        self._wanted |= {one.key: values[one.node] for one in others}
        self._known, self._values = self._projections(), values
        if work.is_recording:
            for entry in self._entries:
                self._more(entry)
        return values

    def wanted(self) -> list[Tensor]:
        """See `OnePass`."""
        return list(self._wanted.values())

    def backward(self, gradients: Sequence[Tensor]) -> Tensor:
        """See `OnePass`. [row of the table, prompt], with positions behind that where edges are at some."""
        by_slot, rows = dict(zip(self._wanted, gradients, strict=True)), []
        for entry, slots in self._table.by_entry.items():
            stack = self._read_gradients(entry, slots, by_slot) if entry in self._entries else None
            rows.append(self._rows(entry, sum(one.heads for one in slots), stack, self._of))
        return torch.cat(rows).double()

    def finish(self, numbers: Tensor) -> Tensor:
        """See `OnePass`."""
        return self._table.by_cell(numbers)

    def has_nan(self) -> Tensor:
        """See `OnePass`."""
        return torch.stack([self._more(entry).isnan().any() for entry in self._entries]).any()

    def _read_gradients(
        self,
        entry: str,
        slots: Sequence[Slot],
        gradients: dict[tuple[str, str], Tensor],
    ) -> Tensor:
        """[head of a slot, batch, pos, d_model]: the gradients by what the readers of an entry read."""
        found: dict[tuple[str, str], Tensor] = {}
        by_norm: dict[str, list[tuple[Slot, HeadSlices, Tensor]]] = {}
        for one in slots:
            gradient, slices = gradients.pop(one.key), self._known.slices.get(one.key)
            if one.key in self._table.branches:
                found[one.key] = self._shown(entry, gradient)
            elif slices is None:
                found[one.key] = self._through(one, gradient)
            else:
                by_norm.setdefault(slices.operand, []).append((one, slices, gradient))
            if one.key not in self._table.branches:
                records = self._table.facts[entry].readers.count(entry, (one.slot,))
                self._work.count(2 * one.heads * records)
        for operand, some in by_norm.items():
            found |= self._through_norm(entry, operand, some)
        return torch.cat([found[one.key] for one in slots]) if len(slots) > 1 else found[slots[0].key]

    def _shown(self, entry: str, gradient: Tensor) -> Tensor:
        """[1, batch, pos, d_model] of a gradient by the stream's value."""
        return self._table.facts[entry].parts.shown(self._work.read, entry, gradient)[None]

    def _through(self, slot: Slot, gradient: Tensor) -> Tensor:
        """The gradients by what each head of a slot reads, of the gradient by the slot's node."""
        work, facts, values = self._work, self._table.facts[slot.entry], self._values

        def read(name: str) -> Any:
            return values[name].detach() if name in values else work.read(name)

        stream = facts.parts.stream(read, slot.entry)
        at_once = max(1, AT_ONCE // max(1, stream.numel() + gradient.numel()))
        rows = []
        for first in range(0, slot.heads, at_once):
            heads = range(first, min(first + at_once, slot.heads))
            with recording():
                copies = stream.repeat(len(heads), 1, 1).requires_grad_()
                own = facts.readers.recorded(slot.entry, (slot.slot,), copies, read, self._relevance)
                (made,) = own.values()
                dim = work.shape.layout.batch_dim.get(slot.node) or 0
                each = made.unflatten(dim, (len(heads), -1)).movedim(dim, 0)  # type: ignore[no-untyped-call]
                (row,) = torch.autograd.grad(each, copies, self._apart(slot, gradient, heads))
            rows.append(row.view(len(heads), *stream.shape))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    # -- projections by head -------------------------------------------------------------------

    def _projections(self) -> Projections:
        """The projections of slots by head, found once for a shape and some weights."""
        work, table = self._work, self._table
        key = tuple(work.shape.layout.symbols.items())
        known = table.projections.get(key)
        if known is None or (known.weights != work.weights and not is_rehearsal()):
            known = Projections(work.weights, {}, {})
            if not is_rehearsal():
                table.projections[key] = known
            for one in table.others:
                slices = self._found_slices(one, known)
                if slices is not None:
                    known.slices[one.key] = slices
        for walks in known.walks.values():
            walks.rebase(work.read)
        return known

    def _found_slices(self, slot: Slot, known: Projections) -> HeadSlices | None:
        """A slot's projection by head, where it is one product whose rows are batch and positions."""
        work, facts = self._work, self._table.facts[slot.entry]
        layout, axis, wiring = work.shape.layout, slot.axis, facts.components.wiring
        if axis is None or layout.batch_dim.get(slot.entry) != 0:
            return None
        walks = Walks(work.model.program, (), work.read)
        walks = known.walks.setdefault(facts.components.stack, walks)
        view = work.model.locate(Place(*slot.site)).view
        with computing():
            found = head_slices(wiring, walks, layout, work.read, slot.entry, slot.node, view, axis)
        is_plain = found is not None and layout.batch_dim.get(found.operand) == 0
        return found if is_plain and len(found.weight) == slot.heads else None  # type: ignore[union-attr]

    def _through_norm(
        self,
        entry: str,
        operand: str,
        some: Sequence[tuple[Slot, HeadSlices, Tensor]],
    ) -> dict[tuple[str, str], Tensor]:
        """The gradients by what heads read, where slots read one norm: projections by head, the norm once."""
        work, facts = self._work, self._table.facts[entry]
        stacks = []
        for slot, slices, gradient in some:
            view = work.model.locate(Place(*slot.site)).view
            assert slot.axis is not None
            own = by_head(view, gradient, work.base._sizes, slot.axis).permute(2, 0, 1, 3)
            stacks.append(torch.bmm(own.flatten(1, 2), slices.weight.detach().transpose(1, 2)))
        stack = torch.cat(stacks)
        value = self._values[entry].detach()
        stream = facts.parts.shown(work.read, entry, value)
        if operand != entry:
            with recording():
                copies = repeated(value, 0, len(stack)).clone().requires_grad_()
                walk = some[0][1].norm
                walks = self._known.walks[facts.components.stack]
                made = walks.run(walk, {entry: copies}, len(stack), relevance=self._relevance)[operand]
                (found,) = torch.autograd.grad(made, copies, stack.reshape(made.shape))
        else:
            found = stack
        rows = found.view(len(stack), *stream.shape)
        sizes = [slot.heads for slot, _, _ in some]
        return {slot.key: part for (slot, _, _), part in zip(some, torch.split(rows, sizes), strict=True)}

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

    # -- effects -------------------------------------------------------------------------------

    @torch.no_grad()
    def _rows(self, entry: str, heads: int, stack: Tensor | None, of: range | None) -> Tensor:
        """[row, prompt] of one entry: what writers would write more, times the gradients by what is read."""
        count = self._table.writers(entry)
        more = self._more(entry)[:count]
        if stack is None:
            along = more.shape[1:3] if self._table.positions is not None else more.shape[1:2]
            return more.new_zeros(heads * count, *along)
        if of is None:
            return self._products(stack, more).flatten(0, 1)
        found = self._products(stack, more[of.start : of.stop])
        whole = found.new_zeros(heads, count, *found.shape[2:])
        whole[:, of.start : of.stop] = found
        return whole.flatten(0, 1)

    def _more(self, entry: str) -> Tensor:
        """[writer, batch, pos, d_model]: what writers would write more."""
        return self._work.batch.edges.changes_at(entry, is_checked=not self._work.is_recording)

    def _products(self, stack: Tensor, more: Tensor) -> Tensor:
        """[head, writer, batch], with positions behind that where edges are at some."""
        more = more.to(stack.dtype)
        if self._table.positions is not None:
            return torch.einsum("hbpd,wbpd->hwbp", stack, more)
        if stack.shape[1] == 1:
            return (stack.flatten(1) @ more.flatten(1).T)[..., None]
        pairs = zip(stack.unbind(1), more.unbind(1), strict=True)
        return torch.stack([one.flatten(1) @ other.flatten(1).T for one, other in pairs], -1)


def information_flow(work: Work, table: EdgeTable, _: int = 1) -> Tensor:
    """Information-flow routes (Ferrando & Voita 2024): [metric, cell, prompt], the base alone is read.

    How near what a writer wrote is to the stream that a reader reads, max(0, |stream| − |stream − part|) in
    the sum of absolute values, as a share of that of all writers, averaged over positions. It is the same for
    all readers of a value of the stream. An effect is minus the share, as removing what helps has it.
    """
    if table.positions is not None:
        raise SweepError("'ifr' is a mean over positions: attribute to edges at all positions.")
    rows = []
    for entry, slots in table.by_entry.items():
        known = table.facts[entry].parts
        with computing():
            parts, stream = known.parts(work.read, entry), known.stream(work.read, entry)
            apart = (parts - stream).abs().sum(-1)
            near = (stream.abs().sum(-1) - apart).clamp(min=0)
            shares = (near / near.sum(0).clamp(min=torch.finfo(near.dtype).tiny)).mean(-1)
        rows.append(-shares.repeat(sum(one.heads for one in slots), 1))
    return torch.stack([table.by_cell(torch.cat(rows).double().cpu())] * len(work.metrics))


def eap_inputs(work: Work, table: EdgeTable, steps: int, *, first: int = 0) -> Tensor:
    """EAP with integrated gradients along the inputs (Hanna et al. 2024): [metric, cell, prompt].

    The stream as it enters the first layer goes from the base's to the source's, base + k/steps · (source −
    base) for k = 0, ..., steps − 1, and all behind it is computed; the gradients of `eap` are averaged there.
    With one step it is `eap`. From `first` = 1 on, the source's end is among the points, and the base's is
    not: so does the published code since February 2025.
    """
    entering, *_ = _lines(table, "eap-ig")
    shares = (step / steps for step in range(first, first + steps))
    return _along(work, table, "eap-ig", [(entering[0], share, None) for share in shares]) / steps


def eap_activations(work: Work, table: EdgeTable, steps: int) -> Tensor:
    """EAP with integrated gradients along activations: [metric, cell, prompt].

    What a layer's heads together write, what its MLP writes, and what enters, go along a line of their own,
    base + k/steps · (source − base) for k = 0, ..., steps − 1, while all that does not lie behind is the
    base's; the gradients of `eap` are averaged along the line of an edge's own writer. With one step it is
    `eap`.
    """
    name = "eap-ig-activations"
    shares = [step / steps for step in range(1, steps)]
    behind = [(node, share, writers) for node, writers in _lines(table, name) for share in shares]
    return _along(work, table, name, [("", 0.0, None), *behind]) / steps  # the first is that of every line


def _lines(table: EdgeTable, method: str) -> list[tuple[str, range]]:
    """The values that go along a line, what enters first, and the writers whose parts each is the sum of.

    Raises EdgeError for edges of several stacks.
    """
    stacks = {id(one): one for one in table.facts.values()}
    if len(stacks) != 1:
        raise EdgeError(f"{method!r} is of edges of one stack: attribute to those of each stack alone.")
    (facts,) = stacks.values()
    components = facts.components
    entering = components.writers[0].node, range(1)
    return [entering, *((term, own) for term, own in components.terms.items() if own.start)]


def _along(
    work: Work, table: EdgeTable, method: str, points: Iterable[tuple[str, float, range | None]]
) -> Tensor:
    """[metric, cell, prompt]: effects added up over points, each a node that is so far from base to source.

    At some points the effects of some writers alone are counted.
    """
    if not work.has_source:
        raise SweepError(
            f"{method!r} goes along a line from the base's values to the source's: give a run as the source, "
            "or take method='eap'."
        )
    scores = EdgeScores(work, table)
    total: list[Tensor] = []
    for node, share, of in points:
        given = {}
        if share:
            run = work.batch.source
            assert run is not None
            (base,), (source,) = work.base.demand([node]), run.demand([node])
            given = {node: base + share * (source - base)}
        found, shared = [], []
        for measured, is_last in work.measured(scores.forward(given, of)):
            gradients = work.gradients(measured, scores.wanted(), is_last=is_last)
            found.append(scores.backward(gradients).cpu())
            shared.append(measured.is_shared)
        total = [one.add_(more) for one, more in zip(total, found, strict=True)] if total else found
    rows = map(table.by_cell, total)
    return torch.stack([work.by_prompt(one, own) for one, own in zip(shared, rows, strict=True)])
