"""Rows of any graph: what a patch at one position makes stale, where some nodes read other positions.

The closed forms of `positions` are of uniform stacks; this is of any graph, in one pass over it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import Weight, shown
from conewise.paper.theory.sweeps import Orientation, full_weight, limit_ratio
from conewise.paper.theory.weights import Amount, Demand, Scale, Weights, amount, total, wanted
from conewise.reactive.graph import Graph, Site

Mixes = Mapping[Site, Collection[Site]]


def row_costs(
    graph: Graph,
    sites: Iterable[tuple[Site, int]],
    positions: int,
    mixes: Mixes,
    demand: Demand = None,
    rows: Rows = "last",
    *,
    causal: bool = True,
    computed: Computed = "row by row",
) -> tuple[int, ...]:
    """The node-rows that each patch, at a site and a position counted from 0, makes stale.

    docs/theory.md#positions. Every node has one row for each of the `positions`. It reads its inputs row by
    row, but for those that `mixes` names for it: of these it reads the rows up to its own, or all of them
    where it is not `causal`. Of what is demanded, all rows are, or the last. Computed "from the first on", as
    a wavefront does, a node that changes is computed at every row from the first that does, or at the last
    one if no other is wanted and no node behind it mixes: a bound of what has to be.
    """
    T = expect.count(positions, "`positions`")
    table, mixing = expect.graph(graph).table, _expect_mixes(graph, mixes)
    expect.size(T * len(table.order), "node-rows")
    looks_back = expect.flag(causal, "`causal`")
    exact = is_row_by_row(computed)
    wanted = _wanted(graph, T, mixing, expect.demand(demand), is_last(rows), looks_back, exact)
    last = 1 << (T - 1)
    found = []
    for site, at in _expect_places(graph, sites, T):
        changed: dict[int, int] = {site: 1 << at}
        for node in table.sorted(table.cone((site,))):
            reached = 0
            for read in table.inputs[node]:
                rows_of = changed.get(read, 0)
                reached |= _after(rows_of, T, looks_back) if read in mixing.get(node, ()) else rows_of
            changed[node] = reached
        del changed[site]
        reached_rows = {node: rows_of for node, rows_of in changed.items() if wanted.get(node)}
        if exact:
            found.append(sum((rows_of & wanted[node]).bit_count() for node, rows_of in reached_rows.items()))
        else:
            found.append(
                sum(
                    1 if wanted[node] == last else T - ((rows_of & -rows_of).bit_length() - 1)
                    for node, rows_of in reached_rows.items()
                )
            )
    return tuple(found)


def _wanted(
    graph: Graph,
    T: int,
    mixing: Mapping[int, frozenset[int]],
    demand: tuple[Site, ...] | None,
    last: bool,
    looks_back: bool,
    exact: bool,
) -> dict[int, int]:
    """The rows of each node that a demand depends on, as bits; where not `exact`, all rows of what mixes."""
    table, every = graph.table, (1 << T) - 1
    ends = graph.numbers(graph.computed if demand is None else demand)
    found = dict.fromkeys(ends, 1 << (T - 1) if last else every)
    for node in reversed(table.sorted(table.support(ends, ()))):
        rows = found[node] = found[node] if exact or not mixing.get(node) else every
        for read in table.inputs[node]:
            seen = rows
            if read in mixing.get(node, ()):
                seen = (1 << rows.bit_length()) - 1 if looks_back else every
            found[read] = found.get(read, 0) | seen
    return found


def _after(rows: int, T: int, looks_back: bool) -> int:
    """The rows that see one of `rows`."""
    every = (1 << T) - 1
    if not rows or not looks_back:
        return every if rows else 0
    return every & ~((rows & -rows) - 1)


def _expect_mixes(graph: Graph, mixes: object) -> dict[int, frozenset[int]]:
    given = expect.mapping(mixes, "`mixes`", "for each node that reads other rows, the inputs it does so of")
    found = {}
    for node, inputs in given.items():
        names = expect.sites(inputs, f"the inputs of {node!r} that other rows are read of")
        number = graph.number(expect.site(node, "a node of `mixes`"))
        found[number] = frozenset(graph.numbers(names))
        if not found[number] <= set(graph.table.inputs[number]):
            raise TheoryError(
                f"`mixes` says that {node!r} reads {', '.join(map(repr, names))}, and its inputs are "
                f"{', '.join(map(repr, graph.inputs(node))) or 'none'}. Name some of these."
            )
    return found


def _expect_places(graph: Graph, sites: object, T: int) -> list[tuple[int, int]]:
    found = []
    for one in expect.items(sites, "the list of sites", "a site and a position for each patch"):
        pair = expect.items(one, "a patch", "a site and a position")
        if len(pair) != 2:
            raise TheoryError(f"a patch is {shown(one)}; it is a site and a position.")
        site, at = graph.number(expect.site(pair[0], "the site")), expect.count(pair[1], "the position", 0)
        if at >= T:
            raise TheoryError(f"position {shown(at)}: there are {shown(T)}, counted from 0.")
        found.append((site, at))
    return found


# -- Positions: a sweep over (layer, position) in a stack of layers, counted in node-rows ----------
# A node-row is what a node computes at one position. A patch at one position changes later rows alone where
# attention is causal, and of the last layer only what a demand at the last position reads.


Rows = Literal["all", "last"]
_ROWS: Final[tuple[Rows, ...]] = ("all", "last")
Computed = Literal["row by row", "from the first on"]
_COMPUTED: Final[tuple[Computed, ...]] = ("row by row", "from the first on")


@dataclass(frozen=True, slots=True)
class RowStack:
    """A uniform stack of layers over positions, with a site at the end of each layer, at each position.

    docs/beyond-the-paper.md#positions. Of each layer, `keys` nodes are computed from one row of the stream
    and read by other rows (norm, keys, values), `queries` nodes are read by their own row alone, and `mixed`
    nodes, at least one, lie behind the attention, up to the layer's output. `terminal` nodes follow the last
    layer, row by row. With `causal`, a row reads the keys of its own position and of earlier ones; else of
    all. A demand is of "all" rows, or of the "last" one. What has to be `computed` is counted "row by row";
    a wavefront computes "from the first on": each node that changes at all rows from the first that does, or
    at the last one if it lies behind every attention and no other is wanted.
    """

    layers: int
    positions: int
    keys: int
    queries: int
    mixed: int
    terminal: int = 1
    causal: bool = True

    def __post_init__(self) -> None:
        least = {"layers": 1, "positions": 1, "keys": 1, "queries": 0, "mixed": 1, "terminal": 1}
        for name, count in least.items():
            object.__setattr__(self, name, expect.count(getattr(self, name), f"`{name}`", count))
        object.__setattr__(self, "causal", expect.flag(self.causal, "`causal`"))

    @property
    def layer(self) -> int:
        """M: the nodes of a layer."""
        return self.keys + self.queries + self.mixed

    def full(self, demand: Rows = "last") -> int:
        """N: the node-rows of a full run; for the last row, those of the last layer's keys and of one row."""
        T, before = self.positions, (self.layers - 1) * self.layer * self.positions
        if is_last(demand):
            return before + self.keys * T + self.queries + self.mixed + self.terminal
        return before + (self.layer + self.terminal) * T

    def cost(
        self, layer: int, position: int, demand: Rows = "last", *, computed: Computed = "row by row"
    ) -> int:
        """The node-rows that a patch at the end of `layer`, at `position`, makes stale; both count from 0.

        The next layer is computed at one row up to its attention, and behind it at R rows: those from the
        position on, or all where attention is not causal; each layer after that at R rows.
        """
        i, t = expect.count(layer, "the layer", 0), expect.count(position, "the position", 0)
        if i >= self.layers or t >= self.positions:
            raise TheoryError(
                f"layer {shown(i)} at position {shown(t)}: there are {shown(self.layers)} layers and "
                f"{shown(self.positions)} positions, both counted from 0."
            )
        R = self.positions - t if self.causal else self.positions
        wants_last, is_end = is_last(demand), t == self.positions - 1
        behind = self.layers - 1 - i
        if not is_row_by_row(computed):
            return self._from_the_first(behind, self.positions - t, R, wants_last)
        if behind == 0:
            return self.terminal * (is_end or not wants_last)
        if not wants_last:
            return self.keys + self.queries + (self.mixed + (behind - 1) * self.layer + self.terminal) * R
        if behind == 1:
            return self.keys + self.queries * is_end + self.mixed + self.terminal
        end = self.queries + self.mixed + self.terminal
        return self.keys + self.queries + (self.mixed + (behind - 2) * self.layer + self.keys) * R + end

    def _from_the_first(self, behind: int, own: int, R: int, wants_last: bool) -> int:
        """The same from the first row on: `own` rows up to the next attention, R rows behind it."""
        before, b, e, M = self.keys + self.queries, self.mixed, self.terminal, self.layer
        if not wants_last:
            return before * own + (b + (behind - 1) * M + e) * R if behind else e * own
        if behind == 0:
            return e
        # The last attention is computed at as many rows as its keys, what lies behind it at one.
        deep = (b + (behind - 2) * M + before) * R if behind > 1 else 0
        return before * own + deep + R + b - 1 + e

    def sweep(self, demand: Rows = "last", first: int = 0, *, computed: Computed = "row by row") -> int:
        """The node-rows of a sweep over all layers, and all positions from `first` on, in closed form.

        `first` is where base and source begin to differ: a patch before it changes nothing.
        """
        L, S = self.layers, self.positions - self._expect_first(first)
        Q = S * (S + 1) // 2 if self.causal else S * self.positions
        k, q, b, e, M = self.keys, self.queries, self.mixed, self.terminal, self.layer
        wants_last, own = is_last(demand), S * (S + 1) // 2
        if not is_row_by_row(computed):
            if not wants_last:
                deep = (L - 1) * ((k + q) * own + (b + e) * Q) + M * Q * ((L - 1) * (L - 2) // 2)
                return deep + e * own
            deep = (L - 1) * ((k + q) * own + Q + (b - 1 + e) * S) + e * S
            between = (b + k + q) * (L - 2) + M * ((L - 2) * (L - 3) // 2) if L > 1 else 0
            return deep + between * Q
        if not wants_last:
            return (L - 1) * ((k + q) * S + (b + e) * Q) + M * Q * ((L - 1) * (L - 2) // 2) + e * S
        if L == 1:
            return e
        deep = (L - 2) * ((k + q) * S + (b + k) * Q + (q + b + e) * S) + M * Q * ((L - 2) * (L - 3) // 2)
        return deep + (k + b + e) * S + q + e

    def ratio(self, demand: Rows = "last", first: int = 0, *, computed: Computed = "row by row") -> Fraction:
        """ρ: a full run for each site, over the sweep."""
        sites = self.layers * (self.positions - self._expect_first(first))
        return Fraction(sites * self.full(demand), self.sweep(demand, first, computed=computed))

    def _expect_first(self, first: object) -> int:
        found = expect.count(first, "`first`", 0)
        if found >= self.positions:
            raise TheoryError(
                f"`first` is {shown(found)}, and the positions are 0 to {shown(self.positions - 1)}: base "
                "and source differ somewhere."
            )
        return found


def position_limit(
    q: Weight = 0, profile: Orientation = "output-heavy", *, shared: Weight = 0, causal: bool = True
) -> Fraction | float:
    """The limit of ρ over layers and positions, as both grow: 2 · `limit_ratio(q)` / (1 − shared).

    docs/beyond-the-paper.md#positions. 4 for the uniform profile, for either demand. `shared` is the part of
    the positions at which base and source agree, from the first on. Where attention is not causal every row
    behind a patch changes, and the limit is that of whole nodes, whatever is shared.
    """
    whole, part = limit_ratio(q, profile), expect.number(shared, "`shared`")
    if not 0 <= part < 1:
        raise TheoryError(f"`shared` is {shown(part)}; it is a part of the positions, from 0 to below 1.")
    if not expect.flag(causal, "`causal`"):
        return whole
    return (2 * Amount.of(whole) / (1 - Amount.of(part))).ratio


def is_last(demand: object) -> bool:
    """True if a demand is of the last row."""
    return expect.one_of(demand, _ROWS, "the demand") == "last"


def is_row_by_row(computed: object) -> bool:
    """True if only what has to be computed is counted."""
    return expect.one_of(computed, _COMPUTED, "`computed`") == "row by row"


# -- Edges: how many a stack of layers has, and what it costs to patch every one of them -----------
# A reader of the stream is a node: what it makes of a changed stream is computed once for each writer, for
# all of its parts (heads); then each edge costs the cone of that node.


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
        expect.site(self.entry, "the entry of a reader")
        expect.site(self.site, "the site of a reader")
        writers = expect.count(self.writers, f"the number of writers that {self.site!r} reads")
        parts = expect.count(self.parts, f"the number of parts of {self.site!r}")
        object.__setattr__(self, "writers", writers)  # the numbers of numpy become Python's
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """The cost of a sweep over edges, one world for each.

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
        """The cost of the sweep where all worlds are one stack."""
        return total((self.shared, self.cones)).weight("the cost")

    @property
    def one_by_one(self) -> Weight:
        """The cost of the sweep world by world, with nothing shared."""
        return total((self.apart, self.cones)).weight("the cost")

    @property
    def ratio(self) -> Fraction | float:
        """ρ: one full run for each edge, over the cost of the sweep."""
        spent = total((self.shared, self.cones))
        if not spent:
            raise TheoryError("a sweep of these edges computes nothing, so its ratio has no value.")
        return (self.full / spent).ratio


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
    table = expect.graph(graph).table
    targets, scale = expect.demand(demand), Scale(graph, weights)
    support = wanted(graph, targets)
    edges, shared = 0, scale(())
    cones = apart = shared
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
    return _cost(edges, shared, cones, apart, edges * full_weight(graph, targets, scale))


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
    M, N = amount(layer, "`layer`"), amount(full, "`full`")
    edges, shared = 0, 0 * total([*inside.values(), *behind.values(), M, N])
    cones = apart = shared
    for slot, parts, writers, deeper in stack.readers():
        edges += parts * writers
        shared += writers * inside[slot]
        apart += parts * writers * inside[slot]
        cones += parts * (writers * behind[slot] + deeper * M)
    return _cost(edges, shared, cones, apart, edges * N)


def edge_limit(layer: Weight = 1, nodes: Weight | None = None) -> Fraction | float:
    """The limit of ρ over all edges of an ever deeper uniform stack: 3 · n/M, which is 3 where n = M.

    docs/beyond-the-paper.md#edges. `layer`, M, is what a layer adds to a cone, and `nodes`, n, what it adds
    to a full run: more, where a layer computes what no reader changes (of rotary positions, say). It is
    `sites_limit(0, 1)`: as many edges end in a layer as writers stand before it.
    """
    M = amount(layer, "`layer`")
    n = M if nodes is None else amount(nodes, "`nodes`")
    if not M or n < M:
        raise TheoryError(
            f"a layer adds {shown(M)} to a cone and {shown(n)} to a full run; the first is "
            "more than 0, and no more than the second."
        )
    return (3 * n / M).ratio


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
        H = expect.count(heads, "the number of heads")
        G = H if kv_heads is None else expect.count(kv_heads, "the number of heads for keys and values")
        if H % G:
            raise TheoryError(
                f"{shown(H)} heads cannot share {shown(G)} of keys and values, each by equally many."
            )
        has_mlp, is_parallel = expect.flag(mlp, "`mlp`"), expect.flag(parallel, "`parallel`")
        if is_parallel and not has_mlp:
            raise TheoryError("`parallel` blocks have an MLP beside the attention; leave `mlp` as it is.")
        return cls(expect.count(layers, "the number of layers"), H, G, has_mlp, is_parallel)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*_ATTENTION, "mlp", "logits") if self.mlp else (*_ATTENTION, "logits")

    def readers(self) -> list[tuple[Slot, int, int, int]]:
        """Return each slot's readers in a layer, the writers that one sees, and that times the layers behind.

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


def _cost(edges: int, *sums: Amount) -> EdgeCost:
    return EdgeCost(edges, *(one.weight("the cost") for one in sums))


def _expect_readers(readers: object) -> list[ReaderAt]:
    found = expect.items(readers, "the list of readers", "a ReaderAt for each node that reads the stream")
    for one in found:
        if not isinstance(one, ReaderAt):
            raise TheoryError(f"{shown(one)} is no ReaderAt(entry, site, writers, parts).")
    return [one for one in found if isinstance(one, ReaderAt)]


def _expect_slots(given: object, what: str, stack: _Stack) -> dict[str, Amount]:
    found = expect.mapping(given, what, "a weight for each slot")
    if set(found) != set(stack.slots):
        raise TheoryError(
            f"{what} has {', '.join(map(repr, found)) or 'nothing'}; this stack has the slots "
            f"{', '.join(stack.slots)}, and each has an entry."
        )
    return {slot: amount(found[slot], f"{what} of {slot}") for slot in stack.slots}
