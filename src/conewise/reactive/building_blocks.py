"""Blocks made of functions, and of whole graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conewise.arguments import checked
from conewise.errors import BlockError
from conewise.reactive.block import Block, BlockNode
from conewise.reactive.graph import Graph


def chain(*rules: Callable[[Any], Any]) -> Block:
    """The block that applies `rules` one after the other."""
    if not rules:
        raise BlockError("chain() got no rule; a block needs at least one: `chain(lambda v: v)`.")
    for index, rule in enumerate(rules):
        if not callable(rule):
            raise BlockError(
                f"chain() takes functions of one value; argument {index} is {rule!r}. "
                "For a block with branches, build a Graph and use `block(graph)`."
            )
    nodes = tuple(BlockNode(str(index), rule, (index - 1,)) for index, rule in enumerate(rules))
    return Block(nodes, output=len(nodes) - 1)


@checked
def block(graph: Graph, entry: str | None = None, output: str | None = None) -> Block:
    """The block that computes what `graph` computes, as a function of its one free source.

    `entry` may be left out when exactly one source is not a parameter, `output` when exactly one
    computed node is read by nobody. All other sources come along with their values. Every node
    must lead to the output, and the output must depend on the input.
    """
    free = [site for site in graph.sources if site not in graph.params]
    if entry is None:
        if len(free) != 1:
            raise BlockError(
                f"a block has one input, and this graph has {len(free)} sources that are not parameters"
                f"{': ' + ', '.join(free) if free else ''}. Name the one: `block(graph, entry=...)`."
            )
        entry = free[0]
    if not graph.is_source(entry):
        raise BlockError(f"the input of a block is a source, and {entry!r} is computed.")
    ends = [site for site in graph.computed if not graph.consumers(site)]
    if output is None:
        if len(ends) != 1:
            found = ", ".join(ends[:6]) if ends else "none: no node is computed"
            raise BlockError(
                f"a block has one output, and this graph has {len(ends)} ({found}). Join them, or "
                "build a graph that ends in one node."
            )
        output = ends[0]
    dangling = [site for site in ends if site != output]
    if dangling or graph.is_source(output) or graph.consumers(output):
        raise BlockError(
            f"{output!r} cannot be the one output of this block: a block's output is its one computed "
            f"node that no node reads, and here those are {', '.join(ends) or 'none'}."
        )
    if output not in graph.cone(entry):
        raise BlockError(f"the output {output!r} of this block does not depend on its input {entry!r}.")
    inside = [site for site in graph.sites if site != entry]
    index = {entry: -1} | {site: number for number, site in enumerate(inside)}
    nodes = tuple(
        BlockNode(
            site,
            None if graph.is_source(site) else graph.rule(site),
            tuple(index[read] for read in graph.inputs(site)),
            graph.default(graph.number(site)),
            site in graph.params,
        )
        for site in inside
    )
    return Block(nodes, output=index[output])
