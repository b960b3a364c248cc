"""Hooks by name: added, taken away, and in force for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch

from conewise.compat.hooks.hook_points import (
    Handle,
    HookFunction,
    HookPoint,
    NameOrFilter,
    NamesFilter,
    as_filter,
)
from conewise.compat.hooks.hook_table import HookTable

Tensor = torch.Tensor
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
        for point in self._points(name, dir):
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
                for name, function in _pairs(pairs):
                    added += [
                        (point, point.add_hook(function, dir, level=self.context_level))
                        for point in self._points(name, dir)
                    ]
            yield self
        finally:
            self.context_level -= 1
            for point, handle in added if reset_hooks_end else ():
                point.remove(handle)
            for point, _ in added if clear_contexts else ():
                point.clear_context()

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Hooks, Hooks]:
        """A dictionary, and hooks that fill it when the model runs: forward, and backward with "_grad"."""
        kept: dict[str, Tensor] = {} if cache is None else cache
        is_wanted = as_filter(names_filter, self.table.full)

        def keep(value: Tensor, hook: HookPoint, behind: str = "") -> None:
            found = value.detach().to(device).clone()
            kept[f"{hook.name}{behind}"] = found[0] if remove_batch_dim and len(found) == 1 else found

        names = [name for name in self.table if self.is_listed(name) and is_wanted(name)]
        sites = [name for name in names if incl_bwd and self.table.entries[name].is_site]
        behind = partial(keep, behind="_grad")
        return kept, [(name, keep) for name in names], [(name, behind) for name in sites]

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """A dictionary that is filled whenever the model runs, until `reset_hooks`."""
        kept, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache
        )
        for dir, pairs in (("fwd", forward), ("bwd", backward)):
            for name, function in pairs:
                self.add_hook(name, function, dir)
        return kept

    def _points(self, name: NameOrFilter, dir: str) -> list[HookPoint]:
        """The points that are meant. Gradients are by sites: filters pass by what is none."""
        if isinstance(name, str):
            full = self.table.full(name)
            if dir == "bwd" and not self.table.entries[full].is_site:
                raise ValueError(
                    f"no gradient is known by {full}: it is computed from other values, which nothing "
                    "reads. Take that of the stream in front of it."
                )
            return [self.hook_dict[full]]
        if not callable(name):
            raise TypeError(
                f"a hook is put at a name, or where a function of names is true, and not at {name!r}."
            )
        return [
            point
            for known, point in self.hook_dict.items()
            if self.is_listed(known) and name(known) and (dir != "bwd" or self.table.entries[known].is_site)
        ]

    def is_listed(self, name: str) -> bool:
        """Whether filters of names see it: what has to be switched on is seen only then."""
        raise NotImplementedError

    def _is_hooked(self, dir: str) -> bool:
        return any(point.has_hooks(dir) for point in self.hook_dict.values())


def _pairs(given: Any) -> Hooks:
    """Hooks as they are to be given. Raises TypeError for what is no list of pairs."""
    pairs = [] if isinstance(given, Mapping) else list(given)
    if given and not (pairs and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs)):
        raise TypeError(f"hooks are a list of pairs (name, function), and not {given!r}.")
    return pairs
