"""The benchmark's curve against its definition, written down once more over plain PyTorch."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import conewise as cw
from conewise.circuits.circuit_data import SHARES
from conewise.circuits.curve import FaithfulnessCurve, Selected, helpful_sign
from conewise.circuits.question import circuit_question
from conewise.errors import CircuitError, SweepError
from conewise.model import Model
from conewise.text.answer import Answer
from tests.circuits.small_models import small

METRIC = cw.logit_diff(answer=3, wrong=5)
TEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@cache
def tiny() -> Model:
    return cw.load("tiny")


@cache
def rows() -> list[dict[str, Any]]:
    return cw.tasks.ioi(tiny(), n=12, seed=0)


@cache
def answer() -> Answer:
    found = tiny().ask(rows(), sites=tiny().edges(), direction="noise").run()
    assert isinstance(found, Answer)
    return found


Edge = tuple[str, str]


def on_paths(edges: set[Edge]) -> set[Edge]:
    """Nodes without an edge in or out are taken away, and their edges, until nothing changes."""
    while True:
        into = {reader.split("<")[0] for _, reader in edges} | {"input"}
        out_of = {writer for writer, _ in edges} | {"logits"}
        left = {(w, r) for w, r in edges if w in into and r.split("<")[0] in out_of}
        if left == edges:
            return left
        edges = left


@pytest.mark.parametrize("select", ["signed", "absolute"])
def test_a_curve_is_what_the_benchmark_says(select: str) -> None:
    """Shares, n = int(share · edges), top-n, pruned, f of means, trapezoids without a point at 0."""
    given = small("gpt2")
    edges, ablated = given.plain.edges(), given.plain.forward(given.other)[1]

    def metric(kept: set[Edge]) -> float:
        logits = given.plain.forward(given.ids, set(edges) - kept, ablated)[0]
        return float((logits[:, -1, 3] - logits[:, -1, 5]).mean())

    full, none = metric(set(edges)), metric(set())
    effect = {edge: metric(set(edges) - {edge}) - full for edge in edges}
    key = (lambda edge: effect[edge]) if select == "signed" else (lambda edge: -abs(effect[edge]))
    order = sorted(edges, key=key)
    kept = [on_paths(set(order[: int(share * len(edges))])) for share in TEN]
    f = [(metric(one) - none) / (full - none) for one in kept]

    def area(heights: list[float]) -> float:
        points = zip(pairwise(TEN), pairwise(heights), strict=True)
        return sum((right - left) * (one + other) / 2 for (left, right), (one, other) in points)

    sweep = given.model.sweep(given.model.edges(), base=given.base, source=given.source, metric=METRIC)
    found = sweep.run().curve(base=given.base, source=given.source, select=select)
    assert found.shares == SHARES == TEN
    assert found.selections[select].edges == tuple(map(len, kept))
    assert found.faithfulness() == pytest.approx(f, abs=1e-11)
    assert found.cpr == pytest.approx(area(f), abs=1e-12)
    assert found.cmd == pytest.approx(area([abs(1 - one) for one in f]), abs=1e-12)


def test_a_perfect_curve_has_the_area_of_the_shares() -> None:
    ones = np.ones((10, 4))
    found = FaithfulnessCurve(
        "m",
        "zero",
        "edge",
        False,
        SHARES,
        tuple(range(10)),
        {"signed": _selected(ones)},
        ones[0],
        0 * ones[0],
    )
    assert [found.cpr, found.cmd] == pytest.approx([0.999, 0.0])
    assert list(found.cpr_interval) == pytest.approx([0.999, 0.999])


def _selected(values: np.ndarray) -> Any:
    return Selected(tuple(range(len(values))), values)


def test_cpr_is_of_signed_selection_and_cmd_of_absolute() -> None:
    both = answer().curve(rows())
    signed, absolute = (answer().curve(rows(), select=one) for one in ("signed", "absolute"))
    assert (both.cpr, both.cmd) == (signed.cpr, absolute.cmd)
    assert both.cpr >= absolute.cpr
    frame = both.to_dataframe()
    assert list(frame.columns) == ["select", "share", "chosen", "edges", "faithfulness", "low", "high"]
    assert len(frame) == 20
    assert (frame["low"] <= frame["faithfulness"] + 1e-9).all()
    assert len(both.plot().data) == 2
    low, high = both.cpr_interval
    assert low < both.cpr < high


def test_an_answer_of_the_other_direction_chooses_what_brings_the_answer_back() -> None:
    other = tiny().ask(rows(), sites=tiny().edges()).run()
    assert other.curve(rows(), select="signed").cpr > 0.9
    circuit = other.circuit(top=20, select="signed")
    assert circuit.helps == 1.0
    assert answer().circuit(top=20).helps == -1.0


def test_losses_are_the_other_way_round() -> None:
    assert helpful_sign("logit_diff") == -1.0
    assert helpful_sign("kl") == helpful_sign(cw.cross_entropy(torch.zeros(1, 3, dtype=torch.long))) == 1.0


def test_sizes_may_be_counts_and_circuits_grow_greedily() -> None:
    found = answer().curve(rows(), sizes=[10, 50, 479], select="signed", greedy=True)
    assert found.counts == (10, 50, 479)
    assert found.faithfulness()[-1] == pytest.approx(1.0)
    edges = found.selections["signed"].edges
    assert edges[0] <= 10
    with pytest.raises(CircuitError, match="two or more, from the smallest to the largest"):
        answer().curve(rows(), sizes=[0.5, 0.1])
    assert answer().curve(rows(), sizes=[1, 50], select="signed").counts == (1, 50)
    with pytest.raises(CircuitError, match=r"0\.5 in `sizes` is no count, and 50 is one"):
        answer().curve(rows(), sizes=[0.5, 50])
    with pytest.raises(CircuitError, match="'best' is none of 'signed', 'absolute'"):
        answer().curve(rows(), select="best")


def test_nodes_keep_all_edges_out_of_them() -> None:
    nodes = tiny().ask(rows(), sites="z,mlp_out", direction="noise").run()
    found = nodes.curve(rows())
    assert (found.level, found.counts[-1]) == ("node", 20)
    assert found.faithfulness()[-1] == pytest.approx(1.0)
    with pytest.raises(SweepError, match="is neither an edge nor a component"):
        tiny().ask(rows(), sites="resid_mid", direction="noise").run().curve(rows())


def test_neurons_are_features_of_what_a_component_writes() -> None:
    """All neurons of one writer kept or not is that writer kept or not."""
    sites = cw.sites("mlp_out", layer=":", d=":")
    neurons = tiny().ask(rows(), sites=sites, direction="noise").run()
    found = neurons.curve(rows(), select="absolute", sizes=[2, 64, 256])
    assert (found.level, found.counts) == ("neuron", (2, 64, 256))
    assert found.faithfulness()[-1] == pytest.approx(1.0, abs=1e-6)


def test_a_page_of_a_curve_fetches_nothing(tmp_path: Any) -> None:
    page = answer().curve(rows()).report(tmp_path / "curve.html").read_text()
    assert "<table" in page
    assert 'src="http' not in page


def test_a_circuit_of_a_search_has_a_curve() -> None:
    circuit = tiny().find_circuit(rows(), threshold=1.0).run()
    assert circuit.evaluate(rows(), only="faithfulness").faithfulness > 0.9
    assert circuit.faithfulness_curve(rows(), select="absolute").faithfulness()[-1] == pytest.approx(1.0)


def test_prompts_of_many_lengths_are_those_of_each_length_together() -> None:
    circuit = answer().circuit(top=20)
    whole = circuit.evaluate(rows())
    alone = [circuit.evaluate([row], minimality=False) for row in rows()]
    assert whole.per_prompt["circuit"] == pytest.approx([one.circuit for one in alone], abs=1e-4)
    assert whole.circuit == pytest.approx(np.mean([one.circuit for one in alone]), abs=1e-4)
    both = cw.evaluate([circuit, answer().circuit(top=5)], rows())
    assert both[0].faithfulness == pytest.approx(whole.faithfulness, abs=1e-6)
    only = circuit.evaluate(rows(), only="faithfulness")
    assert only.faithfulness == pytest.approx(whole.faithfulness, abs=1e-6)
    assert np.isnan(only.completeness)


def test_a_mean_is_over_all_prompts_of_all_lengths() -> None:
    given = circuit_question(tiny(), prompts=rows(), source="mean")
    runs = [group.base for group in given.groups]
    assert len(runs) > 1
    assert all(group.over == tuple(runs) for group in given.groups)


def test_a_mean_of_a_template_is_over_its_prompts() -> None:
    alike = [row for row in rows() if row["template"] == rows()[0]["template"]]
    circuit = answer().circuit(top=20)
    of_one = [
        circuit.evaluate(alike, source=source, only="faithfulness").circuit
        for source in ("mean-positional", "mean-template")
    ]
    assert of_one[0] == pytest.approx(of_one[1], abs=1e-5)
