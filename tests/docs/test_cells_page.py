"""What the guide on cells finds, against plain hooks on the module: one full forward for each world."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.docs.pages import ROOT, blocks
from tests.docs.test_blocks import run

BATCHED = 1e-3
"""How far batched kernels may lie from single ones; the metrics are of order 10."""
LAYERS = 4


@cache
def page() -> dict[str, Any]:
    """The names that the page's code defines."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(ROOT / "docs/guides/cells.md"):
        if block.language == "python":
            run(block, names)
    return names


def difference(ids: Tensor, hooks: Mapping[str, Any], *, before: Mapping[str, Any] | None = None) -> float:
    """The metric where hooks change what modules put out, or with `before` what they are given."""
    module: nn.Module = page()["model"].module
    with ExitStack() as stack, torch.no_grad():
        for path, change in hooks.items():

            def leave(_: Any, __: Any, out: Any, change: Any = change) -> Any:
                return (change(out[0].clone()), *out[1:]) if isinstance(out, tuple) else change(out.clone())

            stack.callback(module.get_submodule(path).register_forward_hook(leave).remove)
        for path, change in (before or {}).items():

            def enter(_: Any, args: Any, given: Any, change: Any = change) -> Any:
                return change(args, given)

            made = module.get_submodule(path).register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(made.remove)
        logits = module(input_ids=ids, use_cache=False).logits[0, -1]
    return float(logits[page()["mary"]] - logits[page()["john"]])


def ids(of: str) -> Tensor:
    found: Tensor = page()[of].inputs["input_ids"]
    return found


def stream(hook: str, of: str) -> list[Tensor]:
    """What modules of each layer put out in a plain forward."""
    seen: list[Tensor] = []

    def look(value: Tensor) -> Tensor:
        seen.append(value)
        return value

    difference(ids(of), {hook.format(layer): look for layer in range(LAYERS)})
    return seen


def heads_of(of: str, layer: int) -> Tensor:
    """What the heads of a layer put in front of the output projection."""
    seen: list[Tensor] = []

    def look(args: Any, given: Any) -> Any:
        seen.append(args[0].clone())
        return args, given

    difference(ids(of), {}, before={f"model.layers.{layer}.self_attn.o_proj": look})
    return seen[0].reshape(*seen[0].shape[:-1], 4, -1)


def alike(found: Tensor, expected: list[float]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64).reshape(found.shape)
    torch.testing.assert_close(found, wanted, rtol=0, atol=BATCHED)
    assert wanted.std() > 0.1, "a sweep in which nothing matters shows nothing"


def test_five_coefficients() -> None:
    clean, corrupted = (stream("model.layers.{}", of)[2][:, -1] for of in ("clean", "corrupted"))
    vector = (clean - corrupted)[0]

    def steered(scale: float) -> Any:
        def change(value: Tensor) -> Tensor:
            value[:, -1] += scale * vector
            return value

        return change

    expected = [
        difference(ids("corrupted"), {"model.layers.2": steered(c)}) for c in (-1.0, 0.0, 0.5, 1.0, 2.0)
    ]
    alike(page()["steered"].values, expected)


def test_the_grid_of_knock_outs() -> None:
    def hidden(key: int) -> Any:
        def change(args: Any, given: Any) -> Any:
            mask = given["attention_mask"].clone()
            mask[..., -1, key] = -torch.inf
            return args, {**given, "attention_mask": mask}

        return change

    expected = [
        difference(ids("clean"), {}, before={f"model.layers.{layer}.self_attn": hidden(key)})
        for layer in range(LAYERS)
        for key in range(15)
    ]
    alike(page()["knocked"].values, expected)


def test_the_heatmap_of_the_stream() -> None:
    entering = [stream("model.embed_tokens", "clean")[0], *stream("model.layers.{}", "clean")[:-1]]
    paths = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(LAYERS - 1))]

    def put(layer: int, pos: int) -> Any:
        def change(value: Tensor) -> Tensor:
            value[:, pos] = entering[layer][:, pos]
            return value

        return change

    points = itertools.product(range(LAYERS), range(15))
    expected = [difference(ids("corrupted"), {paths[layer]: put(layer, pos)}) for layer, pos in points]
    alike(page()["heat"].values, expected)


def without(parts: tuple[int, ...]) -> float:
    """The metric of the clean prompt without parts: numbers below 16 are heads, the others MLPs."""

    def zeroed(layer: int) -> Any:
        def change(args: Any, given: Any) -> Any:
            heads = args[0].clone().unflatten(-1, (4, -1))
            for part in parts:
                if part // 4 == layer:
                    heads[:, :, part % 4] = 0.0
            return (heads.flatten(-2), *args[1:]), given

        return change

    hooks = {f"model.layers.{part - 16}.mlp": torch.zeros_like for part in parts if part >= 16}
    before = {f"model.layers.{p // 4}.self_attn.o_proj": zeroed(p // 4) for p in parts if p < 16}
    return difference(ids("clean"), hooks, before=before)


def test_all_190_pairs() -> None:
    pairs = page()["pairs"]
    base = float(pairs.base[0])
    pairwise = list(itertools.combinations(range(20), 2))
    assert len(pairwise) == 190
    matrix = pairs.matrix()
    alike(matrix.diagonal(), [without((one,)) - base for one in range(20)])
    alike(torch.stack([matrix[one, other] for one, other in pairwise]), [without(p) - base for p in pairwise])


def test_the_direct_path() -> None:
    """By hand once more: the head is patched, and what comes behind is put back by hooks."""
    theirs = heads_of("clean", 1)
    mlps = stream("model.layers.{}.mlp", "corrupted")
    attentions = stream("model.layers.{}.self_attn", "corrupted")

    def patched(head: int) -> Any:
        def change(args: Any, given: Any) -> Any:
            heads = args[0].clone().unflatten(-1, (4, -1))
            heads[:, :, head] = theirs[:, :, head]
            return (heads.flatten(-2), *args[1:]), given

        return change

    held = {f"model.layers.{layer}.mlp": (lambda _, layer=layer: mlps[layer]) for layer in (1, 2, 3)}
    held |= {
        f"model.layers.{layer}.self_attn": (lambda _, layer=layer: attentions[layer]) for layer in (2, 3)
    }
    expected = [
        difference(ids("corrupted"), held, before={"model.layers.1.self_attn.o_proj": patched(head)})
        for head in range(4)
    ]
    alike(page()["direct"].values, expected)


def test_channels_of_a_cnn_and_states_of_a_gru(capsys: pytest.CaptureFixture[str]) -> None:
    """The example, against plain hooks on its modules."""
    names = runpy.run_path(str(ROOT / "examples/own_cnn_and_gru.py"))
    capsys.readouterr()
    margin = names["margin"]

    def hooked(module: nn.Module, path: str, given: Tensor, change: Any) -> float:
        handle = module.get_submodule(path).register_forward_hook(change)
        with torch.no_grad():
            found = float(margin(module(given)).double().mean())
        handle.remove()
        return found

    cnn, images = names["cnn"].module, names["images"]

    def dark(channel: int) -> Any:
        return lambda _, __, out: out.index_fill(1, torch.tensor([channel]), 0.0)

    alike_small(names["channels"].values, [hooked(cnn, "first", images, dark(one)) for one in range(8)])

    gru, tokens, others = names["gru"].module, names["tokens"], names["others"]
    states: list[Tensor] = []
    hooked(gru, "cell", others, lambda _, __, out: states.append(out))

    def at_step(step: int, unit: int | slice = slice(None)) -> Any:
        calls = itertools.count()

        def change(_: Any, __: Any, out: Tensor) -> Tensor:
            if next(calls) == step:
                out = out.clone()
                out[:, unit] = states[step][:, unit]
            return out

        return change

    alike_small(names["carried"].values, [hooked(gru, "cell", tokens, at_step(step)) for step in range(6)])
    alike_small(names["units"].values, [hooked(gru, "cell", tokens, at_step(3, unit)) for unit in range(16)])


def alike_small(found: Tensor, expected: list[float]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert wanted.std() > 1e-4
