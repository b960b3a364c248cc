"""The memory that worlds with removed edges are planned to take is what they take, in torch's own blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import conewise as cw
from conewise.circuits.masked_forward import Ablated, MaskedForward
from conewise.circuits.pruned_forward import PrunedForward
from conewise.circuits.replaced_parts import edge_facts
from conewise.program.rehearsal import is_rehearsal
from conewise.runs.values import reader
from tests.attributing.test_memory import OFF, Blocks
from tests.circuits.small_models import small
from tests.circuits.test_acdc import bert_runs
from tests.circuits.test_masked_forward import METRIC, random_masks


def taken(compute: Callable[[], Any]) -> int:
    held = Blocks([])
    with held:
        compute()
    return held.peak


@pytest.mark.parametrize(("name", "ablation"), [("gpt2", "resample"), ("llama", "zero")])
def test_a_stack_of_worlds_holds_what_was_planned(name: str, ablation: str) -> None:
    given = small(name)
    facts = edge_facts(given.model)
    forward = PrunedForward(facts, given.base, Ablated(facts, ablation, given.base, given.source), METRIC)
    forward.begin(random_masks(given, 3)[2] & (np.arange(forward.shape[1]) % 4 == 1))
    removed = random_masks(given, 3)
    stacks = [{stage.number: removed[:, stage.rows] for stage in forward.stages}]
    stacks += [
        {one.number: forward._in_line(one.number, forward._state.removed, 4)} for one in forward.stages[-3:]
    ]
    for own in stacks:
        forward._evaluated(forward._state, own)  # constants are kept
        planned = forward.peak_bytes(own) - forward._held - forward._state.bytes
        held = taken(lambda own=own: forward._evaluated(forward._state, own))  # type: ignore[misc]
        assert held == pytest.approx(planned, rel=OFF)
        worlds = len(next(iter(own.values())))
        assert held <= worlds * forward._bound(min(own), forward._state.removed & ~forward._there)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_worlds_of_any_model_hold_what_was_planned(name: str) -> None:
    model, base, source = bert_runs() if name == "bert" else (small(name).model, small(name).base, None)
    facts = edge_facts(model)
    forward = MaskedForward(facts, base, Ablated(facts, "zero", base, source), cw.logit(3, pos=-1))
    for worlds in (1, 3):
        removed = np.ones((worlds, *forward.shape), dtype=bool)
        forward._metric(removed, {}, 0)  # constants are kept
        held = taken(lambda removed=removed: forward._metric(removed, {}, 0))  # type: ignore[misc]
        assert held == pytest.approx(forward.peak_bytes(worlds), rel=OFF)
        assert held <= worlds * forward._bound


@pytest.mark.parametrize(("name", "threshold"), [("gpt2", 0.02), ("llama", 0.1)])
def test_a_search_holds_the_most_that_is_planned_for_one_of_its_steps(
    name: str, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, evaluated, planned = small(name), PrunedForward._evaluated, list[int]()
    kept = list[int]()
    search = given.model.find_circuit(
        base=given.base, source=given.source, metric=cw.logit(3), threshold=threshold
    )

    def counted(forward: PrunedForward, state: Any, own: Any) -> Any:
        if not is_rehearsal():
            planned.append(forward.peak_bytes(own, state))
            kept.append(forward._replaced[0].parts.nbytes)
        return evaluated(forward, state, own)

    search.run(progress=False)  # what is kept with the model is known, and the parts of its run are
    monkeypatch.setattr(PrunedForward, "_evaluated", counted)
    most = taken(lambda: search.run(progress=False, max_memory="10MB"))
    assert most + kept[0] == pytest.approx(max(planned), rel=OFF)
    assert len(planned) > 3


@pytest.mark.parametrize(
    ("name", "threshold", "is_most"),
    [("gpt2", 1e-9, True), ("llama", 0.005, True), ("gemma2", 0.1, True), ("llama", 0.1, False)],
)
def test_a_search_holds_what_its_plan_says_where_most_is_kept(
    name: str, threshold: float, is_most: bool
) -> None:
    """Where much is removed, what nothing reads any more is not computed, and the search holds less."""
    given = small(name)
    search = given.model.find_circuit(
        base=given.base, source=given.source, metric=cw.logit(3), threshold=threshold
    )
    search.run(progress=False)  # what is kept with the model is known, and the parts of its run are
    most = taken(lambda: search.run(progress=False))
    most += edge_facts(given.model).parts.parts(reader(given.base)).nbytes
    planned = search.plan().peak_bytes
    assert planned is not None
    assert most == pytest.approx(planned, rel=OFF) if is_most else most < planned


def test_a_search_holds_no_more_than_its_budget() -> None:
    given = small("gpt2")
    asked: dict[str, Any] = {
        "base": given.base,
        "source": "zero",
        "metric": cw.logit(3),
        "threshold": 0.1,
    }
    with pytest.raises(cw.errors.BudgetError) as refused:
        given.model.find_circuit(**asked).run(max_memory=10)
    least, whole = refused.value.least, given.model.find_circuit(**asked).run()
    for budget in (least, 3 * least):
        held = Blocks([])
        with held:
            found = given.model.find_circuit(**asked).run(max_memory=budget)
        assert held.peak <= budget
        assert found.edges == whole.edges
