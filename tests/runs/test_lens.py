"""The lens is what a module's own norm and unembedding make of hooked streams; its end is the output."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import ArgumentError, DecompositionError
from conewise.runs import lens as lens_module
from tests.anatomy.made import EncoderDecoder
from tests.circuits.edge_models import inputs_of, module_of, run_of
from tests.runs.plain_hooks import PlainHooks

NAMES = ["gpt2", "llama", "gpt_neox", "gemma2"]


class Letters:
    """A tokenizer of numbers: token 7 is " t7"."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f" t{number}" for number in ids)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [int(word[1:]) for word in text.split()]}


@functools.cache
def hooked(name: str) -> PlainHooks:
    with torch.no_grad():
        return PlainHooks(module_of(name), **inputs_of(name, 0))


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_what_the_module_makes_of_the_hooked_stream(name: str) -> None:
    plain = hooked(name)
    found = run_of(name, 0).lens(top=3, tokens=[7, 11])
    assert found.rows == ("input", "0", "1")
    streams = [plain.seen.streams[reader] for reader in ("a0.h0<q>", "a1.h0<q>", "logits")]
    for row, stream in enumerate(streams):
        probs = plain.lens(stream).softmax(-1)
        expected = probs.topk(3, -1)
        torch.testing.assert_close(found.top_probs[row], expected.values, atol=1e-6, rtol=1e-4)
        assert torch.equal(found.top[row], expected.indices)
        torch.testing.assert_close(found.probs[row], probs[..., [7, 11]], atol=1e-6, rtol=1e-4)
        ranks = (probs[..., None, :] > probs[..., [7, 11], None]).sum(-1)
        assert torch.equal(found.ranks[row], ranks)
    torch.testing.assert_close(found.logits[-1], plain.seen.logits[..., [7, 11]], atol=1e-5, rtol=1e-4)


def test_bert_is_read_by_its_own_head() -> None:
    run = run_of("bert", 0)
    module: Any = module_of("bert")
    found = run.lens(top=2)
    assert found.rows == ("input", "0", "1")
    for row, layer in ((0, 0), (1, 1)):
        with torch.no_grad():
            expected = module.cls(run["resid_pre", layer]).softmax(-1).topk(2, -1)
        torch.testing.assert_close(found.top_probs[row], expected.values, atol=1e-6, rtol=1e-4)
        assert torch.equal(found.top[row], expected.indices)


def test_logits_are_gone_through_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("llama", 0)
    whole = run.lens(tokens=[3])
    monkeypatch.setattr(lens_module, "AT_ONCE", 2 * 211)
    parted = run.lens(tokens=[3])
    assert torch.equal(whole.top, parted.top)
    torch.testing.assert_close(whole.probs, parted.probs)
    assert torch.equal(whole.ranks, parted.ranks)
    # What is kept does not grow with the vocabulary.
    kept = (whole.top, whole.top_probs, whole.logits, whole.probs, whole.ranks)
    assert sum(one.numel() for one in kept) == 3 * 2 * 6 * (2 * 5 + 3 * 1)


def test_half_precision_and_the_last_position_alone() -> None:
    coarse = run_of("gpt2", 0, torch.bfloat16).lens(top=1)
    assert coarse.top_probs.dtype == torch.float32
    model = cw.capture(module_of("llama"), **inputs_of("llama", 0), logits_to_keep=1)
    last = model.run(**inputs_of("llama", 0)).lens(top=2)
    whole = run_of("llama", 0).lens(top=2)
    assert last.top.shape == (3, 2, 1, 2)
    assert torch.equal(last.top, whole.top[:, :, -1:])


def test_texts_labels_tables_and_pictures() -> None:
    run = run_of("gpt2", 0)
    found = run.lens(top=2, tokens=[" t7"], tokenizer=Letters())
    assert found.tokens == (7,)
    ids = inputs_of("gpt2", 0)["input_ids"]
    assert found.labels[1][2] == f"·t{int(ids[1, 2])}"
    frame = found.to_dataframe()
    assert len(frame) == 3 * 2 * 6 * (2 + 1)
    assert frame[frame.which == "asked"].next.unique().tolist() == ["·t7"]
    figure = found.plot(prompt=1)
    assert list(figure.layout.yaxis.ticktext) == ["input", "0", "1"]
    assert figure.data[0].text[2][5] == f"·t{int(found.top[2, 1, 5, 0])}"
    assert figure.data[0].customdata[0][0].startswith("what enters, at ·t")
    ranked = found.plot(token=" t7")
    assert ranked.data[0].text[0][0] == f"#{int(found.ranks[0, 0, 0, 0]) + 1}"
    plain = run.lens(top=1)
    assert plain.plot().data[0].text[0][0] == str(int(plain.top[0, 0, 0, 0]))
    assert plain.labels[0] == ("0", "1", "2", "3", "4", "5")


def test_an_encoder_decoder_is_read_at_the_stack_that_leads_to_logits() -> None:
    class Named(EncoderDecoder):
        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
            return {"logits": super().forward(ids, targets)}

    ids = torch.arange(6).reshape(1, 6)
    module = Named().eval()
    run = cw.capture(module, ids=ids, targets=ids).run(ids=ids, targets=ids)
    found = run.lens(top=1)
    assert found.rows == ("input", "0", "1")
    with torch.no_grad():
        expected = module.head(run[cw.site("resid_pre", layer=1, stack="decoder")]).argmax(-1)
    assert torch.equal(found.top[1, ..., 0], expected)
    with pytest.raises(DecompositionError, match="no stack of layers was found"):
        run.lens(stack="encoder")


def test_bad_arguments_are_refused() -> None:
    run = run_of("gpt2", 0)
    with pytest.raises(DecompositionError, match="at least 1"):
        run.lens(top=0)
    for top in (True, 2.5, "3"):
        with pytest.raises(ArgumentError, match=r"`top` is .*; expected a whole number"):
            run.lens(top=top)  # type: ignore[arg-type]
    for tokens in (None, [1.5], [None]):
        with pytest.raises(DecompositionError, match="a token is its number"):
            run.lens(tokens=tokens)
    unordered: list[Any] = [b"ab", bytearray(b"a"), {1, 2}, frozenset({1}), {1: 2}]
    for tokens in unordered:
        with pytest.raises(DecompositionError, match="a number, a text, or a list of them in order"):
            run.lens(tokens=tokens)
    assert run.lens(tokens=torch.tensor(3)).tokens == (3,)
    with pytest.raises(DecompositionError, match="not in the vocabulary of 211"):
        run.lens(tokens=[211])
    with pytest.raises(DecompositionError, match="no tokenizer is known"):
        run.lens(tokens=[" Paris"])
    with pytest.raises(DecompositionError, match="is 2 tokens"):
        run.lens(tokens=["t1 t2"], tokenizer=Letters())
    tiny = cw.load("tiny").tokenizer
    with pytest.raises(DecompositionError, match="'Zebra' is not in the vocabulary of this tokenizer"):
        run.lens(tokens=["Zebra"], tokenizer=tiny)
    with pytest.raises(DecompositionError, match="no token that this lens was asked for"):
        run.lens(tokens=[3]).plot(token=4)
    plain = cw.capture(torch.nn.Linear(3, 4), torch.ones(2, 3))
    with pytest.raises(DecompositionError, match="no stack of layers was found"):
        plain.run(torch.ones(2, 3)).lens()


def test_a_world_whose_logits_are_patched_is_refused() -> None:
    base, source = run_of("gpt2", 0), run_of("gpt2", 1)
    with base.fork() as world:
        world.patch(("resid_mid", 1), source)
        torch.testing.assert_close(world.lens(tokens=[3]).logits[-1, ..., 0], world.logits[..., 3])
    with base.fork() as world:
        world.patch("transformer.ln_f", source)
        with pytest.raises(DecompositionError, match=r"patched at transformer\.ln_f"):
            world.lens()
