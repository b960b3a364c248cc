"""Prompts of several lengths by real workers: all groups stand in one line, each is stored by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conewise.errors import SweepError
from tests.text.test_questions import pairs, question

pytestmark = pytest.mark.ray


def test_groups_are_run_together_with_the_bits_of_a_local_run(fleet: Any, tmp_path: Path) -> None:
    asked = question(pairs())
    local = asked.run(max_memory="300kB", out=tmp_path / "local")
    seen: list[tuple[int, int]] = []
    found = asked.run(
        max_memory="300kB",
        out=tmp_path / "run",
        workers=fleet,
        verify=2,
        progress=lambda *both: seen.append(both),
    )
    assert len(asked.prompts.groups) == 2
    assert torch.equal(found.per_prompt, local.per_prompt)
    assert found.ledger.node_evaluations == local.ledger.node_evaluations
    assert found.verification is not None
    assert found.verification.ok
    total = 2 * len(asked.cells)
    assert seen[-1] == (total, total)
    # One line of shares: the ledger of the last run has the cells of both.
    assert sum(one.worlds for one in fleet.ledger.seats.values()) == total
    for folder in ("local", "run"):
        for executor in (None, fleet):
            again = asked.run(max_memory="300kB", out=tmp_path / folder, resume=True, workers=executor)
            assert again.ledger.resumed == total
            assert torch.equal(again.per_prompt, local.per_prompt)


@pytest.mark.parametrize("method", ["atp", "hybrid"])
def test_groups_are_attributed_to_together(fleet: Any, method: str) -> None:
    asked = question(pairs())
    local = asked.attribute(method).run()
    found = asked.attribute(method).run(workers=fleet)
    assert torch.equal(found.per_prompt, local.per_prompt)
    assert found.method == local.method
    if method == "atp":
        assert sum(one.shares for one in fleet.ledger.seats.values()) == 2


def test_what_is_missing_says_which_batch_of_all(fleet: Any) -> None:
    """A metric that raises for prompts of one length: the other group is whole."""

    def short(outputs: Any) -> torch.Tensor:
        logits = outputs.logits
        if logits.shape[1] > lengths[0]:
            raise RuntimeError("too long")
        value: torch.Tensor = logits[:, -1, 7]
        return value

    asked = question(pairs(), metric=short)
    lengths = asked.prompts.lengths
    with pytest.raises(SweepError, match="too long"):
        asked.run(workers=fleet)
    assert any("group 2, batch 0" in line for line in fleet.ledger.log)
