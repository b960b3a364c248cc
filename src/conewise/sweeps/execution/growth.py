"""Memory that work takes: measured, and kept to what was planned, or to a budget.

On the CPU it is the process that grows. The C library keeps what is freed, in holes that later blocks may not
fit, so that a process can grow by twice what its tensors hold. glibc gives holes back when it is told to, and
is told to before something is computed that would go beyond the plan of a run that has a budget.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from conewise.jobs.digests import memory_held

SMALL = 16 << 20
"""A process grows by this much for reasons of its own: what is planned to take less is measured, not held."""

SLACK = 0.05
"""The share of the plan by which a process may go beyond it, before holes are given back."""

BESIDE = 3 << 20
"""The bytes of a budget that are left for what is no tensor: plans, indices, kernels' own memory."""

INTERVAL = 0.005
"""Seconds from one look at the process to the next."""

STATM, STATUS = Path("/proc/self/statm"), Path("/proc/self/status")


class Watch:
    """Watches what is held beyond what was held when the watch began.

    When it has ended, `peak` says how much that was at most, and `reserved` how much more the allocator of a
    GPU then had from the driver; None where nothing measures it.
    """

    peak: int | None = None
    reserved: int | None = None

    def room_for(self, size: int) -> None:
        """Be told that so many bytes will be taken."""

    def settle(self) -> None:
        """Be told that what was taken is free again."""

    def note(self, held: int) -> None:
        """Be told what is held that was taken before the watch began: by a graph that is replayed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the watch."""


@contextmanager
def watching(devices: Sequence[torch.device], planned: int, budget: int | None = None) -> Iterator[Watch]:
    """Watch work on some devices that is planned to take so many bytes of all of them, of a budget.

    On CUDA devices this resets the peaks that torch keeps; where there are some, they alone are watched.
    Elsewhere it is the process that is watched, and nothing that others measure is changed. Large work
    without a budget is not watched where memory could be given back: it runs faster in memory that the
    process keeps, and what a process grows by says nothing once it has room from before.
    """
    on_cuda = [device for device in devices if device.type == "cuda"]
    if on_cuda:
        with DeviceWatch(on_cuda, planned if len(devices) == 1 else 0, budget) as watch:
            yield watch
        return
    with process_meter() as meter:
        is_free = budget is None and planned >= SMALL and meter.give_back is not None
        with Watch() if is_free else ProcessWatch(meter, planned, budget) as watch:
            yield watch


# -- the process -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meter:
    """Reads how much a process holds now, and held at most in its life; 0 where the system does not say.

    `give_back` returns holes to the system, where that can be done.
    """

    held: Callable[[], int]
    record: Callable[[], int]
    give_back: Callable[[], object] | None = None


class ProcessWatch(Watch):
    """The watch of a process.

    `peak` is exact where the process broke its own record; else it is the highest of many looks.
    """

    def __init__(self, meter: Meter, planned: int, budget: int | None = None) -> None:
        self._meter, self._lock, self._ended = meter, threading.Lock(), threading.Event()
        self._floor = self._top = self._level = meter.held()
        self._record = meter.record()
        is_large = planned >= SMALL and self._floor > 0
        self._give_back = meter.give_back if is_large else None
        self._looking = threading.Thread(target=self._look_often, daemon=True) if is_large else None
        allowed = int(planned * (1 + SLACK))
        if budget is not None:
            allowed = max(planned, min(allowed, budget - BESIDE))
        self._limit = self._floor + allowed

    def room_for(self, size: int) -> None:
        """Before so many bytes are taken, give holes back where the process would go beyond the plan."""
        if self._give_back is None:
            return
        self._level += size  # no look is needed as long as this, the most that it can be, is allowed
        if self._level <= self._limit:
            return
        held = self._look()
        if held + size > self._limit:
            self._give_back()
            held = self._look()
            self._limit = max(self._limit, held + size)  # what is left is no hole, and would stay
        self._level = held + size

    def settle(self) -> None:
        """Give holes back where the process has gone beyond the plan."""
        if self._give_back is not None and self._look() > self._limit:
            self._give_back()
            self._level = self._look()
            self._limit = max(self._limit, self._level)

    def _look(self) -> int:
        with self._lock:
            held = self._meter.held()
            self._top = max(self._top, held)
        return held

    def _look_often(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._look()

    def __enter__(self) -> Self:
        if self._looking is not None:
            self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._looking is not None:
            self._looking.join()
        held, record = self._look(), self._meter.record()
        if self._floor:
            self.peak = max(self._top, record if record > self._record else 0) - self._floor
        if self._give_back is not None and held - self._floor > SMALL:
            self._give_back()


@contextmanager
def process_meter() -> Iterator[Meter]:
    """The meter of this process; elsewhere than on Linux the record is all that a system says."""
    if not STATM.exists():
        record = functools.partial(memory_held, torch.device("cpu"))
        yield Meter(record, record)
        return
    page = os.sysconf("SC_PAGE_SIZE")
    with STATM.open("rb", buffering=0) as statm:

        def held() -> int:
            return int(os.pread(statm.fileno(), 128, 0).split()[1]) * page

        yield Meter(held, _record, _give_back())


def _record() -> int:
    found = re.search(rb"VmHWM:\s*(\d+) kB", STATUS.read_bytes())
    return int(found[1]) * 1024 if found else 0


@functools.cache
def _give_back() -> Callable[[], object] | None:
    """`malloc_trim` of glibc, None where there is another C library."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    trim.argtypes = [ctypes.c_size_t]
    return functools.partial(trim, 0)


class Holes:
    """The holes that batches leave in a process, given back between them where it has grown by `SMALL`.

    What is kept of each batch is small, and lies between blocks that are free again: without it, a process
    would grow with the number of batches.
    """

    def __init__(self) -> None:
        with process_meter() as meter:
            self._level = meter.held()

    def settle(self) -> None:
        """Be told that a batch is done."""
        with process_meter() as meter:
            if meter.give_back is not None and meter.held() > self._level + SMALL:
                meter.give_back()
                self._level = max(self._level, meter.held())


# -- a GPU -------------------------------------------------------------------------------------


ARENA = 1.4
"""The amount that is taken from the driver at once, relative to the plan: room for holes between blocks."""

ROOMY = 4.0
"""A budget of so many times the plan, or none, leaves room for all holes, and for a pass that is recorded."""


def is_roomy(planned: int, budget: int | None) -> bool:
    """True if a budget is so large that nothing has to be done to keep it."""
    return budget is None or ROOMY * planned <= budget


class DeviceWatch(Watch):
    """The watch of CUDA devices: what torch's tensors take there, exactly; of several, added up.

    With a roomy budget, what is planned is taken from the driver as one piece, and given to torch's allocator
    to cut blocks from. Else each stack that is larger than those before it would get a piece of its own, and
    all of them would be kept. A tight budget is kept by a limit: what the allocator has, beyond what is in
    use when the watch begins, stays under it. How much is computed on which of several devices is not
    planned: nothing is taken in advance there, and nothing limited.
    """

    def __init__(self, devices: Sequence[torch.device], planned: int, budget: int | None) -> None:
        self._devices, self._planned, self._budget = devices, planned, budget
        self._before: list[tuple[int, int]] = []
        self._noted = 0
        self._limit: DeviceLimit | None = None
        self._entered = ExitStack()

    def room_for(self, size: int) -> None:
        """Before so many bytes are taken, let the allocator give holes back where it would exceed a limit."""
        if self._limit is not None:
            self._limit.room_for(size)

    def note(self, held: int) -> None:
        """Be told what a graph holds that is replayed: its memory was taken when it was recorded."""
        self._noted = max(self._noted, held)

    def __enter__(self) -> Self:
        reserved = [_stats(device)["reserved_bytes"]["all"]["current"] for device in self._devices]
        if self._budget is not None and not is_roomy(self._planned, self._budget):
            self._limit = DeviceLimit(self._devices[0], self._budget)
            self._entered.enter_context(expandable_segments())
        elif self._planned:
            with suppress(torch.OutOfMemoryError):  # then pieces as they come
                torch.empty(int(self._planned * ARENA), dtype=torch.uint8, device=self._devices[0])
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        allocated = [_stats(device)["allocated_bytes"]["all"]["current"] for device in self._devices]
        self._before = list(zip(allocated, reserved, strict=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
        self.peak, self.reserved = self._noted if len(self._devices) == 1 else 0, 0
        taken = 0
        for device, (allocated, reserved) in zip(self._devices, self._before, strict=True):
            stats = _stats(device)
            taken += stats["allocated_bytes"]["all"]["peak"] - allocated
            self.reserved += stats["reserved_bytes"]["all"]["peak"] - reserved
        self.peak = max(self.peak, taken)
        if self._budget is not None and self.reserved > self._budget:
            torch.cuda.empty_cache()


def _stats(device: torch.device) -> Any:
    return torch.cuda.memory_stats_as_nested_dict(device)


# ------------------------------------------------------------------------------------------
# A limit for what torch's allocator has of a CUDA device: holes are given back before it goes beyond.
#
# The allocator keeps what is freed, and cuts blocks from it. What is left between blocks is too small for the
# next stack, so that it takes more from the driver. It gives holes back where it would not get more: page by
# page, where segments are expandable.

SMALL_BLOCK = 1 << 20
"""Blocks up to this size are cut from small segments of their own."""

PAGE = 20 << 20
"""The least that the allocator takes for larger ones."""

MARGIN = 2 * PAGE
"""The bytes of a budget that are left for pages that a block does not fill."""

EXPANDABLE = "expandable_segments"


class DeviceLimit:
    """Keeps what the allocator has of a device, beyond what is in use at the beginning, under a budget."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self._device, self._total = device, int(torch.cuda.get_device_properties(device).total_memory)
        stats = _stats(device)
        self._split = stats["inactive_split_bytes"]["all"]["current"]  # there to stay, between others' blocks
        used = stats["allocated_bytes"]["all"]["current"] + self._split
        self._most = used + max(budget - MARGIN, budget // 2)
        self._pooled = max(budget // 4, 8 * PAGE)

    def room_for(self, size: int) -> None:
        """Let the allocator have a free piece of so many bytes; first it gives back what it has to.

        It is asked under a limit which holds for this question alone: nobody else's are refused.
        """
        if size <= SMALL_BLOCK:
            return
        try:
            with self._limited():
                torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            # It has given back all that it can. Much that is left unused lies in the pools of graphs.
            stats = _stats(self._device)
            reserved, allocated = (
                stats[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated")
            )
            unused = reserved - allocated - self._split
            if unused > self._pooled:
                self._most, self._pooled = self._most + unused, self._total

    @contextmanager
    def _limited(self) -> Iterator[None]:
        before = torch.cuda.get_per_process_memory_fraction(self._device)
        torch.cuda.set_per_process_memory_fraction(min(before, self._most / self._total), self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self._device)


@contextmanager
def expandable_segments() -> Iterator[None]:
    """Let new segments be expandable meanwhile; where the user has said how they are, that stays."""
    native: Any = torch._C
    change = getattr(native, "_accelerator_setAllocatorSettings", None)
    settings = _settings(native)
    if change is None or sys.platform != "linux" or EXPANDABLE in settings or "backend" in settings:
        yield
        return
    change(_with(settings, is_expandable=True))
    try:
        yield
    finally:
        change(_with(settings, is_expandable=False))
        change(settings)  # as they were, word for word


def _settings(native: Any) -> str:
    """Return what the allocator was told, by the environment or since."""
    read = getattr(native, "_accelerator_getAllocatorSettings", None)
    found = read() if read is not None else ""
    return str(found or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def _with(settings: str, *, is_expandable: bool) -> str:
    own = f"{EXPANDABLE}:{is_expandable}"
    return f"{settings},{own}" if settings else own
