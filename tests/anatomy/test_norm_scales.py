"""Scales of norms as sites: what hooks on the norm compute, to be read, patched, frozen and swept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import MissingSiteError
from tests.circuits.edge_models import inputs_of, module_of, run_of


def scales(name: str, seed: int) -> dict[str, torch.Tensor]:
    """1/rms of what goes into each norm, by hooks on the module."""
    module: Any = module_of(name)
    found: dict[str, torch.Tensor] = {}

    def hook(key: str, eps: float) -> Any:
        def seen(_: Any, args: Any) -> None:
            found[key] = torch.rsqrt(args[0].float().pow(2).mean(-1) + eps)

        return seen

    norms = {"final": module.model.norm}
    for number, layer in enumerate(module.model.layers):
        norms[f"ln1.{number}"] = layer.input_layernorm
        second = "pre_feedforward_layernorm" if name == "gemma2" else "post_attention_layernorm"
        norms[f"ln2.{number}"] = getattr(layer, second)
    handles = [
        norm.register_forward_pre_hook(hook(key, getattr(norm, "eps", None) or norm.variance_epsilon))
        for key, norm in norms.items()
    ]
    with torch.no_grad():
        module(**inputs_of(name, seed), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_scales_are_those_of_hooks(name: str) -> None:
    run, expected = run_of(name, 0), scales(name, 0)
    for layer in range(2):
        torch.testing.assert_close(run["ln1_scale", layer], expected[f"ln1.{layer}"])
        torch.testing.assert_close(run["ln2_scale", layer], expected[f"ln2.{layer}"])
    torch.testing.assert_close(run["ln_final_scale"], expected["final"])
    torch.testing.assert_close(run["ln1_scale", -1], expected["ln1.1"])


def test_a_frozen_scale_makes_the_rest_linear() -> None:
    """With the final scale and the MLP between frozen, what two heads do to the logits adds up."""
    base, source = run_of("llama", 0), run_of("llama", 1)

    one, other = cw.site("z", layer=1, head=0), cw.site("z", layer=1, head=3)

    def frozen(*places: Any) -> torch.Tensor:
        with base.fork() as world:
            world.patch("ln_final_scale", base["ln_final_scale"].clone())
            world.patch(("mlp_out", 1), base["mlp_out", 1].clone())
            for place in places:
                world.patch(place, source)
            found: torch.Tensor = world.logits
            return found.double()

    each = [frozen(*some) - base.logits for some in ([one], [other], [one, other])]
    torch.testing.assert_close(each[0] + each[1], each[2], atol=1e-5, rtol=1e-4)


def test_scales_are_swept_and_agree_with_hooks_on_the_norm() -> None:
    model: Any = run_of("llama", 0).model
    module: Any = module_of("llama")
    result = model.sweep(
        cw.sites("ln1_scale", layer=":", pos=":"),
        base=run_of("llama", 0),
        source=run_of("llama", 1),
        metric=cw.logit(3),
    ).run()
    assert result.values.shape == (2, 6)
    norm, other = module.model.layers[1].input_layernorm, scales("llama", 1)["ln1.1"]

    def scaled(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        fresh = output.clone()
        fresh[:, 2] = args[0][:, 2] * other[:, 2, None] * norm.weight
        return fresh

    handle = norm.register_forward_hook(scaled)
    with torch.no_grad():
        logits = module(**inputs_of("llama", 0), use_cache=False).logits
    handle.remove()
    assert float(result.values[1, 2]) == pytest.approx(float(logits[:, -1, 3].mean()), abs=1e-5)
    assert abs(float(result.effect[1, 2])) > 1e-4


def test_a_fused_norm_has_none_and_says_so() -> None:
    run = run_of("gpt2", 0)
    for place in (("ln1_scale", 0), ("ln2_scale", 1), "ln_final_scale"):
        with pytest.raises(MissingSiteError, match=r"one operation \(layer_norm, .*never holds its scale"):
            run[place]
    with pytest.raises(MissingSiteError, match="say which"):
        run["ln1_scale"]
    with pytest.raises(MissingSiteError, match="no layer 7"):
        run_of("llama", 0)["ln1_scale", 7]


def test_scales_are_in_no_list_of_kinds() -> None:
    assert "ln1_scale" not in run_of("llama", 0).model.site_table.kinds
