"""Hook points: functions called with a value when the model computes it, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from conewise.anatomy.places import as_place
from conewise.anatomy.sites import Located
from conewise.compat.hook_table import ON_REQUEST, Change, HookTable
from conewise.program.tensors import Tensor, recording
from conewise.program.walk import bitwise_same, field_names
from conewise.runs.gradients import Tape, node_of, shown_gradient
from conewise.runs.reading import Reading
from conewise.runs.run import Run
from conewise.runs.values import Edit, applied_in_turn, new_part, trained_by

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
        """Call a function with this value from now on, until `reset_hooks`, or longer if permanent."""
        if not callable(hook):
            raise TypeError(f"a hook is a function (value, hook), and {hook!r} is none.")
        handle = Handle(hook, is_permanent, level)
        functions = self._of(dir)
        functions.insert(0 if prepend else len(functions), handle)
        return handle

    def add_perma_hook(self, hook: HookFunction, dir: str = "fwd") -> Handle:
        """Call a function with this value from now on; `reset_hooks` does not remove it."""
        return self.add_hook(hook, dir, is_permanent=True)

    def remove(self, handle: Handle) -> None:
        """Remove one function."""
        for functions in (self.fwd_hooks, self.bwd_hooks):
            functions[:] = [one for one in functions if one is not handle]

    def remove_hooks(
        self, dir: str = "fwd", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove functions: those of a direction ("both" for all), and of one level if one is given."""
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
        """Return True if functions are attached here."""
        return any(
            (including_permanent or not handle.is_permanent) and (level is None or handle.level == level)
            for one in (DIRECTIONS if dir == "both" else (dir,))
            for handle in self._of(one)
        )

    def clear_context(self) -> None:
        """Empty `ctx`."""
        self.ctx.clear()

    def called(self, value: Tensor) -> Tensor:
        """Pass a value through the functions, each of what the one before it left; they may write to it."""
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


Hooks = Sequence[tuple[NameOrFilter, HookFunction]]
"""Pairs of a hook's name, or a function of names, and a function `hook(value, hook)`."""


class HookRegistry:
    """A model with functions on named values. `hook_dict` has a point for every name."""

    cfg: Any
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
        """Call a function with the value of a name, or of all names of a filter, until `reset_hooks`."""
        for point in self._points(name, dir):
            point.add_hook(hook, dir, is_permanent, level, prepend)

    def add_perma_hook(self, name: NameOrFilter, hook: HookFunction, dir: str = "fwd") -> None:
        """Call a function as `add_hook` does, until `reset_hooks(including_permanent=True)`."""
        self.add_hook(name, hook, dir, is_permanent=True)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: str = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove all hooks."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove all hooks, and keep the contents of `ctx`."""
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
        """Add these hooks for a `with` block; with `reset_hooks_end=False`, they stay after it."""
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
        """Return a dictionary, and hooks that fill it in forward and, with "_grad", backward passes."""
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
        """Return a dictionary that is filled whenever the model runs, until `reset_hooks`."""
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
        """True if filters of names see it: what has to be switched on is seen only then."""
        switch = ON_REQUEST.get(self.table.entries[name].kind)
        return switch is None or bool(getattr(self.cfg, switch))

    def _is_hooked(self, dir: str) -> bool:
        return any(point.has_hooks(dir) for point in self.hook_dict.values())


def _pairs(given: Any) -> Hooks:
    """Hooks as they are to be given. Raises TypeError for what is no list of pairs."""
    pairs = [] if isinstance(given, Mapping) else list(given)
    if given and not (pairs and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs)):
        raise TypeError(f"hooks are a list of pairs (name, function), and not {given!r}.")
    return pairs


class _HookedReading(Reading):
    """The values of a run under hooks; with `has_parameters` they have gradients by those of the hooks."""

    has_parameters = False

    @property
    def _is_recorded(self) -> bool:
        """True if values have gradients."""
        return self.has_parameters


def hooked(
    run: Run, table: HookTable, changes: Mapping[str, Change], functions: Iterable[Any] = ()
) -> Reading:
    """The values of a run in which named values are `changes` of what they are; the run stays as it is.

    `functions` are those that make the changes: where one has parameters, values have gradients by them.
    """
    model = run.model
    reading = _HookedReading(model, run.world.fork(), run._sizes, run)
    edits = [(as_place(place), change) for place, change in table.edits(changes)]
    located = {place: model.locate(place) for place, _ in edits}
    numbers = {place: model.graph.number(node_of(found)) for place, found in located.items()}
    order = {number: i for i, number in enumerate(model.graph.table.sorted(set(numbers.values())))}
    reading.has_parameters = any(trained_by(one, model.module) for one in functions)
    with run.checked_once(), recording() if reading.has_parameters else nullcontext():
        # Stable: at one node, what stands first in the table comes first.
        for place, change in sorted(edits, key=lambda edit: order[numbers[edit[0]]]):
            found, present = located[place], reading.read(place)
            present = present if reading.has_parameters else present.detach()
            changed = new_part(change, present, found, place)
            if changed.requires_grad or not bitwise_same(changed, present):
                changed = changed if reading.has_parameters else changed.detach()
                value = _replaced(reading, found, present, changed)
                reading.world.patch(node_of(found), value)
    return reading


def _replaced(reading: Reading, found: Located, present: Tensor, changed: Tensor) -> Tensor:
    """The value of the node at which a site is changed."""
    value: Tensor = reading.demand([node_of(found)])[0]
    with reading._evaluating():
        if found.result is None:
            return found.view.replace(value, {}, changed, reading._sizes)
        added: torch.Tensor = (changed - present).sum(2)
        added = added.transpose(0, 1) if found.result.is_pos_first else added
        return value + added.reshape(value.shape)


def recorded_logits(
    run: Run, table: HookTable, changes: Mapping[str, Change], points: Mapping[str, HookPoint]
) -> Tensor:
    """The logits of a run under `changes`, recorded from the embedding on; weights are constants.

    When something of them is differentiated, `points` are called with the gradients by their values.
    """
    model = run.model
    edits: dict[str, list[Edit]] = {}
    for place, change in table.edits(changes):
        where = as_place(place)
        edit = Edit(where, model.locate(where), change)
        edits.setdefault(edit.node, []).append(edit)
    start = model.locate(table.embed).node
    tape = Tape(model, lambda node: run.demand([node])[0], run._sizes, lambda node: edits.get(node, ()))
    hooked = {name: model.locate(place) for name, place in table.places(points).items()}
    nodes = list(dict.fromkeys([start, *(node_of(found) for found in hooked.values())]))
    logits = field_names(model.program, "logits") or ()
    # What is changed and not computed again is given: the embedding itself, and what does not depend on it.
    again = {*model.behind([start], [*logits, *nodes, *edits])}
    given: dict[str, Tensor] = {}
    for node, own in edits.items():
        if node not in again:
            given[node] = applied_in_turn(own, run.demand([node])[0], tape.sizes)
    values = tape.record(nodes, logits, given=given, keep=[node for node in edits if node in again])
    for name, found in hooked.items():
        values[node_of(found)].register_hook(_called(points[name], tape, found))
    recorded: Tensor = values[logits[0]]
    return recorded


def _called(point: HookPoint, tape: Tape, found: Located) -> Callable[[Tensor], Tensor | None]:
    def hook(gradient: Tensor) -> Tensor | None:
        shown = found.view.present(shown_gradient(tape, found, gradient), tape.sizes)
        changed: Any = None
        for handle in tuple(point.bwd_hooks):
            made = handle.function(shown.clone() if changed is None else changed, hook=point)
            changed = changed if made is None else made[0] if isinstance(made, tuple) else made
        if changed is None:
            return None
        if found.result is not None:
            raise ValueError(
                f"the gradients by {point.name} are those by one sum, for every head the same: they are "
                "read, and not changed."
            )
        return found.view.replace(gradient, {}, changed, tape.sizes)

    return hook
