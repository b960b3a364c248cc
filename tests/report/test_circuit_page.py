"""The page of a circuit as text: one file that fetches nothing, others' text escaped, the right data."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conewise.circuits.circuit import Circuit
from conewise.errors import CircuitError
from conewise.report import circuit as circuit_page
from conewise.report.circuit import Curve
from tests.circuits.graphs import graph
from tests.report.drawn_circuit import HOSTILE, circuit_story, drawn_circuit, drawn_curve


def written(folder: Path, circuit: Circuit, **given: Any) -> str:
    return circuit.report(folder / "page.html", **given).read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="conewise-circuit">(.*?)</script>', page)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    circuit = drawn_circuit()
    return written(
        tmp_path_factory.mktemp("circuit"), circuit, curve=drawn_curve(circuit), story=circuit_story()
    )


def test_the_page_fetches_nothing_and_runs_its_own_scripts_alone(page: str) -> None:
    assert not re.search(r"""(src|href|action|data)\s*=\s*["']?\s*(https?:)?//""", page)
    assert not re.search(r"url\((?!#)", page)
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    rules = dict(rule.strip().partition(" ")[::2] for rule in found[1].split(";"))
    assert rules["default-src"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert len(scripts) == 1
    assert rules["script-src"].split() == [f"'sha256-{one}'" for one in hashes]


def test_what_others_wrote_is_text(page: str) -> None:
    assert HOSTILE not in page
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;") > 5
    assert "logit_diff &lt;b&gt;" in page


def test_the_edges_of_the_circuit_and_of_its_curve_are_sent(page: str) -> None:
    circuit = drawn_circuit()
    data = data_of(page)
    sent = {edge["name"]: edge for edge in data["edges"]}
    assert {name for name, edge in sent.items() if edge["own"]} == set(circuit.edges)
    assert len(sent) > len(circuit)
    for threshold, count, faithful in data["points"]:
        kept = circuit.select(threshold=threshold)
        assert {name for name, edge in sent.items() if edge["level"] >= threshold} == set(kept.edges)
        assert count == len(kept)
        assert 0 <= faithful <= 1
    sizes = [count for _, count, _ in data["points"]]
    assert sizes == sorted(sizes)
    assert sizes[0] < len(circuit) < sizes[-1]
    for name, edge in sent.items():
        writer, reader = circuit.graph.split(name)
        assert data["boxes"][edge["from"]][0] == writer.name
        assert data["boxes"][edge["to"]][0] == reader.name.partition("<")[0]
        assert circuit.scores is not None
        assert edge["score"] == circuit.scores[name]


def test_without_a_curve_thresholds_can_be_chosen_and_nothing_is_measured(tmp_path: Path) -> None:
    text = written(tmp_path, drawn_circuit())
    assert 'id="threshold"' in text
    assert 'id="curve"' not in text
    assert all(faithful is None for _, _, faithful in data_of(text)["points"])


def test_a_curve_that_has_no_finite_point_is_not_drawn(tmp_path: Path) -> None:
    circuit = drawn_circuit()
    points = tuple(replace(point, faithfulness=math.nan) for point in drawn_curve(circuit).points)
    text = written(tmp_path, circuit, curve=Curve(points, "logit_diff"))
    assert 'id="curve"' not in text
    assert 'id="threshold"' in text


def test_without_scores_there_is_nothing_to_choose_by(tmp_path: Path) -> None:
    circuit = Circuit.from_nodes(graph(2, 2), ["a0.h1", "m1"], of="small")
    text = written(tmp_path, circuit)
    assert 'id="threshold"' not in text
    assert {edge["name"] for edge in data_of(text)["edges"]} == set(circuit.edges)
    assert "A circuit of 8 edges in small" in text


def test_an_empty_circuit_has_a_page(tmp_path: Path) -> None:
    text = written(tmp_path, Circuit.made(graph(1, 1), [], of="small"))
    assert "A circuit of 0 edges in small" in text


def test_of_too_many_edges_the_strongest_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_page, "MOST_ON_PAGE", 10)
    circuit = drawn_circuit()
    text = written(tmp_path, circuit)
    assert f"{len(circuit) - 10} edges of the circuit are not drawn" in text
    scores = circuit.scores
    assert scores is not None
    strongest = sorted(circuit.edges, key=lambda edge: -abs(scores[edge]))[:10]
    assert {edge["name"] for edge in data_of(text)["edges"]} == set(strongest)


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CircuitError, match=r"the page cannot be written to .* it is a folder"):
        drawn_circuit().report(tmp_path)
