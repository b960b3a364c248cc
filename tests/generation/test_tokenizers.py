"""Every token position that is to be steered is: for tokenizers of several kinds, and texts of many bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import conewise as cw
from conewise.model import Model
from tests.generation.alone import HEADS, WIDTH, hugging_face

hf: Any = transformers
TEXTS = [
    "naïve café 🙂🙃 — 日本語のテキスト",
    "ab",
    "Ünïcödé über alles: ½ ≠ ⅓, привет",
    "🏳️‍🌈 \t two  spaces",
]
SPECIAL = ["<pad>", "<unk>", "<s>"]
N = 4


@cache
def tokenizer(kind: str) -> Any:
    """A small tokenizer of a kind, trained on the texts themselves."""
    made: Any
    trainer: Any
    if kind == "byte-level BPE":  # GPT-2, Llama 3
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    elif kind == "BPE with bytes":  # Llama 2, Gemma
        every = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(97, 123))]
        known = {token: number for number, token in enumerate(every)}
        made = tokenizers.Tokenizer(models.BPE(known, [], byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        trainer = None
    elif kind == "Unigram":  # T5, XLNet
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>")
    else:  # BERT
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL)
    if trainer is not None:
        made.train_from_iterator(TEXTS * 20, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")


KINDS = ("byte-level BPE", "BPE with bytes", "Unigram", "WordPiece")


@cache
def model(kind: str) -> Model:
    torch.manual_seed(0)
    config = hugging_face.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        vocab_size=len(tokenizer(kind)),
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=None,
    )
    module = hugging_face.LlamaForCausalLM(config).eval()
    return cw.capture(module, tokenizer=tokenizer(kind), input_ids=torch.tensor([[3, 4, 5], [4, 4, 3]]))


@pytest.mark.parametrize("how", [{}, {"use_cache": False}, {"prefill_chunk_size": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_steered(kind: str, how: dict[str, Any]) -> None:
    """What is read at the patched place is what was put there: at each token, padded in front or not."""
    steered, place = [(("resid_post", 0), lambda value: torch.full_like(value, 0.5))], ("resid_post", 0)
    for prompt in (*TEXTS, TEXTS):
        written = model(kind).generate(prompt, N, steered, read=[place], **how)
        count = written.prompt + N - 1
        assert written[place].shape == (len(written.ids), count, WIDTH)
        assert bool((written[place] == 0.5).all())
        new = model(kind).generate(prompt, N, steered, read=[place], pos="new", **how)[place]
        assert bool((new[:, written.prompt :] == 0.5).all())
        assert not bool((new[:, : written.prompt] == 0.5).all(-1).any())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_an_earlier_text_is_gone_on_from(kind: str) -> None:
    own, place = model(kind), ("resid_post", 0)
    steered = [(place, lambda value: torch.full_like(value, 0.5))]
    first = own.generate(TEXTS[0], N, steered, return_dict_in_generate=True)
    cache: Any = first.returned.past_key_values
    seen = cache.get_seq_length()
    more = torch.cat([first.ids, torch.tensor([[5, 6, 7]])], 1)
    again = own.generate(more, N, steered, read=[place], past_key_values=cache)
    assert torch.equal(again.ids, own.generate(more, N, steered).ids)
    assert bool((again[place][:, seen:] == 0.5).all())


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_many_bytes_are_swept_as_they_are_written_alone(kind: str) -> None:
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))
    job = model(kind).sweep(
        cw.sites("resid_post", layer=":"), base=TEXTS, source=cw.add(vector, scale=[-5, 5]), generate=N
    )
    texts = job.run(verify=8)
    assert texts.verification is not None
    assert texts.verification.ok
    assert texts.prompts == tuple(
        tokenizer(kind).decode(tokenizer(kind)(text)["input_ids"], skip_special_tokens=True) for text in TEXTS
    )
