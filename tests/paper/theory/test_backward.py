"""The backward pass: the paper's E5, its counter-example, and the exact count on joint graphs."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import TheoryError
from conewise.paper import ops, theory
from conewise.reactive.gradients import Gradients, Vjp, gradients, vjps_of
from tests.laws.cost_scenes import bill, line
from tests.laws.scenes import Mix
from tests.paper.theory.test_sweeps import paper_profile


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


def ladder(L: int) -> tuple[cw.Graph, list[str]]:
    """Two chains, aᵢ → aᵢ₊₁ and bᵢ → bᵢ₊₁, with rungs aᵢ → bᵢ₊₁; an output reads both ends."""
    graph = cw.Graph()
    a = b = graph.source("x", 1)
    sites = []
    for layer in range(1, L + 1):
        a, b = graph.node(f"a{layer}", Mix(), [a]), graph.node(f"b{layer}", Mix(), [b, a])
        sites.append(a)
    graph.node("y", Mix(), [a, b])
    return graph, sites


@pytest.mark.parametrize("L", [1, 2, 7, 60])
def test_layers_that_no_edge_passes_by_need_not_collapse(L: int) -> None:
    """The paper's "true whenever": all edges join consecutive layers, all cones are full suffixes."""
    graph, sites = ladder(L)
    for layer, site in enumerate(sites, 1):
        assert set(graph.cone(site)) == {f"{chain}{j}" for chain in "ab" for j in range(layer + 1, L + 1)} | {
            "y"
        }
    assert theory.training_ratio(graph, sites) == Fraction(4 * L + 2, 3 * L + 1)
    assert theory.training_ratio([2] * L, local=1, terminal=1) == Fraction(2 * L + 1, 2 * L)


def test_the_ladder_tends_to_four_thirds() -> None:
    assert f"{float(theory.training_ratio(*ladder(500))):.4f}" == "1.3338"
    assert f"{float(theory.training_ratio([2] * 500, local=1, terminal=1)):.3f}" == "1.001"


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=9), st.integers(0, 9), st.data())
def test_the_collapse_needs_no_bound_on_what_a_site_touches(
    profile: list[int], terminal: int, data: st.DataObject
) -> None:
    """c̄/N is at most 1/L, however large c̄ is; so 1 ≤ ρ_train < L/(L−1)."""
    local = [data.draw(st.integers(1, weight)) for weight in profile]
    L, N = len(profile), sum(profile) + terminal
    assert Fraction(sum(local), L) / N <= Fraction(1, L)
    assert 1 <= theory.training_ratio(profile, local=local, terminal=terminal) < Fraction(L, L - 1)


@pytest.mark.parametrize("L", [2, 3, 7])
def test_sites_that_weigh_nothing_reach_the_bound_of_the_collapse(L: int) -> None:
    """That ρ_train is below L/(L−1) needs sites that touch something of their own layers."""
    graph = cw.Graph()
    below = [graph.source("x", 1)]
    for layer in range(L):
        below = [graph.node(f"{name}{layer}", Mix(), below) for name in ("site", "beside")]
    sites = [f"site{layer}" for layer in range(L)]
    weights = {site: int(site not in sites) for site in graph.computed}
    assert theory.training_ratio(graph, sites, weights=weights) == Fraction(L, L - 1)
    assert theory.training_ratio(graph, sites) < Fraction(L, L - 1)
    graph.node("end", Mix(), below)
    assert theory.training_ratio(graph, sites, weights=weights | {"end": 1}) < Fraction(L, L - 1)


def test_a_graft_waits_until_the_gradients_are_taken_out() -> None:
    """Then those that are built again are all computed, also where the graft did not come."""
    graph, grads = product()
    with pytest.raises(cw.ConewiseError, match="which they differentiate"):
        graph.graft(("a", "s"), cw.chain(ops.identity))
    grads.remove()
    graph.graft(("a", "s"), cw.chain(ops.identity))
    world = cw.World(graph)
    world.demand("loss")
    again = gradients(graph, "loss", ["a", "b", "s", "v"])
    with world.ledger.interval() as spent:
        world.demand([again[site] for site in again])
    assert set(spent.recomputed) == set(again.sites) - {again.seed}


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


Reads = dict[str, list[tuple[str, Vjp]]]


def ways(graph: cw.Graph) -> Reads:
    """For each site the products that its gradient is the sum of: (reader, product along that edge)."""
    found: Reads = {}
    for node in graph:
        for place, site in enumerate(node.inputs):
            vjps = vjps_of(node.rule)
            assert vjps is not None
            vjp = vjps[place]
            if vjp is not None:
                found.setdefault(site, []).append((node.site, vjp))
    return found


def values_read(graph: cw.Graph, reader: str, vjp: Vjp) -> set[str]:
    """The forward values that a product of `reader` reads."""
    inputs = graph.inputs(reader)
    return {reader if read == "output" else inputs[int(read)] for read in vjp.reads if read != "gradient"}


def stale_gradients(graph: cw.Graph, changed: set[str], *, any_product: bool = False) -> set[str]:
    """The sites v with a path to the loss one of whose products, along that path, reads a changed value.

    With `any_product`, wrongly, any product of an operation on the path.
    """
    products = ways(graph)
    by_reader: dict[str, set[str]] = {}
    for pairs in products.values():
        for reader, vjp in pairs:
            by_reader.setdefault(reader, set()).update(values_read(graph, reader, vjp))

    def is_stale(site: str) -> bool:
        return any(
            leads_to_loss(reader)
            and (
                bool((by_reader[reader] if any_product else values_read(graph, reader, vjp)) & changed)
                or is_stale(reader)
            )
            for reader, vjp in products.get(site, ())
        )

    def leads_to_loss(site: str) -> bool:
        return site == "loss" or any(leads_to_loss(reader) for reader, _ in products.get(site, ()))

    return {site for site in graph.sites if is_stale(site)}


def stale_gradients_of_the_engine(graph: cw.Graph, site: str) -> set[str]:
    """Those whose node the engine makes invalid when the value of `site` is patched."""
    reached = [v for v in graph.sites if v != "loss" and "loss" in graph.cone(v)]
    grads = gradients(graph, "loss", reached)
    world = cw.World(graph)
    world.demand([grads[v] for v in reached])
    with world.fork() as fork:
        fork.patch(site, 0.375)
        found = {v for v in reached if fork.is_stale(grads[v])}
    grads.remove()
    return found


@given(smooth_graphs(), st.data())
@settings(max_examples=60)
def test_a_gradient_is_stale_iff_a_product_along_a_path_to_the_loss_reads_a_changed_value(
    made: tuple[cw.Graph, list[str]], data: st.DataObject
) -> None:
    graph, sites = made
    site = data.draw(st.sampled_from(sites))
    changed = {site, *graph.cone(site)}
    assert stale_gradients_of_the_engine(graph, site) == stale_gradients(graph, changed) - {"loss"}


def test_another_product_of_an_operation_on_the_path_does_not_make_a_gradient_stale() -> None:
    """ℓ = s·v: the product towards v reads s, the one towards s reads v. ∂ℓ/∂s stays."""
    graph, grads = product()
    grads.remove()
    assert stale_gradients_of_the_engine(graph, "s") == {"a", "b", "v"}
    assert stale_gradients(graph, {"s", "loss"}) == {"a", "b", "v"}
    assert stale_gradients(graph, {"s", "loss"}, any_product=True) == {"a", "b", "v", "s"}


LINEAR = [ops.add, ops.sub, ops.neg, ops.identity, ops.scale(factor=2.0), ops.scale(factor=-0.5)]


@given(st.data())
@settings(max_examples=60)
def test_another_rule_at_s_changes_gradients_above_s_alone_where_all_below_is_linear(
    data: st.DataObject,
) -> None:
    """V⁻ and not V⁻ ∪ {s}: the Jacobian at s is no factor of ∂ℓ/∂s."""
    smooth = [ops.tanh, ops.mul, ops.square, *LINEAR]
    count, at = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 5))
    wiring: list[tuple[str, ops.Op, list[str]]] = []
    sites, below = ["x0", "x1"], {"s"}
    for number in range(count):
        if number == min(at, count - 1):
            wiring.append(("s", ops.tanh, [sites[-1]]))
            sites.append("s")
            continue
        op = data.draw(st.sampled_from(smooth))
        inputs = [data.draw(st.sampled_from(sites)) for _ in range(op.arity or 1)]
        if below & set(inputs):
            op = data.draw(st.sampled_from([op for op in LINEAR if op.arity == len(inputs)]))
            below.add(f"n{number}")
        wiring.append((f"n{number}", op, inputs))
        sites.append(f"n{number}")
    before, after = (gradients_by_value(wiring, rule) for rule in (ops.tanh, ops.square))
    changed = {site for site in before if before[site] != after[site]}
    above = {site for site in before if site in upstream_of("s", wiring)}
    assert changed <= above
    assert "s" not in changed


def upstream_of(site: str, wiring: list[tuple[str, ops.Op, list[str]]]) -> set[str]:
    reads = {name: set(inputs) for name, _, inputs in wiring}
    found = set(reads.get(site, ()))
    while more := {read for name in found for read in reads.get(name, ())} - found:
        found |= more
    return found


def gradients_by_value(wiring: list[tuple[str, ops.Op, list[str]]], rule: ops.Op) -> dict[str, float]:
    """∂loss/∂v for each v that leads to the loss, with `rule` at s; the loss adds all that nobody reads."""
    graph = cw.Graph()
    for name, value in (("x0", 0.5), ("x1", 0.25)):
        graph.source(name, value)
    for name, op, inputs in wiring:
        graph.node(name, rule if name == "s" else op, inputs)
    graph.node("loss", ops.total, [site for site in graph.computed if not graph.consumers(site)])
    wrt = [site for site in graph.sites if "loss" in graph.cone(site)]
    grads = gradients(graph, "loss", wrt)
    return dict(zip(wrt, cw.World(graph).demand([grads[site] for site in wrt]), strict=True))


def test_where_what_is_below_is_not_linear_another_rule_changes_more() -> None:
    """By the new value of s, and not by its Jacobian: ℓ = s², ∂ℓ/∂s = 2s."""
    values = []
    for rule in (ops.tanh, ops.square):
        graph = cw.Graph()
        graph.source("a", 0.5)
        graph.node("s", rule, ["a"])
        graph.node("loss", ops.square, ["s"])
        values.append(cw.World(graph).demand(gradients(graph, "loss", "s")["s"]))
    assert values[0] != values[1]


class _PlusSquare:
    """s + v²: not linear, and the new value of s changes neither Jacobian."""

    vjps = Vjp(lambda g: g, ("gradient",)), Vjp(lambda g, v: 2 * g * v, ("gradient", 1))

    def __call__(self, s: float, v: float) -> float:
        return s + v * v


def test_where_no_jacobian_below_depends_on_s_another_rule_changes_no_more() -> None:
    found = []
    for rule in (ops.tanh, ops.square):
        graph = cw.Graph()
        graph.source("a", 0.5)
        graph.source("v", 0.25)
        graph.node("s", rule, ["a"])
        graph.node("loss", _PlusSquare(), ["s", "v"])
        grads = gradients(graph, "loss", ["a", "s", "v"])
        found.append(dict(zip(grads, cw.World(graph).demand([grads[site] for site in grads]), strict=True)))
    assert {site for site in found[0] if found[0][site] != found[1][site]} == {"a"}


@pytest.mark.parametrize("loss", [ops.mul, ops.mse])
def test_a_loss_that_is_linear_in_the_output_makes_nothing_dense(loss: Any) -> None:
    graph = cw.Graph()
    graph.source("x", 0.5)
    graph.source("target", 0.25)
    graph.node("h", ops.scale(factor=2.0), ["x"])
    graph.node("output", ops.scale(factor=3.0), ["h"])
    graph.node("loss", loss, ["output", "target"])
    grads = gradients(graph, "loss", ["x"])
    gradient_nodes = len(grads.sites) - 1
    spent = theory.joint_cost(graph, ["h", "output"], ["loss", grads["x"]])
    assert spent == 2 + 1 + (0 if loss is ops.mul else 2 * gradient_nodes)


@pytest.mark.parametrize("reduce", [ops.sum, ops.mean])
def test_a_product_that_reads_a_value_for_its_shape_alone_is_counted(reduce: Any) -> None:
    """The gradient of a sum cannot change. Told the shape beforehand, it reads no value: not counted."""
    for of, cost in ((None, 1), ((3,), 0)):
        graph = cw.Graph()
        graph.source("x", np.ones(3))
        graph.node("s", ops.neg, ["x"])
        graph.node("loss", reduce(of=of), ["s"])
        gradient = gradients(graph, "loss", "s")["s"]
        assert len(theory.stale(graph, "s", gradient)) == cost
        world = cw.World(graph)
        before = world.demand(gradient)
        world.patch("s", np.full(3, 7.0))
        assert (world.demand(gradient) == before).all()


def test_the_paper_s_count_bounds_the_exact_one_neither_way() -> None:
    linear, dense = cw.Graph(), cw.Graph()
    for graph, last in ((linear, ops.neg), (dense, ops.square)):
        before = graph.source("x", 0.5)
        for number in range(4):
            before = graph.node(f"n{number}", ops.neg, [before])
        graph.node("loss", last, [before])
    counts = []
    for graph in (linear, dense):
        demand = ["loss", gradients(graph, "loss", "x")["x"]]
        counts.append((theory.training_cost(graph, ["n3"], "loss"), theory.joint_cost(graph, ["n3"], demand)))
    assert counts == [(5, 1), (5, 1 + 5)]


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
