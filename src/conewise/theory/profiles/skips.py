"""Long skips: layered graphs in which a layer reads one further back, and what that does to the ratios.

An added skip changes no cone. A skip that passes layers by makes them parallel, and moves both ratios.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.graph.cones import cone_sizes
from conewise.graph.graph import Graph
from conewise.theory.weights import (
    Exact,
    Weight,
    answer_ratio,
    any_float,
    exact,
    expect_count,
    expect_graph,
    expect_number,
    expect_one_of,
    expect_profile,
    expect_size,
    expect_weight,
    ratio,
    shown,
    total,
)

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
    is_added = expect_one_of(kind, _KINDS, "the kind of skip") == "added"
    expect_size(2 * L if is_added else L + (L // m + 1) * min(k, m) ** 2, "edges")
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
    stack, t = _Stack.of(profile, span, every), expect_weight(terminal, "`terminal`")
    swept = stack.below + stack.layers * exact(t)
    if swept == 0:
        raise TheoryError(
            "no layer has anything below it, so the ratio has no value; give a `terminal` node."
        )
    full = stack.layers * (stack.weight + exact(t))
    return answer_ratio(ratio(full, swept), stack.is_float or isinstance(t, float))


def skip_training_ratio(
    profile: Iterable[Weight] | int, span: int, every: int, *, terminal: Weight = 0
) -> Fraction | float:
    """ρ_train of the bypassing stack, by the paper's count |V⁻ ∪ {s} ∪ V⁺|; see `skip_ratio`.

    For L layers of one weight w and a readout of weight t:

        ρ_train = L·(w·L + t) / (w·(2C + L) + L·t)

    which is 1 for the plain stack, and 1/(1−y) in the limit (`skip_limits`).
    """
    stack, t = _Stack.of(profile, span, every), expect_weight(terminal, "`terminal`")
    touched = stack.below + stack.above + stack.weight + stack.layers * exact(t)
    full = stack.layers * (stack.weight + exact(t))
    return answer_ratio(ratio(full, touched), stack.is_float or isinstance(t, float))


def skip_limits(share: Weight, span: int | None = None) -> tuple[Fraction | float, Fraction | float]:
    """(ρ, ρ_train) of ever deeper bypassing stacks of equal layers: 2/(1−y) and 1/(1−y).

    docs/theory.md#skips. `share` is the limit of every/layers, the part of the network that one period
    spans; `span` the number of strands, None for ever more of them. y is the chance that two layers
    are parallel: that they share a period, times 1 − 1/span. With whole periods, 1/share a
    whole number, y = share·(1 − 1/span). Periods of bounded length have share 0: ρ_train is 1.
    """
    given = expect_number(share, "`share`")
    if not 0 <= given <= 1:
        raise TheoryError(f"`share` is {shown(given)}; it is a part of the network, from 0 to 1.")
    x, y = Fraction(given), Fraction(0)
    if x > 0:
        whole = math.floor(1 / x)
        rest = 1 - whole * x
        y = whole * x * x + rest * rest
    if span is not None:
        y *= 1 - Fraction(1, expect_count(span, "`span`"))
    if y == 1:
        raise TheoryError("one period of ever more strands has no comparable layers left: no finite limit.")
    is_float = isinstance(given, float)
    return answer_ratio(2 / (1 - y), is_float), answer_ratio(1 / (1 - y), is_float)


def comparable_pairs(graph: Graph) -> int:
    """C: how many pairs of computed nodes have a path from one to the other: Σ |cone| over all of them.

    docs/theory.md#all-sites. In a sweep of every computed node, each counting 1, on any DAG of N of them,
    ρ = N²/C and ρ_train = N²/(2C+N), so 1/ρ_train = 2/ρ + 1/N.
    """
    return sum(cone_sizes(expect_graph(graph), graph.computed).values())


def training_from_forward(forward: Weight, nodes: int) -> Fraction | float:
    """ρ_train of a sweep of all `nodes` computed nodes, from its ρ: 1/ρ_train = 2/ρ + 1/N, on any DAG.

    docs/theory.md#all-sites. In nodes, not in weights. ρ is N²/C for some number C of comparable pairs, at
    least one and at most N(N−1)/2; another is no sweep's. (A float is taken as rounded, so only the
    range is checked.)
    """
    rho = expect_number(forward, "the forward ratio")
    N = expect_count(nodes, "the number of nodes")
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
    return answer_ratio(1 / (2 / true + Fraction(1, N)), is_float)


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stack as the ratios see it: how many layers, their weight, and what is below and above them.

    `below` and `above` are the sums, over all layers, of the weight of the layers below and above each,
    the readout left out.
    """

    layers: int
    weight: Exact
    below: Exact
    above: Exact
    is_float: bool

    @classmethod
    def of(cls, profile: Iterable[Weight] | int, span: int, every: int) -> _Stack:
        """A layer weighs in `below` once for each layer above it, and in `above` once for each below.

        Those are all layers of earlier (later) periods, and those of its own strand that come before
        (after) it.
        """
        if isinstance(profile, Integral):
            L, k, m = _expect_shape(profile, span, every)
            pairs = math.comb(L, 2) - incomparable_pairs(L, k, m)
            return cls(L, L, pairs, pairs, is_float=False)
        layers = expect_profile(profile)
        L, k, m = _expect_shape(len(layers), span, every)
        below: list[Exact] = []
        above: list[Exact] = []
        for period in _periods(L, m):
            for j in period:
                w, earlier, later = exact(layers[j - 1]), (j - period[0]) // k, (period[-1] - j) // k
                below.append(w * (period[0] - 1 + earlier))
                above.append(w * (L - period[-1] + later))
        return cls(L, total(layers), total(below), total(above), any_float(layers))


def _periods(L: int, m: int) -> Iterator[range]:
    for start in range(1, L + 1, m):
        yield range(start, min(start + m, L + 1))


def _expect_shape(layers: object, span: object, every: object) -> tuple[int, int, int]:
    return (
        expect_count(layers, "the number of layers"),
        expect_count(span, "`span`"),
        expect_count(every, "`every`"),
    )
