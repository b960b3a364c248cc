"""The backward pass: the paper's E5, its counter-example, and the exact count on joint graphs."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conewise as cw
from conewise import theory
from conewise.errors import TheoryError
from conewise.frontends import ops
from conewise.graph.gradients import Gradients, gradients
from tests.laws.cost_scenes import bill, line
from tests.laws.scenes import Mix
from tests.theory.test_sweeps import paper_profile


@pytest.mark.parametrize("input_heavy", [False, True])
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("L", "printed"), [(10, "1.0526"), (20, "1.0256"), (40, "1.0126"), (80, "1.0062"), (160, "1.0031")]
)
def test_the_paper_s_figures_of_e5(L: int, printed: str, q: float, input_heavy: bool) -> None:
    widths = paper_profile(L, q, input_heavy=input_heavy)
    ratio = theory.training_ratio([2 * w - 1 for w in widths], local=widths)
    assert f"{float(ratio):.4f}" == printed
    assert 1 < ratio < Fraction(L, L - 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_wide_layers_have_the_closed_form(widths: list[int]) -> None:
    graph = cw.Graph()
    last, sites = graph.source("x", 1), []
    for layer, width in enumerate(widths):
        branches = [graph.node(f"{layer}.{b}", Mix(), [last]) for b in range(width)]
        sites.append(branches[0])
        last = branches[0]
        for branch in branches[1:]:
            last = graph.node(f"{branch}+", Mix(), [last, branch])
    graph.node("loss", Mix(), [last])
    predicted = theory.training_ratio([2 * w - 1 for w in widths], local=widths, terminal=1)
    assert predicted == theory.training_ratio(graph, sites) == theory.training_ratio(graph, sites, "loss")


def test_a_loss_narrows_the_count_to_what_it_depends_on() -> None:
    graph = line(nodes=4)
    graph.node("aside", Mix(), ["n2"])
    assert theory.training_cone(graph, "n2") == {"n1", "n2", "n3", "n4", "aside"}
    assert theory.training_cone(graph, "n2", "n4") == {"n1", "n2", "n3", "n4"}
    assert theory.training_cost(graph, ["n1", "n2"], "n4") == 8
    assert theory.training_ratio(graph, ["n1", "n2"], "n4") == 1
    with pytest.raises(TheoryError, match="the loss 'n4' is not reached from 'aside'"):
        theory.training_ratio(graph, ["n1", "aside"], "n4")


def product() -> tuple[cw.Graph, Gradients]:
    """ℓ = s·v with s = tanh(a), v = tanh(b): v is neither above nor below s."""
    graph = cw.Graph()
    graph.source("a", 0.5)
    graph.source("b", 0.25)
    graph.node("s", ops.tanh, ["a"])
    graph.node("v", ops.tanh, ["b"])
    graph.node("loss", ops.mul, ["s", "v"])
    return graph, gradients(graph, "loss", ["a", "b", "s", "v"])


def test_the_counter_example_to_the_paper_s_gradient_claim() -> None:
    """∂ℓ/∂v = s changes with s, and v is outside of V⁻ ∪ {s}; ∂ℓ/∂s = v does not, and s is inside."""
    graph, grads = product()
    assert theory.training_cone(graph, "s", "loss") == {"s", "loss"}
    world = cw.World(graph)
    before = dict(zip(grads, world.demand([grads[site] for site in grads]), strict=True))
    with world.fork() as fork:
        fork.patch("s", 2.0)
        after = dict(zip(grads, fork.demand([grads[site] for site in grads]), strict=True))
        recomputed = fork.ledger.recomputed
    assert {site for site in grads if before[site] != after[site]} == {"a", "b", "v"}
    assert after["v"] == 2.0
    assert set(recomputed) == {grads["a"], grads["b"], grads["v"]}
    assert theory.joint_cost(graph, ["s"], [grads[site] for site in grads]) == 3


def test_a_linear_graph_has_no_gradient_that_a_value_changes() -> None:
    """The other way around: all of V⁻ is in the paper's count, and no gradient depends on any value."""
    graph = cw.Graph()
    graph.source("a", 0.5)
    graph.node("s", ops.scale(factor=3.0), ["a"])
    graph.node("loss", ops.neg, ["s"])
    grads = gradients(graph, "loss", ["a", "s"])
    assert theory.training_cone(graph, "s", "loss") == {"s", "loss"}
    with pytest.raises(TheoryError, match="'s' reaches none of the 2 demanded sites"):
        theory.joint_cost(graph, ["s"], [grads["a"], grads["s"]])


@pytest.mark.parametrize("L", [1, 2, 7, 30])
def test_a_dense_network_keeps_the_forward_saving(L: int) -> None:
    """A square loss: every change alters every gradient, and the exact ratio is (1+b)/(1/ρ+b)."""
    graph = cw.Graph()
    last = graph.source("x", 0.5)
    sites = [last := graph.node(f"h{i}", ops.tanh, [last]) for i in range(L)]
    graph.node("loss", ops.square, [last])
    grads = gradients(graph, "loss", ["x"])
    B = len(grads.sites) - 1
    demand = ["loss", grads["x"]]
    exact = theory.joint_ratio(graph, sites, demand)
    forward = theory.sweep_ratio([1] * L, terminal=1)
    assert exact == theory.dense_joint_ratio(forward, Fraction(B, L + 1))
    assert theory.training_ratio([1] * L, terminal=1) == 1
    world = cw.World(graph)
    assert bill(world, demand) == L + 1 + B
    for site in sites:
        with world.fork() as fork:
            fork.patch(site, 0.125)
            assert bill(fork, demand) == theory.joint_cost(graph, site, demand)


@st.composite
def smooth_graphs(draw: st.DrawFn) -> tuple[cw.Graph, list[str]]:
    """Scalars through tanh, add, mul and scale; the last node reads all that nothing else reads."""
    graph = cw.Graph()
    sites = [graph.source("x0", 0.5), graph.source("x1", 0.25)]
    for number in range(draw(st.integers(1, 7))):
        op = draw(st.sampled_from([ops.tanh, ops.add, ops.mul, ops.scale(factor=2.0)]))
        inputs = [draw(st.sampled_from(sites[-4:])) for _ in range(op.arity or 1)]
        sites.append(graph.node(f"n{number}", op, inputs))
    ends = [site for site in graph.computed if not graph.consumers(site)]
    graph.node("loss", ops.total, ends)
    return graph, [site for site in sites if site.startswith("n")]


@given(smooth_graphs())
@settings(max_examples=60)
def test_the_joint_count_is_the_engine_s(made: tuple[cw.Graph, list[str]]) -> None:
    graph, sites = made
    reached = [source for source in ("x0", "x1") if "loss" in graph.cone(source)]
    grads = gradients(graph, "loss", reached)
    demand = ["loss", *(grads[source] for source in reached)]
    world = cw.World(graph)
    full = bill(world, demand)
    bills = []
    for site in sites:
        with world.fork() as fork:
            fork.patch(site, 0.375)
            bills.append(bill(fork, demand))
    assert theory.joint_cost(graph, sites, demand) == sum(bills)
    assert theory.joint_ratio(graph, sites, demand) == Fraction(len(sites) * int(full), int(sum(bills)))


def test_the_dense_limit_is_four_thirds() -> None:
    assert theory.dense_joint_ratio(2) == Fraction(4, 3)
    assert theory.dense_joint_ratio(1) == 1
    assert theory.dense_joint_ratio(2.0, 2) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: theory.training_ratio([]), "the profile is empty"),
        (lambda g: theory.training_ratio([1, 0]), "layer 2 of the profile weighs 0"),
        (lambda g: theory.training_ratio([2, 2], local=3), "`local` of layer 1 is 3"),
        (lambda g: theory.training_ratio([2, 2], local=0), "`local` of layer 1 is 0"),
        (lambda g: theory.training_ratio([2, 2], local=[1]), "1 entries for 2 layers"),
        (lambda g: theory.training_ratio([2, 2], ["n1"]), "belong to a graph"),
        (theory.training_ratio, "which sites"),
        (lambda g: theory.training_ratio(g, []), "no sites are given"),
        (lambda g: theory.training_ratio(g, ["n1"], terminal=1), "belong to a profile"),
        (lambda g: theory.training_ratio(g, ["n1"], weights=dict.fromkeys(g.computed, 0)), "weigh nothing"),
        (lambda g: theory.training_cone(g, "n3", "n2"), "the loss 'n2' is not reached from 'n3'"),
        (lambda g: theory.joint_cost(g, ["n1"], None), "which gradients"),
        (lambda g: theory.dense_joint_ratio(Fraction(1, 2)), "the forward ratio is 1/2"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        call(line(nodes=3))
