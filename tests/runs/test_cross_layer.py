"""Transcoders with a skip connection, and those that write to several layers, against the same by hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import DictionaryError
from conewise.model import Model
from tests.runs.small_dictionary import Autoencoder
from tests.sweeps import small
from tests.sweeps.tiny import prompts, tiny

D, LATENTS = 16, 24
METRIC = cw.logit_diff(answer=7, wrong=9)


class CrossLayer(nn.Module):
    """A layer of a cross-layer transcoder: its encoder, and the decoders of all layers up to it."""

    def __init__(self, layer: int, d: int = D, *, skips: bool = False) -> None:
        super().__init__()
        self.own = Autoencoder(d, LATENTS, seed=layer)
        self.from_layer = nn.ParameterList(
            torch.randn(LATENTS, d, generator=torch.Generator().manual_seed(10 * layer + one)) / LATENTS
            for one in range(layer)
        )
        self.skip = nn.Parameter(torch.randn(d, d, generator=torch.Generator().manual_seed(layer)) / d)
        self.does_skip = skips

    def encode(self, value: Tensor) -> Tensor:
        return self.own.encode(value)

    def decode(self, latents: Tensor, *others: Tensor) -> Tensor:
        made = self.own.decode(latents)
        if self.does_skip:
            *others, read = others  # type: ignore[assignment]
            made = made + read @ self.skip
        for one, weight in zip(others, self.from_layer, strict=True):
            made = made + one @ weight
        return made


def parts(skips: bool) -> list[CrossLayer]:
    return [CrossLayer(layer, skips=skips) for layer in range(2)]


@cache
def spliced(skips: bool = False) -> Model:
    model = small.model()
    for layer, part in enumerate(parts(skips)):
        model = model.splice(
            ("mlp_out", layer),
            part,
            reads=f"transformer.h.{layer}.ln_2",
            name=f"t{layer}",
            also=[f"t{one}" for one in range(layer)],
            skips=skips,
        )
    return model


def by_hooks(module: Any, skips: bool, ids: Tensor, change: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The logits, with every MLP's output corrected by what changed latents write; errors stay."""
    own = parts(skips)
    read, encoded, now = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()

    def enter(layer: int) -> Callable[..., Any]:
        def hook(_: Any, __: Any, out: Tensor) -> None:
            read[layer] = out
            encoded[layer] = own[layer].encode(out)
            now[layer] = change(layer, encoded[layer].clone())

        return hook

    def leave(layer: int) -> Callable[..., Any]:
        def hook(_: Any, __: Any, out: Tensor) -> Tensor:
            skipped = [read[layer]] if skips else []
            before = own[layer].decode(encoded[layer], *(encoded[one] for one in range(layer)), *skipped)
            after = own[layer].decode(now[layer], *(now[one] for one in range(layer)), *skipped)
            return after + (out - before)

        return hook

    handles = []
    for layer in range(2):
        block = module.transformer.h[layer]
        handles += [
            block.ln_2.register_forward_hook(enter(layer)),
            block.mlp.register_forward_hook(leave(layer)),
        ]
    try:
        with torch.no_grad():
            found: Tensor = module(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return found


@pytest.mark.parametrize("skips", [False, True])
def test_latents_write_to_every_layer_behind_them(skips: bool) -> None:
    model, plain, ids = spliced(skips), small.model(), small.prompts(1, 2)
    base = model.run(input_ids=ids)
    assert torch.equal(base.logits, plain.run(input_ids=ids).logits)
    assert torch.equal(model.module(input_ids=ids, use_cache=False).logits, base.logits)
    assert torch.equal(base["t1.latents"], parts(skips)[1].encode(base["transformer.h.1.ln_2"]))
    for layer, latent in ((0, 3), (0, 17), (1, 5)):

        def change(own: int, latents: Tensor, layer: int = layer, latent: int = latent) -> Tensor:
            if own == layer:
                latents[:, -1, latent] = 4.0
            return latents

        with base.fork() as world:
            world.patch(cw.site(f"t{layer}.latents", latent=latent, pos=-1), torch.full((2,), 4.0))
            expected = by_hooks(plain.module, skips, ids, change)
            assert torch.allclose(world.logits, expected, rtol=0, atol=1e-6)
            assert not torch.allclose(world.logits, base.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("skips", [False, True])
def test_sweeps_over_its_features_are_checked_by_hooks_on_the_module(skips: bool) -> None:
    model, ids = spliced(skips), small.prompts(1, 2)
    base = model.run(input_ids=ids)
    sites = cw.sites("t0.latents", latent="::6", pos=-1) + cw.sites("t1.latents", latent="::6", pos=-1)
    found = model.sweep(sites, base=base, source=cw.add(torch.ones(())), metric=METRIC).run()
    assert found.verify(n=8)


@cache
def of_llama(skips: bool) -> tuple[list[CrossLayer], Any]:
    model, own = tiny("llama"), [CrossLayer(layer, 32, skips=skips) for layer in range(3)]
    for layer, part in enumerate(own):
        at: dict[str, Any] = {"reads": f"model.layers.{layer}.mlp.input", "name": f"t{layer}"}
        model = model.splice(
            ("mlp_out", layer), part, also=[f"t{one}" for one in range(layer)], skips=skips, **at
        )
    return own, model


def linear(ids: Tensor, skips: bool) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    """A forward with patterns, norms, latents and errors as constants: latents, what is encoded, metric."""
    own, _ = of_llama(skips)
    module, leaves, read = tiny("llama").module, dict[str, Tensor](), list[Tensor]()

    def constant(_: Any, __: Any, out: Tensor) -> Tensor:
        return out.detach()

    def norm(part: Any, args: Any, _: Tensor) -> Tensor:
        scale = torch.rsqrt(args[0].pow(2).mean(-1, keepdim=True) + part.variance_epsilon).detach()
        scaled: Tensor = part.weight.detach() * args[0] * scale
        return scaled

    def mlp(layer: int) -> Any:
        one = own[layer].requires_grad_(False)

        def leave(_: Any, args: Any, out: Tensor) -> Tensor:
            leaves[f"t{layer}"] = one.encode(args[0]).detach().requires_grad_()
            given = [leaves[f"t{number}"] for number in (layer, *range(layer))]
            read.append(args[0] @ one.own.w_enc + one.own.b_enc)
            made = one.decode(*given, *([args[0]] if skips else []))
            return made + (out - made).detach()

        return leave

    with ExitStack() as stack, torch.enable_grad():
        handles = [module.model.norm.register_forward_hook(norm)]
        for layer, block in enumerate(module.model.layers):
            handles += [
                block.self_attn.q_proj.register_forward_hook(constant),
                block.self_attn.k_proj.register_forward_hook(constant),
                block.input_layernorm.register_forward_hook(norm),
                block.post_attention_layernorm.register_forward_hook(norm),
                block.mlp.register_forward_hook(mlp(layer)),
            ]
        for handle in handles:
            stack.callback(handle.remove)
        logits = module(input_ids=ids, use_cache=False).logits[0, -1]
    return leaves, read, torch.as_tensor(logits[3] - logits[5])


@pytest.mark.parametrize("skips", [False, True])
def test_frozen_effects_are_those_of_linear_attribution(skips: bool) -> None:
    """As in circuit-tracer: a feature writes to every layer behind it, and a skip connection is live."""
    ids = prompts(1, 3)
    asked: dict[str, Any] = {"metric": cw.logit_diff(3, 5), "top": 8, "frozen": True}
    graph = of_llama(skips)[1].feature_graph({"input_ids": ids}, **asked).run()
    leaves, read, metric = linear(ids, skips)
    numbers = [read[int(one.dictionary[1:])][0, one.pos, one.feature] for one in graph.targets]
    for column, number in enumerate([*numbers, metric]):
        gradients = torch.autograd.grad(number, [*leaves.values()], retain_graph=True, allow_unused=True)
        by_name = dict(zip(leaves, gradients, strict=True))
        for row, node in enumerate(graph.nodes):
            gradient, expected = by_name[node.dictionary], 0.0
            if gradient is not None:
                expected = float((gradient * leaves[node.dictionary]).detach()[0, node.pos, node.feature])
            mine = graph.on_metric[row] if column == len(numbers) else graph.effects[row, column]
            assert float(mine) == pytest.approx(expected, abs=2e-4), (node, column)
    assert float(graph.effects.abs().max()) > 1e-2


def test_bad_input_is_a_sentence() -> None:
    model, part = small.model(), parts(skips=False)[1]
    at: dict[str, Any] = {"reads": "transformer.h.0.ln_2", "name": "t"}
    with pytest.raises(DictionaryError, match=r"also='t7' is no dictionary of .*; there is none"):
        model.splice(("mlp_out", 0), part, also=["t7"], **at)
    later = model.splice(("mlp_out", 1), Autoencoder(D, LATENTS), name="late")
    with pytest.raises(DictionaryError, match="the latents of 'late' depend on mlp_out"):
        later.splice(("mlp_out", 0), part, also=["late"], **at)
    with pytest.raises(DictionaryError, match=r"decode, given a tensor of shape .* and 1 more raises"):
        spliced().splice(("mlp_out", 1), Autoencoder(D, LATENTS), name="u", also=["t0"])
