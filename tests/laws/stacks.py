"""Stacks of worlds: what the engine computes in each, launched together; what they hold, by walking along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

import conewise as cw
from tests.laws.scenes import Mix, Scene, fresh_value, scenes


@dataclass(frozen=True)
class Stacked:
    """A graph and its demand, and a site for each world."""

    scene: Scene
    sites: tuple[str, ...]

    def computed(self) -> list[set[str]]:
        """What the engine computes in each world."""
        base = cw.World(self.scene.graph())
        base.demand(self.scene.demand)
        found = []
        for site in self.sites:
            with base.fork() as fork:
                fork.patch(site, fresh_value())
                with fork.ledger.interval() as ledger:
                    fork.demand(self.scene.demand)
                found.append(set(ledger.recomputed))
        return found

    def launches(self, at_once: int) -> int:
        """Nodes that a stack of so many worlds launches, over all stacks."""
        worlds = self.computed()
        return sum(
            len(set().union(*worlds[first : first + at_once])) for first in range(0, len(worlds), at_once)
        )

    def orders(self) -> Iterator[tuple[str, ...]]:
        """Every order of the launched nodes in which each stands after what it reads."""
        launched = set().union(*self.computed())
        reads = {site: launched & set(inputs) for site, _, inputs in self.scene.nodes if site in launched}

        def extended(done: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
            if len(done) == len(reads):
                yield done
            for site, needed in reads.items():
                if site not in done and needed <= set(done):
                    yield from extended((*done, site))

        return extended(())

    def peak(self, order: Sequence[str]) -> int:
        """The most cells (world, node) that are held, walking along an order."""
        worlds = self.computed()
        inputs = {site: set(reads) for site, _, reads in self.scene.nodes}
        cells = {
            site: {w for w, one in enumerate(worlds) if site in one or site == self.sites[w]}
            for site in self.scene.computed
        }
        held: set[tuple[int, str]] = set()
        most = 0
        for at, site in enumerate(order):
            for one in (site, *inputs[site]):
                held |= {(w, one) for w in cells.get(one, ())}
            most = max(most, len(held))
            wanted = {one for later in order[at + 1 :] for one in inputs[later]} | set(self.scene.demand)
            held = {(w, one) for w, one in held if one in wanted}
        return most


@st.composite
def wide(draw: st.DrawFn) -> Scene:
    """Branches of several nodes from one site, each added to the one before or not; all is demanded."""
    nodes: list[tuple[str, Mix, tuple[str, ...]]] = [("n", Mix(), ("x",))]
    for branch, length in enumerate(draw(st.lists(st.integers(2, 4), min_size=2, max_size=3))):
        before = "n"
        for step in range(length):
            joined = ("b0.0",) if branch and step == length - 1 and draw(st.booleans()) else ()
            nodes.append((f"b{branch}.{step}", Mix(), (before, *joined)))
            before = f"b{branch}.{step}"
    return Scene(("x",), tuple(nodes), (), tuple(site for site, _, _ in nodes))


@st.composite
def stacked(draw: st.DrawFn) -> Stacked:
    """Worlds at computed sites, in any order; now and then two at one site."""
    scene = draw(st.one_of(wide(), scenes()))
    sites = draw(st.permutations(scene.computed))[: draw(st.integers(1, 5))]
    return Stacked(scene, (*sites, *sites[: draw(st.integers(0, 1))]))
