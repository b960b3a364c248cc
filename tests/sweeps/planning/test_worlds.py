"""Sets of worlds as masks and as ranges."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conewise.sweeps.planning.schedule import (
    count_of,
    mask_of_members,
    members,
    merged_order,
    places_in,
    ranges_of,
)

SETS = st.sets(st.integers(0, 40))


def mask(worlds: set[int]) -> int:
    return sum(1 << world for world in worlds)


@given(SETS)
def test_a_mask_and_its_ranges_are_the_same_worlds(worlds: set[int]) -> None:
    ranges = ranges_of(mask(worlds))
    assert members(ranges) == members(mask(worlds)) == sorted(worlds)
    assert not worlds or mask_of_members(sorted(worlds)) == mask(worlds)
    assert count_of(ranges) == len(worlds)
    assert all(one[1] < other[0] for one, other in pairwise(ranges))


@given(SETS, SETS)
def test_places_are_where_worlds_stand_among_others(part: set[int], more: set[int]) -> None:
    whole = sorted(part | more)
    assert members(places_in(mask(part), mask(set(whole)))) == [whole.index(world) for world in sorted(part)]


@given(SETS, SETS)
def test_the_merged_order_puts_worlds_in_their_own_order(first: set[int], more: set[int]) -> None:
    second = more - first
    behind = [*sorted(first), *sorted(second)]
    order = merged_order(mask(first), mask(second))
    places = list(range(len(behind))) if order is None else [p for a, b in order for p in range(a, b)]
    assert [behind[place] for place in places] == sorted(behind)
    assert (order is None) == (behind == sorted(behind))
