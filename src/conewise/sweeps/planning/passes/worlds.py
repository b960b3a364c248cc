"""Sets of worlds: bit masks while a plan is made, ranges where it is kept.

Bit i of a mask is world i. Worlds are numbered so that most sets are a few ranges: (start, stop) pairs in
order, that do not touch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

Ranges = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4096)
def ranges_of(mask: int) -> Ranges:
    """The worlds of a mask as ranges."""
    found, start = [], 0
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        start += gap
        length = (~mask & (mask + 1)).bit_length() - 1
        found.append((start, start + length))
        mask >>= length
        start += length
    return tuple(found)


def mask_of_members(members: Sequence[int]) -> int:
    """The mask of worlds that are given one by one."""
    if len(members) < 8:
        return sum(1 << member for member in set(members))
    bits = np.zeros(max(members) + 1, dtype=bool)
    bits[np.asarray(members)] = True
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def count_of(ranges: Ranges) -> int:
    """How many worlds there are."""
    if len(ranges) == 1:
        return ranges[0][1] - ranges[0][0]
    return sum(stop - start for start, stop in ranges)


def members(worlds: int | Ranges) -> list[int]:
    """The worlds of a mask, or of ranges, first to last."""
    ranges = ranges_of(worlds) if isinstance(worlds, int) else worlds
    return [world for start, stop in ranges for world in range(start, stop)]


def places_in(part: int, whole: int) -> Ranges:
    """Where the worlds of the mask `part` stand among those of `whole`, which has all of them."""
    if whole & (whole + 1) == 0:
        return ranges_of(part)
    found: list[tuple[int, int]] = []
    for start, stop in ranges_of(part):
        first = (whole & ((1 << start) - 1)).bit_count()
        last = first + stop - start
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)


def merged_order(first: int, second: int) -> Ranges | None:
    """The worlds of both masks, those of `first` before those of `second`, as places in their own order.

    None where they stand in their own order already.
    """
    if first.bit_length() <= (second & -second).bit_length() - 1 or not first or not second:
        return None
    pieces = sorted(
        (start, stop, base + before)
        for mask, base in ((first, 0), (second, first.bit_count()))
        for (start, stop), before in zip(ranges_of(mask), _befores(mask), strict=True)
    )
    found: list[tuple[int, int]] = []
    for start, stop, place in pieces:
        if found and found[-1][1] == place:
            found[-1] = found[-1][0], place + stop - start
        else:
            found.append((place, place + stop - start))
    return tuple(found)


def _befores(mask: int) -> list[int]:
    """How many worlds of the mask stand before each of its ranges."""
    found, total = [], 0
    for start, stop in ranges_of(mask):
        found.append(total)
        total += stop - start
    return found
