"""Edges, a circuit and its evaluation in a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import conewise as cw

SNIPPET = """
import conewise as cw

model = cw.load("tiny")
text = "When Mary and John went to the store, {} gave a drink to"
base, source = model.run(text.format("Mary")), model.run(text.format("John"))
metric = cw.logit_diff(" Mary", " John")
edges = model.edges()                                   # every edge, as a table
scores = model.sweep(edges, base=base, source=source, metric=metric).run()
search = model.find_circuit(base=base, source=source, metric=metric, threshold=0.01)
circuit = search.run()
again = model.find_circuit(
    base=base, source=source, metric=metric, threshold=0.01, speculative=False
).run()
assert circuit.edges == again.edges
print(circuit.evaluate(base=base, source=source, metric=metric))
circuit.plot(); circuit.save("circuit.json")
"""


def test_a_circuit_is_found_and_evaluated_in_a_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(SNIPPET, "snippet", "exec"), names)
    circuit, printed = names["circuit"], capsys.readouterr().out
    assert "faithfulness" in printed
    assert [one.edge for one in circuit.log] == [one.edge for one in names["again"].log]
    assert cw.Circuit.load(tmp_path / "circuit.json").edges == circuit.edges
    kept = len(circuit.edges)
    assert kept < len(circuit.log) == len(names["edges"])
    # The circuit does what the model does, and what it leaves out does not.
    found = circuit.evaluate(
        base=names["base"], source=names["source"], metric=names["metric"], minimality=False
    )
    assert found.faithfulness == pytest.approx(1.0, abs=0.05)
    assert found.completeness == pytest.approx(0.0, abs=0.05)
