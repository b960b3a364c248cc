"""Results of experiments, rows of paper, prediction and measurement; and the instruments that measure."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ParamSpec, TypeVar

from conewise.paper.theory.clocks import Estimate, least_squares
from conewise.paper.theory.sweeps import Touched
from conewise.reactive.graph import Graph, Site
from conewise.reactive.world import World
from conewise.version import __version__

Number = int | float | Fraction
P = ParamSpec("P")
T = TypeVar("T")

Progress = Callable[[int, int], None]
"""A function of two counts: the units of work that are done, and all of them."""


def silent(done: int, total: int) -> None:
    """Report no progress."""
    del done, total


@dataclass(frozen=True, slots=True)
class Row:
    """A figure as the paper prints it, as the theory predicts it, and as it was measured.

    `paper` keeps the printed digits ("2.0057"), because those are what is compared. `exact` rows
    must agree; the others (timings) are reported, or have to lie in a `band` that was stated before. Where
    `paper_predicts`, the printed figure is a prediction, a limit say: it is compared with ours, and the
    measurement stands beside them. `facts` are further columns of the table. A `detail` row belongs in
    files, not on a screen.
    """

    name: str
    predicted: Number | None
    measured: Number
    paper: str | None = None
    exact: bool = True
    unit: str = ""
    detail: bool = False
    paper_predicts: bool = False
    band: tuple[float, float] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def match(self) -> bool | None:
        """True if measured equals predicted, and the paper in every digit it prints; None for timings.

        With a band, True if the measurement lies in it.
        """
        if self.band is not None:
            return self.band[0] <= self.measured <= self.band[1]
        if not self.exact:
            return None
        if self.paper_predicts:
            return self.predicted is not None and prints_as(self.predicted, self.paper or "")
        return self.measured == self.predicted and (
            self.paper is None or prints_as(self.measured, self.paper)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON takes it; fractions become the nearest float."""
        is_whole = self.paper is not None and "." not in self.paper
        return {
            "name": self.name,
            **self.facts,
            "paper": None if self.paper is None else (int if is_whole else float)(self.paper),
            "predicted": plain(self.predicted),
            "measured": plain(self.measured),
            "unit": self.unit,
            "exact": self.exact,
            "match": self.match,
        }


@dataclass(frozen=True, slots=True)
class Result:
    """An experiment after its run: what it found, and, from `seconds` on, what `experiment` knows of it.

    `notes` are paragraphs, with empty lines between them. `series` holds what a figure draws and a table does
    not; `compared` says in words what `all_match` stands for.
    """

    rows: Sequence[Row]
    notes: str = ""
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    series: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    name: str = ""
    title: str = ""
    claim: str = ""
    compared: str = ""

    @property
    def all_match(self) -> bool:
        """True if every exact row matches."""
        return all(row.match is not False for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON takes it."""
        return {
            "title": self.title,
            "claim": self.claim,
            "all_match": self.all_match,
            "compared": self.compared,
            "rows": [row.as_dict() for row in self.rows],
            "notes": list(paragraphs(self.notes)),
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "versions": dict(self.versions),
            "series": dict(self.series),
        }


def prints_as(value: Number, printed: str) -> bool:
    """True if `value`, rounded to as many decimals as `printed` has, is what is printed."""
    decimals = len(printed.partition(".")[2])
    return round(Fraction(value), decimals) == Fraction(printed)


def plain(value: Number | None) -> int | float | None:
    """Return a number that JSON knows: whole numbers as int, other fractions as the nearest float."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, of conewise and of `packages`, and the kind of machine."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    found["conewise"] = __version__
    for package in ("numpy", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def paragraphs(text: str) -> tuple[str, ...]:
    """Split a text at its empty lines; each part becomes one line."""
    return tuple(" ".join(part.split()) for part in text.split("\n\n") if part.strip())


def experiment(title: str, *packages: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Make an experiment of a function, whose docstring has its claim and what of it is compared.

    The result gets these texts and the function's name, the seconds that it took, and the versions of
    `packages`.
    """

    def decorated(run: Callable[P, Result]) -> Callable[P, Result]:
        texts = {text.split()[0].rstrip(":"): text for text in paragraphs(run.__doc__ or "")}
        claim, compared = (texts.get(word, "").partition(": ")[2] for word in ("Claim", "Compared"))

        @functools.wraps(run)
        def timed(*args: P.args, **kwargs: P.kwargs) -> Result:
            started = time.perf_counter()
            found = run(*args, **kwargs)
            return replace(
                found,
                seconds=time.perf_counter() - started,
                versions=versions(*packages) | dict(found.versions),
                name=run.__name__,
                title=title,
                claim=claim,
                compared=compared.rstrip("."),
            )

        return timed

    return decorated


def tracked(items: Sequence[T], progress: Progress) -> Iterator[T]:
    """Yield the items, and report each as done when the next is asked for."""
    for done, item in enumerate(items, start=1):
        yield item
        progress(done, len(items))


def rows_of(at: str, *figures: tuple[str, Number | None, Number], **how: Any) -> list[Row]:
    """Return a row for each (name, predicted, measured) of one place, none of which the paper prints.

    `how` are further fields of all of them.
    """
    return [Row(f"{at}, {name}", predicted, measured, **how) for name, predicted, measured in figures]


def timing(name: str, milliseconds: float, paper: str | None = None, **facts: Any) -> Row:
    """Return the row of a time, which is reported and not judged."""
    return Row(name, None, milliseconds, paper, exact=False, unit="ms", facts=facts)


def agreed(found: set[int]) -> int:
    """Return the one count that all witnesses agree on, or -1, which matches nothing."""
    return next(iter(found)) if len(found) == 1 else -1


# -- What the engine did, read off its ledger: the cost of a patch in a fork of a warm world -------


Demand = Site | tuple[Site, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """The nodes that a change invalidated, those that the demand after it recomputed, and its answer."""

    invalidated: int
    recomputed: int
    value: Any


def warm(graph: Graph, output: Demand) -> World:
    """Return a world that has answered `output` once, whose ledger keeps tallies only."""
    world = World(graph, keep_sites=False)
    world.demand(output)
    return world


def patch_cost(base: World, site: Site, value: Any, output: Demand) -> Cost:
    """Fork a warm world, patch one site, demand the output, drop the fork."""
    with base.fork() as world:
        world.patch(site, value)
        answer = world.demand(output)
        ledger = world.ledger
        return Cost(ledger.count("invalidated"), ledger.count("recomputed"), answer)


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep of patches: the nodes of a full run, and the cost of each patch."""

    full: int
    costs: tuple[Cost, ...]

    @property
    def recomputed(self) -> int:
        """The nodes that all patches recomputed together."""
        return sum(cost.recomputed for cost in self.costs)

    @property
    def ratio(self) -> Fraction:
        """ρ: a full run for each patch, over what the patches recomputed."""
        return Fraction(len(self.costs) * self.full, self.recomputed)


def sweep(graph: Graph, sites: Iterable[Site], output: Demand, value: Any = 2.0) -> Swept:
    """Patch each site with one value, in a fork of its own of one warm world, and demand the output."""
    base = warm(graph, output)
    costs = tuple(patch_cost(base, site, value, output) for site in sites)
    return Swept(base.ledger.count("recomputed"), costs)


def patch_wave(base: World, site: Site, value: Any) -> int:
    """Return how many nodes a patch invalidates; nothing is computed."""
    with base.fork() as world:
        world.patch(site, value)
        return world.ledger.count("invalidated")


def shifted(base: World, site: str) -> Any:
    """Return a value for a patch: the site's own, each position holding its neighbour's."""
    value = base.demand(site)
    return value[[*range(1, len(value)), 0]]


# -- Timings ---------------------------------------------------------------------------------------


def trimmed_median(values: Iterable[float], trim: float = 0.1) -> float:
    """Return the median of `values` without the largest `trim` of them.

    Whatever disturbs a timing makes it longer, so only the upper end is trimmed (trimming both
    ends alike would leave the median where it is).
    """
    ordered = sorted(values)
    return statistics.median(ordered[: max(1, len(ordered) - math.floor(trim * len(ordered)))])


def block_medians(values: Sequence[float], size: int) -> list[float]:
    """Return the trimmed median of each block of `size` values, in order; `size` divides their number."""
    return [trimmed_median(values[first : first + size]) for first in range(0, len(values), size)]


def fitted_slope(x: Iterable[float], y: Sequence[float], lags: int = 5) -> Estimate:
    """Return the slope of the least-squares line through (x, y), with its 95 % confidence interval.

    Neighbouring timings on one machine are alike, so the interval allows for residuals that are
    correlated over `lags` points. It allows for too little where they stay alike for long: it is then
    narrower than it says (docs/theory.md#index).
    """
    return least_squares([(at, 1.0) for at in x], y, lags=lags).coefficients[0]


# -- Scanning --------------------------------------------------------------------------------------
# An instrument that counts which nodes of a graph are looked at, and which edges are followed. It stands
# between the engine and the graph's table; neither knows of it.


@dataclass(slots=True)
class Walk:
    """The looks at each node, by number, and the edges that were followed from there."""

    nodes: Counter[int] = field(default_factory=Counter)
    edges: int = 0

    @property
    def touched(self) -> Touched:
        """The nodes looked at and the edges followed, each as often as that was done."""
        return Touched(self.nodes.total(), self.edges)


@dataclass(frozen=True, slots=True)
class Scan:
    """The walks from nodes to their readers, and from nodes to their inputs."""

    down: Walk = field(default_factory=Walk)
    up: Walk = field(default_factory=Walk)

    def clear(self) -> None:
        """Forget everything."""
        for walk in (self.down, self.up):
            walk.nodes.clear()
            walk.edges = 0


@contextmanager
def scanning(graph: Graph) -> Iterator[Scan]:
    """Count every look at the graph's wiring inside the `with` block; its structure must not change there."""
    table, scan = graph.table, Scan()
    consumers, inputs = table.consumers, table.inputs
    try:
        table.consumers, table.inputs = _Counted(consumers, scan.down), _Counted(inputs, scan.up)
        yield scan
    finally:
        table.consumers, table.inputs = consumers, inputs


class _Counted(list[Any]):
    """A list of neighbours that counts who is looked up, and each neighbour that is then read."""

    def __init__(self, neighbours: list[Any], walk: Walk) -> None:
        super().__init__(_Neighbours(found, walk) for found in neighbours)
        self._walk = walk

    def __getitem__(self, node: Any) -> Any:
        self._walk.nodes[node] += 1
        return super().__getitem__(node)


class _Neighbours(tuple[int, ...]):  # noqa: SLOT001  # a tuple's subclass can have none that hold something
    """The neighbours of a node, in order and equal to them; reading them is counted."""

    _walk: Walk

    def __new__(cls, found: Iterable[int], walk: Walk) -> _Neighbours:
        made = super().__new__(cls, found)
        made._walk = walk
        return made

    def __iter__(self) -> Iterator[int]:
        for site in super().__iter__():
            self._walk.edges += 1
            yield site

    def __getitem__(self, index: Any) -> Any:
        self._walk.edges += 1
        return super().__getitem__(index)
