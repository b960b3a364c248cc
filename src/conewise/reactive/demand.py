"""Demand: decide which invalid nodes have to be computed, in order; then compute them.

Both halves walk invalid nodes and what those read, never the whole graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conewise.reactive.changes import INVALID, SHARED, Overlay, Store
from conewise.reactive.table import Rule

SHOWN = 6
"""The number of sites that a plan names when it is printed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sites to compute, inputs first.

    `own` are the last of them: those that the world itself computes. The sites before belong to its
    ancestors, which share the result with all of their forks.
    """

    sites: tuple[str, ...]
    own: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __repr__(self) -> str:
        if not self.sites:
            return "Plan(nothing to compute)"
        shown = ", ".join(self.sites[:SHOWN]) + (", ..." if len(self) > SHOWN else "")
        return f"Plan({len(self)} sites to compute, {len(self.own)} of them in the world itself: {shown})"


Rules = Sequence[Rule | None] | Overlay
Inputs = Sequence[tuple[int, ...]] | Overlay
Same = Callable[[Any, Any], bool]


@dataclass(slots=True)
class Steps:
    """The work of one world for a demand: the nodes to compute, inputs first.

    `above` are invalid nodes that the world shares with its parent: the parent computes those.
    `reused` are the valid nodes that the computation reads, and the targets that were valid already.
    """

    nodes: list[int] = field(default_factory=list)
    above: list[int] = field(default_factory=list)
    reused: set[int] = field(default_factory=set)


def gather(targets: Iterable[int], values: Store, inputs: Inputs, labels: list[float]) -> Steps:
    """Decide: list, inputs first, all invalid nodes that `targets` depend on. Changes nothing.

    A node that is valid is not looked behind: what it reads is valid too, or not needed.
    """
    steps = Steps()
    nodes, above, reused = steps.nodes, steps.above, steps.reused
    found: set[int] = set()
    # The targets, then the inputs of every node found; `nodes` grows while it is read.
    reads = itertools.chain((targets,), map(inputs.__getitem__, nodes))
    if type(values) is Overlay:
        own, below = values.get, values.below
        for sites in reads:
            for site in sites:
                if site in found or site in reused:
                    continue
                state = own(site, SHARED)
                if state is INVALID:
                    found.add(site)
                    nodes.append(site)
                elif state is SHARED and below[site] is INVALID:
                    found.add(site)
                    above.append(site)
                else:
                    reused.add(site)
    else:
        for sites in reads:
            for site in sites:
                if values[site] is not INVALID:
                    reused.add(site)
                elif site not in found:
                    found.add(site)
                    nodes.append(site)
    nodes.sort(key=labels.__getitem__)
    return steps


class RuleFailedError(Exception):
    """A rule raised; `node` is where, the cause is chained."""

    def __init__(self, node: int) -> None:
        super().__init__(node)
        self.node = node


Lend = Callable[[Any], Any]
"""Gives what a rule reads in place of a value that was there before."""


def compute(steps: Steps, values: Store, rules: Rules, inputs: Inputs, lend: Lend | None = None) -> None:
    """Do: call the rule of each node on the values that it reads; in a fork, on what `lend` makes of those.

    A world calls rules here, and with a cutoff in `compute_with_cutoff`; nowhere else.
    """
    known = _known(steps, values)
    if lend is not None and known is not values:
        known = {site: lend(value) for site, value in known.items()}  # type: ignore[union-attr]
    node = -1
    try:
        for node in steps.nodes:
            reads = inputs[node]
            if len(reads) == 1:
                value = rules[node](known[reads[0]])  # type: ignore[misc]  # no source is here
            else:
                value = rules[node](*[known[site] for site in reads])  # type: ignore[misc]
            known[node] = value
    except Exception as cause:
        raise RuleFailedError(node) from cause
    finally:
        if known is not values:
            values.update({node: known[node] for node in steps.nodes if node in known})  # type: ignore[union-attr]


def _known(steps: Steps, values: Store) -> Store | dict[int, Any]:
    """The values that `steps` read from outside of themselves: each looked up once, however often read."""
    if type(values) is not Overlay:
        return values
    return {site: values[site] for site in (*steps.reused, *steps.above)}


Memo = tuple[Rule, list[Any], Any]


def compute_with_cutoff(
    nodes: Iterable[int],
    values: Store,
    rules: Rules,
    inputs: Inputs,
    memos: MutableMapping[int, Memo],
    same: Same,
    cut_off: set[int],
) -> None:
    """Like `compute`, but a node whose rule and inputs are the very ones of last time is not computed.

    A recomputed value that is the `same` as the last one is dropped in favour of the last one's
    object; so "the very ones" is a comparison by identity, and the wave stops there. The nodes that
    were not computed are added to `cut_off`.
    """
    node = -1
    try:
        for node in nodes:
            rule: Rule = rules[node]  # type: ignore[assignment]  # no source is here
            reads = [values[site] for site in inputs[node]]
            memo = memos.get(node)
            if memo is None:
                value = rule(*reads)
            elif memo[0] is rule and len(memo[1]) == len(reads) and all(map(operator.is_, memo[1], reads)):
                value = memo[2]
                cut_off.add(node)
            else:
                value = rule(*reads)
                if value is not memo[2] and same(memo[2], value):
                    value = memo[2]
            memos[node] = rule, reads, value
            values[node] = value
    except Exception as cause:
        raise RuleFailedError(node) from cause


def bitwise_same(old: Any, new: Any) -> bool:
    """True if two values are indistinguishable: same type, and the same bits where they have bits.

    Values that cannot be compared are not the same: then one more node is computed, and none is wrong.
    """
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if hasattr(old, "tobytes") and hasattr(old, "dtype"):
        return bool(old.dtype == new.dtype and old.shape == new.shape and old.tobytes() == new.tobytes())
    if isinstance(old, float):
        return old.hex() == float(new).hex()
    if isinstance(old, complex):
        return bitwise_same([old.real, old.imag], [new.real, new.imag])
    if isinstance(old, tuple | list):
        return len(old) == len(new) and all(map(bitwise_same, old, new))
    if isinstance(old, dict):
        return bitwise_same(list(old.items()), list(new.items()))
    try:
        return bool(old == new)
    except Exception:  # noqa: BLE001 - whatever a comparison raises, it does not say that they are the same
        return False
