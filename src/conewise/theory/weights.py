"""Weights: what each computed node costs, in nodes, FLOPs, bytes or seconds.

Sums and ratios stay exact (int, Fraction) as long as the weights are; one float makes them float.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from numbers import Integral, Rational, Real

from conewise.errors import TheoryError, UnknownSiteError
from conewise.graph.graph import Graph, Site

Weight = int | float | Fraction
Weights = Mapping[Site, Weight]
Demand = Site | Iterable[Site] | None


class Scale:
    """Weighs sets of node numbers of one graph. A source weighs nothing: it is never computed.

    Without `weights`, each computed node weighs 1. With them, each computed node must have one:
    a node that was forgotten would make every sum too small in silence.
    """

    def __init__(self, graph: Graph, weights: Weights | None = None) -> None:
        self._rules = graph.table.rules
        self._weights: dict[int, Weight] | None = None
        if weights is None:
            return
        for site in weights:
            if site not in graph:
                raise UnknownSiteError(site, graph.sites)
        self._weights = {}
        for site in graph.computed:
            try:
                weight = weights[site]
            except KeyError:
                raise TheoryError(
                    f"`weights` has no entry for the computed node {site!r}. Give every computed node "
                    "a weight, 0 included, or leave `weights` out to count nodes."
                ) from None
            self._weights[graph.number(site)] = expect_weight(weight, f"the weight of {site!r}")

    def __call__(self, nodes: Iterable[int]) -> Weight:
        """The weight of `nodes` together."""
        if self._weights is None:
            rules = self._rules
            return sum(1 for node in nodes if rules[node] is not None)
        weights = self._weights
        return total(weights[node] for node in nodes if node in weights)


def total(weights: Iterable[Weight]) -> Weight:
    """Their sum: exact for ints and Fractions, and else the float nearest to the true sum."""
    weights = list(weights)
    if any(isinstance(weight, float) for weight in weights):
        return math.fsum(weights)
    return sum(weights)


def ratio(above: Weight, below: Weight) -> Fraction | float:
    """Their quotient, a Fraction when both are exact."""
    if isinstance(above, float) or isinstance(below, float):
        return float(above) / float(below)
    return Fraction(above) / Fraction(below)


def expect_weight(weight: object, what: str) -> Weight:
    """`weight` as an int, Fraction or float that is finite and not negative."""
    number = expect_number(weight, what)
    if number < 0:
        raise TheoryError(f"{what} is {weight!r}; a weight is zero or more.")
    return number


def expect_number(value: object, what: str) -> Weight:
    """`value` as an int, a Fraction or a finite float; the numbers of numpy become Python's."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Rational):
        return Fraction(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise TheoryError(f"{what} is {value!r}, and a finite number was expected.")


def expect_profile(profile: Iterable[object]) -> list[Weight]:
    """The weights of layers 1..L: at least one, each above zero."""
    weights = [expect_number(weight, f"the weight of layer {j}") for j, weight in enumerate(profile, 1)]
    if not weights:
        raise TheoryError("the profile is empty; it lists the weight of each layer, the first layer first.")
    for j, weight in enumerate(weights, 1):
        if weight <= 0:
            raise TheoryError(
                f"layer {j} of the profile weighs {weight}; each layer of a profile weighs more than "
                "zero. Leave a layer that computes nothing out."
            )
    return weights


def expect_count(value: object, what: str, least: int = 1) -> int:
    """`value` as an int that is `least` or more."""
    if not isinstance(value, Integral) or value < least:
        raise TheoryError(f"{what} is {value!r}, and a whole number of {least} or more was expected.")
    return int(value)


def expect_permutation(order: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """`order` as a permutation of 0..count-1; None is the order as listed."""
    if order is None:
        return tuple(range(count))
    found = tuple(order)
    if len(found) != count or set(found) != set(range(count)):
        raise TheoryError(
            f"the order {list(found)} is not a permutation of 0..{count - 1}: it must name each of the "
            f"{count} places in the list once, counted from 0."
        )
    return found


def wanted(graph: Graph, demand: Demand, cut: Collection[int] = ()) -> set[int] | None:
    """The numbers of the support of `demand`, cut at `cut`; None where everything is demanded."""
    if demand is None:
        return None
    return graph.table.support(graph.numbers(demand), cut)
