"""The cut of a sweep into passes: as few runs of worlds as fit the memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from conewise.amounts import shown_bytes
from conewise.errors import BudgetError

Piece = tuple[int, int, int]
"""Worlds that are computed together: the first, how many, the first position that they change."""


def cut_worlds(
    groups: Sequence[int], starts: Sequence[int], budget: int, peak: Callable[[int, int, int], int]
) -> list[Piece]:
    """Cut groups of so many worlds, one behind the other, into pieces that each fit the budget.

    `starts` has the first position that each world changes, `peak` the most bytes that a piece holds. Raises
    BudgetError where one world alone takes more.
    """
    found: list[Piece] = []
    for first, count in zip(accumulate(groups, initial=0), groups, strict=False):
        found += _pieces(first, count, starts, budget, peak)
    return found


def stored_pieces(chunks: Sequence[int], starts: Sequence[int]) -> list[Piece]:
    """The pieces of a run that was cut into chunks of so many worlds before."""
    return [
        _piece(first, count, starts)
        for first, count in zip(accumulate(chunks, initial=0), chunks, strict=False)
    ]


def _piece(first: int, count: int, starts: Sequence[int]) -> Piece:
    return first, count, min(starts[first : first + count])


def _pieces(
    first: int, count: int, starts: Sequence[int], budget: int, peak: Callable[[int, int, int], int]
) -> list[Piece]:
    """Runs of worlds of about equal length, as few as possible."""
    pieces = 1
    while True:
        size = math.ceil(count / pieces)
        found = [_piece(first + begin, min(size, count - begin), starts) for begin in range(0, count, size)]
        most = 0
        for piece in found:
            most = max(most, peak(*piece))
            if most > budget and size > 1:
                break
        if most <= budget:
            return found
        if size == 1:
            raise no_room(max(peak(*_piece(world, 1, starts)) for world in range(len(starts))), budget)
        pieces = min(count, max(pieces + 1, math.ceil(pieces * most / budget)))


def no_room(least: int, budget: int, what: str = "one world alone") -> BudgetError:
    """The error where one world alone takes more than the budget."""
    return BudgetError(f"{what} takes {shown_bytes(least)}", shown_bytes(budget), least)
