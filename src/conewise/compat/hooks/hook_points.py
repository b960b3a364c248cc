"""Hook points: the functions that are called with a value when the model computes it, by the value's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
HookFunction = Callable[..., Any]
"""`function(value, hook)`: what it returns takes the value's place; with None, the value as it was left."""

DIRECTIONS = ("fwd", "bwd")


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """One function at a hook point. `level` is how deep in `hooks()` blocks it was added."""

    function: HookFunction
    is_permanent: bool = False
    level: int | None = None


class HookPoint:
    """One named value of the model, and the functions that are called with it.

    `ctx` is a dictionary for whatever the functions want to keep until it is cleared.
    """

    def __init__(self, name: str, layer: int | None = None) -> None:
        self.name, self._layer = name, layer
        self.ctx: dict[Any, Any] = {}
        self.fwd_hooks: list[Handle] = []
        self.bwd_hooks: list[Handle] = []

    def layer(self) -> int:
        """The number of its block."""
        if self._layer is None:
            raise ValueError(f"{self.name} is in no block, so it has no layer.")
        return self._layer

    def add_hook(
        self,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Handle:
        """Call a function with this value from now on, until `reset_hooks`; permanent ones stay even then."""
        if not callable(hook):
            raise TypeError(f"a hook is a function (value, hook), and {hook!r} is none.")
        handle = Handle(hook, is_permanent, level)
        functions = self._of(dir)
        functions.insert(0 if prepend else len(functions), handle)
        return handle

    def add_perma_hook(self, hook: HookFunction, dir: str = "fwd") -> Handle:
        """Call a function with this value from now on; `reset_hooks` leaves it."""
        return self.add_hook(hook, dir, is_permanent=True)

    def remove(self, handle: Handle) -> None:
        """Take one function away again."""
        for functions in (self.fwd_hooks, self.bwd_hooks):
            functions[:] = [one for one in functions if one is not handle]

    def remove_hooks(
        self, dir: str = "fwd", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Take functions away: those of a direction ("both" for all), of one level where one is given."""
        for one in DIRECTIONS if dir == "both" else (dir,):
            functions = self._of(one)
            functions[:] = [
                handle
                for handle in functions
                if (handle.is_permanent and not including_permanent)
                or (level is not None and handle.level != level)
            ]

    def has_hooks(
        self, dir: str = "both", including_permanent: bool = True, level: int | None = None
    ) -> bool:
        """Whether there are functions here."""
        return any(
            (including_permanent or not handle.is_permanent) and (level is None or handle.level == level)
            for one in (DIRECTIONS if dir == "both" else (dir,))
            for handle in self._of(one)
        )

    def clear_context(self) -> None:
        """Empty `ctx`."""
        self.ctx.clear()

    def called(self, value: Tensor) -> Tensor:
        """What the functions make of a value, each of what the one before it left; they may write to it."""
        for handle in tuple(self.fwd_hooks):
            found = handle.function(value, hook=self)
            value = value if found is None else found
        return value

    def _of(self, dir: str) -> list[Handle]:
        if dir not in DIRECTIONS:
            raise ValueError(f"dir is 'fwd' or 'bwd', and {dir!r} is neither.")
        return self.fwd_hooks if dir == "fwd" else self.bwd_hooks

    def __repr__(self) -> str:
        return f"HookPoint {self.name}: {len(self.fwd_hooks)} forward, {len(self.bwd_hooks)} backward"


NameOrFilter = str | Callable[[str], bool]
NamesFilter = NameOrFilter | Iterable[str] | None


def as_filter(names_filter: NamesFilter, full: Callable[[str], str]) -> Callable[[str], bool]:
    """A predicate of names: of one name, of several, of a function, or of None for all.

    `full` gives the full name of what was written, and raises where there is no such name.
    """
    if names_filter is None:
        return lambda _: True
    if isinstance(names_filter, str):
        return full(names_filter).__eq__
    if callable(names_filter):
        return names_filter
    return frozenset(full(name) for name in names_filter).__contains__
