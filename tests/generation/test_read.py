"""Values that are read while a model writes, against a full patched forward over the whole text."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.anatomy.places import PlaceLike, as_place
from conewise.errors import InputMismatchError, PatchError
from conewise.model import Model
from tests.generation.alone import FAMILIES, HEADS, WIDTH, hugging_face, padded, prompts

N = 6


@cache
def eager(name: str) -> Model:
    """A model whose attention patterns can be read."""
    kind, config, settings, _, _ = FAMILIES[name]
    torch.manual_seed(0)
    settings = {**settings, "attn_implementation": "eager", "eos_token_id": None}
    module = getattr(hugging_face, kind)(getattr(hugging_face, config)(**settings)).eval()
    return cw.capture(module, input_ids=torch.tensor([[1, 5, 6, 7], [1, 4, 3, 9]]))


def vector() -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Qwen 3", "GPT-NeoX", "Mixtral"])
def test_what_is_read_is_what_a_forward_over_the_text_has(name: str, *, cached: bool) -> None:
    model, ids = eager(name), torch.stack(prompts([5, 5]))
    read = [("resid_post", 0), cw.site("z", layer=[1, 2]), "blocks.2.attn.hook_pattern"]
    steered = [(("resid_post", 1), cw.add(vector(), 4.0))]
    written = model.generate(ids, N, steered, read=read, use_cache=cached)
    assert torch.equal(written.ids, model.generate(ids, N, steered).ids)
    with model.run(input_ids=written.ids[:, :-1]).fork() as world:
        world.patch(*steered[0])
        places: list[PlaceLike] = [("resid_post", 0), ("z", 1), ("z", 2), "blocks.2.attn.hook_pattern"]
        for place in places:
            own = world.read(as_place(place))
            assert written[place].shape == own.shape
            assert torch.allclose(written[place], own, atol=1e-5)
    assert written["blocks.2.attn.hook_pattern"].shape == (2, HEADS, 5 + N - 1, 5 + N - 1)
    assert not written["blocks.2.attn.hook_pattern"].triu(1).any()


def test_patches_are_read_as_they_left_the_value() -> None:
    model, (ids,) = eager("Llama"), prompts([5])
    patches = [(("resid_post", 1), "zero")]
    written = model.generate(ids[None], N, patches, pos="new", read=("resid_post", 1))
    assert bool(written["resid_post", 1][:, :5].any())
    assert not written["resid_post", 1][:, 5:].any()


def test_padded_prompts_and_chunks_of_a_prompt_are_read_whole() -> None:
    model, rows = eager("Llama"), prompts([4, 7])
    given = padded(rows)
    whole = model.generate(given, N, read=[("resid_post", 2)])
    chunked = model.generate(given, N, read=[("resid_post", 2)], prefill_chunk_size=3)
    assert whole["resid_post", 2].shape == chunked["resid_post", 2].shape == (2, 7 + N - 1, WIDTH)
    for number, row in enumerate(rows):
        own = model.generate(row[None], N, read=[("resid_post", 2)])["resid_post", 2][0]
        for found in (whole, chunked):
            assert torch.allclose(found["resid_post", 2][number, 7 - len(row) :], own, atol=1e-5)


def test_what_cannot_be_read_is_refused() -> None:
    model, (ids,) = eager("Llama"), prompts([5])
    with pytest.raises(InputMismatchError, match="leave out `num_beams`, or `read`"):
        model.generate(ids[None], N, read=[("resid_post", 1)], num_beams=2)
    with pytest.raises(InputMismatchError, match="was not read while the model wrote; read was nothing"):
        model.generate(ids[None], N)["resid_post", 1]
    with pytest.raises(PatchError, match="Read z"):
        model.generate(ids[None], N, read=[("result", 1)])
