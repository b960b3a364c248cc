"""Effects between features: against hooks by hand, and frozen against gradients through the linear model."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.circuits.features import FeatureGraph
from conewise.errors import DictionaryError
from tests.runs.small_dictionary import Autoencoder
from tests.sweeps.tiny import prompts, tiny

LATENTS = 48


class Jumping(Autoencoder):
    """Latents that jump: what is no larger than a threshold is 0."""

    def encode(self, value: Tensor) -> Tensor:
        strength = value @ self.w_enc + self.b_enc
        return strength.relu() * (strength > 0.4).to(strength.dtype)


@cache
def dictionaries() -> list[Any]:
    return [Autoencoder(32, LATENTS, 0), Autoencoder(32, LATENTS, 1, top=6), Jumping(32, LATENTS, 2)]


@cache
def spliced() -> Any:
    model = tiny("llama")
    for layer, one in enumerate(dictionaries()):
        model = model.splice(
            ("mlp_out", layer), one, reads=f"model.layers.{layer}.mlp.input", name=f"tc{layer}"
        )
    return model


@torch.no_grad()
def by_hand(ids: Tensor, gone: Any = None) -> tuple[list[Tensor], Tensor]:
    """The latents of each transcoder, and the logit difference, with one feature, or an error, taken away."""
    module, seen = tiny("llama").module, list[Tensor]()

    def hook(layer: int) -> Any:
        one = dictionaries()[layer]

        def leave(_: Any, args: Any, out: Tensor) -> Tensor:
            latents = one.encode(args[0])
            error = out - one.decode(latents)
            latents = latents.clone()
            if gone is not None and gone.dictionary == f"tc{layer}":
                if gone.kind == "error":
                    error[:, gone.pos] = 0
                else:
                    latents[:, gone.pos, gone.feature] = 0
            seen.append(latents)
            return torch.as_tensor(one.decode(latents) + error)

        return leave

    def enter(_: Any, args: Any) -> Any:
        value = args[0].clone()
        value[:, gone.pos] = 0
        return (value, *args[1:])

    with ExitStack() as stack:
        for layer, block in enumerate(module.model.layers):
            stack.callback(block.mlp.register_forward_hook(hook(layer)).remove)
        if gone is not None and gone.kind == "embedding":
            stack.callback(module.model.layers[0].register_forward_pre_hook(enter).remove)
        logits = module(input_ids=ids, use_cache=False).logits[0, -1]
    return seen, torch.as_tensor(logits[3] - logits[5])


def linear(ids: Tensor) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    """A forward with patterns, norms and latents as constants: leaves by name, what is encoded, metric."""
    module, leaves, read = tiny("llama").module, dict[str, Tensor](), list[Tensor]()

    def constant(_: Any, __: Any, out: Tensor) -> Tensor:
        return out.detach()

    def norm(part: Any, args: Any, _: Tensor) -> Tensor:
        x = args[0]
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + part.variance_epsilon).detach()
        scaled: Tensor = part.weight.detach() * x * scale
        return scaled

    def mlp(layer: int) -> Any:
        one = dictionaries()[layer]

        def leave(_: Any, args: Any, out: Tensor) -> Tensor:
            latents = one.encode(args[0]).detach()
            error = (out - one.decode(latents)).detach()
            leaves[f"tc{layer}"], leaves[f"tc{layer}.error"] = (
                latents.requires_grad_(),
                error.requires_grad_(),
            )
            read.append(args[0] @ one.w_enc.detach() + one.b_enc.detach())
            made: Tensor = latents @ one.w_dec.detach() + one.b_dec.detach() + error
            return made

        return leave

    def embed(_: Any, __: Any, out: Tensor) -> Tensor:
        made = leaves["embedding"] = out.detach().requires_grad_()
        return made

    with ExitStack() as stack, torch.enable_grad():
        handles = [module.model.embed_tokens.register_forward_hook(embed)]
        handles.append(module.model.norm.register_forward_hook(norm))
        for layer, block in enumerate(module.model.layers):
            handles.append(block.self_attn.q_proj.register_forward_hook(constant))
            handles.append(block.self_attn.k_proj.register_forward_hook(constant))
            handles.append(block.input_layernorm.register_forward_hook(norm))
            handles.append(block.post_attention_layernorm.register_forward_hook(norm))
            handles.append(block.mlp.register_forward_hook(mlp(layer)))
        for handle in handles:
            stack.callback(handle.remove)
        logits = module(input_ids=ids, use_cache=False).logits[0, -1]
    return leaves, read, torch.as_tensor(logits[3] - logits[5])


def graph(seed: int, **options: Any) -> FeatureGraph:
    asked = {"metric": cw.logit_diff(3, 5), "top": 6, "errors": True, "embeddings": True, **options}
    made: FeatureGraph = spliced().feature_graph({"input_ids": prompts(1, seed)}, **asked).run()
    return made


@pytest.mark.parametrize("seed", [3, 4])
def test_live_effects_are_those_of_hooks_by_hand(seed: int) -> None:
    ids, found = prompts(1, seed), graph(seed)
    latents, metric = by_hand(ids)
    assert found.metric == pytest.approx(float(metric), abs=1e-4)
    for row, node in enumerate(found.nodes):
        theirs, number = by_hand(ids, node)
        assert float(found.on_metric[row]) == pytest.approx(float(metric - number), abs=1e-4)
        assert float(found.total[row]) == float(found.on_metric[row])
        for column, target in enumerate(found.targets):
            at = int(target.dictionary[2:]), (0, target.pos, target.feature)
            expected = 0.0 if node == target else float((latents[at[0]] - theirs[at[0]])[at[1]])
            assert float(found.effects[row, column]) == pytest.approx(expected, abs=1e-4), (node, target)


@pytest.mark.parametrize("seed", [3, 4])
def test_frozen_effects_are_those_of_linear_attribution(seed: int) -> None:
    """As in circuit-tracer: patterns, norms and all other features are constants; effects are act × grad."""
    found = graph(seed, frozen=True)
    leaves, read, metric = linear(prompts(1, seed))
    names = {"embedding": "embedding", "error": "{}.error", "feature": "{}"}
    numbers = [read[int(one.dictionary[2:])][0, one.pos, one.feature] for one in found.targets]
    for column, number in enumerate([*numbers, metric]):
        gradients = torch.autograd.grad(number, [*leaves.values()], retain_graph=True, allow_unused=True)
        by_name = dict(zip(leaves, gradients, strict=True))
        for row, node in enumerate(found.nodes):
            name = names[node.kind].format(node.dictionary)
            gradient, expected = by_name[name], 0.0
            if gradient is not None:
                whole = (gradient * leaves[name]).detach()[0, node.pos]
                expected = float(whole[node.feature] if node.kind == "feature" else whole.sum())
            mine = found.on_metric[row] if column == len(numbers) else found.effects[row, column]
            assert float(mine) == pytest.approx(expected, abs=2e-4), (node, column)


def test_a_graph_is_pruned_evaluated_drawn_and_written(tmp_path: Path) -> None:
    found = graph(3, frozen=True, errors=False, embeddings=False, top=None)
    assert all(float(one) <= 1 for one in found.influence())
    whole = found.evaluate()
    assert whole.faithfulness == pytest.approx(1)
    assert whole.unit == "features"
    assert whole.size == whole.edges == len(found.nodes)
    assert found.prune(top=0).evaluate().faithfulness == pytest.approx(0)
    few = found.prune(top=12)
    assert len(few.nodes) == 12
    assert few.effects.shape == (12, 12)
    assert set(few.nodes) == set(few.targets)
    assert len(found.prune(threshold=0.5).nodes) < len(found.nodes)
    kept = {(node.dictionary, node.pos, node.feature) for node in few.nodes}
    assert few.evaluate().circuit == pytest.approx(float(_only(prompts(1, 3), kept)), abs=1e-4)
    written = json.loads(few.to_circuit_tracer(tmp_path / "graph.json").read_text())
    ids = {node["node_id"] for node in written["nodes"]}
    assert len(ids) == len(written["nodes"]) == 13
    assert all({link["source"], link["target"]} <= ids for link in written["links"])
    assert [node["feature_type"] for node in written["nodes"]].count("logit") == 1
    assert len(written["metadata"]["prompt_tokens"]) == prompts(1, 3).shape[1]
    assert len(few.to_dataframe()) == len(few.edges())
    assert "feature" in few.plot().to_json()


@torch.no_grad()
def _only(ids: Tensor, kept: set[Any]) -> Tensor:
    """The metric with all other features at zero, by hooks."""
    module = tiny("llama").module
    with ExitStack() as stack:
        for layer, block in enumerate(module.model.layers):
            one = dictionaries()[layer]

            def leave(_: Any, args: Any, out: Tensor, one: Any = one, name: str = f"tc{layer}") -> Tensor:
                latents = one.encode(args[0])
                mask = torch.zeros_like(latents)
                for _, pos, feature in (node for node in kept if node[0] == name):
                    mask[0, pos, feature] = 1
                changed: Tensor = one.decode(latents * mask) + (out - one.decode(latents))
                return changed

            stack.callback(block.mlp.register_forward_hook(leave).remove)
        logits = module(input_ids=ids, use_cache=False).logits[0, -1]
    found: Tensor = logits[3] - logits[5]
    return found


def test_features_may_be_chosen_and_what_does_not_fit_is_said() -> None:
    model = spliced()
    asked: Any = {"metric": cw.logit_diff(3, 5)}
    base = {"input_ids": prompts(1, 3)}
    one = cw.site("tc0.latents", latent=3, pos=-1)
    job = model.feature_graph(base, features=[one], targets="tc2", top=4, **asked)
    assert (len(job.nodes), len(job.targets)) == (1, 4)
    assert job.nodes[0].pos == prompts(1).shape[1] - 1
    assert "1 nodes × 4 features" in repr(job)
    with pytest.raises(DictionaryError, match="there is no dictionary in"):
        tiny("llama").feature_graph(base, **asked)
    with pytest.raises(DictionaryError, match="of one prompt"):
        model.feature_graph({"input_ids": prompts(2, 3)}, **asked)
    with pytest.raises(DictionaryError, match="one latent at one position"):
        model.feature_graph(base, features=[cw.site("tc0.latents", latent=3)], **asked)
    with pytest.raises(DictionaryError, match="tc0 has 48 features at 7 positions"):
        model.feature_graph(base, features=[cw.site("tc0.latents", latent=99, pos=0)], **asked)
    with pytest.raises(DictionaryError, match="frozen='heads' is none of"):
        model.feature_graph(base, frozen=["heads"], **asked)
    scaled = tiny("gpt2").splice(("mlp_out", 0), dictionaries()[0], name="sae")
    with pytest.raises(DictionaryError, match="cannot be frozen"):
        scaled.feature_graph(base, frozen=["norms"], **asked)
