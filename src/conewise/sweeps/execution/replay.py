"""A wavefront that runs again and again: on CUDA it is captured once as a graph, and then replayed.

A replay launches no kernel from Python, so what is left is the work itself. Capturing pays where shapes
repeat: chunks of one size, prompts of one length, the same sweep run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from conewise.program.records import Program
from conewise.sweeps.execution.wavefront import Fill, Wavefront, WaveStep
from conewise.sweeps.planning.regions import Regions
from conewise.sweeps.planning.stacking import Layout, Tensor

Fills = Mapping[tuple[str, int], Sequence[Fill]]


class Wave:
    """One chunk of a sweep, ready to run over any baseline of its shape.

    The first run is eager. On CUDA, where all fills are tensors, the second one captures a graph over
    copies of what the first had read, and every further run copies its baseline there and replays it.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        regions: Regions,
        steps: Sequence[WaveStep],
        patched: Mapping[str, int],
        targets: Sequence[str],
        worlds: int,
        device: torch.device,
        columns: Mapping[str, Sequence[int]],
        reading: int = 0,
    ) -> None:
        """`reading`: the bytes that are taken when the targets are read."""
        self._program, self._layout, self._regions, self._columns = program, layout, regions, columns
        self._steps, self._patched = tuple(steps), dict(patched)
        self._targets, self._worlds, self._reading = tuple(targets), worlds, reading
        self._can_replay = device.type == "cuda"
        self._wavefront: Wavefront | None = None
        self._read: set[str] = set()
        self._slots: dict[str, Tensor] = {}
        self._fill_slots: list[Tensor] = []
        self._held: dict[str, Any] = {}  # constants that the graph reads: they must outlive their run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: dict[str, Tensor] = {}
        self._brought: dict[int, Tensor] = {}
        self._fills: Fills | None = None
        self._runs = 0

    def run(
        self, read: Callable[[str], Any], fills: Fills, room_for: Callable[[int], None] | None = None
    ) -> dict[str, Tensor]:
        """The targets in all worlds, stacked. They hold until the next run.

        The same `fills`, the very object, stand for the same baseline. `room_for` is told before bytes are
        taken, where operations are run one by one.
        """
        self._runs += 1
        tensors = [fill.value for key in sorted(fills) for fill in fills[key]]
        if not self._can_replay or not all(isinstance(value, torch.Tensor) for value in tensors):
            return self._eager(read, fills, room_for)
        if self._runs == 1:
            return self._eager(self._recording(read), fills, room_for)
        with torch.no_grad():
            if self._graph is None:
                self._capture(read, fills)
            if fills is not self._fills:
                for name, slot in self._slots.items():
                    self._bring(slot, read(name))
                for slot, value in zip(self._fill_slots, tensors, strict=True):
                    self._bring(slot, value)  # type: ignore[arg-type]
                self._fills = fills
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _bring(self, slot: Tensor, value: Tensor) -> None:
        """Copy a value into its slot, unless it is what was copied there last: cached values never change."""
        last = self._brought.get(id(slot))
        if last is None or not _is_same_memory(last, value):
            slot.copy_(value, non_blocking=True)
            self._brought[id(slot)] = value

    @property
    def node_evaluations(self) -> int:
        """What one run computes: a node once for each world, those inside of a fusion too."""
        return sum(
            step.worlds.bit_count() * (1 + len(step.fusion.inside) if step.fusion else 1)
            for step in self._steps
        )

    @property
    def launches(self) -> int:
        """How many operations one run launches."""
        return len(self._steps)

    def _eager(
        self, read: Callable[[str], Any], fills: Fills, room_for: Callable[[int], None] | None = None
    ) -> dict[str, Tensor]:
        if self._wavefront is None:
            self._wavefront = Wavefront(self._program, self._layout, read, self._regions, self._columns)
        self._wavefront.rebase(read)
        try:
            return self._wavefront.run(
                self._steps, self._patched, fills, self._targets, self._worlds, room_for, self._reading
            )
        finally:
            self._wavefront.rebase(_forgotten)  # a dataset is streamed: no baseline is kept for the next

    def _recording(self, read: Callable[[str], Any]) -> Callable[[str], Any]:
        def record(name: str) -> Any:
            value = read(name)
            if name in self._layout.varying and isinstance(value, torch.Tensor):
                self._read.add(name)
            return value

        return record

    def _capture(self, read: Callable[[str], Any], fills: Fills) -> None:
        """Record the wave once, over slots for all that changes from run to run."""
        self._slots = {name: read(name).clone() for name in self._read}
        self._read = set()
        slotted: dict[tuple[str, int], list[Fill]] = {}
        for key in sorted(fills):
            for fill in fills[key]:
                slot = fill.value.clone()  # type: ignore[union-attr]
                self._fill_slots.append(slot)
                slotted.setdefault(key, []).append(Fill(fill.view, fill.part, slot))

        def from_slots(name: str) -> Any:
            if name in self._slots:
                return self._slots[name]
            if name not in self._held:
                self._held[name] = read(name)
            return self._held[name]

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._eager(from_slots, slotted)  # warms up workspaces outside of the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = self._eager(from_slots, slotted)
        self._graph = graph


def _forgotten(name: str) -> Any:
    raise AssertionError(f"{name} is read between two runs")


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, both alive, are the same part of the same memory, not written to in between."""
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one._version == other._version
    )
