import base64
import hashlib
import itertools
import json
import math
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from plotly.offline import get_plotlyjs

from conewise.anatomy.places import Place
from conewise.anatomy.selectors import Cell, Spread
from conewise.errors import ConewiseError, SweepError
from conewise.report import page as packing
from conewise.report.document import inert, number
from conewise.report.inside import inside_of
from conewise.report.page import MISSING, heading, packed, sweep_page, write_page
from conewise.report.sent import SentPart
from conewise.report.story import Story, TokenizedPair
from conewise.sweeps.result import Result
from conewise.sweeps.storage.result_data import CellCheck
from tests.report.swept import HOSTILE, swept


def own(page: str) -> str:
    """The page without plotly.js."""
    return page.replace(get_plotlyjs(), "")


def floats(text: str | None) -> np.ndarray:
    assert text is not None
    return np.frombuffer(base64.b64decode(text), dtype="<f8")


def names(part: SentPart) -> list[str]:
    """The names of a part's cells, as the page derives them."""
    if part["names"] is not None:
        return list(part["names"])
    assert part["pieces"] is not None
    return [
        "".join(piece if isinstance(piece, str) else str(point[piece]) for piece in part["pieces"])
        for point in itertools.product(*part["coordinates"])
    ]


def column(part: SentPart, name: str) -> list[int | None]:
    """A coordinate of a part's cells, as the page derives it."""
    found = part["at"].get(name)
    if found is None:
        return [None] * part["count"]
    if "fixed" in found:
        return [found["fixed"]] * part["count"]
    if "axis" in found:
        return [point[found["axis"]] for point in itertools.product(*part["coordinates"])]
    listed = np.frombuffer(base64.b64decode(found["list"]), dtype="<i4").tolist()
    return [None if one == MISSING else one for one in listed]


def with_cells(result: Result, *parts: Spread) -> Result:
    """A result over other cells, its numbers counted up."""
    count = sum(len(part.cells) for part in parts)
    table = torch.arange(count, dtype=torch.float64).repeat(len(result.metrics), 1)
    prompts = table[..., None].repeat(1, 1, result.per_prompt.shape[-1])
    return replace(result, spreads=parts, table=table, per_prompt=prompts)


# -- one file, that runs and fetches nothing but its own ---------------------------------------------


def test_the_page_holds_all_it_needs_and_plotly_once() -> None:
    page = sweep_page(*swept())
    assert page.count(get_plotlyjs()) == 1
    assert not re.search(r"""(src|href|action|data)\s*=\s*["']?\s*(https?:)?//""", own(page))
    assert "@import" not in own(page)
    assert not re.search(r"url\((?!#)", own(page))


def test_only_the_page_s_own_scripts_may_run_and_no_address_may_be_fetched() -> None:
    page = sweep_page(*swept())
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    rules = dict(rule.strip().partition(" ")[::2] for rule in found[1].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    assert not {"connect-src", "frame-src", "font-src", "object-src"} & set(rules)
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert len(scripts) == 3
    assert rules["script-src"].split() == [f"'sha256-{one}'" for one in hashes]


def test_no_element_of_the_page_has_a_handler_or_a_script_from_elsewhere() -> None:
    page = own(sweep_page(*swept()))
    scripts = re.findall(r"<script([^>]*)>", page)
    # Plotly's is gone; its tags are left around nothing.
    assert set(scripts) == {"", *(f' type="application/json" id="conewise-{name}"' for name in DATA)}
    outside = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<[^>]*\son[a-z]+\s*=", outside)


DATA = ("data", "speeds", "folded")


def test_prompts_and_names_stay_text() -> None:
    result, story, folded = swept()
    hostile = replace(result, metrics=("<img src=x onerror=alert(2)>", "b"))
    page = own(sweep_page(hostile, replace(story, title=f"{HOSTILE} title"), folded))
    outside = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    for text in ("alert(1)</script>", "<script>alert", "<img", "<b>&amp;", "<i>right", "small<model>"):
        assert text not in outside
        assert text not in page
    assert "&lt;script&gt;alert" in outside
    assert "&lt;img src=x onerror=alert(2)&gt;" in outside


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "\u2028\u2029", "&lt;", HOSTILE])
def test_data_has_no_character_that_html_or_a_script_would_read(text: str) -> None:
    written = inert({text: [text]})
    assert not set(written) & set("<>&\u2028\u2029")
    assert json.loads(written) == {text: [text]}


# -- the numbers, and whose they are ------------------------------------------------------------------


def test_every_number_is_sent_with_all_its_bits() -> None:
    result, story, _ = swept()
    sent = packed(result, story)
    assert floats(sent["table"]).tobytes() == result.table.numpy().tobytes()
    assert floats(sent["perPrompt"]).tobytes() == result.per_prompt.numpy().tobytes()
    assert floats(sent["base"]).tolist() == result.base.tolist()
    assert result.source is not None
    assert floats(sent["source"]).tolist() == result.source.tolist()


def test_every_cell_has_its_name_its_kind_and_its_place() -> None:
    result, story, _ = swept()
    parts = packed(result, story)["parts"]
    assert [name for part in parts for name in names(part)] == [cell.name for cell in result.cells]
    assert all(part["pieces"] and part["names"] is None for part in parts), "derived, not listed"
    assert [part["kind"] for part in parts] == ["z", "mlp_out", "resid_pre"]
    for axis in ("layer", "head", "pos"):
        found = [at for part in parts for at in column(part, axis)]
        assert found == [cell.at.get(axis) for cell in result.cells]


def cell(*places: Place, **at: int) -> Cell:
    return Cell(places, 0, MappingProxyType(at))


def place(name: str, layer: int | None = None, stack: str = "", **part: Any) -> Place:
    return Place(name, layer, stack, MappingProxyType(part))


IRREGULAR = {
    "a list of sites": Spread(
        "sites",
        ("site",),
        ((0, 1, 2),),
        (cell(place("z", 1, head=2), layer=1, head=2), cell(place("lm_head")), cell(place("q", 0), layer=0)),
    ),
    "places that are patched together": Spread(
        "resid_post",
        ("layer",),
        ((0, 1),),
        tuple(cell(place("resid_post", n), place("resid_post", n + 1), layer=n) for n in (0, 1)),
    ),
    "coordinates with gaps, one of them fixed": Spread(
        "z",
        ("layer", "kv_head"),
        ((3, 7), (0, 5)),
        tuple(
            cell(place("z", n, "decoder", kv_head=k, pos=4), layer=n, kv_head=k, pos=4)
            for n in (3, 7)
            for k in (0, 5)
        ),
    ),
    "a single place": Spread("sites", (), (), (cell(place("lm_head")),)),
    "cells in another order than their coordinates": Spread(
        "z", ("layer",), ((0, 1),), (cell(place("z", 1), layer=1), cell(place("z", 0), layer=0))
    ),
}


@pytest.mark.parametrize("case", IRREGULAR)
def test_cells_that_follow_no_rule_have_their_names_too(case: str) -> None:
    part = IRREGULAR[case]
    result = with_cells(swept()[0], part)
    (sent,) = packed(result, None)["parts"]
    assert names(sent) == [one.name for one in part.cells]
    assert (sent["kinds"] or [sent["kind"] or ""] * len(part.cells)) == [one.kind for one in part.cells]
    assert column(sent, "layer") == [one.at.get("layer") for one in part.cells]
    heads = [one.at.get("head", one.at.get("kv_head")) for one in part.cells]
    assert column(sent, "head") == heads
    assert case in sweep_page(result, Story("m", title=case))


def test_numbers_that_are_not_finite_are_sent_and_shown() -> None:
    result, story, folded = swept()
    table, base = result.table.clone(), result.base.clone()
    table[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    base[1] = math.nan
    page = sweep_page(replace(result, table=table, base=base), story, folded)
    assert "<td>NaN</td>" in page
    sent = floats(packed(replace(result, table=table), story)["table"])
    assert str(sent[:3].tolist()) == "[nan, inf, -inf]"
    assert [number(value) for value in (math.nan, math.inf, -math.inf, -0.5)] == ["NaN", "∞", "−∞", "−0.5"]


def test_the_values_of_single_prompts_are_left_out_where_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, story, _ = swept()
    monkeypatch.setattr(packing, "MOST_PER_PROMPT", result.per_prompt.numel())
    assert packed(result, story)["perPrompt"] is not None
    monkeypatch.setattr(packing, "MOST_PER_PROMPT", result.per_prompt.numel() - 1)
    assert packed(result, story)["perPrompt"] is None


def test_a_cell_s_cost_is_that_of_its_cone() -> None:
    result, story, folded = swept()
    costs = packed(result, story, folded)["costs"]
    assert costs is not None
    each = [cone for cone, count in costs["runs"] for _ in range(count)]
    assert [costs["evaluations"][cone] for cone in each] == [
        folded.cone(one.name).node_evaluations for one in result.cells
    ]
    assert sum(costs["evaluations"][cone] for cone in each) == result.ledger.node_evaluations
    other = with_cells(result, IRREGULAR["a single place"])
    assert packed(other, story, folded)["costs"] is None, "cones of other cells"


def test_a_position_has_the_tokens_of_prompts_of_one_length() -> None:
    pairs = (TokenizedPair("", "", (), ("a", "b", "c")), TokenizedPair("", "", (), ("a", "x", "c")))
    assert packing.tokens(Story("m", pairs[:1])) == ["a", "b", "c"]
    assert packing.tokens(Story("m", pairs)) == ["a", "b/x", "c"]
    third = TokenizedPair("", "", (), ("a", " y", "c"))
    assert packing.tokens(Story("m", (*pairs, third))) == ["a", "b/x/…", "c"]
    assert packing.tokens(Story("m", (*pairs, TokenizedPair("", "", (), ("a",))))) == []
    assert packing.tokens(None) == []


# -- what the page says ---------------------------------------------------------------------------------


def said(page: str, section: str) -> str:
    """The text of a section, without tags."""
    found = re.search(rf'<section id="{section}".*?</section>', page, flags=re.DOTALL)
    assert found is not None
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found[0]))


def test_the_question_says_what_is_changed_what_is_measured_and_where_prompts_differ() -> None:
    page = sweep_page(*swept())
    told = said(page, "question")
    assert "runs the corrupted prompt with one site given the value that it has on the clean prompt" in told
    assert "how much likelier 7 is than 9" in told
    assert page.count('class="token differs"') == 2 * (1 + 6 + 6)
    assert "changed" in told
    assert "gives the values" in told


@pytest.mark.parametrize("corrupted", [(), ("Ann", " is", " here")])
def test_noise_on_a_subject_is_marked_in_the_corrupted_prompt(corrupted: tuple[str, ...]) -> None:
    pair = TokenizedPair("Ann is here", "", ("Ann", " is", " here"), corrupted, noised=(0,))
    result, _, _ = swept()
    assert "noise is added to the marked tokens" in said(sweep_page(result, Story("m", (pair,))), "question")
    assert "noise" not in said(sweep_page(*swept()), "question")
    page = sweep_page(result, Story("m", (pair,)))
    assert re.findall(r'class="token differs" title="position (\d+)"', page) == ["0"]


def test_many_prompts_are_folded_and_very_many_are_counted() -> None:
    result, _, _ = swept()
    pairs = tuple(TokenizedPair(f"prompt {n}", f"other {n}") for n in range(210))
    told = said(sweep_page(result, Story("m", pairs)), "question")
    assert "198 more prompts" in told
    assert "10 prompts more are not written here" in told
    assert "prompt 199" in told
    assert "prompt 200" not in told


def test_the_accounting_has_what_was_predicted_measured_and_avoided() -> None:
    result, story, folded = swept()
    told = said(sweep_page(result, story, folded), "accounting")
    plan = result.plan
    assert f"node evaluations {plan.node_evaluations:,} {plan.node_evaluations:,} ✓" in told
    assert f"{plan.full_evaluations:,}" in told
    assert f"{plan.worlds:,} forwards at 0.5 s each, the mean of 5 that were timed" in told
    off = replace(result, ledger=replace(result.ledger, node_evaluations=1))
    assert f"node evaluations {plan.node_evaluations:,} 1 ✗" in said(sweep_page(off), "accounting")


@pytest.mark.parametrize("why", ["no story", "nothing timed", "resumed"])
def test_a_speed_is_told_only_where_it_was_measured(why: str) -> None:
    result, story, _ = swept()
    given: Story | None = None
    if why == "nothing timed":
        given = replace(story, forwards_timed=0, forward_seconds=None)
    elif why == "resumed":
        given, result = story, replace(result, ledger=replace(result.ledger, resumed=2))
    page = sweep_page(result, given)
    assert "forwards at" not in said(page, "accounting")
    found = re.search(r'id="conewise-speeds">(.*?)</script>', page)
    assert found is not None
    assert set(json.loads(found[1])) == {"node evaluations", "FLOPs"}


def test_the_check_is_told_as_it_came_out_or_that_there_was_none() -> None:
    result, _, _ = swept()
    assert result.verification is not None
    assert "4 random cells agree" in said(sweep_page(result), "verification")
    failed = CellCheck(4, 3, 1, 0.5, 0.25, 1e-4)
    told = said(sweep_page(replace(result, verification=failed)), "verification")
    assert "some differ" in told
    assert "agree" not in told
    assert "3 by the original module itself, with hooks and 1 by the captured program alone" in told
    alone = CellCheck(4, 0, 4, 0.0, 0.0, 1e-4)
    told = said(sweep_page(replace(result, verification=alone)), "verification")
    assert "4 random cells agree with the captured program; the module does not show them" in told
    half = CellCheck(4, 4, 0, 0.1, 0.01, 0.02, 0.008, "float32")
    told = said(sweep_page(replace(result, verification=half)), "verification")
    assert "From the module in float32 the result is 0.01 of the metric&#39;s largest value away" in told
    told = said(sweep_page(replace(result, verification=replace(half, unchecked="no room"))), "verification")
    assert "4 random cells could not be checked" in told
    assert "says nothing here: no room" in told
    unchecked = said(sweep_page(replace(result, verification=None)), "verification")
    assert "These numbers were not verified" in unchecked
    assert "agree" not in unchecked


def test_the_origin_has_all_that_the_numbers_depend_on() -> None:
    result, story, folded = swept()
    made_at = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    told = said(sweep_page(result, story, folded, made_at=made_at), "provenance")
    assert str(result.provenance["weights"]) in told
    assert str(result.provenance["batches"][0]["base"]) in told
    assert "torch.float32" in told
    assert f"torch {torch.__version__}" in told
    assert "seed 11" in told
    assert "02 January 2026, 03:04 UTC" in told
    assert "conewise sweep small --clean &#39;&lt;script&gt;&#39;" in told


def test_products_that_round_more_are_told() -> None:
    result, story, folded = swept()
    assert "products in" not in own(sweep_page(result, story, folded))
    rounded = replace(result, origin={**result.provenance, "precision": "tf32"})
    assert "<dt>products in</dt><dd>tf32</dd>" in own(sweep_page(rounded, story, folded))
    parts = replace(result, origin={**result.provenance, "precision": "split"})
    assert "<dt>products in</dt><dd>three bfloat16 parts</dd>" in own(sweep_page(parts, story, folded))


def test_a_result_alone_has_a_page_that_says_what_is_not_known() -> None:
    result, _, _ = swept()
    page = sweep_page(result)
    assert "The prompts of this sweep are not known" in said(page, "question")
    assert "No command was recorded" in said(page, "provenance")
    assert "was not folded, so there is no graph to show" in page
    assert 'id="cone-view"' not in page


def test_a_page_without_a_source_has_no_share_of_the_way() -> None:
    result, _, _ = swept()
    story = Story("m", base="clean", source=None, patch="zero")
    page = sweep_page(replace(result, source=None, source_per_prompt=None), story)
    assert 'value="share"' not in page
    assert 'value="share"' in sweep_page(result)


def test_the_title_says_what_was_patched_unless_the_story_has_one() -> None:
    result, story, _ = swept()
    assert heading(result, None).startswith("44 sites of ")
    heads = replace(result, spreads=result.spreads[:2])
    assert heading(heads, story) == "16 attention heads and 4 MLPs of small<model> patched one at a time"
    assert heading(result, replace(story, title="Mine")) == "Mine"


def test_a_page_is_written_whole_or_the_error_says_why(tmp_path: Path) -> None:
    result, story, folded = swept()
    path = write_page(tmp_path / "deep" / "page.html", result, story, folded)
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert [one.name for one in path.parent.iterdir()] == ["page.html"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SweepError, match="cannot be written"):
        write_page(tmp_path / "file" / "page.html", result)


def test_a_result_writes_the_page_that_the_command_makes_of_it(tmp_path: Path) -> None:
    result, story, folded = swept()

    def timeless(page: str) -> str:
        return re.sub(r"\d\d \w+ \d{4}, \d\d:\d\d UTC", "", page)

    path = result.report(tmp_path / "new" / "page.html", story=story)
    assert path == tmp_path / "new" / "page.html"
    assert result.sweep is not None
    inside = inside_of(result.sweep.batch(0).base, result, story)
    assert timeless(path.read_text(encoding="utf-8")) == timeless(sweep_page(result, story, folded, inside))
    bare = replace(result, sweep=None).report(str(tmp_path / "bare.html"))
    assert timeless(bare.read_text(encoding="utf-8")) == timeless(sweep_page(result))
    assert "was not folded" in bare.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["folder", "pipe", "nowhere", "file", "file/page.html", "\0", "x" * 300])
def test_a_result_refuses_paths_as_the_command_does(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    result, _, _ = swept()
    said = "expected a path" if "\0" in name else r"the page cannot be written to .* Name another file\."
    with pytest.raises(ConewiseError, match=said):
        result.report(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
