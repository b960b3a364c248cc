"""Weights: what each computed node costs, in nodes, FLOPs, bytes or seconds.

All sums are exact. Where a weight is a float, what is handed out is rounded to a float, once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction

from conewise.errors import TheoryError, UnknownSiteError
from conewise.paper import expect
from conewise.paper.expect import Weight, as_float
from conewise.reactive.graph import Graph, Site

Weights = Mapping[Site, Weight]
Demand = Site | Iterable[Site] | None

Exact = int | Fraction
"""The numbers of exact sums: a float is a fraction too, of two whole numbers."""


class Scale:
    """Weighs sets of node numbers of one graph, exactly. A source weighs nothing: it is never computed.

    Without `weights`, each computed node weighs 1. With them, each computed node must have one:
    a node that was forgotten would make every sum too small in silence. `is_float` says whether one of
    the weights is a float, be it that of a source.
    """

    def __init__(self, graph: Graph, weights: Weights | None = None) -> None:
        self.is_float = False
        self._rules = expect.graph(graph).table.rules
        self._weights: dict[int, int] | None = None
        if weights is None:
            return
        given = expect.mapping(weights, "`weights`", "a weight for each computed node")
        for site in given:
            if site not in graph:
                raise UnknownSiteError(site, graph.sites)
        found = {site: expect.weight(weight, f"the weight of {site!r}") for site, weight in given.items()}
        for site in graph.computed:
            if site not in found:
                raise TheoryError(
                    f"`weights` has no entry for the computed node {site!r}. Give every computed node "
                    "a weight, 0 included, or leave `weights` out to count nodes."
                )
        self.is_float = any_float(found.values())
        # Whole multiples of one unit: sums of these are exact, and as fast as sums of floats.
        weighed = {graph.number(site): Fraction(found[site]) for site in graph.computed}
        self._unit = math.lcm(*(weight.denominator for weight in weighed.values()))
        self._weights = {
            node: weight.numerator * (self._unit // weight.denominator) for node, weight in weighed.items()
        }

    def __call__(self, nodes: Iterable[int]) -> Exact:
        """Return the weight of `nodes` together."""
        if self._weights is None:
            rules = self._rules
            return sum(1 for node in nodes if rules[node] is not None)
        weights = self._weights
        units = sum(weights[node] for node in nodes if node in weights)
        return units if self._unit == 1 else Fraction(units, self._unit)


# -- Exact sums, and how they are handed out ----------------------------------------------------


def any_float(weights: Iterable[Weight]) -> bool:
    """True if one of them is a float, so that answers about them are floats."""
    return any(isinstance(weight, float) for weight in weights)


def exact(weight: Weight) -> Exact:
    """Return the same number exactly: a float as the fraction that it is."""
    return Fraction(weight) if isinstance(weight, float) else weight


def total(weights: Iterable[Weight]) -> Exact:
    """Return the exact sum of `weights`."""
    return sum(map(exact, weights))


def ratio(above: Exact, below: Exact) -> Fraction:
    """Return the exact quotient of two sums."""
    return Fraction(above) / below


def answer(value: Exact, is_float: bool, what: str = "the result") -> Weight:
    """Return a sum as it is handed out: exact, or the nearest float where a float was given."""
    return as_float(value, what) if is_float else value


def answer_ratio(value: Fraction, is_float: bool) -> Fraction | float:
    """Return a ratio as it is handed out; see `answer`."""
    return as_float(value, "the ratio") if is_float else value


def wanted(graph: Graph, demand: Demand, cut: Collection[int] = ()) -> set[int] | None:
    """Return the nodes of the support of `demand`, cut at `cut`; None where everything is demanded."""
    targets = expect.demand(demand)
    return None if targets is None else graph.table.support(graph.numbers(targets), cut)
