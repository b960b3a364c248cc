"""Edges: how many a stack of layers has, and what it costs to patch every one of them.

A reader of the stream is a node: what it makes of a changed stream is computed once for each writer, for
all of its parts (heads); then each edge costs the cone of that node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.graph.graph import Graph, Site
from conewise.theory.sweeps import full_weight
from conewise.theory.weights import (
    Demand,
    Exact,
    Scale,
    Weight,
    Weights,
    answer,
    answer_ratio,
    any_float,
    exact,
    expect_count,
    expect_demand,
    expect_flag,
    expect_graph,
    expect_items,
    expect_mapping,
    expect_site,
    expect_weight,
    ratio,
    shown,
    total,
    wanted,
)

Slot = Literal["q", "k", "v", "mlp", "logits"]
_ATTENTION: Final[tuple[Slot, ...]] = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class ReaderAt:
    """A node that reads the stream: from the value at `entry` the value at `site` is made.

    `writers` components have a part in the entry. `parts` readers share the node, the heads of a layer, say:
    each of them has an edge from each of the writers.
    """

    entry: Site
    site: Site
    writers: int
    parts: int = 1

    def __post_init__(self) -> None:
        expect_site(self.entry, "the entry of a reader")
        expect_site(self.site, "the site of a reader")
        writers = expect_count(self.writers, f"the number of writers that {self.site!r} reads")
        parts = expect_count(self.parts, f"the number of parts of {self.site!r}")
        object.__setattr__(self, "writers", writers)  # the numbers of numpy become Python's
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """What a sweep over edges costs, one world for each.

    `shared`: what the readers compute, once for each reader's node and writer; `cones`: what lies behind
    them, once for each edge; `apart`: what the readers compute if every edge is a sweep of its own; `full`:
    one full run for each edge.
    """

    edges: int
    shared: Weight
    cones: Weight
    apart: Weight
    full: Weight

    @property
    def total(self) -> Weight:
        """What the sweep computes where all worlds are one stack."""
        return answer(total((self.shared, self.cones)), self._is_float, "the cost")

    @property
    def one_by_one(self) -> Weight:
        """What it computes world by world, with nothing shared."""
        return answer(total((self.apart, self.cones)), self._is_float, "the cost")

    @property
    def ratio(self) -> Fraction | float:
        """ρ: one full run for each edge, over the cost of the sweep."""
        spent = total((self.shared, self.cones))
        if spent == 0:
            raise TheoryError("a sweep of these edges computes nothing, so its ratio has no value.")
        return answer_ratio(ratio(exact(self.full), spent), self._is_float)

    @property
    def _is_float(self) -> bool:
        return any_float((self.shared, self.cones, self.apart, self.full))


def edge_count(
    layers: int, heads: int, kv_heads: int | None = None, *, mlp: bool = True, parallel: bool = False
) -> int:
    """|E| of a stack of L layers with H heads, G of them for keys and values, and an MLP or none.

    docs/beyond-the-paper.md#edges. With D = H + 1 writers in a layer (H without MLPs), and P = H + 2G + 1
    readers (H + 2G):

        |E| = P·(L + D·L(L−1)/2) + H·L + 1 + D·L

    H·L, the heads that the MLP of their own layer reads, is there only with MLPs that stand behind the
    attention: not with `parallel` blocks, in which both read what enters the layer.
    """
    stack = _Stack.of(layers, heads, kv_heads, mlp, parallel)
    return sum(parts * writers for _, parts, writers, _ in stack.readers())


def edge_cost(
    graph: Graph, readers: Iterable[ReaderAt], demand: Demand = None, weights: Weights | None = None
) -> EdgeCost:
    """The exact cost of a sweep over all edges into `readers`, from the graph alone.

    docs/beyond-the-paper.md#edges. Between the entry e and the site s of a reader lies B = cone(e) ∩
    support(s, cut at e); with w writers and n parts it costs w·|B| + n·w·|cone(s)|, of which only what is in
    the support of `demand` counts behind s.
    """
    table = expect_graph(graph).table
    targets, scale = expect_demand(demand), Scale(graph, weights)
    support = wanted(graph, targets)
    edges, shared, cones, apart = 0, Fraction(0), Fraction(0), Fraction(0)
    for reader in _expect_readers(readers):
        entry, site = graph.number(reader.entry), graph.number(reader.site)
        if site not in table.cone((entry,)):
            raise TheoryError(
                f"{reader.site!r} does not depend on {reader.entry!r}, so it is no reader of it. An entry is "
                "the value of the stream from which the site is made."
            )
        between = scale(table.support((site,), (entry,)) & table.cone((entry,)))
        cone = table.cone((site,))
        behind = scale(cone if support is None else cone & support)
        edges += reader.writers * reader.parts
        shared += reader.writers * between
        apart += reader.writers * reader.parts * between
        cones += reader.writers * reader.parts * behind
    full = edges * full_weight(graph, targets, scale)
    return _cost(edges, (shared, cones, apart, full), scale.is_float)


def stack_edge_cost(
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    *,
    between: Mapping[str, Weight],
    below: Mapping[str, Weight],
    layer: Weight,
    full: Weight,
    mlp: bool = True,
    parallel: bool = False,
) -> EdgeCost:
    """The same of a uniform stack in closed form, in the numbers of one layer.

    docs/beyond-the-paper.md#edges. For each slot ("q", "k", "v", "mlp", "logits"), `between` is what a reader
    computes of a changed stream, and `below` what lies behind the reader of the *last* layer; `layer`, M, is
    what each layer more adds to a cone, and `full`, N, what a full run computes. With A = L + D·L(L−1)/2 and
    C = L(L−1)/2 + D·L(L−1)(L−2)/6 (D writers in a layer), n readers of a slot of the attention cost

        between·A + n·(below·A + M·C)

    In an MLP behind its attention A grows by H·L and C by H·L(L−1)/2; the logits read 1 + D·L writers.
    """
    stack = _Stack.of(layers, heads, kv_heads, mlp, parallel)
    inside = _expect_slots(between, "`between`", stack)
    behind = _expect_slots(below, "`below`", stack)
    M, N = expect_weight(layer, "`layer`"), expect_weight(full, "`full`")
    edges, shared, cones, apart = 0, Fraction(0), Fraction(0), Fraction(0)
    for slot, parts, writers, deeper in stack.readers():
        own, cone = exact(inside[slot]), exact(behind[slot])
        edges += parts * writers
        shared += writers * own
        apart += parts * writers * own
        cones += parts * (writers * cone + deeper * exact(M))
    given = [*inside.values(), *behind.values(), M, N]
    return _cost(edges, (shared, cones, apart, edges * exact(N)), any_float(given))


def edge_limit(layer: Weight = 1, nodes: Weight | None = None) -> Fraction | float:
    """The limit of ρ over all edges of an ever deeper uniform stack: 3 · n/M, which is 3 where n = M.

    docs/beyond-the-paper.md#edges. `layer`, M, is what a layer adds to a cone, and `nodes`, n, what it adds
    to a full run: more, where a layer computes what no reader changes (of rotary positions, say). It is
    `sites_limit(0, 1)`: as many edges end in a layer as writers stand before it.
    """
    M = expect_weight(layer, "`layer`")
    n = M if nodes is None else expect_weight(nodes, "`nodes`")
    if M == 0 or n < M:
        raise TheoryError(
            f"a layer adds {shown(M)} to a cone and {shown(n)} to a full run; the first is more than 0, and "
            "no more than the second."
        )
    return answer_ratio(ratio(3 * exact(n), exact(M)), any_float((M, n)))


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stack of layers: how many readers of each slot there are, and how many writers they see."""

    layers: int
    heads: int
    kv_heads: int
    mlp: bool
    parallel: bool

    @classmethod
    def of(cls, layers: object, heads: object, kv_heads: object, mlp: object, parallel: object) -> _Stack:
        H = expect_count(heads, "the number of heads")
        G = H if kv_heads is None else expect_count(kv_heads, "the number of heads for keys and values")
        if H % G:
            raise TheoryError(
                f"{shown(H)} heads cannot share {shown(G)} of keys and values, each by equally many."
            )
        has_mlp, is_parallel = expect_flag(mlp, "`mlp`"), expect_flag(parallel, "`parallel`")
        if is_parallel and not has_mlp:
            raise TheoryError("`parallel` blocks have an MLP beside the attention; leave `mlp` as it is.")
        return cls(expect_count(layers, "the number of layers"), H, G, has_mlp, is_parallel)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*_ATTENTION, "mlp", "logits") if self.mlp else (*_ATTENTION, "logits")

    def readers(self) -> list[tuple[Slot, int, int, int]]:
        """Of each slot: its readers in a layer, how many writers one sees, and that times the layers behind.

        The last two are sums over all layers.
        """
        L, D = self.layers, self.heads + self.mlp
        pairs = L * (L - 1) // 2
        seen, deeper = L + D * pairs, pairs + D * (L * (L - 1) * (L - 2) // 6)
        counts = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        found: list[tuple[Slot, int, int, int]] = [(slot, counts[slot], seen, deeper) for slot in _ATTENTION]
        if self.mlp:
            own = 0 if self.parallel else self.heads
            found.append(("mlp", 1, seen + own * L, deeper + own * pairs))
        return [*found, ("logits", 1, 1 + D * L, 0)]


def _cost(edges: int, sums: tuple[Exact, Exact, Exact, Exact], is_float: bool) -> EdgeCost:
    whole = (int(one) if one.denominator == 1 else one for one in map(Fraction, sums))
    shared, cones, apart, full = (answer(one, is_float, "the cost") for one in whole)
    return EdgeCost(edges, shared, cones, apart, full)


def _expect_readers(readers: object) -> list[ReaderAt]:
    found = expect_items(readers, "the list of readers", "a ReaderAt for each node that reads the stream")
    for one in found:
        if not isinstance(one, ReaderAt):
            raise TheoryError(f"{shown(one)} is no ReaderAt(entry, site, writers, parts).")
    return [one for one in found if isinstance(one, ReaderAt)]


def _expect_slots(given: object, what: str, stack: _Stack) -> dict[str, Weight]:
    found = expect_mapping(given, what, "a weight for each slot")
    if set(found) != set(stack.slots):
        raise TheoryError(
            f"{what} has {', '.join(map(repr, found)) or 'nothing'}; this stack has the slots "
            f"{', '.join(stack.slots)}, and each has an entry."
        )
    return {slot: expect_weight(found[slot], f"{what} of {slot}") for slot in stack.slots}
