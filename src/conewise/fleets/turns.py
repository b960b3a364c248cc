"""Turns: workers are had by one at a time, for what a seat has is of one sweep or search."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from conewise.errors import FleetError


class Turn:
    """Whether workers are taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the workers meanwhile. Raises FleetError where they are taken: by a progress function, say."""
        if not self._lock.acquire(blocking=False):
            raise FleetError(
                "these workers are in the middle of another sweep or search. Give others, or wait until that "
                "has ended."
            )
        try:
            yield
        finally:
            self._lock.release()
