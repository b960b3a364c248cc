"""Relevance patching: against its rules, written into the module itself, and what has no rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import GradientError
from tests.attributing.test_edges import Differentiated
from tests.attributing.test_sites import by_heads, flat_z, forward, projections
from tests.circuits.edge_models import inputs_of, model_of, module_of, run_of
from tests.circuits.hook_oracle import Forward, HookOracle
from tests.ground_truth.stack import Stack
from tests.runs.test_gradients import squares

HEADS = cw.sites("z", layer=":", head=":")


def layer_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    def ruled(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        found: Tensor = centred / deviation.detach() * norm.weight + norm.bias
        return found

    return ruled


def rms_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    def ruled(x: Tensor) -> Tensor:
        size = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        found: Tensor = x / size.detach() * norm.weight
        return found

    return ruled


def multiple(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (act(x) / x).detach()


def gated(mlp: Any) -> Callable[[Tensor], Tensor]:
    act = multiple(type(mlp.act_fn)().forward)

    def ruled(x: Tensor) -> Tensor:
        product = act(mlp.gate_proj(x)) * mlp.up_proj(x)
        return mlp.down_proj(0.5 * product + 0.5 * product.detach())  # type: ignore[no-any-return]

    return ruled


@contextmanager
def ruled(module: nn.Module) -> Iterator[None]:
    """While it lasts, the module passes relevance back, by the rules of RelP; its values are the same."""
    with ExitStack() as undoing:

        def instead(part: nn.Module, forward: Callable[..., Any]) -> None:
            part.forward = forward
            undoing.callback(delattr, part, "forward")

        def hooked(part: nn.Module, hook: Callable[..., Any]) -> None:
            undoing.callback(part.register_forward_hook(hook).remove)

        for part in list(module.modules()):
            kind = type(part).__name__
            if isinstance(part, nn.LayerNorm):
                instead(part, layer_norm(part))
            elif kind == "LlamaRMSNorm":
                instead(part, rms_norm(part))
            elif kind == "NewGELUActivation":
                instead(part, multiple(part.forward))
            elif kind == "LlamaMLP":
                instead(part, gated(part))
            elif kind == "GPT2Attention":
                width: Any = part.embed_dim
                hooked(
                    part.c_attn,  # type: ignore[arg-type]
                    lambda _, __, out, at=2 * width: torch.cat([out[..., :at].detach(), out[..., at:]], -1),
                )
            elif kind == "LlamaAttention":
                for projection in (part.q_proj, part.k_proj):
                    hooked(projection, lambda _, __, out: out.detach())  # type: ignore[arg-type]
        yield


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sites_have_the_relevance_of_a_module_with_the_rules(name: str) -> None:
    base, source = flat_z(name, 1), flat_z(name, 2)
    seen: dict[int, Tensor] = {}
    with ruled(module_of(name)), projections(name, lambda layer, z: seen.update({layer: z})):
        numbers = forward(name, 1)
        found = torch.autograd.grad(numbers.sum(), list(seen.values()))
    pairs = zip(seen, found, strict=True)
    expected = [by_heads(name, (source[layer] - base[layer]) * own).T for layer, own in pairs]
    model = model_of(name, torch.float32)
    asked: dict[str, Any] = {"base": run_of(name, 1), "source": run_of(name, 2), "metric": squares}
    relp = model.attribute(HEADS, **asked, method="relp").run()
    effects = relp.per_prompt[0] - relp.base_per_prompt  # type: ignore[operator]
    torch.testing.assert_close(effects, torch.cat(expected), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(relp.base_per_prompt[0], numbers.detach().double(), rtol=1e-4, atol=1e-4)  # type: ignore[index]
    assert (effects - model.attribute(HEADS, **asked).run().per_prompt[0]).abs().max() > 0.1
    inputs = {"base": inputs_of(name, 1), "source": inputs_of(name, 2)}
    fresh = model.attribute(HEADS, **asked | inputs, method="relp").run()
    torch.testing.assert_close(fresh.per_prompt, relp.per_prompt, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_edges_have_the_relevance_of_a_module_with_the_rules(name: str) -> None:
    oracle, inputs = HookOracle(module_of(name)), inputs_of(name, 1)
    base, source = oracle.forward(**inputs), oracle.forward(**inputs_of(name, 2))
    world = Differentiated(oracle)
    with world.hooked(), ruled(module_of(name)):
        outputs = Forward(logits=oracle.module(**inputs, use_cache=False).logits)
    zeros = [world.zeros[one] for one in oracle.readers]
    found = torch.autograd.grad(squares(outputs).sum(), zeros, materialize_grads=True)
    relevance = dict(zip(oracle.readers, found, strict=True))
    expected = [
        ((source.parts[writer] - base.parts[writer]) * relevance[reader]).double().sum((1, 2))
        for edge in oracle.edges()
        for writer, _, reader in [edge.partition("->")]
    ]
    model = model_of(name, torch.float32)
    relp = model.attribute(
        model.edges(), base=run_of(name, 1), source=run_of(name, 2), metric=squares, method="relp"
    ).run()
    effects = relp.per_prompt[0] - relp.base_per_prompt  # type: ignore[operator]
    torch.testing.assert_close(effects, torch.stack(expected), rtol=2e-3, atol=2e-3)
    into_queries = [number for number, cell in enumerate(relp.cells) if cell.name.endswith(("<q>", "<k>"))]
    assert not effects[into_queries].any()
    assert effects.abs().max() > 0.1


@pytest.mark.parametrize("name", ["bert", "gpt_neox", "gemma2"])
def test_other_architectures_have_rules_for_all_that_they_do(name: str) -> None:
    """Values are the program's own, whatever is recorded: the base's metric is that of the run."""
    model = model_of(name, torch.float32)
    cells = HEADS + cw.sites("mlp_out", layer=":")
    asked: dict[str, Any] = {"base": inputs_of(name, 1), "source": inputs_of(name, 2), "metric": squares}
    found = model.attribute(cells, **asked, method="relp").run()
    plain = model.attribute(cells, **asked).run()
    torch.testing.assert_close(found.base_per_prompt, plain.base_per_prompt)
    assert found.effect.isfinite().all()
    assert found.effect.abs().max() > 0


def test_on_a_linear_model_relevance_is_exact() -> None:
    torch.manual_seed(0)
    sizes = {"tokens": 5, "length": 4, "width": 6, "heads": 2, "head_width": 3, "neurons": 0, "outputs": 3}
    module = Stack(layers=2, is_causal=True, **sizes)
    for layer in module.blocks:
        layer.attn.key.weight.data.zero_()
    model = cw.capture(module.eval(), torch.tensor([[0, 1, 2, 3]]))
    asked: dict[str, Any] = {
        "base": model.run(torch.tensor([[0, 1, 2, 3]])),
        "source": model.run(torch.tensor([[4, 2, 2, 0]])),
        "metric": cw.logit_diff(0, 1),
    }
    for cells in (HEADS + cw.sites("resid_pre", layer=":", pos=":"), model.edges()):
        exact = model.sweep(cells, **asked).run()
        found = model.attribute(cells, **asked, method="relp").run()
        torch.testing.assert_close(found.effect, exact.effect, rtol=1e-4, atol=1e-6)


class Ratio(nn.Module):
    """One half of what enters over the other."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return y[:, :2] / y[:, 2:].sum(-1, keepdim=True)


class Chosen(nn.Module):
    """The largest entry."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).amax(-1, keepdim=True)


@pytest.mark.parametrize(("module", "said"), [(Ratio(), "divides by a value"), (Chosen(), "is not linear")])
def test_what_has_no_rule_is_named(module: nn.Module, said: str) -> None:
    model = cw.capture(module, torch.ones(2, 4))
    runs = [model.run(torch.rand(2, 4) + 1) for _ in range(2)]
    asked: dict[str, Any] = {"base": runs[0], "source": runs[1], "metric": lambda out: out[:, 0]}
    assert model.attribute("x", **asked).run().effect.abs().max() > 0
    with pytest.raises(GradientError, match=f"'relp' has no rule for .*{said}"):
        model.attribute("x", **asked, method="relp").run()


def test_sites_inside_of_an_activation_are_refused() -> None:
    model = model_of("gpt2", torch.float32)
    asked: dict[str, Any] = {"base": run_of("gpt2", 1), "source": run_of("gpt2", 2), "metric": squares}
    with pytest.raises(GradientError, match="lies inside of the activation function"):
        model.attribute("transformer.h.0.mlp.act/tanh", **asked, method="relp").run()
    assert model.attribute(("post", 0), **asked, method="relp").run().effect.abs().max() > 0
