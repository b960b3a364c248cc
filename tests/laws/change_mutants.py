"""Wrong closed forms for changes that stay, each plausible: the total of a sequence, a demand after each."""

from __future__ import annotations

from collections.abc import Callable

import conewise as cw
from conewise.paper import theory
from conewise.paper.theory import ChangeAt
from tests.laws.change_scenes import ChangeScene, seed
from tests.laws.scenes import fresh_rule


def _own(change: ChangeAt) -> set[str]:
    return set() if isinstance(change.at, str) and change.kind == "value" else {seed(change)}


def _total(graph: cw.Graph, made: ChangeScene, changes: tuple[ChangeAt, ...]) -> float:
    return float(theory.changed_cost(graph, changes, made.scene.demand, order=made.order).total)


def the_cone_alone(graph: cw.Graph, made: ChangeScene) -> float:
    """V⁺ for every change: forgets that a site with another rule is computed itself."""
    support = set(graph.support(made.scene.demand))
    return float(sum(len(set(graph.cone(seed(change))) & support) for change in made.changes))


def one_more_whatever_is_demanded(graph: cw.Graph, made: ChangeScene) -> float:
    """1 + |V⁺|, without asking whether the demand depends on the site."""
    return float(sum(len(graph.cone(seed(change))) + len(_own(change)) for change in made.changes))


def the_isolated_sum(graph: cw.Graph, made: ChangeScene) -> float:
    """As for rules: nothing shields and nothing hides."""
    support = set(graph.support(made.scene.demand))
    return float(sum(len(({*graph.cone(seed(change))} | _own(change)) & support) for change in made.changes))


def the_cone_of_the_input(graph: cw.Graph, made: ChangeScene) -> float:
    """V⁺ᵤ for a patched edge (u, w): counts the other readers of u."""
    support = set(graph.support(made.scene.demand))
    cones = [
        set(graph.cone(change.at[0] if isinstance(change.at, tuple) else change.at)) | _own(change)
        for change in made.changes
    ]
    return float(sum(len(cone & support) for cone in cones))


def rules_that_shield(graph: cw.Graph, made: ChangeScene) -> float:
    """Takes another rule for a given value: what is above it passes it no more."""
    changes = tuple(
        ChangeAt(change.at, "value") if change.kind in ("rule", "function") else change
        for change in made.changes
    )
    wrong = _total(graph, made, changes)
    return wrong + sum(change.kind in ("rule", "function") for change in made.changes)


def edges_that_let_through(graph: cw.Graph, made: ChangeScene) -> float:
    """Takes a given edge for a function of it: what is above it still passes."""
    changes = tuple(
        ChangeAt(change.at, "function") if isinstance(change.at, tuple) else change for change in made.changes
    )
    return _total(graph, made, changes)


def redefinitions_that_are_never_hidden(graph: cw.Graph, made: ChangeScene) -> float:
    """Charges a redefinition of a site whose value is given, or whose rule is patched."""
    right = _total(graph, made, made.changes)
    given: set[str] = set()
    for k in made.order:
        change = made.changes[k]
        if isinstance(change.at, str) and change.kind in ("value", "rule"):
            given.add(change.at)
        elif change.kind == "redefine" and change.at in given:
            right += 1
    return right


def what_was_out_of_sight_is_forgotten(graph: cw.Graph, made: ChangeScene) -> float:
    """({seed} ∪ V⁺) ∩ support, were nothing given, whatever a redefinition brings back into sight."""
    shielded = any(change.kind == "value" for change in made.changes)
    seeds = [seed(change) for change in made.changes]
    if shielded or len(set(seeds)) < len(seeds):
        return _total(graph, made, made.changes)
    spent = 0
    for k in made.order:
        if made.changes[k].kind == "redefine":
            graph.redefine(seeds[k], fresh_rule(), made.changes[k].inputs)
        spent += len({seeds[k], *graph.cone(seeds[k])} & set(graph.support(made.scene.demand)))
    return float(spent)


ALL: tuple[Callable[[cw.Graph, ChangeScene], float], ...] = (
    the_cone_alone,
    one_more_whatever_is_demanded,
    the_isolated_sum,
    the_cone_of_the_input,
    rules_that_shield,
    edges_that_let_through,
    redefinitions_that_are_never_hidden,
    what_was_out_of_sight_is_forgotten,
)
