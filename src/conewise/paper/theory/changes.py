"""Changes that stay: sites and edges patched, rules patched and redefined, one after the other.

A value that is given shields what is below it; another rule, or a function, lets changes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import Weight, shown
from conewise.paper.theory.sweeps import Patch, patches_of, world_costs
from conewise.paper.theory.weights import Amount, Demand, Scale, Weights, amount, wanted
from conewise.reactive.graph import Edge, Graph, Site

ChangeKind = Literal["value", "function", "rule", "redefine"]
_KINDS: Final[tuple[ChangeKind, ...]] = ("value", "function", "rule", "redefine")


@dataclass(frozen=True, slots=True)
class ChangeAt:
    """A change to come: where, and of what kind.

    "value":    `world.patch(site, value)`, `world.patch_edge(edge, value)`: what stands there is given.
    "function": the same with a function of what would have been there.
    "rule":     `world.patch_rule(site, rule)`: another rule over the same inputs.
    "redefine": `graph.redefine(site, rule)`; with `inputs`, the site reads these from then on.

    `at` is a site, or, for the first two, an edge (u, w): then one reader sees the change, and no other.
    """

    at: Site | Edge
    kind: ChangeKind
    inputs: tuple[Site, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChangedCost:
    """The cost of changes that stay, with a demand after each: `costs` in the order they were made.

    `batched` is one demand after all of them, `isolated` the sum over changes each in a world, or on a
    graph, of its own; None where a redefinition is possible only after another one. batched ≤ total
    always; total ≤ isolated where no change has `inputs`.
    """

    costs: tuple[Weight, ...]
    total: Weight
    isolated: Weight | None
    batched: Weight


def changed_cost(
    graph: Graph,
    changes: Iterable[ChangeAt],
    demand: Demand = None,
    *,
    order: Iterable[int] | None = None,
    weights: Weights | None = None,
) -> ChangedCost:
    """The cost of each change when they are made in `order`, with `demand` after each.

    docs/theory.md#changes. Let the reads of a node be those that the changes so far leave it: none where
    its value is given, and not along an edge that is given. With cone and support along these reads, the
    k-th change, whose seed is its site, or the reader of its edge, recomputes

        X_k ∩ S_k − given,   X_k = {seed} ∪ cone_k(seed),   S_k = support_k(demand)

    and, where `inputs` have made the demand look at what it did not look at before, also what is in S_k
    and was disturbed, or never computed, when it was last out of sight. A change that another one hides
    (of an edge into a site whose value is given, of a rule where one is patched) costs nothing.

    Each place is changed once: TheoryError for the same edge, two patches of one site, or two
    redefinitions of one. The world has answered the demand before the first change.
    """
    weigh, made = _weighing(graph, weights), _expect_changes(graph, changes)
    chosen = expect.permutation(order, len(made))
    targets = _targets(graph, demand)
    ordered = [made[k] for k in chosen]
    costs, batched = (
        [*map(weigh, _interleaved(graph, ordered, targets))],
        weigh(_batched(graph, ordered, targets)),
    )
    alone = [weigh(_batched(graph, [change], targets)) for change in made if _is_possible(graph, change)]
    none = weigh(set())
    return ChangedCost(
        tuple(cost.weight("a cost") for cost in costs),
        sum(costs, none).weight("a cost"),
        sum(alone, none).weight("a cost") if len(alone) == len(made) else None,
        batched.weight("a cost"),
    )


def disturbed(graph: Graph, changes: ChangeAt | Iterable[ChangeAt], demand: Demand = None) -> frozenset[Site]:
    """The sites that one demand after all `changes` recomputes; for one change, {seed} ∪ cone, if wanted.

    docs/theory.md#changes. For values alone this is `stale`. A rule that is patched or redefined costs
    1 + |cone(s)| where everything is demanded, and nothing where the demand does not depend on s.
    """
    made = _expect_changes(expect.graph(graph), [changes] if isinstance(changes, ChangeAt) else changes)
    return frozenset(graph.names(_batched(graph, made, _targets(graph, demand))))


def change_extremes(
    graph: Graph, changes: Iterable[ChangeAt], demand: Demand = None, *, weights: Weights | None = None
) -> PatchExtremes:
    """The least and the most total over all orders, for changes without `inputs`: see `best_change_order`.

    Proof. What stands already can only take nodes from X_k ∩ S_k: it takes paths away, or hides the
    change. It takes a path from the seed away only where a given site, or the reader of a given edge, is
    strictly below the seed, and it hides the change only at the seed itself. Downstream first, and what
    hides first at one seed, all of these stand before the change does, so each term is least; in the
    reverse order none does, and each term is its isolated cost, the most it can be.
    """
    made, demand = tuple(_listed(changes)), expect.demand(demand)
    best = best_change_order(graph, made)
    worst = best[::-1]
    least, most = (
        changed_cost(graph, made, demand, order=order, weights=weights).total for order in (best, worst)
    )
    return PatchExtremes(least, most, best, worst)


def best_change_order(graph: Graph, changes: Iterable[ChangeAt]) -> tuple[int, ...]:
    """An order of the least total, for any demand and weights: downstream first, at a seed what hides first.

    Rules, functions and redefinitions of different sites cost the same in every order: nothing shields.
    """
    made = _expect_changes(graph, changes)
    if any(change.inputs is not None for change in made):
        raise TheoryError(
            "a redefinition with other `inputs` can make later changes dearer or cheaper, so no order is the "
            "best of its kind. Compare orders with `changed_cost(..., order=...)`."
        )

    def key(k: int) -> tuple[float, int]:
        return -graph.table.labels[made[k].seed], made[k].rank

    return tuple(sorted(range(len(made)), key=key))


@dataclass(frozen=True, slots=True)
class _Change:
    """A change by node number. `edge` is the input of a changed edge; `seed` is where a wave would begin."""

    seed: int
    kind: ChangeKind
    edge: int | None
    inputs: tuple[int, ...] | None

    @property
    def rank(self) -> int:
        """Lower hides higher, at one seed: a value all else, a rule a redefinition."""
        if self.edge is not None or self.kind == "redefine":
            return 2
        return 0 if self.kind == "value" else 1


class _Reads:
    """The inputs of each node, as the changes so far leave them."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs: dict[int, tuple[int, ...]] = {}
        self._gained: dict[int, list[int]] = {}
        self._given_edges: dict[int, set[int]] = {}
        self._patched_edges: set[tuple[int, int]] = set()
        self._ruled: set[int] = set()
        self._called: set[int] = set()
        self.given: set[int] = set()

    def disturbed(self, change: _Change) -> set[int]:
        """Make a change; returns its seed and all that is below it, nothing where another one hides it."""
        return {change.seed} | self._below(change.seed, self.of) if self._make(change) else set()

    def _make(self, change: _Change) -> bool:
        seed = change.seed
        if change.edge is not None:
            if change.edge not in self._wired(seed):
                name = self._graph.name
                raise TheoryError(
                    f"{name(seed)!r} no longer reads {name(change.edge)!r} when that edge is patched: a "
                    "redefinition came before. Leave one of the two out."
                )
            self._patched_edges.add((change.edge, seed))
            if change.kind == "value":
                self._given_edges.setdefault(seed, set()).add(change.edge)
            return seed not in self.given
        if change.kind == "value":
            self.given.add(seed)
            return True
        if change.kind == "redefine":
            is_rewired = change.inputs is not None and change.inputs != self._wired(seed)
            if is_rewired:
                self._rewire(seed, change.inputs or ())
            return seed not in self.given and (is_rewired or seed not in self._ruled)
        if change.kind == "rule":
            self._ruled.add(seed)
        elif self._graph.table.rules[seed] is None:
            self._called.add(seed)
        return True

    def of(self, node: int) -> tuple[int, ...]:
        """The nodes that `node` reads."""
        if node in self.given:
            return ()
        cut = self._given_edges.get(node)
        wired = self._wired(node)
        return wired if cut is None else tuple(site for site in wired if site not in cut)

    def support(self, targets: Iterable[int] | None) -> set[int]:
        """The targets and all that they depend on; None: everything."""
        if targets is None:
            return set(self._graph.table.order)
        found = set(targets)
        stack = list(found)
        while stack:
            for site in self.of(stack.pop()):
                if site not in found:
                    found.add(site)
                    stack.append(site)
        return found

    def computed(self, nodes: Iterable[int]) -> set[int]:
        """Those of `nodes` whose value is not given; a source is computed where a function patches it."""
        rules = self._graph.table.rules
        return {
            node
            for node in nodes
            if node not in self.given and (rules[node] is not None or node in self._called)
        }

    def _wired(self, node: int) -> tuple[int, ...]:
        return self._inputs.get(node, self._graph.table.inputs[node])

    def _below(self, node: int, reads: Callable[[int], tuple[int, ...]]) -> set[int]:
        consumers, gained = self._graph.table.consumers, self._gained
        found: set[int] = set()
        stack = [node]
        while stack:
            site = stack.pop()
            for reader in (*consumers[site], *gained.get(site, ())):
                if reader not in found and site in reads(reader):
                    found.add(reader)
                    stack.append(reader)
        return found

    def _rewire(self, node: int, inputs: tuple[int, ...]) -> None:
        name = self._graph.name
        lost = [site for site in self._wired(node) if site not in inputs]
        for site in lost:
            if (site, node) in self._patched_edges:
                raise TheoryError(
                    f"redefining {name(node)!r} would take away the edge {name(site)!r} -> {name(node)!r}, "
                    "which another change patches. The graph refuses that; leave one of the two out."
                )
        behind = self._below(node, self._wired) | {node}
        for site in inputs:
            if site in behind:
                raise TheoryError(f"{name(node)!r} cannot read {name(site)!r}, which depends on it by then.")
        for site in inputs:
            self._gained.setdefault(site, []).append(node)
        self._inputs[node] = inputs


def _interleaved(graph: Graph, changes: Sequence[_Change], targets: list[int] | None) -> list[set[int]]:
    """For each change, what the demand after it computes."""
    reads, found = _Reads(graph), []
    stale = set(graph.table.order) - reads.support(targets)
    for change in changes:
        stale |= reads.disturbed(change)
        wanted = reads.support(targets)
        found.append(reads.computed(stale & wanted))
        stale -= wanted
    return found


def _batched(graph: Graph, changes: Sequence[_Change], targets: list[int] | None) -> set[int]:
    """Return the nodes that one demand after all changes computes."""
    reads = _Reads(graph)
    stale = set(graph.table.order) - reads.support(targets)
    for change in changes:
        stale |= reads.disturbed(change)
    return reads.computed(stale & reads.support(targets))


def _is_possible(graph: Graph, change: _Change) -> bool:
    """True if a change can be made alone: a site cannot read what depends on it."""
    if change.inputs is None:
        return True
    return (graph.table.cone([change.seed]) | {change.seed}).isdisjoint(change.inputs)


def _weighing(graph: Graph, weights: Weights | None) -> Callable[[set[int]], Amount]:
    """Weigh nodes; a source that a function patches is computed, and weighs 1, or what `weights` say."""
    scale, rules, name = Scale(graph, weights), graph.table.rules, graph.name

    def of_source(site: Site) -> Amount:
        if weights is None:
            return Amount(1)
        if site not in weights:
            raise TheoryError(
                f"`weights` has no entry for the source {site!r}, which a function patches and which is "
                "computed for that reason. Give it a weight, 0 included."
            )
        return amount(weights[site], f"the weight of {site!r}")

    return lambda nodes: sum((of_source(name(node)) for node in nodes if rules[node] is None), scale(nodes))


def _targets(graph: Graph, demand: Demand) -> list[int] | None:
    targets = expect.demand(demand)
    return None if targets is None else graph.numbers(targets)


def _listed(changes: object) -> list[ChangeAt]:
    of = "ChangeAt(site, kind) or ChangeAt((u, w), kind) for each"
    entries = enumerate(expect.items(changes, "the list of changes", of))
    return [_expect_entry(entry, place) for place, entry in entries]


def _expect_changes(graph: Graph, changes: object) -> list[_Change]:
    made: list[_Change] = []
    places: set[object] = set()
    for place, change in enumerate(_listed(changes)):
        found = _expect_change(expect.graph(graph), change, place)
        what = (found.edge, found.seed) if found.edge is not None else (found.seed, found.kind == "redefine")
        key = (found.edge is None, what)
        if key in places:
            raise TheoryError(
                f"change {place} is a second one at {change.at!r}; a sequence of changes patches each site, "
                "patches each edge and redefines each site once."
            )
        places.add(key)
        made.append(found)
    return made


def _expect_entry(change: object, place: int) -> ChangeAt:
    if isinstance(change, ChangeAt):
        return change
    raise TheoryError(
        f"change {place} is {shown(change)}; write ChangeAt(site, 'value'), ChangeAt((u, w), 'function') or "
        "ChangeAt(site, 'redefine', inputs=(...))."
    )


def _expect_change(graph: Graph, change: ChangeAt, place: int) -> _Change:
    kind = expect.one_of(change.kind, _KINDS, f"the kind of change {place}")
    if change.inputs is not None and kind != "redefine":
        raise TheoryError(
            f"change {place} has `inputs` and is no 'redefine': only that changes what is read."
        )
    if isinstance(change.at, tuple):
        if kind not in ("value", "function"):
            raise TheoryError(
                f"change {place} is a {kind!r} of the edge {change.at!r}: an edge has no rule. It is "
                "patched with a 'value' or a 'function'."
            )
        edge, seed = graph.edge(change.at)
        return _Change(seed, kind, edge, None)
    seed = graph.number(expect.site(change.at, f"the place of change {place}"))
    if kind in ("rule", "redefine") and graph.table.rules[seed] is None:
        raise TheoryError(
            f"change {place} is a {kind!r} of {change.at!r}, a source, which has no rule. It is "
            "changed with a 'value' or a 'function'."
        )
    given = change.inputs
    inputs = (
        None if given is None else tuple(graph.numbers(expect.sites(given, f"`inputs` of change {place}")))
    )
    return _Change(seed, kind, None, inputs)


# -- Patches ---------------------------------------------------------------------------------------
# Persistent patches: sites that are given values one after the other, none restored, a demand after each.
#
# Patches differ from grafts: a patched site is given, so it shields what is below it from what is above.


@dataclass(frozen=True, slots=True)
class PatchedCost:
    """The cost of patches that stay, with a demand after each: `costs` in the order they were made.

    batched ≤ total ≤ isolated, always: `batched` is one demand after all patches, `isolated` the sum
    over patches in worlds of their own; `shielded` = isolated − total ≥ 0 is what the patches that
    are already there spare the later ones.
    """

    costs: tuple[Weight, ...]
    total: Weight
    isolated: Weight
    batched: Weight
    shielded: Weight


@dataclass(frozen=True, slots=True)
class PatchExtremes:
    """The least and the most that the patches cost over all orders, and orders that attain them."""

    least: Weight
    most: Weight
    best: tuple[int, ...]
    worst: tuple[int, ...]


def patched_cost(
    graph: Graph,
    patches: Iterable[Site],
    demand: Demand = None,
    *,
    order: Iterable[int] | None = None,
    weights: Weights | None = None,
) -> PatchedCost:
    """The cost of patching distinct sites in `order`, values given, with `demand` after each.

    docs/theory.md#patches. The patch of s, when the sites A are patched already, recomputes what a path
    from s reaches without passing A, and from which the demand is reached without passing A:

        cost(s | A) = | cone(s, cut at A) ∩ support(demand, cut at A ∪ {s}) |

    a patched site itself never counts. The world has answered the demand before the first patch.
    """
    made = _patches(graph, patches)
    found = changed_cost(graph, made, demand, order=order, weights=weights)
    assert found.isolated is not None, "each value can be given alone"
    spared = Amount.of(found.isolated) - found.total
    return PatchedCost(found.costs, found.total, found.isolated, found.batched, spared.weight("a cost"))


def patch_extremes(
    graph: Graph, patches: Iterable[Site], demand: Demand = None, *, weights: Weights | None = None
) -> PatchExtremes:
    """The least and the most total over all orders: downstream first, and upstream first.

    Proof. A patch in A matters to cost(s | A) only if a path from s meets it, that is, if it is below
    s, and more of them can only take nodes away. Downstream first, all patches below s are there before
    s, so every term is least; upstream first, none is, so every term is most, which
    is its isolated cost. Both hold term by term, so no search is needed, on any DAG. The best order for
    patches is the worst for grafts.
    """
    return change_extremes(graph, _patches(graph, patches), demand, weights=weights)


def best_patch_order(graph: Graph, patches: Iterable[Site]) -> tuple[int, ...]:
    """An order of the least total, for any demand and weights: downstream first; see `patch_extremes`."""
    return best_change_order(graph, _patches(graph, patches))


def _patches(graph: Graph, patches: object) -> list[ChangeAt]:
    sites = expect.sites(patches, "the list of patches")
    expect.graph(graph).numbers(sites)
    twice = [site for place, site in enumerate(sites) if site in sites[:place]]
    if twice:
        raise TheoryError(f"{twice[0]!r} is patched twice; a sequence of patches names each site once.")
    return [ChangeAt(site, "value") for site in sites]


# -- Restoring -------------------------------------------------------------------------------------
# Restoring in place: what a sweep costs in one world, each patch taken away before the next is made.
#
# Taking a patch away invalidates its site and what is below, as making it did. A fork restores nothing.


@dataclass(frozen=True, slots=True)
class RestoredCost:
    """The cost of a sweep that restores in place: `costs` in the order in which the sites are patched.

    `forked` is what the same sweep costs over forks (`sweep_cost`), and `surplus` = total − forked ≥ 0.
    `left` is what a demand of the baseline computes after the last restore.
    """

    costs: tuple[Weight, ...]
    total: Weight
    forked: Weight
    surplus: Weight
    left: Weight


def restored_cost(
    graph: Graph, sites: Iterable[Patch], demand: Demand = None, *, weights: Weights | None = None
) -> RestoredCost:
    """Return the cost of a sweep in one world: patch a site, demand, take the patch away; then the next.

    docs/theory.md#restoring. The world has answered `demand`, D, before the first patch; values are given,
    and a restore keeps nothing. Let A(P) = P ∪ cone(P), what a restore of P invalidates, and
    W(P) = support(D, cut at P), what the demand wants under the patch P. The demand under the i-th patch
    computes what is below it and what earlier restores have left stale, as far as it is wanted:

        ((cone(Pᵢ) ∪ Sᵢ₋₁) − Pᵢ) ∩ W(Pᵢ),   Sᵢ = (Sᵢ₋₁ − W(Pᵢ)) ∪ A(Pᵢ),   S₀ empty

    An element of `sites` is one site, or the collection of sites that are patched together.
    """
    scale, targets = Scale(graph, weights), expect.demand(demand)
    patches = patches_of(graph, sites)
    costs = []
    stale: set[int] = set()
    for patch in patches:
        below = graph.table.cone(patch)
        needed = wanted(graph, targets, set(patch))
        invalid = (below | stale) - set(patch)
        costs.append(scale(invalid if needed is None else invalid & needed))
        stale = (set() if needed is None else stale - needed) | below | set(patch)
    support = wanted(graph, targets)
    left = scale(stale if support is None else stale & support)
    spent = sum(costs, scale(()))
    forked = sum(world_costs(graph, [graph.names(patch) for patch in patches], targets, scale), scale(()))
    return RestoredCost(
        tuple(cost.weight() for cost in costs),
        *(cost.weight() for cost in (spent, forked, spent - forked, left)),
    )
