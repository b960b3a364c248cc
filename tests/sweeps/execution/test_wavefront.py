"""The wavefront over programs written by hand: in every world it computes what that world alone computes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conewise.program.records import SIZES, Program, Ref
from conewise.program.walk import compile_rule
from conewise.reactive.graph import Graph
from conewise.sweeps.execution.fills import PassFills, Values
from conewise.sweeps.execution.wavefront import Wavefront
from conewise.sweeps.planning.layout import Layout
from conewise.sweeps.planning.passes import Alignment, PassProgram, Put, Read, Step, build_pass
from conewise.sweeps.planning.regions import Regions
from conewise.sweeps.planning.schedule import Ranges, members, schedule
from tests.sweeps.handmade import WIDTH, B, Handmade, T, numbers, run_by_hand

aten = torch.ops.aten
LENGTH = 4
PLAIN = (B, T, WIDTH)


def summed(query: Tensor, seen: Tensor) -> Tensor:
    """To each position of `query`, the last ones of a run, all that stands there and before in `seen`."""
    return query + seen.cumsum(1)[:, -query.shape[1] :]


@dataclass(frozen=True)
class Scene:
    """A program, and the worlds: for each the nodes that it patches, and whether it replaces them whole.

    Nothing before the position `start` is changed. `narrow` are nodes of which the positions from there on
    are computed, `seen` what some of them read whole.
    """

    program: Program
    batch: int
    worlds: Sequence[Mapping[str, bool]]
    start: int
    narrow: frozenset[str]
    seen: Mapping[str, frozenset[str]]

    @property
    def layout(self) -> Layout:
        return Layout(self.program, {"b": self.batch, "t": LENGTH})

    @property
    def regions(self) -> Regions:
        return Regions(dict.fromkeys(self.narrow, LENGTH - self.start), self.seen)

    @property
    def target(self) -> str:
        return self.program.records[-1].name

    def base(self, change: Callable[[str, Any], Any] = lambda _, value: value) -> dict[str, Any]:
        x = numbers(self.batch, LENGTH, WIDTH, seed=7)
        return run_by_hand(self.program, {"x": x}, self.layout.sizes(1), change)

    def alone(self, world: int) -> Tensor:
        """The target in one world, computed by itself."""
        own = self.worlds[world]

        def change(node: str, value: Any) -> Any:
            if node not in own:
                return value
            value = self.base()[node].clone() if own[node] else value.clone()
            self.put(node, world, value)
            return value

        found: Tensor = self.base(change)[self.target]
        return found

    def put(self, node: str, world: int, value: Tensor) -> None:
        """Write what a world puts into a node: of its own, or made of what is there."""
        batch, positions = self.layout.batch_dim[node], self.layout.pos_dim[node]
        if batch == positions:
            value = value.unflatten(0, (-1, LENGTH))  # type: ignore[no-untyped-call]
        part = (value.transpose(0, 1) if batch == 1 else value)[:, self.start :]
        seed = zlib.crc32(f"{node} {world}".encode())
        if self.worlds[world][node]:
            part[:] = numbers(*part.shape, seed=seed)
        else:
            part[..., :2] = 2 * part[..., :2] + numbers(*part[..., :2].shape, seed=seed)

    def write(self, node: str, stack: Tensor, worlds: Ranges, values: object, sizes: Sequence[int]) -> None:
        """What a pass asks of its fills."""
        del values
        assert tuple(sizes) == self.layout.sizes(1)
        assert len(stack) == len(members(worlds))
        for place, world in enumerate(members(worlds)):
            self.put(node, world, stack[place])


KINDS = ("linear", "add", "square", "scaled", "placed", "flat", "turned", "summed", "halves")


@st.composite
def scenes(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> Scene:
    made = Handmade(x=PLAIN)
    weight = made.source("weight", numbers(WIDTH, WIDTH, seed=3))
    scale = made.record("scale", aten.full.default, [made.size(B), 1, 1], 3, shape=(B, 1, 1))
    made.record("steps", aten.arange.default, made.size(T), shape=(T,))
    steps = made.record("steps.in", aten.unsqueeze.default, Ref("steps"), 1, shape=(T, 1))
    names, rowwise, patchable = ["x"], ["x"], ["x"]
    seen: dict[str, frozenset[str]] = {}
    for number, kind in enumerate(draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=7))):
        read, name = Ref(draw(st.sampled_from(names[-3:]))), f"{kind}{number}"
        own = [name]
        match kind:
            case "linear":
                made.record(name, aten.linear.default, read, weight, shape=PLAIN)
            case "add":
                made.record(name, aten.add.Tensor, read, Ref(draw(st.sampled_from(names))), shape=PLAIN)
            case "square":
                made.record(name, aten.mul.Tensor, read, read, shape=PLAIN)
            case "scaled":
                made.record(name, aten.mul.Tensor, read, scale, shape=PLAIN)
            case "placed":
                made.record(name, aten.add.Tensor, read, steps, shape=PLAIN)
            case "flat":
                flat = [made.size(B * T), WIDTH]
                back = [made.size(B), made.size(T), WIDTH]
                made.record(f"{name}.in", aten.view.default, read, flat, shape=(B * T, WIDTH))
                made.record(f"{name}.mm", aten.mm.default, Ref(f"{name}.in"), weight, shape=(B * T, WIDTH))
                made.record(name, aten.view.default, Ref(f"{name}.mm"), back, shape=PLAIN)
                own = [f"{name}.in", f"{name}.mm", name]
            case "turned":
                made.record(f"{name}.in", aten.transpose.int, read, 0, 1, shape=(T, B, WIDTH))
                made.record(name, aten.transpose.int, Ref(f"{name}.in"), 0, 1, shape=PLAIN)
                own = [f"{name}.in", name]
            case "summed":
                other = draw(st.sampled_from(names))
                made.record(name, summed, read, Ref(other), shape=PLAIN)
                seen[name] = frozenset({other})
                if other == read.name:  # what is read whole is read once
                    own, patchable = [], [*patchable, name]
            case _:
                made.record(f"{name}.both", aten.split.Tensor, read, 2, 2, shape=None)
                for half in (0, 1):
                    made.record(f"{name}.{half}", getitem, Ref(f"{name}.both"), half, shape=(B, T, 2))
                halves = [Ref(f"{name}.1"), Ref(f"{name}.0")]
                made.record(name, aten.cat.default, halves, 2, shape=PLAIN)
                patchable += [f"{name}.0", f"{name}.1"]
        rowwise += own
        patchable += own
        names.append(name)
    program = made.program(names[-1])
    graph = graph_of(program)
    reaching = [name for name in patchable if name == names[-1] or names[-1] in graph.cone([name])]
    patch = st.dictionaries(st.sampled_from(reaching), st.booleans(), min_size=1, max_size=3)
    worlds = draw(st.lists(patch, min_size=1, max_size=6))
    start = draw(st.integers(0, LENGTH - 1))
    narrow = draw(st.sets(st.sampled_from(rowwise))) if start else set()
    return Scene(program, draw(st.integers(1, 2)), worlds, start, frozenset(narrow), seen)


def graph_of(program: Program) -> Graph:
    graph = Graph()
    for name in (SIZES, *(one.name for one in program.sources), *(leaf.name for leaf in program.inputs)):
        graph.source(name)
    for record in program.records:
        graph.node(record.name, compile_rule(record), record.inputs)
    return graph


def built(scene: Scene) -> PassProgram:
    """The pass over all worlds of a scene."""
    patched: dict[str, int] = {}
    whole: dict[str, int] = {}
    for world, own in enumerate(scene.worlds):
        for node, is_whole in own.items():
            patched[node] = patched.get(node, 0) | 1 << world
            whole[node] = whole.get(node, 0) | (is_whole << world)
    records = scene.program.record_of
    replaced = {node: mask for node, mask in whole.items() if mask}
    program = build_pass(
        schedule(graph_of(scene.program), patched, replaced, len(scene.worlds), [scene.target]),
        lambda node: records[node].inputs,
        scene.regions,
        several=lambda node: node in records and records[node].shape is None,
    )
    return unmeasured(program)


def unmeasured(program: PassProgram) -> PassProgram:
    """A pass whose steps take no memory that anyone has to be told of."""
    return replace(program, rises=(0,) * len(program.steps))


def followed(scene: Scene, program: PassProgram, base: Mapping[str, Any]) -> dict[str, Tensor]:
    wavefront = Wavefront(scene.program, scene.layout)
    return wavefront.run(program, base.__getitem__, cast("PassFills", scene), cast("Values", scene))


@given(scenes())
def test_a_wavefront_computes_in_each_world_what_that_world_alone_computes(scene: Scene) -> None:
    base = scene.base()
    before = {name: value.clone() for name, value in base.items() if isinstance(value, Tensor)}
    found = followed(scene, built(scene), base)[scene.target]
    assert torch.equal(found, torch.cat([scene.alone(world) for world in range(len(scene.worlds))]))
    assert all(torch.equal(base[name], value) for name, value in before.items()), (
        "the baseline was written to"
    )


# -- instructions by hand --------------------------------------------------------------------------


def doubled(worlds: int, *, batch: int = 1, start: int = 0) -> Scene:
    """A scene with h = x + x and y = h + h, in which every world replaces x."""
    made = Handmade(x=PLAIN)
    made.record("h", aten.add.Tensor, Ref("x"), Ref("x"), shape=PLAIN)
    made.record("y", aten.add.Tensor, Ref("h"), Ref("h"), shape=PLAIN)
    return Scene(made.program("y"), batch, [{"x": True}] * worlds, start, frozenset(), {})


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("worlds", "align", "expected"),
    [
        (((0, 3),), Alignment(), [0, 1, 2]),
        (((0, 5),), Alignment(5, ((1, 3),)), [1, 2]),
        (((0, 5),), Alignment(5, ((0, 1), (3, 5))), [0, 3, 4]),
        (((0, 2),), Alignment(2, None, 2), [0, 1, None, None]),
        (((1, 3),), Alignment(2, None, 2, ((2, 3), (0, 2), (3, 4))), [None, 1, 2, None]),
        (((0, 4),), Alignment(4, ((0, 1), (2, 4)), 1, ((0, 1), (3, 4), (1, 3))), [0, None, 2, 3]),
    ],
    ids=["as it is", "a range", "several ranges", "baselines behind", "baselines between", "all of it"],
)
def test_a_stack_is_brought_to_the_worlds_of_a_reader(
    batch: int, worlds: Ranges, align: Alignment, expected: list[int | None]
) -> None:
    """Picked, then the baseline added, then put in order; None stands for the baseline."""
    scene = doubled(5, batch=batch)
    steps = (
        Step("x", put=Put("x", worlds)),
        Step("h", worlds, None, (Read("x", None, True),), drop=("x",)),
        Step("y", ((0, len(expected)),), None, (Read("h", None, True, None, align),), drop=("h",)),
    )
    program = unmeasured(PassProgram(len(expected), steps, (Read("y", None, True),)))
    base = scene.base()
    found = followed(scene, program, base)["y"]
    alone = [base["y"] if world is None else scene.alone(world) for world in expected]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("batch", [1, 2])
def test_worlds_that_put_in_are_written_where_they_stand_in_the_stack(batch: int) -> None:
    """Worlds 0, 2 and 3 computed h; 0 and 3 change it again, 1 and 4 begin with the baseline's value."""
    scene = replace(
        doubled(5, batch=batch),
        worlds=[
            {"x": True, "h": False},
            {"h": True},
            {"x": True},
            {"x": True, "h": False},
            {"h": False},
        ],
    )
    computed: Ranges = ((0, 1), (2, 4))
    put = Put("h", ((1, 2), (4, 5)), ((0, 1), (3, 4)), ((0, 1), (2, 3)), ((0, 1), (3, 4), (1, 3), (4, 5)))
    steps = (
        Step("x", put=Put("x", computed)),
        Step("h", computed, None, (Read("x", None, True),), put=put, drop=("x",)),
        Step("y", ((0, 5),), None, (Read("h", None, True),), drop=("h",)),
    )
    program = unmeasured(PassProgram(5, steps, (Read("y", None, True),)))
    found = followed(scene, program, scene.base())["y"]
    assert torch.equal(found, torch.cat([scene.alone(world) for world in range(5)]))
    assert built(scene) == program


def test_what_is_put_into_a_view_is_not_written_to_what_it_shows() -> None:
    """The last positions are all of them, and the stack of the view is the memory of another stack."""
    made = Handmade(x=PLAIN)
    made.record("view", aten.transpose.int, Ref("x"), 0, 1, shape=(T, B, WIDTH))
    made.record("back", aten.transpose.int, Ref("view"), 0, 1, shape=PLAIN)
    made.record("y", aten.add.Tensor, Ref("back"), Ref("x"), shape=PLAIN)
    scene = Scene(made.program("y"), 1, [{"x": True, "view": False}], 0, frozenset(), {})
    one: Ranges = ((0, 1),)
    steps = (
        Step("x", put=Put("x", one, rows=LENGTH)),
        Step(
            "view",
            one,
            LENGTH,
            (Read("x", LENGTH, True, LENGTH),),
            put=Put("view", (), one, one, None, LENGTH),
        ),
        Step("back", one, LENGTH, (Read("view", LENGTH, True, LENGTH),), drop=("view",)),
        Step(
            "y",
            one,
            None,
            (Read("back", None, True, LENGTH), Read("x", None, True, LENGTH)),
            drop=("back", "x"),
        ),
    )
    found = followed(scene, unmeasured(PassProgram(1, steps, (Read("y", None, True),))), scene.base())["y"]
    assert torch.equal(found, scene.alone(0))


@pytest.mark.parametrize("batch", [1, 2])
def test_of_a_product_the_wanted_columns_are_computed_in_all_worlds(batch: int) -> None:
    """In those that change it, and in those that read the baseline's."""
    made = Handmade(x=PLAIN)
    weight = made.source("weight", numbers(6, WIDTH, seed=3))
    bias = made.source("bias", numbers(6, seed=4))
    made.record("y", aten.linear.default, Ref("x"), weight, bias, shape=(B, T, 6))
    scene = Scene(made.program("y"), batch, [{"x": True}, {"x": True}], 0, frozenset(), {})
    reads = (Read("x", None, True), Read("weight"), Read("bias"))
    steps = (Step("x", put=Put("x", ((0, 2),))), Step("y", ((0, 2),), None, reads, drop=("x",)))
    target = Read("y", None, True, None, Alignment(2, None, 1))
    wavefront = Wavefront(scene.program, scene.layout)
    base = scene.base()
    program = unmeasured(PassProgram(3, steps, (target,)))
    fills, values = cast("PassFills", scene), cast("Values", scene)
    for columns in ([4, 1], [0, 5]):
        wanted = {"y": torch.tensor(columns)}
        found = wavefront.run(program, base.__getitem__, fills, values, columns=wanted)["y"]
        alone = [scene.alone(0), scene.alone(1), base["y"]]
        assert torch.equal(found, torch.cat(alone)[..., columns])


def test_a_pass_says_what_each_step_takes_before_it_runs() -> None:
    scene, told = doubled(2), list[int]()
    program = replace(built(scene), rises=(5, 7, 11), reading=13)

    def watched(node: str) -> Any:
        told.append(-1)
        return scene.base()[node]

    wavefront = Wavefront(scene.program, scene.layout)
    wavefront.run(program, watched, cast("PassFills", scene), cast("Values", scene), told.append)
    assert told == [5, -1, 7, 11, 13], "x is read once, after its step was announced"


def test_no_baseline_is_kept_for_the_next() -> None:
    scene = doubled(2)
    wavefront, program = Wavefront(scene.program, scene.layout), built(scene)
    for seed in (1, 2):
        other = run_by_hand(scene.program, {"x": numbers(1, LENGTH, WIDTH, seed=seed)}, scene.layout.sizes(1))
        partly = replace(scene, worlds=[{"x": False}, {"x": False}])
        found = wavefront.run(program, other.__getitem__, cast("PassFills", partly), cast("Values", scene))
        expected = [other["x"].clone(), other["x"].clone()]
        for world, value in enumerate(expected):
            partly.put("x", world, value)
        assert torch.equal(found["y"], 4 * torch.cat(expected))
    with pytest.raises(AssertionError, match="x is read between two runs"):
        wavefront._baseline("x", 1, None)
