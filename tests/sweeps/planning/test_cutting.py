"""The cut of worlds into passes: all of them once, in order, each pass within the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.errors import SweepError
from conewise.sweeps.planning.schedule import cut_worlds, stored_pieces


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_every_world_is_in_one_pass_that_fits(groups: list[int], data: st.DataObject) -> None:
    worlds = sum(groups)
    starts = data.draw(st.lists(st.integers(0, 5), min_size=worlds, max_size=worlds))
    budget = data.draw(st.integers(30, 200))
    found = cut_worlds(groups, starts, budget, lambda _, count, start: 10 + count * (20 - start))
    assert [world for first, count, _ in found for world in range(first, first + count)] == [*range(worlds)]
    ends = {sum(groups[: number + 1]) for number in range(len(groups))}
    assert ends <= {first + count for first, count, _ in found}, "no pass has worlds of two groups"
    for first, count, start in found:
        assert start == min(starts[first : first + count])
        assert 10 + count * (20 - start) <= budget


def test_worlds_are_cut_into_as_few_passes_as_fit() -> None:
    def peak(_: int, count: int, __: int) -> int:
        return 10 * count

    assert cut_worlds([10], [0] * 10, 100, peak) == [(0, 10, 0)]
    assert cut_worlds([10], [0] * 10, 99, peak) == [(0, 5, 0), (5, 5, 0)]
    assert [count for _, count, _ in cut_worlds([10], [0] * 10, 30, peak)] == [3, 3, 3, 1]


def test_one_world_that_takes_too_much_is_told_with_the_least_that_would_do() -> None:
    with pytest.raises(SweepError, match=r"one world alone takes 70 B.*max_memory=70") as error:
        cut_worlds([4], [0] * 4, 60, lambda first, count, _: 70 if first == 2 else 50 * count)
    (argument,) = error.value.arguments
    assert (argument.name, argument.value) == ("max_memory", 70)


def test_a_stored_cut_is_kept() -> None:
    assert stored_pieces((2, 3, 1), [4, 2, 5, 3, 3, 1]) == [(0, 2, 2), (2, 3, 3), (5, 1, 1)]
