"""Parts of batches by a forward that follows: what it did before does not show in the values."""

from __future__ import annotations

import numpy as np
import pytest

import conewise as cw
from conewise.circuits.masked_forward import Ablated, Forward, MaskedForward
from conewise.circuits.pruned_forward import PrunedForward
from conewise.circuits.replaced_parts import Mask, edge_facts
from conewise.jobs.search_job import FollowingForward, WorldsPart
from tests.circuits.small_models import Small, small

METRIC = cw.logit_diff(answer=3, wrong=5)


def forward_of(given: Small, kind: type[MaskedForward] | type[PrunedForward]) -> Forward:
    facts, base = edge_facts(given.model), given.base
    return kind(facts, base, Ablated(facts, "resample", base, given.source), METRIC)


def whole(forward: Forward, part: WorldsPart) -> Mask:
    if part.stage is None:
        return part.removed
    found = np.repeat(part.current[None], len(part), 0)
    found[:, forward.stages[part.stage].rows] = part.removed
    return found


def there(forward: Forward) -> Mask:
    counts = np.array([one.writers for stage in forward.stages for one in stage.readers])
    found: Mask = np.arange(forward.shape[1]) < counts[:, None]
    return found


def random_parts(forward: Forward, seed: int, count: int) -> list[WorldsPart]:
    """Parts about worlds that go on from each other, and now and then from any other."""
    rng = np.random.default_rng(seed)
    edges = there(forward)
    current = np.zeros(forward.shape, dtype=bool)
    found: list[WorldsPart] = []
    stage = int(rng.integers(len(forward.stages)))
    for _ in range(count):
        moved = rng.random()
        if moved < 0.3:
            stage = int(rng.integers(len(forward.stages)))
        if moved < 0.1:
            current = edges & (rng.random(forward.shape) < rng.random())
        rows = forward.stages[stage].rows
        worlds = int(rng.integers(1, 5))
        more = edges[rows] & (rng.random((worlds, *edges[rows].shape)) < 0.2)
        removed: Mask = current[rows] | more
        if rng.random() < 0.1:
            found.append(WorldsPart(np.repeat(current[None], 2, 0), current))
        found.append(WorldsPart(removed, current.copy(), stage))
        current = current.copy()
        if rng.random() < 0.5:
            current[rows] = removed[rng.integers(worlds)]  # one of the part before
        elif rng.random() < 0.7:
            current[rows] |= edges[rows] & (rng.random(edges[rows].shape) < 0.2)  # another's
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt2", PrunedForward), ("llama", PrunedForward), ("gemma2", MaskedForward), ("gpt2", MaskedForward)],
)
def test_parts_have_the_values_of_their_worlds(
    name: str, kind: type[MaskedForward] | type[PrunedForward]
) -> None:
    given = small(name)
    plain = forward_of(given, kind)
    for seed in range(4):
        following = FollowingForward(forward_of(given, kind))
        for part in random_parts(plain, seed, 12):
            expected = plain.values(whole(plain, part))
            assert following.values(part) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_going_on_from_a_world_of_the_part_before_computes_nothing_and_one_of_others_one_world() -> None:
    given = small("gpt2")
    stage = forward_of(given, PrunedForward).stages[2]
    assert len(stage.readers) > 1
    lines = np.zeros((4, len(stage.readers), forward_of(given, PrunedForward).shape[1]), dtype=bool)
    for world in range(4):
        lines[world, 0, :world] = True

    def spent(*parts: tuple[Mask, Mask]) -> int:
        forward = forward_of(given, PrunedForward)
        following = FollowingForward(forward)
        for current, removed in parts:
            now = np.zeros(forward.shape, dtype=bool)
            now[stage.rows] = current
            before = forward.node_evaluations
            following.values(WorldsPart(removed, now, stage.number))
        return forward.node_evaluations - before

    first = lines[0], lines[:3]
    anew = spent((lines[2], lines[2:3]), (lines[2], lines[3:]))  # it is the current one already
    assert spent(first, (lines[2], lines[3:])) == anew
    assert spent((lines[0], lines[:2]), (lines[2], lines[3:])) == 2 * anew
