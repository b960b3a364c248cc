"""What a world lets stand at a node in place of the graph's own rule, value or edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from conewise.graph.graph import MISSING
from conewise.graph.table import Rule


@dataclass(frozen=True, slots=True)
class Fixed:
    """The value is given: the node reads nothing and is never computed."""

    value: Any


@dataclass(frozen=True, slots=True)
class Through:
    """The value is a function of what it would have been."""

    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Ruled:
    """Another rule over the same inputs."""

    rule: Rule


@dataclass(frozen=True, slots=True)
class Native:
    """The graph's own, whatever an ancestor world has put there."""


NATIVE: Final = Native()
Body = Fixed | Through | Ruled | Native


@dataclass(slots=True)
class Standing:
    """One world's own changes at one node. What it leaves open is inherited from the parent world."""

    body: Body | None = None
    given: Fixed | None = None
    edges: dict[int, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return self.body is None and self.given is None and not self.edges

    def over(self, below: Standing) -> Standing:
        """This standing laid over an ancestor's."""
        return Standing(
            below.body if self.body is None else self.body,
            below.given if self.given is None else self.given,
            below.edges | self.edges,
        )

    def without_native(self) -> Standing:
        """The same on a root world, where there is no ancestor to be shielded from."""
        edges = {site: patch for site, patch in self.edges.items() if not isinstance(patch, Native)}
        return Standing(None if isinstance(self.body, Native) else self.body, self.given, edges)


NOTHING: Final = Standing()
"""What stands where nothing was changed. Never written to."""


def effective(
    merged: Standing, rule: Rule | None, inputs: tuple[int, ...], default: Any
) -> tuple[Rule | None, tuple[int, ...], Any]:
    """The rule, the inputs and the known value of a node under the changes of all worlds, merged.

    The value is `MISSING` where it has to be computed. A node whose value is known reads nothing;
    an edge patched with a value is not read.
    """
    if merged is NOTHING:
        return (rule, inputs, MISSING) if rule is not None else (None, (), default)
    body = None if isinstance(merged.body, Native) else merged.body
    if isinstance(body, Fixed):
        return None, (), body.value
    if rule is None:
        given = default if merged.given is None else merged.given.value
        if isinstance(body, Through) and given is not MISSING:
            return _constant(body.function, given), (), MISSING
        return None, (), given
    if isinstance(body, Ruled):
        rule = body.rule
    edges = {site: patch for site, patch in merged.edges.items() if not isinstance(patch, Native)}
    if edges:
        rule, inputs = _seen_through(rule, inputs, edges)
    if isinstance(body, Through):
        rule = _then(rule, body.function)
    return rule, inputs, MISSING


View = tuple[object, ...]


def view(merged: Standing, rule: Rule | None, inputs: tuple[int, ...]) -> View:
    """All that decides on a node's value besides the values it reads.

    The inputs are a tuple of numbers; all else is to be told apart by `is`, since values are opaque.
    What a fixed value hides is no part of it; nor is what a `NATIVE` leaves as the graph has it.
    """
    body = None if isinstance(merged.body, Native) else merged.body
    if isinstance(body, Fixed):
        return (body,)
    if rule is None:
        return body, merged.given
    edges = {site: patch for site, patch in merged.edges.items() if not isinstance(patch, Native)}
    return body, None if isinstance(body, Ruled) else rule, inputs, *map(edges.get, inputs)


def _constant(function: Callable[[Any], Any], value: Any) -> Rule:
    return lambda: function(value)


def _then(rule: Rule, function: Callable[[Any], Any]) -> Rule:
    return lambda *values: function(rule(*values))


def _seen_through(
    rule: Rule, inputs: tuple[int, ...], edges: dict[int, Fixed | Through]
) -> tuple[Rule, tuple[int, ...]]:
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
