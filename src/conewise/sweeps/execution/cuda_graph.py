"""A pass that runs again and again: on CUDA it is captured once as a graph, and then replayed.

A replay launches no kernel from Python, so what is left is the work itself. Capturing pays where shapes
repeat: chunks of one size, prompts of one length, the same sweep run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conewise.locations.places import Place
from conewise.runs.run import Edit
from conewise.sweeps.execution.fills import PartFunction, PassFills, Site, Values
from conewise.sweeps.execution.wavefront import ReadValue, Wavefront
from conewise.sweeps.planning.passes.instructions import PassProgram

Tensor = torch.Tensor


class PassRunner:
    """One pass of a plan, ready to run over any baseline of its shape.

    The first run is eager. On CUDA, where all that is put in are tensors, the second one captures a graph
    over copies of what the first had read, and every further run copies its baseline there and replays it.
    """

    def __init__(
        self, wavefront: Wavefront, program: PassProgram, fills: PassFills, *, can_replay: bool
    ) -> None:
        self._wavefront, self.program, self.fills = wavefront, program, fills
        self._can_replay = can_replay
        self._names: set[str] = set()
        self._slots: dict[str, Tensor] = {}
        self._site_slots: dict[Site, Tensor] = {}
        self._held: dict[str, Any] = {}  # constants that the graph reads: they must outlive their run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: dict[str, Tensor] = {}
        self._brought: dict[int, Tensor] = {}
        self._runs = 0

    def run(
        self, read: ReadValue, values: Values, room_for: Callable[[int], None] | None = None
    ) -> dict[str, Tensor]:
        """The targets in all worlds, stacked. They hold until the next run.

        `room_for` is told before bytes are taken, where operations are run one by one.
        """
        self._runs += 1
        sites = self.fills.sites()
        wholes = {site: values.whole(site) for site in sites}
        tensors = {site: whole for site, whole in wholes.items() if whole is not None}
        is_plain = len(tensors) == len(sites) and not values.suspicious and not self.fills.has_edits()
        if not self._can_replay or not is_plain:
            return self._wavefront.run(self.program, read, self.fills, values, room_for)
        if self._runs == 1:
            return self._wavefront.run(self.program, self._recording(read), self.fills, values, room_for)
        with torch.no_grad():
            if self._graph is None:
                self._capture(read, tensors, values)
            for name, slot in self._slots.items():
                self._bring(slot, read(name))
            for site, slot in self._site_slots.items():
                self._bring(slot, tensors[site])
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _bring(self, slot: Tensor, value: Tensor) -> None:
        """Copy a value into its slot, unless it is what was copied there last: cached values never change."""
        last = self._brought.get(id(slot))
        if last is None or not _is_same_memory(last, value):
            slot.copy_(value, non_blocking=True)
            self._brought[id(slot)] = value

    def _recording(self, read: ReadValue) -> ReadValue:
        varying = self._wavefront.layout.varying

        def record(name: str) -> Any:
            value = read(name)
            if name in varying and isinstance(value, torch.Tensor):
                self._names.add(name)
            return value

        return record

    def _capture(self, read: ReadValue, tensors: dict[Site, Tensor], values: Values) -> None:
        """Record the pass once, over slots for all that changes from run to run."""
        self._slots = {name: read(name).clone() for name in self._names}
        self._site_slots = {site: whole.clone() for site, whole in tensors.items()}

        def from_slots(name: str) -> Any:
            if name in self._slots:
                return self._slots[name]
            if name not in self._held:
                self._held[name] = read(name)
            return self._held[name]

        slotted = _Slotted(self._site_slots, values)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Warms up workspaces outside of the capture.
            self._wavefront.run(self.program, from_slots, self.fills, slotted)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = self._wavefront.run(self.program, from_slots, self.fills, slotted)
        self._graph = graph


class _Slotted:
    """Values from slots, which are written to before each replay; edits of the base are its own."""

    suspicious: frozenset[Site] = frozenset()

    def __init__(self, slots: dict[Site, Tensor], values: Values) -> None:
        self._slots, self._values = slots, values

    def whole(self, site: Site) -> Tensor | None:
        return self._slots[site]

    def part(self, place: Place) -> Tensor | PartFunction:
        return self._values.part(place)

    def edit(self, number: int) -> Edit:
        return self._values.edit(number)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, both alive, are the same part of the same memory, not written to in between."""
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one._version == other._version
    )
