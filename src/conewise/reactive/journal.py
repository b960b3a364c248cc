"""The journal of a change: what it has overwritten so far, so that it happens whole or not at all.

Ctrl-C, a timeout or a lack of memory may raise between any two instructions. Whoever changes a graph or a
world writes down here what stood, and then overwrites it; what is broken off is taken back.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, MutableMapping
from operator import setitem
from types import FrameType
from typing import Any, Final, TypeVar

from conewise.errors import BusyError

T = TypeVar("T")
Call = tuple[Callable[..., object], *tuple[Any, ...]]
"""A function to call, and its arguments."""

_ABSENT: Final = object()


class Journal:
    """The log of a change, or a demand, over one graph, from which it can be taken back; one at a time.

    Each entry says what to call to put one entry back as it was, and may be called twice. So the entries,
    last first, lead back from wherever the change was broken off, and from where that was broken off in turn.
    """

    __slots__ = ("_after", "_during", "_entries", "doing", "note")

    def __init__(self) -> None:
        self.doing: FrameType | None = None
        """The call of `make` that is under way, or that was broken off while it took a change back."""
        self.note: Callable[[Call], None] = _ignore
        """Write down what puts back what is overwritten next. Bare, because waves call it often."""
        self._during = ""
        self._entries: list[Call] = []
        self._after: list[Call] = []

    # -- do ----------------------------------------------------------------------------------

    def make(self, change: Callable[..., T], *args: Any, during: str = "change") -> T:
        """Call `change`, whole or not at all; then call what was left for afterwards.

        What is made lasts from one assignment on: an exception before it takes everything back,
        one after it nothing. Where the taking back is itself interrupted, the next use goes on with it.
        """
        if self.doing is not None:
            raise BusyError(f"another {during}", self._during)
        # A name for the frame would make a cycle, and hold what a dropped world should let go.
        try:
            self._entries, self._after, self._during = [], [], during
            self.note = self._entries.append
            self.doing = sys._getframe()
            made = change(*args)
            after = self._after
            self.doing = None
        except BaseException:
            self._take_back()
            raise
        self.note = _ignore
        for call, *arguments in after:
            call(*arguments)
        return made

    def expect_idle(self, action: str) -> None:
        """Nothing is being done; raises if it is, and makes good what an interruption left behind."""
        if self.doing is not None:
            if self._is_under_way():
                raise BusyError(action, self._during)
            self._take_back()

    def recover(self) -> None:
        """Make good what an interruption left behind. What is under way goes on."""
        if self.doing is not None and not self._is_under_way():
            self._take_back()

    def _is_under_way(self) -> bool:
        """True if somebody is still at it: the call is on the stack of this thread, or of another."""
        return self._is_below(sys._getframe()) or any(map(self._is_below, _tops()))

    def _is_below(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self.doing:
            frame = frame.f_back
        return frame is not None

    def _take_back(self) -> None:
        self.note = _ignore
        if self.doing is not None:
            entries = self._entries
            while entries:
                undo, *args = entries[-1]
                undo(*args)
                entries.pop()
            self.doing = None

    # -- write down, then overwrite ------------------------------------------------------------

    def afterwards(self, *call: *Call) -> None:
        """Make this call when the change is made."""
        self._after.append(call)

    def assign(self, owner: object, name: str, value: object) -> None:
        """`owner.name = value`."""
        self.note((setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def replace(self, column: list[Any] | dict[int, Any], index: int, value: Any) -> None:
        """`column[index] = value`, where there is an entry already."""
        self.note((setitem, column, index, column[index]))
        column[index] = value

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """`mapping[key] = value`."""
        # `get` asks an overlay for its own entries only, and `pop` takes from those.
        old = mapping.get(key, _ABSENT)
        self.note((mapping.pop, key, None) if old is _ABSENT else (setitem, mapping, key, old))
        mapping[key] = value

    def pop(self, mapping: MutableMapping[Any, Any], key: Any) -> Any:
        """`mapping.pop(key, None)`."""
        if key not in mapping:
            return None
        self.note((setitem, mapping, key, mapping[key]))
        return mapping.pop(key)

    def append(self, column: list[Any], value: Any) -> None:
        """`column.append(value)`."""
        self.note((truncate, column, len(column)))
        column.append(value)


def _tops() -> list[FrameType]:
    """Return the current frame of each thread.

    Python holds a lock while it makes the list, and garbage that is collected meanwhile can wait for it for
    ever (CPython's issue 106883; test_garbage_does_not_wait_for_the_frames_of_threads).
    """
    is_collecting = gc.isenabled()
    try:
        gc.disable()
        return list(sys._current_frames().values())
    finally:
        if is_collecting:
            gc.enable()


def truncate(column: list[Any], length: int) -> None:
    """Drop what was added to `column` since it had this length."""
    del column[length:]


def _ignore(_: Call) -> None:
    """Nothing is being made, so nothing is written down."""
