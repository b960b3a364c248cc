"""The tasks of the guide to questions: at most 15 lines each, and what they find is what plain hooks find."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from tests.docs.pages import ROOT, blocks
from tests.docs.test_blocks import run
from tests.text.plain import head_effects, logits, tiny, token, tokens
from tests.text.test_text_inputs import plain_trace

PAGE = ROOT / "docs/guides/questions.md"


@cache
def ran(folder: Path) -> dict[str, Any]:
    """What the blocks of the page leave."""
    names: dict[str, Any] = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for block in blocks(PAGE):
            if block.language == "python":
                run(block, names)
    return names


@pytest.fixture
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ran(tmp_path_factory.getbasetemp())


def test_no_task_takes_more_than_fifteen_lines() -> None:
    for page in (PAGE, ROOT / "docs/tutorial.md"):
        for block in blocks(page):
            if block.language == "python":
                lines = [line for line in block.code.splitlines() if line.strip()]
                most = 15 if page == PAGE else 24  # prompts are written out there
                assert len(lines) <= most, block.name


def test_heads_over_thirty_prompts_of_three_lengths(page: dict[str, Any]) -> None:
    rows, answer = page["rows"], page["answer"]
    assert len(rows) == 30
    assert len({tokens(row["clean"]).shape[1] for row in rows}) == 3
    some = [0, 7, 11, 19, 20, 29]
    plain = head_effects([rows[number] for number in some])
    torch.testing.assert_close(answer.effect_by_prompt[..., some], plain, rtol=1e-4, atol=1e-4)
    assert answer.verify(n=2).ok


def test_the_trace_from_text(page: dict[str, Any]) -> None:
    trace = page["trace"]
    text = "When Mary and John went to the store, John gave a drink to"
    plain = plain_trace(text, [4, 10], token(" Mary"), trace.noise, 2)
    torch.testing.assert_close(trace.per_sample[:2], plain, rtol=1e-4, atol=1e-5)


def test_the_neurons_mean_ablated_over_twenty_prompts(page: dict[str, Any]) -> None:
    ablated, texts = page["ablated"], [row["clean"] for row in page["rows"][:20]]
    module: Any = tiny().module
    down = [module.model.layers[layer].mlp.down_proj for layer in (1, 2)]
    seen: list[list[torch.Tensor]] = [[], []]

    def keep(at: int) -> Any:
        def edit(value: torch.Tensor) -> torch.Tensor:
            seen[at].append(value[0])
            return value

        return edit

    for text in texts:
        logits(text, {module: keep(at) for at, module in enumerate(down)})
    means = [torch.cat(rows).mean(0) for rows in seen]  # over all prompts and positions
    count = means[0].shape[0]
    assert ablated.effect_by_prompt.shape == (2, count, 20)
    for at, neuron, number in ((0, 9, 0), (1, 0, 12), (0, 5, 19), (1, 3, 7)):

        def edit(value: torch.Tensor, at: int = at, neuron: int = neuron) -> torch.Tensor:
            value = value.clone()
            value[..., neuron] = means[at][neuron]
            return value

        before = logits(texts[number]).log_softmax(-1)
        after = logits(texts[number], {down[at]: edit}).log_softmax(-1)
        kl = float((before.exp() * (before - after)).sum())
        assert float(ablated.effect_by_prompt[at, neuron, number]) == pytest.approx(kl, rel=1e-3, abs=1e-6)


def test_what_was_stopped_goes_on_and_is_exported(page: dict[str, Any]) -> None:
    assert 0 < page["again"].ledger.resumed < 48
    assert page["again"].equals(page["answer"])
    assert isinstance(page["saved"], cw.Result)
    assert page["saved"].equals(page["answer"])
