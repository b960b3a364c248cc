"""Denoising on a real language model: the heads that matter are those that plain hooked forwards find. Slow.

`make test-smollm2` runs it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.sweeps.result import Result

pytestmark = pytest.mark.slow

PAIRS = (
    ("Mary", "John", "store", "drink"),
    ("Tom", "James", "park", "ball"),
    ("Anna", "Paul", "school", "book"),
    ("Sarah", "Mark", "house", "key"),
)
TEMPLATE = "When {first} and {second} went to the {place}, {giver} gave a {thing} to"


@cache
def loaded() -> Any:
    return cw.load("smollm2-135m")


def tokens(text: str) -> list[int]:
    found: list[int] = loaded().tokenizer(text)["input_ids"]
    return found


@cache
def prompts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clean and corrupted prompts, the answers to the clean ones, and the wrong answers."""
    clean, corrupted, answers, wrongs = [], [], [], []
    for first, second, place, thing in PAIRS:
        said = {"first": first, "second": second, "place": place, "thing": thing}
        clean.append(tokens(TEMPLATE.format(giver=second, **said)))
        corrupted.append(tokens(TEMPLATE.format(giver=first, **said)))
        (answer,), (wrong,) = tokens(f" {first}"), tokens(f" {second}")
        answers.append(answer)
        wrongs.append(wrong)
    assert len({len(prompt) for prompt in clean + corrupted}) == 1
    differing = torch.tensor(clean) != torch.tensor(corrupted)
    assert differing.sum(-1).tolist() == [1] * len(PAIRS), "clean and corrupted differ in the giver alone"
    return torch.tensor(clean), torch.tensor(corrupted), torch.tensor(answers), torch.tensor(wrongs)


@cache
def swept() -> Result:
    clean, corrupted, answers, wrongs = prompts()
    model = cw.capture(loaded().module, input_ids=clean)
    sweep = model.sweep(
        cw.sites("z", layer=":", head=":"),
        base=model.run(input_ids=corrupted),
        source=model.run(input_ids=clean),
        metric=cw.logit_diff(answers, wrongs),
    )
    result: Result = sweep.run(evaluator="wavefront")
    return result


@cache
def hooked() -> Tensor:
    """The same numbers, [layer, head], by one full forward of the module for each head."""
    module = loaded().module
    clean, corrupted, answers, wrongs = prompts()
    projections = [layer.self_attn.o_proj for layer in module.model.layers]
    heads = module.config.num_attention_heads
    seen: dict[int, Tensor] = {}

    def difference(ids: Tensor) -> Tensor:
        logits = module(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        rows = torch.arange(len(ids))
        found: Tensor = (logits[rows, answers] - logits[rows, wrongs]).double().mean()
        return found

    def keep(layer: int) -> Any:
        return lambda _, args: seen.__setitem__(layer, args[0].clone())

    def put(layer: int, head: int) -> Any:
        def hook(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            z = args[0].clone()
            shape = (*z.shape[:2], heads, -1)
            z.view(shape)[:, :, head] = seen[layer].view(shape)[:, :, head]
            return (z, *args[1:])

        return hook

    values = torch.zeros(len(projections), heads, dtype=torch.float64)
    with torch.no_grad():
        handles = [p.register_forward_pre_hook(keep(layer)) for layer, p in enumerate(projections)]
        difference(clean)
        for handle in handles:
            handle.remove()
        for layer, projection in enumerate(projections):
            for head in range(heads):
                handle = projection.register_forward_pre_hook(put(layer, head))
                values[layer, head] = difference(corrupted)
                handle.remove()
    return values


def test_the_wavefront_gives_the_numbers_of_hooked_forwards() -> None:
    result = swept()
    assert result.values.shape == hooked().shape
    assert (result.values - hooked()).abs().max() <= 1e-4 * hooked().abs().max()
    assert result.verify(n=4).ok


def test_the_strongest_heads_under_denoising_are_the_same() -> None:
    result = swept()
    effects, expected = result.values - result.base[0], hooked() - result.base[0]
    assert result.source is not None
    assert float(result.base[0]) < 0 < float(result.source[0]), "the prompts are told apart"
    for sign in (1, -1):
        ours = (sign * effects).flatten().topk(5).indices
        theirs = (sign * expected).flatten().topk(5).indices
        assert torch.equal(ours, theirs)
    strongest = effects.abs().flatten().sort(descending=True).values
    assert strongest[0] > 20 * strongest.median(), "a few heads stand out"
