from fractions import Fraction

import pytest

from conewise.errors import UnknownExperimentError
from conewise.paper import experiments
from conewise.paper.experiments.result import Result, Row, plain, prints_as
from tests.paper.experiments.quick import quick


@pytest.mark.parametrize(
    ("value", "printed", "agrees"),
    [
        (Fraction(20057, 10000), "2.0057", True),
        (2.00574, "2.0057", True),
        (2.00576, "2.0057", False),
        (Fraction(1, 3), "0.3333", True),
        (463, "463", True),
        (464, "463", False),
        (1.7943, "1.79", True),
        (1.7955, "1.79", False),
    ],
)
def test_a_figure_is_compared_in_the_digits_that_are_printed(
    value: int | float | Fraction, printed: str, agrees: bool
) -> None:
    assert prints_as(value, printed) is agrees


def test_a_row_matches_only_when_all_three_agree() -> None:
    assert Row("r", 2, 2, "2.0").match is True
    assert Row("r", 2, 2).match is True
    assert Row("r", 3, 2, "2.0").match is False
    assert Row("r", 2, 2, "3.0").match is False
    assert Row("r", 2, 4, "3.0", exact=False).match is None
    assert Row("r", 2, 2.5, "2.0", paper_predicts=True).match is True
    assert Row("r", 2, 2.5, "2.5", paper_predicts=True).match is False


def test_one_row_that_differs_makes_the_result_differ_and_a_timing_does_not() -> None:
    good, bad, timing = Row("r", 1, 1), Row("r", 1, 2), Row("r", 1, 2, "9", exact=False)
    assert Result([good, timing], name="e4").all_match
    assert not Result([good, bad], name="e4").all_match


def test_fractions_become_the_nearest_numbers_that_json_has() -> None:
    assert plain(Fraction(4, 2)) == 2
    assert isinstance(plain(Fraction(4, 2)), int)
    assert plain(Fraction(1, 3)) == 1 / 3
    assert plain(None) is None


@pytest.mark.parametrize("name", experiments.NAMES)
def test_every_result_has_what_a_reader_of_its_json_needs(name: str) -> None:
    shown = quick(name).as_dict()
    assert {"rows", "all_match", "claim", "compared", "seed", "versions"} <= shown.keys()
    assert all(shown[text] for text in ("title", "claim", "compared", "notes"))
    assert shown["versions"]["python"]
    assert shown["rows"]
    for row in shown["rows"]:
        assert {"name", "paper", "predicted", "measured", "match"} <= row.keys()
        assert row["measured"] is not None


def test_names_are_chosen_in_the_order_of_the_paper_and_all_is_every_one() -> None:
    assert experiments.choose(["e7", "e4", "e7"]) == ("e4", "e7")
    assert experiments.choose(["all"]) == experiments.choose([]) == experiments.NAMES


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        UnknownExperimentError, match=r"no experiment 'e6'.*locality, e4, e5, e7, drift, compiled, e9"
    ):
        experiments.choose(["e4", "e6"])
