"""Worlds with removed edges against plain PyTorch, one reader at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import conewise as cw
from conewise.circuits.masked_forward import Ablated, Forward, MaskedForward
from conewise.circuits.pruned_forward import PrunedForward
from conewise.circuits.replaced_parts import Mask, edge_facts
from conewise.runs.metric_words import as_metrics
from tests.circuits.removed_oracle import KINDS
from tests.circuits.small_models import Small, small

METRIC = cw.logit_diff(answer=3, wrong=5)


def expected(given: Small, removed: Mask, ablated: dict[str, torch.Tensor]) -> list[float]:
    """The metric of each prompt in a world of the oracle."""
    facts = edge_facts(given.model)
    writers, readers = facts.components.writers, facts.components.readers
    lost = {(writers[w].name, readers[r].name) for r, w in np.argwhere(removed)}
    logits, _ = given.plain.forward(given.ids, lost, ablated)
    return (logits[:, -1, 3] - logits[:, -1, 5]).tolist()


def random_masks(given: Small, count: int, seed: int = 0) -> Mask:
    """Removed edges of some worlds: none, all, and random ones of all densities."""
    components = edge_facts(given.model).components
    rng = np.random.default_rng(seed)
    shape = (count, len(components.readers), len(components.writers))
    removed = rng.random(shape) < rng.random((count, 1, 1))
    removed[0], removed[1] = False, True
    there = np.arange(shape[2]) < np.array([one.writers for one in components.readers])[:, None]
    found: Mask = removed & there
    return found


@pytest.mark.parametrize(
    ("name", "ablation"), [*((name, "resample") for name in KINDS), ("gpt2", "mean"), ("gemma2", "zero")]
)
def test_removed_edges_as_in_plain_pytorch(name: str, ablation: str) -> None:
    given = small(name)
    base, source = given.base, given.source
    facts = edge_facts(given.model)
    components = facts.components
    edges = [(w.name, r.name) for r in components.readers for w in components.writers[: r.writers]]
    assert edges == given.plain.edges()
    ablated = Ablated(facts, ablation, base, source)
    forwards: list[Forward] = [kind(facts, base, ablated, METRIC) for kind in (MaskedForward, PrunedForward)]
    removed = random_masks(given, 6)
    parts = given.plain.forward(given.other)[1]
    if ablation == "zero":
        parts = {name: torch.zeros_like(part) for name, part in parts.items()}
    elif ablation == "mean":
        parts = {name: part.mean((0, 1), keepdim=True).expand_as(part) for name, part in parts.items()}
    wanted = [expected(given, world, parts) for world in removed]
    for forward in forwards:
        found = forward.values(removed)
        assert found == pytest.approx(np.array(wanted), rel=1e-5, abs=1e-6)
        for world, run in ((0, base), *(((1, source),) if ablation == "resample" else ())):
            # Nothing removed is the base, all removed the source.
            own = run.logits[:, -1, 3] - run.logits[:, -1, 5]
            assert found[world] == pytest.approx(own.numpy(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2"])
def test_worlds_below_a_stage_are_those_with_all_that_was_removed_before(name: str) -> None:
    """The current world's values are read where nothing changes: the numbers are those from the base."""
    given = small(name)
    base, source = given.base, given.source
    facts = edge_facts(given.model)
    ablated = Ablated(facts, "resample", base, source)
    forwards: list[Forward] = [kind(facts, base, ablated, METRIC) for kind in (MaskedForward, PrunedForward)]
    removed, other = random_masks(given, 6)[4:]
    for stage in reversed(forwards[0].stages):
        current = removed.copy()
        current[: stage.first] = False
        worlds = np.repeat(current[None], 4, 0)
        worlds[1, stage.rows], worlds[2, stage.rows] = other[stage.rows], False
        worlds[3, stage.first] = other[stage.first]
        wanted = forwards[1].values(worlds)
        for forward in forwards:
            assert forward.begin(current) == pytest.approx(wanted[0], rel=1e-6, abs=1e-7)
            assert forward.below(stage.number, worlds[:, stage.rows]) == pytest.approx(
                wanted, rel=1e-6, abs=1e-7
            )
        # One of these worlds becomes the current one: what is computed from there on is the same.
        forwards[1].adopt(stage.number, worlds[1, stage.rows])
        again = forwards[1].below(stage.number, worlds[:, stage.rows])
        assert again == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_what_nothing_reads_is_not_computed() -> None:
    """Theory of grafts: a correction for each reader that lost edges, and the cone behind it, pruned."""
    given = small("gpt2")
    base, source = given.base, given.source
    facts = edge_facts(given.model)
    forward = PrunedForward(facts, base, Ablated(facts, "resample", base, source), METRIC)
    plain = MaskedForward(facts, base, Ablated(facts, "resample", base, source), METRIC)
    removed = np.zeros((1, *forward.shape), dtype=bool)
    removed[0, -1, 1:] = True  # the logits read the input alone
    forward.begin(removed[0])
    spent = forward.node_evaluations
    masks = np.zeros((3, *removed[0, forward.stages[0].rows].shape), dtype=bool)
    masks[1:, :, 0] = True
    values = forward.below(0, masks)
    assert forward.node_evaluations == spent
    assert np.array_equal(values, np.repeat(values[:1], 3, 0))
    plain.begin(removed[0])
    assert plain.below(0, masks) == pytest.approx(values, rel=1e-6, abs=1e-7)


def test_slices_of_projections_are_used_and_are_what_whole_projections_are() -> None:
    for name in ("gpt2", "gpt_neox", "llama"):
        given = small(name)
        base = given.base
        facts = edge_facts(given.model)
        forward = PrunedForward(facts, base, Ablated(facts, "resample", base, given.source), METRIC)
        removed = random_masks(given, 5)
        sliced = forward.values(removed)
        slots = [slot for attention in forward._attentions.values() for slot in attention.slots.values()]
        assert all(slot.slices is not None for slot in slots), name
        for slot in slots:
            slot.slices = None
        assert forward.values(removed) == pytest.approx(sliced, rel=1e-6, abs=1e-7)


def test_memory_is_kept_by_cutting_stacks() -> None:
    given = small("gpt2")
    base = given.base
    facts = edge_facts(given.model)
    ablated = Ablated(facts, "resample", base, given.source)
    roomy, tight = (PrunedForward(facts, base, ablated, METRIC, most) for most in (1 << 30, 1 << 18))
    assert roomy.most(0) > 100 > tight.most(0)
    removed = random_masks(given, 20)
    assert tight.values(removed) == pytest.approx(roomy.values(removed), rel=1e-9)


def test_a_metric_of_all_positions_and_one_of_all_outputs() -> None:
    given = small("gpt2")
    base = given.base
    facts = edge_facts(given.model)
    ablated = Ablated(facts, "resample", base, given.source)
    removed = random_masks(given, 5)
    targets = torch.roll(given.ids, -1, 1)

    def loss(outputs: object) -> torch.Tensor:
        logits: torch.Tensor = outputs.logits  # type: ignore[attr-defined]
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return flat.view(targets.shape).mean(1)

    for metric in (cw.cross_entropy(targets), cw.metric(loss, key="mean loss")):
        found = PrunedForward(facts, base, ablated, metric).values(removed)
        assert found == pytest.approx(MaskedForward(facts, base, ablated, metric).values(removed), rel=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_metrics_of_sites_in_worlds_with_removed_edges_as_in_plain_pytorch(name: str) -> None:
    """The output of an MLP, and what a head writes: edges into what lies behind them change nothing."""
    given = small(name)
    facts, removed = edge_facts(given.model), random_masks(given, 5)
    writers, readers = facts.components.writers, facts.components.readers
    ablated, parts = Ablated(facts, "resample", given.base, given.source), given.plain.forward(given.other)[1]
    width = given.base["mlp_out", 0].shape[-1]
    direction = torch.randn(width, generator=torch.Generator().manual_seed(0))
    for layer in range(given.model.n_layers):
        site = cw.read(cw.site("mlp_out", layer=layer, pos=-1), direction=direction)
        (metric,) = as_metrics(site, given.model)
        found = MaskedForward(facts, given.base, ablated, metric).values(removed)
        for row, world in zip(found, removed, strict=True):
            lost = {(writers[w].name, readers[r].name) for r, w in np.argwhere(world)}
            own = given.plain.forward(given.ids, lost, parts)[1][f"m{layer}"].float()
            assert row.tolist() == pytest.approx((own[:, -1] @ direction).tolist(), abs=2e-4)


def test_a_circuit_of_a_site_has_edges_in_front_of_it_alone() -> None:
    """ACDC whose metric is read inside the model: each kept edge matters to it, as the oracle has it."""
    given = small("gpt2")
    direction = torch.randn(given.base["mlp_out", 0].shape[-1], generator=torch.Generator().manual_seed(0))
    metric = cw.read(cw.site("mlp_out", layer=1, pos=-1), direction=direction)
    asked: Any = {"base": given.base, "source": given.source, "metric": metric}
    found = given.model.find_circuit(**asked, threshold=1e-3, harm="either").run(progress=False)
    readers = {edge.partition("->")[2].partition("<")[0] for edge in map(str, found.edges)}
    assert readers
    assert all(one in {"m0", "m1"} or one.startswith(("a0.", "a1.")) for one in readers)
    parts, edges = given.plain.forward(given.other)[1], set(given.plain.edges())
    kept = {tuple(edge.split("->")) for edge in map(str, found.edges)}
    without = given.plain.forward(given.ids, edges - kept, parts)[1]["m1"].float()[:, -1] @ direction
    assert float(found.evaluate(**asked).circuit) == pytest.approx(float(without.mean()), abs=2e-4)
