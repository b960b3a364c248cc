"""Layers with several sites: the layered forms for any number of sites, wherever in a layer they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from conewise.errors import TheoryError
from conewise.theory.sweeps import Orientation, limit_ratio, suffix_sums
from conewise.theory.weights import (
    Weight,
    expect_count,
    expect_number,
    expect_profile,
    expect_weight,
    ratio,
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
    below = suffix_sums([*layers, expect_weight(terminal, "`terminal`")])
    groups = [
        (count, total([remainder, below[i + 1]]))
        for i, remainders in enumerate(_expect_sites(sites, layers, whole=False))
        for count, remainder in remainders
    ]
    number, spent = sum(count for count, _ in groups), total(count * cost for count, cost in groups)
    if spent == 0:
        raise TheoryError(
            f"a sweep of these {number} sites recomputes nothing, so its ratio has no value. (A profile of "
            "one layer needs a `terminal` node, or sites with a remainder.)"
        )
    return ratio(number * below[0], spent)


def layered_training_ratio(
    profile: Iterable[Weight], sites: Sites = 1, *, terminal: Weight = 0
) -> Fraction | float:
    """ρ_train of a layered profile with several sites in a layer, all other layers comparable with each.

    docs/theory.md#sites-per-layer. As in `layered_ratio`, but a list gives for each site the weight c of
    its own layer that is comparable with it, itself included; a number of sites takes c to be the whole
    layer. ρ_train = K · N / Σ_sites (N − w_i + c), between 1 and L/(L−1) when layers have equally many.
    """
    layers = expect_profile(profile)
    whole = total([*layers, expect_weight(terminal, "`terminal`")])
    groups = [
        (count, total([whole, -layer, own]))
        for layer, parts in zip(layers, _expect_sites(sites, layers, whole=True), strict=True)
        for count, own in parts
    ]
    number, touched = sum(count for count, _ in groups), total(count * cost for count, cost in groups)
    return ratio(number * whole, touched)


def sites_limit(
    q: Weight,
    p: Weight,
    profile: Orientation = "output-heavy",
    sites: Orientation = "output-heavy",
) -> Fraction | float:
    """The limit of ρ where weights vary with depth with index q, and the number of sites with index p.

    docs/theory.md#sites-per-layer. `profile` and `sites` say towards which end each grows. p = 0, equally
    many sites in each layer, is `limit_ratio`. A Fraction for whole p and q, and for one orientation.
    """
    limit_ratio(q, profile)
    limit_ratio(p, sites)
    q, p = expect_number(q, "the index q"), expect_number(p, "the index p")
    if profile == sites:
        return ratio(p + q + 2, q + 1 if profile == "output-heavy" else p + 1)
    if isinstance(p, int) and isinstance(q, int):
        share: Weight = Fraction(1, math.comb(p + q + 2, p + 1))
    else:
        share = math.exp(math.lgamma(p + 2) + math.lgamma(q + 2) - math.lgamma(p + q + 3))
    return ratio(1, share if profile == "input-heavy" else 1 - share)


def _expect_sites(sites: Sites, layers: Sequence[Weight], *, whole: bool) -> list[list[tuple[int, Weight]]]:
    """For each layer how many sites have which part of it: its listed ones, or all of it, or none."""
    listed = list(sites) if isinstance(sites, Sequence) else [sites] * len(layers)
    if len(listed) != len(layers):
        raise TheoryError(
            f"`sites` has {len(listed)} entries for {len(layers)} layers; give one number for all, or an "
            "entry for each."
        )
    found: list[list[tuple[int, Weight]]] = []
    for i, (here, layer) in enumerate(zip(listed, layers, strict=True), 1):
        if not isinstance(here, Sequence):
            count = expect_count(here, f"the number of sites in layer {i}", least=0)
            found.append([(count, layer if whole else 0)] if count else [])
            continue
        parts = [expect_weight(part, f"the part of layer {i} at a site") for part in here]
        for part in parts:
            if part > layer or (whole and part == 0):
                raise TheoryError(
                    f"a site of layer {i} has a part of {part} of a layer that weighs {layer}: it is at most "
                    "the layer" + (", and holds the site itself." if whole else ".")
                )
        found.append([(1, part) for part in parts])
    if not any(found):
        raise TheoryError("no layer has a site, and a ratio needs at least one.")
    return found
