"""Numbers that are read off given texts in every world, against full patched forwards over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import InputMismatchError
from conewise.generation.result import WrittenTexts
from tests.generation.alone import WIDTH, captured, padded, prompts
from tests.generation.test_encoder_decoder import model_of

N, LENGTHS, SCALES = 6, (4, 7), (-6.0, 6.0)


def vector() -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))


def texts_of(name: str, **how: Any) -> WrittenTexts:
    model = model_of(name) if name == "T5" else captured(name)
    chosen = cw.sites("resid_post", layer=[0, 1], **({"stack": "decoder"} if name == "T5" else {}))
    source = cw.add(vector(), scale=list(SCALES))
    return model.sweep(
        chosen, base=padded(prompts(LENGTHS)), source=source, generate=cw.writing(N, **how)
    ).run()


def forward(name: str, world: int, prompt: int, tokens: Tensor, place: Any = None) -> tuple[Tensor, Any]:
    """The log probabilities that predict tokens behind a prompt, and a value at them, in a world."""
    row = prompts(LENGTHS)[prompt]
    if name == "T5":
        ids = torch.cat([torch.zeros(1, dtype=torch.long), tokens])[None]
        run, width = model_of(name).run(input_ids=row[None], decoder_input_ids=ids), 1
    else:
        run, width = captured(name).run(input_ids=torch.cat([row, tokens])[None]), len(row)
    with run.fork() as fork:
        if world:
            layer, scale = divmod(world - 1, len(SCALES))
            site = cw.site("resid_post", layer=layer, **({"stack": "decoder"} if name == "T5" else {}))
            fork.patch(site, cw.add(vector(), SCALES[scale]))
        said = torch.log_softmax(fork.outputs.logits[0, width - 1 : -1], -1)
        return said, None if place is None else fork.read(place)[0, width:]


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_divergences_along_the_unpatched_text_are_those_of_forwards(name: str) -> None:
    texts = texts_of(name)
    found = texts.kl().reshape(-1, len(LENGTHS), N)
    for world, prompt in ((1, 0), (2, 1), (4, 1)):
        base = texts.ids[0, prompt]
        base = base[base >= 0]
        own, said = (forward(name, at, prompt, base)[0] for at in (0, world))
        expected = (own.exp() * (own - said)).sum(-1).double()
        assert torch.allclose(found[world - 1, prompt, : len(base)], expected, atol=1e-5)
        assert bool(found[world - 1, prompt, len(base) :].isnan().all())


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_given_continuations_are_as_likely_as_forwards_say(name: str) -> None:
    texts, tokens = texts_of(name), torch.tensor([[5, 9, 11, -1], [7, 7, 30, 12]])
    found = texts.log_prob_of(tokens).reshape(-1, len(LENGTHS))
    for world, prompt in ((1, 0), (3, 1), (4, 0)):
        own = tokens[prompt][tokens[prompt] >= 0]
        said, _ = forward(name, world, prompt, own)
        assert float(found[world - 1, prompt]) == pytest.approx(
            float(said[range(len(own)), own].sum()), abs=1e-4
        )
    with pytest.raises(InputMismatchError, match="were given for 2 prompts"):
        texts.log_prob_of(torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(InputMismatchError, match="where there is a tokenizer"):
        texts.log_prob_of(" great")


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_a_probe_reads_what_patches_left_at_every_token(name: str) -> None:
    texts, direction = texts_of(name), vector()
    place: Any = cw.site("resid_post", layer=1, **({"stack": "decoder"} if name == "T5" else {}))
    found = texts.probe(place, direction).reshape(-1, len(LENGTHS), N)
    by_function = texts.probe(place, lambda values: values @ direction).reshape(-1, len(LENGTHS), N)
    assert torch.equal(found.nan_to_num(1.0), by_function.nan_to_num(1.0))
    for world, prompt in ((1, 0), (3, 1), (4, 1)):
        own = texts.ids[world, prompt]
        own = own[own >= 0]
        _, values = forward(name, world, prompt, own, place)
        expected = (values @ direction).double()
        assert torch.allclose(found[world - 1, prompt, : len(own)], expected, rtol=1e-4, atol=1e-3)
        assert bool(found[world - 1, prompt, len(own) :].isnan().all())
    assert texts.probes(place, direction).shape == texts.ids.shape
    with pytest.raises(InputMismatchError, match="a number for each token"):
        texts.probe(place, lambda values: values.sum())


def test_steps_that_are_not_patched_diverge_by_nothing() -> None:
    texts = texts_of("Llama", when=lambda step: step >= 3)
    found = texts.kl()
    assert float(found[..., :3].abs().max()) < 1e-6
    assert float(found[..., 3:].nan_to_num().abs().max()) > 1e-3
