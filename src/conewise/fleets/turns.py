"""Turns: workers are had by one at a time, for what a seat has is of one sweep or search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conewise.errors import FleetError


class Turn:
    """Whether workers are taken."""

    def __init__(self) -> None:
        self._is_taken = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the workers meanwhile. Raises FleetError where they are taken: by a progress function, say."""
        if self._is_taken:
            raise FleetError(
                "these workers are in the middle of another sweep or search. Give others, or wait until that "
                "has ended."
            )
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False
