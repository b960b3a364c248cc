"""The law of exact surgery: what leaves every value as it was, composed, leaves every value as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conewise as cw
from conewise.paper import ops, theory
from conewise.paper.theory import GraftAt
from tests.laws.cost_scenes import bill
from tests.laws.scenes import Mix, Scene, fresh_value, scenes
from tests.laws.worlds import warm

Surgery = Callable[[cw.Graph], object]


def itself(value: Any) -> Any:
    """The identity, and the very object."""
    return value


def copied(value: int) -> int:
    """The identity, as another object."""
    return value + 0


class Only:
    """A rule that is right for the values that it was tested with, and wrong for all others."""

    def __init__(self, reads: tuple[Any, ...], value: Any) -> None:
        self.reads, self.value = reads, value

    def __call__(self, *values: Any) -> Any:
        return self.value if values == self.reads else fresh_value()


@st.composite
def identities(draw: st.DrawFn, scene: Scene) -> list[Surgery]:
    """Surgeries that leave every value as it is, whatever it is: grafts of the identity, rules made anew."""

    def grafted(at: str | tuple[str, str], size: int) -> Surgery:
        block = cw.chain(*[itself] * size)
        if isinstance(at, str):
            return lambda graph: graph.graft_after(at, block)
        return lambda graph: graph.graft(at, block) if at[0] in graph.inputs(at[1]) else None

    def redefined(site: str, salt: int) -> Surgery:
        return lambda graph: graph.redefine(site, Mix(salt))

    salts = {site: rule.salt for site, rule, _ in scene.nodes}
    places: list[st.SearchStrategy[Any]] = [st.sampled_from(scene.sites)]
    places += [st.sampled_from(scene.edges)] if scene.edges else []
    grafts = st.builds(grafted, st.one_of(places), st.integers(1, 3))
    rules = st.sampled_from(scene.computed).map(lambda site: redefined(site, salts[site]))
    return draw(st.lists(st.one_of(grafts, grafts, rules), min_size=1, max_size=6))


def values(world: cw.World, sites: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(sites, world.demand(sites), strict=True))


@settings(max_examples=60)
@given(st.data(), scenes(), st.booleans())
def test_a_sequence_of_exact_surgeries_is_exact(data: st.DataObject, scene: Scene, is_batch: bool) -> None:
    """In every world, patched ones included; and the blocks of earlier grafts keep their values too."""
    world = warm(scene)
    patched = world.fork()
    for site in scene.patch:
        patched.patch(site, fresh_value())
    worlds = (world, patched)
    original = [values(one, scene.sites) for one in worlds]
    for surgery in data.draw(identities(scene)):
        before = [] if is_batch else [values(one, world.graph.sites) for one in worlds]
        surgery(world.graph)
        for one, known in zip(worlds, before, strict=False):
            assert values(one, tuple(known)) == known
    assert [values(one, scene.sites) for one in worlds] == original
    world.check()


@settings(max_examples=60)
@given(st.data(), scenes())
def test_surgeries_that_are_exact_on_the_first_graph_compose_in_any_order(
    data: st.DataObject, scene: Scene
) -> None:
    """Each is right for the values of the graph as it was, and for no others: together they still are."""
    world = warm(scene)
    graph, known = world.graph, values(world, scene.sites)
    surgeries: list[Surgery] = []

    def right(site: str, reads: tuple[str, ...]) -> Only:
        return Only(tuple(known[read] for read in reads), known[site])

    def redefined(site: str, reads: tuple[str, ...]) -> Surgery:
        return lambda graph: graph.redefine(site, right(site, reads), reads)

    def grafted(site: str) -> Surgery:
        return lambda graph: graph.graft_after(site, cw.chain(right(site, (site,)), right(site, (site,))))

    for site, _, inputs in scene.nodes:
        other = data.draw(st.lists(st.sampled_from(scene.sites), max_size=2), label=f"{site} reads")
        reads = tuple(read for read in other if scene.sites.index(read) < scene.sites.index(site)) or inputs
        surgeries.append(redefined(site, reads))
    surgeries += map(grafted, scene.sites)
    for surgery in data.draw(st.permutations(surgeries), label="order")[:8]:
        surgery(graph)

    assert values(world, scene.sites) == known
    fresh = [site for site in graph.sites if site not in known]
    assert all(world.demand(site) == known[site.partition("->")[0]] for site in fresh)


def test_keeping_the_output_alone_does_not_compose() -> None:
    """Two changes that each leave y as it was on the first graph, and together do not."""

    def build() -> cw.Graph:
        graph = cw.Graph()
        graph.source("x", 5)
        graph.node("a", itself, ["x"])
        graph.node("zero", lambda _: 0, ["x"])
        graph.node("y", itself, ["a"])
        return graph

    changes: tuple[Surgery, Surgery] = (
        lambda graph: graph.redefine("y", lambda a, zero: a + zero, ["a", "zero"]),
        lambda graph: graph.redefine("zero", lambda _: 1),
    )
    for change in changes:
        graph = build()
        change(graph)
        assert cw.World(graph).demand("y") == 5
    graph = build()
    for change in changes:
        change(graph)
    assert cw.World(graph).demand("y") == 6


def test_blocks_that_nobody_notices_alone_do_not_compose() -> None:
    """Each graft leaves every site's value as it was, since w = x·y is 0 either way; both do not."""

    def build(*grafted: str) -> cw.World:
        graph = cw.Graph()
        graph.source("x", 0)
        graph.source("y", 0)
        graph.node("w", lambda x, y: x * y, ["x", "y"])
        for site in grafted:
            graph.graft((site, "w"), cw.chain(lambda _: 1))
        return cw.World(graph)

    for grafted in ((), ("x",), ("y",)):
        assert build(*grafted).demand(("x", "y", "w")) == (0, 0, 0)
    assert build("x", "y").demand("w") == 1


@settings(max_examples=40)
@given(scenes().filter(lambda scene: bool(scene.edges)), st.data())
def test_an_exact_graft_costs_what_any_does_and_with_a_cutoff_its_block_and_its_readers(
    scene: Scene, data: st.DataObject
) -> None:
    edge, size = data.draw(st.sampled_from(scene.edges)), data.draw(st.integers(1, 3))
    for rule, most in ((itself, size), (copied, size + 1)):
        block = cw.chain(*[rule] * size)
        plain, cutting = warm(scene), warm(scene, cutoff=True)
        predicted = theory.isolated_cost(plain.graph, [GraftAt(edge, block)])
        plain.graph.graft(edge, block)
        assert bill(plain, None) == predicted
        cutting.graph.graft(edge, block)
        assert bill(cutting, None) == most
        assert cutting.ledger.count("cut_off") == predicted - most


# -- the companion's block: x + f(x), with f's last weights zero ---------------------------------


def residual(width: int, inner: int = 3) -> cw.Block:
    """A residual block whose last weights are zero."""
    inside = cw.Graph()
    inside.source("in")
    random = np.random.default_rng(0)
    inside.source("up", random.normal(size=(width, inner)), param=True)
    inside.source("down", np.zeros((inner, width)), param=True)
    inside.node("hidden", ops.tanh, [inside.node("first", ops.linear, ["in", "up"])])
    inside.node("f", ops.linear, ["hidden", "down"])
    inside.node("sum", ops.add, ["in", "f"])
    return cw.block(inside, entry="in")


def network(x: Any) -> cw.Graph:
    graph = cw.Graph()
    graph.source("x", np.array(x, dtype=float).reshape(1, -1))
    graph.node("a", ops.tanh, ["x"])
    graph.node("b", ops.add, ["a", "x"])
    graph.node("y", ops.square, ["b"])
    return graph


@settings(max_examples=40)
@given(
    st.lists(st.floats(-1e6, 1e6).filter(bool), min_size=1, max_size=4),
    st.permutations(["x", "a", "b"]),
)
def test_residual_blocks_with_zero_weights_leave_every_bit(x: list[float], order: list[str]) -> None:
    graph = network(x)
    world = cw.World(graph)
    before = [value.tobytes() for value in world.demand(("x", "a", "b", "y"))]
    if any((value == 0).any() for value in world.demand(("a", "b"))):
        return
    for site in order:
        graph.graft_after(site, residual(len(x)))
        assert [value.tobytes() for value in world.demand(("x", "a", "b", "y"))] == before


def test_a_negative_zero_loses_its_sign_in_a_residual_block() -> None:
    """−0.0 + 0.0 is 0.0: equal as a number and not bit for bit, which 1/x tells."""
    graph = network([-0.0])
    graph.node("reciprocal", lambda x: 1 / x, ["x"])
    world = cw.World(graph)
    with np.errstate(divide="ignore"):
        assert world.demand("reciprocal") == -np.inf
        graph.graft(("x", "reciprocal"), residual(1))
        assert world.demand("reciprocal") == np.inf


@pytest.mark.parametrize(
    ("bits", "after"), [(0x7FF0000000000001, 0x7FF8000000000001), (0x7FF8 << 48, 0x7FF8 << 48)]
)
def test_a_signalling_nan_becomes_quiet_in_a_residual_block(bits: int, after: int) -> None:
    """Here f(x) is zeros because it does not look: zero weights times a NaN would be one."""
    graph = cw.Graph()
    graph.source("x", np.array([bits], np.uint64).view(np.float64))
    graph.node("read", lambda x: x.view(np.uint64)[0], ["x"])
    world = cw.World(graph)
    assert world.demand("read") == bits
    graph.graft_after("x", cw.chain(lambda x: x + np.zeros(1)))
    with np.errstate(invalid="ignore"):
        assert world.demand("read") == after


def test_a_block_that_overflows_is_no_identity() -> None:
    """0 · inf is not a number: f must be finite, and zero weights do not make it so."""
    graph = network([1e200])
    inside = cw.Graph()
    inside.source("in")
    inside.source("down", np.zeros((1, 1)), param=True)
    inside.node("f", ops.linear, [inside.node("squared", ops.square, ["in"]), "down"])
    inside.node("sum", ops.add, ["in", "f"])
    graph.graft_after("x", cw.block(inside, entry="in"))
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(cw.World(graph).demand("a")).all()
