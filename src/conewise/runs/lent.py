"""What was lent of a run: values that others read, which nobody may write to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conewise.errors import PatchError
from conewise.program.tensors import writes_to
from conewise.program.weights import Sums, bits_of


class Lent:
    """Values by name, with what they held when they were lent.

    Raises PatchError for one that was written to since.
    """

    def __init__(self) -> None:
        self._lent: dict[str, tuple[Any, int, Sums, int]] = {}

    def lend(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Note what these hold now."""
        sums = bits_of(values)
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            known = self._lent.get(name)
            if known is not None and known[0] is value and known[2][known[3]] != sums[place]:
                raise _written(name)
            self._lent[name] = value, writes_to(value), sums, place

    def check_writes(self) -> None:
        """Look for writes that torch counts."""
        for name, (value, writes, _, _) in self._lent.items():
            if writes_to(value) != writes:
                raise _written(name)

    def check_bits(self) -> None:
        """Look for any writes: every bit is read."""
        if self._lent:
            now = bits_of([value for value, *_ in self._lent.values()])
            for (name, (_, _, sums, place)), found in zip(self._lent.items(), now, strict=True):
                if sums[place] != found:
                    raise _written(name)

    def clear(self) -> None:
        """Forget what was lent."""
        self._lent.clear()


def _written(name: str) -> PatchError:
    return PatchError(
        f"the value of {name!r} was written to after it was read from here. It is the cached value that "
        "others are computed from: run again, and write to a copy, `run[...].clone()`, or patch the site in "
        "a fork."
    )
