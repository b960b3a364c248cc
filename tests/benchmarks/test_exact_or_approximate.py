"""The script behind the page "Exact or approximate?", on the tiny model."""

from __future__ import annotations

import json
import math
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import conewise as cw
from benchmarks.exact_or_approximate import __main__ as script
from benchmarks.exact_or_approximate.agreement import compared, held, of_a_sample, ranks
from benchmarks.exact_or_approximate.experiment import NODES, Experiment, Sizes
from benchmarks.exact_or_approximate.picture import picture, short
from benchmarks.exact_or_approximate.pieces import Effects, joined, united
from benchmarks.exact_or_approximate.tables import tables

SMALL = Sizes(
    pairs={"ioi": 2}, integrated={"ioi": 1}, at_once=1, at_once_of_edges=2, top=4, sample=30, verified=2,
    node_ranks=(3, 5), edge_ranks=(3, 6),
)  # fmt: skip


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return Experiment("tiny", "ioi", tmp_path_factory.mktemp("pieces"), SMALL)


@pytest.fixture(scope="module")
def found(experiment: Experiment) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("benchmarks.exact_or_approximate.agreement.RESAMPLES", 20)
        return script.measured(experiment)


def test_the_numbers_are_those_of_one_comparison(experiment: Experiment, found: Any) -> None:
    """Slices of prompts, kept on disk and joined, are as good as one sweep over all of them."""
    numbers, _ = found
    asked = experiment.asked(slice(0, 2))
    exact = experiment.model.sweep(NODES, **asked).run()
    for method in ("atp", "atp*"):
        own = cw.compare(experiment.model.attribute(NODES, **asked, method=method).run(), exact, k=3)
        row = numbers["nodes"][method]
        assert row["pearson"] == pytest.approx(own.pearson, abs=1e-4)
        assert row["kendall"] == pytest.approx(own.kendall, abs=0.02)
        assert row["ranks"][0]["overlap"] == own.overlap
        assert row["worst"][0][0] == own.worst(1)[0][0] == "z[layer=0, head=2]"
    alone = experiment.model.attribute(NODES, **experiment.asked(slice(0, 1)), method="ig", steps=3).run()
    exact_alone = experiment.model.sweep(NODES, **experiment.asked(slice(0, 1))).run()
    assert numbers["nodes"]["ig"]["pearson"] == pytest.approx(
        cw.compare(alone, exact_alone).pearson, abs=1e-4
    )
    assert [row["pairs"] for row in numbers["nodes"].values()] == [2, 2, 1]
    assert numbers["behaviour"]["right"] == 1.0
    assert numbers["behaviour"]["clean"] == pytest.approx(float(exact.base[0]), rel=1e-4)
    assert numbers["verified"]["edges"]["cells"] == 2


def test_edges_are_those_that_were_drawn_or_picked(experiment: Experiment) -> None:
    several, eap = experiment.some_exact(), experiment.every_edge("eap")
    assert set(several.names) == {*experiment.drawn(), *experiment.picked()}
    assert len(experiment.drawn()) == 30
    assert set(experiment.picked()) >= {eap.names[number] for number in np.abs(eap.mean).argsort()[-4:]}
    some = several.names[::9]
    alone = experiment.model.sweep(
        experiment.model.edges()[list(some)], **experiment.asked(slice(0, 2))
    ).run()
    np.testing.assert_allclose(several.at(some), alone.effect.numpy(), atol=1e-4)


def test_hybrid_is_held_against_the_exact_sweep(found: Any) -> None:
    hybrid = found[0]["hybrid"]
    assert hybrid["missed"] == []
    assert 3 <= hybrid["computed"] <= 20


def test_a_curve_ends_at_the_exact_effect(experiment: Experiment, found: Any) -> None:
    curves, exact = found[0]["curves"], experiment.nodes("exact")
    assert len(curves) == 3
    for name, shares in curves.items():
        assert shares[-1] == pytest.approx(float(exact.at((name,))[0]), abs=1e-4)
    worst = curves["z[layer=0, head=2]"]
    assert abs(worst[0]) < abs(worst[1]) < abs(worst[3])


def test_what_was_computed_is_not_computed_again(
    experiment: Experiment, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr("benchmarks.exact_or_approximate.agreement.RESAMPLES", 20)
    monkeypatch.setattr(type(experiment.model), "attribute", refused)
    monkeypatch.setattr(type(experiment.model), "sweep", refused)
    numbers, _ = script.measured(experiment)
    assert json.loads(json.dumps(numbers)) == json.loads(json.dumps(found[0]))


def test_pieces_of_another_question_are_refused(experiment: Experiment) -> None:
    with pytest.raises(ValueError, match=r"holds pieces of another question: pairs was 2, and is 4"):
        experiment.pieces.expect({"model": "tiny", "pairs": 4})


def test_tables_and_picture_are_made_of_them(experiment: Experiment, found: Any) -> None:
    numbers, panels = found
    made = tables({"ioi": numbers})
    assert set(made) == {"tasks", "ioi: nodes", "ioi: edges"}
    assert "gave a drink to | John → Mary | +" in made["tasks"]
    assert f"| Pearson | {numbers['nodes']['atp']['pearson']:.2f} |" in made["ioi: nodes"]
    assert "`a0.h2`" in made["ioi: nodes"]
    integrated = next(one for one in panels if one.title.startswith("IG"))
    assert integrated.exact[0] == pytest.approx(
        experiment.nodes("exact").per_prompt[0, 0]
    )  # of its one prompt
    drawn = ET.fromstring(picture([("a task", panels)]))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"AtP", "AtP*", "IG, 3 steps", "EAP", "EAP-IG, 5 steps", "a task"} <= set(texts)
    assert f"Spearman {numbers['edges']['eap']['spearman']:.2f}" in texts


def effects(*rows: float) -> Effects:
    return Effects(tuple("abcdefgh"[: len(rows)]), np.array(rows)[:, None], 10)


EXACT = effects(8.0, 7.0, -6.0, 1.0, 0.5, 0.2, -0.1, 0.01)
OTHER = effects(8.0, 0.3, 6.0, 1.0, 0.5, 0.2, -0.2, 0.02)


def test_what_is_missed_has_its_rank() -> None:
    row = ranks(OTHER.mean, EXACT.mean, EXACT.names, 3)
    assert row["overlap"] == pytest.approx(2 / 3)
    assert row["missed"] == [{"name": "b", "rank": 5, "approx": 0.3, "exact": 7.0}]
    numbers = compared(OTHER, EXACT, "", (3, 4))
    assert (numbers["sign_errors"], numbers["sign_errors_of_largest"]["names"]) == (1, ["c"])
    assert numbers["worst"][0] == ["c", 6.0, -6.0]
    assert numbers["largest"][:2] == [["a", 8.0, 8.0], ["b", 0.3, 7.0]]
    assert numbers["pearson_without_largest"] == pytest.approx(
        np.corrcoef(OTHER.mean[1:], EXACT.mean[1:])[0, 1]
    )


def test_a_sample_says_what_it_can_say() -> None:
    """Of cells that were not computed nothing is counted, and a bound says how many may be larger."""
    some = Effects(("a", "c", "g", "h"), EXACT.per_prompt[[0, 2, 6, 7]], 10)
    numbers = of_a_sample(OTHER, some, ("a", "g", "h"), ("a", "c"), "", (2,))
    (row,) = numbers["ranks"]
    assert (row["overlap"], row["least"], row["of_sample"]) == (1.0, 6.0, 0)
    assert row["beyond_at_most"] == pytest.approx((1 - 0.05**0.5) * 6)
    assert row["sign_errors_of_its_own"] == 1
    assert numbers["sign_errors"] == 0.0
    assert numbers["interval"]["holds_for_picked"] == 1.0  # of one cell alone nothing is learned
    numbers = of_a_sample(OTHER, EXACT, EXACT.names, ("a",), "", (3,))
    assert numbers["spearman"] == compared(OTHER, EXACT, "", (3,))["spearman"]
    assert numbers["ranks"][0]["overlap"] == pytest.approx(2 / 3)


def test_an_interval_is_tried_on_what_it_was_not_made_of() -> None:
    found = held(OTHER, EXACT, ("d", "e", "f", "h"), ("a", "c"))
    assert found == {"reach": 0.0, "holds_for_others": 0.5, "holds_for_picked": 0.5}
    found = held(OTHER, EXACT, ("g", "h", "e", "b"), ("c",))
    assert found["reach"] == pytest.approx(12.706 * 0.11 / math.sqrt(2) * math.sqrt(1.5), rel=1e-3)
    assert (found["holds_for_others"], found["holds_for_picked"]) == (0.5, 0.0)


def test_pieces_are_joined_by_prompts_and_by_cells() -> None:
    both = joined([EXACT, OTHER])
    assert both.mean[1] == pytest.approx((7.0 + 0.3) / 2)
    assert both.of_prompts(slice(1, 2)).mean.tolist() == OTHER.mean.tolist()
    assert (both.flops, both.of_prompts(slice(1, 2)).flops) == (20, 10)
    one, more = Effects(("a", "b"), np.ones((2, 1)), 1), Effects(("b", "c"), 2 * np.ones((2, 1)), 2)
    assert united([one, more]).mean.tolist() == [1.0, 1.0, 2.0]
    assert [short(name) for name in ("z[layer=3, head=1]", "mlp_out[layer=12]", "m0->logits")] == [
        "a3.h1", "m12", "m0->logits",
    ]  # fmt: skip
