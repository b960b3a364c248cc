"""The inside of the base run on a page: where the strongest heads look, and the lens, as the run has them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import SweepError
from conewise.report import inside as inside_module
from conewise.report.inside import Inside, LensTable, Likely, Pattern, inside_of, strongest_heads
from conewise.report.page import inside_tables, sweep_page
from conewise.runs.reading import Reading
from tests.report.swept import HOSTILE, swept
from tests.report.test_page import own


def base() -> Reading:
    """The base run of the small sweep."""
    sweep = swept()[0].sweep
    assert sweep is not None
    found: Reading = sweep.batch(0).base
    return found


def inside() -> Inside:
    result, story, _ = swept()
    found = inside_of(base(), result, story)
    assert found is not None
    return found


def test_the_strongest_heads_are_those_with_the_largest_effects() -> None:
    result, _, _ = swept()
    effects = (result.table[0] - result.base[0])[:16].reshape(4, 4)
    found = strongest_heads(result)
    assert len(found) == inside_module.HEADS
    largest = effects.abs().flatten().argsort(descending=True)[: len(found)].tolist()
    assert [(layer, head) for layer, head, _ in found] == [divmod(at, 4) for at in largest]
    for layer, head, effect in found:
        assert effect == pytest.approx(float(effects[layer, head]))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_head_whose_effect_is_no_finite_number_is_none_of_the_strongest(odd: float) -> None:
    result, story, folded = swept()
    table = result.table.clone()
    table[0, 5] = odd
    overflown = replace(result, table=table)
    assert (1, 1) not in [(layer, head) for layer, head, _ in strongest_heads(overflown)]
    found = inside_of(base(), overflown, story)
    assert found is not None
    assert 'id="inside"' in sweep_page(overflown, story, folded, Inside.from_json(found.to_json()))


def test_patterns_are_those_of_the_module_though_its_attention_is_fused() -> None:
    """The module computes attention by one operation, which never holds the weights."""
    run, found = base(), inside()
    module: Any = copy.deepcopy(run.model.module)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        expected = module(**run.inputs, output_attentions=True).attentions
    assert len(found.patterns) == inside_module.HEADS * inside_module.PROMPTS
    for one in found.patterns:
        weights = expected[one.layer][one.prompt, one.head]
        torch.testing.assert_close(torch.tensor(one.weights), weights, atol=1e-4, rtol=0)


def test_the_lens_is_that_of_the_run() -> None:
    found, seen = inside(), base().lens(top=inside_module.TOP)
    for table in found.lenses:
        assert table.rows == seen.rows
        for row in range(len(table.rows)):
            for pos, cell in enumerate(table.cells[row]):
                assert [one.text for one in cell] == list(map(str, seen.top[row, table.prompt, pos].tolist()))
                probs = seen.top_probs[row, table.prompt, pos].tolist()
                assert [one.prob for one in cell] == pytest.approx(probs, abs=1e-4)
    first, *_ = inside_tables(found)["tables"]
    assert [name for name, _ in first["rows"]] == ["after 3", "after 2", "after 1", "after 0", "input"]


def test_it_is_the_same_after_json_and_back() -> None:
    assert Inside.from_json(inside().to_json()) == inside()
    with pytest.raises(SweepError, match=r"not the inside of a run: .*tokens is a whole number"):
        Inside.from_json('{"kind": "conewise inside", "format": 1, "tokens": 3}')


def test_a_page_has_it_and_hostile_tokens_stay_text() -> None:
    result, story, folded = swept()
    found = replace(inside(), tokens=((HOSTILE,) * 6, (HOSTILE,) * 6))
    hostile = replace(
        found,
        lenses=tuple(
            replace(one, cells=tuple(((Likely(HOSTILE, 0.5),),) * 6 for _ in one.cells))
            for one in found.lenses
        ),
    )
    page = own(sweep_page(result, story, folded, hostile))
    assert "<h3>Where the strongest heads look</h3>" in page
    assert page.count('class="table lens"') == 2
    assert "<script>alert" not in page
    assert 'class="p5"' in page
    assert "conewise-inside" in page
    plain = own(sweep_page(result, story, folded))
    assert 'id="inside-title"' not in plain
    assert 'id="conewise-inside"' not in plain


def test_what_is_not_there_is_said() -> None:
    result, story, folded = swept()
    bare = replace(inside(), patterns=(), why_no_patterns="layer 0 has none <here>.", lenses=())
    page = own(sweep_page(result, story, folded, replace(bare, why_no_lens="no logits.")))
    assert "Where heads look is not shown: layer 0 has none &lt;here&gt;." in page
    assert "The lens is not shown: no logits." in page


def test_the_spread_is_shown_where_there_are_prompts() -> None:
    result, story, folded = swept()
    assert 'id="spread-figure"' in sweep_page(result, story, folded)
    alone = replace(
        result, per_prompt=result.per_prompt[..., :1], base_per_prompt=None, source_per_prompt=None
    )
    assert 'id="spread-figure"' not in sweep_page(alone, story, folded)


def test_a_page_of_a_large_model_stays_under_8_mb() -> None:
    """80 layers, all positions that a page shows, long tokens, 40,000 numbers of single prompts."""
    result, story, folded = swept()
    prompts, wide = 500, inside_module.POSITIONS
    many = replace(
        result,
        per_prompt=torch.randn(2, 44, prompts, dtype=torch.float64),
        base_per_prompt=torch.randn(2, prompts, dtype=torch.float64),
        source_per_prompt=torch.randn(2, prompts, dtype=torch.float64),
    )
    row = tuple((Likely("·international", 0.1234),) * inside_module.TOP for _ in range(wide))
    large = Inside(
        tokens=(("·international",) * wide,) * inside_module.PROMPTS,
        patterns=tuple(
            Pattern(79, head, 0.5, prompt, ((0.1234,) * wide,) * wide)
            for head in range(inside_module.HEADS)
            for prompt in range(inside_module.PROMPTS)
        ),
        lenses=tuple(
            LensTable(prompt, ("input", *map(str, range(80))), (row,) * 81)
            for prompt in range(inside_module.PROMPTS)
        ),
    )
    assert len(sweep_page(many, story, folded, large).encode()) < 8_000_000


def test_effects_with_intervals_are_a_figure_of_the_strongest_cells() -> None:
    result, _, _ = swept()
    figure = result.plot_intervals(3)
    cells = [cell for cell, _, _ in result.strongest(top=3)]
    assert list(figure.layout.yaxis.ticktext) == [cell.name for cell in cells]
    dots, means = figure.data
    places = [list(result.cells).index(cell) for cell in cells]
    assert result.base_per_prompt is not None
    effects = (result.per_prompt[0] - result.base_per_prompt[0])[places]
    assert list(dots.x) == pytest.approx(effects.flatten().tolist())
    assert list(means.x) == pytest.approx(effects.mean(-1).tolist())
    found = result.statistics()
    low = found.low.flatten()[places] if found.low.ndim else found.low
    assert [x - less for x, less in zip(means.x, means.error_x.arrayminus, strict=True)] == pytest.approx(
        low.tolist()
    )
    alone = replace(
        result, per_prompt=result.per_prompt[..., :1], base_per_prompt=result.base_per_prompt[:, :1]
    )
    with pytest.raises(SweepError, match="need two or more"):
        alone.plot_intervals()
    with pytest.raises(SweepError, match="at least 1"):
        result.plot_intervals(0)


def test_a_model_with_logits_of_the_last_position_alone_has_a_lens_of_one_column(tmp_path: Path) -> None:
    """Questions capture such models: what they do not read is not computed."""
    pair = {
        "clean": "When Mary and John went to the store, John gave a drink to",
        "corrupted": "When Mary and John went to the store, Mary gave a drink to",
        "answers": [" Mary"],
        "wrong_answers": [" John"],
    }
    tiny = cw.load("tiny")
    model = cw.capture(
        tiny.module, tokenizer=tiny.tokenizer, logits_to_keep=1, input_ids=torch.zeros(2, 9, dtype=torch.long)
    )
    answer = model.ask([pair, pair]).run()
    page = own(answer.report(tmp_path / "page.html").read_text("utf-8"))
    table = page.partition('class="table lens"')[2].partition("</table>")[0]
    assert '<th scope="col">layer</th><th scope="col">to</th></tr>' in table
    assert "layer 1, head" not in table
    assert page.count('"weights":[[') > 0
