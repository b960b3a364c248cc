"""Work on a CUDA device that is recorded once as a graph, and then replayed without Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

Tensor = torch.Tensor

KERNEL_RATE = {torch.float32: 4e13, torch.float64: 4e13, torch.bfloat16: 4e14, torch.float16: 4e14}
"""Operations that a device of today does in a second, about; what is not listed counts as float32."""

LAUNCH_SECONDS = 5e-5
"""Seconds in which the host launches one step of a pass, about: where kernels take longer, it keeps ahead."""


def replay_pays(flops: int, launches: int, dtype: torch.dtype) -> bool:
    """True if the host would be slower than the device: kernels are shorter than the time to launch one."""
    rate = KERNEL_RATE.get(dtype, KERNEL_RATE[torch.float32])
    return flops / rate < launches * LAUNCH_SECONDS


class Graph(Protocol):
    """A recorded action."""

    def replay(self) -> None:
        """Do it again."""


Record = Callable[[Callable[[], None]], Graph]
"""Records an action. The action is run by that, or only noted."""


class Replayed:
    """An action over tensors that stay where they are: slots for what changes from run to run.

    `record` makes a graph of it; see `recorder`. A slot may be given memory that is written to elsewhere
    before each run, and is then not copied to.
    """

    def __init__(
        self,
        action: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        slots: Mapping[str, Tensor],
        record: Record,
    ) -> None:
        self._slots = dict(slots)
        self.outputs: dict[str, Tensor] = {}

        def act() -> None:
            self.outputs = action(self._slots)

        device = next(iter(self._slots.values())).device
        before = _allocated(device, "current")
        self._graph = record(act)
        self.held = _allocated(device, "peak") - before
        """The most bytes that the graph holds."""

    def run(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs for what is given, a value for each slot; they hold until the next run."""
        names = [name for name, slot in self._slots.items() if not _is_same_memory(slot, given[name])]
        copy_all([self._slots[name] for name in names], [given[name] for name in names])
        self._graph.replay()
        return self.outputs


def copy_all(slots: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into slots, with as few launches as torch has for it."""
    if slots:
        torch._foreach_copy_(list(slots), list(values), non_blocking=True)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype


class GraphPool:
    """Memory that all graphs of a model share: they are replayed one after another, never together."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._size = device, 0
        self._reserving: Graph | None = None
        with torch.cuda.device(device):
            self._handle = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                one = torch.ones(1, 1, device=device)
                one @ one  # makes what products of this stream need, outside of any graph

    def reserve(self, size: int) -> None:
        """Let the pool have one piece of memory, from which graphs that are recorded later cut theirs."""
        if size > self._size:
            self._size, self._reserving = size, self.record(lambda: _take(size, self._device))

    def warm(self, action: Callable[[], None]) -> None:
        """Do an action where it will be recorded: what libraries make at their first call is there then."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                action()
            torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, action: Callable[[], None]) -> Graph:
        """Record an action; it is not run by that."""
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
                try:
                    action()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph


def _take(size: int, device: torch.device) -> None:
    torch.empty(size, dtype=torch.uint8, device=device)[:1].zero_()  # a graph has to do something


def _allocated(device: torch.device, which: str) -> int:
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    found: int = stats["allocated_bytes"]["all"][which]
    return found
