import re

import pytest
from plotly.offline import get_plotlyjs

from conewise.experiments import registry
from conewise.experiments.result import Result, Row
from conewise.report.figures import figure
from conewise.report.report import page
from conewise.report.tables import as_csv, measured
from tests.experiments.quick import quick


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_experiment_has_a_figure_with_named_axes(name: str) -> None:
    drawn = figure(quick(name)).to_plotly_json()
    assert drawn["data"]
    assert drawn["layout"]["xaxis"]["title"]["text"]
    assert drawn["layout"]["yaxis"]["title"]["text"]


def test_the_page_holds_all_it_needs_and_plotly_once() -> None:
    written = page([quick(name) for name in registry.NAMES])
    library = get_plotlyjs()
    assert written.count(library) == 1
    own = written.replace(library, "")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", own)
    assert "@import" not in own
    assert "prefers-color-scheme: dark" in own
    for name in registry.NAMES:
        assert f'<section id="{name}">' in own


def test_the_page_says_what_differs_and_escapes_what_it_shows() -> None:
    bad = Row("<script>", None, 1, 2, facts={"kind": "added", "ratio": "ρ", "span": 1, "y": 0.0})
    result = Result("skips", "<b>", "a & b", [bad], "c", series={"y": [], "forward": [], "training": []})
    written = page([result]).replace(get_plotlyjs(), "")
    assert "Some exact figures differ" in written
    assert "<td>&lt;script&gt;</td>" in written
    assert "a &amp; b" in written


def test_an_interval_is_shown_with_its_figure() -> None:
    row = Row("slope", None, None, 0.5, exact=False, facts={"low": 0.25, "high": 0.75})
    assert measured(row) == "0.5000 [0.2500, 0.7500]"


def test_a_csv_has_a_column_for_every_fact_of_every_row() -> None:
    rows = [Row("one", "1", 1, 1, facts={"a": 1}), Row("two", None, 2, 2, facts={"b": 2})]
    assert as_csv(Result("e4", "", "", rows, "")).splitlines() == [
        "name,a,paper,predicted,measured,unit,exact,match,b",
        "one,1,1,1,1,,True,True,",
        "two,,,2,2,,True,True,2",
    ]
