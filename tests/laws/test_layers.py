"""The layered forms with several sites in a layer: what they say is what the engine's ledger shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import conewise as cw
from conewise.paper import theory
from tests.laws.cost_scenes import bill
from tests.laws.refuting import is_refuted
from tests.laws.scenes import Mix, fresh_value


@dataclass(frozen=True)
class Stack:
    """A chain of layers, sites anywhere in them (by their place in the layer), and a terminal chain."""

    profile: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    terminal: int

    def graph(self) -> tuple[cw.Graph, list[str]]:
        graph = cw.Graph()
        before = graph.source("x", 1)
        for layer, width in enumerate([*self.profile, self.terminal]):
            for place in range(width):
                before = graph.node(f"{layer}.{place}", Mix(), [before])
        return graph, [f"{i}.{place}" for i, here in enumerate(self.places) for place in here]

    @property
    def remainders(self) -> list[list[int]]:
        return [
            [width - 1 - place for place in here]
            for width, here in zip(self.profile, self.places, strict=True)
        ]

    def ratio(self) -> Fraction:
        """ρ from the ledger: every site patched in a fork, and everything demanded."""
        graph, sites = self.graph()
        base = cw.World(graph)
        full, spent = Fraction(bill(base, None)), Fraction(0)
        for site in sites:
            with base.fork() as fork:
                fork.patch(site, fresh_value())
                spent += Fraction(bill(fork, None))
        return len(sites) * full / spent


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    profile = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    places = [draw(st.lists(st.integers(0, width - 1), max_size=3)) for width in profile]
    places[0] = places[0] or [0]
    return Stack(tuple(profile), tuple(map(tuple, places)), draw(st.integers(1, 2)))


@given(stacks())
def test_several_sites_in_a_layer_have_the_ratio_of_their_graph(stack: Stack) -> None:
    measured = stack.ratio()
    assert theory.layered_ratio(stack.profile, stack.remainders, terminal=stack.terminal) == measured
    assert theory.sweep_ratio(*stack.graph()) == measured


@given(stacks(), st.integers(1, 4))
def test_equally_many_sites_at_the_ends_of_layers_are_one_in_each(stack: Stack, several: int) -> None:
    ends = Stack(stack.profile, tuple((width - 1,) * several for width in stack.profile), stack.terminal)
    one = theory.sweep_ratio(stack.profile, terminal=stack.terminal)
    assert theory.layered_ratio(stack.profile, several, terminal=stack.terminal) == one == ends.ratio()
    assert theory.layered_training_ratio(stack.profile, several, terminal=stack.terminal) == 1


@given(stacks(), st.integers(1, 3))
def test_where_in_their_layers_sites_stand_moves_the_ratio_by_little(stack: Stack, several: int) -> None:
    """1/ρ grows by at most 1/L, and stays if all sites are at the ends."""
    depth = len(stack.profile)
    starts = [[width - 1] * several for width in stack.profile]
    last = 1 / Fraction(theory.layered_ratio(stack.profile, several, terminal=stack.terminal))
    first = 1 / Fraction(theory.layered_ratio(stack.profile, starts, terminal=stack.terminal))
    assert last <= first <= last + Fraction(1, depth)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_branches_of_wide_layers_have_the_training_ratio_of_their_graph(
    widths: list[int], data: st.DataObject
) -> None:
    """Layers as in E5: w branches, folded one by one; a sweep of some of the branches."""
    graph = cw.Graph()
    last = graph.source("x", 1)
    sites, own = [], []
    for layer, width in enumerate(widths):
        branches = [graph.node(f"{layer}.{b}", Mix(), [last]) for b in range(width)]
        swept = data.draw(st.lists(st.integers(0, width - 1), max_size=3))
        swept = swept or ([0] if layer == 0 else [])
        last = branches[0]
        for step, branch in enumerate(branches[1:], start=1):
            last = graph.node(f"{layer}.fold{step}", Mix(), [last, branch])
        sites += [branches[b] for b in swept]
        # Itself, and the folds from the one that takes it in to the last.
        own.append([1 + width - max(b, 1) for b in swept])
    graph.node("output", Mix(), [last])
    predicted = theory.layered_training_ratio([2 * w - 1 for w in widths], own, terminal=1)
    assert predicted == theory.training_ratio(graph, sites)


# -- that a law can fail ------------------------------------------------------------------------


def _sites_cancel(stack: Stack) -> Fraction | float:
    """One site in each layer, however many there are: right only if all layers have equally many."""
    return theory.sweep_ratio(stack.profile, terminal=stack.terminal)


def _remainders_vanish(stack: Stack) -> Fraction | float:
    """At the end of its layer, wherever the site stands: right only in the limit."""
    counts = [len(here) for here in stack.places]
    return theory.layered_ratio(stack.profile, counts, terminal=stack.terminal)


@pytest.mark.parametrize("wrong", [_sites_cancel, _remainders_vanish])
def test_a_wrong_layered_form_is_refuted(wrong: Callable[[Stack], Fraction | float]) -> None:
    assert is_refuted(stacks(), lambda stack: wrong(stack) != stack.ratio(), examples=100), wrong.__doc__
