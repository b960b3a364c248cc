"""What people see when they name a thing at a prompt: a line or a few; in a notebook, small tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import conewise as cw
from conewise import templates as markup
from conewise.checks.verify import Verification
from conewise.model import Model
from conewise.sweeps.findings import finding
from conewise.sweeps.result import Result
from tests.sweeps.small import HEADS, LAYERS, model, prompts, sweep_over

TAGS = {"div", "strong", "table", "tr", "th", "td", "details", "summary", "span"}
DRAWN = {"svg", "g", "rect", "text", "title", "path", "circle", "polyline", "image"}
FETCHING = {"src", "href", "xlink:href", "srcset", "action"}


class Page(HTMLParser):
    """The text of a piece of HTML, its tables, and whether every tag is one of ours and is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS | DRAWN
        # Nothing that runs, and nothing that is fetched.
        assert tag in DRAWN or {name for name, _ in attrs} <= {"style", "title"}
        assert all(str(to).startswith("data:") for name, to in attrs if name in FETCHING)
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in {"td", "th"}:
            self.rows[-1][-1] += data

    def __contains__(self, words: str) -> bool:
        return words in "".join(self.text)


@pytest.fixture(scope="module")
def small() -> Model:
    return model()


@pytest.fixture(scope="module")
def result(small: Model) -> Result:
    return sweep_over(small).run(verify=3)


# -- HTML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        markup.heading("<b>", "a & b"),
        markup.verdict(True, "<b> a & b"),
        markup.table([("<b>", "a & b")]),
        markup.table([("1", "2")], ("<b>", "a & b")),
    ],
)
def test_text_stays_text(made: str) -> None:
    assert "<b>" in Page(made)
    assert "a & b" in Page(made)


def test_numbers_are_aligned_right_and_words_left() -> None:
    made = markup.table([("z", "+1.5")], ("site", "effect"), numbers=(1,))
    assert made.count("text-align:left") == made.count("text-align:right") == 2
    assert '<td style="text-align:right;white-space:nowrap">+1.5</td>' in made


def test_a_verdict_is_told_by_a_sign_too() -> None:
    assert "✓" in markup.verdict(True, "held")
    assert "✗" in markup.verdict(False, "failed")


# -- each thing ----------------------------------------------------------------------------------


def test_what_was_loaded_is_named_in_a_line(small: Model) -> None:
    loaded = Model._loaded(small.module, None, "small", "made for a test")
    weights = sum(weight.numel() for weight in loaded.module.parameters())
    told = f"GPT2LMHeadModel of {weights:,} weights, and no tokenizer (made for a test)"
    assert repr(loaded) == f"Model small: {told}"
    assert told in Page(loaded._repr_html_())
    assert not loaded.is_captured


def test_a_model_says_what_it_is(small: Model) -> None:
    assert repr(small).startswith("Model of GPT2LMHeadModel: ")
    assert "\n" not in repr(small)
    page = Page(small._repr_html_())
    rows = dict(page.rows)
    assert rows["operations"] == f"{len(small.program.records):,}"
    assert rows["inputs"] == "input_ids"
    assert "logits" in rows["outputs"]
    assert rows["batch size"] == "any"
    assert rows["kinds of sites"] == ", ".join(small.sites.kinds)


def test_the_sites_are_a_table_with_a_row_for_each_kind(small: Model) -> None:
    page = Page(small.sites._repr_html_())
    assert page.rows[0][:3] == ["kind", "layers", "heads"]
    assert [row[0] for row in page.rows[1:]] == list(small.sites.kinds)
    (z,) = (row for row in page.rows if row[0] == "z")
    assert z[1:3] == [f"0-{LAYERS - 1}", str(HEADS)]
    assert f"{len(small.sites):,} sites" in page


def test_a_run_says_what_it_was_given(small: Model) -> None:
    run = small.run(input_ids=prompts(1, 2))
    assert repr(run) == "Run of GPT2LMHeadModel on input_ids (2, 6)"
    page = Page(run._repr_html_())
    assert page.rows[-1] == ["input_ids", "(2, 6)", "torch.int64"]
    likeliest = run.logits[0, -1].softmax(-1).max()
    assert page.rows[0][1].strip() == f"{float(likeliest):.1%}"
    assert "next token of prompt 2" in page


def test_a_world_says_what_is_patched_and_with_what(small: Model) -> None:
    def doubled(value: Any) -> Any:
        return value * 2

    with small.run(input_ids=prompts(1, 2)).fork() as outer:
        assert "Nothing is patched." in Page(outer._repr_html_())
        outer.patch(("mlp_out", 0), "zero")
        with outer.fork() as world:
            world.patch(cw.site("z", layer=1, head=0), doubled)
            page = Page(world._repr_html_())
            assert page.rows[1:3] == [
                ["mlp_out[layer=0]", "a tensor of shape (2, 6, 16)"],
                ["z[layer=1, head=0]", "the function doubled"],
            ]
            assert page.rows[3] == ["next token before", "", "next token patched", ""]


def test_a_world_that_is_shown_has_computed_no_more_than_before(small: Model) -> None:
    with small.run(input_ids=prompts(1, 2)).fork() as world:
        world.patch(("mlp_out", 0), "zero")
        before = repr(world.ledger)
        world._repr_html_()
        assert repr(world.ledger) == before


def test_a_plan_is_one_line_and_a_table(small: Model) -> None:
    plan = sweep_over(small).plan()
    assert repr(plan).startswith(f"SweepPlan of 6 worlds: {plan.node_evaluations:,} node evaluations (ρ = ")
    assert "\n" not in repr(plan)
    rows = Page(plan._repr_html_()).rows
    assert rows[0][1].strip() == f"{plan.node_evaluations:,}"
    assert rows[2:] == [list(row) for row in plan.rows()]
    several = replace(plan, batches=3, seconds=None)
    assert "6 worlds for each of 3 batches" in repr(several)
    assert "about" not in repr(several)


def test_a_result_shows_its_numbers_and_whether_they_were_checked(result: Result) -> None:
    cell, effect, value = result.strongest()[0]
    page = Page(result._repr_html_())
    assert page.text[0].strip() == finding(result)
    assert page.rows[0] == ["site", "effect", "value"]
    assert page.rows[1] == [cell.name, f"{effect:+.6g}", f"{value:.6g}"]
    assert f"{cell.name}: {effect:+.4g} ({value:.4g})" in page  # under the pointer
    assert f"base {float(result.base[0]):.6g}" in page
    assert str(result.verification) in page
    assert "random cells" not in Page(replace(result, verification=None)._repr_html_())


def test_a_trace_shows_its_ends(small: Model) -> None:
    trace = small.causal_trace(prompts(1), subject=[1, 2], metric=cw.prob(3), n=2).run()
    assert repr(trace).startswith("Trace of prob over 2 × 6 (layer, pos): clean ")
    page = Page(trace._repr_html_())
    assert f"clean {trace.clean:.4g}, corrupted {trace.corrupted:.4g}" in page
    assert len(page.rows) == 1 + 5


def test_a_check_says_whether_it_passed(result: Result) -> None:
    check = result.verification
    assert check is not None
    assert repr(check).startswith("CellCheck passed: 3 random cells ")
    assert "✓" in Page(check._repr_html_())
    failed = replace(check, relative=1.0)
    assert repr(failed).startswith("CellCheck FAILED: ")
    assert "✗" in Page(failed._repr_html_())


def test_a_verification_says_what_held() -> None:
    held = Verification(3, 1, True, 0.0, 1e-7, 1e-5, ("the sequence length is fixed in this capture",))
    assert repr(held).startswith("Verification passed: 3 random inputs, 1 outputs each; the graph equals")
    assert "\n" not in repr(held)
    page = Page(held._repr_html_())
    assert "✓" in page
    assert "the sequence length is fixed in this capture" in page
    assert "✗" in Page(replace(held, bitwise=False, worst=0.5)._repr_html_())


# -- places, as they are written -----------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        lambda: cw.site("z", layer=2, head=1),
        lambda: cw.site("mlp_out", layer=0, pos=slice(1, 3)),
        lambda: cw.site("z", layer=0, stack="decoder", head=[0, 2]),
        lambda: cw.site("lm_head"),
        lambda: cw.sites("z", layer=":", head=":"),
        lambda: cw.sites("resid_pre", layer=[1, 2], pos=-1, stack="encoder"),
        lambda: cw.sites("z", layer=":") + cw.sites("mlp_out", layer="2:5"),
    ],
)
def test_a_place_reads_as_it_is_written(made: Callable[[], Any]) -> None:
    given = made()
    again = eval(repr(given), {"site": cw.site, "sites": cw.sites})
    assert again == given
    assert repr(again) == repr(given)


def test_long_lists_are_counted() -> None:
    selectors = cw.sites("z", layer=0) + [("mlp_out", layer) for layer in range(500)]
    assert repr(selectors) == "sites('z', layer=0) + [500 cells by name]"


def test_cells_and_spreads_are_short(result: Result) -> None:
    assert repr(result.cells[1]) == "Cell(z[layer=0, head=1])"
    assert repr(result.spreads[0]) == "Spread of z over 2 × 2 cells (layer, head)"


# -- graphs and worlds ---------------------------------------------------------------------------


def test_a_plan_of_a_demand_names_its_first_sites() -> None:
    graph = cw.Graph()
    graph.source("x", 1.0)
    for number in range(9):
        graph.node(f"h{number}", lambda x: x + 1, ["x" if not number else f"h{number - 1}"])
    world = cw.World(graph)
    plan = world.plan("h8")
    assert (
        repr(plan) == "Plan(9 sites to compute, 9 of them in the world itself: h0, h1, h2, h3, h4, h5, ...)"
    )
    world.demand("h8")
    assert repr(world.plan("h8")) == "Plan(nothing to compute)"
