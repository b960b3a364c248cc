"""Gradients through patches with parameters, against torch's autograd through hooks on the module."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.compat.transformer_lens import HookedModel
from tests.sweeps.tiny import LAYERS, LENGTH, PATHS, hooks, prompts, tiny

IDS = prompts(2, seed=11)
SCALE = torch.full((32,), 1.5, requires_grad=True)


def linear(seed: int, width: int = 32) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, width)


def at(pos: int | None, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The change of one position as that of a whole value."""

    def changed(whole: Tensor) -> Tensor:
        if pos is None:
            return change(whole)
        return torch.cat([whole[:, :pos], change(whole[:, pos])[:, None], whole[:, pos + 1 :]], 1)

    return changed


def assert_alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # sums in another order


def loss_of(logits: Tensor) -> Tensor:
    return logits[:, -1].log_softmax(-1)[:, 7].sum() + logits[:, 2, 5].sum()


def by_hooks(name: str, changes: Any, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with hooks(name, changes) as module, torch.enable_grad():
        loss = loss_of(module(input_ids=IDS, use_cache=False).logits)
        return torch.autograd.grad(loss, parameters)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_patched_worlds_are_those_through_hooks(seed: int, mode: Any) -> None:
    drawn = random.Random(seed)
    name = drawn.choice(["gpt2", "llama"])
    kinds = [kind for kind in PATHS[name] if kind not in {"embed", "q", "k", "v", "z"}]
    modules = [linear(seed + 10), linear(seed + 20)]
    places = [(drawn.choice(kinds), drawn.randrange(LAYERS), drawn.choice([None, 2, LENGTH - 1]))]
    other = drawn.choice([kind for kind in kinds if kind != places[0][0]])
    places.append((other, drawn.randrange(LAYERS), drawn.choice([None, 0, 3])))
    with mode():
        run = tiny(name).run(input_ids=IDS)
        world = run.fork()
        for step, ((kind, layer, pos), module) in enumerate(zip(places, modules, strict=True)):
            world = world.fork() if step and seed % 2 else world
            place = cw.site(kind, layer=layer) if pos is None else cw.site(kind, layer=layer, pos=pos)
            world.patch(place, module)
        logits = world.logits
        with torch.inference_mode(mode=False), torch.enable_grad():
            parameters = [one for module in modules for one in module.parameters()]
            found = torch.autograd.grad(loss_of(logits), parameters)
    changes = {
        (kind, layer): at(pos, module) for (kind, layer, pos), module in zip(places, modules, strict=True)
    }
    expected = by_hooks(name, changes, parameters)
    for one, other_one in zip(found, expected, strict=True):
        assert_alike(one, other_one)
    assert sum(float(one.norm()) for one in expected) > 0.1, "a gradient of zeros shows nothing"
    assert all(weight.grad is None for weight in tiny(name).module.parameters())


def test_parameters_are_found_where_functions_read_them() -> None:
    run = tiny("gpt2").run(input_ids=IDS)
    inside, module = torch.ones(32, requires_grad=True), linear(1)
    held = {"by name": inside}

    def scaled(part: Tensor, by: Tensor) -> Tensor:
        return part * by

    patches: list[tuple[Any, Tensor]] = [
        (lambda part: part * SCALE, SCALE),
        (lambda part: part * inside, inside),
        (lambda part: part * held["by name"], inside),
        (partial(scaled, by=inside), inside),
        (lambda part: scaled(part, inside), inside),
        (module.forward, module.weight),
        (cw.intervention(lambda part: part * inside, key="scaled"), inside),
        (cw.add(inside, 2.0), inside),
    ]
    for patch, parameter in patches:
        with run.fork() as world:
            world.patch(("mlp_out", 1), patch)
            (found,) = torch.autograd.grad(world.logits.square().sum(), parameter)
            assert float(found.norm()) > 0


def test_a_tensor_with_a_gradient_keeps_it_and_others_record_nothing() -> None:
    model = tiny("gpt2")
    run = model.run(input_ids=IDS)
    value = run["mlp_out", 1].clone().requires_grad_()
    with run.fork() as world, torch.no_grad():
        world.patch(("mlp_out", 1), value)
        logits = world.logits
        with torch.enable_grad():
            (found,) = torch.autograd.grad(loss_of(logits), value)
    expected = by_hooks("gpt2", {("mlp_out", 1): lambda _: value}, [value])
    assert_alike(found, expected[0])
    unembedding: Any = model.module.get_output_embeddings()
    for patch in (lambda part: part + 1, lambda part: part + unembedding.weight[3], "zero", cw.noise(0.1)):
        with run.fork() as world, torch.enable_grad():
            world.patch(("mlp_out", 1), patch)
            assert not world.logits.requires_grad


def test_values_follow_what_an_optimizer_wrote() -> None:
    run, module = tiny("gpt2").run(input_ids=IDS), linear(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with run.fork() as world:
        world.patch(cw.site("resid_post", layer=1, pos=-1), module)
        for _ in range(3):
            logits = world.logits
            with hooks("gpt2", {("resid_post", 1): at(LENGTH - 1, module)}) as plain, torch.no_grad():
                expected = plain(input_ids=IDS, use_cache=False).logits
            assert_alike(logits.detach(), expected)
            optimizer.zero_grad()
            loss_of(logits).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert all(weight.grad is None for weight in tiny("gpt2").module.parameters())


def test_a_sweep_over_a_world_with_parameters_records_nothing() -> None:
    run, module = tiny("gpt2").run(input_ids=IDS), linear(4)
    with run.fork() as world:
        world.patch(("mlp_out", 0), module)
        for evaluator in ("serial", "wavefront"):
            result = model_sweep(world).run(evaluator=evaluator)
            assert not result.values.requires_grad
    assert module.weight.grad is None


def model_sweep(base: Any) -> Any:
    sites = cw.sites("resid_post", layer=":")
    return tiny("gpt2").sweep(sites, base=base, source="zero", metric=cw.logit_diff(5, 9))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_hooks_with_parameters_have_gradients(mode: Any) -> None:
    model, module, scale = HookedModel(tiny("gpt2")), linear(5), torch.ones(32, requires_grad=True)
    fwd = [
        ("blocks.0.hook_mlp_out", lambda value, hook: module(value)),
        ("blocks.1.hook_resid_post", lambda value, hook: value * scale),
    ]
    with mode():
        logits = model.run_with_hooks(IDS, fwd_hooks=fwd)
        loss = model.run_with_hooks(IDS, fwd_hooks=fwd, return_type="loss")
    parameters = [*module.parameters(), scale]
    found = torch.autograd.grad(loss_of(logits), parameters, retain_graph=True)
    changes = {("mlp_out", 0): module, ("resid_post", 1): lambda value: value * scale}
    expected = by_hooks("gpt2", changes, parameters)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other)
    assert loss.requires_grad
    assert all(weight.grad is None for weight in tiny("gpt2").module.parameters())
