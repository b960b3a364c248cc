"""Every architecture of the zoo: a small sweep as a wavefront, one world after another, and by hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.anatomy.places import Place
from conewise.model import Model
from conewise.program.streamed_modules import stream_memory
from conewise.program.streaming import reads_of
from conewise.program.walk import field_names
from tests.program.marks import marks
from tests.program.zoo import ZOO

# One implementation of attention for each: sdpa where it has it, eager else and for every third.
EVERY = [
    pytest.param(name, case.attention[-1 if n % 3 else 0], marks=marks(name))
    for n, (name, case) in enumerate(ZOO.items())
]
KINDS = ("resid_pre", "k", "z", "post", "mlp_out", "cross_k")

SERIAL = {"mixtral": "experts/"}
"""The architectures that mix the rows of a batch, and where: experts are given the tokens of all rows."""

TYPICAL = 2e-6
"""How far a wavefront is from serial on one thread, relative to the largest value: 840 machine epsilons of
float32 are allowed, and twenty are enough for every architecture here."""


def sites_of(model: Model, stack: str, last: int = -1) -> Any:
    """Of each kind two layers: two heads, or the first and the last position; of a plain network, modules."""
    chosen: Any = []
    for kind in KINDS:
        layers = model.site_table.layers(kind, stack)
        if not layers:
            continue
        axes = model.locate(Place(kind, layers[0], stack)).view.axes
        heads = {axis: ":2" for axis in axes if axis in {"head", "kv_head"}}
        choices: Any = heads or ({"pos": [0, last]} if "pos" in axes else {})
        selector = cw.sites(kind, stack=stack, layer=list(layers[-2:]), **choices)
        chosen = selector if not chosen else chosen + selector
    return chosen or [site.name for site in model.site_table if site.kind == "module"][:6]


def total(outputs: Any) -> Tensor:
    value: Tensor = outputs if isinstance(outputs, Tensor) else outputs["sum"]
    return value.flatten(1)[:, :3].sum(-1)


STREAMED = (
    *(
        "gpt2",
        "gpt_neox",
        "gptj",
        "opt",
        "llama",
        "qwen3",
        "gemma2",
        "phi3",
        "bert",
        "t5",
        "mixtral",
        "falcon",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMED)
def test_streamed_weights_give_the_bits_of_resident_ones(name: str) -> None:
    case = ZOO[name]
    module = case.make(case.attention[-1])
    example, base, source = (case.example(2, case.lengths[0]) for _ in range(3))
    models = [cw.capture(one, **example) for one in (stream_memory(module, torch.device("cpu")), module)]
    metric = cw.logit_diff(1, 3, pos=-1) if field_names(models[1].program, "logits") else total
    last = case.lengths[0] - 1 if "attention_mask" in base else -1
    stream = reads_of(models[0].program).stream
    assert stream is not None
    assert stream.ring.size < stream.total, "not all of them fit"

    for evaluator in ("serial", "auto"):
        found, expected = (
            model.sweep(
                sites_of(model, "decoder" if name == "t5" else "", last),
                base=base,
                source=source,
                metric=metric,
            ).run(evaluator=evaluator)
            for model in models
        )

        assert torch.equal(found.per_prompt, expected.per_prompt)
        assert torch.equal(found.base, expected.base)
        assert found.ledger.moved_bytes == found.plan.moved_bytes > 0
        assert found.verify(n=2).ok
    assert models[0].fidelity.bitwise == models[1].fidelity.bitwise


@pytest.mark.parametrize(("name", "attention"), EVERY)
def test_a_wavefront_is_serial_and_both_are_the_module(name: str, attention: str) -> None:
    case = ZOO[name]
    module = case.make(attention)
    model = cw.capture(module, **case.example(2, case.lengths[0]))
    base = model.run(**case.example(2, case.lengths[0]))
    source = model.run(**case.example(2, case.lengths[0]))
    metric = cw.logit_diff(1, 3, pos=-1) if field_names(model.program, "logits") else total
    # A position that is counted from the end may not be padding: there are masks in the zoo.
    last = case.lengths[0] - 1 if "attention_mask" in base.inputs else -1
    sites = sites_of(model, "decoder" if name == "t5" else "", last)
    sweep = model.sweep(sites, base=base, source=source, metric=metric)
    serial, result = sweep.run(evaluator="serial"), sweep.run()
    assert (serial.values - serial.base[0]).abs().max() > 1e-3, "nothing that is patched matters"
    deviation = (result.per_prompt - serial.per_prompt).abs().max() / serial.per_prompt.abs().max()
    assert deviation <= TYPICAL
    counts = {result.plan.node_evaluations, result.ledger.node_evaluations, serial.ledger.node_evaluations}
    assert len(counts) == 1
    if name in SERIAL:
        assert result.plan.evaluator == "serial"
        assert SERIAL[name] in result.plan.why
        assert "mixes the rows of the batch" in result.plan.why
    else:
        assert result.plan.evaluator == "wavefront"
    for one in (serial, result):
        check = one.verify(n=3)
        assert check.ok, check
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
