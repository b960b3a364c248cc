"""Weights of nodes, and exact sums of them.

Sums are exact, whatever the weights are. Where a weight is a float, what is handed out is rounded to a float,
once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from functools import total_ordering

from conewise.errors import TheoryError, UnknownSiteError
from conewise.paper import expect
from conewise.paper.expect import Weight, as_float
from conewise.reactive.graph import Graph, Site

Weights = Mapping[Site, Weight]
Demand = Site | Iterable[Site] | None

Exact = int | Fraction
"""The numbers of exact sums: a float is a fraction too, of two whole numbers."""


@total_ordering
class Amount:
    """An exact number, and whether a float went into it: then it is handed out as the nearest float."""

    __slots__ = ("exact", "is_float")

    def __init__(self, exact: Exact = 0, is_float: bool = False) -> None:
        self.exact = exact
        self.is_float = is_float

    @classmethod
    def of(cls, weight: Weight | Amount) -> Amount:
        """Return the same number exactly: a float as the fraction that it is."""
        if isinstance(weight, Amount):
            return weight
        return cls(Fraction(weight), is_float=True) if isinstance(weight, float) else cls(weight)

    def weight(self, what: str = "the result") -> Weight:
        """Return the number as it is handed out."""
        return as_float(self.exact, what) if self.is_float else self.exact

    @property
    def ratio(self) -> Fraction | float:
        """The number as it is handed out where it is a ratio."""
        return as_float(self.exact, "the ratio") if self.is_float else Fraction(self.exact)

    def __repr__(self) -> str:
        return expect.shown(self.weight())

    def __add__(self, other: Weight | Amount) -> Amount:
        more = Amount.of(other)
        return Amount(self.exact + more.exact, self.is_float or more.is_float)

    def __sub__(self, other: Weight | Amount) -> Amount:
        return self + -1 * Amount.of(other)

    def __mul__(self, other: Weight | Amount) -> Amount:
        times = Amount.of(other)
        return Amount(self.exact * times.exact, self.is_float or times.is_float)

    def __truediv__(self, other: Weight | Amount) -> Amount:
        by = Amount.of(other)
        return Amount(Fraction(self.exact) / by.exact, self.is_float or by.is_float)

    def __pow__(self, power: int) -> Amount:
        return Amount(self.exact**power, self.is_float)

    def __rsub__(self, other: Weight) -> Amount:
        return Amount.of(other) - self

    def __rtruediv__(self, other: Weight) -> Amount:
        return Amount.of(other) / self

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> bool:
        return self.exact != 0

    def __eq__(self, other: object) -> bool:
        return self.exact == (other.exact if isinstance(other, Amount) else other)

    def __lt__(self, other: Weight | Amount) -> bool:
        return self.exact < Amount.of(other).exact

    __hash__ = None  # type: ignore[assignment]  # a number in the making


def amount(value: object, what: str) -> Amount:
    """Return a weight, zero or more, as an Amount."""
    return Amount.of(expect.weight(value, what))


def total(weights: Iterable[Weight | Amount]) -> Amount:
    """Return the exact sum of `weights`."""
    found = Amount()
    for weight in weights:
        found += weight
    return found


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
        self.is_float = any(isinstance(weight, float) for weight in found.values())
        # Whole multiples of one unit: sums of these are exact, and as fast as sums of floats.
        weighed = {graph.number(site): Fraction(found[site]) for site in graph.computed}
        self._unit = math.lcm(*(weight.denominator for weight in weighed.values()))
        self._weights = {
            node: weight.numerator * (self._unit // weight.denominator) for node, weight in weighed.items()
        }

    def __call__(self, nodes: Iterable[int]) -> Amount:
        """Return the weight of `nodes` together."""
        if self._weights is None:
            rules = self._rules
            return Amount(sum(1 for node in nodes if rules[node] is not None))
        weights = self._weights
        units = sum(weights[node] for node in nodes if node in weights)
        return Amount(units if self._unit == 1 else Fraction(units, self._unit), self.is_float)


def wanted(graph: Graph, demand: Demand, cut: Collection[int] = ()) -> set[int] | None:
    """Return the nodes of the support of `demand`, cut at `cut`; None where everything is demanded."""
    targets = expect.demand(demand)
    return None if targets is None else graph.table.support(graph.numbers(targets), cut)
