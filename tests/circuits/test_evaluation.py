"""Faithfulness, completeness and minimality of circuits, against plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import conewise as cw
from conewise.circuits.circuit import Circuit
from conewise.circuits.evaluation import Evaluation
from conewise.errors import CircuitError
from tests.circuits.small_models import small

METRIC = cw.logit_diff(answer=3, wrong=5)


def evaluate(model: Any, edges: Any, **asked: Any) -> Evaluation:
    return Circuit.made(model, edges).evaluate(**asked)


def faithfulness_of(model: Any, circuits: Any, **asked: Any) -> list[float]:
    return [one.faithfulness for one in cw.evaluate([Circuit.made(model, one) for one in circuits], **asked)]


def test_an_evaluation_is_what_the_definitions_say() -> None:
    given = small("gpt2")
    edges = given.plain.edges()
    rng = np.random.default_rng(0)
    kept = {edge for edge in edges if rng.random() < 0.3}
    ablated = given.plain.forward(given.other)[1]

    def metric(removed: set[tuple[str, str]]) -> np.ndarray:
        logits = given.plain.forward(given.ids, removed, ablated)[0]
        return (logits[:, -1, 3] - logits[:, -1, 5]).numpy()

    rest = set(edges) - kept
    wanted = {"full": set(), "ablated": set(edges), "circuit": rest, "complement": kept}
    values = {name: metric(removed) for name, removed in wanted.items()}
    means = {name: value.mean() for name, value in values.items()}
    names = [f"{writer}->{reader}" for writer, reader in kept]
    found = evaluate(given.model, names, base=given.base, source=given.source, metric=METRIC)
    for name, value in values.items():
        assert getattr(found, name) == pytest.approx(value.mean(), rel=1e-9)
        assert found.per_prompt[name] == pytest.approx(value, rel=1e-9)
    whole = means["full"] - means["ablated"]
    assert found.faithfulness == pytest.approx((means["circuit"] - means["ablated"]) / whole)
    assert found.completeness == pytest.approx((means["complement"] - means["ablated"]) / whole)
    changes = {edge: abs(metric(rest | {edge}).mean() - means["circuit"]) for edge in kept}
    assert found.minimality == pytest.approx(min(changes.values()), abs=1e-12)
    assert (found.size, found.edges) == (len(kept), len(edges))
    assert found.ablated == pytest.approx(
        float(given.source.logits[:, -1, 3].mean() - given.source.logits[:, -1, 5].mean())
    )
    assert "faithfulness" in str(found)
    assert f"{len(kept):,} edges" in str(found)


def test_the_whole_graph_is_faithful_and_nothing_is_not() -> None:
    given = small("llama")
    asked: dict[str, Any] = {"base": given.base, "source": given.source, "metric": METRIC}
    every = [f"{writer}->{reader}" for writer, reader in given.plain.edges()]
    found = evaluate(given.model, every, **asked, minimality=False)
    assert [found.faithfulness, found.completeness] == pytest.approx([1.0, 0.0])
    assert (found.minimality, found.weakest) == (None, None)
    nothing = evaluate(given.model, [], **asked)
    assert nothing.faithfulness == pytest.approx(0.0)
    assert nothing.minimality is None
    assert faithfulness_of(given.model, [every, []], **asked) == pytest.approx([1.0, 0.0], abs=1e-9)
    same = evaluate(given.model, every, base=given.base, source=given.base, metric=METRIC, minimality=False)
    assert math.isnan(same.faithfulness)


def test_many_circuits_are_one_stack() -> None:
    given = small("gpt2")
    every = [f"{writer}->{reader}" for writer, reader in given.plain.edges()]
    rng = np.random.default_rng(1)
    circuits = [[edge for edge in every if rng.random() < share] for share in np.linspace(0, 1, 7)]
    asked: dict[str, Any] = {"base": given.base, "metric": METRIC, "source": "zero"}
    found = faithfulness_of(given.model, circuits, **asked)
    alone = [evaluate(given.model, one, **asked, minimality=False).faithfulness for one in circuits]
    assert found == pytest.approx(alone, rel=1e-9)


def test_an_unknown_edge_is_named() -> None:
    given = small("gpt2")
    with pytest.raises(CircuitError, match="no reader 'm7'"):
        evaluate(given.model, ["input->m7"], base=given.base, source=given.source, metric=METRIC)
