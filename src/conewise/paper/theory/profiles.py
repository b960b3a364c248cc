"""The Karamata index of a real profile: how fast weight grows with depth, and towards which end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import Weight, shown
from conewise.paper.theory.clocks import Estimate, least_squares
from conewise.paper.theory.sweeps import Orientation, limit_ratio, suffix_sums
from conewise.paper.theory.weights import Amount, Exact, amount, total
from conewise.reactive.graph import Graph, cone_sizes


@dataclass(frozen=True, slots=True)
class KaramataIndex:
    """An estimate of the index q of a profile.

    `q.value` is never below 0, nor is its interval. `is_clear` says whether the interval excludes 0:
    where it does not, the profile may be uniform, and the orientation says nothing.
    `r_squared` is the share of the variance of log w, weighted alike, that the power law explains.
    """

    q: Estimate
    orientation: Orientation
    is_clear: bool
    r_squared: float

    @property
    def limit(self) -> Fraction | float:
        """The sweep ratio that a deep network of this index tends to."""
        return limit_ratio(self.q.value, self.orientation)


def karamata_index(profile: Iterable[Weight], *, confidence: float = 0.95) -> KaramataIndex:
    """Estimate q of w_j ≈ c · j^q (output-heavy) or c · (L+1-j)^q (input-heavy), and which of the two.

    docs/theory.md#index. Each orientation is fitted by least squares of log w on the log of the depth,
    each layer counting by its weight: the index is about the heavy end, and a light layer's
    weight, a few whole nodes, says little about a power. Of the slopes of 0 or more, the one that leaves
    less variance is taken; if neither is (weight at both ends), q is 0.

    How far to trust it. Residuals of neighbouring layers may go together, so the standard error is the
    larger of the classical one and Newey and West's; for independent noise of 30 % per layer the 95 %
    interval held q in 90 to 99 % of trials, for noise with a correlation of 0.5 from layer to layer in 74 to
    92 %. The error is 0 for an exact power law, up to rounding. No error bar covers what a finite profile
    cannot show: a slowly varying factor, such as log j, adds somewhat more than 1/log L to the slope at every
    depth that is ever seen; and where many layers are at the floor of one node, q comes out too
    low (E4's q = 2 at 320 layers: 1.56). `effective_index(sweep_ratio(profile))` is then nearer.
    """
    weights = expect.profile(profile)
    L = len(weights)
    if L < 3:
        raise TheoryError(f"a profile of {L} layers cannot fix an index with an error bar; 3 are needed.")
    # Relative to the first layer: a uniform profile is then all zeros, and its index exactly 0.
    logs = [_log(weight) - _log(weights[0]) for weight in weights]
    roots = [math.sqrt(Fraction(weight) / Fraction(max(weights))) for weight in weights]
    lags = math.floor(4 * (L / 100) ** (2 / 9))
    ends: dict[Orientation, range] = {"output-heavy": range(1, L + 1), "input-heavy": range(L, 0, -1)}
    fits = {
        orientation: least_squares(
            [(root, root * math.log(depth)) for root, depth in zip(roots, depths, strict=True)],
            [root * log for root, log in zip(roots, logs, strict=True)],
            confidence=confidence,
            lags=lags,
        )
        for orientation, depths in ends.items()
    }
    rising = [end for end, fit in fits.items() if fit.coefficients[1].value >= 0]
    orientation = min(rising or fits, key=lambda end: fits[end].residual_squares)
    slope = fits[orientation].coefficients[1]
    q = Estimate(max(slope.value, 0.0), slope.standard_error, max(slope.low, 0.0), max(slope.high, 0.0))
    shares = [root**2 for root in roots]
    centre = math.fsum(share * log for share, log in zip(shares, logs, strict=True)) / math.fsum(shares)
    spread = math.fsum(share * (log - centre) ** 2 for share, log in zip(shares, logs, strict=True))
    explained = 1 - fits[orientation].residual_squares / spread if spread > 0 else 1.0
    return KaramataIndex(q, orientation, slope.low > 0, explained)


def _log(weight: Weight) -> float:
    """The logarithm, also of fractions and whole numbers that no float can hold."""
    if isinstance(weight, Fraction):
        return math.log(weight.numerator) - math.log(weight.denominator)
    return math.log(weight)


# -- Layers ----------------------------------------------------------------------------------------
# Layers with several sites: the layered forms for any number of sites, wherever in a layer they stand.


Sites = int | Sequence[int | Sequence[Weight]]


def layered_ratio(profile: Iterable[Weight], sites: Sites = 1, *, terminal: Weight = 0) -> Fraction | float:
    """ρ of a layered profile with several sites in a layer. A Fraction when the weights are exact.

    docs/theory.md#sites-per-layer. `sites` is S, for that many at the end of each layer; or it says for
    each layer how many stand at its end, or lists for each of its sites the *remainder*: the weight of
    its own layer that lies below it. With K sites in all and N = Σ w + terminal:

        ρ = K · N / Σ_sites (remainder + Σ_{j>i} w_j + terminal)

    S alone cancels: `sweep_ratio(profile)` is S = 1.
    """
    layers, end = expect.profile(profile), amount(terminal, "`terminal`")
    groups = _expect_sites(sites, layers, whole=False)
    full, *below = suffix_sums([*layers, end])
    number = sum(count for here in groups for count, _ in here)
    spent = total(
        count * (remainder + later)
        for here, later in zip(groups, below, strict=True)
        for count, remainder in here
    )
    if not spent:
        raise TheoryError(
            f"a sweep of these {shown(number)} sites recomputes nothing, so its ratio has no value. (A "
            "profile of one layer needs a `terminal` node, or sites with a remainder.)"
        )
    return (number * full / spent).ratio


def layered_training_ratio(
    profile: Iterable[Weight], sites: Sites = 1, *, terminal: Weight = 0
) -> Fraction | float:
    """ρ_train of a layered profile with several sites in a layer, all other layers comparable with each.

    docs/theory.md#sites-per-layer. As in `layered_ratio`, but a list gives for each site the weight c of
    its own layer that is comparable with it, itself included; a number of sites takes c to be the whole
    layer. ρ_train = K · N / Σ_sites (N − w_i + c), between 1 and L/(L−1) when layers have equally many.
    """
    layers, end = expect.profile(profile), amount(terminal, "`terminal`")
    groups = _expect_sites(sites, layers, whole=True)
    full = total([*layers, end])
    number = sum(count for here in groups for count, _ in here)
    touched = total(
        count * (full - layer + own)
        for here, layer in zip(groups, layers, strict=True)
        for count, own in here
    )
    return (number * full / touched).ratio


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
    index, growth = expect.number(q, "the index q"), expect.number(p, "the index p")
    if profile == sites:
        least = Amount.of(index if profile == "output-heavy" else growth) + 1
        return (total((index, growth, 2)) / least).ratio
    if max(index, growth) > MAX_INDEX:
        raise TheoryError(
            f"the indices are {shown(index)} and {shown(growth)}; for weights and sites heavy at opposite "
            f"ends the limit is worked out for indices up to {MAX_INDEX:,}."
        )
    share = _share(Amount.of(index).exact, Amount.of(growth).exact)
    if share is not None:
        limit = 1 / (share if profile == "input-heavy" else 1 - share)
        return (limit + 0 * total((index, growth))).ratio
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


MAX_INDEX: Final = 1_000
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


def _expect_sites(sites: object, layers: Sequence[Weight], *, whole: bool) -> list[list[tuple[int, Weight]]]:
    """For each layer how many sites have which part of it: its listed ones, or all of it, or none."""
    if isinstance(sites, Iterable):
        listed = expect.items(sites, "`sites`", "for each layer, how many sites, or the part of each")
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
            count = expect.count(here, f"the number of sites in layer {i}", least=0)
            found.append([(count, layer if whole else 0)] if count else [])
            continue
        given = expect.items(here, f"`sites` of layer {i}", "the part of the layer that each site has")
        parts = [expect.weight(part, f"the part of layer {i} at a site") for part in given]
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


# -- Skips -----------------------------------------------------------------------------------------
# Long skips: layered graphs in which a layer reads one further back, and what that does to the ratios.
#
# An added skip changes no cone. A skip that passes layers by makes them parallel, and moves both ratios.


SkipKind = Literal["bypassing", "added"]
_KINDS: Final[tuple[SkipKind, ...]] = ("bypassing", "added")


def skip_layers(
    layers: int, span: int, every: int, kind: SkipKind = "bypassing"
) -> tuple[tuple[int, int], ...]:
    """The edges (i, j), "layer j reads layer i", of a stack with skips; 0 is the input, L+1 the readout.

    docs/theory.md#skips. "bypassing": the stack is cut into periods of `every` layers (the last may be
    shorter). Within a period, layer j reads layer j − `span` alone, so the `span` − 1 layers in
    between are passed by, and the period is `span` parallel strands; its first `span` layers, and in the end
    the readout, read the last `span` layers of the period before. `span` = 1 is the plain stack.
    "added": every layer reads the one before it, and layers a + `span`, for a = 0, `every`,
    2·`every`, ..., read layer a as well.

    To build the graph: one chain of nodes per layer, whose first node reads (say, adds) the last
    nodes of all layers that the layer reads. The site of a layer is its last node.
    """
    L, k, m = _expect_shape(layers, span, every)
    is_added = expect.one_of(kind, _KINDS, "the kind of skip") == "added"
    expect.size(2 * L if is_added else L + (L // m + 1) * min(k, m) ** 2, "edges")
    if is_added:
        stack = {(j, j + 1) for j in range(L + 1)}
        return tuple(sorted(stack | {(a, a + k) for a in range(0, L - k + 1, m)}))
    edges: list[tuple[int, int]] = []
    ends: Sequence[int] = (0,)
    for period in _periods(L, m):
        for j in period:
            edges.extend((i, j) for i in ((j - k,) if j - k in period else ends))
        ends = period[-k:]
    return tuple(sorted([*edges, *((i, L + 1) for i in ends)]))


def incomparable_pairs(layers: int, span: int, every: int) -> int:
    """I: how many pairs of layers of the bypassing stack have no path between them.

    docs/theory.md#skips. Two layers are parallel iff they share a period and not a strand. With
    m = a·k + b, 0 ≤ b < k, a full period has C(m,2) − b·C(a+1,2) − (k−b)·C(a,2) such pairs.
    """
    L, k, m = _expect_shape(layers, span, every)
    periods, rest = divmod(L, m)
    return periods * _parallel_pairs(m, k) + _parallel_pairs(rest, k)


def _parallel_pairs(m: int, k: int) -> int:
    a, b = divmod(m, k)
    return math.comb(m, 2) - b * math.comb(a + 1, 2) - (k - b) * math.comb(a, 2)


def skip_ratio(
    profile: Iterable[Weight] | int, span: int, every: int, *, terminal: Weight = 0
) -> Fraction | float:
    """ρ of the bypassing stack, one site at the end of each layer; a number stands for so many unit layers.

    For L layers of one weight w and a readout of weight t, with C = L(L−1)/2 − incomparable_pairs:

        ρ = L·(w·L + t) / (w·C + L·t)
    """
    stack, t = _Stack.of(profile, span, every), amount(terminal, "`terminal`")
    swept = stack.below + stack.layers * t
    if not swept:
        raise TheoryError(
            "no layer has anything below it, so the ratio has no value; give a `terminal` node."
        )
    return (stack.layers * (stack.weight + t) / swept).ratio


def skip_training_ratio(
    profile: Iterable[Weight] | int, span: int, every: int, *, terminal: Weight = 0
) -> Fraction | float:
    """ρ_train of the bypassing stack, by the paper's count |V⁻ ∪ {s} ∪ V⁺|; see `skip_ratio`.

    For L layers of one weight w and a readout of weight t:

        ρ_train = L·(w·L + t) / (w·(2C + L) + L·t)

    which is 1 for the plain stack, and 1/(1−y) in the limit (`skip_limits`).
    """
    stack, t = _Stack.of(profile, span, every), amount(terminal, "`terminal`")
    touched = stack.below + stack.above + stack.weight + stack.layers * t
    return (stack.layers * (stack.weight + t) / touched).ratio


def skip_limits(share: Weight, span: int | None = None) -> tuple[Fraction | float, Fraction | float]:
    """(ρ, ρ_train) of ever deeper bypassing stacks of equal layers: 2/(1−y) and 1/(1−y).

    docs/theory.md#skips. `share` is the limit of every/layers, the part of the network that one period
    spans; `span` the number of strands, None for ever more of them. y is the chance that two layers
    are parallel: that they share a period, times 1 − 1/span. With whole periods, 1/share a
    whole number, y = share·(1 − 1/span). Periods of bounded length have share 0: ρ_train is 1.
    """
    given = expect.number(share, "`share`")
    if not 0 <= given <= 1:
        raise TheoryError(f"`share` is {shown(given)}; it is a part of the network, from 0 to 1.")
    x, y = Fraction(given), Fraction(0)
    if x > 0:
        whole = math.floor(1 / x)
        rest = 1 - whole * x
        y = whole * x * x + rest * rest
    if span is not None:
        y *= 1 - Fraction(1, expect.count(span, "`span`"))
    if y == 1:
        raise TheoryError("one period of ever more strands has no comparable layers left: no finite limit.")
    limit = Amount(1 / (1 - y), isinstance(given, float))
    return (2 * limit).ratio, limit.ratio


def comparable_pairs(graph: Graph) -> int:
    """C: how many pairs of computed nodes have a path from one to the other: Σ |cone| over all of them.

    docs/theory.md#all-sites. In a sweep of every computed node, each counting 1, on any DAG of N of them,
    ρ = N²/C and ρ_train = N²/(2C+N), so 1/ρ_train = 2/ρ + 1/N.
    """
    return sum(cone_sizes(expect.graph(graph), graph.computed).values())


def training_from_forward(forward: Weight, nodes: int) -> Fraction | float:
    """ρ_train of a sweep of all `nodes` computed nodes, from its ρ: 1/ρ_train = 2/ρ + 1/N, on any DAG.

    docs/theory.md#all-sites. In nodes, not in weights. ρ is N²/C for some number C of comparable pairs, at
    least one and at most N(N−1)/2; another is no sweep's. (A float is taken as rounded, so only the
    range is checked.)
    """
    rho = expect.number(forward, "the forward ratio")
    N = expect.count(nodes, "the number of nodes")
    if N == 1:
        raise TheoryError("a sweep of one node recomputes nothing, so it has no forward ratio.")
    pairs, is_float, true = math.comb(N, 2), isinstance(rho, float), Fraction(rho)
    if is_float:
        # A float stands for the ratio that it was rounded from, which may be one of the two ends.
        ends = (Fraction(N * N, pairs), Fraction(N * N))
        true = next((end for end in ends if abs(true - end) <= end / 2**52), true)
    found = N * N / true if true > 0 else Fraction(0)
    if not 1 <= found <= pairs or not (is_float or found.denominator == 1):
        raise TheoryError(
            f"the forward ratio is {shown(rho)}, which no graph of {shown(N)} nodes has: it is N²/C, where "
            f"C, the number of pairs with a path between them, is a whole number from 1 to {shown(pairs)}."
        )
    return Amount(1 / (2 / true + Fraction(1, N)), is_float).ratio


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stack as the ratios see it: how many layers, their weight, and what is below and above them.

    `below` and `above` are the sums, over all layers, of the weight of the layers below and above each,
    the readout left out.
    """

    layers: int
    weight: Amount
    below: Amount
    above: Amount

    @classmethod
    def of(cls, profile: Iterable[Weight] | int, span: int, every: int) -> _Stack:
        """A layer weighs in `below` once for each layer above it, and in `above` once for each below.

        Those are all layers of earlier (later) periods, and those of its own strand that come before
        (after) it.
        """
        if isinstance(profile, Integral):
            L, k, m = _expect_shape(profile, span, every)
            pairs = math.comb(L, 2) - incomparable_pairs(L, k, m)
            return cls(L, Amount(L), Amount(pairs), Amount(pairs))
        layers = expect.profile(profile)
        L, k, m = _expect_shape(len(layers), span, every)
        below = above = Amount()
        for period in _periods(L, m):
            for j in period:
                w, earlier, later = Amount.of(layers[j - 1]), (j - period[0]) // k, (period[-1] - j) // k
                below += w * (period[0] - 1 + earlier)
                above += w * (L - period[-1] + later)
        return cls(L, total(layers), below, above)


def _periods(L: int, m: int) -> Iterator[range]:
    for start in range(1, L + 1, m):
        yield range(start, min(start + m, L + 1))


def _expect_shape(layers: object, span: object, every: object) -> tuple[int, int, int]:
    return (
        expect.count(layers, "the number of layers"),
        expect.count(span, "`span`"),
        expect.count(every, "`every`"),
    )
