"""What edges of a model need, found once and kept with it: its components, their parts, their readers."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol
from weakref import WeakKeyDictionary

from conewise.edges.live_streams import LiveStreams
from conewise.edges.reader_values import ReaderValues
from conewise.edges.stream_parts import StreamParts
from conewise.errors import EdgeError
from conewise.locations.sites import SiteTable
from conewise.program.records import Program
from conewise.structure.components.components import Components


class Structured(Protocol):
    """A captured model, as far as its structure is read."""

    @property
    def program(self) -> Program:
        """Its operations."""

    @property
    def site_table(self) -> SiteTable:
        """Its named places."""

    def expect_program(self, what: str) -> None:
        """Raise where its graph is no longer that of the program."""


class EdgeFacts:
    """The components of one stack of a model; `parts` and `readers` are made when they are first used."""

    def __init__(self, model: Structured, stack: str = "", *, reads_heads: bool = True) -> None:
        self._table, self._program = model.site_table, model.program
        layers = model.site_table.model_layers
        self.components = Components(model.program, layers, stack, reads_heads=reads_heads)

    @cached_property
    def parts(self) -> StreamParts:
        """What each component wrote into the stream."""
        try:
            return StreamParts(self._table, self.components)
        except EdgeError as error:
            names = self._table.dictionaries
            if not names:
                raise
            raise EdgeError(
                f"{error} The model has dictionaries in it ({', '.join(names)}), and a nonlinear one in the "
                "stream or behind heads keeps parts from being told apart: take the edges of the model "
                "before it was spliced in, whose outputs are the same, or splice it in at mlp_out."
            ) from error

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The values of a run that parts and readers are made of."""
        components = self.components
        wiring, found = components.wiring, dict.fromkeys(components.entries)
        found |= dict.fromkeys(writer.node for writer in components.writers) | dict.fromkeys(components.terms)
        everything = frozenset(wiring.records)
        carried = [components.carrying(entry) for entry in components.entries]
        for heads in components.heads:
            own = wiring.above(heads.term, everything, frozenset({heads.node}))
            carried.append(own & wiring.cone(heads.node))
        for name in frozenset().union(*carried):  # scales of norms are read in the middle of a walk
            found |= dict.fromkeys(wiring.records[name].inputs)
        ends = dict.fromkeys((reader.entry, reader.node) for reader in components.readers)
        for entry, node in ends:
            own = wiring.above(node, everything, frozenset({entry})) & wiring.cone(entry)
            found |= dict.fromkeys(
                one for name in own for one in wiring.records[name].inputs if one not in own
            )
        return tuple(found)

    @cached_property
    def live(self) -> LiveStreams:
        """What readers see when components between are computed anew."""
        return LiveStreams(self._table, self.components)

    @cached_property
    def readers(self) -> ReaderValues:
        """What readers make of a stream."""
        return ReaderValues(self._table, self.components)


_known: WeakKeyDictionary[Structured, dict[tuple[str, bool], EdgeFacts]] = WeakKeyDictionary()


def edge_facts(model: Structured, stack: str = "", *, reads_heads: bool = True) -> EdgeFacts:
    """What edges of a stack of the model need. Raises EdgeError where it has none, and says why.

    Without `reads_heads`, what its parts need, which heads have whatever their queries are made of.
    """
    model.expect_program("tell apart what components write into the stream")
    known, key = _known.setdefault(model, {}), (stack, reads_heads)
    if key not in known:
        known[key] = EdgeFacts(model, stack, reads_heads=reads_heads)
    return known[key]
