"""Greedy searches: edges removed one by one, each for good if it can be spared; and what guessing gains.

Removing an edge puts a correction, one node, behind its reader's site. So the worlds are a sequence of
changes that stay, and what a trial costs depends on the order of visits and on what was removed before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import Weight, shown
from conewise.paper.theory.weights import Amount, Demand, Scale, Weights, amount, total, wanted
from conewise.reactive.graph import Graph, Site

MAX_CANDIDATES: Final = 100_000
"""So many candidates, and stacks so wide, are worked out: powers of a chance grow long."""
MAX_BITS: Final = 200_000
"""The greatest length of a power of a chance, in bits."""


@dataclass(frozen=True, slots=True)
class GreedyCost:
    """The cost of each trial of a search, and the part of it that is corrections behind its reader."""

    costs: tuple[Weight, ...]
    surplus: Weight

    @property
    def total(self) -> Weight:
        """The cost of the search, one trial at a time."""
        return total(self.costs).weight("the cost")


def greedy_cost(
    graph: Graph,
    readers: Sequence[Site],
    visits: Iterable[int],
    kept: Collection[int] = (),
    demand: Demand = None,
    weights: Weights | None = None,
    correction: Weight = 1,
) -> GreedyCost:
    """The cost of a greedy search, trial by trial, by the order of visits and by what turns out to be kept.

    docs/beyond-the-paper.md#greedy-search. `readers` are their sites, one entry for each reader; `visits`
    names the reader of each edge that is tried, in order, by its place in that list; `kept` are the trials,
    counted from 0, after which the edge stays. A trial at s costs

        correction + |cone(s)| + correction · (readers that lost edges below s, or at s and earlier)

    of which only what the support of `demand` has counts.
    """
    table = expect.graph(graph).table
    sites = graph.numbers(expect.sites(readers, "the list of readers"))
    line = _expect_places(visits, len(sites), "the visits", "a reader's place in the list")
    staying = set(_expect_places(kept, len(line), "what is kept", "a trial's number"))
    one, scale = amount(correction, "`correction`"), Scale(graph, weights)
    support = wanted(graph, expect.demand(demand))
    cones = {site: table.cone((site,)) for site in set(sites)}
    seen = cones if support is None else {site: cone & support for site, cone in cones.items()}
    behind = {site: scale(nodes) for site, nodes in seen.items()}
    # When a reader first lost an edge. Of two corrections at one site the later one comes first.
    since: dict[int, int] = {}
    costs: list[Amount] = []
    surplus = 0 * (one + scale(()))
    for trial, reader in enumerate(line):
        site = sites[reader]
        met = sum(
            sites[other] in cones[site]
            or (sites[other] == site and other != reader and when < since.get(reader, trial))
            for other, when in since.items()
            if support is None or seen[sites[other]]
        )
        surplus += met * one
        is_wanted = support is None or bool(seen[site])  # else nobody asks for the correction
        costs.append(behind[site] + (is_wanted + met) * one)
        if trial not in staying:
            since.setdefault(reader, trial)
    return GreedyCost(
        tuple(cost.weight("the cost of a trial") for cost in costs), surplus.weight("the surplus")
    )


@dataclass(frozen=True, slots=True)
class Speculation:
    """The work of a search with guesses, on average.

    `worlds` are evaluated in so many `stacks`; those `in_vain` rest on a wrong guess, and are thrown away.
    """

    stacks: Fraction | float
    worlds: Fraction | float
    in_vain: Fraction | float


def speculation(candidates: int, width: int, right: Weight) -> Speculation:
    """Return the work of deciding n candidates in line, W at once, if a guess is right with the chance p.

    docs/beyond-the-paper.md#greedy-search. A stack has the current world, and one for each of the next W
    candidates, which assumes that those before it are decided as guessed; the first wrong guess ends it. With
    W = 1 there is nothing to guess, and each candidate is one world. A stack begins at candidate k = aW + b,
    0 ≤ b < W, with the chance

        u = (1−p)·(1−p^((a+1)W))/(1−p^W) for b > 0,    (1−p)·(1−p^(aW))/(1−p^W) + p^(aW) for b = 0

    and has min(W, n−k) + 1 worlds. Exact for an exact p.
    """
    n, W = _expect_bounded(candidates, "the number of candidates"), _expect_bounded(width, "the width")
    chance = _expect_chance(right)
    p = Fraction(chance.exact)
    if n * p.denominator.bit_length() > MAX_BITS:
        raise TheoryError(
            f"the chance {shown(right)}, to the power of {n:,}, is too long a number to be worked out. Give "
            "a fraction of small numbers, as Fraction(9, 10), or fewer candidates."
        )
    if W == 1:
        return Speculation(*(Amount(count, chance.is_float).ratio for count in (n, n, 0)))
    whole, rest = divmod(n, W)
    # Where every guess is right, the last stack has as many worlds fewer as candidates are missing in it.
    certain = Fraction(-(-n // W)), Fraction(-n % W)
    stacks, missing = certain if p == 1 else _uncertain(p, W, whole, rest)
    worlds = (W + 1) * stacks - missing
    found = (stacks, worlds, worlds - stacks - n)
    return Speculation(*(Amount(one, chance.is_float).ratio for one in found))


def _uncertain(p: Fraction, W: int, whole: int, rest: int) -> tuple[Fraction, Fraction]:
    """The stacks, and how many worlds fewer than W + 1 each the last ones have, of whole·W + rest candidates.

    Both are sums of u(k); the second has the weight W − (n − k) for the last W − 1 candidates.
    """
    x = p**W
    end = x**whole
    share = (1 - p) / (1 - x)
    powers = (1 - end) / (1 - x)
    before, first, within = share * (1 - end), share * (1 - end) + end, share * (1 - end * x)
    stacks = (W - 1) * share * (whole - x * powers) + share * (whole - powers) + powers
    left = W - rest
    missing = before * (left * (left - 1) // 2 if whole else 0)
    if rest:
        stacks += first + (rest - 1) * within
        missing += first * left + within * ((rest - 1) * (2 * W - rest) // 2)
    return stacks, missing


def speculation_gain(width: int, right: Weight, launch: Weight, world: Weight = 1) -> Fraction | float:
    """Return the speedup of deciding a long line W at once, over one by one.

    docs/beyond-the-paper.md#greedy-search. A stack takes `launch`, c, and `world`, u, for each of its worlds;
    it decides (1−p^W)/(1−p) candidates on average:

        (c + u)·(1−p^W)/(1−p) / (c + (W+1)·u)

    1 for W = 1. Below 1 where guesses are wrong too often, or worlds take much of the time.
    """
    W, p = _expect_bounded(width, "the width"), _expect_chance(right)
    c, u = _expect_seconds(launch, world)
    decided = W * p if p == 1 else (1 - p**W) / (1 - p)  # 1 + p + ... + p^(W−1)
    return ((c + u) / (c + (W + 1) * u if W > 1 else c + u) * decided).ratio


def best_width(right: Weight, launch: Weight, world: Weight = 1) -> int:
    """The width with the greatest gain, the smallest of several; 1 where guessing gains nothing.

    docs/beyond-the-paper.md#greedy-search. Of the widths from 2 on it is the first at which one world more
    costs more than it brings: p^W·(c + (W+1)·u)·(1−p) ≤ u·(1−p^W). Before it the gain grows, behind it falls.
    """
    p = Fraction(_expect_chance(right).exact)
    c, u = (Fraction(one.exact) for one in _expect_seconds(launch, world))

    def is_wide(W: int) -> bool:
        part, whole = p.numerator**W, p.denominator**W  # p^W, without a search for common factors
        brings = (c + (W + 1) * u) * (1 - p)
        most: int = u.numerator * brings.denominator * (whole - part)
        return bool(part * brings.numerator * u.denominator <= most)

    if p == 1 or (u == 0 and p > 0):
        why = "every guess is right" if p == 1 else "a world more takes no time"
        raise TheoryError(f"{why}, so that the gain grows with the width, and no width is the best.")
    low, high = 1, 2
    while not is_wide(high):
        if high >= MAX_CANDIDATES:
            raise TheoryError(
                f"the best width is above {MAX_CANDIDATES:,}: guesses are right with a chance of "
                f"{shown(right)}, and a launch takes {shown(launch)} where a world takes {shown(world)}."
            )
        low, high = high, min(2 * high, MAX_CANDIDATES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_wide(middle) else (middle, high)
    return high if speculation_gain(high, p, c, u) > 1 else 1


def speculation_bound(right: Weight, launch: Weight, world: Weight = 1) -> Fraction | float:
    """Return the bound on the gain of any width: the smaller of 1/(1−p) and 1 + c/u.

    docs/beyond-the-paper.md#greedy-search. No stack decides more than its guesses hold, and each world that
    is decided has to be computed.
    """
    p, (c, u) = _expect_chance(right), _expect_seconds(launch, world)
    if p == 1 and not u:
        raise TheoryError("every guess is right, and a world takes no time: nothing bounds the gain.")
    bounds = [] if p == 1 else [1 / (1 - p)]
    bounds += [1 + c / u] if u else []
    return (min(bounds) + 0 * (p + c + u)).ratio


def _expect_chance(right: object) -> Amount:
    given = expect.number(right, "the chance that a guess is right")
    if not 0 <= given <= 1:
        raise TheoryError(f"the chance that a guess is right is {shown(given)}; a chance is from 0 to 1.")
    return Amount.of(given)


def _expect_seconds(launch: object, world: object) -> tuple[Amount, Amount]:
    c, u = amount(launch, "`launch`"), amount(world, "`world`")
    if not c and not u:
        raise TheoryError("neither a launch nor a world takes any time, so there is nothing to gain.")
    return c, u


def _expect_bounded(value: object, what: str) -> int:
    count = expect.count(value, what)
    if count > MAX_CANDIDATES:
        raise TheoryError(f"{what} is {shown(count)}, and is worked out up to {MAX_CANDIDATES:,}.")
    return count


def _expect_places(places: object, count: int, what: str, of: str) -> list[int]:
    found = [expect.count(place, f"one of {what}", 0) for place in expect.items(places, what, of)]
    for place in found:
        if place >= count:
            raise TheoryError(f"{what} has {shown(place)}, and there are {count}, counted from 0: {of}.")
    return found
