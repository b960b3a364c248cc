"""A change happens whole or not at all, wherever it is interrupted.

A life is made from a seed: a graph, worlds over it, some changes and demands; then one change more. It is
made again for every moment of that change, and interrupted there. What stands then must be, to the last
entry of every table, what stood before the change or what stands after it; and both of these are
compared with the naive engine.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import conewise as cw
from conewise.paper import ops
from conewise.reactive.changes import Fixed, NewRule, NodeChange, Transformed
from conewise.reactive.gradients import ReversePass
from conewise.reactive.state import State, _maps
from tests.laws.interrupting import interrupt, moments_of
from tests.laws.oracle import NaiveGraph, NaiveWorld, cone
from tests.laws.scenes import Mix
from tests.laws.worlds import stale_sites

THOROUGH = os.environ.get("CONEWISE_HYPOTHESIS") == "thorough"
SITES = 8

# Python ignores, with a warning, what is raised in the callback of a weak reference.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@dataclass
class Real:
    """A graph of the engine, worlds over it, and the grafts in it."""

    graph: cw.Graph = field(default_factory=cw.Graph)
    worlds: list[cw.World] = field(default_factory=list)
    grafts: list[cw.Graft] = field(default_factory=list)
    gradients: list[cw.Gradients] = field(default_factory=list)

    def sync(self) -> None:
        """Take in what a first look would take in."""
        for world in self.open():
            world._state.sync()
            world.ledger.clear()

    def open(self) -> list[cw.World]:
        return [world for world in self.worlds if not world._state.is_closed]

    def check(self) -> None:
        self.graph.check()
        for world in self.open():
            world.check()

    def answers(self) -> list[list[Any]]:
        return [list(world.demand(self.graph.sites)) for world in self.open()]


Act = Callable[[Real], object]
Step = tuple[Act, Callable[[], object]]


class Life:
    """What a seed does to a graph and its worlds: steps for the engine, taken by the naive engine at once."""

    def __init__(self, seed: int, *, cutoff: bool) -> None:
        self.draw = random.Random(seed)
        self.naive = NaiveGraph()
        self.worlds: list[NaiveWorld] = []
        self.grafts: list[tuple[str, str]] = []
        self.acts: list[Act] = []
        self.made = 0
        for _ in range(2):
            self.do(self.source())
        for _ in range(self.draw.randint(4, SITES)):
            self.do(self.node())
        for _ in range(self.draw.randint(1, 2)):
            self.worlds.append(NaiveWorld(self.naive))
            self.acts.append(lambda real: real.worlds.append(cw.World(real.graph, cutoff=cutoff)))
        self.do(self.demand())
        for kind in self.draw.choices(PREPARING, k=9):
            self.do(getattr(self, kind)())

    def do(self, step: Step | None) -> None:
        if step is not None:
            self.acts.append(step[0])
            step[1]()

    def begin(self) -> Real:
        """The engine's side of it, made anew."""
        real = Real()
        for act in self.acts:
            act(real)
        real.sync()
        return real

    def compare(self, real: Real) -> None:
        """The engine's worlds are the naive engine's."""
        real.check()
        assert {node.site: node.inputs for node in real.graph} == self.naive.inputs
        open_ones = real.open()
        assert len(open_ones) == len(self.worlds)
        for world, naive in zip(open_ones, self.worlds, strict=True):
            assert {site for site in real.graph.sites if world.is_stale(site)} == naive.stale()
            if naive.parent is not None:
                assert set(real.graph.names(world._state.own)) == naive.own()
        answers = [[naive.value(site) for site in real.graph.sites] for naive in self.worlds]
        assert real.answers() == answers

    # -- choices ---------------------------------------------------------------------------------

    def pick(self, many: Iterable[Any]) -> Any:
        return self.draw.choice(list(many))

    def new_value(self) -> int:
        return (1 << 90) + self.draw.getrandbits(60)

    def new_rule(self) -> Mix:
        return Mix(self.draw.getrandbits(60))

    def new_name(self) -> str:
        self.made += 1
        return f"s{self.made}"

    def computed(self) -> list[str]:
        return [site for site, rule in self.naive.rules.items() if rule is not None]

    def edges(self) -> list[tuple[str, str]]:
        return [(read, site) for site, reads in self.naive.inputs.items() for read in dict.fromkeys(reads)]

    def changed(self) -> set[str]:
        """The sites at which some world has a change, and those at an end of a patched edge."""
        sites = {site for world in self.worlds for site in (*world.bodies, *world.given)}
        return sites | {site for world in self.worlds for edge in world.edges for site in edge}

    def any_world(self) -> tuple[int, NaiveWorld]:
        at = self.draw.randrange(len(self.worlds))
        return at, self.worlds[at]

    def any_of(self, things: Callable[[NaiveWorld], Iterable[Any]]) -> tuple[int, NaiveWorld, Any] | None:
        found = [(at, world, it) for at, world in enumerate(self.worlds) for it in things(world)]
        return self.pick(found) if found else None

    # -- steps: what the engine does, what the naive one does --------------------------------------

    def source(self) -> Step:
        name, value = self.new_name(), self.new_value()
        return lambda it: it.graph.source(name, value, param=True), lambda: self.naive.source(name, value)

    def node(self) -> Step:
        name, rule, sites = self.new_name(), self.new_rule(), list(self.naive.rules)
        inputs = [sites[-1], *self.draw.choices(sites, k=self.draw.randint(0, 2))]
        return lambda it: it.graph.node(name, rule, inputs), lambda: self.naive.node(name, rule, inputs)

    def demand(self) -> Step:
        at, naive = self.any_world()
        sites = list(self.naive.rules)[-self.draw.randint(1, SITES) :]
        return lambda it: it.worlds[at].demand(sites), lambda: naive.computed(naive.needed(sites))

    def patch(self) -> Step:
        (at, naive), site, value = self.any_world(), self.pick(self.naive.rules), self.new_value()
        return lambda it: it.worlds[at].patch(site, value), lambda: naive.patch(site, "value", value)

    def patch_with_function(self) -> Step:
        (at, naive), site, rule = self.any_world(), self.pick(self.naive.rules), self.new_rule()
        return lambda it: it.worlds[at].patch(site, rule), lambda: naive.patch(site, "function", rule)

    def patch_rule(self) -> Step:
        (at, naive), site, rule = self.any_world(), self.pick(self.computed()), self.new_rule()
        return lambda it: it.worlds[at].patch_rule(site, rule), lambda: naive.patch(site, "rule", rule)

    def patch_edge(self) -> Step:
        (at, naive), edge, value = self.any_world(), self.pick(self.edges()), self.new_value()
        return lambda it: it.worlds[at].patch_edge(edge, value), lambda: naive.patch_edge(
            edge, "value", value
        )

    def set(self) -> Step:
        (at, naive), value = self.any_world(), self.new_value()
        site = self.pick(site for site, rule in self.naive.rules.items() if rule is None)
        return lambda it: it.worlds[at].set(site, value), lambda: naive.set(site, value)

    def restore(self) -> Step | None:
        found = self.any_of(NaiveWorld.restorable)
        if found is None:
            return None
        at, naive, site = found
        return lambda it: it.worlds[at].restore(site), lambda: naive.restore(site)

    def restore_the_last(self) -> Step | None:
        found = self.any_of(lambda world: [key for key, _ in world.frames[-1:] if isinstance(key, str)])
        if found is None:
            return None
        at, naive, site = found
        return lambda it: it.worlds[at].restore(site), lambda: naive.restore(site)

    def restore_edge(self) -> Step | None:
        found = self.any_of(NaiveWorld.restorable_edges)
        if found is None:
            return None
        at, naive, edge = found
        return lambda it: it.worlds[at].restore_edge(edge), lambda: naive.restore_edge(edge)

    def fork(self) -> Step | None:
        if len(self.worlds) > 4:
            return None
        at, naive = self.any_world()
        return (
            lambda it: it.worlds.append(it.worlds[at].fork()),
            lambda: self.worlds.append(naive.fork()),
        )

    def commit(self) -> Step | None:
        found = self.any_of(lambda world: [world] if world.parent else [])
        if found is None:
            return None
        at, naive, _ = found
        return lambda it: it.worlds[at].commit(), naive.commit

    def close(self) -> Step | None:
        found = self.any_of(lambda world: [world] if world.parent else [])
        if found is None:
            return None
        at, naive, _ = found

        def mirror() -> None:
            gone = naive.family()
            naive.close()
            self.worlds = [world for world in self.worlds if world not in gone]

        return lambda it: it.worlds[at].close(), mirror

    def redefine(self) -> Step:
        site, rule = self.pick(self.computed()), self.new_rule()
        return lambda it: it.graph.redefine(site, rule), lambda: self.naive.redefine(site, rule, None)

    def redefine_inputs(self) -> Step | None:
        site = self.pick(self.computed())
        later = cone(self.naive.inputs, [site])
        inputs = self.draw.sample(sorted(set(self.naive.rules) - later - {site}), 2)
        if site in {reader for world in self.worlds for _, reader in world.edges}:
            return None
        return (
            lambda it: it.graph.redefine(site, inputs=inputs),
            lambda: self.naive.redefine(site, None, inputs),
        )

    def graft(self) -> Step | None:
        at, reader = self.pick(self.edges())
        readers = [site for site, reads in self.naive.inputs.items() if at in reads]
        is_after = self.draw.random() < 0.5
        rerouted = readers if is_after else [reader]
        if any((at, each) in world.edges for world in self.worlds for each in rerouted):
            return None
        one, two, name = self.new_rule(), self.new_rule(), self.new_name()
        block = cw.chain(one, two)

        def mirror() -> None:
            with self.naive.changing():
                self.naive.node(f"{name}.0", one, [at])
                self.naive.node(f"{name}.1", two, [f"{name}.0"])
                self.naive.reroute(rerouted, at, f"{name}.1")
            self.grafts.append((name, at))

        if is_after:
            return lambda it: it.grafts.append(it.graph.graft_after(at, block, name=name)), mirror
        return lambda it: it.grafts.append(it.graph.graft((at, reader), block, name=name)), mirror

    def remove(self) -> Step | None:
        if not self.grafts:
            return None
        name, at = self.grafts[-1]
        inside, output = {f"{name}.0", f"{name}.1"}, f"{name}.1"
        readers = [site for site, reads in self.naive.inputs.items() if output in reads]
        is_read_inside = any(
            f"{name}.0" in reads for site, reads in self.naive.inputs.items() if site != output
        )
        reads = {read for site in inside for read in self.naive.inputs[site]} - inside
        if (
            self.changed() & inside
            or is_read_inside
            or reads != {at}
            or output in self.naive.inputs[f"{name}.0"]
        ):
            return None

        def mirror() -> None:
            with self.naive.changing():
                self.naive.reroute(readers, output, at)
                self.naive.delete(inside)
            self.grafts.pop()

        def act(it: Real) -> None:
            it.graph.remove(it.grafts[-1])

        return act, mirror

    def discard(self) -> Step | None:
        read = {site for inputs in self.naive.inputs.values() for site in inputs}
        ends = [site for site in self.computed() if site not in read | self.changed() and "." not in site]
        if not ends or len(self.computed()) < 4:
            return None

        def mirror() -> None:
            with self.naive.changing():
                self.naive.delete([ends[-1]])

        return lambda it: it.graph.discard([ends[-1]]), mirror


PREPARING = (
    ["patch", "patch_with_function", "patch_rule", "patch_edge", "set", "restore", "commit", "graft"]
    + ["redefine", "redefine_inputs", "node", "source"]
    + ["fork", "demand"] * 5
)
CHANGES = [
    "patch",
    "patch_with_function",
    "patch_rule",
    "patch_edge",
    "set",
    "restore",
    "restore_the_last",
    "restore_edge",
    "commit",
    "redefine",
    "redefine_inputs",
    "graft",
    "remove",
    "discard",
    "node",
    "source",
    "close",
]


# -- all that stands, as plain data ---------------------------------------------------------------


def change_as_data(change: NodeChange) -> object:
    def as_data(part: object) -> object:
        match part:
            case Fixed(value):
                return "fixed", value
            case Transformed(function):
                return "through", repr(function)
            case NewRule(rule):
                return "ruled", repr(rule)
        return repr(part)

    return as_data(change.given), {place: as_data(patch) for place, patch in change.patches.items()}


def state_as_data(state: State) -> object:
    values = state.values
    return {
        "is_closed": state.is_closed,
        "values": {
            n: repr(v) for n, v in (values.items() if isinstance(values, dict) else enumerate(values))
        },
        "changes": {node: change_as_data(change) for node, change in state.changes.items()},
        "definitions": {node: repr(definition) for node, definition in state._definitions.items()},
        "frames": [(f.key, repr(f.displaced)) for f in state.frames],
        "memos": {node: (memo[1], memo[2]) for node, memo in _maps(state.memos)[0].items()},
        "known": state._known,
        "forks": len(state.forks()),
    }


def everything(real: Real) -> dict[str, object]:
    """All that a change may touch."""
    graph, table = real.graph, real.graph.table
    return {
        "sites": graph.names(table.order),
        "names": graph._names,
        "numbers": graph._numbers,
        "defaults": graph._defaults,
        "params": graph._params,
        "valueless": graph.valueless,
        "rules": [*map(repr, table.rules)],
        "inputs": table.inputs,
        "consumers": [set(readers) for readers in table.consumers],
        "labels": [table.labels[number] for number in table.order],
        "columns": len(table.labels),
        "states": [state_as_data(world._state) for world in real.worlds],
        "ledgers": [(world.ledger._events, world.ledger._tally) for world in real.worlds],
        "gradients": [repr(grads) for grads in real.gradients],
        "reverse passes": [_reverse_pass_as_data(guard) for guard in graph.guards],
    }


def _reverse_pass_as_data(guard: object) -> object:
    assert isinstance(guard, ReversePass)
    known = guard.gradient, guard._added, guard._through, guard._own, guard._differentiated, guard._wrt
    return known, set(guard._spans.values())


# -- the laws -------------------------------------------------------------------------------------


class Change:
    """One change of one life, made again and again."""

    def __init__(self, begin: Callable[[], Real], act: Act) -> None:
        self.begin, self.act = begin, act
        real = begin()
        self.before = deepcopy(everything(real))
        self.answers_before = real.answers()
        real = begin()
        act(real)
        self.after = deepcopy(everything(real))
        self.answers_after = real.answers()

    def moments(self, *, opcodes: bool = False) -> int:
        real = self.begin()
        return moments_of(lambda: self.act(real), opcodes=opcodes)

    def interrupt(self, at: int, *, again: int = 0, opcodes: bool = False) -> int:
        """Interrupt the change, and assert that it happened whole or not at all; returns how often."""
        real = self.begin()
        count = interrupt(lambda: self.act(real), at, again=again, opcodes=opcodes)
        if count > 1:
            real.graph.check()  # The next use makes good what a second interruption left.
        now = everything(real)
        for what, data in now.items():
            assert data in (self.before[what], self.after[what]), f"{what} at moment {at}, {again}"
        assert now in (self.before, self.after), f"at moment {at}, {again}"
        expected = self.answers_before if now == self.before else self.answers_after
        real.check()
        assert real.answers() == expected
        return count


def changes(kind: str, *, cutoff: bool, count: int) -> Iterator[Change]:
    """Changes of a kind, each of another life; both ends of each are as the naive engine has them."""
    seed = sum(map(ord, kind))
    while count:
        seed += 1
        life = Life(seed, cutoff=cutoff)
        step = getattr(life, kind)()
        if step is None:
            continue
        life.compare(life.begin())
        act, mirror = step
        yield Change(life.begin, act)
        real = life.begin()
        act(real)
        mirror()
        life.compare(real)
        count -= 1


def some(moments: int, most: int) -> Iterable[int]:
    """All moments, or evenly about `most` of them."""
    return range(1, moments + 1, 1 if THOROUGH else max(moments // most, 1))


@pytest.mark.parametrize("cutoff", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_an_interrupted_change_is_made_whole_or_not_at_all(kind: str, cutoff: bool) -> None:
    for change in changes(kind, cutoff=cutoff, count=20 if THOROUGH else 2):
        for at in some(change.moments(), 60):
            assert change.interrupt(at) == 1


@pytest.mark.parametrize("kind", CHANGES)
def test_so_it_is_when_it_is_interrupted_between_any_two_instructions(kind: str) -> None:
    for change in changes(kind, cutoff=True, count=5 if THOROUGH else 1):
        for at in some(change.moments(opcodes=True), 40):
            assert change.interrupt(at, opcodes=True) == 1


@pytest.mark.parametrize("kind", CHANGES)
def test_so_it_is_when_taking_it_back_is_interrupted_too(kind: str) -> None:
    counts: Counter[int] = Counter()
    for change in changes(kind, cutoff=True, count=3 if THOROUGH else 1):
        moments = change.moments()
        for at in some(moments, 12):
            for again in (*range(1, 20, 1 if THOROUGH else 4), 40, 80):
                counts[change.interrupt(at, again=again)] += 1
    assert counts[2] > counts[1] / 4, "most second interruptions came too late"


@pytest.mark.parametrize("again", [0, 1, 3, 8])
@pytest.mark.parametrize("cutoff", [False, True])
def test_an_interrupted_demand_leaves_no_wrong_value_and_can_be_made_again(cutoff: bool, again: int) -> None:
    for seed in range(60 if THOROUGH else 4):
        life = Life(seed, cutoff=cutoff)
        sites = list(life.naive.rules)
        expected = [[naive.value(site) for site in sites] for naive in life.worlds]
        assert answer(life.begin(), sites) == expected
        moments = list(some(moments_of(partial(answer, life.begin(), sites)), 40))
        interrupted = 0
        for at in moments:
            real = life.begin()
            stale = [stale_sites(world) for world in real.worlds]
            # The last moments may not be reached: not every run makes as many steps.
            interrupted += interrupt(partial(answer, real, sites), at, again=again) > 0
            real.check()
            assert all(stale_sites(world) <= before for world, before in zip(real.worlds, stale, strict=True))
            assert answer(real, sites) == expected
        assert interrupted >= 0.9 * len(moments)


def answer(real: Real, sites: list[str]) -> list[list[Any]]:
    return [list(world.demand(sites)) for world in real.worlds]


def differentiated() -> Real:
    real = Real()
    graph = real.graph
    for name, value in (("x", 2.0), ("w", 3.0), ("v", 5.0)):
        graph.source(name, value)
    graph.node("a", ops.mul, ["x", "w"])
    graph.node("b", ops.add, ["a", "v"])
    graph.node("c", ops.mul, ["a", "b"])
    graph.node("loss", ops.mul, ["c", "c"])
    real.worlds.append(cw.World(graph))
    real.worlds[0].demand("loss")
    return real


def with_gradients() -> Real:
    real = differentiated()
    real.gradients = [cw.gradients(real.graph, "loss", "a"), cw.gradients(real.graph, "loss", ["w"])]
    real.answers()
    real.sync()
    return real


@pytest.mark.parametrize("again", [0, 2, 7])
@pytest.mark.parametrize(
    ("begin", "act"),
    [
        (differentiated, lambda it: cw.gradients(it.graph, "loss", ["x", "v"])),
        (with_gradients, lambda it: cw.gradients(it.graph, "loss", ["x", "v"])),
        (with_gradients, lambda it: it.gradients[0].remove()),
        (with_gradients, lambda it: it.gradients[1].remove()),
    ],
)
def test_interrupted_gradients_are_built_or_removed_whole_or_not_at_all(
    begin: Callable[[], Real], act: Act, again: int
) -> None:
    change = Change(begin, act)
    assert change.before != change.after
    counts = {change.interrupt(at, again=again) for at in some(change.moments(), 50)}
    assert counts == ({1, 2} if again else {1})
