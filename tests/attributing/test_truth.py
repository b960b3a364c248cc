"""Approximate results beside exact ones: what is off, which ranks are wrong, and what can be trusted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import conewise as cw
from conewise.attributing.approximation import (
    Approximation,
    Comparison,
    SampleError,
    kendall,
    pearson,
    share_bound,
    spearman,
)
from conewise.errors import SweepError
from conewise.sweeps.statistics import student_quantile
from tests.attributing.test_sites import looking
from tests.circuits.edge_models import model_of, run_of
from tests.runs.test_gradients import squares

HEADS = cw.sites("z", layer=":", head=":")


def asked(name: str = "gpt2") -> dict[str, Any]:
    return {"base": run_of(name, 1), "source": run_of(name, 2), "metric": squares}


SNIPPET = """
import conewise as cw
model = cw.load("tiny")
text = "When Mary and John went to the store, {} gave a drink to"
clean, corrupted = text.format("John"), text.format("Mary")
metric = cw.logit_diff(" Mary", " John")
heads, runs = cw.sites("z", layer=":", head=":"), {"base": corrupted, "source": clean, "metric": metric}
result = model.sweep(heads, **runs).run()
approx = model.attribute(heads, **runs, method="atp*").run()
print(cw.compare(approx, result))                       # rank correlation, sign errors, false negatives at k
print(approx.check(top=4, n=8))
eap = model.attribute(model.edges(), **runs, method="eap-ig", steps=5).run()
"""


def test_a_sweep_and_its_estimate_agree_on_the_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The head that a gradient sees least of is found by both, and by the exact sweep as the largest."""
    scene: dict[str, Any] = {}
    exec(compile(SNIPPET, "snippet", "exec"), scene)
    printed = capsys.readouterr().out
    assert "atp* beside exact effects on logit_diff, 16 cells:" in printed
    assert "4 largest, 8 of 12 others at random" in printed
    assert len(scene["eap"].cells) == 479
    compared = cw.compare(scene["approx"], scene["result"])
    assert compared.overlap == 1.0
    assert compared.worst(1)[0][0] == "z[layer=0, head=2]"


def slow_kendall(one: Any, other: Any) -> float:
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [(np.sign(one[i] - one[j]), np.sign(other[i] - other[j])) for i, j in pairs]
    left, right = (sum(pair[side] != 0 for pair in signs) for side in (0, 1))
    return float(sum(a * b for a, b in signs)) / math.sqrt(left * right)


def test_correlations_are_those_of_their_definitions() -> None:
    generator = np.random.default_rng(0)
    for size, values in ((12, 4), (60, 8), (61, 1000)):
        one = generator.integers(0, values, size).astype(float)
        other = one + generator.integers(-values, values, size).astype(float)
        assert pearson(one, other) == pytest.approx(np.corrcoef(one, other)[0, 1])
        assert kendall(one, other) == pytest.approx(slow_kendall(one, other))
        by_hand = [[(row < v).sum() + ((row == v).sum() - 1) / 2 for v in row] for row in (one, other)]
        assert spearman(one, other) == pytest.approx(np.corrcoef(by_hand)[0, 1])
    assert math.isnan(pearson(np.ones(3), np.arange(3.0)))
    assert kendall(np.arange(5.0), -np.arange(5.0)) == -1.0


def test_bounds_are_those_of_tables() -> None:
    for freedom, expected in ((1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (30, 2.042), (199, 1.972)):
        assert student_quantile(0.95, freedom) == pytest.approx(expected, abs=1e-3)
    assert share_bound(0, 59, 0.95) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert share_bound(3, 20, 0.95) == pytest.approx(0.3437, abs=1e-4)
    assert share_bound(4, 4, 0.95) == 1.0
    assert share_bound(1000, 2000, 0.95) == pytest.approx(0.5 + 1.6449 * math.sqrt(0.25 / 2000), abs=1e-3)
    assert share_bound(1, 70_000, 0.95) == pytest.approx(4.7439 / 70_000, rel=1e-3)  # Poisson's


def test_a_comparison_counts_what_is_wrong_by_name() -> None:
    names = tuple("abcdefgh")
    exact = np.array([8.0, 7.0, -6.0, 1.0, 0.5, 0.2, -0.1, 0.0])
    approx = np.array([8.5, 0.1, -5.0, -2.0, 0.6, 0.3, -0.2, 0.0])
    found = Comparison(names, approx, exact, "metric", "atp", 3)
    assert found.false_negatives == ("b",)
    assert found.overlap == pytest.approx(2 / 3)
    assert found.sign_errors == ("d",)
    assert found.worst(2) == [("b", 0.1, 7.0), ("d", -2.0, 1.0)]
    assert "false negatives at 3  1: b" in str(found)
    assert (found.k, found.sign_errors_at_k) == (3, ())
    assert "sign errors           1 of 8, none of the 3 largest: d" in str(found)
    wider = Comparison(names, approx, exact, "metric", "atp", 4)
    assert wider.sign_errors_at_k == ("d",)
    assert "1 of 8, 1 of the 4 largest: d" in str(wider)
    assert list(found.plot().data[1].text) == list(names)
    same = Comparison(names, exact, exact, "metric", "atp", 3)
    assert (same.pearson, same.spearman, same.kendall) == pytest.approx((1.0, 1.0, 1.0))
    assert not same.false_negatives + same.sign_errors


def test_results_are_compared_over_the_cells_that_both_have() -> None:
    model = model_of("gpt2", torch.float32)
    approx = model.attribute(HEADS, **asked()).run()
    exact = model.sweep(cw.sites("z", layer=1, head=":"), **asked()).run()
    found = cw.compare(approx, exact, k=2)
    assert len(found.names) == 4
    torch.testing.assert_close(torch.tensor(found.exact), exact.effect)
    torch.testing.assert_close(torch.tensor(found.approx), approx.effect[1])
    with pytest.raises(SweepError, match="approximate as well"):
        cw.compare(exact, approx)
    with pytest.raises(SweepError, match="no cell in common"):
        cw.compare(model.attribute(cw.sites("mlp_out", layer=":"), **asked()).run(), exact)
    with pytest.raises(SweepError, match="k is a number from 1 to 4"):
        cw.compare(approx, exact, k=5)
    turned = asked() | {"base": run_of("gpt2", 2), "source": run_of("gpt2", 1)}
    with pytest.raises(SweepError, match="of other runs"):
        cw.compare(model.attribute(HEADS, **turned).run(), exact)


def test_a_check_computes_the_top_and_a_sample_exactly_and_says_how_far_others_may_be_off() -> None:
    model = model_of("gpt2", torch.float32)
    edges = model.edges()
    approx = model.attribute(edges, **asked(), method="eap").run()
    exact = model.sweep(edges, **asked()).run()
    check = approx.check(top=10, n=30, seed=1)
    assert len(set(check.computed)) == 40
    sizes = approx.effect.abs()
    assert set(check.top) == set(sizes.topk(10).indices.tolist())
    for number in check.computed:
        assert check.estimate[number] == check.low[number] == check.high[number]
        assert check.estimate[number] == pytest.approx(float(exact.effect[number]), rel=1e-3, abs=1e-4)
    errors = [float(exact.effect[n] - approx.effect[n]) for n in check.sample]
    bias, spread = float(np.mean(errors)), float(np.std(errors, ddof=1))
    assert check.error.bias == pytest.approx(bias, abs=1e-4)
    assert check.error.reach == pytest.approx(
        student_quantile(0.95, 29) * spread * math.sqrt(31 / 30), rel=1e-3
    )
    rest = [n for n in range(len(edges)) if n not in check.computed]
    held = [check.low[n] <= float(exact.effect[n]) <= check.high[n] for n in rest]
    assert sum(held) / len(held) > 0.8
    assert check.to_dataframe()["exact"].sum() == 40
    assert approx.check(top=10, n=30, seed=1).sample == check.sample != approx.check(10, 30, seed=2).sample
    assert set(check.sign_errors) <= {cell.name for cell in approx.cells}
    assert "10 largest, 30 of 100 others at random" in str(check)


def test_a_check_is_of_as_many_cells_as_there_are_and_of_some_at_least(tmp_path: Any) -> None:
    model = model_of("gpt2", torch.float32)
    approx = model.attribute(HEADS, **asked()).run()
    check = approx.check()
    assert len(check.computed) == 8
    assert check.missed_share == 1.0  # nothing was drawn
    assert math.isinf(check.error.reach)
    assert SampleError.of([1.0, 3.0]).bias == 2.0
    with pytest.raises(SweepError, match="a check of no cells"):
        approx.check(top=0, n=0)
    with pytest.raises(SweepError, match="n is a number of cells"):
        approx.check(n=-1)


def test_a_hybrid_has_the_exact_top_and_says_which_cells_are_exact(tmp_path: Any) -> None:
    model = model_of("gpt2", torch.float32)
    edges = model.edges()
    exact = model.sweep(edges, **asked()).run()
    plain = model.attribute(edges, **asked(), method="eap").run()
    mixed = model.attribute(edges, **asked(), method="hybrid", top=3, n=25).run()
    assert 25 < len(mixed.exact) <= len(edges)
    wanted, found = ([cell.name for cell, *_ in one.strongest(top=3)] for one in (exact, mixed))
    assert found == wanted
    names = {cell.name: number for number, cell in enumerate(mixed.cells)}
    own = [names[name] for name in mixed.exact]
    torch.testing.assert_close(mixed.effect[own], exact.effect[own], rtol=1e-3, atol=1e-4)
    others = [number for number in range(len(edges)) if number not in own]
    torch.testing.assert_close(mixed.effect[others], plain.effect[others])
    assert (
        f"{len(mixed.exact)} of {len(edges)} cells exact, the 3 largest unless another is off by"
        in mixed.method
    )
    assert mixed.provenance["attribution"]["exact"] == list(mixed.exact)
    assert mixed.plan.node_evaluations == mixed.ledger.node_evaluations > plain.plan.node_evaluations
    opened = cw.open(mixed.save(tmp_path / "mixed"))
    assert isinstance(opened, Approximation)
    assert opened.method == mixed.method
    assert model.attribute(HEADS, **asked(), method="hybrid", top=2, n=4).run().method.startswith("hybrid")
    with pytest.raises(SweepError, match="n is a number of cells of at least 2"):
        model.attribute(HEADS, **asked(), method="hybrid", n=1).run()
    with pytest.raises(SweepError, match="of method='hybrid'"):
        model.attribute(HEADS, **asked(), top=3).run()


def test_a_certain_top_takes_few_exact_worlds_where_gradients_are_good() -> None:
    """On a linear model the first sample says that nothing is off."""
    model = looking(sharpness=0.0)
    base, source = (model.run(torch.tensor([ids])) for ids in ([0, 1, 2], [1, 0, 2]))
    cells = (
        cw.sites("v", layer=0, pos=":")
        + cw.sites("resid_pre", layer=0, pos=":")
        + cw.sites("z", layer=0, pos=":")
    )
    found = model.attribute(
        cells, base=base, source=source, metric=cw.logit(0, pos=-1), method="hybrid", top=1, n=2
    ).run()
    assert len(found.exact) < len(found.cells)
