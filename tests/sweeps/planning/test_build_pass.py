"""A pass as a value: followed over numbers, it computes in every world what that world alone computes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conewise.reactive.graph import Graph
from conewise.sweeps.planning.fusing import Fusion
from conewise.sweeps.planning.passes import (
    Alignment,
    PassProgram,
    Put,
    Read,
    Step,
    alignment,
    build_pass,
)
from conewise.sweeps.planning.regions import WHOLE, Regions
from conewise.sweeps.planning.schedule import Ranges, Schedule, members, schedule
from conewise.sweeps.storage.codec import decoded, plain


def combined(name: str) -> Any:
    return lambda *values: hash((name, *values))


@dataclass(frozen=True)
class Scene:
    graph: Graph
    worlds: Sequence[Mapping[str, bool]]
    """For each world the nodes that it patches, and whether it replaces their whole value."""

    @property
    def schedule(self) -> Schedule:
        patched: dict[str, int] = {}
        whole: dict[str, int] = {}
        for world, own in enumerate(self.worlds):
            for node, is_whole in own.items():
                patched[node] = patched.get(node, 0) | 1 << world
                whole[node] = whole.get(node, 0) | (is_whole << world)
        last = self.graph.sites[-1]
        return schedule(self.graph, patched, {n: m for n, m in whole.items() if m}, len(self.worlds), [last])


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    graph = Graph()
    names = ["x"]
    graph.source("x")
    for number in range(draw(st.integers(2, 9))):
        reads = draw(st.lists(st.sampled_from(names[-4:]), min_size=1, max_size=3, unique=True))
        names.append(f"n{number}")
        graph.node(names[-1], combined(names[-1]), reads)
    upstream = [n for n in names if n == names[-1] or names[-1] in graph.cone([n])]
    patch = st.dictionaries(st.sampled_from(upstream), st.booleans(), min_size=1, max_size=3)
    return Scene(graph, draw(st.lists(patch, min_size=1, max_size=6)))


def put_in(node: str, world: int, present: int, is_whole: bool) -> int:
    """What a world puts at a node: of its own, or changed from what is there."""
    return hash(("put", node, world)) if is_whole else hash(("changed", node, world, present))


def alone(scene: Scene, world: int) -> int:
    """The last node's value in one world, computed by itself."""
    values: dict[str, int] = {}
    for node in scene.graph.sites:
        inputs = scene.graph.inputs(node)
        values[node] = combined(node)(*(values[i] for i in inputs)) if inputs else hash("x")
        if node in scene.worlds[world]:
            values[node] = put_in(node, world, values[node], scene.worlds[world][node])
    return values[scene.graph.sites[-1]]


class Follower:
    """Follows a pass over plain numbers: a stack is a list, one number for each world."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.base: dict[str, int] = {}
        for node in scene.graph.sites:
            inputs = scene.graph.inputs(node)
            self.base[node] = combined(node)(*(self.base[i] for i in inputs)) if inputs else hash("x")
        self.stacks: dict[str, list[int]] = {}
        self.computed: list[tuple[str, int]] = []

    def follow(self, program: PassProgram) -> list[int]:
        for step in program.steps:
            if step.worlds:
                self._compute(step)
            if step.put is not None:
                self._put(step.put)
            for name in step.drop:
                del self.stacks[name]
        (target,) = program.targets
        return self._operand(target, program.worlds)

    def _compute(self, step: Step) -> None:
        reads = [self._operand(read, step.count) for read in step.reads]
        self.stacks[step.node] = [combined(step.node)(*values) for values in zip(*reads, strict=True)]
        self.computed += [(step.node, world) for world in members(step.worlds)]

    def _operand(self, read: Read, count: int) -> list[int]:
        if not read.stacked:
            return [self.base[read.node]] * count
        return _aligned(self.stacks[read.node], read.align, self.base[read.node])

    def _put(self, put: Put) -> None:
        have = list(self.stacks.get(put.node, ()))
        for world, place in zip(members(put.again), members(put.places), strict=True):
            have[place] = self._value(put.node, world, have[place])
        fresh = [self._value(put.node, world, self.base[put.node]) for world in members(put.fresh)]
        both = have + fresh
        self.stacks[put.node] = both if put.order is None else _picked(both, put.order)

    def _value(self, node: str, world: int, present: int) -> int:
        return put_in(node, world, present, self.scene.worlds[world][node])


def _picked(values: list[int], places: Ranges) -> list[int]:
    return [values[place] for start, stop in places for place in range(start, stop)]


def _aligned(values: list[int], align: Alignment, base: int) -> list[int]:
    if align.is_nothing:
        return values
    assert len(values) == align.worlds
    values = values if align.pick is None else _picked(values, align.pick)
    values = values + [base] * align.add
    return values if align.order is None else _picked(values, align.order)


def built(scene: Scene) -> PassProgram:
    return build_pass(scene.schedule, scene.graph.inputs, WHOLE)


@given(scenes())
def test_a_pass_computes_in_each_world_what_that_world_alone_computes(scene: Scene) -> None:
    follower = Follower(scene)
    assert follower.follow(built(scene)) == [alone(scene, world) for world in range(len(scene.worlds))]


@given(scenes())
def test_a_pass_computes_each_step_of_the_schedule_once_and_no_other(scene: Scene) -> None:
    follower = Follower(scene)
    follower.follow(built(scene))
    expected = [(node, world) for node, mask in scene.schedule.steps for world in members(mask)]
    assert sorted(follower.computed) == sorted(expected)
    assert built(scene).node_evaluations == len(expected)


@given(scenes())
def test_nothing_is_held_at_the_end_but_what_is_read(scene: Scene) -> None:
    follower = Follower(scene)
    follower.follow(built(scene))
    assert set(follower.stacks) <= {scene.graph.sites[-1]}


@given(scenes())
def test_a_pass_is_equal_to_what_is_read_back_from_json(scene: Scene) -> None:
    program = built(scene)
    assert decoded(json.loads(json.dumps(plain(program))), PassProgram, "it") == program


@given(st.sets(st.integers(0, 12), min_size=1), st.sets(st.integers(0, 12), min_size=1))
def test_an_alignment_brings_a_stack_to_the_worlds_of_a_reader(have: set[int], want: set[int]) -> None:
    if have & want:
        masks = [sum(1 << world for world in worlds) for worlds in (have, want)]
        stack = sorted(have)
        found = _aligned(stack, alignment(*masks), -1)
        assert found == [world if world in have else -1 for world in sorted(want)]


def chain() -> Graph:
    graph = Graph()
    graph.source("x")
    for node, read in (("a", "x"), ("b", "a"), ("c", "b"), ("d", "c")):
        graph.node(node, combined(node), [read])
    return graph


def test_what_is_inside_of_a_chain_has_no_step_and_is_counted() -> None:
    plan = schedule(chain(), {"a": 0b11}, {"a": 0b11}, 2, ["d"])
    program = build_pass(plan, chain().inputs, WHOLE, fused={"d": Fusion("d", frozenset("c"), ("b",), abs)})
    assert [step.node for step in program.steps] == ["a", "b", "d"]
    assert program.steps[-1].inside == ("c",)
    assert [read.node for read in program.steps[-1].reads] == ["b"]
    assert (program.node_evaluations, program.launches) == (6, 2)


def test_positions_that_are_not_computed_are_the_baselines() -> None:
    plan = schedule(chain(), {"a": 0b1}, {"a": 0b1}, 1, ["d"])
    regions = Regions({"a": 2, "b": 2, "c": 2}, {})
    program = build_pass(plan, chain().inputs, regions)
    assert [step.rows for step in program.steps] == [None, 2, 2, None]
    last = program.steps[-1].reads[0]
    assert (last.have, last.rows) == (2, None)
