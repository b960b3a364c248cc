"""Surgery on captured models: what is pruned, grafted and redefined, against hooks on the module."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import conewise as cw
from conewise.errors import ConewiseError, FormatError, MissingSiteError, SurgeryError
from conewise.model import Model
from conewise.paper.theory.grafts import GraftAt, interleaved_cost
from conewise.program.tensors import computing
from conewise.program.walk import bitwise_same
from conewise.reactive.gradients import gradients
from conewise.runs.backward_cost import METRIC as OUTCOME
from conewise.runs.backward_cost import reverse_graph
from conewise.surgery.plan import measured
from tests.runs.state import assert_untouched, state_of
from tests.surgery.networks import NETWORKS, Bottleneck
from tests.surgery.sequences import failures, programs_of
from tests.surgery.sequences import plain as double
from tests.sweeps import small

METRIC = cw.logit_diff(answer=7, wrong=9)
STREAM = cw.site("resid_post", layer=0)


@cache
def plain() -> Model:
    return small.model()


def linear(width: int = 16) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(width, width)


def three_steps() -> cw.Surgery:
    return (
        cw.Surgery()
        .prune(cw.site("z", layer=1, head=1))
        .graft(STREAM, linear())
        .redefine("transformer.h.1.mlp.act", torch.relu)
    )


@pytest.mark.parametrize("network", ["gpt2", "llama", "gemma", "t5", "resnet", "tiny"])
def test_random_surgeries_are_what_hooks_and_replaced_submodules_make(network: str) -> None:
    assert list(failures((network, seed) for seed in (1, 2))) == []


@pytest.mark.parametrize(
    ("network", "kind", "stack", "width"),
    [("gpt2", "z", "", 16), ("tiny", "post", "", 24), ("t5", "cross_z", "decoder", 16)],
)
def test_a_sweep_behind_what_was_put_into_a_modules_input_is_checked(
    network: str, kind: str, stack: str, width: int
) -> None:
    """What a block makes there is its own output; at the input of the module, patches come before it."""
    place = cw.site(kind, layer=0, stack=stack)
    axis = "neuron" if kind == "post" else "head"
    operated = cw.Surgery().graft(place, Bottleneck(width, 3)).apply(double(network))
    base, source = (operated.run(**NETWORKS[network].example(seed)) for seed in (1, 2))
    cells = cw.sites(kind, layer=0, stack=stack, **{axis: [0, 2]})
    result = operated.sweep(cells, base=base, source=source, metric=lambda out: out.logits[:, -1, 3]).run()
    assert result.table.abs().min() > 0
    assert result.verify(n=2).ok


def test_an_operated_model_is_swept_and_checked_by_the_module_as_operated() -> None:
    operated = three_steps().apply(plain())
    result = small.sweep_over(operated).run()
    assert "wavefront" in str(result.plan)
    assert result.ledger.node_evaluations == result.plan.node_evaluations
    checked = result.verify(n=6)
    assert checked.ok
    assert checked.hooked == 6
    serial = small.sweep_over(operated).run(evaluator="serial")
    assert serial.verify(n=6).largest_deviation == 0
    assert torch.allclose(serial.values, result.values, atol=1e-5)


def test_the_model_and_its_module_stay_as_they_are() -> None:
    module = small.module()
    model = cw.capture(module, input_ids=small.prompts(0, 2))
    surgery = three_steps()
    before, records, names = state_of(module), model.program.records, len(model.site_table)
    surgery.apply(model)
    assert_untouched(module, before)
    assert (model.program.records, len(model.site_table)) == (records, names)
    assert model.verify()


def test_a_surgery_is_a_value() -> None:
    surgery = three_steps()
    assert len(surgery) == 3
    assert surgery.undo().steps == surgery.steps[:2]
    assert len(surgery) == 3
    assert str(surgery.undo()) == (
        "Surgery\n  0. prune z[layer=1, head=1]\n  1. graft Linear after resid_post[layer=0]"
    )
    empty = cw.Surgery()
    assert empty.apply(plain()) is plain()
    with pytest.raises(SurgeryError, match="no step to undo"):
        empty.undo()


def test_what_nothing_needs_any_more_is_removed() -> None:
    operated = cw.Surgery().prune("transformer.h.1").apply(plain())
    ids = small.prompts(1, 2)
    stream = plain().run(input_ids=ids)["resid_post", 0]
    with torch.no_grad():
        expected = plain().module.lm_head(plain().module.transformer.ln_f(stream))
    assert torch.equal(operated.run(input_ids=ids).logits, expected)
    left = {path for record in operated.program.records for call in record.modules for path in [call.path]}
    assert not any(path.startswith("transformer.h.1") for path in left)
    assert not any(source.name.startswith("transformer.h.1.") for source in operated.program.sources)
    with pytest.raises(MissingSiteError, match=r"layer 1 has no 'z': attn_out\[layer=1\] was pruned"):
        operated.locate(cw.site("z", layer=1))
    assert (
        operated.sweep(
            cw.sites("z", layer=":"), base=operated.run(input_ids=ids), source="zero", metric=METRIC
        )
        .run()
        .verify(2)
        .ok
    )


def test_pruned_values_are_a_mean_or_a_tensor_where_that_is_said() -> None:
    ids, place = small.prompts(1, 2), cw.site("mlp_out", layer=0)
    vector = torch.arange(16.0)
    by_tensor = cw.Surgery().prune(place, value=vector).apply(plain())
    assert torch.equal(by_tensor.run(input_ids=ids)["mlp_out", 0], vector.expand(2, 6, 16))
    over = small.prompts(5, 3)
    by_mean = cw.Surgery().prune(place, value="mean", over=[{"input_ids": over}]).apply(plain())
    mean = plain().run(input_ids=over)["mlp_out", 0].mean((0, 1))
    assert torch.allclose(by_mean.run(input_ids=ids)["mlp_out", 0], mean.expand(2, 6, 16), atol=1e-6)


def test_a_place_that_no_module_shows_is_operated_on_all_the_same() -> None:
    operated = cw.Surgery().graft(cw.site("resid_mid", layer=0), linear()).apply(plain())
    ids = small.prompts(1, 2)
    with plain().run(input_ids=ids).fork() as world:
        world.patch(cw.site("resid_mid", layer=0), linear())
        assert torch.equal(world.logits, operated.run(input_ids=ids).logits)


def test_a_surgery_is_saved_and_applied_to_another_model(tmp_path: Path) -> None:
    block = nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 16, bias=False))
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    surgery = (
        three_steps()
        .graft(("mlp_out", 0), block, name="adapter")
        .redefine("transformer.h.0.mlp.c_fc", weight=weight)
        .prune(cw.site("post", layer=0, neuron=[1, 5]), value=0.25)
        .prune(cw.site("post", layer=1, neuron=slice(0, 8)))
    )
    surgery.save(tmp_path)
    again = cw.Surgery.load(tmp_path)
    assert str(again) == str(surgery)
    other, ids = small.model(seed=4), small.prompts(1, 2)
    assert torch.equal(
        again.apply(other).run(input_ids=ids).logits, surgery.apply(other).run(input_ids=ids).logits
    )
    with pytest.raises(SurgeryError, match="has no name that it could be imported by"):
        cw.Surgery().graft(STREAM, lambda x: 2 * x).save(tmp_path)
    (tmp_path / "surgery.json").write_text('{"version": 99, "steps": []}')
    with pytest.raises(FormatError, match="another version"):
        cw.Surgery.load(tmp_path)


def test_the_plan_is_what_the_ledger_counts() -> None:
    surgery = three_steps().graft(("mlp_out", 1), linear()).prune("transformer.h.1")
    plan = surgery.plan(plain())
    programs = programs_of(plain(), surgery.apply(plain()))
    inputs = plain().signature.bind((), {"input_ids": small.prompts(1, 2)})
    assert measured(programs, inputs) == (tuple(step.recomputed for step in plan.steps), plan.batched)
    assert (plan.interleaved, plan.isolated, plan.batched) == (89, 94, 3)
    assert plan.operations == (82, 46)
    assert "grafts: an order costs" in str(plan)


def test_grafts_cost_what_the_theorem_says_in_the_best_and_in_the_worst_order() -> None:
    places = [("resid_post", 0), ("mlp_out", 1), ("attn_out", 0), ("resid_mid", 1)]
    steps = cw.Surgery()
    for place in places:
        steps = steps.graft(place, linear())
    plan = steps.plan(plain())
    assert plan.orders is not None
    assert (plan.orders.least, plan.orders.most) == (0, 6)
    for which, most in (("best", plan.orders.least), ("worst", plan.orders.most)):
        ordered = cw.Surgery(tuple(steps.steps[number] for number in plan.order(which)))
        cost = ordered.plan(plain())
        assert cost.overcount == most
        assert (cost.batched, cost.isolated) == (plan.batched, plan.isolated)
        sites = [plain().locate(place).node for place in places]
        theorem = interleaved_cost(plain().graph, [GraftAt(one, 1) for one in sites], plan.order(which))
        assert theorem.costs == tuple(step.recomputed for step in cost.steps)


@pytest.mark.parametrize("network", ["gpt2", "llama", "gemma", "t5", "resnet"])
def test_identity_blocks_leave_every_value_bit_for_bit(network: str) -> None:
    """Exactness composes: after each of several grafts of identities, all values are what they were."""
    case, model = NETWORKS[network], double(network)
    given = case.example(4)
    run = model.run(**given, keep="all")
    made = model
    for path in [one.format(layer) for one in case.outs for layer in range(case.layers)]:
        block = Bottleneck(case.width, 1, case.dim)
        with torch.no_grad():
            block.up.zero_()
        made = cw.Surgery().graft(path, block).apply(made)
        after = made.run(**given, keep="all")
        for name in model.program.record_of:
            assert bitwise_same(run._values((name,))[0], after._values((name,))[0]), name


def test_the_reverse_pass_of_an_operated_model_is_counted_as_the_theory_says() -> None:
    """What a patch makes stale, forwards and backwards: by the theory, and by the ledger of a warm world."""
    operated = three_steps().apply(plain())
    run = operated.run(input_ids=small.prompts(1, 2))
    places = [cw.site("z", layer=0), cw.site("mlp_out", layer=1), cw.site("graft.output")]
    cost = run.backward_cost(METRIC, [[place] for place in places])
    graph = reverse_graph(run._tape(), METRIC, run.inputs).graph
    forward = set(graph.sites)
    nodes = [operated.locate(place).node for place in places]
    grads = gradients(graph, OUTCOME, nodes)
    with computing(), cw.World(graph) as base:
        base.demand((OUTCOME, *grads.values()))
        for place, node in zip(places, nodes, strict=True):
            with base.fork() as world:
                world.patch(node, base.demand(node) * 1.25 + 0.125)
                with world.ledger.interval() as ledger:
                    world.demand((OUTCOME, *grads.values()))
            again = sum(site in forward for site in ledger.recomputed)
            found = cost[str(place)]
            assert (again, len(ledger.recomputed) - again) == (found.forward, found.backward)


BAD: dict[str, tuple[Any, str]] = {
    "a shape that does not fit": (
        lambda s: s.graft(STREAM, nn.Linear(16, 8)),
        r"makes shape \[.*8\], and .*16\] is read there",
    ),
    "a block that fails": (lambda s: s.graft(STREAM, nn.Linear(5, 16)), "raises RuntimeError"),
    "a block that writes": (lambda s: s.graft(STREAM, lambda x: x.add_(1)), "writes to what it is given"),
    "a block that draws": (lambda s: s.graft(STREAM, lambda x: x + torch.randn_like(x)), "random"),
    "no tensor": (lambda s: s.graft(STREAM, lambda x: 3), "returns no tensor"),
    "a constant": (lambda s: s.graft(STREAM, lambda x: torch.ones(16)), "does not depend|makes shape"),
    "no function": (
        lambda s: s.graft(STREAM, nn.Linear),
        "a function of tensors",
    ),
    "a site that is not there": (lambda s: s.prune(cw.site("z", layer=7)), "layer 7"),
    "a head that is not there": (lambda s: s.prune(cw.site("z", layer=1, head=9)), "no head 9"),
    "a site that is gone": (
        lambda s: s.prune(cw.site("attn_out", layer=1)).graft(cw.site("z", layer=1), lambda x: x),
        "was pruned",
    ),
    "an edge that is none": (lambda s: s.graft((STREAM, "transformer.h.0.mlp"), lambda x: x), "no edge from"),
    "a position": (lambda s: s.prune(cw.site("z", layer=1, pos=2)), "part of the positions"),
    "a tied weight": (lambda s: s.redefine("lm_head", weight=torch.zeros(50, 16)), "the same tensor as"),
    "no such weight": (lambda s: s.redefine("lm_heat", weight=torch.zeros(50, 16)), "Nearest"),
    "another weight": (
        lambda s: s.redefine("transformer.h.0.mlp.c_fc", weight=torch.zeros(3)),
        r"has shape \(3,\)",
    ),
    "tokens": (lambda s: s.prune("input_ids"), "numbers are expected"),
    "a taken name": (lambda s: s.graft(STREAM, lambda x: x, name="transformer"), "is a part of"),
    "a shape of one size": (
        lambda s: s.graft(STREAM, lambda x: x.reshape(3, 5, 16) * 1),
        "cannot be|alone|makes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_surgery_gets_a_sentence_and_the_model_is_as_before(case: str) -> None:
    make, says = BAD[case]
    ids = small.prompts(1, 2)
    before = plain().run(input_ids=ids).logits.clone()
    with pytest.raises(ConewiseError, match=says):
        make(cw.Surgery()).apply(plain())
    assert torch.equal(plain().run(input_ids=ids).logits, before)
    assert plain().verify(n=1)
