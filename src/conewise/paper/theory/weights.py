"""Weights: what each computed node costs, in nodes, FLOPs, bytes or seconds.

All sums are exact. Where a weight is a float, what is handed out is rounded to a float, once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Final, TypeVar

import numpy as np

from conewise.errors import TheoryError, UnknownSiteError
from conewise.reactive.graph import Graph, Site

Weight = int | float | Fraction
Weights = Mapping[Site, Weight]
Demand = Site | Iterable[Site] | None

Exact = int | Fraction
"""The numbers of exact sums: a float is a fraction too, of two whole numbers."""

Name = TypeVar("Name", bound=str)

MAX_LISTED: Final = 20_000_000
"""More nodes or edges than this are not made into a list."""


class Scale:
    """Weighs sets of node numbers of one graph, exactly. A source weighs nothing: it is never computed.

    Without `weights`, each computed node weighs 1. With them, each computed node must have one:
    a node that was forgotten would make every sum too small in silence. `is_float` says whether one of
    the weights is a float, be it that of a source.
    """

    def __init__(self, graph: Graph, weights: Weights | None = None) -> None:
        self.is_float = False
        self._rules = expect_graph(graph).table.rules
        self._weights: dict[int, int] | None = None
        if weights is None:
            return
        given = expect_mapping(weights, "`weights`", "a weight for each computed node")
        for site in given:
            if site not in graph:
                raise UnknownSiteError(site, graph.sites)
        found = {site: expect_weight(weight, f"the weight of {site!r}") for site, weight in given.items()}
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
        """The weight of `nodes` together."""
        if self._weights is None:
            rules = self._rules
            return sum(1 for node in nodes if rules[node] is not None)
        weights = self._weights
        units = sum(weights[node] for node in nodes if node in weights)
        return units if self._unit == 1 else Fraction(units, self._unit)


# -- exact sums, and what is made of them -------------------------------------------------------


def any_float(weights: Iterable[Weight]) -> bool:
    """True if one of them is a float, so that answers about them are floats."""
    return any(isinstance(weight, float) for weight in weights)


def exact(weight: Weight) -> Exact:
    """The same number; a float as the fraction that it is."""
    return Fraction(weight) if isinstance(weight, float) else weight


def total(weights: Iterable[Weight]) -> Exact:
    """Their sum, exactly."""
    return sum(map(exact, weights))


def ratio(above: Exact, below: Exact) -> Fraction:
    """Their quotient, exactly."""
    return Fraction(above) / below


def as_float(value: Exact, what: str = "the result") -> float:
    """The float that is nearest to `value`."""
    try:
        return float(value)
    except OverflowError:
        power = (abs(value.numerator).bit_length() - value.denominator.bit_length()) * math.log10(2)
        raise TheoryError(
            f"{what} is about 10^{power:.0f}, and floats end at 10^308. Give the numbers as ints and "
            "Fractions, which have no limit; where they are summed, a larger unit will do."
        ) from None


def answer(value: Exact, is_float: bool, what: str = "the result") -> Weight:
    """A sum as it is handed out: exact, or the nearest float where a float was given."""
    return as_float(value, what) if is_float else value


def answer_ratio(value: Fraction, is_float: bool) -> Fraction | float:
    """A ratio as it is handed out; see `answer`."""
    return as_float(value, "the ratio") if is_float else value


# -- what is expected of arguments --------------------------------------------------------------


def shown(value: object) -> str:
    """`value` in an error message, cut where it is long."""
    try:
        text = str(value) if isinstance(value, Fraction) else repr(value)
    except ValueError:  # Python writes out no number of more than some thousand digits.
        text = "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}…"


def expect_graph(graph: object) -> Graph:
    """`graph` as a Graph."""
    if not isinstance(graph, Graph):
        raise TheoryError(f"a Graph was expected, and {shown(graph)} was given.")
    return graph


def expect_items(items: object, what: str, of: str) -> list[object]:
    """`items` as a list; `of` says what it lists."""
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise TheoryError(f"{what} is {shown(items)}, and a list was expected: {of}.")
    try:
        return list(items)
    except TypeError:  # An array without axes says that it can be iterated over, and cannot.
        raise TheoryError(f"{what} is {shown(items)}, and a list was expected: {of}.") from None


def expect_mapping(mapping: object, what: str, of: str) -> Mapping[Site, object]:
    """`mapping` as a mapping by name; `of` says what it holds."""
    if not isinstance(mapping, Mapping):
        raise TheoryError(f"{what} is {shown(mapping)}, and a mapping was expected: {of}, by name.")
    return mapping


def expect_sites(sites: object, what: str = "the list of sites") -> tuple[Site, ...]:
    """`sites` as a tuple; a single name stands for itself. Whether a graph has them, the graph says."""
    names = (sites,) if isinstance(sites, str) else tuple(expect_items(sites, what, "names of sites"))
    return tuple(expect_site(name, f"an element of {what}") for name in names)


def expect_site(site: object, what: str) -> Site:
    """`site` as a name."""
    if not isinstance(site, str):
        raise TheoryError(f"{what} is {shown(site)}, and a site's name was expected.")
    return site


def expect_demand(demand: object) -> tuple[Site, ...] | None:
    """`demand` as a tuple of names, or None where everything is demanded."""
    return None if demand is None else expect_sites(demand, "the demand")


def expect_one_of(value: object, names: Collection[Name], what: str) -> Name:
    """`value` as one of `names`."""
    for name in names:
        if isinstance(value, str) and value == name:
            return name
    raise TheoryError(f"{what} is {shown(value)}; it is one of {', '.join(names)}.")


def expect_weight(weight: object, what: str) -> Weight:
    """`weight` as an int, Fraction or float that is finite and not negative."""
    number = expect_number(weight, what)
    if number < 0:
        raise TheoryError(f"{what} is {shown(weight)}; a weight is zero or more.")
    return number


def expect_number(value: object, what: str) -> Weight:
    """`value` as an int, a Fraction or a finite float; the numbers of numpy become Python's."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
    raise TheoryError(f"{what} is {shown(value)}, and a finite number was expected.")


def expect_float(value: object, what: str) -> float:
    """`value` as a finite float."""
    number = expect_number(value, what)
    return number if isinstance(number, float) else as_float(number, what)


def expect_profile(profile: object) -> list[Weight]:
    """The weights of layers 1..L: at least one, each above zero."""
    given = expect_items(profile, "the profile", "the weight of each layer, the first layer first")
    weights = [expect_number(weight, f"the weight of layer {j}") for j, weight in enumerate(given, 1)]
    if not weights:
        raise TheoryError("the profile is empty; it lists the weight of each layer, the first layer first.")
    for j, weight in enumerate(weights, 1):
        if weight <= 0:
            raise TheoryError(
                f"layer {j} of the profile weighs {shown(weight)}; each layer of a profile weighs more than "
                "zero. Leave a layer that computes nothing out."
            )
    return weights


def expect_count(value: object, what: str, least: int = 1) -> int:
    """`value` as an int that is `least` or more."""
    if not isinstance(value, Integral) or value < least:
        raise TheoryError(f"{what} is {shown(value)}, and a whole number of {least} or more was expected.")
    return int(value)


def expect_flag(value: object, what: str) -> bool:
    """`value` as True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TheoryError(f"{what} is {shown(value)}, and True or False was expected.")
    return bool(value)


def expect_size(count: int, what: str) -> None:
    """`count` things can be listed one by one."""
    if count > MAX_LISTED:
        raise TheoryError(
            f"this has {shown(count)} {what}, and at most {MAX_LISTED:,} are listed one by one. The closed "
            "forms have no such limit."
        )


def expect_permutation(order: object, count: int) -> tuple[int, ...]:
    """`order` as a permutation of 0..count-1; None is the order as listed."""
    if order is None:
        return tuple(range(count))
    found = expect_items(order, "the order", f"each of 0..{count - 1} once")
    places = tuple(int(place) for place in found if isinstance(place, Integral))
    if len(found) != count or len(places) != count or set(places) != set(range(count)):
        raise TheoryError(
            f"the order {shown(found)} is not a permutation of 0..{count - 1}: it must name each of the "
            f"{count} places in the list once, counted from 0."
        )
    return places


def wanted(graph: Graph, demand: Demand, cut: Collection[int] = ()) -> set[int] | None:
    """The numbers of the support of `demand`, cut at `cut`; None where everything is demanded."""
    targets = expect_demand(demand)
    return None if targets is None else graph.table.support(graph.numbers(targets), cut)
