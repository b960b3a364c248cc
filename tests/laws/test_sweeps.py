"""Sweeps: serial is a full re-run bit for bit, a wavefront is that up to rounding, and theory counts both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from conewise.errors import SweepError
from conewise.paper.theory.sweeps import sweep_cost
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.schedule import LAUNCH_FLOPS
from tests.laws.swept import Swept, read_all, read_last, stale_in_theory, sweeps

ROUNDING = 1e-4
"""How far a wavefront may lie from serial, relative to the metric's largest value: batched kernels sum in
another order. Typically it is below 1e-6; see `tests/sweeps/test_sweep_zoo.py`."""


@pytest.fixture(autouse=True, scope="module")
def _every_beginning_has_a_pass() -> Iterator[None]:
    """In small models a pass costs more than it saves: let it cost nothing, so that regions are used."""
    with pytest.MonkeyPatch.context() as patch:
        for device in LAUNCH_FLOPS:
            patch.setitem(LAUNCH_FLOPS, device, 0)
        yield


def assert_close(one: Tensor, other: Tensor) -> None:
    """Metric by metric, relative to its largest value.

    A difference of logits may cancel, and is then no more exact than the logits, which are of order one.
    """
    for left, right in zip(one, other, strict=True):
        assert (left - right).abs().max() <= ROUNDING * right.abs().max() + 8 * torch.finfo(torch.float32).eps


@settings(max_examples=60)
@given(sweeps())
def test_serial_is_a_full_re_run_bit_for_bit(swept: Swept) -> None:
    assert torch.equal(swept.sweep.run(evaluator="serial").per_prompt, swept.in_full)


@settings(max_examples=80)
@given(sweeps())
def test_a_wavefront_is_serial_up_to_rounding(swept: Swept) -> None:
    sweep = swept.sweep
    if sweep.plan().evaluator == "wavefront":
        assert_close(sweep.run(evaluator="wavefront").per_prompt, swept.in_full)
    else:
        assert "no batch" in sweep.plan().why


@settings(max_examples=60)
@given(sweeps())
def test_plan_ledgers_and_theory_count_the_same(swept: Swept) -> None:
    """Theorem: a sweep of forks of one warm baseline computes what is stale in each world, once."""
    sweep = swept.sweep
    planned = sweep.plan().node_evaluations
    assert planned == stale_in_theory(swept)
    assert planned == sweep.run(evaluator="serial").ledger.node_evaluations
    assert planned == sweep.run().ledger.node_evaluations
    if not swept.puts_functions and not any(place.part for place in chain(*swept.cells)):
        nodes = [{swept.model.locate(place).node for place in cell} for cell in swept.cells]
        assert planned == sweep_cost(swept.model.graph, nodes, sweep.targets())


@settings(max_examples=40)
@given(sweeps(), st.floats(0, 1))
def test_chunks_change_nothing(swept: Swept, share: float) -> None:
    """Any budget between what the largest world takes and what all together take."""
    sweep = swept.sweep
    if sweep.plan().evaluator == "serial":
        return
    whole = sweep.run(evaluator="wavefront")
    with pytest.raises(SweepError, match="The least that would do") as refused:
        sweep.plan(max_memory=1)
    least = int(re.findall(r"max_memory=(\d+)", str(refused.value))[0])
    budget = int(least + share * (max(whole.plan.peak_bytes, least) - least))
    cut = sweep.run(evaluator="wavefront", max_memory=budget)
    assert_close(cut.per_prompt, whole.per_prompt)
    assert cut.ledger.node_evaluations == whole.ledger.node_evaluations
    assert sum(cut.plan.chunks) == len(swept.cells)
    assert cut.plan.peak_bytes <= budget


@settings(max_examples=40)
@given(sweeps(), st.randoms(use_true_random=False))
def test_the_order_of_the_cells_changes_nothing(swept: Swept, random: Random) -> None:
    order = list(range(len(swept.cells)))
    random.shuffle(order)
    cells = tuple(swept.cells[place] for place in order)
    shuffled = Swept(swept.name, swept.base, cells, swept.source, swept.metrics)
    assert_close(shuffled.sweep.run().per_prompt, swept.sweep.run().per_prompt[:, order])


@settings(max_examples=50)
@given(sweeps(metrics="last"))
def test_reading_the_last_position_alone_gives_the_same_numbers(swept: Swept) -> None:
    """The region behind the last position: with it, and with every position computed."""
    last = Swept(swept.name, swept.base, swept.cells, swept.source, (read_last("one"),)).sweep.run()
    every = Swept(swept.name, swept.base, swept.cells, swept.source, (read_all("one"),)).sweep.run()
    assert last.plan.evaluator == every.plan.evaluator
    assert_close(last.per_prompt, every.per_prompt)
    assert last.plan.flops <= every.plan.flops


def part_as_whole(reads: Graph, patched: set[str], whole: set[str], targets: Sequence[str]) -> set[str]:
    """Wrong: what is replaced in part is not computed, although another patch changes the rest of it."""
    return (set(reads.cone(patched)) - patched) & set(reads.support(targets, cut=patched))


def whole_as_part(reads: Graph, patched: set[str], whole: set[str], targets: Sequence[str]) -> set[str]:
    """Wrong: what is replaced whole is computed all the same."""
    return set(reads.cone(patched)) & set(reads.support(targets))


def not_cut(reads: Graph, patched: set[str], whole: set[str], targets: Sequence[str]) -> set[str]:
    """Wrong: what only a replaced value would have read is wanted."""
    return (set(reads.cone(patched)) - whole) & set(reads.support(targets))


def without_demand(reads: Graph, patched: set[str], whole: set[str], targets: Sequence[str]) -> set[str]:
    """Wrong: all that changes is computed, read or not."""
    return set(reads.cone(patched)) - whole


@pytest.mark.parametrize("formula", [part_as_whole, whole_as_part, not_cut, without_demand])
def test_a_wrong_count_is_refuted(formula: Callable[..., set[str]]) -> None:
    """The laws above can fail: the shared strategy draws sweeps that tell."""

    @settings(max_examples=100, phases=[Phase.generate])
    @given(sweeps())
    def law(swept: Swept) -> None:
        sweep = swept.sweep
        counted = 0
        for cell in swept.cells:
            patched = {swept.model.locate(place).node for place in cell}
            whole = {swept.model.locate(p).node for p in cell if not p.part and not swept.puts_functions}
            counted += len(formula(swept.model.graph, patched, whole, sweep.targets()))
        assert counted == sweep.plan().node_evaluations

    with pytest.raises(AssertionError):
        law()
