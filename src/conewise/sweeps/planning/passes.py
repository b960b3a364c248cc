"""Passes of a sweep: worlds that are computed together, step by step, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from conewise.graph.graph import Graph
from conewise.sweeps.planning.costs import Costs
from conewise.sweeps.planning.filled import FillSizes
from conewise.sweeps.planning.fusing import Fusion
from conewise.sweeps.planning.memory import Footprint
from conewise.sweeps.planning.regions import RegionFinder, Regions
from conewise.sweeps.planning.schedule import Schedule
from conewise.sweeps.planning.shown import Lying
from conewise.sweeps.planning.stacking import Layout, members
from conewise.sweeps.planning.workspace import Workspace

if TYPE_CHECKING:
    from conewise.runs.run import Reading


@dataclass(frozen=True, slots=True)
class Chunk:
    """Worlds that are computed together, from the position `start` on."""

    worlds: int
    start: int = 0

    def __len__(self) -> int:
        return self.worlds.bit_count()


@dataclass(frozen=True)
class Prepared:
    """What planning found out for baselines of one shape; `full` are the nodes and FLOPs of a full run."""

    layout: Layout
    schedule: Schedule
    costs: Costs
    whole_costs: Costs
    last: frozenset[str]
    columns: Mapping[str, Sequence[int]]
    obstacle: str
    finder: RegionFinder
    fills: FillSizes
    workspace: Workspace
    full: tuple[int, int]
    regions: dict[int, Regions] = field(default_factory=dict)
    footprints: dict[Chunk, tuple[Regions, Footprint]] = field(default_factory=dict)
    work: dict[tuple[Chunk, ...], tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pass:
    """How a chunk is computed: what each step reads, what goes after it, and chains that are one operation.

    `plan` has no step for what is inside of such a chain.
    """

    plan: Schedule
    inputs: Mapping[int, tuple[int, ...]]
    drops: Mapping[int, Sequence[int]]
    fused: Mapping[str, Fusion]


class NodeSizes:
    """Bytes of one world's value of a node, and the rows of it that are computed, by the node's number."""

    def __init__(
        self,
        graph: Graph,
        prepared: Prepared,
        how: Lying,
        regions: Regions,
        patched: Iterable[int],
        read: Callable[[str], Any],
    ) -> None:
        self._graph, self._costs, self._lying, self._regions = graph, prepared.costs, how, regions
        self._workspace, self._fills, self._read = prepared.workspace, prepared.fills, read
        self._patched = {graph.name(node) for node in patched}

    def value(self, node: int, rows: int | None) -> int:
        """Of the value itself, or of its last positions."""
        return self._costs.bytes_of_copy(self._graph.name(node), rows=rows)

    def repeated(self, node: int, rows: int | None) -> int:
        """Of a copy of the baseline's value; none where it is repeated without one."""
        return self._costs.bytes_of_repeating(self._graph.name(node), rows=rows)

    def workspace(self, node: int) -> int:
        """Of what computing it takes beside its value."""
        name = self._graph.name(node)
        copied = self._lying.copies(name, self._patched)
        return self._workspace.each(name, self._regions.of(name), self._read) + sum(
            self._costs.bytes_of_copy(read, rows=self._regions.wanted(name, read)) for read in copied
        )

    def scratch(self, node: int) -> int:
        """Of what computing it takes beside its value, for however many worlds."""
        name = self._graph.name(node)
        return self._workspace.fixed(name, self._regions.of(name), self._read)

    def part(self, node: int) -> int:
        """Of the part of it that a world puts in."""
        return self._fills.part(self._graph.name(node))

    def rows(self, node: int) -> int | None:
        """How many of its positions are computed; None for all."""
        return self._regions.of(self._graph.name(node))

    def wanted(self, node: int, read: int) -> int | None:
        """How many positions of `read` it reads; None for all."""
        return self._regions.wanted(self._graph.name(node), self._graph.name(read))

    def wanted_of(self, target: int) -> int | None:
        """How many positions of a target the metrics read; None for all."""
        return self._regions.wanted_of(self._graph.name(target))

    def shown(self, node: int) -> int | None:
        """The node whose memory it shows."""
        name = self._graph.name(node)
        return self._graph.number(self._lying.shown[name]) if name in self._lying.shown else None


def reader(base: Reading) -> Callable[[str], Any]:
    """Reads values of a run by the graph's own names, each once."""
    known: dict[str, Any] = {}

    def read(name: str) -> Any:
        if name not in known:
            (known[name],) = base.demand([name])
        return known[name]

    return read


def runs_of(sizes: Sequence[int]) -> list[int]:
    """Runs of worlds of these sizes, as masks: each takes up where the one before it ends."""
    starts = accumulate(sizes, initial=0)
    return [((1 << size) - 1) << start for size, start in zip(sizes, starts, strict=False)]


def grouped(chunks: Sequence[Chunk], evaluator: str) -> Iterator[tuple[int, Chunk]]:
    """The chunks with their numbers; single worlds of a serial run in groups, so that storing is cheap."""
    if evaluator == "wavefront":
        yield from enumerate(chunks)
        return
    size = 16
    for piece, start in enumerate(range(0, len(chunks), size)):
        yield piece, Chunk(sum(chunk.worlds for chunk in chunks[start : start + size]))


def last_reads(plan: Schedule, inputs: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
    """For each node that steps read, the last step that does; targets are kept to the end."""
    last: dict[int, int] = {}
    for node, _ in plan.steps:
        for site in inputs[node]:
            last[site] = node
    return {site: one for site, one in last.items() if site not in plan.targets}


def chunk_of(worlds: int, starts: Sequence[int]) -> Chunk:
    """These worlds together, from the first position that any of them changes."""
    return Chunk(worlds, min(starts[world] for world in members(worlds)))
