"""Hooks by name: added, taken away, and in force for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from conewise.compat.hook_points import Handle, HookFunction, HookPoint, NameOrFilter
from conewise.compat.hook_table import HookTable

Hooks = Sequence[tuple[NameOrFilter, HookFunction]]
"""Pairs of a hook's name, or a function of names, and a function `hook(value, hook)`."""


class HookRegistry:
    """A model whose named values functions are called with. `hook_dict` has a point for every name."""

    table: HookTable
    hook_dict: dict[str, HookPoint]
    context_level: int = 0

    def hook_points(self) -> Sequence[HookPoint]:
        """Every hook point, in the order of computation."""
        return list(self.hook_dict.values())

    def add_hook(
        self,
        name: NameOrFilter,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Call a function with the value of a name, or of all that a filter takes, until `reset_hooks`."""
        for point in self._points(name):
            point.add_hook(hook, dir, is_permanent, level, prepend)

    def add_perma_hook(self, name: NameOrFilter, hook: HookFunction, dir: str = "fwd") -> None:
        """The same until `reset_hooks(including_permanent=True)`."""
        self.add_hook(name, hook, dir, is_permanent=True)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: str = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Take all hooks away."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Take all hooks away, and leave what they kept in `ctx`."""
        for point in self.hook_dict.values():
            point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empty the `ctx` of every hook point."""
        for point in self.hook_dict.values():
            point.clear_context()

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """The model with these hooks on, for the length of a block; with False, they stay on after it."""
        added: list[tuple[HookPoint, Handle]] = []
        self.context_level += 1
        try:
            for dir, pairs in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
                for name, function in pairs:
                    added += [
                        (point, point.add_hook(function, dir, level=self.context_level))
                        for point in self._points(name)
                    ]
            yield self
        finally:
            self.context_level -= 1
            for point, handle in added if reset_hooks_end else ():
                point.remove(handle)
            for point, _ in added if clear_contexts else ():
                point.clear_context()

    def _points(self, name: NameOrFilter) -> list[HookPoint]:
        if isinstance(name, str):
            return [self.hook_dict[self.table.full(name)]]
        if not callable(name):
            raise TypeError(
                f"a hook is put at a name, or where a function of names is true, and not at {name!r}."
            )
        return [point for known, point in self.hook_dict.items() if self.is_listed(known) and name(known)]

    def is_listed(self, name: str) -> bool:
        """Whether filters of names see it: what has to be switched on is seen only then."""
        raise NotImplementedError

    def _is_hooked(self, dir: str) -> bool:
        return any(point.has_hooks(dir) for point in self.hook_dict.values())
