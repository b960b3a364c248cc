"""Scenes: small random graphs with something to patch and something to demand.

One strategy for all laws. It favours chains, several patches and one late demand, because wrong
formulas differ from right ones mostly there (`test_mutants.py` measures how often).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

import conewise as cw


class Mix:
    """A rule that forgets nothing: a number which depends on every input, and on the rule itself.

    The numbers are large, so each call makes an object of its own: "the same object" means that
    nothing was computed.
    """

    def __init__(self, salt: int = 0) -> None:
        self.salt = salt

    def __call__(self, *values: object) -> int:
        return hash(("mix", self.salt, *values)) | 1 << 70

    def __repr__(self) -> str:
        return f"Mix({self.salt})"


class Coarse:
    """A rule that forgets nearly all: a number of which there are two, again a new object each time."""

    def __init__(self, salt: int = 0) -> None:
        self.salt = salt

    def __call__(self, *values: object) -> int:
        return (1 << 70) + hash(("coarse", self.salt, *values)) // 64 % 2

    def __repr__(self) -> str:
        return f"Coarse({self.salt})"


Rule = Mix | Coarse


@dataclass(frozen=True)
class Scene:
    """A graph as data, the sites to patch, the sites to demand."""

    sources: tuple[str, ...]
    nodes: tuple[tuple[str, Rule, tuple[str, ...]], ...]
    patch: tuple[str, ...]
    demand: tuple[str, ...]

    def graph(self) -> cw.Graph:
        """The graph, built anew."""
        graph = cw.Graph()
        for number, site in enumerate(self.sources):
            graph.source(site, (1 << 80) + number, param=number % 2 == 1)
        for site, rule, inputs in self.nodes:
            graph.node(site, rule, inputs)
        return graph

    @property
    def computed(self) -> tuple[str, ...]:
        """The sites that have a rule, inputs first."""
        return tuple(site for site, _, _ in self.nodes)

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites, inputs first."""
        return self.sources + self.computed

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Every pair (input, reader), once each."""
        return tuple((site, reader) for reader, _, inputs in self.nodes for site in dict.fromkeys(inputs))


_salts: Iterator[int] = itertools.count(1)


def fresh_value() -> int:
    """A value that was never there before."""
    return (1 << 90) + next(_salts)


def fresh_rule() -> Mix:
    """A rule that was never there before, for any number of inputs."""
    return Mix(next(_salts) + (1 << 20))


@st.composite
def scenes(draw: st.DrawFn, max_nodes: int = 12, coarse: bool = False) -> Scene:
    """Scenes of up to `max_nodes` computed nodes; with `coarse`, many rules forget nearly all."""
    sources = tuple(f"x{number}" for number in range(draw(st.integers(1, 3))))
    count = draw(st.integers(1, max_nodes))
    nodes: list[tuple[str, Rule, tuple[str, ...]]] = []
    sites = list(sources)
    for number in range(count):
        # A chain, more often than not; then a few inputs from anywhere before.
        inputs = [sites[-1]] if draw(st.integers(0, 4)) else []
        inputs += draw(st.lists(st.sampled_from(sites), max_size=1 if inputs else 3))
        rule: Rule = Coarse(number) if coarse and draw(st.booleans()) else Mix(number)
        nodes.append((f"n{number}", rule, tuple(inputs)))
        sites.append(f"n{number}")
    several = min(draw(st.sampled_from([3, 2, 4, 3, 2, 1])), len(sites))
    patch = draw(st.lists(st.sampled_from(sites), min_size=several, max_size=several, unique=True))
    late = st.just((sites[-1],))
    anything = st.lists(st.sampled_from(sites), min_size=1, max_size=3, unique=True).map(tuple)
    demand: tuple[str, ...] = draw(st.one_of(late, late, late, anything))
    return Scene(sources, tuple(nodes), tuple(patch), demand)
