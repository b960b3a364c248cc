import json
import re
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from conewise.paper import experiments
from conewise.paper.experiments.figures import figure
from conewise.paper.experiments.page import as_csv, figure_page, measured, page, taken
from conewise.paper.experiments.result import Result, Row
from conewise.report.document import policy
from tests.paper.experiments.quick import quick


@pytest.mark.parametrize("name", experiments.NAMES)
def test_every_experiment_has_a_figure_with_named_axes(name: str) -> None:
    drawn = figure(quick(name)).to_plotly_json()
    assert drawn["data"]
    assert drawn["layout"]["xaxis"]["title"]["text"]
    assert drawn["layout"]["yaxis"]["title"]["text"]


def test_the_page_holds_all_it_needs_and_plotly_once() -> None:
    written = page([quick(name) for name in experiments.NAMES])
    library = get_plotlyjs()
    assert written.count(library) == 1
    own = written.replace(library, "")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", own)
    assert "@import" not in own
    assert "prefers-color-scheme: dark" in own
    for name in experiments.NAMES:
        assert f'<section id="{name}">' in own


def test_every_page_runs_its_own_scripts_alone_by_their_hash() -> None:
    """The same policy as the page of a sweep has: nothing is fetched, and no script runs but these."""
    (result,) = [quick("e7")]
    for written in (page([result]), figure_page(result)):
        found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', written)
        assert found is not None
        scripts = re.findall(r"<script>(.*?)</script>", written, flags=re.DOTALL)
        assert scripts[0] == get_plotlyjs()
        assert len(scripts) == 2
        assert found[1] == policy(scripts)
        assert re.findall(r"<script (?!type=\"application/json\")", written) == []
        drawn = re.search(r'id="conewise-figures">(.*?)</script>', written)
        assert drawn is not None
        assert json.loads(drawn[1])["e7"] == json.loads(figure(result).to_json())


def test_a_page_of_an_earlier_version_is_known_as_ours(tmp_path: Path) -> None:
    assert taken(tmp_path) is None
    (tmp_path / "tables").mkdir()
    assert taken(tmp_path) == "tables"
    for written in (page([quick("e7")]), "<title>Conewise: the paper's claims, reproduced</title>"):
        (tmp_path / "index.html").write_text(written, encoding="utf-8")
        assert taken(tmp_path) is None
    (tmp_path / "index.html").write_text("mine", encoding="utf-8")
    assert taken(tmp_path) == "index.html"


def test_the_page_says_what_differs_and_escapes_what_it_shows() -> None:
    bad = Row("<script>", 1, 2, facts={"kind": "added", "ratio": "ρ", "span": 1, "y": 0.0})
    result = Result(
        [bad],
        name="skips",
        title="<b>",
        claim="a & b",
        compared="c",
        series={"y": [], "forward": [], "training": []},
    )
    written = page([result]).replace(get_plotlyjs(), "")
    assert "Some exact figures differ" in written
    assert "<td>&lt;script&gt;</td>" in written
    assert "a &amp; b" in written


def test_an_interval_is_shown_with_its_figure() -> None:
    row = Row("slope", None, 0.5, exact=False, facts={"low": 0.25, "high": 0.75})
    assert measured(row) == "0.5000 [0.2500, 0.7500]"


def test_a_csv_has_a_column_for_every_fact_of_every_row() -> None:
    rows = [Row("one", 1, 1, "1", facts={"a": 1}), Row("two", 2, 2, facts={"b": 2})]
    assert as_csv(Result(rows, name="e4")).splitlines() == [
        "name,a,paper,predicted,measured,unit,exact,match,b",
        "one,1,1,1,1,,True,True,",
        "two,,,2,2,,True,True,2",
    ]


def test_a_cell_of_csv_that_a_spreadsheet_would_compute_is_a_text_and_numbers_stay() -> None:
    rows = [Row("=1+2", -1, -0.5, facts={"a": "+b", "c": "-d", "e": "f=g"})]
    (_, line) = as_csv(Result(rows, name="e4")).splitlines()
    assert line.startswith("'=1+2,'+b,'-d,f=g,,-1,-0.5,")
