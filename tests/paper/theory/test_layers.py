from fractions import Fraction

import pytest

from conewise.errors import TheoryError
from conewise.paper import theory
from conewise.paper.theory.sweeps import Orientation

ENDS: tuple[Orientation, Orientation] = ("output-heavy", "input-heavy")


@pytest.mark.parametrize(("layers", "heads"), [(12, 12), (24, 16)])
def test_a_transformer_is_a_uniform_profile_with_a_site_for_each_head_and_mlp(
    layers: int, heads: int
) -> None:
    """E9 is S = H + 1 sites in a layer, nine nodes of which lie below a head and one below the MLP."""
    sites = [[9] * heads + [1]] * layers
    ratio = theory.layered_ratio([7 * heads + 15] * layers, sites, terminal=1)
    assert ratio == theory.transformer_ratio(layers, heads, readout=True)


@pytest.mark.parametrize("profile", ENDS)
@pytest.mark.parametrize("q", [0, 1, 2, Fraction(1, 2), 0.7])
def test_equally_many_sites_have_the_limit_of_one(profile: Orientation, q: float) -> None:
    for sites in ENDS:
        limit = theory.sites_limit(q, 0, profile, sites)
        assert limit == theory.limit_ratio(q, profile)
        assert isinstance(limit, float) == isinstance(q, float)


def test_the_limit_is_exact_where_one_index_is_whole() -> None:
    opposite: tuple[Orientation, Orientation] = ("input-heavy", "output-heavy")
    half, three = Fraction(1, 2), Fraction(3)
    assert theory.sites_limit(three, 2, *opposite) == theory.sites_limit(3, 2, *opposite) == 35
    assert theory.sites_limit(half, 1, *opposite) == theory.sites_limit(1, half, *opposite) == Fraction(35, 8)
    assert theory.sites_limit(0.5, 1, *opposite) == 35 / 8
    assert theory.sites_limit(0.5, 1 + 1e-13, *opposite) == pytest.approx(35 / 8, rel=1e-11)


@pytest.mark.parametrize("profile", ENDS)
@pytest.mark.parametrize("sites", ENDS)
@pytest.mark.parametrize(("q", "p"), [(0, 1), (1, 0), (1, 1), (2, 1), (0, 3)])
def test_deep_profiles_tend_to_the_limit_of_sites_that_grow_with_depth(
    profile: Orientation, sites: Orientation, q: int, p: int
) -> None:
    def powers(index: int, end: Orientation, depth: int) -> list[int]:
        rising = [j**index for j in range(1, depth + 1)]
        return rising if end == "output-heavy" else rising[::-1]

    limit = theory.sites_limit(q, p, profile, sites)
    assert isinstance(limit, Fraction)
    gaps = [
        abs(Fraction(theory.layered_ratio(powers(q, profile, depth), powers(p, sites, depth))) - limit)
        for depth in (20, 40, 80)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < Fraction(1, 10) * limit


def test_more_sites_near_the_output_raise_the_ratio_and_near_the_input_lower_it() -> None:
    assert theory.sites_limit(0, 1) == 3
    assert theory.sites_limit(0, 1, sites="input-heavy") == Fraction(3, 2)
    assert theory.sites_limit(1, 1, "input-heavy", "output-heavy") == 6


def test_wide_layers_swept_everywhere_still_collapse() -> None:
    """L/(L−1) is approached when each site touches next to nothing of its own layer."""
    ratio = theory.layered_training_ratio([100] * 50, [[1] * 3] * 50)
    assert 1 < ratio < Fraction(50, 49)


@pytest.mark.parametrize(
    ("profile", "sites", "message"),
    [
        ([1, 2], [1], "`sites` has 1 entries for 2 layers"),
        ([1, 2], [0, 0], "no layer has a site"),
        ([1, 2], [[3], 1], "a part of 3 of a layer that weighs 1"),
        ([1, 2], -1, "the number of sites in layer 1 is -1"),
        ([1, 2], [0, 1], "recomputes nothing"),
    ],
)
def test_sites_that_cannot_be_are_refused(
    profile: list[int], sites: int | list[int | list[int]], message: str
) -> None:
    with pytest.raises(TheoryError, match=message):
        theory.layered_ratio(profile, sites)


def test_a_site_touches_itself_in_training() -> None:
    with pytest.raises(TheoryError, match="holds the site itself"):
        theory.layered_training_ratio([3], [[0]])
    with pytest.raises(TheoryError, match="the index q is -1"):
        theory.sites_limit(-1, 0)
