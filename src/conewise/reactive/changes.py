"""Changes: what a world puts at a node in place of the graph's own rule, value or edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from conewise.reactive.graph import MISSING, Mark
from conewise.reactive.table import Rule


@dataclass(frozen=True, slots=True)
class Fixed:
    """The value is given: the node reads nothing and is never computed."""

    value: Any


@dataclass(frozen=True, slots=True)
class Transformed:
    """The value is a function of what it would have been."""

    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class NewRule:
    """Another rule over the same inputs."""

    rule: Rule


@dataclass(frozen=True, slots=True)
class Native:
    """The graph's own, whatever an ancestor world has put there."""


NATIVE: Final = Native()
Patch = Fixed | Transformed | NewRule | Native


OWN: Final = -1
"""The place of a patch of the node itself, among those of its edges, whose places are the inputs' numbers."""


@dataclass(slots=True)
class NodeChange:
    """One world's own change of one node: patches, of itself and of its edges; and a source's value.

    What it leaves open is inherited from the parent world.
    """

    patches: dict[int, Patch] = field(default_factory=dict)
    given: Fixed | None = None

    @property
    def is_empty(self) -> bool:
        """True if it changes nothing."""
        return not self.patches and self.given is None

    def over(self, below: NodeChange) -> NodeChange:
        """This change laid over an ancestor's."""
        return NodeChange(below.patches | self.patches, below.given if self.given is None else self.given)

    def without_native(self) -> NodeChange:
        """The same on a root world, where there is no ancestor to be shielded from."""
        return NodeChange(
            {at: patch for at, patch in self.patches.items() if patch is not NATIVE}, self.given
        )

    def split(self) -> tuple[Patch | None, dict[int, Patch]]:
        """Return the patch of the node itself, and those of its edges; without any that is `NATIVE`."""
        patches = self.without_native().patches
        return patches.pop(OWN, None), patches


NO_CHANGE: Final = NodeChange()
"""The change of a node that no world changed. Never written to."""


def effective(
    merged: NodeChange, rule: Rule | None, inputs: tuple[int, ...], default: Any
) -> tuple[Rule | None, tuple[int, ...], Any]:
    """The rule, the inputs and the known value of a node under the changes of all worlds, merged.

    The value is `MISSING` where it has to be computed. A node whose value is known reads nothing;
    an edge patched with a value is not read.
    """
    if merged is NO_CHANGE:
        return (rule, inputs, MISSING) if rule is not None else (None, (), default)
    patch, edges = merged.split()
    if isinstance(patch, Fixed):
        return None, (), patch.value
    if rule is None:
        given = default if merged.given is None else merged.given.value
        if isinstance(patch, Transformed) and given is not MISSING:
            function = patch.function
            return lambda: function(given), (), MISSING
        return None, (), given
    if isinstance(patch, NewRule):
        rule = patch.rule
    if edges:
        rule, inputs = _seen_through(rule, inputs, edges)
    if isinstance(patch, Transformed):
        own, changed = rule, patch.function
        return lambda *values: changed(own(*values)), inputs, MISSING
    return rule, inputs, MISSING


Definition = tuple[object, ...]


def definition(merged: NodeChange, rule: Rule | None, inputs: tuple[int, ...]) -> Definition:
    """Everything that decides a node's value besides the values it reads.

    The inputs are a tuple of numbers. All else is compared by identity, since values are opaque. What a fixed
    value hides is not part of it, nor is what a `NATIVE` leaves as the graph has it.
    """
    patch, edges = merged.split()
    if isinstance(patch, Fixed):
        return (patch,)
    if rule is None:
        return patch, merged.given
    return patch, None if isinstance(patch, NewRule) else rule, inputs, *map(edges.get, inputs)


def _seen_through(rule: Rule, inputs: tuple[int, ...], edges: dict[int, Any]) -> tuple[Rule, tuple[int, ...]]:
    """`rule` with some inputs seen through patches, and the inputs that are still read."""
    seen = [edges.get(site) for site in inputs]
    reads = tuple(site for site, patch in zip(inputs, seen, strict=True) if not isinstance(patch, Fixed))

    def patched(*values: Any) -> Any:
        left = iter(values)
        arguments = []
        for patch in seen:
            if isinstance(patch, Fixed):
                arguments.append(patch.value)
            else:
                value = next(left)
                arguments.append(value if patch is None else patch.function(value))
        return rule(*arguments)

    return patched, reads


INVALID: Final[Any] = Mark("INVALID")
"""Stands where a value has to be computed before it can be read."""

SHARED: Final[Any] = Mark("SHARED")
"""The answer of an overlay for a node that it does not own."""


class Overlay(dict[int, Any]):
    """Entries of its own over another store: `overlay[n]` is its own, or else what lies below.

    `get(n, SHARED)` looks at its own entries only. Memory is what it owns, however large the
    store below; a read through k overlays takes k steps.
    """

    __slots__ = ("below",)

    def __init__(self, below: list[Any] | Overlay) -> None:
        super().__init__()
        self.below = below

    def __missing__(self, node: int) -> Any:
        below = self.below
        while type(below) is Overlay:
            value = below.get(node, SHARED)
            if value is not SHARED:
                return value
            below = below.below
        return below[node]


Store = list[Any] | Overlay
