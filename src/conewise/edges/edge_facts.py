"""What edges of a model need, found once and kept with it: its components, their parts, their readers."""

from __future__ import annotations

from functools import cached_property
from weakref import WeakKeyDictionary

from conewise.edges.live_streams import LiveStreams
from conewise.edges.reader_values import ReaderValues
from conewise.edges.stream_parts import StreamParts
from conewise.runs.captured import Captured
from conewise.structure.components import Components


class EdgeFacts:
    """The components of one stack of a model; `parts` and `readers` are made when they are first used."""

    def __init__(self, model: Captured, stack: str = "") -> None:
        self._table, self._program = model.site_table, model.program
        self.components = Components(model.program, model.site_table.model_layers, stack)

    @cached_property
    def parts(self) -> StreamParts:
        """What each component wrote into the stream."""
        return StreamParts(self._table, self.components)

    @cached_property
    def live(self) -> LiveStreams:
        """What readers see when components between are computed anew."""
        return LiveStreams(self._table, self.components)

    @cached_property
    def readers(self) -> ReaderValues:
        """What readers make of a stream."""
        return ReaderValues(self._table, self.components)


_known: WeakKeyDictionary[Captured, dict[str, EdgeFacts]] = WeakKeyDictionary()


def edge_facts(model: Captured, stack: str = "") -> EdgeFacts:
    """What edges of a stack of the model need. Raises EdgeError where it has none, and says why."""
    known = _known.setdefault(model, {})
    if stack not in known:
        known[stack] = EdgeFacts(model, stack)
    return known[stack]
