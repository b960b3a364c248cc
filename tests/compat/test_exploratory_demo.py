"""What a notebook of exploratory analysis does, with imports and the model's line alone changed.

Direct logit attribution, patching by hooks, attention patterns: in the manner of TransformerLens's
exploratory demo, and of what people write after it. What is found is compared with plain hooks and with the
logits.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
import conewise.compat.transformer_lens as patching
import conewise.compat.transformer_lens as utils
from conewise.compat.transformer_lens import ActivationCache, HookPoint
from tests.compat.shipped import block, hook, hooked, projection

CLOSE = 1e-4

FORMAT = "When {} and {} went to the store, {} gave a drink to"
PROMPTS = [FORMAT.format("Mary", "John", giver) for giver in ("John", "Mary")]
ANSWERS = [(" Mary", " John"), (" John", " Mary")]


class Notebook:
    """The variables that the first cells leave behind."""

    def __init__(self) -> None:
        self.model = model = hooked()
        self.tokens = model.to_tokens(PROMPTS, prepend_bos=True)
        self.answer_tokens = torch.stack(
            [torch.cat([model.to_tokens(one, prepend_bos=False)[0] for one in pair]) for pair in ANSWERS]
        )
        self.logits, cached = model.run_with_cache(self.tokens)
        self.cache: ActivationCache = cached
        directions = model.tokens_to_residual_directions(self.answer_tokens)
        assert directions.shape == (2, 2, model.cfg.d_model)
        self.directions = directions[:, 0] - directions[:, 1]
        self.corrupted_tokens = self.tokens.flip(0)
        self.corrupted_logits, self.corrupted_cache = model.run_with_cache(
            self.corrupted_tokens, return_type="logits"
        )
        self.original, self.corrupted = (
            self.difference(self.logits).item(),
            self.difference(self.corrupted_logits).item(),
        )

    def difference(self, logits: Tensor, per_prompt: bool = False) -> Tensor:
        last = logits[:, -1, :]
        answers = last.gather(dim=-1, index=self.answer_tokens)
        found = answers[:, 0] - answers[:, 1]
        return found if per_prompt else found.mean()

    def normalized(self, logits: Tensor) -> Tensor:
        return (self.difference(logits) - self.corrupted) / (self.original - self.corrupted)

    def attributed(self, stack: Tensor) -> Tensor:
        """What parts of the stream at the last position add to the difference, the mean over prompts."""
        scaled = self.cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)
        return torch.einsum("...bm,bm->...", scaled, self.directions) / len(PROMPTS)


@cache
def notebook() -> Notebook:
    return Notebook()


def test_a_prompt_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    utils.test_prompt(PROMPTS[0], " Mary", hooked(), prepend_bos=True, top_k=3)
    printed = capsys.readouterr().out
    assert "Ranks of the answer tokens: [('Mary', 0)]" in printed
    assert printed.count("Top ") == 3
    utils.test_prompt(PROMPTS[0], ["Mary", "John"], hooked(), print_details=False)
    assert "[('Mary', 0)], [('John', " in capsys.readouterr().out


def test_the_final_stream_gives_the_difference_of_logits() -> None:
    book = notebook()
    final = book.cache["resid_post", -1]
    last = final[:, -1, :]
    found = book.attributed(last)
    # The final norm's bias and b_U push both answers the same way in these prompts, once each.
    assert found.item() == pytest.approx(book.original, abs=CLOSE)
    assert book.original > 1, "the shipped model knows the answer"


def test_the_difference_is_attributed_to_layers_and_heads() -> None:
    book = notebook()
    cfg = book.model.cfg
    lens, labels = book.cache.accumulated_resid(layer=-1, incl_mid=True, pos_slice=-1, return_labels=True)
    by_depth = book.attributed(lens)
    assert len(labels) == 2 * cfg.n_layers + 1
    assert by_depth[-1].item() == pytest.approx(book.original, abs=CLOSE)
    parts, labels = book.cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
    by_layer = book.attributed(parts)
    assert by_layer.sum().item() == pytest.approx(book.original, abs=CLOSE)
    steps = by_depth.diff()
    first = labels.index("0_attn_out")
    torch.testing.assert_close(by_layer[first:], steps, rtol=0, atol=CLOSE)
    heads, labels = book.cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    by_head = book.attributed(heads).reshape(cfg.n_layers, cfg.n_heads)
    assert labels == book.model.all_head_labels
    biases = book.attributed(book.model.b_O[:, None].expand(-1, len(PROMPTS), -1))
    of_attention = by_layer[first::2]
    torch.testing.assert_close(by_head.sum(1) + biases, of_attention, rtol=0, atol=CLOSE)


def test_attribution_is_what_removing_the_last_layers_head_changes_at_a_frozen_norm() -> None:
    """Direct attribution by its meaning: the head is removed, and the final norm divides as it did."""
    book = notebook()
    layer, head = book.model.cfg.n_layers - 1, 1
    shares = book.cache.logit_attrs(
        book.cache.stack_head_results(layer=-1, pos_slice=-1),
        book.answer_tokens[:, 0], book.answer_tokens[:, 1], pos_slice=-1,
    )  # fmt: skip

    def remove(z: Tensor, hook: HookPoint) -> None:
        z[:, :, head] = 0.0

    def without_mlp(out: Tensor, hook: HookPoint) -> Tensor:
        return book.cache[hook.name]

    def frozen(scale: Tensor, hook: HookPoint) -> Tensor:
        return book.cache[hook.name]

    logits = book.model.run_with_hooks(
        book.tokens,
        fwd_hooks=[
            (utils.get_act_name("z", layer), remove),
            (utils.get_act_name("mlp_out", layer), without_mlp),
            ("ln_final.hook_scale", frozen),
        ],
    )
    change = book.difference(book.logits, True) - book.difference(logits, True)
    place = layer * book.model.cfg.n_heads + head
    torch.testing.assert_close(shares[place], change, rtol=0, atol=CLOSE)


def patch_residual(corrupted: Tensor, hook: HookPoint, pos: int, clean_cache: ActivationCache) -> Tensor:
    corrupted[:, pos, :] = clean_cache[hook.name][:, pos, :]
    return corrupted


def patch_head_vector(corrupted: Tensor, hook: HookPoint, head: int, clean_cache: ActivationCache) -> Tensor:
    corrupted[:, :, head, :] = clean_cache[hook.name][:, :, head, :]
    return corrupted


def patch_head_pattern(corrupted: Tensor, hook: HookPoint, head: int, clean_cache: ActivationCache) -> Tensor:
    corrupted[:, head, :, :] = clean_cache[hook.name][:, head, :, :]
    return corrupted


def test_patching_by_hooks_finds_what_the_sweeps_find() -> None:
    book = notebook()
    model, cfg = book.model, book.model.cfg
    given = (model, book.corrupted_tokens, book.cache, book.normalized)
    by_hooks = torch.zeros(3, cfg.n_layers, cfg.n_heads)
    kinds = [("z", patch_head_vector), ("v", patch_head_vector), ("pattern", patch_head_pattern)]
    for number, (kind, function) in enumerate(kinds):
        for layer in range(cfg.n_layers):
            for head in range(model.cfg.n_heads):
                hook_fn = partial(function, head=head, clean_cache=book.cache)
                logits = model.run_with_hooks(
                    book.corrupted_tokens,
                    fwd_hooks=[(utils.get_act_name(kind, layer, "attn"), hook_fn)],
                    return_type="logits",
                )
                by_hooks[number, layer, head] = book.normalized(logits)
    swept = patching.get_act_patch_attn_head_all_pos_every(*given)
    torch.testing.assert_close(swept[[0, 3, 4]], by_hooks, rtol=0, atol=CLOSE)
    stream = patching.get_act_patch_resid_pre(*given)
    last = book.tokens.shape[1] - 1
    for layer in (0, cfg.n_layers - 1):
        for pos in (last - 4, last):
            hook_fn = partial(patch_residual, pos=pos, clean_cache=book.cache)
            name = utils.get_act_name("resid_pre", layer)
            logits = model.run_with_hooks(book.corrupted_tokens, fwd_hooks=[(name, hook_fn)])
            assert stream[layer, pos].item() == pytest.approx(book.normalized(logits).item(), abs=CLOSE)


def test_attention_of_the_best_heads_is_shown() -> None:
    book = notebook()
    cfg = book.model.cfg
    heads = book.cache.stack_head_results(layer=-1, pos_slice=-1)
    best = book.attributed(heads).topk(3).indices.tolist()
    patterns = torch.stack([book.cache["attn", i // cfg.n_heads][0, i % cfg.n_heads] for i in best])
    tokens = book.model.to_str_tokens(book.tokens[0])
    assert patterns.shape == (3, len(tokens), len(tokens))
    torch.testing.assert_close(patterns.sum(-1), torch.ones(3, len(tokens)))
    assert not patterns.triu(1).any()


# -- what people write -----------------------------------------------------------------------------------


def test_heads_are_ablated_by_the_mean() -> None:
    """As in a notebook on indirect objects: each head by its mean over prompts, one loop."""
    book = notebook()
    model, cfg = book.model, book.model.cfg
    found = torch.zeros(cfg.n_layers, cfg.n_heads)
    for layer in range(cfg.n_layers):
        for head in range(cfg.n_heads):

            def ablate(z: Tensor, hook: HookPoint, head: int = head) -> Tensor:
                z[:, :, head] = z[:, :, head].mean(0, keepdim=True)
                return z

            logits = model.run_with_hooks(book.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", ablate)])
            found[layer, head] = book.difference(logits) - book.original
    layer, head = divmod(int(found.abs().argmax()), cfg.n_heads)

    def by_mean(whole: Tensor) -> Tensor:
        shown = whole.reshape(*whole.shape[:2], cfg.n_heads, -1)
        shown[:, :, head] = shown[:, :, head].mean(0, keepdim=True)
        return shown.reshape(whole.shape)

    with hook(projection(layer), by_mean, is_input=True) as module, torch.no_grad():
        logits = module(input_ids=book.tokens, use_cache=False).logits
    assert found[layer, head].item() == pytest.approx(
        (book.difference(logits) - book.original).item(), abs=1e-5
    )


def test_induction_scores_are_gathered_by_hooks_of_a_filter() -> None:
    model = hooked()
    length, batch = 8, 3
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(20, model.cfg.d_vocab, (batch, length), generator=generator)
    tokens = torch.cat([half, half], 1)
    scores = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)

    def store(pattern: Tensor, hook: HookPoint) -> None:
        stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - length)
        scores[hook.layer(), :] = stripe.mean((0, -1))

    assert model.run_with_hooks(
        tokens, return_type=None, fwd_hooks=[(lambda name: name.endswith("pattern"), store)]
    ) is None  # fmt: skip
    with torch.no_grad():
        attentions = model.module(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    expected = torch.stack(
        [one.diagonal(dim1=-2, dim2=-1, offset=1 - length).mean((0, -1)) for one in attentions]
    )
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)
    assert expected.max() > 0


def test_a_logit_lens_is_read_off_the_accumulated_stream() -> None:
    book = notebook()
    model = book.model
    stack, labels = book.cache.accumulated_resid(apply_ln=True, return_labels=True)
    lens = stack[:, 0, -1] @ model.W_U + model.b_U
    torch.testing.assert_close(lens[-1], book.logits[0, -1], rtol=0, atol=CLOSE)
    ranks = (lens.argsort(-1, descending=True) == book.answer_tokens[0, 0]).nonzero()[:, 1]
    assert len(ranks) == len(labels)
    assert ranks[-1] == 0
    seen: list[Tensor] = []

    def look(stream: Tensor) -> Tensor:
        seen.append(stream)
        return stream

    with hook(block(2), look, is_input=True) as module, torch.no_grad():
        module(input_ids=book.tokens, use_cache=False)
        own = module.get_output_embeddings()(model.ln_final(seen[0][0, -1]))
    torch.testing.assert_close(lens[2], own, rtol=0, atol=CLOSE)


def test_copying_scores_come_from_weights() -> None:
    """OV circuits of all heads on the embedding: how much each pushes the token that it attends to."""
    model = hooked()
    names = torch.tensor([model.to_single_token(f" {name}") for name in ("Mary", "John")])
    full = model.W_E[names] @ model.OV @ model.W_U[:, names]
    assert full.AB.shape == (model.cfg.n_layers, model.cfg.n_heads, 2, 2)
    layer, head = 2, 1
    by_hand = model.W_E[names] @ model.W_V[layer, head] @ model.W_O[layer, head] @ model.W_U[:, names]
    torch.testing.assert_close(full.AB[layer, head], by_hand, rtol=0, atol=CLOSE)
    # Attending to one position alone, a head writes its row through OV: checked in the run.
    cached = notebook().cache
    value = (
        model.blocks[layer].ln1(cached["resid_pre", layer]) @ model.W_V[layer, head] + model.b_V[layer, head]
    )
    mixed = cached["pattern", layer][:, head] @ value @ model.W_O[layer, head]
    torch.testing.assert_close(mixed, cached["result", layer][:, :, head], rtol=0, atol=CLOSE)


def test_composition_is_measured_between_heads() -> None:
    model = hooked()
    early, late = model.OV[0], model.QK[1]
    norms = (early.norm()[:, None], late.norm()[None, :])
    score = torch.stack([torch.stack([(a @ b).norm() for b in _each(late)]) for a in _each(early)])
    score = score / norms[0] / norms[1]
    a, b = early[2].AB, late[3].AB
    assert score[2, 3].item() == pytest.approx(((a @ b).norm() / a.norm() / b.norm()).item(), rel=1e-3)


def _each(heads: Any) -> list[Any]:
    return [heads[number] for number in range(heads.shape[0])]


def test_effects_are_approximated_by_gradients() -> None:
    """Attribution patching as its demo does it: caches of values and of gradients, filled by hooks."""
    book = notebook()
    model = book.model

    def both(tokens: Tensor) -> tuple[ActivationCache, ActivationCache]:
        model.reset_hooks()
        values: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}

        def forward(value: Tensor, hook: HookPoint) -> None:
            values[hook.name] = value.detach()

        def backward(gradient: Tensor, hook: HookPoint) -> None:
            gradients[hook.name] = gradient.detach()

        model.add_hook(lambda name: "_input" not in name, forward, "fwd")
        model.add_hook(lambda name: "_input" not in name, backward, "bwd")
        value = book.normalized(model(tokens))
        value.backward()  # type: ignore[no-untyped-call]
        model.reset_hooks()
        return ActivationCache(values, model), ActivationCache(gradients, model)

    clean, _ = both(book.tokens)
    corrupted, gradients = both(book.corrupted_tokens)
    z = [one.stack_activation("z") for one in (clean, corrupted, gradients)]
    found = (z[2] * (z[0] - z[1])).sum((1, 2, 4))
    swept = patching.get_act_patch_attn_head_out_all_pos(
        model, book.corrupted_tokens, book.cache, book.normalized
    )
    run = model.captured.run(input_ids=book.corrupted_tokens)
    own = run.gradients(lambda out: book.normalized(out.logits), cw.sites("z", layer=":"))
    for layer in range(model.cfg.n_layers):
        torch.testing.assert_close(z[2][layer], own["z", layer], rtol=0, atol=1e-5)
    correlation = torch.corrcoef(torch.stack([found.flatten(), swept.flatten()]))[0, 1]
    assert correlation > 0.5
