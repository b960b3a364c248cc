"""The graphs that the benchmarks run on."""

from __future__ import annotations

import random

import conewise as cw


def add_one(value: float) -> float:
    return value + 1.0


def mix(one: float, other: float) -> float:
    return 0.5 * one + 0.25 * other


def chain(length: int) -> cw.Graph:
    """A chain of trivial ops: x -> n0 -> n1 -> ..."""
    graph = cw.Graph()
    last = graph.source("x", 0.0)
    for place in range(length):
        last = graph.node(f"n{place}", add_one, [last])
    return graph


def random_dag(size: int, *, reach: int, seed: int) -> list[tuple[str, str]]:
    """The two inputs of each node n0, n1, ..., drawn from the `reach` before it; x, y are sources."""
    draw = random.Random(seed)
    names = ["x", "y", *(f"n{place}" for place in range(size))]
    wiring = []
    for place in range(2, size + 2):
        one, other = draw.sample(names[max(place - reach, 0) : place], 2)
        wiring.append((one, other))
    return wiring


def layered(layers: int, width: int, *, fan_in: int, seed: int) -> cw.Graph:
    """Layers of equal width; each node reads `fan_in` nodes of the layer before."""
    draw = random.Random(seed)
    graph = cw.Graph()
    above = [graph.source("x", 0.0)]
    for layer in range(layers):
        above = [
            graph.node(f"{layer}.{place}", max, draw.sample(above, min(fan_in, len(above))))
            for place in range(width)
        ]
    return graph
