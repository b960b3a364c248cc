"""The order: local changes, and labels that grow strictly whatever is done."""

from __future__ import annotations

import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conewise.reactive.journal import Journal
from conewise.reactive.table import Order


def order_of(count: int) -> Order:
    order = Order(Journal())
    for _ in range(count):
        order.append()
    return order


@pytest.mark.parametrize("anchor", [-1, 0, 5, 9])
def test_thousands_of_insertions_at_one_place_keep_the_labels_growing(anchor: int) -> None:
    order = order_of(10)
    behind = list(order)
    place = behind.index(anchor) + 1 if anchor >= 0 else 0
    fresh = []
    for count in range(5_000):
        (node,) = order.new(1)
        order.place_after(anchor, [node])
        fresh.append(node)
        if count % 500 == 0:
            order.check()
    order.check()
    assert list(order) == behind[:place] + fresh[::-1] + behind[place:]


def test_thousands_of_insertions_each_after_the_last_keep_the_labels_growing() -> None:
    order = order_of(3)
    anchor = 0
    for _ in range(5_000):
        (node,) = order.new(1)
        order.place_after(anchor, [node])
        anchor = node
    order.check()
    assert list(order) == [0, *range(3, 5_003), 1, 2]


def test_a_thousand_runs_in_the_middle_of_each_other_keep_the_labels_growing() -> None:
    order, dice = order_of(2), random.Random(1)
    for _ in range(1_000):
        run = order.new(dice.randint(1, 40))
        order.place_after(dice.choice([0, run[0] - 1, run[0] // 2]), run)
    order.check()
    assert len(list(order)) == len(order) == len(order.labels)


def test_insertions_at_one_place_cost_about_as_many_label_moves_as_there_are_insertions() -> None:
    """Amortised: what is relabelled leaves room for those that come."""
    order = order_of(4_000)
    moved = 0
    for _ in range(2_000):
        (node,) = order.new(1)
        before = list(order.labels)
        order.place_after(1_999, [node])
        moved += sum(map(operator.ne, before, order.labels))
    assert moved < 40 * 2_000


@given(st.lists(st.tuples(st.sampled_from(["place", "move", "remove", "append"]), st.randoms()), max_size=60))
def test_the_order_is_the_list_that_the_same_steps_make_of_a_list(
    steps: list[tuple[str, random.Random]],
) -> None:
    order, model = order_of(3), [0, 1, 2]
    for action, dice in steps:
        anchor = dice.choice([-1, *model])
        at = model.index(anchor) + 1 if anchor >= 0 else 0
        if action == "place":
            run = order.new(dice.randint(0, 3))
            order.place_after(anchor, run)
            model[at:at] = run
        elif action == "append":
            model.append(order.append())
        elif action == "remove" and model:
            order.remove(gone := dice.choice(model))
            model.remove(gone)
        elif action == "move":
            others = [node for node in model if node != anchor]
            run = dice.sample(others, min(len(others), dice.randint(0, 3)))
            order.move_after(anchor, run)
            model = [node for node in model if node not in run]
            at = model.index(anchor) + 1 if anchor >= 0 else 0
            model[at:at] = run
        order.check()
        assert list(order) == model
        assert [order.before(node) for node in model] == [-1, *model[:-1]][: len(model)]
