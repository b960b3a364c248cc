# ruff: noqa: E501 - the snippet is as people read it
"""The face of the library in ten lines: one model, and jobs that are planned, run, kept and opened again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SNIPPET = """
import conewise as cw

model = cw.load("tiny")                        # a Model: .module, .tokenizer; captured when first needed
clean, corrupted = (f"When Mary and John went to the store, {who} gave a drink to" for who in ("John", "Mary"))
metric = cw.logit_diff(" Mary", " John")       # token ids or text
job = model.sweep(cw.sites("z", layer=":", head=":"), base=corrupted, source=clean, metric=metric)
print(job.plan())
result = job.run()
result.save("heads")
assert cw.open("heads").equals(result)
scores = model.attribute(model.edges(), base=clean, source=corrupted, metric=metric, method="eap-ig").run()
circuit = model.find_circuit(base=clean, source=corrupted, metric=metric, method="acdc", threshold=0.01).run()
"""


def test_the_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scene: dict[str, Any] = {}
    exec(compile(SNIPPET, "snippet", "exec"), scene)
    result, scores, circuit = (scene[name] for name in ("result", "scores", "circuit"))
    assert result.cells[int((result.table[0] - result.base[0]).abs().argmax())].name == "z[layer=0, head=2]"
    assert len(scores.cells) == 479
    assert "input->a0.h2<v>" in circuit.edges
