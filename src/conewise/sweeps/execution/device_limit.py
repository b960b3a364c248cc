"""A limit for what torch's allocator has of a CUDA device: holes are given back before it goes beyond.

The allocator keeps what is freed, and cuts blocks from it. What is left between blocks is too small for the
next stack, so that it takes more from the driver. It gives holes back where it would not get more: page by
page, where segments are expandable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SMALL_BLOCK = 1 << 20
"""Blocks up to this size are cut from small segments of their own."""

PAGE = 20 << 20
"""What the allocator takes at least for larger ones."""

MARGIN = 2 * PAGE
"""What of a budget is left for pages that a block does not fill."""

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
    """What the allocator was told, by the environment or since."""
    read = getattr(native, "_accelerator_getAllocatorSettings", None)
    found = read() if read is not None else ""
    return str(found or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def _with(settings: str, *, is_expandable: bool) -> str:
    own = f"{EXPANDABLE}:{is_expandable}"
    return f"{settings},{own}" if settings else own


def _stats(device: torch.device) -> Any:
    return torch.cuda.memory_stats_as_nested_dict(device)
