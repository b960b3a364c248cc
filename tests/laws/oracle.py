"""The naive engine: it recomputes all, and finds what a change invalidates by comparing everything.

It shares no code with the engine. Every place that can be changed carries a stamp, renewed when it
is. The *meaning* of a site in a world is all the stamps that its value depends on. Then:

    a change invalidates, in each world, the sites whose meaning it changed;
    a fork owns the sites whose meaning differs from their meaning in its parent;
    a demand computes the invalid sites that the demanded ones depend on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import conewise as cw

Rule = Callable[..., Any]
Edge = tuple[str, str]


# -- sets over a plain mapping site -> inputs ---------------------------------------------------


def wiring(graph: cw.Graph) -> dict[str, tuple[str, ...]]:
    """What each site of a graph reads."""
    return {node.site: node.inputs for node in graph}


def cone(reads: Mapping[str, Sequence[str]], sites: Collection[str], cut: Collection[str] = ()) -> set[str]:
    """All that a path of one edge or more leads to, through no site of `cut`. By iteration to a fixpoint."""
    reached: set[str] = set()
    while True:
        more = {
            site
            for site, inputs in reads.items()
            if site not in reached
            and site not in cut
            and any(read in reached or read in sites for read in inputs)
        }
        if not more:
            return reached
        reached |= more


def support(reads: Mapping[str, Sequence[str]], sites: Iterable[str], cut: Collection[str] = ()) -> set[str]:
    """`sites` and all that they depend on, not looking past `cut`. By iteration to a fixpoint."""
    wanted = set(sites)
    while True:
        more = {read for site in wanted if site not in cut for read in reads[site]} - wanted
        if not more:
            return wanted
        wanted |= more


def stale(reads: Mapping[str, Sequence[str]], patch: Collection[str], demand: Collection[str]) -> set[str]:
    """Theorem 2: what a warm world recomputes for `demand` under value patches at `patch`."""
    return (cone(reads, patch) - set(patch)) & support(reads, demand, cut=patch)


def stale_under_rules(
    reads: Mapping[str, Sequence[str]],
    given: Collection[str],
    ruled: Collection[str],
    demand: Collection[str],
) -> set[str]:
    """The same with rules, or functions, at `ruled`: these sites are computed, and look at what they read."""
    changed = {*given, *ruled}
    return ((cone(reads, changed) | set(ruled)) - set(given)) & support(reads, demand, cut=given)


# -- the naive engine ---------------------------------------------------------------------------

Kind = Literal["value", "function", "rule", "none"]


@dataclass(frozen=True)
class Stamped:
    """Something that was put somewhere, told from all else by its stamp."""

    stamp: int
    kind: Kind
    what: Any = None


@dataclass
class NaiveGraph:
    """Structure as plain dicts. A site without a rule is a source."""

    rules: dict[str, Stamped | None] = field(default_factory=dict)
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: dict[str, Stamped | None] = field(default_factory=dict)
    roots: list[NaiveWorld] = field(default_factory=list)
    _stamps: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _meanings: dict[object, int] = field(default_factory=dict)

    def stamped(self, kind: Kind, what: Any = None) -> Stamped:
        return Stamped(next(self._stamps), kind, what)

    def intern(self, meaning: object) -> int:
        return self._meanings.setdefault(meaning, len(self._meanings))

    def source(self, site: str, *value: Any) -> None:
        self.rules[site], self.inputs[site] = None, ()
        self.defaults[site] = self.stamped("value", value[0]) if value else None

    def node(self, site: str, rule: Rule, inputs: Iterable[str]) -> None:
        self.rules[site], self.inputs[site] = self.stamped("rule", rule), tuple(inputs)

    def redefine(self, site: str, rule: Rule | None, inputs: Iterable[str] | None) -> None:
        with self.changing():
            self.rules[site] = self.rules[site] if rule is None else self.stamped("rule", rule)
            self.inputs[site] = self.inputs[site] if inputs is None else tuple(inputs)

    def reroute(self, readers: Iterable[str], old: str, new: str) -> None:
        for reader in readers:
            self.inputs[reader] = tuple(new if read == old else read for read in self.inputs[reader])

    def delete(self, sites: Iterable[str]) -> None:
        for site in sites:
            del self.rules[site], self.inputs[site]
            self.defaults.pop(site, None)

    def worlds(self) -> list[NaiveWorld]:
        return [world for root in self.roots for world in root.family()]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A change of structure: every world follows it."""
        with _settling(self.worlds()):
            yield
        for world in self.worlds():
            world.frames.clear()


def naive(graph: cw.Graph) -> NaiveGraph:
    """The same structure as plain dicts."""
    copy = NaiveGraph()
    for node in graph:
        if node.rule is None:
            copy.source(node.site, graph.default(graph.number(node.site)))
        else:
            copy.node(node.site, node.rule, node.inputs)
    return copy


@contextmanager
def _settling(worlds: Sequence[NaiveWorld]) -> Iterator[None]:
    """Whatever the `with` block changes: a site keeps its value where it keeps its meaning.

    Values are with the world that owns the site. A fork that owns it no longer hands its value up; one
    that owns it from now on has none yet, and so none for what reads it there.
    """
    before = [(world, world.meanings()) for world in worlds]
    yield
    kept: list[tuple[NaiveWorld, str]] = []
    for world, meanings in before:
        now = world.meanings()
        kept += [(world, site) for site in world.fresh if site in now and meanings[site] == now[site]]
        world.fresh = set()
    for world, site in kept:
        world.holder(site).fresh.add(site)
    for world, _ in before:
        while unread := {site for site in world.fresh if any(map(world.is_stale, world.reads(site)))}:
            world.fresh -= unread


class NaiveWorld:
    """Changes over a graph or over a parent, and the names of those own sites that hold a value."""

    def __init__(self, graph: NaiveGraph, parent: NaiveWorld | None = None) -> None:
        self.graph, self.parent = graph, parent
        self.bodies: dict[str, Stamped] = {}
        self.given: dict[str, Stamped] = {}
        self.edges: dict[Edge, Stamped] = {}
        self.fresh: set[str] = set()
        self.frames: list[tuple[object, set[str]]] = []
        self.forks: list[NaiveWorld] = []
        (graph.roots if parent is None else parent.forks).append(self)

    def fork(self) -> NaiveWorld:
        return NaiveWorld(self.graph, self)

    def family(self) -> list[NaiveWorld]:
        return [self, *(world for fork in self.forks for world in fork.family())]

    def lineage(self) -> list[NaiveWorld]:
        return [self, *(self.parent.lineage() if self.parent is not None else ())]

    def close(self) -> None:
        (self.graph.roots if self.parent is None else self.parent.forks).remove(self)

    # -- what a site means here ------------------------------------------------------------------

    def _nearest(self, of: str, key: object) -> Stamped | None:
        for world in self.lineage():
            found: Stamped | None = getattr(world, of).get(key)
            if found is not None:
                return None if found.kind == "none" else found
        return None

    def body(self, site: str) -> Stamped | None:
        return self._nearest("bodies", site)

    def source_value(self, site: str) -> Stamped | None:
        return self._nearest("given", site) or self.graph.defaults[site]

    def seen(self, site: str) -> list[Stamped | None]:
        """For each input of `site` the patch on that edge, if any."""
        return [self._nearest("edges", (read, site)) for read in self.graph.inputs[site]]

    def reads(self, site: str) -> tuple[str, ...]:
        """What `site` really reads here: nothing when it is given, and no input that is patched away."""
        body = self.body(site)
        if body is not None and body.kind == "value":
            return ()
        inputs = zip(self.graph.inputs[site], self.seen(site), strict=True)
        return tuple(read for read, patch in inputs if patch is None or patch.kind != "value")

    def is_given(self, site: str) -> bool:
        """Whether the value needs no computing."""
        body = self.body(site)
        if body is None:
            return self.graph.rules[site] is None and self.source_value(site) is not None
        return body.kind == "value"

    def is_computed(self, site: str) -> bool:
        """Whether a function is called for its value: a source is computed when it is patched with one."""
        if self.graph.rules[site] is not None:
            return True
        body = self.body(site)
        return body is not None and body.kind == "function" and self.source_value(site) is not None

    def _own_meaning(self, site: str) -> object:
        body, rule = self.body(site), self.graph.rules[site]
        if body is not None and body.kind == "value":
            return body.stamp
        if rule is None:
            return self.source_value(site), body
        ruling = body if body is not None and body.kind == "rule" else rule
        then = body if body is not None and body.kind == "function" else None
        return ruling.stamp, then, tuple(self.graph.inputs[site]), tuple(self.seen(site))

    def meanings(self) -> dict[str, int]:
        """For every site a number that stands for all its value depends on."""
        known: dict[str, int] = {}

        def meaning(site: str) -> int:
            if site not in known:
                below = tuple(meaning(read) for read in self.reads(site))
                known[site] = self.graph.intern((site, _hashable(self._own_meaning(site)), below))
            return known[site]

        for site in self.graph.rules:
            meaning(site)
        return known

    def own(self) -> set[str]:
        """A root owns all; a fork owns what means something else than in its parent."""
        here = self.meanings()
        if self.parent is None:
            return set(here)
        above = self.parent.meanings()
        return {site for site, meaning in here.items() if above[site] != meaning}

    # -- values ----------------------------------------------------------------------------------

    def value(self, site: str) -> Any:
        """Recomputed from scratch. Raises what a rule raises, and KeyError for a source without value."""
        known: dict[str, Any] = {}

        def value(at: str) -> Any:
            if at not in known:
                known[at] = self._value(at, value)
            return known[at]

        return value(site)

    def _value(self, site: str, value: Callable[[str], Any]) -> Any:
        body, rule = self.body(site), self.graph.rules[site]
        if body is not None and body.kind == "value":
            return body.what
        if rule is None:
            given = self.source_value(site)
            if given is None:
                raise KeyError(site)
            result = given.what
        else:
            ruling = body if body is not None and body.kind == "rule" else rule
            arguments = []
            for read, patch in zip(self.graph.inputs[site], self.seen(site), strict=True):
                if patch is None:
                    arguments.append(value(read))
                else:
                    arguments.append(patch.what if patch.kind == "value" else patch.what(value(read)))
            result = ruling.what(*arguments)
        return body.what(result) if body is not None and body.kind == "function" else result

    # -- which of them are there -----------------------------------------------------------------

    def holder(self, site: str) -> NaiveWorld:
        """The world whose value this one sees: the nearest that owns it."""
        return next(world for world in self.lineage() if site in world.own())

    def is_stale(self, site: str) -> bool:
        return not self.is_given(site) and site not in self.holder(site).fresh

    def stale(self) -> set[str]:
        """All sites that a demand would have to compute."""
        owns = [(world, world.own()) for world in self.lineage()]
        return {
            site
            for site in self.graph.rules
            if not self.is_given(site) and site not in next(world for world, own in owns if site in own).fresh
        }

    def needed(self, sites: Iterable[str]) -> set[str]:
        """What a demand of `sites` computes."""
        invalid, needed, ahead = self.stale(), set[str](), list(sites)
        while ahead:
            site = ahead.pop()
            if site in invalid and site not in needed:
                needed.add(site)
                ahead.extend(self.reads(site))
        return needed

    def computed(self, sites: Iterable[str]) -> None:
        """Take note that a demand has computed `sites`."""
        for site in sites:
            self.holder(site).fresh.add(site)

    # -- changes ---------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A change of this world: it and its forks follow."""
        with _settling(self.family()):
            yield
        for world in self.family():
            if world is not self:
                world.frames.clear()

    def patch(self, site: str, kind: Kind, what: Any) -> None:
        self._push(site, is_new=site not in self.bodies)
        with self.changing():
            self.bodies[site] = self.graph.stamped(kind, what)

    def patch_edge(self, edge: Edge, kind: Kind, what: Any) -> None:
        self._push(edge, is_new=edge not in self.edges)
        with self.changing():
            self.edges[edge] = self.graph.stamped(kind, what)

    def set(self, site: str, value: Any) -> None:
        self.frames.clear()
        with self.changing():
            self.given[site] = self.graph.stamped("value", value)

    def restorable(self) -> list[str]:
        """The sites at which a patch stands, of this world or of an ancestor."""
        return sorted(site for site in self.graph.rules if self.body(site) is not None)

    def restorable_edges(self) -> list[Edge]:
        edges = [(read, site) for site, inputs in self.graph.inputs.items() for read in dict.fromkeys(inputs)]
        return sorted(edge for edge in edges if self._nearest("edges", edge) is not None)

    def restore(self, site: str) -> None:
        self._restore("bodies", site)

    def restore_edge(self, edge: Edge) -> None:
        self._restore("edges", edge)

    def _restore(self, of: str, key: Any) -> None:
        own: dict[Any, Stamped] = getattr(self, of)
        is_inherited = self.parent is not None and self.parent._nearest(of, key) is not None
        is_last = bool(self.frames) and self.frames[-1][0] == key and not is_inherited
        before = self.meanings()
        was = self.frames.pop()[1] if is_last else set[str]()
        if not is_last:
            self.frames.clear()
        with self.changing():
            own.pop(key, None)
            if is_inherited:
                own[key] = self.graph.stamped("none")
        now, mine = self.meanings(), self.own()
        self.fresh |= {site for site in was if site in mine and now[site] != before[site]}

    def _push(self, key: object, *, is_new: bool) -> None:
        if is_new:
            self.frames.append((key, set(self.fresh)))
        elif not self.frames or self.frames[-1][0] != key:
            self.frames.clear()

    def commit(self) -> None:
        """The parent takes over this fork's changes and values; nothing changes for forks of this one."""
        parent = self.parent
        assert parent is not None
        own, held = self.own(), set(self.fresh)
        mine = self.family()
        followers = [world for world in parent.family() if world not in mine and world is not parent]
        with _settling(followers):
            for of in ("bodies", "given", "edges"):
                getattr(parent, of).update(getattr(self, of))
                getattr(self, of).clear()
            if parent.parent is None:
                parent.bodies = {site: body for site, body in parent.bodies.items() if body.kind != "none"}
                parent.edges = {edge: patch for edge, patch in parent.edges.items() if patch.kind != "none"}
            parent.fresh -= own
            self.fresh = set()
            parent.computed(held)
        for world in (self, parent, *followers):
            world.frames.clear()


def _hashable(meaning: object) -> object:
    """A meaning by its stamps alone: what they stand for may not be hashable."""
    if isinstance(meaning, Stamped):
        return meaning.stamp
    if isinstance(meaning, tuple):
        return tuple(_hashable(part) for part in meaning)
    return meaning
