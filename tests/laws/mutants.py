"""Wrong formulas, each of which somebody could believe. The laws must refute every one of them.

Each answers a question that a law answers, for value patches or for a graft; `test_mutants.py` shows
that the shared strategy tells it from the right answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tests.laws.oracle import cone, support

Reads = Mapping[str, Sequence[str]]


def plain_union_of_cones(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """Forgets that a patched site inside another's cone is given, and so is not recomputed."""
    return cone(reads, patch) & support(reads, demand, cut=patch)


def support_not_cut_at_patches(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """Forgets that nothing above a patched site is wanted on its account."""
    return (cone(reads, patch) - set(patch)) & support(reads, demand)


def whole_cone_whatever_is_demanded(
    reads: Reads, patch: Collection[str], demand: Collection[str]
) -> set[str]:
    """Forgets that only what is demanded is computed."""
    return cone(reads, patch) - set(patch)


def cone_of_the_first_patch(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """Takes the cone of the first patch alone for the cone of all."""
    return (cone(reads, list(patch)[:1]) - set(patch)) & support(reads, demand, cut=patch)


def rules_like_values(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """For rules in place of values: forgets that such a site is itself computed, and from what it reads."""
    return (cone(reads, patch) - set(patch)) & support(reads, demand, cut=patch)


def rules_that_hide_what_is_above(reads: Reads, patch: Collection[str], demand: Collection[str]) -> set[str]:
    """For rules in place of values: forgets that such a site reads its inputs, so that they are wanted."""
    return (cone(reads, patch) | set(patch)) & support(reads, demand, cut=patch)


def edge_graft_invalidates_the_cone_of_its_input(reads: Reads, edge: tuple[str, str]) -> set[str]:
    """Forgets that the other readers of u see no change: V⁺ᵤ instead of {w} ∪ V⁺_w."""
    return cone(reads, [edge[0]])


def edge_graft_invalidates_the_cone_of_its_reader_alone(reads: Reads, edge: tuple[str, str]) -> set[str]:
    """Forgets w itself: V⁺_w instead of {w} ∪ V⁺_w."""
    return cone(reads, [edge[1]])


DEMAND_MUTANTS = [
    plain_union_of_cones,
    support_not_cut_at_patches,
    whole_cone_whatever_is_demanded,
    cone_of_the_first_patch,
]
RULE_MUTANTS = [rules_like_values, rules_that_hide_what_is_above]
GRAFT_MUTANTS = [
    edge_graft_invalidates_the_cone_of_its_input,
    edge_graft_invalidates_the_cone_of_its_reader_alone,
]
