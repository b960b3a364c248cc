"""Gradients are nodes: right by finite differences and by torch, and invalidated like any other node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import BusyError, GradientError, InUseError, OpError, UnknownSiteError
from conewise.paper import ops
from conewise.reactive.gradients import total

Array = np.ndarray[Any, Any]
SIZE = 3
# Any example will do: to look for the smallest one takes time.
ANY = settings(phases=[Phase.generate], max_examples=1_000)

# Square matrices all along, so that any op can follow any other.
POOL: tuple[tuple[ops.Op, int], ...] = (
    (ops.add, 2),
    (ops.sub, 2),
    (ops.mul, 2),
    (ops.matmul, 2),
    (ops.swiglu, 2),
    (ops.total, 3),
    (ops.neg, 1),
    (ops.scale(0.5), 1),
    (ops.tanh, 1),
    (ops.sigmoid, 1),
    (ops.gelu, 1),
    (ops.softmax, 1),
    (ops.log_softmax(axis=0), 1),
    (ops.transpose, 1),
    (ops.identity, 1),
)


@dataclass(frozen=True)
class Dag:
    """A random graph of ops as data: the inputs of each node are numbers of sources and earlier nodes."""

    sources: int
    nodes: tuple[tuple[ops.Op, tuple[int, ...]], ...]
    seed: int

    def graph(self) -> cw.Graph:
        """Sources s0, s1, ...; nodes n0, n1, ...; the loss is the mean of the last."""
        rng, g = np.random.default_rng(self.seed), cw.Graph()
        for number in range(self.sources):
            g.source(f"s{number}", rng.uniform(-1.0, 1.0, (SIZE, SIZE)))
        for number, (op, inputs) in enumerate(self.nodes):
            g.node(f"n{number}", op, [self.name(place) for place in inputs])
        g.node("loss", ops.mean, [self.name(self.sources + len(self.nodes) - 1)])
        return g

    def name(self, place: int) -> str:
        """The site behind a number."""
        return f"s{place}" if place < self.sources else f"n{place - self.sources}"


@st.composite
def dags(draw: st.DrawFn, pool: Sequence[tuple[ops.Op, int]] = POOL) -> Dag:
    """Chains mostly, with branches that join again: inputs are drawn near the end."""
    sources = draw(st.integers(1, 3))
    nodes: list[tuple[ops.Op, tuple[int, ...]]] = []
    for count in range(draw(st.integers(1, 9))):
        op, arity = draw(st.sampled_from(pool))
        last = sources + count - 1
        places = st.integers(max(0, last - 3), last) | st.just(last) | st.integers(0, last)
        inputs = [draw(places) for _ in range(arity)]
        nodes.append((op, tuple(inputs)))
    return Dag(sources, tuple(nodes), draw(st.integers(0, 2**16)))


def upstream(g: cw.Graph) -> list[str]:
    return [*g.upstream("loss"), "loss"]


def slope(world: cw.World, site: str, direction: Array, step: float = 1e-5) -> float:
    """The central difference of the loss along a direction at a site, by patching that site."""
    value, ends = world.demand(site), []
    for sign in (1.0, -1.0):
        with world.fork() as there:
            there.patch(site, value + sign * step * direction)
            ends.append(there.demand("loss"))
    return float((ends[0] - ends[1]) / (2.0 * step))


# -- they are right ------------------------------------------------------------------------------


@settings(max_examples=80)
@given(dags())
def test_the_gradients_of_a_random_graph_agree_with_finite_differences(dag: Dag) -> None:
    g = dag.graph()
    wrt = upstream(g)
    world, grads = cw.World(g), cw.gradients(g, "loss", wrt)
    g.check()
    rng = np.random.default_rng(1)
    for site in wrt:
        direction = rng.normal(size=np.shape(world.demand(site)))
        found = world.demand(grads[site])
        assert np.shape(found) == np.shape(world.demand(site))
        np.testing.assert_allclose(
            np.sum(found * direction), slope(world, site, direction), rtol=1e-5, atol=1e-7
        )


def transformer(g: cw.Graph, dtype: type = np.float64) -> list[str]:
    """One block of a small Llama-style model over five tokens; returns its parameters."""
    rng = np.random.default_rng(4)
    width, hidden, words, heads = 8, 12, 11, 2
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(["wq", "wk", "wv", "wo"], (width, width))
    shapes |= {"table": (words, width), "norm1": (width,), "norm2": (width,), "bias": (words,)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    shapes |= {"unembed": (width, words)}
    for name, shape in shapes.items():
        g.source(name, rng.normal(size=shape, scale=0.5).astype(dtype), param=True)
    g.source("ids", np.array([1, 4, 4, 0, 7]))
    g.source("targets", np.array([4, 4, 0, 7, 2]))
    g.node("x0", ops.embedding, ["table", "ids"])
    g.node("a", ops.rmsnorm, ["x0", "norm1"])
    for part in "qkv":
        g.node(part, ops.matmul, ["a", f"w{part}"])
    g.node("rq", ops.rope(heads=heads), ["q"])
    g.node("rk", ops.rope(heads=heads), ["k"])
    for head in range(heads):
        cut = ops.slice(axis=-1, start=4 * head, stop=4 * head + 4)
        for part, whole in (("q", "rq"), ("k", "rk"), ("v", "v")):
            g.node(f"{part}{head}", cut, [whole])
        g.node(f"kt{head}", ops.transpose, [f"k{head}"])
        g.node(f"raw{head}", ops.matmul, [f"q{head}", f"kt{head}"])
        g.node(f"scores{head}", ops.scale(0.5), [f"raw{head}"])
        g.node(f"masked{head}", ops.causal_mask, [f"scores{head}"])
        g.node(f"pattern{head}", ops.softmax, [f"masked{head}"])
        g.node(f"z{head}", ops.matmul, [f"pattern{head}", f"v{head}"])
    g.node("z", ops.concat, [f"z{head}" for head in range(heads)])
    g.node("attn", ops.matmul, ["z", "wo"])
    g.node("x1", ops.add, ["x0", "attn"])
    g.node("b", ops.layernorm, ["x1", "norm2", "norm1"])
    g.node("hg", ops.matmul, ["b", "gate"])
    g.node("hu", ops.matmul, ["b", "up"])
    g.node("h", ops.swiglu, ["hg", "hu"])
    g.node("mlp", ops.matmul, ["h", "down"])
    g.node("x2", ops.add, ["x1", "mlp"])
    g.node("plain", ops.matmul, ["x2", "unembed"])
    g.node("logits", ops.bias_add, ["plain", "bias"])
    g.node("loss", ops.cross_entropy, ["logits", "targets"])
    return list(shapes)


def torch_loss(p: dict[str, torch.Tensor], ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    f = torch.nn.functional
    x0 = p["table"][ids]
    a = f.rms_norm(x0, (8,), p["norm1"], 1e-6)

    def turned(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(5, 2, 4).transpose(0, 1)
        turns = torch.outer(
            torch.arange(5.0, dtype=x.dtype), 10_000.0 ** (-torch.arange(2, dtype=x.dtype) / 2)
        )
        cos, sin = turns.cos().repeat(1, 2), turns.sin().repeat(1, 2)
        return x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin

    q, k = turned(a @ p["wq"]), turned(a @ p["wk"])
    v = (a @ p["wv"]).reshape(5, 2, 4).transpose(0, 1)
    scores = (0.5 * q @ k.mT).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    x1 = x0 + (scores.softmax(-1) @ v).transpose(0, 1).reshape(5, 8) @ p["wo"]
    b = f.layer_norm(x1, (8,), p["norm2"], p["norm1"], 1e-5)
    x2 = x1 + (f.silu(b @ p["gate"]) * (b @ p["up"])) @ p["down"]
    return f.cross_entropy(x2 @ p["unembed"] + p["bias"], targets)


def test_the_gradients_of_a_transformer_are_those_of_torch() -> None:
    g = cw.Graph()
    params = transformer(g)
    world, grads = cw.World(g), cw.gradients(g, "loss", params)
    tensors = {name: torch.from_numpy(world.demand(name)).requires_grad_() for name in params}
    loss = torch_loss(tensors, torch.from_numpy(world["ids"]), torch.from_numpy(world["targets"]))
    loss.backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(world.demand("loss"), loss.item(), rtol=1e-12)
    for name in params:
        slopes = tensors[name].grad
        assert slopes is not None
        np.testing.assert_allclose(world.demand(grads[name]), slopes.numpy(), rtol=1e-9, atol=1e-13)


def test_a_float32_loss_has_float32_gradients() -> None:
    g = cw.Graph()
    params = transformer(g, np.float32)
    world, grads = cw.World(g), cw.gradients(g, "loss", params)
    assert world.demand("loss").dtype == np.float32
    assert {world.demand(site).dtype for site in grads.sites if site != grads.seed} == {np.dtype(np.float32)}


@pytest.mark.parametrize("reduce", [ops.sum, ops.mean, ops.sum(axis=0)], ids=str)
def test_the_seed_takes_on_the_dtype_of_what_it_meets(reduce: ops.Op) -> None:
    g = cw.Graph()
    g.source("x", np.ones(3, np.float32))
    g.node("y", ops.relu, ["x"])
    g.node("half", ops.scale(0.1), ["y"])
    g.node("sum", reduce, ["half"])
    g.node("loss", ops.relu, ["sum"])
    world, grads = cw.World(g), cw.gradients(g, "loss", "x")
    assert world.demand(grads["x"]).dtype == np.float32


def test_a_loss_of_another_shape_takes_a_seed_of_its_shape() -> None:
    g = cw.Graph()
    g.source("x", np.array([1.0, 2.0]))
    g.node("loss", ops.square, ["x"])
    world, grads = cw.World(g), cw.gradients(g, "loss", "x")
    with pytest.raises(OpError, match=r"The loss of `gradients` is a single number.*world\.set\(grads\.seed"):
        world.demand(grads["x"])
    world.set(grads.seed, np.array([1.0, 10.0]))
    np.testing.assert_array_equal(world.demand(grads["x"]), [2.0, 40.0])


# -- they are invalidated like any other node -------------------------------------------------------


def product() -> cw.Graph:
    """The graph of loss = s · v."""
    g = cw.Graph()
    g.source("a", 2.0)
    g.node("s", ops.identity, ["a"])
    g.source("v", 3.0)
    g.node("loss", ops.mul, ["s", "v"])
    return g


def test_a_gradient_changes_although_its_site_is_no_ancestor_of_the_mutated_one() -> None:
    """Backward locality as the paper states it fails: v is no ancestor of s, yet d loss/d v = s."""
    g = product()
    world, grads = cw.World(g), cw.gradients(g, "loss", ["v", "a"])
    assert "v" not in g.upstream("s")
    assert world.demand([grads["v"], grads["a"]]) == (2.0, 3.0)
    with world.fork() as there:
        there.patch("s", 7.0)
        assert there.demand(grads["v"]) == 7.0
        assert there.demand(grads["a"]) == 3.0
        assert there.ledger.recomputed == ["d(loss)/d(v)"]


def test_a_gradient_that_reads_no_value_is_invalidated_by_none() -> None:
    g = cw.Graph()
    g.source("x", 1.0)
    g.node("y", ops.scale(3.0), ["x"])
    g.node("loss", ops.add, ["y", "x"])
    world, grads = cw.World(g), cw.gradients(g, "loss", ["x", "y"])
    assert world.demand([grads["x"], grads["y"], "loss"]) == (4.0, 1.0, 4.0)
    world.ledger.clear()
    world.set("x", 5.0)
    assert set(world.ledger.invalidated) == {"y", "loss"}
    assert world.demand(grads["x"]) == 4.0
    assert world.ledger.recomputed == []


def test_a_linear_gradient_needs_no_forward_pass() -> None:
    g = cw.Graph()
    g.source("x")
    g.node("loss", ops.scale(3.0), ["x"])
    world, grads = cw.World(g), cw.gradients(g, "loss", "x")
    assert world.demand(grads["x"]) == 3.0
    assert world.ledger.recomputed == ["d(loss)/d(x)"]


Scene = tuple[Dag, list[str], list[str], list[tuple[str, str]]]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """A graph, what to differentiate by, which gradients to demand, and what to change where and how."""
    dag = draw(dags())
    sites = upstream(dag.graph())[:-1]
    wrt = draw(st.lists(st.sampled_from(sites), min_size=1, max_size=3, unique=True))
    demand = draw(st.lists(st.sampled_from(wrt), min_size=1, unique=True))
    places = draw(st.lists(st.sampled_from(sites), min_size=1, max_size=3, unique=True))
    return dag, wrt, demand, [(site, draw(st.sampled_from(["value", "function"]))) for site in places]


@settings(max_examples=150)
@given(scenes())
def test_gradients_that_change_were_invalidated_and_the_demanded_ones_alone_recomputed(
    scene: Scene,
) -> None:
    dag, wrt, wanted, changes = scene
    g = dag.graph()
    base, grads = cw.World(g), cw.gradients(g, "loss", wrt)
    sites = g.sites
    before = dict(zip(sites, base.demand(sites), strict=True))
    demand = [grads[site] for site in wanted]
    fixed: set[str] = set()
    seeds: set[str] = set()
    with base.fork() as world:
        for site, how in changes:
            is_value = how == "value" or g.is_source(site)
            world.patch(site, 0.5 * base.demand(site) + 0.25 if is_value else lambda own: own - 0.125)
            (fixed if is_value else seeds).add(site)
        invalid = set(world.ledger.invalidated)
        expected = (set(g.cone(fixed | seeds)) | seeds) - fixed
        assert {site for site in sites if world.is_stale(site)} == expected
        assert expected <= invalid <= expected | fixed

        world.demand(demand)
        assert Counter(world.ledger.recomputed) == Counter(expected & set(g.support(demand, cut=fixed)))
        after = dict(zip(sites, world.demand(sites), strict=True))
        changed = {site for site in grads.sites if not np.array_equal(before[site], after[site])}
        assert changed <= invalid
        world.check()


@settings(max_examples=40)
@given(scenes(), st.sampled_from([ops.neg, ops.tanh, ops.scale(-2.0)]))
def test_a_patched_world_has_the_gradients_of_a_graph_with_those_values(scene: Scene, rule: ops.Op) -> None:
    """Set the sources, redefine a unary node: the gradients are those of a graph built that way."""
    dag, wrt, _, _ = scene
    rng = np.random.default_rng(5)
    fresh = {f"s{n}": rng.uniform(-1.0, 1.0, (SIZE, SIZE)) for n in range(dag.sources)}
    unary = [f"n{number}" for number, (_, inputs) in enumerate(dag.nodes) if len(inputs) == 1]
    found = []
    for is_set_first in (True, False):
        g = dag.graph()
        world = cw.World(g)
        if not is_set_first:
            grads = cw.gradients(g, "loss", wrt)
            world.demand(grads.sites)
            if unary:
                grads.remove()
        if unary:
            g.redefine(unary[0], rule)
        if is_set_first:
            for site, value in fresh.items():
                world.set(site, value)
        if is_set_first or unary:
            grads = cw.gradients(g, "loss", wrt)
        if not is_set_first:
            for site, value in fresh.items():
                world.set(site, value)
        found.append(world.demand([grads[site] for site in wrt]))
        world.check()
        g.check()
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def changed_gradients(dag: Dag, wrt: list[str], patched: str) -> set[str]:
    """The sites of `wrt` whose gradient has another value once `patched` has another value."""
    g = dag.graph()
    base, grads = cw.World(g), cw.gradients(g, "loss", wrt)
    with base.fork() as world:
        world.patch(patched, 0.5 * base.demand(patched) + 0.25)
        return {s for s in wrt if not np.array_equal(base.demand(grads[s]), world.demand(grads[s]))}


def test_these_scenes_refute_that_only_gradients_upstream_of_a_patch_change() -> None:
    """The paper's formula as a mutant of the law above: the scenes must be able to tell."""

    def is_refuted(scene: Scene) -> bool:
        dag, wrt, _, changes = scene
        site = changes[0][0]
        return not changed_gradients(dag, wrt, site) <= {*dag.graph().upstream(site), site}

    find(scenes(), is_refuted, settings=ANY)


def test_gradients_above_a_patched_value_are_those_of_its_own_rule() -> None:
    g = cw.Graph()
    g.source("x", 2.0)
    g.node("y", ops.square, ["x"])
    g.node("loss", ops.square, ["y"])
    world, grads = cw.World(g), cw.gradients(g, "loss", "x")
    world.patch("y", 10.0)
    assert world.demand(grads["x"]) == 2.0 * 10.0 * 2.0 * 2.0


# -- the nodes --------------------------------------------------------------------------------------


def test_names_tell_what_each_node_is() -> None:
    g = cw.Graph()
    g.source("x", 2.0)
    g.node("y", ops.square, ["x"])
    g.node("z", ops.mul, ["x", "x"])
    g.node("loss", ops.add, ["y", "z"])
    grads = cw.gradients(g, "loss", ["x"])
    assert dict(grads) == {"x": "d(loss)/d(x)"}
    assert grads.seed == "d(loss)/d(loss)"
    assert g.is_source(grads.seed)
    assert g.inputs("d(loss)/d(x)") == ("d(loss)/d(x)@y", "d(loss)/d(x)@z[0]", "d(loss)/d(x)@z[1]")
    assert g.inputs("d(loss)/d(x)@z[0]") == ("d(loss)/d(z)", "x")
    assert g.inputs("d(loss)/d(y)") == ("d(loss)/d(loss)",)
    assert set(grads.sites) == set(g.sites) - {"x", "y", "z", "loss"}
    assert cw.World(g).demand(grads["x"]) == 8.0
    assert (len(grads), list(grads), "x" in grads, "y" in grads) == (1, ["x"], True, False)
    assert repr(grads) == "Gradients(of 'loss' with respect to x; 7 nodes)"


def test_a_name_that_is_taken_is_left_alone() -> None:
    g = product()
    g.source("d(loss)/d(v)", 0.0)
    grads = cw.gradients(g, "loss", "v")
    assert grads["v"] == "d(loss)/d(v)#2"
    assert cw.World(g).demand(grads["v"]) == 2.0


def test_only_paths_between_wrt_and_loss_are_differentiated() -> None:
    g = product()
    g.node("aside", ops.square, ["v"])
    g.node("opaque", lambda a: a, ["a"])
    g.redefine("s", inputs=["opaque"])
    grads = cw.gradients(g, "loss", "v")
    assert grads.sites == ("d(loss)/d(loss)", "d(loss)/d(v)")


def test_the_gradient_of_a_loss_by_itself_is_its_seed() -> None:
    g = product()
    grads = cw.gradients(g, "loss", "loss")
    assert cw.World(g).demand(grads["loss"]) == 1.0
    assert grads["loss"] == grads.seed


def test_total_is_the_sum_of_any_number_of_things() -> None:
    assert total(1) == 1
    assert total(1, 2, 4) == 7


# -- again, and out again ----------------------------------------------------------------------------


def test_another_call_for_the_same_loss_uses_the_nodes_that_exist() -> None:
    g = product()
    one = cw.gradients(g, "loss", "s")
    size = len(g)
    same = cw.gradients(g, "loss", ["s"])
    assert len(g) == size
    assert same["s"] == one["s"]
    more = cw.gradients(g, "loss", ["a", "v"])
    assert len(g) == size + 2
    assert set(one.sites) < set(more.sites)
    assert len(g.guards) == 1


def test_remove_takes_out_what_no_other_gradients_use() -> None:
    g = product()
    sites = set(g.sites)
    one, more = cw.gradients(g, "loss", "s"), cw.gradients(g, "loss", ["a", "v"])
    world = cw.World(g)
    more.remove()
    assert set(g.sites) == sites | set(one.sites)
    assert world.demand(one["s"]) == 3.0
    one.remove()
    assert set(g.sites) == sites
    assert g.guards == ()
    g.check()
    world.check()
    assert world.demand("loss") == 6.0
    assert world.demand(cw.gradients(g, "loss", "v")["v"]) == 2.0


@settings(max_examples=30)
@given(scenes())
def test_what_was_added_can_be_removed_in_any_order(
    scene: Scene,
) -> None:
    dag, wrt, wanted, _ = scene
    g = dag.graph()
    sites = g.sites
    world = cw.World(g)
    values = world.demand(sites)
    several = [cw.gradients(g, "loss", one) for one in (wanted, wrt, wrt[0])]
    while several:
        for grads in several:
            expected = cw.World(g).demand([grads[site] for site in grads])
            for found, value in zip(world.demand([grads[site] for site in grads]), expected, strict=True):
                np.testing.assert_array_equal(found, value)
        several.pop(len(several) // 2).remove()
        g.check()
        world.check()
    assert g.sites == sites
    with world.ledger.interval() as span:
        assert all(one is other for one, other in zip(world.demand(sites), values, strict=True))
        assert span.recomputed == []


def test_gradients_of_two_losses_stand_beside_each_other() -> None:
    g = product()
    g.node("other", ops.square, ["loss"])
    one, two = cw.gradients(g, "loss", "v"), cw.gradients(g, "other", "v")
    assert cw.World(g).demand([one["v"], two["v"]]) == (2.0, 24.0)
    one.remove()
    assert cw.World(g).demand(two["v"]) == 24.0


def test_removed_gradients_say_so() -> None:
    g = product()
    grads = cw.gradients(g, "loss", "v")
    grads.remove()
    uses: list[Callable[[], object]] = [grads.remove, lambda: grads["v"], lambda: grads.seed]
    for use in uses:
        with pytest.raises(
            GradientError, match=r"of 'loss' were removed.*gradients\(graph, 'loss', \['v'\]\)"
        ):
            use()
    assert repr(grads) == "Gradients(of 'loss', removed)"


def test_gradients_that_something_reads_stay() -> None:
    g = product()
    grads = cw.gradients(g, "loss", "v")
    g.node("step", ops.sub, ["v", grads["v"]])
    with pytest.raises(InUseError, match=r"'step' reads 'd\(loss\)/d\(v\)'"):
        grads.remove()
    assert cw.World(g).demand("step") == 1.0
    with pytest.raises(GradientError):
        g.redefine("loss", ops.add)
    g.discard(["step"])
    grads.remove()
    assert set(g.sites) == {"a", "s", "v", "loss"}


# -- changes of structure ------------------------------------------------------------------------------


STOP = ops.Op("stop", lambda x: x, (None,))
WITH_STOPS = (*POOL, (STOP, 1), (STOP, 1))


@st.composite
def reshapings(draw: st.DrawFn) -> tuple[Dag, str, str, Callable[[cw.Graph], object]]:
    """A graph, a site to differentiate by, the kind of a change of structure, and the change."""
    dag = draw(dags(WITH_STOPS))
    g = dag.graph()
    above = upstream(g)[:-1]
    wrt = draw(st.sampled_from(above))
    kind = draw(st.sampled_from(["redefine", "graft", "graft_after"]))
    block = cw.chain(draw(st.sampled_from([ops.tanh, STOP, ops.scale(2.0)])))
    if kind == "graft":
        edge = draw(st.sampled_from([edge for edge in g.edges if edge[1] != "loss"]))
        return dag, wrt, kind, lambda g: g.graft(edge, block)
    if kind == "graft_after":
        after = draw(st.sampled_from(g.sites))
        return dag, wrt, kind, lambda g: g.graft_after(after, block)
    site = draw(st.sampled_from([site for site in g.computed if site != "loss"]))
    rule, arity = draw(st.sampled_from(WITH_STOPS))
    free = [other for other in g.sites if other not in g.cone(site) and other != site]
    inputs = [draw(st.sampled_from(free)) for _ in range(arity)]
    # Every other time, open a new path: a node that does not depend on `wrt` comes to read it.
    apart = [
        (beside, by)
        for beside in above
        for by in above
        if not g.is_source(beside) and beside not in (by, *g.cone(by)) and by not in g.cone(beside)
    ]
    if draw(st.booleans()) and apart:
        site, wrt = draw(st.sampled_from(apart))
        inputs = [wrt] * arity
    return dag, wrt, kind, lambda g: g.redefine(site, rule, inputs)


def is_accepted(scene: tuple[Dag, str, str, Callable[[cw.Graph], object]]) -> bool | None:
    """Whether the change is made; checks that the gradient is right either way. None: no gradient."""
    dag, wrt, _, change = scene
    g = dag.graph()
    world = cw.World(g)
    try:
        grads = cw.gradients(g, "loss", wrt)
    except GradientError:
        return None
    before = world.demand(grads[wrt])
    try:
        change(g)
    except GradientError:
        assert world.demand(grads[wrt]) is before
        return False
    finally:
        g.check()
        world.check()
    found = world.demand(grads[wrt])
    grads.remove()
    np.testing.assert_allclose(found, cw.World(g).demand(cw.gradients(g, "loss", wrt)[wrt]), rtol=1e-12)
    return True


@settings(max_examples=200)
@given(reshapings())
def test_after_any_change_of_structure_that_is_not_refused_the_gradients_are_right(
    scene: tuple[Dag, str, str, Callable[[cw.Graph], object]],
) -> None:
    is_accepted(scene)


@pytest.mark.parametrize("kind", ["redefine", "graft", "graft_after"])
@pytest.mark.parametrize("answer", [True, False])
def test_these_changes_are_now_refused_and_now_made(kind: str, answer: bool) -> None:
    find(reshapings(), lambda scene: scene[2] == kind and is_accepted(scene) is answer, settings=ANY)


def larger() -> tuple[cw.Graph, cw.Graft]:
    """The graph of end = s · v + t, with a graft before t that lies on no path from v."""
    g = product()
    g.node("t", ops.square, ["a"])
    g.node("end", ops.add, ["loss", "t"])
    g.node("aside", ops.square, ["v"])
    return g, g.graft(("a", "t"), cw.chain(ops.scale(2.0)), name="block")


ADVICE = r"`grads\.remove\(\)`, make the change, then call `gradients` again"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda g: g.redefine("loss", ops.add), "it would change 'loss', which they differentiate"),
        (
            lambda g: g.redefine("end", inputs=["loss", "s"]),
            "it would change 'end', which they differentiate",
        ),
        (lambda g: g.graft(("s", "loss"), cw.chain(ops.neg)), "it would change 'loss', which they"),
        (lambda g: g.graft(("v", "loss"), cw.chain(ops.neg)), "it would change 'loss', which they"),
        (lambda g: g.graft_after("v", cw.chain(ops.neg)), "it would change 'loss', which they"),
        (
            lambda g: g.redefine("d(end)/d(v)", ops.add),
            r"it would change 'd\(end\)/d\(v\)', a node of the rev",
        ),
        (lambda g: g.discard(["d(end)/d(v)"]), r"it would change 'd\(end\)/d\(v\)', a node of the reverse"),
        (lambda g: g.discard(["end"]), "it would change 'end', which they differentiate"),
        (lambda g: g.redefine("s", ops.add, ["a", "v"]), "'s' would read 'v', a new path"),
        (lambda g: g.redefine("t", inputs=["aside"]), "'t' would read 'aside', a new path"),
    ],
)
def test_a_change_that_would_make_a_gradient_wrong_is_refused(
    change: Callable[[cw.Graph], object], reason: str
) -> None:
    g, _ = larger()
    world, grads = cw.World(g), cw.gradients(g, "end", "v")
    before, sites = world.demand(grads["v"]), g.sites
    with pytest.raises(GradientError, match=f"would make the gradients of 'end' wrong: {reason}.*{ADVICE}"):
        change(g)
    g.check()
    world.check()
    assert g.sites == sites
    assert world.demand(grads["v"]) == before


def test_a_refused_change_can_be_made_once_the_gradients_are_removed() -> None:
    g = product()
    world, grads = cw.World(g), cw.gradients(g, "loss", "v")
    assert world.demand(grads["v"]) == 2.0
    grads.remove()
    g.graft(("s", "loss"), cw.chain(ops.scale(10.0)))
    assert world.demand(cw.gradients(g, "loss", "v")["v"]) == 20.0


def test_a_graft_whose_nodes_are_differentiated_stays_until_the_gradients_are_removed() -> None:
    g, graft = larger()
    grads = cw.gradients(g, "end", "a")
    with pytest.raises(GradientError, match="removing 'block' would make the gradients of 'end' wrong"):
        g.remove(graft)
    grads.remove()
    g.remove(graft)
    assert cw.World(g).demand(cw.gradients(g, "end", "a")["a"]) == 3.0 + 2.0 * 2.0


def test_the_loss_stays_even_where_nothing_is_differentiated_through_it() -> None:
    g = product()
    cw.gradients(g, "loss", "loss")
    with pytest.raises(
        GradientError, match=r"removing 1 sites .* would take away 'loss', which has a gradient"
    ):
        g.discard(["loss"])


def test_a_value_that_a_gradient_reads_is_not_rerouted_behind_its_back() -> None:
    """A graft after the loss is free, unless a gradient reads the loss: then it would read the graft."""
    g = cw.Graph()
    g.source("x", 1.0)
    g.node("loss", ops.exp, ["x"])
    g.node("shown", ops.neg, ["loss"])
    cw.gradients(g, "loss", "x")
    with pytest.raises(
        GradientError, match=r"it would change 'd\(loss\)/d\(x\)', a node of the reverse pass"
    ):
        g.graft_after("loss", cw.chain(ops.neg))
    g.graft(("loss", "shown"), cw.chain(ops.neg))


def test_a_rule_that_a_new_one_would_make_differentiable_is_guarded_too() -> None:
    g = cw.Graph()
    g.source("x", 2.0)
    g.node("stop", ops.Op("stop", lambda x: x, (None,)), ["x"])
    g.node("loss", ops.mul, ["x", "stop"])
    grads = cw.gradients(g, "loss", "x")
    assert cw.World(g).demand(grads["x"]) == 2.0
    with pytest.raises(GradientError, match="'stop' would read 'x', a new path"):
        g.redefine("stop", ops.identity)


def test_changes_elsewhere_are_free() -> None:
    g, graft = larger()
    world, grads = cw.World(g), cw.gradients(g, "end", "v")
    assert world.demand(grads["v"]) == 2.0
    g.redefine("t", ops.neg)
    g.remove(graft)
    g.redefine("aside", ops.add, ["v", "end"])
    g.graft(("v", "aside"), cw.chain(ops.neg))
    g.graft(("a", "t"), cw.chain(ops.neg))
    g.redefine("s", ops.scale(5.0))
    g.node("more", ops.square, [grads["v"]])
    assert world.demand(grads["v"]) == 10.0
    g.discard(["more"])
    g.check()
    world.check()


def test_a_site_that_is_differentiated_by_may_be_redefined() -> None:
    g = product()
    world, grads = cw.World(g), cw.gradients(g, "loss", ["s", "v"])
    assert world.demand(grads["v"]) == 2.0
    g.redefine("s", ops.square)
    assert world.demand([grads["v"], grads["s"]]) == (4.0, 3.0)


def test_the_guard_follows_the_gradients_that_are_left() -> None:
    g = product()
    above, below = cw.gradients(g, "loss", "a"), cw.gradients(g, "loss", "s")
    with pytest.raises(GradientError, match="it would change 's'"):
        g.redefine("s", ops.square)
    above.remove()
    g.redefine("s", ops.square)
    with pytest.raises(GradientError, match="it would change 'loss'"):
        g.redefine("loss", ops.add)
    below.remove()
    g.redefine("loss", ops.add)


# -- what cannot be differentiated -----------------------------------------------------------------------


def halved(x: float) -> float:
    return 0.5 * x


def test_a_node_without_vjps_on_the_way_is_named_with_its_rule() -> None:
    g = product()
    g.node("h", halved, ["loss"])
    g.node("end", ops.square, ["h"])
    sites = g.sites
    with pytest.raises(
        GradientError,
        match=r"'h' stands between .* its rule halved has no `vjps`.*`conewise\.ops`.*`ops\.Vjp",
    ):
        cw.gradients(g, "end", "v")
    assert g.sites == sites
    assert g.guards == ()
    assert cw.World(g).demand(cw.gradients(g, "end", "h")["h"]) == 6.0


def test_a_gradient_of_a_gradient_is_refused_because_its_rule_has_no_vjps() -> None:
    g = product()
    grads = cw.gradients(g, "loss", "v")
    with pytest.raises(GradientError, match=r"'d\(loss\)/d\(v\)' stands between .* has no `vjps`"):
        cw.gradients(g, grads["v"], "s")


def test_a_loss_that_does_not_depend_on_wrt() -> None:
    g = product()
    g.node("vv", ops.square, ["v"])
    with pytest.raises(
        GradientError,
        match=r"of 'loss' with respect to 'vv': 'loss' does not depend on it.*nearest: v.*upstream\('loss'\)",
    ):
        cw.gradients(g, "loss", ["v", "vv"])
    assert g.guards == ()


def test_a_path_through_integers_only_is_no_path() -> None:
    g = cw.Graph()
    transformer(g)
    with pytest.raises(GradientError, match=r"with respect to 'ids': every path .* does not differentiate"):
        cw.gradients(g, "loss", "ids")


def test_a_rule_without_vjps_does_no_harm_where_nothing_is_differentiated() -> None:
    """The targets are computed from the logits by a plain function, and are integers."""
    g = cw.Graph()
    g.source("logits", np.array([1.0, 3.0]))
    g.node("best", np.argmax, ["logits"])
    g.node("loss", ops.cross_entropy, ["logits", "best"])
    found = cw.World(g).demand(cw.gradients(g, "loss", "logits")["logits"])
    np.testing.assert_allclose(found, [0.11920292, -0.11920292])


def test_wrt_names_sites() -> None:
    g = product()
    with pytest.raises(GradientError, match=r"`wrt` is empty.*gradients\(graph, 'loss', \['w'\]\)"):
        cw.gradients(g, "loss", [])
    with pytest.raises(UnknownSiteError, match="no site 'w'"):
        cw.gradients(g, "loss", ["w"])
    with pytest.raises(UnknownSiteError, match=r"no site 'lost'.*Nearest: loss"):
        cw.gradients(g, "lost", "v")
    with pytest.raises(KeyError, match="no gradient with respect to 's' was asked for; these were: v"):
        cw.gradients(g, "loss", "v")["s"]


def test_vjps_that_do_not_fit_the_node() -> None:
    one = ops.Vjp(lambda g: g, (ops.GRADIENT,))
    far = ops.Vjp(lambda g, x: g * x, (ops.GRADIENT, 2))
    g = cw.Graph()
    g.source("x", 1.0)
    g.node("short", ops.Op("short", lambda *v: sum(v), (one,), arity=2), ["x", "x"])
    g.node("far", ops.Op("far", lambda x: x, (far,)), ["x"])
    with pytest.raises(
        GradientError, match=r"rule short of 'short' has no entry in its `vjps` for input 1 \('x'\)"
    ):
        cw.gradients(g, "short", "x")
    with pytest.raises(
        GradientError, match=r"rule far of 'far' .* reads input 2, and the node has 1: x\. Inputs are"
    ):
        cw.gradients(g, "far", "x")


def test_gradients_are_not_built_by_a_rule() -> None:
    g = product()
    g.node("build", lambda _: cw.gradients(g, "loss", "v"), ["v"])
    with pytest.raises(BusyError, match="gradients was called while a demand"):
        cw.World(g).demand("build")
    assert g.guards == ()
    assert cw.World(g).demand(cw.gradients(g, "loss", "v")["v"]) == 2.0


def test_a_long_chain_is_no_problem() -> None:
    g = cw.Graph()
    g.source("n0", 1.0)
    for count in range(1, 20_001):
        g.node(f"n{count}", ops.neg, [f"n{count - 1}"])
    grads = cw.gradients(g, "n20000", "n0")
    assert cw.World(g).demand(grads["n0"]) == 1.0
    grads.remove()
    assert len(g) == 20_001
