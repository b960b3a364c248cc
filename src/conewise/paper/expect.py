"""Arguments of the closed forms, checked: each function returns one as a plain value, or raises TheoryError.

The message says what was found and what was expected; `what` is the argument in words.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Final, TypeVar

import numpy as np

from conewise.errors import TheoryError
from conewise.reactive.graph import Graph, Site

Weight = int | float | Fraction
Name = TypeVar("Name", bound=str)

MAX_LISTED: Final = 20_000_000
"""More nodes or edges than this are not made into a list."""


def shown(value: object) -> str:
    """Return `value` in an error message, cut where it is long."""
    try:
        text = str(value) if isinstance(value, Fraction) else repr(value)
    except ValueError:  # Python writes out no number of more than some thousand digits.
        text = "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}…"


def as_float(value: int | Fraction, what: str = "the result") -> float:
    """Return the float that is nearest to `value`."""
    try:
        return float(value)
    except OverflowError:
        power = (abs(value.numerator).bit_length() - value.denominator.bit_length()) * math.log10(2)
        raise TheoryError(
            f"{what} is about 10^{power:.0f}, and floats end at 10^308. Give the numbers as ints and "
            "Fractions, which have no limit; where they are summed, a larger unit will do."
        ) from None


def graph(graph: object) -> Graph:
    """Return `graph` as a Graph."""
    if not isinstance(graph, Graph):
        raise TheoryError(f"a Graph was expected, and {shown(graph)} was given.")
    return graph


def items(items: object, what: str, of: str) -> list[object]:
    """Return `items` as a list; `of` says what it lists."""
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise TheoryError(f"{what} is {shown(items)}, and a list was expected: {of}.")
    try:
        return list(items)
    except TypeError:  # An array without axes says that it can be iterated over, and cannot.
        raise TheoryError(f"{what} is {shown(items)}, and a list was expected: {of}.") from None


def mapping(mapping: object, what: str, of: str) -> Mapping[Site, object]:
    """Return `mapping` as a mapping by name; `of` says what it holds."""
    if not isinstance(mapping, Mapping):
        raise TheoryError(f"{what} is {shown(mapping)}, and a mapping was expected: {of}, by name.")
    return mapping


def sites(sites: object, what: str = "the list of sites") -> tuple[Site, ...]:
    """Return `sites` as a tuple; a single name stands for itself. The graph says whether it has them."""
    names = (sites,) if isinstance(sites, str) else tuple(items(sites, what, "names of sites"))
    return tuple(site(name, f"an element of {what}") for name in names)


def site(site: object, what: str) -> Site:
    """Return `site` as a name."""
    if not isinstance(site, str):
        raise TheoryError(f"{what} is {shown(site)}, and a site's name was expected.")
    return site


def demand(demand: object) -> tuple[Site, ...] | None:
    """Return `demand` as a tuple of names, or None where everything is demanded."""
    return None if demand is None else sites(demand, "the demand")


def one_of(value: object, names: Collection[Name], what: str) -> Name:
    """Return `value` as one of `names`."""
    for name in names:
        if isinstance(value, str) and value == name:
            return name
    raise TheoryError(f"{what} is {shown(value)}; it is one of {', '.join(names)}.")


def weight(weight: object, what: str) -> Weight:
    """Return `weight` as an int, Fraction or float that is finite and not negative."""
    found = number(weight, what)
    if found < 0:
        raise TheoryError(f"{what} is {shown(weight)}; a weight is zero or more.")
    return found


def number(value: object, what: str) -> Weight:
    """Return `value` as an int, a Fraction or a finite float; the numbers of numpy become Python's."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    if isinstance(value, Real):
        found = float(value)
        if math.isfinite(found):
            return found
    raise TheoryError(f"{what} is {shown(value)}, and a finite number was expected.")


def real(value: object, what: str) -> float:
    """Return `value` as a finite float."""
    found = number(value, what)
    return found if isinstance(found, float) else as_float(found, what)


def profile(profile: object) -> list[Weight]:
    """Return the weights of layers 1..L: at least one, each above zero."""
    given = items(profile, "the profile", "the weight of each layer, the first layer first")
    weights = [number(weight, f"the weight of layer {j}") for j, weight in enumerate(given, 1)]
    if not weights:
        raise TheoryError("the profile is empty; it lists the weight of each layer, the first layer first.")
    for j, weight in enumerate(weights, 1):
        if weight <= 0:
            raise TheoryError(
                f"layer {j} of the profile weighs {shown(weight)}; each layer of a profile weighs more than "
                "zero. Leave a layer that computes nothing out."
            )
    return weights


def count(value: object, what: str, least: int = 1) -> int:
    """Return `value` as an int that is `least` or more."""
    if not isinstance(value, Integral) or value < least:
        raise TheoryError(f"{what} is {shown(value)}, and a whole number of {least} or more was expected.")
    return int(value)


def flag(value: object, what: str) -> bool:
    """Return `value` as True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TheoryError(f"{what} is {shown(value)}, and True or False was expected.")
    return bool(value)


def size(count: int, what: str) -> None:
    """Raise TheoryError for more things than can be listed one by one."""
    if count > MAX_LISTED:
        raise TheoryError(
            f"this has {shown(count)} {what}, and at most {MAX_LISTED:,} are listed one by one. The closed "
            "forms have no such limit."
        )


def permutation(order: object, count: int) -> tuple[int, ...]:
    """Return `order` as a permutation of 0..count-1; None is the order as listed."""
    if order is None:
        return tuple(range(count))
    found = items(order, "the order", f"each of 0..{count - 1} once")
    places = tuple(int(place) for place in found if isinstance(place, Integral))
    if len(found) != count or len(places) != count or set(places) != set(range(count)):
        raise TheoryError(
            f"the order {shown(found)} is not a permutation of 0..{count - 1}: it must name each of the "
            f"{count} places in the list once, counted from 0."
        )
    return places
