"""A HookedModel against TransformerLens itself. Slow, and needs the extra `compare`.

`make test-transformer-lens` runs it. Weights, caches, stacks of the stream, hooks at every name, gradients;
docs/transformer-lens.md says what is defined otherwise: what hooks return at the bridge's `resid_mid` goes
into the MLP alone, and its rotated queries and keys of GPT-NeoX go nowhere.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compat.against_transformer_lens import _tokenizer
from tests.compat.test_hooked_model import TOKENS, close, hooked
from tests.sweeps.tiny import VOCABULARY

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NAMES = ["gpt2", "llama", "neox"]
APART = 1e-4
"""Of the largest value: both compute in float32, in other orders of summation."""

WEIGHTS = (
    *("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"),
    *("W_in", "W_gate", "b_in", "W_out", "b_out"),
    *("W_E", "W_pos", "W_U", "b_U"),
)
NOT_COMPARED = ("resid_mid", "_input", "attn_in", "scores")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def bridge(name: str, folder: Path) -> Any:
    library = pytest.importorskip("transformer_lens.model_bridge").TransformerBridge
    model = hooked(name)
    model.module.save_pretrained(folder / name)
    _tokenizer(VOCABULARY).save_pretrained(folder / name)
    made = library.boot_transformers(
        str(folder / name), hf_model=copy.deepcopy(model.module), device="cpu"
    ).eval()
    made.set_use_attn_result(True)
    made.set_use_hook_mlp_in(True)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_weights(name: str, folder: Path) -> None:
    """The bridge has no attribute for biases that are not there; here they are zeros."""
    model, other = hooked(name), bridge(name, folder)
    compared = 0
    for weight in WEIGHTS:
        theirs, ours = getattr(other, weight, None), getattr(model, weight, None)
        if theirs is None:
            assert ours is None or not ours.any(), weight
            continue
        assert ours is not None, weight
        close(ours, theirs.detach(), APART)
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("name", NAMES)
def test_caches_and_stacks(name: str, folder: Path) -> None:
    with torch.no_grad():
        logits, cached = bridge(name, folder).run_with_cache(TOKENS)
    own, mine = hooked(name).run_with_cache(TOKENS)
    close(own, logits, APART)
    compared = 0
    for one in hooked(name).hook_dict:
        if one in cached.cache_dict and "attn_scores" not in one:
            close(mine[one], cached[one], APART)
            compared += 1
    assert compared > 40
    calls: list[tuple[str, dict[str, Any]]] = [
        ("accumulated_resid", {}),
        ("accumulated_resid", {"apply_ln": True}),
        ("decompose_resid", {}),
        ("decompose_resid", {"layer": 1, "mlp_input": True}),
        ("decompose_resid", {"mode": "attn", "pos_slice": -1}),
        ("stack_head_results", {"incl_remainder": True}),
        ("stack_head_results", {"layer": 2, "pos_slice": (1, 3)}),
        ("stack_neuron_results", {"layer": 2, "neuron_slice": (0, 5)}),
    ]
    if name != "neox":
        calls.append(("accumulated_resid", {"layer": 2, "incl_mid": True}))
    if name == "gpt2":
        calls += [("get_full_resid_decomposition", {"expand_neurons": expand}) for expand in (True, False)]
    for method, options in calls:
        theirs, labels = getattr(cached, method)(**options, return_labels=True)
        ours, named = getattr(mine, method)(**options, return_labels=True)
        close(ours, theirs, APART)
        assert [str(label).replace("tensor(", "").replace(")", "") for label in labels] == named


@pytest.mark.parametrize("name", NAMES)
def test_hooks_at_every_name(name: str, folder: Path) -> None:
    model, other = hooked(name), bridge(name, folder)
    changed = 0
    for one in model.hook_dict:
        is_compared = one in other.hook_dict and not one.endswith(NOT_COMPARED)
        is_compared &= not (name == "neox" and "rot_" in one)
        if one.startswith(("blocks.0", "blocks.2")) or not is_compared:
            continue

        def change(value: Tensor, hook: Any, one: str = one) -> Tensor:
            value = value.clone()
            value[:, 1:3] *= 0.5
            return value

        with torch.no_grad():
            theirs = other.run_with_hooks(TOKENS, fwd_hooks=[(one, change)])
        ours = model.run_with_hooks(TOKENS, fwd_hooks=[(one, change)])
        close(ours, theirs, APART)
        assert not torch.equal(ours, model(TOKENS).detach()), one
        changed += 1
    assert changed > 15


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str, folder: Path) -> None:
    model, other = hooked(name), bridge(name, folder)
    found: list[dict[str, Tensor]] = []
    for one in (model, other):
        seen: dict[str, Tensor] = {}

        def keep(gradient: Tensor, hook: Any, seen: dict[str, Tensor] = seen) -> None:
            seen[hook.name] = gradient.detach()

        one.reset_hooks()
        one.add_hook(lambda name: "_in" not in name and "result" not in name, keep, "bwd")
        logits = one(TOKENS)
        (logits[:, -1, 5] - logits[:, -1, 9]).sum().backward()
        one.reset_hooks()
        found.append(seen)
    canonical = {alias: point.name for alias, point in other.hook_dict.items()}
    compared = 0
    for site, gradient in found[0].items():
        theirs = found[1].get(site, found[1].get(canonical.get(site, "")))
        if theirs is not None and not site.endswith("resid_mid"):
            close(gradient, theirs.reshape(gradient.shape), APART)
            compared += 1
    assert compared > 30
