"""A model under TransformerLens's names, against hooks on the module and products of its own weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import conewise.compat.transformer_lens as transformer_lens
from conewise.compat.hooked_model import INSTEAD
from conewise.compat.transformer_lens import (
    ActivationCache,
    FactoredMatrix,
    HookedModel,
    HookPoint,
    get_act_name,
)
from conewise.errors import MissingSiteError
from conewise.models.architectures import ARCHITECTURES
from tests.program.zoo import ZOO
from tests.sweeps.tiny import HEADS, LAYERS, LENGTH, VOCABULARY, hooks, logits, prompts, tiny, value

NAMES = ["gpt2", "llama", "neox"]
CLOSE = 2e-5
"""Sums in another order, of numbers of order 1."""


@cache
def hooked(name: str) -> HookedModel:
    return HookedModel(neox() if name == "neox" else tiny(name))


def neox() -> nn.Module:
    """A GPT-NeoX: parallel blocks, queries, keys and values by turns in one projection, gains and biases."""
    torch.manual_seed(1)
    library: Any = transformers
    config = library.GPTNeoXConfig(
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=32, intermediate_size=48,
        vocab_size=VOCABULARY, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    module: nn.Module = library.GPTNeoXForCausalLM(config)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    return module.eval()


TOKENS = prompts(2, seed=3)


@cache
def run(name: str) -> tuple[Tensor, ActivationCache]:
    found: tuple[Tensor, ActivationCache] = hooked(name).run_with_cache(TOKENS)
    return found


def close(found: Tensor, expected: Tensor, atol: float = CLOSE) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol * max(1.0, float(expected.abs().max())))


@torch.no_grad()
def own_logits(name: str, tokens: Tensor = TOKENS) -> Tensor:
    found: Tensor = hooked(name).module(input_ids=tokens, use_cache=False).logits
    return found


# -- running ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_loss_are_the_modules(name: str) -> None:
    model, expected = hooked(name), own_logits(name)
    assert torch.equal(model(TOKENS), expected)
    assert torch.equal(run(name)[0], expected)
    loss = nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert model(TOKENS, return_type="loss").item() == pytest.approx(loss.item(), rel=1e-5)
    both = model.run_with_cache(TOKENS, return_type="both")[0]
    assert torch.equal(both[0], expected)
    assert both[1].item() == pytest.approx(loss.item(), rel=1e-5)
    assert model(TOKENS, return_type="loss", loss_per_token=True).shape == (2, LENGTH - 1)
    assert model(TOKENS, return_type=None) is None
    assert model(TOKENS[0]).shape == (1, LENGTH, VOCABULARY)
    assert torch.equal(model(TOKENS, stop_at_layer=1), run(name)[1]["resid_pre", 1])


def test_gradients_by_weights_flow_through_a_plain_call() -> None:
    model = hooked("gpt2")
    loss = model(TOKENS, return_type="loss")
    assert loss.requires_grad
    assert not run("gpt2")[0].requires_grad


@pytest.mark.parametrize(
    "key",
    [
        "blocks.1.attn.hook_z",
        ("z", 1),
        ("z", -2),
        ("z", 1, "attn"),
        ("z", 1, "a"),
        "z1",
    ],
)
def test_a_value_has_many_keys(key: Any) -> None:
    _, cached = run("gpt2")
    assert torch.equal(cached[key], value("gpt2", "z", 1, TOKENS).reshape(2, LENGTH, HEADS, -1))
    assert key in cached


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("embed", "hook_embed"),
        ("pos_embed", "hook_pos_embed"),
        (("attn", 0), "blocks.0.attn.hook_pattern"),
        (("mlp_post", 2), "blocks.2.mlp.hook_post"),
        (("scale", 1, "ln2"), "blocks.1.ln2.hook_scale"),
        ("scale1ln2", "blocks.1.ln2.hook_scale"),
        ("normalized", "ln_final.hook_normalized"),
        (("resid_pre", 0, "blocks"), "blocks.0.hook_resid_pre"),
        (("k", -1), "blocks.2.attn.hook_k"),
        (("result", 2, "attn"), "blocks.2.attn.hook_result"),
    ],
)
def test_short_names_stand_for_full_ones(key: Any, name: str) -> None:
    _, cached = run("gpt2")
    assert torch.equal(cached[key], cached[name])
    if isinstance(key, str) or key[1] >= 0:
        assert get_act_name(*((key,) if isinstance(key, str) else key)) == name


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("resid_mid", 0), "parallel"),
        (("z", 7), "the blocks of this model are 0 to 2"),
        ("hook_pos_embed", "no hook 'hook_pos_embed'"),
        (("mid", 0), "a norm inside their MLPs"),
        (("patern", 0), "Nearest: pattern"),
        (("z", -4), "no layer -4"),
        (("z", 1.5), "a layer is a number"),
        (3, "a key is a hook's name"),
    ],
)
def test_a_key_that_is_none_is_told(key: Any, message: str) -> None:
    _, cached = run("neox")
    with pytest.raises(KeyError, match=message):
        cached[key]
    assert key not in cached


def test_a_cache_lists_what_filters_let_through() -> None:
    model = hooked("gpt2")
    _, cached = model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("hook_z"))
    assert list(cached) == [f"blocks.{layer}.attn.hook_z" for layer in range(LAYERS)]
    assert torch.equal(cached["z", 1], run("gpt2")[1]["z", 1])
    with pytest.raises(KeyError, match=r"hook_q is not in this cache of 3 names"):
        cached["q", 0]
    _, one = model.run_with_cache(TOKENS, names_filter="blocks.0.hook_resid_pre", return_cache_object=False)
    assert list(one) == ["blocks.0.hook_resid_pre"]
    _, two = model.run_with_cache(TOKENS, names_filter=["blocks.1.attn.hook_result", "hook_embed"])
    assert list(two.keys()) == ["hook_embed", "blocks.1.attn.hook_result"]
    with pytest.raises(MissingSiteError, match="Nearest"):
        model.run_with_cache(TOKENS, names_filter="blocks.0.resid_pre")
    _, early = model.run_with_cache(TOKENS, stop_at_layer=1)
    assert "blocks.0.hook_resid_post" in list(early)
    assert not any(name.startswith(("blocks.1", "ln_final")) for name in early)
    _, last = model.run_with_cache(TOKENS, pos_slice=-1)
    assert last["resid_pre", 0].shape == (2, 1, 32)
    assert last["pattern", 0].shape == (2, HEADS, 1, LENGTH)
    assert not any(name.endswith("hook_result") for name in run("gpt2")[1])


def test_prompts_of_a_cache_are_selected() -> None:
    _, cached = hooked("gpt2").run_with_cache(TOKENS)
    some = cached.apply_slice_to_batch_dim(1)
    assert torch.equal(some["resid_post", -1], cached["resid_post", -1][1])
    _, single = hooked("gpt2").run_with_cache(TOKENS[:1], remove_batch_dim=True)
    assert single["pattern", 0].shape == (HEADS, LENGTH, LENGTH)
    with pytest.raises(AssertionError, match="has 2"):
        cached.remove_batch_dim()
    heads = single.stack_head_results(pos_slice=-1)  # of z: such a cache has no `result`
    close(heads, hooked("gpt2").run_with_cache(TOKENS[:1])[1].stack_head_results(pos_slice=-1)[:, 0])
    single.compute_head_results()
    assert single["result", 0].shape == (LENGTH, HEADS, 32)
    with torch.inference_mode():
        assert hooked("gpt2").run_with_cache(prompts(1, seed=6))[1]["z", 0].shape == (1, LENGTH, HEADS, 8)


def test_what_is_written_to_a_cache_stays_in_it_and_leaves_the_run_alone() -> None:
    model = hooked("gpt2")
    tokens = prompts(1, seed=8)
    expected, cached = model.run_with_cache(tokens)
    cached["pattern", 0][:, :, :, 0] = 0.0
    assert not cached["pattern", 0][..., 0].any()
    again, other = model.run_with_cache(tokens)
    assert torch.equal(again, expected)
    assert other["pattern", 0][..., 0].any()
    given = transformer_lens.get_act_patch_attn_head_pattern_all_pos(
        model, tokens, cached, lambda found: found[0, -1, 5]
    )

    def forget(pattern: Tensor, hook: Any) -> None:
        pattern[:, 2, :, 0] = 0.0

    logits = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_pattern", forget)])
    assert given[0, 2].item() == pytest.approx(logits[0, -1, 5].item(), abs=1e-4)


# -- norms, and parts of the stream -----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_norms_have_scales_and_what_is_divided_by_them(name: str) -> None:
    model, (_, cached) = hooked(name), run(name)
    norms = [module for path, module in model.module.named_modules() if "norm" in path or "ln_" in path]
    assert len(model.table.norms) == len(norms) == 2 * LAYERS + 1
    for where, norm in model.table.norms.items():
        made = cached[f"{where}.hook_normalized"] * norm.w + norm.b
        (own,) = cached.cache_dict.run.demand([norm.after])  # type: ignore[attr-defined]
        close(made, own)
        assert cached[f"{where}.hook_scale"].shape == (2, LENGTH, 1)


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_the_stream_add_up_to_it(name: str) -> None:
    _, cached = run(name)
    whole = cached["resid_post", -1]
    parts, labels = cached.decompose_resid(return_labels=True)
    assert len(labels) == len(parts)
    assert labels[-1] == f"{LAYERS - 1}_mlp_out"
    close(parts.sum(0), whole)
    heads, labels = cached.stack_head_results(return_labels=True, incl_remainder=True)
    assert labels[HEADS + 1] == "L1H1"
    assert labels[-1] == "remainder"
    close(heads.sum(0), whole)
    close(heads[HEADS + 1], cached["result", 1][:, :, 1])
    for expand in (True, False):
        full, labels = cached.get_full_resid_decomposition(expand_neurons=expand, return_labels=True)
        assert len(full) == len(labels)
        close(full.sum(0), whole, 1e-4)
    close(cached.decompose_resid(layer=1).sum(0), cached["resid_pre", 1])
    close(cached.decompose_resid(layer=1, pos_slice=-1).sum(0), cached["resid_pre", 1][:, -1])
    kept = cached.decompose_resid(layer=2, mode="attn", incl_embeds=False)
    assert torch.equal(kept, cached.stack_activation("attn_out", 2))


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_the_stream_add_up_to_the_logits(name: str) -> None:
    model, (found, cached) = hooked(name), run(name)
    norm = model.table.norms["ln_final"]
    right, wrong = torch.tensor([3, 4]), torch.tensor([5, 6])
    rows = torch.arange(2)
    expected = found[rows, :, right] - found[rows, :, wrong]
    shares = cached.logit_attrs(cached.decompose_resid(), right, wrong)
    directions = model.tokens_to_residual_directions(right) - model.tokens_to_residual_directions(wrong)
    constant = directions @ norm.b + model.b_U[right] - model.b_U[wrong]
    close(shares.sum(0) + constant[:, None], expected, 1e-4)
    last = cached.logit_attrs(cached.decompose_resid(pos_slice=-1), right, wrong, pos_slice=-1)
    close(last, shares[:, :, -1])
    one = cached.logit_attrs(cached.stack_head_results(incl_remainder=True), 7)
    close(one.sum(0) + model.W_U[:, 7] @ norm.b + model.b_U[7], found[..., 7], 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_lens_at_the_end_is_the_logits(name: str) -> None:
    model, (found, cached) = hooked(name), run(name)
    stack, labels = cached.accumulated_resid(apply_ln=True, return_labels=True)
    assert labels == ["0_pre", "1_pre", "2_pre", "final_post"]
    close(stack[-1] @ model.W_U + model.b_U, found, 1e-4)
    if name != "neox":
        _, labels = cached.accumulated_resid(layer=1, incl_mid=True, mlp_input=True, return_labels=True)
        assert labels == ["0_pre", "0_mid", "1_pre", "1_mid"]
    parts = cached.decompose_resid(layer=1, apply_ln=True)
    norm = model.table.norms["blocks.1.ln1"]
    close(parts.sum(0) + norm.b, norm(cached["resid_pre", 1]))


def test_norms_of_a_stream_in_another_form() -> None:
    """OPT norms its stream with batch and positions in one dimension."""
    model = HookedModel(ZOO["opt"].make("eager"))
    assert len(model.table.norms) == 2 * model.cfg.n_layers + 1
    tokens = prompts(2, seed=4)
    found, cached = model.run_with_cache(tokens)
    assert cached["scale", 1, "ln2"].shape == (2, LENGTH, 1)
    final = model.ln_final
    shares = cached.logit_attrs(cached.decompose_resid(), 7).sum(0)
    close(shares + model.W_U[:, 7] @ final.b, found[..., 7], 1e-4)

    def double(scale: Tensor, hook: Any) -> Tensor:
        return 2 * scale

    halved = model.run_with_hooks(tokens, fwd_hooks=[("ln_final.hook_scale", double)])
    close(halved, (cached["normalized"] / 2 * final.w + final.b) @ model.W_U + model.b_U, 1e-4)


@cache
def with_post_norms(name: str) -> HookedModel:
    """A model that norms or scales what it adds to the stream; no gain is 1 and no bias 0."""
    module = ARCHITECTURES[name].make(2) if name in ARCHITECTURES else granite()
    torch.manual_seed(2)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    return HookedModel(module)


def granite() -> nn.Module:
    library: Any = transformers
    config = library.GraniteConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=96, vocab_size=VOCABULARY, residual_multiplier=0.22,
        attn_implementation="eager",
    )  # fmt: skip
    module: nn.Module = library.GraniteForCausalLM(config)
    return module.eval()


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "granite"])
@torch.no_grad()
def test_heads_and_neurons_add_up_through_post_norms_and_factors(name: str) -> None:
    model = with_post_norms(name)
    module: Any = model.module
    streams: list[Tensor] = []
    with ExitStack() as stack:
        for block in module.model.layers:
            handle = block.register_forward_hook(lambda _, __, out: streams.append(out))
            stack.callback(handle.remove)
        module(input_ids=TOKENS)
    _, cached = model.run_with_cache(TOKENS)
    names = [name for name in cached if "_post." not in name]
    filtered = ActivationCache({name: cached[name] for name in names}, model)
    alone = model.run_with_cache(TOKENS[:1], remove_batch_dim=True)[1]
    for layer, whole in enumerate(streams, start=1):
        for expand in (True, False):
            for one, expected in ((cached, whole), (filtered, whole), (alone, whole[0])):
                close(one.get_full_resid_decomposition(layer, expand_neurons=expand).sum(0), expected, 1e-4)
            last = cached.get_full_resid_decomposition(layer, expand_neurons=expand, pos_slice=-1)
            close(last.sum(0), whole[:, -1], 1e-4)
        close(cached.stack_neuron_results(layer, incl_remainder=True).sum(0), whole, 1e-4)
    middle = cached.get_full_resid_decomposition(1, mlp_input=True)
    close(middle.sum(0), cached["resid_mid", 1], 1e-4)
    direction = torch.linspace(-1, 1, 64)
    made = cached.get_neuron_results(1, [3, 5], -1, direction)
    close(made, cached.get_neuron_results(1)[:, -1, [3, 5]] @ direction, 1e-4)


@torch.no_grad()
def test_a_head_is_normed_as_its_attention_is() -> None:
    """By hand: the gain is 1 + weight, and the scale that of all heads together."""
    model, head = with_post_norms("gemma2"), 2
    attention: Any = model.module.get_submodule("model.layers.1.self_attn.o_proj")
    norm: Any = model.module.get_submodule("model.layers.1.post_attention_layernorm")
    seen: list[tuple[Tensor, Tensor]] = []
    handle = attention.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    logits = model.module(input_ids=TOKENS).logits
    handle.remove()
    ((z, out),) = seen
    part = z[..., head * 16 : head * 16 + 16] @ attention.weight[:, head * 16 : head * 16 + 16].T
    scale = (out.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    _, cached = model.run_with_cache(TOKENS)
    found = cached.stack_head_results()[model.cfg.n_heads + head]
    close(found, part / scale * (1 + norm.weight))
    close(cached["result", 1][:, :, head], part)
    close(cached["scale", 1, "ln1_post"], scale)
    shares = cached.logit_attrs(cached.get_full_resid_decomposition(expand_neurons=False), 7)
    close(30 * torch.tanh(shares.sum(0) / 30), logits[..., 7], 1e-4)

    def double(scale: Tensor, hook: Any) -> Tensor:
        return 2 * scale

    changed = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.ln1_post.hook_scale", double)])
    handle = norm.register_forward_hook(lambda _, __, made: made / 2)
    close(changed, model.module(input_ids=TOKENS).logits, 1e-4)
    handle.remove()
    assert torch.equal(model.blocks[1].ln1_post(out), norm(out))


def test_a_stream_that_is_normed_has_no_parts() -> None:
    _, cached = HookedModel(ZOO["bert"].make("eager")).run_with_cache(prompts(1, seed=4))
    assert cached["attn_out", 1].shape[:2] == (1, LENGTH)
    for stack in (
        cached.decompose_resid,
        cached.apply_ln_to_stack,
        lambda _: cached.get_full_resid_decomposition(expand_neurons=True),
    ):
        with pytest.raises(ValueError, match="normed from block to block"):
            stack(cached["resid_pre", 0])


# -- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_weights_make_the_values_that_they_are_named_after(name: str) -> None:
    model, (_, cached) = hooked(name), run(name)
    for layer in range(LAYERS):
        x = model.table.norms[f"blocks.{layer}.ln1"](cached["resid_pre", layer])
        for kind in "qkv":
            weight, bias = (getattr(model, f"{part}_{kind.upper()}")[layer] for part in "Wb")
            close(torch.einsum("bpm,hmd->bphd", x, weight) + bias, cached[kind, layer])
        added = torch.einsum("bphd,hdm->bpm", cached["z", layer], model.W_O[layer]) + model.b_O[layer]
        close(added, cached["attn_out", layer])
        before = cached["resid_pre" if name == "neox" else "resid_mid", layer]
        y = model.table.norms[f"blocks.{layer}.ln2"](before)
        into = "pre_linear" if name == "llama" else "pre"
        close(y @ model.W_in[layer] + model.b_in[layer], cached[into, layer])
        close(cached["post", layer] @ model.W_out[layer] + model.b_out[layer], cached["mlp_out", layer])
    if name == "llama":
        assert model.W_gate is not None
        close(y @ model.W_gate[-1], cached["pre", -1])
        assert model.W_K.shape == (LAYERS, 2, 32, 8)
        assert model.cfg.n_key_value_heads == 2
        with pytest.raises(AttributeError, match="no table of positions"):
            model.W_pos  # noqa: B018
    if name == "gpt2":
        assert torch.equal(model.W_E[TOKENS], cached["embed"])
        assert torch.equal(model.W_pos[:LENGTH].expand(2, -1, -1), cached["pos_embed"])
        assert model.W_E_pos.shape == (VOCABULARY + 32, 32)


def test_circuits_are_products_of_weights() -> None:
    """With two heads to each head of keys and values."""
    model = hooked("llama")
    layer, head = 1, 3
    qk, ov = model.QK[layer, head], model.OV[layer, head]
    close(qk.AB, model.W_Q[layer, head] @ model.W_K[layer, head // 2].T)
    close(ov.AB, model.W_V[layer, head // 2] @ model.W_O[layer, head])
    assert model.OV.shape == (LAYERS, HEADS, 32, 32)
    copying = model.W_E[:5] @ ov @ model.W_U[:, :7]
    assert isinstance(copying, FactoredMatrix)
    close(copying.AB, model.W_E[:5] @ ov.AB @ model.W_U[:, :7], 1e-4)
    trace = ov.eigenvalues.sum().real
    assert trace.item() == pytest.approx(ov.AB.trace().item(), abs=1e-4)
    u, s, v = ov.svd()
    close(u * s @ v.T, ov.AB, 1e-4)
    assert ov.norm().item() == pytest.approx(ov.AB.norm().item(), rel=1e-4)
    close(ov.T.AB, ov.AB.T)
    close(ov.make_even().AB, ov.AB, 1e-4)
    close(ov @ model.W_U[:, 3], ov.AB @ model.W_U[:, 3], 1e-4)
    close(model.W_E[3] @ ov, model.W_E[3] @ ov.AB, 1e-4)
    close((qk @ ov).AB, qk.AB @ ov.AB, 1e-4)
    close(ov[2:4, -1].AB, ov.AB[2:4, -1:])
    with pytest.raises(ValueError, match="do not go together"):
        FactoredMatrix(torch.ones(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize("name", NAMES)
def test_parts_have_paths(name: str) -> None:
    model, (found, cached) = hooked(name), run(name)
    block = model.blocks[1]
    assert torch.equal(block.attn.W_V, model.W_V[1])
    assert torch.equal(block.mlp.b_out, model.b_out[1])
    assert block.attn.hook_z.name == "blocks.1.attn.hook_z"
    assert block.hook_resid_post is model.hook_dict["blocks.1.hook_resid_post"]
    close(block.ln1(cached["resid_pre", 1]), cached["normalized", 1, "ln1"] * block.ln1.w + block.ln1.b)
    close(model.unembed(model.ln_final(cached["resid_post", -1])), found, 1e-4)
    embedded = model.embed(TOKENS)
    close(embedded + model.pos_embed(TOKENS) if name == "gpt2" else embedded, cached["resid_pre", 0])
    with pytest.raises(AttributeError, match=r"blocks.1.attn has no 'W_T'; it has W_K, W_O, W_Q"):
        block.attn.W_T  # noqa: B018


# -- hooks ------------------------------------------------------------------------------------------------


def zeroed(head: int) -> Callable[..., None]:
    def zero(z: Tensor, hook: Any) -> None:
        z[:, :, head] = 0.0

    return zero


def by_head(head: int) -> Callable[[Tensor], Tensor]:
    def zero(whole: Tensor) -> Tensor:
        shown = whole.reshape(2, LENGTH, HEADS, -1)
        shown[:, :, head] = 0.0
        return shown.reshape(whole.shape)

    return zero


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hooks_change_values_as_hooks_on_the_module_do(name: str) -> None:
    model = hooked(name)
    found = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_z", zeroed(2))])
    assert torch.equal(found, logits(name, TOKENS, {("z", 1): by_head(2)}))

    def add(out: Tensor, hook: HookPoint) -> Tensor:
        return out + 0.5 * hook.layer()

    pairs: Any = [(lambda hook_name: hook_name.endswith("mlp_out"), add), ("blocks.0.attn.hook_z", zeroed(1))]
    changes: Any = {("mlp_out", layer): lambda out, n=layer: out + 0.5 * n for layer in range(LAYERS)}
    expected = logits(name, TOKENS, {**changes, ("z", 0): by_head(1)})
    assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=pairs), expected)
    with model.hooks(fwd_hooks=pairs) as inside:
        assert inside is model
        assert torch.equal(model(TOKENS), expected)
        assert torch.equal(model.run_with_cache(TOKENS)[0], expected)
    assert torch.equal(model(TOKENS), own_logits(name))


def test_hooks_stay_until_they_are_reset() -> None:
    model = hooked("gpt2")
    seen: list[str] = []

    def look(_: Tensor, hook: Any) -> None:
        hook.ctx["calls"] = hook.ctx.get("calls", 0) + 1
        seen.append(hook.name)

    try:
        model.add_hook(lambda name: "hook_resid" in name, look)
        model.add_perma_hook("hook_embed", look)
        assert torch.equal(model(TOKENS), own_logits("gpt2"))
        assert seen == [name for name in model.hook_dict if "hook_resid" in name or name == "hook_embed"]
        assert model.hook_dict["hook_embed"].ctx == {"calls": 1}
        model.reset_hooks()
        assert model.hook_dict["hook_embed"].ctx == {}
        seen.clear()
        model(TOKENS)
        assert seen == ["hook_embed"]
    finally:
        model.reset_hooks(including_permanent=True)
    seen.clear()
    model(TOKENS)
    assert seen == []


def test_every_hook_is_called_once_with_what_the_cache_holds() -> None:
    model, (_, cached) = hooked("llama"), run("llama")
    seen: dict[str, list[Tensor]] = {}

    def keep(found: Tensor, hook: Any) -> None:
        seen.setdefault(hook.name, []).append(found.clone())

    model.run_with_hooks(TOKENS, fwd_hooks=[(lambda name: True, keep)])
    assert list(cached) == [name for name in model.hook_dict if name in seen]
    for name, values in seen.items():
        assert len(values) == 1
        assert torch.equal(values[0], cached[name]), name


def test_a_cache_under_hooks_holds_what_each_hook_left() -> None:
    """The stream behind a block and in front of the next is one node, and two names."""
    model, (_, cached) = hooked("gpt2"), run("gpt2")

    def double(found: Tensor, hook: Any) -> Tensor:
        return 2 * found

    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", double)]):
        _, changed = model.run_with_cache(TOKENS)
    assert torch.equal(changed["resid_post", 0], cached["resid_post", 0])
    assert torch.equal(changed["resid_pre", 1], 2 * cached["resid_pre", 1])
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_result", double)]):
        _, changed = model.run_with_cache(TOKENS)
    close(changed["result", 1], 2 * cached["result", 1])
    close(changed["attn_out", 1], 2 * cached["attn_out", 1] - hooked("gpt2").b_O[1])


@pytest.mark.parametrize("name", NAMES)
def test_norms_are_changed_through_their_scale_and_what_they_divide(name: str) -> None:
    model, (_, cached) = hooked(name), run(name)
    norm = model.table.norms["blocks.1.ln2"]
    path, gain, bias = norm.path, norm.w, norm.b

    def expected(change: Callable[[Tensor], Tensor]) -> Tensor:
        part = model.module.get_submodule(path)
        handle = part.register_forward_hook(lambda _, args, __: change(args[0]))
        try:
            return own_logits(name)
        finally:
            handle.remove()

    def frozen(scale: Tensor, hook: Any) -> Tensor:
        return scale.flip(0)

    found = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.ln2.hook_scale", frozen)])
    flipped = cached["scale", 1, "ln2"].flip(0)
    close(found, expected(lambda x: norm.centered(x) / flipped * gain + bias), 1e-4)

    def halve(normalized: Tensor, hook: Any) -> None:
        normalized *= 0.5

    both = [("blocks.1.ln2.hook_scale", frozen), ("blocks.1.ln2.hook_normalized", halve)]
    found = model.run_with_hooks(TOKENS, fwd_hooks=both)
    close(found, expected(lambda x: 0.5 * norm.centered(x) / flipped * gain + bias), 1e-4)

    def negate(stream: Tensor, hook: Any) -> Tensor:
        return -stream

    found = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_mlp_in", negate)])
    close(found, expected(lambda x: norm.module.forward(-x)), 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_what_single_heads_read_is_changed(name: str) -> None:
    model, (_, cached) = hooked(name), run(name)
    norm = model.table.norms["blocks.1.ln1"]
    for kind in "qkv":

        def negate(stream: Tensor, hook: Any) -> None:
            stream[:, :, 1] *= -1

        def expected(own: Tensor, hook: Any, kind: str = kind) -> None:
            weight, bias = (getattr(model, f"{part}_{kind.upper()}")[1, 1] for part in "Wb")
            own[:, :, 1] = norm(-cached["resid_pre", 1]) @ weight + bias

        found = model.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.1.hook_{kind}_input", negate)])
        other = model.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.1.attn.hook_{kind}", expected)])
        close(found, other, 1e-4)
        assert not torch.allclose(found, own_logits(name), atol=1e-2)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_backward_hooks_see_gradients(name: str) -> None:
    """Against torch's own, by what hooks on the module retain."""
    model = hooked(name)
    seen: dict[str, Tensor] = {}
    forward: list[str] = []

    def metric(found: Tensor) -> Tensor:
        return (found[:, -1, 5] - found[:, -1, 9]).sum()

    def keep(gradient: Tensor, hook: Any) -> None:
        seen[hook.name] = gradient

    try:
        model.add_hook(lambda one: True, keep, "bwd")
        model.add_hook("blocks.1.attn.hook_z", lambda z, hook: forward.append(hook.name))
        metric(model(TOKENS)).backward()  # type: ignore[no-untyped-call]
    finally:
        model.reset_hooks()
    assert forward == ["blocks.1.attn.hook_z"]
    retained: dict[str, Tensor] = {}

    def retain(kind: str) -> Callable[[Tensor], Tensor]:
        def change(whole: Tensor) -> Tensor:
            whole.retain_grad()
            retained[kind] = whole
            return whole

        return change

    kinds = ["resid_pre", "attn_out", "mlp_out", "z"]
    with hooks(name, {(kind, 1): retain(kind) for kind in kinds}) as module:
        metric(module(input_ids=TOKENS, use_cache=False).logits).backward()  # type: ignore[no-untyped-call]
        module.zero_grad()
    for kind, whole in retained.items():
        assert whole.grad is not None
        close(seen[get_act_name(kind, 1)], whole.grad.reshape(seen[get_act_name(kind, 1)].shape))
    scores = seen["blocks.1.attn.hook_pattern"]
    assert scores.shape == (2, HEADS, LENGTH, LENGTH)
    assert scores.abs().max() > 0


def test_gradients_of_the_loss_are_cached() -> None:
    model = hooked("gpt2")
    loss, cached = model.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    gradient: Tensor = cached["blocks.1.hook_resid_post_grad"]

    def nudge(stream: Tensor, hook: Any) -> Tensor:
        step: Tensor = 1e-2 * gradient / gradient.norm()
        return stream + step

    higher = model.run_with_hooks(TOKENS, return_type="loss", fwd_hooks=[("blocks.1.hook_resid_post", nudge)])
    assert (higher - loss).item() == pytest.approx(1e-2 * gradient.norm().item(), rel=0.05)
    kept, fwd, bwd = model.get_caching_hooks(lambda one: one.endswith("hook_z"), incl_bwd=True)
    with model.hooks(fwd, bwd):
        model(TOKENS, return_type="loss").backward()
    close(kept["blocks.0.attn.hook_z_grad"], cached["blocks.0.attn.hook_z_grad"])
    assert torch.equal(kept["blocks.2.attn.hook_z"], run("gpt2")[1]["z", 2])
    with pytest.raises(ValueError, match="return_type='loss'"):
        model.run_with_cache(TOKENS, incl_bwd=True)
    with pytest.raises(ValueError, match=r"no gradient is known by ln_final.hook_scale"):
        model.add_hook("ln_final.hook_scale", print, "bwd")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_backward_hooks_are_called_where_gradients_are_switched_off(mode: Callable[[], Any]) -> None:
    model = hooked("gpt2")

    def found() -> list[Tensor]:
        tokens, seen = TOKENS.clone(), list[Tensor]()
        _, cached = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)

        def keep(gradient: Tensor, hook: Any) -> None:
            seen.append(gradient.clone())

        with model.hooks(bwd_hooks=[("blocks.1.attn.hook_z", keep)]):
            model(tokens, return_type="loss").backward()
        return [*seen, cached["blocks.1.attn.hook_z_grad"]]

    with mode():
        off = found()
    for one, expected in zip(off, found(), strict=True):
        close(one, expected)
        assert expected.any()


def test_a_backward_hook_changes_what_flows_back() -> None:
    model = hooked("llama")
    seen: list[Tensor] = []

    def stop(gradient: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(gradient)

    pairs: Any = [
        ("blocks.1.hook_mlp_out", stop),
        ("blocks.1.mlp.hook_post", lambda gradient, hook: seen.append(gradient)),
    ]
    with model.hooks(bwd_hooks=pairs):
        model(TOKENS, return_type="loss").backward()
    assert len(seen) == 1
    assert not seen[0].any()


def test_embeddings_of_positions_are_changed_prompt_by_prompt() -> None:
    model = hooked("gpt2")

    def shuffle(found: Tensor, hook: Any) -> Tensor:
        found[1] = found[1].flip(0)
        return found

    found = model.run_with_hooks(TOKENS, fwd_hooks=[("hook_pos_embed", shuffle)])
    table: Any = model.module.get_submodule("transformer.wpe")
    handle = table.register_forward_hook(lambda _, __, out: torch.cat([out, out.flip(1)]))
    expected = own_logits("gpt2")
    handle.remove()
    assert not torch.allclose(expected[1], own_logits("gpt2")[1])
    close(found, expected, 1e-4)


def test_sweeps_begin_with_the_hooks_that_are_on() -> None:
    model, (_, cached) = hooked("gpt2"), run("gpt2")
    other = prompts(2, seed=5)

    def metric(found: Tensor) -> Tensor:
        return (found[:, -1, 5] - found[:, -1, 9]).mean()

    def patched(out: Tensor, hook: Any) -> Tensor:
        out[:, 4] = cached[hook.name][:, 4]
        return out

    _, fresh = model.run_with_cache(TOKENS)

    def mixed(z: Tensor, hook: Any) -> None:
        z[:, :, 2] = fresh["blocks.2.attn.hook_z"][:, :, 1]  # read first when worlds are computed

    pair = ("blocks.1.attn.hook_z", mixed)
    with model.hooks(fwd_hooks=[pair]):
        found = transformer_lens.get_act_patch_mlp_out(model, other, cached, metric)
    expected = metric(model.run_with_hooks(other, fwd_hooks=[pair, ("blocks.0.hook_mlp_out", patched)]))
    assert found[0, 4].item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.add_hook("blocks.0.hook_z", print), MissingSiteError, "Nearest: blocks.0.attn.hook_z"),
        (lambda m: m.add_hook("hook_embed", 3), TypeError, r"a hook is a function \(value, hook\)"),
        (lambda m: m.add_hook("hook_embed", print, dir="up"), ValueError, "'fwd' or 'bwd'"),
        (lambda m: m(torch.rand(1, 3, 32)), TypeError, "Hook 'blocks.N.hook_resid_pre'"),
        (lambda m: m(TOKENS[None]), ValueError, r"\[prompt, pos\], and these are \(1, 2, 7\)"),
        (lambda m: m.run_with_hooks(TOKENS, fwd_hooks={"hook_embed": print}), TypeError, "list of pairs"),
        (
            lambda m: run("gpt2")[1].logit_attrs(TOKENS.new_ones(3, 2, 7, 32).float(), [1, 2, 3]),
            ValueError,
            "one for each prompt",
        ),
        (lambda m: m(TOKENS, return_type="all"), ValueError, "return_type is"),
        (lambda m: m(TOKENS, attention_mask=TOKENS), TypeError, "pad on the right"),
        (lambda m: m("Hello"), ValueError, "this model has no tokenizer"),
        (lambda m: m.run_with_cache(TOKENS, stop_at_layer=9), ValueError, "stop_at_layer is 0 to 3"),
        (lambda m: hooked("llama").add_hook("blocks.0.hook_attn_in", print), MissingSiteError, "q_input"),
        (lambda m: m.generate("Hello"), AttributeError, "model.module.generate"),
        (lambda m: m.no_such_thing, AttributeError, "docs/transformer-lens.md"),
        (lambda m: m.cfg.no_such_thing, AttributeError, "neither has the module's own"),
        (lambda m: HookedModel("gpt2"), TypeError, "a loaded model"),
    ],
)
def test_what_is_not_there_is_told(call: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(hooked("gpt2"))


def test_a_hook_that_returns_another_shape_is_told() -> None:
    with pytest.raises(Exception, match=r"\(2, 7, 4, 8\)"):
        hooked("gpt2").run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z[0])])


def test_names_that_are_not_there_are_none_that_are() -> None:
    model = hooked("gpt2")
    assert not [name for name in INSTEAD if hasattr(model, name)]
    for name, member in inspect.getmembers(HookedModel):
        if not name.startswith("_"):
            assert inspect.getdoc(member), name


def test_new_weights_are_seen() -> None:
    model = hooked("neox")
    tokens = prompts(1, seed=9)
    before, _ = model.run_with_cache(tokens)
    weight = model.module.lm_head.weight
    with torch.no_grad():
        weight.mul_(2)
        after, _ = model.run_with_cache(tokens)
        assert torch.equal(model.W_U, weight.T)
        weight.div_(2)
    close(after, 2 * before)
    hooks = [("blocks.0.hook_mlp_out", lambda value, hook: value * 0)]
    once = model.run_with_hooks(tokens, fwd_hooks=hooks)
    weight.data.mul_(2)  # which torch does not count
    close(model.run_with_hooks(tokens, fwd_hooks=hooks), 2 * once)
    weight.data.div_(2)
