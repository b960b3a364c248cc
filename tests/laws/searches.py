"""Greedy searches over random graphs, with corrections as grafts."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from conewise.paper.experiments.edges import trials
from tests.laws.scenes import Scene, scenes


@dataclass(frozen=True)
class Search:
    """A search: a graph and its demand, sites of readers, and trials, each with whether the edge is kept."""

    scene: Scene
    readers: tuple[str, ...]
    trials: tuple[tuple[int, bool], ...]

    @property
    def visits(self) -> list[int]:
        return [reader for reader, _ in self.trials]

    @property
    def kept(self) -> list[int]:
        return [trial for trial, (_, is_kept) in enumerate(self.trials) if is_kept]

    def bills(self) -> list[int]:
        """What the engine computes for each trial."""
        return trials(self.scene.graph(), self.readers, self.visits, self.kept, self.scene.demand)


@st.composite
def searches(draw: st.DrawFn) -> Search:
    """Searches over any graph, some readers at one site."""
    scene = draw(scenes())
    readers = draw(st.lists(st.sampled_from(scene.computed), min_size=1, max_size=5))
    trial = st.tuples(st.integers(0, len(readers) - 1), st.booleans())
    return Search(scene, tuple(readers), tuple(draw(st.lists(trial, min_size=1, max_size=8))))
