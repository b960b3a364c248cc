"""The edges of an attribution, by reader and writer: found once for some cells, and kept with the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from conewise.circuits.forwards.head_slices import HeadSlices
from conewise.circuits.forwards.stacked_walk import Walks
from conewise.edges.edge_facts import EdgeFacts
from conewise.errors import EdgeError, SweepError
from conewise.locations.places import EdgePlace, Place
from conewise.locations.selectors import Cell
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.runs.backward.tape import Branch
from conewise.runs.captured import Captured
from conewise.structure.components.components import Reader
from conewise.sweeps.execution.batch import edge_stacks

Site = tuple[str, int | None, str]

KEPT = 8
"""How many tables of a model are kept. They lie with it."""
_TABLES = "_edge_tables"


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
        """What it is known by: entry and slot."""
        return self.entry, self.slot


@dataclass(slots=True)
class Projections:
    """The projections of slots by head, for runs of one shape: `walks` lead through the norms before them."""

    weights: Sums
    walks: dict[str, Walks]
    slices: dict[tuple[str, str], HeadSlices]


class EdgeTable:
    """Which readers some edges lead into, and which row of a table of all their writers each edge is.

    Rows are ordered by entry, slot and head of the reader, then by writer. Raises SweepError where a cell is
    no direct edge, EdgeError where it is none of this model.
    """

    def __init__(self, model: Captured, cells: tuple[Cell, ...]) -> None:
        self.model, self.cells = model, cells
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
        """How many writers are read there."""
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
        """What a slot with one reader computes of the stream, where nothing else reads it on the way."""
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


def edge_table(model: Captured, cells: tuple[Cell, ...]) -> EdgeTable:
    """The table of these cells, which is kept while the cells are: a new pair of prompts finds it."""
    kept: OrderedDict[int, EdgeTable] = vars(model).setdefault(_TABLES, OrderedDict())
    found = kept.get(id(cells))
    if found is None or found.cells is not cells:
        found = kept[id(cells)] = EdgeTable(model, cells)
        while len(kept) > KEPT:
            kept.popitem(last=False)
    return found


def is_known(model: Captured, cells: tuple[Cell, ...]) -> bool:
    """Whether a table of these cells is kept."""
    found = vars(model).get(_TABLES, {}).get(id(cells))
    return found is not None and found.cells is cells


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
