"""The example of lens and attribution: its lines are few, and its numbers are those of plain hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from tests.runs.plain_hooks import PlainHooks

EXAMPLE = Path(__file__).parents[2] / "examples" / "lens_and_attribution.py"


def test_the_example_has_at_most_15_lines_and_prints_what_plain_hooks_compute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [line for line in EXAMPLE.read_text("utf-8").splitlines()[1:] if line.strip()]
    assert len(lines) <= 15
    names: dict[str, object] = {}
    exec(compile("\n".join(lines), str(EXAMPLE), "exec"), names)
    printed = capsys.readouterr().out.splitlines()

    loaded = cw.load("tiny", attn_implementation="eager")
    tokenizer: Any = loaded.tokenizer
    ids = tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt")
    mary, john = tokenizer.convert_tokens_to_ids(["Mary", "John"])
    with torch.no_grad():
        plain = PlainHooks(loaded.module, input_ids=ids.input_ids)
        streams = [plain.seen.streams[f"a{layer}.h0<q>"] for layer in range(4)] + [plain.stream]
        probs = [float(plain.lens(stream)[0, -1].softmax(-1)[mary]) for stream in streams]
        adds = {
            name: float(plain.logit_diff_of(part, mary, john)[0, -1]) for name, part in plain.parts.items()
        }
    assert [float(line.rpartition(" ")[2]) for line in printed[:5]] == pytest.approx(probs, abs=1e-3)
    strongest = sorted(adds, key=lambda name: -abs(adds[name]))[:4]
    assert [line.split()[0] for line in printed[5:]] == strongest
    told = [float(line.split()[1]) for line in printed[5:]]
    assert told == pytest.approx([adds[name] for name in strongest], abs=0.01)
