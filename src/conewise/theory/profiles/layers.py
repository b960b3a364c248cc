"""Layers with several sites: the layered forms for any number of sites, wherever in a layer they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Final

from conewise.errors import TheoryError
from conewise.theory.sweeps import Orientation, limit_ratio, suffix_sums
from conewise.theory.weights import (
    Exact,
    Weight,
    answer_ratio,
    any_float,
    exact,
    expect_count,
    expect_items,
    expect_number,
    expect_profile,
    expect_weight,
    ratio,
    shown,
    total,
)

Sites = int | Sequence[int | Sequence[Weight]]


def layered_ratio(profile: Iterable[Weight], sites: Sites = 1, *, terminal: Weight = 0) -> Fraction | float:
    """ρ of a layered profile with several sites in a layer. A Fraction when the weights are exact.

    docs/theory.md#sites-per-layer. `sites` is S, for that many at the end of each layer; or it says for
    each layer how many stand at its end, or lists for each of its sites the *remainder*: the weight of
    its own layer that lies below it. With K sites in all and N = Σ w + terminal:

        ρ = K · N / Σ_sites (remainder + Σ_{j>i} w_j + terminal)

    S alone cancels: `sweep_ratio(profile)` is S = 1.
    """
    layers = expect_profile(profile)
    end = expect_weight(terminal, "`terminal`")
    groups = _expect_sites(sites, layers, whole=False)
    full, *below = suffix_sums([*layers, end])
    number = sum(count for here in groups for count, _ in here)
    spent = total(
        count * (exact(remainder) + later)
        for here, later in zip(groups, below, strict=True)
        for count, remainder in here
    )
    if spent == 0:
        raise TheoryError(
            f"a sweep of these {shown(number)} sites recomputes nothing, so its ratio has no value. (A "
            "profile of one layer needs a `terminal` node, or sites with a remainder.)"
        )
    return _answer(number * full, spent, [*layers, end], groups)


def layered_training_ratio(
    profile: Iterable[Weight], sites: Sites = 1, *, terminal: Weight = 0
) -> Fraction | float:
    """ρ_train of a layered profile with several sites in a layer, all other layers comparable with each.

    docs/theory.md#sites-per-layer. As in `layered_ratio`, but a list gives for each site the weight c of
    its own layer that is comparable with it, itself included; a number of sites takes c to be the whole
    layer. ρ_train = K · N / Σ_sites (N − w_i + c), between 1 and L/(L−1) when layers have equally many.
    """
    layers = expect_profile(profile)
    end = expect_weight(terminal, "`terminal`")
    groups = _expect_sites(sites, layers, whole=True)
    full = total([*layers, end])
    number = sum(count for here in groups for count, _ in here)
    touched = total(
        count * (full - exact(layer) + exact(own))
        for here, layer in zip(groups, layers, strict=True)
        for count, own in here
    )
    return _answer(number * full, touched, [*layers, end], groups)


def sites_limit(
    q: Weight,
    p: Weight,
    profile: Orientation = "output-heavy",
    sites: Orientation = "output-heavy",
) -> Fraction | float:
    """The limit of ρ where weights vary with depth with index q, and the number of sites with index p.

    docs/theory.md#sites-per-layer. `profile` and `sites` say towards which end each grows. p = 0, equally
    many sites in each layer, is `limit_ratio`. A Fraction for exact p and q, where both grow towards one
    end, or one of them is whole; else a float, good to eleven digits where neither is whole.
    """
    limit_ratio(q, profile)
    limit_ratio(p, sites)
    index, growth = expect_number(q, "the index q"), expect_number(p, "the index p")
    if profile == sites:
        least = exact(index if profile == "output-heavy" else growth) + 1
        return answer_ratio(ratio(exact(index) + exact(growth) + 2, least), any_float([index, growth]))
    if max(index, growth) > MOST:
        raise TheoryError(
            f"the indices are {shown(index)} and {shown(growth)}; for weights and sites heavy at opposite "
            f"ends the limit is worked out for indices up to {MOST:,}."
        )
    share = _share(exact(index), exact(growth))
    if share is not None:
        limit = 1 / (share if profile == "input-heavy" else 1 - share)
        return answer_ratio(limit, any_float([index, growth]))
    x, y = float(index), float(growth)
    log = math.lgamma(x + 2) + math.lgamma(y + 2) - math.lgamma(x + y + 3)
    if profile == "output-heavy":
        return 1 / -math.expm1(log)
    if log < -709:
        raise TheoryError(
            f"the limit is about 10^{-log / math.log(10):.0f}, and floats end at 10^308. With a whole index "
            "beside an exact one it is a Fraction."
        )
    return math.exp(-log)


MOST: Final = 1_000
"""The largest index for which products of that many factors are worked out."""


def _share(q: Exact, p: Exact) -> Fraction | None:
    """B = Γ(p+2)·Γ(q+2)/Γ(p+q+3) where one of them is whole: Π i/(x+1+i), x the other, i = 1 .. whole + 1."""
    whole, other = (p, q) if p.denominator == 1 else (q, p)
    if whole.denominator != 1:
        return None
    steps, (above, below) = range(1, int(whole) + 2), other.as_integer_ratio()
    return Fraction(
        math.prod(step * below for step in steps),
        math.prod(above + (1 + step) * below for step in steps),
    )


def _answer(
    above: Exact, below: Exact, weights: list[Weight], groups: list[list[tuple[int, Weight]]]
) -> Fraction | float:
    parts = [part for here in groups for _, part in here]
    return answer_ratio(ratio(above, below), any_float([*weights, *parts]))


def _expect_sites(sites: object, layers: Sequence[Weight], *, whole: bool) -> list[list[tuple[int, Weight]]]:
    """For each layer how many sites have which part of it: its listed ones, or all of it, or none."""
    if isinstance(sites, Iterable):
        listed = expect_items(sites, "`sites`", "for each layer, how many sites, or the part of each")
    else:
        listed = [sites] * len(layers)
    if len(listed) != len(layers):
        raise TheoryError(
            f"`sites` has {len(listed)} entries for {len(layers)} layers; give one number for all, or an "
            "entry for each."
        )
    found: list[list[tuple[int, Weight]]] = []
    for i, (here, layer) in enumerate(zip(listed, layers, strict=True), 1):
        if not isinstance(here, Iterable):
            count = expect_count(here, f"the number of sites in layer {i}", least=0)
            found.append([(count, layer if whole else 0)] if count else [])
            continue
        given = expect_items(here, f"`sites` of layer {i}", "the part of the layer that each site has")
        parts = [expect_weight(part, f"the part of layer {i} at a site") for part in given]
        for part in parts:
            if part > layer or (whole and part == 0):
                raise TheoryError(
                    f"a site of layer {i} has a part of {shown(part)} of a layer that weighs {shown(layer)}: "
                    "it is at most the layer" + (", and holds the site itself." if whole else ".")
                )
        found.append([(1, part) for part in parts])
    if not any(found):
        raise TheoryError("no layer has a site, and a ratio needs at least one.")
    return found
