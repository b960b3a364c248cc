"""Several edges in one world: a reader sees another part of each; what a reader would hide is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import EdgeError
from conewise.sweeps.planning.plan import SweepPlan
from tests.circuits.edge_models import inputs_of, module_of, run_of
from tests.circuits.hook_oracle import HookOracle

NAMES = ["llama", "gemma2"]
METRIC = cw.logit_diff(answer=3, wrong=5)

SETS = [
    ["a0.h0->m1", "a0.h1->m1"],
    ["input->m1", "m0->m1", "a0.h1->m1"],
    ["input->logits", "m0->logits"],
    ["a0.h0->a1.h1<q>", "m0->a1.h1<q>", "a0.h1->a1.h2<q>"],
    ["m0->m1"],
]


def swept(name: str, sets: Any = SETS) -> Any:
    model: Any = run_of(name, 0).model
    return model.sweep(sets, base=run_of(name, 0), source=run_of(name, 1), metric=METRIC)


def difference(logits: Tensor) -> Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 5]).double()


@pytest.mark.parametrize("name", NAMES)
def test_edges_into_one_reader_add_up_as_plain_hooks_say(name: str) -> None:
    oracle = HookOracle(module_of(name))
    inputs, source = inputs_of(name, 0), oracle.forward(**inputs_of(name, 1))
    expected = torch.stack([difference(oracle.removed(one, source.parts, inputs).logits) for one in SETS])
    result = swept(name).run(progress=False)
    torch.testing.assert_close(result.per_prompt[0], expected, rtol=0, atol=2e-5)
    alone = swept(name, [one for several in SETS[:2] for one in several]).run(progress=False)
    assert float((result.values[0] - alone.values[:2]).abs().min()) > 1e-4  # both of them were patched
    assert result.ledger.node_evaluations == result.plan.node_evaluations


def test_one_by_one_is_the_same_and_hooks_agree() -> None:
    result = swept("llama").run(progress=False)
    serial = swept("llama").run(progress=False, evaluator="serial")
    torch.testing.assert_close(serial.values, result.values, rtol=0, atol=2e-5)
    assert result.verify(n=len(SETS)).ok


def test_edges_are_given_by_name_as_tables_and_as_sets() -> None:
    model: Any = run_of("llama", 0).model
    edges = model.edges()
    first, second = "a0.h0->m1", "a0.h1->m1"
    ways = [[first, second], [edges[first], edges[second]], edges[[first, second]], {second, first}]
    values = swept("llama", [*ways, first]).run(progress=False).values
    assert len(set(values[:4].tolist())) == 1
    assert values[4] != values[0]


def test_a_pair_of_a_kind_and_a_layer_is_one_place_still() -> None:
    assert [cell.name for cell in swept("llama", ("z", 1)).cells] == ["z[layer=1]"]


def test_an_edge_and_a_site_that_it_does_not_hide_are_patched_together() -> None:
    result = swept("llama", [["a0.h0->a1.h1<q>", cw.site("z", layer=1, head=0)]]).run(progress=False)
    assert result.verify(n=1).ok


def test_positions_are_patched_apart() -> None:
    together = swept("llama", [["a0.h0->m1@3", "a0.h1->m1@3"], ["a0.h0->m1@3", "a0.h1->m1@4"]])
    assert [len(cell.places) for cell in together.cells] == [1, 2]
    result = together.run(progress=False)
    assert result.verify(n=2).ok


def test_a_plan_and_a_result_of_sets_are_kept_whole(tmp_path: Path) -> None:
    sweep = swept("llama")
    plan = sweep.plan()
    assert SweepPlan.from_json(plan.to_json()) == plan
    result = plan.run(progress=False)
    assert cw.open(result.save(tmp_path / "sets")).equals(result)
    table = result.to_dataframe()
    assert table["site"][0] == "a0.h0->m1 + a0.h1->m1"
    assert table["writer"].isna().tolist() == [True, True, True, True, False]
    result.plot()


def test_sets_of_edges_are_no_circuit() -> None:
    with pytest.raises(cw.ConewiseError, match="is no single edge, and circuits are made of these"):
        swept("llama").run(progress=False).circuit(top=3)


@pytest.mark.parametrize(
    ("several", "said"),
    [
        (
            ["a0.h0->m1", "input->a0.kv1<v>"],
            "m1 is patched with what it would be in the base, and would hide",
        ),
        (["m0->logits", "a0.h0->m0"], "logits is patched with what it would be in the base, and would hide"),
        (["input->m0", "m0->a1.h0<q>"], "input->m0 and m0->a1.h0<q> cannot be patched in one world"),
        ([cw.site("z", layer=0, head=1), "a0.h0->m1"], r"z\[layer=0, head=1\] and a0.h0->m1 cannot"),
        (["a0.h0->m1", "a0.h0->m1"], "one of them is named twice"),
        (["a0.h0->m1@3", "a0.h1->m1"], "name the positions of each"),
        (["a0.h0->m1@3", "a0.h1->m1@-1"], "counted from the front"),
        (["a0.h0->m1@three", "a0.h1->m1"], "a position is a number"),
        (["a0.h0->m9", "a0.h1->m1"], "no reader 'm9'"),
    ],
)
def test_what_cannot_be_patched_together_is_refused(several: list[Any], said: str) -> None:
    with pytest.raises(EdgeError, match=said):
        swept("llama", [several])
