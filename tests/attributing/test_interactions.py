"""GIM and information-flow routes against their definitions, and where EAP-IG's steps begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import conewise as cw
from conewise.attributing.relevance import TEMPERATURE
from conewise.errors import SweepError
from tests.circuits.small_models import small

METRIC = cw.logit_diff(answer=3, wrong=5)


def asked(name: str) -> tuple[Any, dict[str, Any]]:
    given = small(name)
    return given, {"base": given.base, "source": given.source, "metric": METRIC}


def test_steps_begin_at_the_base_or_at_the_source() -> None:
    """At k = 0 .. m−1 it has the base's end, k = 1 .. m the source's; together they are both."""
    given, question = asked("gpt2")
    edges = given.model.edges()
    how: dict[str, Any] = {"method": "eap-ig", "steps": 3}
    found = {
        end: given.model.attribute(edges, **question, **how, steps_from=end).run()
        for end in (None, "base", "source")
    }
    assert torch.equal(found[None].table, found["base"].table)
    eap = {
        end: given.model.attribute(
            edges,
            base=question[end],
            source=question["base" if end == "source" else "source"],
            metric=METRIC,
            method="eap",
        ).run()
        for end in ("base", "source")
    }
    effect = {end: one.table[0] - one.base[0] for end, one in eap.items()}
    by_steps = {end: found[end].table[0] - found[end].base[0] for end in ("base", "source")}
    # Both sums share the points between; they differ in the two ends, each with a third of its gradient.
    apart = 3 * (by_steps["base"] - by_steps["source"])
    ends = effect["base"] - -effect["source"]
    torch.testing.assert_close(apart, ends)
    with pytest.raises(SweepError, match="steps_from='source' with method='eap'"):
        given.model.attribute(edges, **question, method="eap", steps_from="source")


def test_gim_is_what_its_rules_say() -> None:
    """The gradient by the heads of the first layer of a GPT-2, with its rules written down once more."""
    given, question = asked("gpt2")
    module = given.plain.module
    wte, block = module.transformer, module.transformer.h

    class Softer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward((scores / TEMPERATURE).softmax(-1))
            return scores.softmax(-1)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (p,) = ctx.saved_tensors
            found: torch.Tensor = p * (gradients[0] - (gradients[0] * p).sum(-1, keepdim=True))
            return found

    def half(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x + 0.5 * x.detach()

    def norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + layer.eps).rsqrt().detach()
        found: torch.Tensor = centred * scale * layer.weight + layer.bias
        return found

    x = wte.wte(given.ids) + wte.wpe(torch.arange(given.ids.shape[1]))
    first: list[torch.Tensor] = []
    for number, one in enumerate(block):
        q, k, v = one.attn.c_attn(norm(one.ln_1, x)).split(x.shape[-1], -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v))
        scores = half(q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        z = half(Softer.apply(scores.masked_fill(ahead, float("-inf"))) @ v)  # type: ignore[no-untyped-call]
        if number == 0:
            z = z.detach().requires_grad_()
            first.append(z)
        x = x + one.attn.c_proj(z.transpose(1, 2).flatten(2))
        x = x + one.mlp(norm(one.ln_2, x))
    logits = module.lm_head(norm(wte.ln_f, x))[:, -1]
    (gradient,) = torch.autograd.grad((logits[:, 3] - logits[:, 5]).sum(), first)
    change = (question["source"]["z", 0] - question["base"]["z", 0]).transpose(1, 2)
    wanted = (gradient * change).sum((-1, -2)).T
    heads = cw.sites("z", layer=0, head=":")
    found = given.model.attribute(heads, **question, method="gim").run()
    torch.testing.assert_close(found.per_prompt[0] - found.base_per_prompt[0], wanted.double())


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_gim_of_edges_is_checked_by_exact_effects(name: str) -> None:
    given, question = asked(name)
    found = given.model.attribute(given.model.edges(), **question, method="gim").run()
    check = found.check(top=5, n=10)
    assert len(check.computed) == 15
    assert torch.isfinite(found.table).all()


def test_information_flow_is_the_nearness_to_what_is_read() -> None:
    given, question = asked("gpt2")
    found = given.model.attribute(given.model.edges(), **question, method="ifr").run()
    parts = given.plain.forward(given.ids)[1]
    stream = sum(parts.values()) + sum(block.attn.c_proj.bias for block in given.plain.module.transformer.h)
    near = {
        name: (stream.abs().sum(-1) - (stream - part).abs().sum(-1)).clamp(min=0)
        for name, part in parts.items()
    }
    total = sum(near.values())
    for name, one in near.items():
        cell = found.cells.index(next(c for c in found.cells if c.name == f"{name}->logits"))
        wanted = -(one / total).mean(1)
        torch.testing.assert_close(
            found.per_prompt[0, cell] - found.base_per_prompt[0], wanted.double(), rtol=1e-9, atol=1e-9
        )
