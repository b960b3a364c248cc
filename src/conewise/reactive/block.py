"""Blocks, which are small graphs with one input and one output; and grafts, which are blocks in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BlockNode:
    """One node of a block. `inputs` are indices: -1 is the block's input, 0.. are earlier nodes.

    A node without a rule is a source that the block brings along, `value` and all.
    """

    name: str
    rule: Callable[..., Any] | None
    inputs: tuple[int, ...]
    value: Any = None
    param: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A function of one value as a list of nodes, inputs first; `output` is the index of its value."""

    nodes: tuple[BlockNode, ...]
    output: int

    @property
    def size(self) -> int:
        """h: how many computed nodes a graft of this block adds."""
        return sum(node.rule is not None for node in self.nodes)


@dataclass(frozen=True, slots=True, eq=False)
class Graft:
    """A block that stands in a graph. `graph.remove(graft)` takes it out again.

    `sites` are the fresh computed nodes, inputs first; `rerouted` the readers that now read `output`.
    """

    name: str
    at: str
    rerouted: tuple[str, ...]
    sites: tuple[str, ...]
    sources: tuple[str, ...]
    output: str
