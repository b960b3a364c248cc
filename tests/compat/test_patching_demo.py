"""What a notebook on activation patching does, cell by cell, with imports and the model's line alone changed.

The cells are in the manner of TransformerLens's demo of its patching functions; what they find is compared
with plain hooks on the module.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import plotly.express as px
import pytest
import torch
from torch import Tensor

import conewise.compat.transformer_lens as patching
import conewise.compat.transformer_lens as utils
from tests.compat.shipped import block, hook, hooked, projection

CLOSE = 1e-4
"""How far batched kernels may lie from single ones; the metrics are of order 1."""

PROMPTS = [
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
]
ANSWERS = [(" Mary", " John"), (" John", " Mary")]


def imshow(tensor: Tensor, **options: Any) -> Any:
    return px.imshow(utils.to_numpy(tensor), color_continuous_midpoint=0.0, **options)


class Notebook:
    """The variables that the first cells leave behind."""

    def __init__(self) -> None:
        self.model = model = hooked()
        self.clean_tokens = model.to_tokens(PROMPTS)
        swapped = [i + 1 if i % 2 == 0 else i - 1 for i in range(len(self.clean_tokens))]
        self.corrupted_tokens = self.clean_tokens[swapped]
        self.answers = torch.tensor(
            [[model.to_single_token(text) for text in pair] for pair in ANSWERS], device=model.cfg.device
        )
        self.clean_logits, self.clean_cache = model.run_with_cache(self.clean_tokens)
        self.corrupted_logits, _ = model.run_with_cache(self.corrupted_tokens)
        self.clean = self.difference(self.clean_logits).item()
        self.corrupted = self.difference(self.corrupted_logits).item()

    def difference(self, logits: Tensor) -> Tensor:
        if len(logits.shape) == 3:
            logits = logits[:, -1, :]
        right = logits.gather(1, self.answers[:, 0].unsqueeze(1))
        wrong = logits.gather(1, self.answers[:, 1].unsqueeze(1))
        return (right - wrong).mean()

    def metric(self, logits: Tensor) -> Tensor:
        return (self.difference(logits) - self.corrupted) / (self.clean - self.corrupted)


@cache
def notebook() -> Notebook:
    return Notebook()


@torch.no_grad()
def by_hand(path: str, index: Any, heads: int | None = None, *, is_input: bool = False) -> float:
    """The metric with one part of one activation from the clean run, by two forwards with hooks."""
    seen: list[Tensor] = []
    book = notebook()

    def look(value: Tensor) -> Tensor:
        seen.append(value)
        return value

    def put(value: Tensor) -> Tensor:
        shape = value.shape if heads is None else (*value.shape[:2], heads, -1)
        shown = value.reshape(shape)
        shown[index] = seen[0].reshape(shape)[index]
        return shown.reshape(value.shape)

    with hook(path, look, is_input=is_input) as module:
        module(input_ids=book.clean_tokens, use_cache=False)
    with hook(path, put, is_input=is_input) as module:
        return book.metric(module(input_ids=book.corrupted_tokens, use_cache=False).logits).item()


def test_prompts_become_tokens_and_answers_are_single_tokens() -> None:
    book = notebook()
    text: str = book.model.to_string(book.clean_tokens[0])
    assert text.endswith(PROMPTS[0])
    assert book.model.to_str_tokens(PROMPTS[0]) == book.model.to_str_tokens(book.clean_tokens[0])
    assert book.clean_tokens.shape == book.corrupted_tokens.shape
    short = book.model.to_tokens(["Mary gave", "John gave a drink"])
    assert short[0].tolist() == [*book.model.to_tokens("Mary gave")[0].tolist(), *[short[0, -1].item()] * 2]
    assert book.model.to_tokens("Mary gave", prepend_bos=False).shape == (1, 2)
    with pytest.raises(ValueError, match="padded on the right here"):
        book.model.to_tokens(["Mary gave", "John gave a drink"], padding_side="left")
    with pytest.raises(AssertionError, match=r"is 2 tokens \('Mary', 'gave'\)"):
        book.model.to_single_token("Mary gave")
    assert book.clean > 0.5, "the shipped model knows the answer"
    assert book.metric(book.clean_logits).item() == pytest.approx(1.0)
    assert book.metric(book.corrupted_logits).item() == pytest.approx(0.0, abs=1e-6)


def test_patching_the_stream_shows_where_the_names_matter() -> None:
    book = notebook()
    found = patching.get_act_patch_resid_pre(book.model, book.corrupted_tokens, book.clean_cache, book.metric)
    labels = [f"{token}_{i}" for i, token in enumerate(book.model.to_str_tokens(book.clean_tokens[0]))]
    figure = imshow(found, x=labels, labels={"x": "Position", "y": "Layer"}, title="resid_pre")
    assert figure.data[0].z.shape == (book.model.cfg.n_layers, book.clean_tokens.shape[1])
    last = len(labels) - 1
    for layer, pos in ((0, 3), (2, last), (3, last)):
        expected = by_hand(block(layer), (slice(None), pos), is_input=True)
        assert found[layer, pos].item() == pytest.approx(expected, abs=CLOSE)
    assert found[3, last] > 0.5


def test_every_part_of_a_block_is_patched_by_position() -> None:
    book = notebook()
    every = patching.get_act_patch_block_every(
        book.model, book.corrupted_tokens, book.clean_cache, book.metric
    )
    assert every.shape == (3, book.model.cfg.n_layers, book.clean_tokens.shape[1])
    figure = imshow(every, facet_col=0, title="resid_pre, attn_out, mlp_out")
    assert len(figure.data) == 3
    expected = by_hand(f"{block(1)}.mlp", (slice(None), -1))
    assert every[2, 1, -1].item() == pytest.approx(expected, abs=CLOSE)


def test_heads_are_patched_at_all_positions_and_at_each() -> None:
    book = notebook()
    model, corrupted, clean = book.model, book.corrupted_tokens, book.clean_cache
    heads = patching.get_act_patch_attn_head_out_all_pos(model, corrupted, clean, book.metric)
    assert heads.shape == (model.cfg.n_layers, model.cfg.n_heads)
    _, short = model.run_with_cache(book.clean_tokens[:, 9:])
    by_pos = patching.get_act_patch_attn_head_out_by_pos(model, corrupted[:, 9:], short, book.metric)
    rows = by_pos.permute(0, 2, 1).flatten(0, 1)  # einops: layer pos head -> (layer head) pos
    labels = [f"L{i}H{j}" for i in range(model.cfg.n_layers) for j in range(model.cfg.n_heads)]
    assert labels == model.all_head_labels
    assert len(imshow(rows, y=labels).data[0].z) == len(labels)
    layer, head = divmod(int(heads.argmax()), model.cfg.n_heads)
    expected = by_hand(projection(layer), (slice(None), slice(None), head), model.cfg.n_heads, is_input=True)
    assert heads[layer, head].item() == pytest.approx(expected, abs=CLOSE)


def test_queries_keys_values_and_patterns_are_patched_too() -> None:
    book = notebook()
    model, corrupted, clean = book.model, book.corrupted_tokens, book.clean_cache
    every = patching.get_act_patch_attn_head_all_pos_every(model, corrupted, clean, book.metric)
    assert every.shape == (5, model.cfg.n_layers, model.cfg.n_heads)
    imshow(every, facet_col=0, labels={"x": "Head", "y": "Layer"})
    _, short = model.run_with_cache(book.clean_tokens[:, 9:])  # the end alone, for the sake of time
    by_pos = patching.get_act_patch_attn_head_by_pos_every(model, corrupted[:, 9:], short, book.metric)
    assert by_pos.shape == (5, model.cfg.n_layers, short["resid_pre", 0].shape[1], model.cfg.n_heads)
    # One by one, by hooks on the model: what one cell of the sweep stands for.
    layer, head = divmod(int(every[4].argmax()), model.cfg.n_heads)

    def patch_pattern(pattern: Tensor, hook: Any) -> Tensor:
        pattern[:, head] = clean[hook.name][:, head]
        return pattern

    logits = model.run_with_hooks(
        corrupted, fwd_hooks=[(utils.get_act_name("pattern", layer), patch_pattern)]
    )
    assert every[4, layer, head].item() == pytest.approx(book.metric(logits).item(), abs=CLOSE)


def test_induction_is_patched_with_a_metric_of_many_positions() -> None:
    model = hooked()
    length, batch = 6, 2
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(20, model.cfg.d_vocab, (2, batch, length), generator=generator)
    bos = torch.full((batch, 1), model.tokenizer.bos_token_id or 0)
    clean_tokens = torch.cat([bos, first, first], 1)
    corrupted_tokens = torch.cat([bos, first, second], 1)

    def induction(logits: Tensor, answers: Tensor = first) -> Tensor:
        guesses = logits[:, -length:-1].log_softmax(-1)
        return guesses.gather(-1, answers[:, 1:].unsqueeze(-1)).mean()

    clean_logits, clean_cache = model.run_with_cache(clean_tokens)
    corrupted_logits = model(corrupted_tokens)
    low, high = induction(corrupted_logits).item(), induction(clean_logits).item()

    def metric(logits: Tensor) -> Tensor:
        return (induction(logits) - low) / (high - low)

    found = patching.get_act_patch_attn_head_out_all_pos(model, corrupted_tokens, clean_cache, metric)
    assert found.shape == (model.cfg.n_layers, model.cfg.n_heads)

    def whole(z: Tensor, hook: Any) -> Tensor:
        z[:, :, 1] = clean_cache[hook.name][:, :, 1]
        return z

    expected = metric(model.run_with_hooks(corrupted_tokens, fwd_hooks=[("blocks.2.attn.hook_z", whole)]))
    assert found[2, 1].item() == pytest.approx(expected.item(), abs=CLOSE)


def test_a_sweep_of_ones_own_is_made_of_the_generic_one() -> None:
    book = notebook()
    head_sweep = partial(
        patching.generic_activation_patch,
        patch_setter=patching.layer_head_vector_patch_setter,
        activation_name="z",
        index_axis_names=("layer", "head"),
    )
    found, frame = head_sweep(
        book.model, book.corrupted_tokens, book.clean_cache, book.metric, return_index_df=True
    )
    assert list(frame.columns) == ["layer", "head"]
    same = patching.get_act_patch_attn_head_out_all_pos(
        book.model, book.corrupted_tokens, book.clean_cache, book.metric
    )
    assert torch.equal(found, same)


def test_a_sweep_tells_its_cost_before_it_runs() -> None:
    book = notebook()
    given = (book.model, book.corrupted_tokens, book.clean_cache, book.metric)
    plan = patching.get_act_patch_mlp_out(*given, plan=True)
    assert plan.worlds == book.model.cfg.n_layers * book.clean_tokens.shape[1]
    found = plan.run().per_prompt.mean(-1).reshape(book.model.cfg.n_layers, -1)
    assert found[1, -1].item() == pytest.approx(by_hand(f"{block(1)}.mlp", (slice(None), -1)), abs=CLOSE)
    every = patching.get_act_patch_block_every(*given, plan=True)
    assert list(every) == ["resid_pre", "attn_out", "mlp_out"]

    def own(corrupted: Tensor, index: Any, clean: Tensor) -> Tensor:
        return clean

    with pytest.raises(ValueError, match="own is a patch setter of your own"):
        patching.generic_activation_patch(
            *given, patch_setter=own, activation_name="z", index_axis_names=["layer"], plan=True
        )
