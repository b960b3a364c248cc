"""A walk over all that a value is made of, which knows where it is and what it has met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from conewise.errors import IdentityError
from conewise.identity.names import LITERAL
from conewise.identity.outside import OUTSIDE
from conewise.identity.short_text import short

Describe = Callable[["Walk", Any], str]


class Walk:
    """One walk over all that a value is made of. What is met again is named by where it was met first.

    `describe` says what a value is, given the walk: it asks that for what the value holds.
    """

    def __init__(
        self, describe: Describe, above: Mapping[int, str] | None = None, where: tuple[str, ...] = ()
    ) -> None:
        self._describe = describe
        self._seen = dict(above or {})
        self._kept: list[object] = []  # an object that goes would leave its number to the next one
        self._stack: dict[int, str] = dict(above or {})
        self._where = list(where)

    def text(self, value: object) -> str:
        """The identity of a value."""
        if type(value) in LITERAL:
            return short("", repr(value))
        if id(value) in OUTSIDE:
            raise self.refused(f"{OUTSIDE[id(value)]}, which reads or runs what is no part of the program")
        if id(value) in self._seen:
            return f"the {self._seen[id(value)]}"
        self.enter(value, " ".join(self._where) or "value")
        try:
            return self._describe(self, value)
        finally:
            del self._stack[id(value)]
            if type(value) is tuple:
                # Equal constants may be one object or several: that is the compiler's matter.
                del self._seen[id(value)]

    def enter(self, value: object, here: str) -> None:
        """Note where a value is met: what it holds may be itself."""
        self._seen[id(value)] = self._stack[id(value)] = here
        self._kept.append(value)

    def keep(self, value: object) -> None:
        """Hold a value that was made for the walk, until it ends."""
        self._kept.append(value)

    def at(self, name: str, value: object) -> str:
        """The identity of a value that the one at hand has under a name."""
        self._where.append(name)
        try:
            return self.text(value)
        finally:
            self._where.pop()

    def items(self, values: Iterable[object]) -> str:
        """Values in their order."""
        return ", ".join(self.at(str(index), item) for index, item in enumerate(values))

    def pairs(self, values: Mapping[Any, Any]) -> str:
        """Keys and values in their order."""
        return ", ".join(
            f"{self.at(f'key {index}', key)}: {self.at(_label(key, index), item)}"
            for index, (key, item) in enumerate(values.items())
        )

    def unordered(self, values: Iterable[object]) -> str:
        """Values without an order."""
        # Each by itself: in another process they come in another order.
        where = tuple(self._where)
        return ", ".join(sorted(Walk(self._describe, self._stack, where).text(item) for item in values))

    def attributes(self, named: Mapping[str, object]) -> str:
        """By name: the order in which attributes were set means nothing."""
        return ", ".join(f"{name}={self.at(f'.{name}', item)}" for name, item in sorted(named.items()))

    def refused(self, what: str) -> IdentityError:
        """The error that says what cannot be identified, and where it is."""
        return IdentityError(" → ".join(self._where), what)


def _label(key: object, index: int) -> str:
    return repr(key) if type(key) in (str, int) else f"value {index}"
