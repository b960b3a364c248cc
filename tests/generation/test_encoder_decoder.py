"""Texts of models that read with an encoder and write with a decoder, against plain hooks and `generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import conewise as cw
from conewise.errors import PatchError
from conewise.model import Model
from tests.generation.alone import DEPTH, HEADS, TOKENS, VOCABULARY, WIDTH, padded, prompts

hugging_face: Any = transformers
N, LENGTHS, SCALES = 7, (5, 7), (-6.0, 2.0, 6.0)
STACKS = ("encoder", "decoder")


@cache
def model_of(name: str) -> Model:
    sizes: dict[str, Any] = {**TOKENS, "eos_token_id": None, "decoder_start_token_id": 0, "d_model": WIDTH}
    if name == "T5":
        sizes |= {"d_kv": 8, "d_ff": 64, "num_heads": HEADS, "num_layers": DEPTH, "num_decoder_layers": DEPTH}
        made: Any = hugging_face.T5ForConditionalGeneration
        config = hugging_face.T5Config(**sizes)
    else:
        for part in STACKS:
            sizes |= {f"{part}_layers": DEPTH, f"{part}_attention_heads": HEADS, f"{part}_ffn_dim": 64}
        made = hugging_face.MBartForConditionalGeneration
        config = hugging_face.MBartConfig(
            **sizes, max_position_embeddings=64, forced_eos_token_id=None, init_std=0.3
        )
    torch.manual_seed(0)
    module = made(config).eval()
    module.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)
    ids = torch.tensor([[1, 5, 6, 7, 4], [1, 4, 3, 9, 8]])
    return cw.capture(module, input_ids=ids, decoder_input_ids=ids[:, :3])


def vector() -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))


def path_of(name: str, stack: str, layer: int) -> str:
    return f"{stack}.block.{layer}" if name == "T5" else f"model.{stack}.layers.{layer}"


def alone(
    name: str,
    ids: Tensor,
    path: str | None,
    change: Callable[[Tensor], Tensor],
    *,
    seed: int = 3,
    n: int = N,
    **options: Any,
) -> list[int]:
    module: Any = model_of(name).module
    part = module.get_submodule(path or "")

    def act(_: Any, __: Any, out: Any) -> Any:
        return change(out) if isinstance(out, Tensor) else (change(out[0]), *out[1:])

    handle = part.register_forward_hook(act) if path else None
    torch.manual_seed(seed)
    try:
        found = module.generate(ids[None], max_new_tokens=n, **{"do_sample": False, **options})
    finally:
        if handle is not None:
            handle.remove()
    tokens: list[int] = found[0, 1:].tolist()
    return tokens


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 40}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", ["T5", "mBART"])
def test_each_world_writes_what_it_writes_alone(name: str, stack: str, options: dict[str, Any]) -> None:
    rows = prompts(LENGTHS)
    texts = (
        model_of(name)
        .sweep(
            cw.sites("resid_post", layer=":", stack=stack),
            base=padded(rows),
            source=cw.add(vector(), scale=list(SCALES)),
            generate=cw.writing(N, seed=3, **options),
        )
        .run(verify=4)
    )
    assert texts.verification is not None
    assert texts.verification.ok
    assert int((texts.divergence >= 0).sum()) > 0
    for world in range(0, len(texts.cells) + 1, 2):
        layer, scale = divmod(world - 1, len(SCALES))
        path = path_of(name, stack, layer) if world else None
        for number, row in enumerate(rows):
            own = alone(name, row, path, lambda value, at=scale: value + SCALES[at] * vector(), **options)  # type: ignore[misc]
            assert [token for token in texts.ids[world, number].tolist() if token >= 0] == own
    assert bool(texts.perplexity().isfinite().all())


@pytest.mark.parametrize("name", ["T5", "mBART"])
def test_the_start_is_the_decoders_prompt(name: str) -> None:
    """A patch of what is written: not of what the encoder reads, nor of a decoder's first token."""
    model, (row,) = model_of(name), prompts([6])
    patch = [(cw.site("resid_post", layer=1, stack="decoder"), cw.add(vector(), 6.0))]
    step = -1

    def later(value: Tensor) -> Tensor:
        nonlocal step
        step += 1
        return value + 6 * vector() if step else value

    assert model.generate(row[None], N, patch, pos="new").new[0].tolist() == alone(
        name, row, path_of(name, "decoder", 1), later
    )
    unread = [(cw.site("resid_post", layer=1, stack="encoder"), "zero")]
    assert torch.equal(model.generate(row[None], N, unread, pos="new").ids, model.generate(row[None], N).ids)
    with pytest.raises(PatchError, match="at most 6 positions"):
        model.generate(row[None], N, [(cw.site("resid_post", layer=1, stack="encoder", pos=6), "zero")])
