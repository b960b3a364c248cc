"""Long random lives of a graph and its worlds, against the naive engine.

Every mutation, fork, commit and demand is made in both. After each step the invariants are asserted,
and in each world the stale sites are compared; at each demand what was computed, where, in which
order, and the values.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, event, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import conewise as cw
from conewise.errors import CycleError, InUseError, NoValueError, OpError
from tests.laws.oracle import NaiveGraph, NaiveWorld
from tests.laws.scenes import Scene, fresh_rule, fresh_value, scenes

Pair = tuple[cw.World, NaiveWorld]

MOST_SITES = 24
MOST_WORLDS = 6


class BrokenError(Exception):
    """What a broken rule raises."""


class Broken:
    """A rule that raises."""

    def __call__(self, *values: object) -> object:
        raise BrokenError("broken")


class Lives(RuleBasedStateMachine):
    """One graph, several worlds over it, each beside its naive twin."""

    cutoff = False

    def __init__(self) -> None:
        super().__init__()
        self.graph = cw.Graph()
        self.naive = NaiveGraph()
        self.worlds: list[tuple[cw.World, NaiveWorld]] = []
        self.grafts: list[tuple[cw.Graft, str]] = []
        self.count = 0
        self.is_watched = True
        self.tally: Counter[str] = Counter()

    # -- choices ---------------------------------------------------------------------------------

    def site(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.naive.rules)), label="site")

    def computed(self, data: st.DataObject) -> str:
        sites = [site for site, rule in self.naive.rules.items() if rule is not None]
        return data.draw(st.sampled_from(sites), label="computed site")

    def edge(self, data: st.DataObject) -> tuple[str, str]:
        edges = [(read, site) for site, inputs in self.naive.inputs.items() for read in dict.fromkeys(inputs)]
        return data.draw(st.sampled_from(edges), label="edge")

    def world(self, data: st.DataObject) -> Pair:
        return self.pick(data, self.worlds)

    def pick(self, data: st.DataObject, pairs: list[Pair]) -> Pair:
        """One of `pairs`, drawn by its place: what is drawn is kept, and would keep a world alive."""
        return pairs[data.draw(st.integers(0, len(pairs) - 1), label="world")]

    def new_name(self) -> str:
        self.count += 1
        return f"m{self.count}"

    @property
    def has_edges(self) -> bool:
        return any(self.naive.inputs.values())

    @property
    def has_room(self) -> bool:
        return len(self.naive.rules) < MOST_SITES

    # -- beginning, and what must always hold ------------------------------------------------------

    @initialize(scene=scenes(max_nodes=7), roots=st.integers(1, 2), is_watched=st.booleans())
    def begin(self, scene: Scene, roots: int, is_watched: bool) -> None:
        self.graph = scene.graph()
        for number, site in enumerate(scene.sources):
            self.naive.source(site, (1 << 80) + number)
        for site, rule_, inputs in scene.nodes:
            self.naive.node(site, rule_, inputs)
        for _ in range(roots):
            self.worlds.append((cw.World(self.graph, cutoff=self.cutoff), NaiveWorld(self.naive)))
        # An unwatched run never looks at a world between two changes of it: looking takes in new nodes.
        self.is_watched = is_watched

    @invariant()
    def all_is_well(self) -> None:
        self.graph.check()
        if not self.is_watched:
            return
        self.compare_worlds()

    def compare_worlds(self) -> None:
        assert set(self.graph.sites) == set(self.naive.rules)
        assert {node.site: node.inputs for node in self.graph} == self.naive.inputs
        for world, naive in self.worlds:
            world.check()
            stale = {site for site in self.graph.sites if world.is_stale(site)}
            assert stale == naive.stale(), (stale - naive.stale(), naive.stale() - stale)
            if naive.parent is not None:
                assert set(self.graph.names(world._state.own)) == naive.own()

    def teardown(self) -> None:
        self.graph.check()
        self.compare_worlds()
        for world, naive in self.worlds:
            for site in list(self.naive.rules):
                self.demand_both(world, naive, [site])
        for what, count in self.tally.items():
            event(f"{what}: {min(count, 5)}{'+' if count > 5 else ''}")

    # -- mutations of a world ----------------------------------------------------------------------

    @rule(data=st.data())
    def patch_with_value(self, data: st.DataObject) -> None:
        (world, naive), site, value = self.world(data), self.site(data), fresh_value()
        with self.invalidation(world, naive):
            world.patch(site, value)
            naive.patch(site, "value", value)

    @rule(data=st.data())
    def patch_with_function(self, data: st.DataObject) -> None:
        (world, naive), site, function = self.world(data), self.site(data), fresh_rule()
        with self.invalidation(world, naive):
            world.patch(site, function)
            naive.patch(site, "function", function)

    @rule(data=st.data())
    def patch_rule(self, data: st.DataObject) -> None:
        (world, naive), site, rule_ = self.world(data), self.computed(data), fresh_rule()
        with self.invalidation(world, naive):
            world.patch_rule(site, rule_)
            naive.patch(site, "rule", rule_)

    @precondition(lambda self: self.has_edges)
    @rule(data=st.data(), is_function=st.booleans())
    def patch_edge(self, data: st.DataObject, is_function: bool) -> None:
        (world, naive), edge = self.world(data), self.edge(data)
        value: Any = fresh_rule() if is_function else fresh_value()
        with self.invalidation(world, naive):
            world.patch_edge(edge, value)
            naive.patch_edge(edge, "function" if is_function else "value", value)

    @rule(data=st.data())
    def set(self, data: st.DataObject) -> None:
        (world, naive), value = self.world(data), fresh_value()
        sources = [site for site, rule_ in self.naive.rules.items() if rule_ is None]
        site = data.draw(st.sampled_from(sources), label="source")
        with self.invalidation(world, naive):
            world.set(site, value)
            naive.set(site, value)

    @precondition(lambda self: any(naive.restorable() for _, naive in self.worlds))
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        world, naive = self.pick(data, [pair for pair in self.worlds if pair[1].restorable()])
        site = data.draw(st.sampled_from(naive.restorable()), label="restored site")
        with self.invalidation(world, naive):
            world.restore(site)
            naive.restore(site)
        self.tally["restores"] += 1

    @precondition(lambda self: any(naive.frames for _, naive in self.worlds))
    @rule(data=st.data())
    def restore_the_last_patch(self, data: st.DataObject) -> None:
        world, naive = self.pick(data, [pair for pair in self.worlds if pair[1].frames])
        key: Any = naive.frames[-1][0]
        with self.invalidation(world, naive):
            if isinstance(key, str):
                world.restore(key)
                naive.restore(key)
            else:
                world.restore_edge(key)
                naive.restore_edge(key)
        self.tally["restores of the last patch"] += 1

    @precondition(lambda self: any(naive.restorable_edges() for _, naive in self.worlds))
    @rule(data=st.data())
    def restore_edge(self, data: st.DataObject) -> None:
        pairs = [pair for pair in self.worlds if pair[1].restorable_edges()]
        world, naive = self.pick(data, pairs)
        edge = data.draw(st.sampled_from(naive.restorable_edges()), label="restored edge")
        with self.invalidation(world, naive):
            world.restore_edge(edge)
            naive.restore_edge(edge)

    # -- forks -------------------------------------------------------------------------------------

    @precondition(lambda self: 0 < len(self.worlds) < MOST_WORLDS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        world, naive = self.world(data)
        self.worlds.append((world.fork(), naive.fork()))
        self.tally["forks"] += 1

    @precondition(lambda self: any(naive.parent for _, naive in self.worlds))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        world, naive = self.pick(data, [pair for pair in self.worlds if pair[1].parent])
        before = sum(each.ledger.count("recomputed") for each, _ in self.worlds)
        world.commit()
        naive.commit()
        assert sum(each.ledger.count("recomputed") for each, _ in self.worlds) == before
        self.tally["commits"] += 1

    @rule(data=st.data(), is_demanded=st.booleans())
    def intervene_and_commit(self, data: st.DataObject, is_demanded: bool) -> None:
        """What people do: fork, change, look, keep it."""
        world, naive = self.world(data)
        fork, twin = world.fork(), naive.fork()
        self.worlds.append((fork, twin))
        site, value = self.site(data), fresh_value()
        if twin.body(site) is not None:
            fork.restore(site)
            twin.restore(site)
        else:
            fork.patch(site, value)
            twin.patch(site, "value", value)
        if is_demanded:
            self.demand_both(fork, twin, list(self.naive.rules)[-3:])
        fork.commit()
        twin.commit()
        self.worlds.pop()
        twin.close()
        self.tally["commits"] += 1

    @precondition(lambda self: any(naive.parent for _, naive in self.worlds))
    @rule(data=st.data(), is_dropped=st.booleans())
    def close(self, data: st.DataObject, is_dropped: bool) -> None:
        world, naive = self.pick(data, [pair for pair in self.worlds if pair[1].parent])
        gone = naive.family()
        naive.close()
        if not is_dropped:
            world.close()
        self.worlds = [pair for pair in self.worlds if pair[1] not in gone]

    # -- mutations of the graph --------------------------------------------------------------------

    @precondition(lambda self: self.has_room)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        name, rule_ = self.new_name(), fresh_rule()
        inputs = data.draw(st.lists(st.sampled_from(list(self.naive.rules)), max_size=3), label="inputs")
        self.graph.node(name, rule_, inputs)
        self.naive.node(name, rule_, inputs)

    @precondition(lambda self: self.has_room)
    @rule(has_value=st.booleans())
    def grow_a_source(self, has_value: bool) -> None:
        name, value = self.new_name(), [fresh_value()] if has_value else []
        self.graph.source(name, *value)
        self.naive.source(name, *value)

    @rule(data=st.data(), is_broken=st.booleans())
    def redefine_rule(self, data: st.DataObject, is_broken: bool) -> None:
        site = self.computed(data)
        rule_ = Broken() if is_broken else fresh_rule()
        with self.invalidations():
            self.graph.redefine(site, rule_)
            self.naive.redefine(site, rule_, None)

    @rule(data=st.data(), with_rule=st.booleans(), with_new_node=st.booleans())
    def redefine_inputs(self, data: st.DataObject, with_rule: bool, with_new_node: bool) -> None:
        site = self.computed(data)
        rule_ = fresh_rule() if with_rule else None
        inputs = data.draw(st.lists(st.sampled_from(list(self.naive.rules)), max_size=3), label="inputs")
        if with_new_node and self.has_room:
            # Nobody looks between the two: worlds learn of the new node and of its reader at once.
            name, fresh = self.new_name(), fresh_rule()
            self.graph.node(name, fresh, inputs)
            self.naive.node(name, fresh, inputs)
            inputs = [*inputs[:1], name]
        before = {node.site: node.inputs for node in self.graph}
        if inputs == list(before[site]):
            return
        try:
            with self.invalidations():
                self.graph.redefine(site, rule_, inputs)
                self.naive.redefine(site, rule_, inputs)
        except CycleError as error:
            self.assert_true_cycle(error, before | {site: tuple(inputs)}, site)
            assert {node.site: node.inputs for node in self.graph} == before
            self.tally["cycles"] += 1
        except InUseError:
            assert {node.site: node.inputs for node in self.graph} == before

    def assert_true_cycle(self, error: CycleError, reads: dict[str, tuple[str, ...]], site: str) -> None:
        """Each site of the cycle is read by the next one, and the last is the first."""
        assert error.cycle[0] == error.cycle[-1] == site
        assert all(one in reads[next_one] for one, next_one in itertools.pairwise(error.cycle))

    @precondition(lambda self: self.has_room and self.has_edges)
    @rule(data=st.data(), is_edge=st.booleans(), is_chain=st.booleans())
    def graft(self, data: st.DataObject, is_edge: bool, is_chain: bool) -> None:
        one, two, three = fresh_rule(), fresh_rule(), fresh_rule()
        param = fresh_value()
        edge = self.edge(data)
        readers = [site for site, inputs in self.naive.inputs.items() if edge[0] in inputs]
        if is_chain:
            block = cw.chain(one, two)
        else:
            inside = cw.Graph()
            inside.source("e")
            inside.source("p", param, param=True)
            inside.node("a", one, ["e"])
            inside.node("b", two, ["e", "p"])
            inside.node("c", three, ["a", "e", "b"])
            block = cw.block(inside)
        try:
            with self.invalidations():
                graft = self.graph.graft(edge, block) if is_edge else self.graph.graft_after(edge[0], block)
                name, at, naive = graft.name, edge[0], self.naive
                with naive.changing():
                    if is_chain:
                        naive.node(f"{name}.0", one, [at])
                        naive.node(f"{name}.1", two, [f"{name}.0"])
                    else:
                        naive.source(f"{name}.p", param)
                        naive.node(f"{name}.a", one, [at])
                        naive.node(f"{name}.b", two, [at, f"{name}.p"])
                        naive.node(f"{name}.c", three, [f"{name}.a", at, f"{name}.b"])
                    naive.reroute([edge[1]] if is_edge else readers, at, graft.output)
        except InUseError:
            assert any((edge[0], reader) in naive.edges for _, naive in self.worlds for reader in readers)
            return
        self.grafts.append((graft, at))
        self.tally["grafts"] += 1

    @precondition(lambda self: self.grafts)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        graft, _ = data.draw(st.sampled_from(self.grafts), label="graft")
        before = {node.site: node.inputs for node in self.graph}
        block = {*graft.sites, *graft.sources}
        try:
            with self.invalidations():
                self.graph.remove(graft)
                (at,) = {read for site in block for read in before[site]} - block
                readers = [
                    site for site, inputs in before.items() if graft.output in inputs and site not in block
                ]
                with self.naive.changing():
                    self.naive.reroute(readers, graft.output, at)
                    self.naive.delete(block)
        except InUseError:
            assert {node.site: node.inputs for node in self.graph} == before
            self.tally["grafts in use"] += 1
            return
        self.grafts = [pair for pair in self.grafts if pair[0] is not graft]
        self.tally["grafts removed"] += 1

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        read = {site for inputs in self.naive.inputs.values() for site in inputs}
        ends = [s for s, r in self.naive.rules.items() if r is not None and s not in read and "->" not in s]
        if sum(rule_ is not None for rule_ in self.naive.rules.values()) < 5 or not ends:
            return
        site = data.draw(st.sampled_from(ends), label="discarded site")
        try:
            self.graph.discard([site])
        except InUseError:
            assert any(
                site in naive.bodies or any(site in edge for edge in naive.edges) for _, naive in self.worlds
            )
            return
        with self.naive.changing():
            self.naive.delete([site])

    # -- demand ------------------------------------------------------------------------------------

    @rule(data=st.data())
    def demand(self, data: st.DataObject) -> None:
        world, naive = self.world(data)
        late = list(self.naive.rules)[-4:]
        targets = st.one_of(st.lists(st.sampled_from(late), min_size=1, max_size=2), st.just(late))
        self.demand_both(world, naive, data.draw(targets, label="targets"))

    @rule(data=st.data())
    def demand_everything(self, data: st.DataObject) -> None:
        world, naive = self.world(data)
        for site in list(self.naive.rules):
            self.demand_both(world, naive, [site])

    def demand_both(self, world: cw.World, naive: NaiveWorld, targets: list[str]) -> None:
        needed = naive.needed(targets)
        lineage = [(each, twin) for each, twin in self.worlds if twin in naive.lineage()]
        plan = cw.Plan((), ())
        valueless = {s for s in needed if self.naive.rules[s] is None and naive.source_value(s) is None}
        is_broken = False
        for each, _ in lineage:
            each.ledger.clear()
        if valueless:
            with pytest.raises(NoValueError):
                world.demand(targets)
            with pytest.raises(NoValueError):
                world.plan(targets)
        else:
            plan = world.plan(targets)
            assert set(plan.sites) == needed
            try:
                values = world.demand(targets)
            except OpError as error:
                is_broken = True
                self.assert_true_failure(world, naive, error)
        done: list[str] = []
        for each, twin in sorted(lineage, key=lambda pair: len(pair[1].lineage())):
            ledger = each.ledger
            if not self.cutoff:
                assert not ledger.cut_off
            assert all(naive.holder(site) is twin for site in (*ledger.recomputed, *ledger.cut_off))
            done += ledger.recomputed if not self.cutoff else _in_plan_order(plan.sites, ledger)
        if is_broken or valueless:
            assert Counter(done) <= Counter(needed)
            self.tally["demands that failed"] += 1
        else:
            assert done == list(plan.sites)
            assert list(values) == [naive.value(site) for site in targets]
            assert set(world.ledger.reused) <= set(naive.graph.rules) - needed
        naive.computed(done)
        self.tally["demands"] += 1
        self.tally["demands that recompute"] += bool(needed)
        if self.is_watched:
            note(f"needed {sorted(needed)}")

    def assert_true_failure(self, world: cw.World, naive: NaiveWorld, error: OpError) -> None:
        """The site that is blamed cannot be computed, and is left invalid."""
        with pytest.raises(BrokenError):
            naive.value(error.site)
        assert world.is_stale(error.site)

    # -- what a mutation invalidates ---------------------------------------------------------------

    def invalidation(self, world: cw.World, naive: NaiveWorld) -> Invalidation:
        return Invalidation([(world, naive)])

    def invalidations(self) -> Invalidation:
        return Invalidation([pair for pair in self.worlds if pair[1].parent is None])


def _in_plan_order(sites: tuple[str, ...], ledger: cw.Ledger) -> list[str]:
    both = {*ledger.recomputed, *ledger.cut_off}
    assert len(both) == len(ledger.recomputed) + len(ledger.cut_off)
    return [site for site in sites if site in both]


class Invalidation:
    """Around a mutation: the ledger tells exactly which sites lost their value, in the world that made it."""

    def __init__(self, worlds: list[tuple[cw.World, NaiveWorld]]) -> None:
        self.worlds = worlds

    def __enter__(self) -> None:
        self.before = [set(naive.graph.rules) - naive.stale() for _, naive in self.worlds]
        for world, _ in self.worlds:
            world.ledger.clear()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            assert all(not world.ledger.invalidated for world, _ in self.worlds)
            return
        for (world, naive), valid in zip(self.worlds, self.before, strict=True):
            lost = {site for site in naive.stale() & valid if naive.is_computed(site)}
            assert Counter(world.ledger.invalidated) == Counter(lost)


class LivesWithCutoff(Lives):
    """The same lives; a recomputed value that is the same stops the wave."""

    cutoff = True


# A life is cheap, and what goes wrong takes many steps: more lives than a law has scenes.
profile = settings()
TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=profile.max_examples)
TestLivesWithCutoff = LivesWithCutoff.TestCase
TestLivesWithCutoff.settings = settings(max_examples=profile.max_examples)


def test_the_lives_are_eventful() -> None:
    """A state machine that mostly does nothing would show nothing: what matters happens often enough."""
    total: Counter[str] = Counter()

    class Counted(Lives):
        def teardown(self) -> None:
            total.update(self.tally)
            super().teardown()

    lives = 30
    run_state_machine_as_test(
        Counted, settings=settings(max_examples=lives, phases=[Phase.generate], database=None)
    )
    assert total["demands"] >= 5 * lives
    assert total["demands that recompute"] >= 0.3 * total["demands"]
    assert total["demands that failed"] >= 0.02 * total["demands"]
    often = [
        "forks",
        "commits",
        "restores",
        "restores of the last patch",
        "grafts",
        "grafts removed",
        "cycles",
    ]
    assert all(total[what] >= lives / 10 for what in often), total
