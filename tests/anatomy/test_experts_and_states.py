"""Sites along `expert` and `state`: switching off one expert, and one entry of a state, against hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import conewise as cw
from conewise.errors import MissingSiteError
from tests.program.zoo import VOCABULARY

INPUTS = {"input_ids": torch.arange(12).reshape(2, 6) % VOCABULARY}
OTHERS = {"input_ids": (torch.arange(12).reshape(2, 6) * 5 + 1) % VOCABULARY}
METRIC = cw.logit_diff(3, 7)
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_SMALL, **_EXPERTS, "shared_expert_intermediate_size": 24}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_SMALL,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "mamba": (
        "Mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    ),
}


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    prefix, options = _NAMES[name]
    config = getattr(transformers, f"{prefix}Config")(**options)
    module: nn.Module = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    for parameter in module.parameters():  # far from uniform, so that each expert matters
        parameter.data.mul_(4)
    return module


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe"])
def mixture(request: pytest.FixtureRequest) -> tuple[nn.Module, cw.Model]:
    module = _made(request.param)
    return module, cw.capture(module, **INPUTS)


@pytest.fixture(scope="module")
def mamba() -> tuple[nn.Module, cw.Model]:
    module = _made("mamba")
    return module, cw.capture(module, **INPUTS)


def _measured(module: nn.Module) -> Tensor:
    with torch.no_grad():
        logits = module(**INPUTS, use_cache=False).logits[:, -1]
    found: Tensor = logits[:, 3].double() - logits[:, 7].double()
    return found


@contextmanager
def _hooked(part: nn.Module, hook: Callable[..., Any], *, before: bool = False) -> Iterator[None]:
    handle = part.register_forward_pre_hook(hook) if before else part.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _routing(gate: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A hook on a router that chooses anew, of shares that `change` makes of logits and shares."""

    def hook(_: nn.Module, args: Any, out: Any) -> Any:
        logits = nn.functional.linear(args[0].reshape(-1, gate.weight.shape[1]), gate.weight)
        weights, chosen = change(logits, logits.softmax(-1)).topk(2, -1)
        if type(gate).__name__.startswith("Mixtral"):  # the other does not norm them
            weights = weights / weights.sum(-1, keepdim=True)
        return (out[0], weights, chosen)

    return hook


def _without(tensor: Tensor, number: int, value: float) -> Tensor:
    fresh = tensor.clone()
    fresh[:, number] = value
    return fresh


def _share_off(expert: int, _: Tensor, shares: Tensor) -> Tensor:
    return _without(shares, expert, 0.0)


def _logit_off(expert: int, logits: Tensor, _: Tensor) -> Tensor:
    return _without(logits, expert, -torch.inf).softmax(-1)


def test_switching_off_each_expert_of_each_layer_is_one_sweep(mixture: Any) -> None:
    module, model = mixture
    sites = cw.sites("expert_weights", layer=":", expert=":")
    result = model.sweep(sites, base=INPUTS, source="zero", metric=METRIC).run()
    logits = cw.cells(cw.sites("router_logits", layer=":", expert=":"), sources={"off": float("-inf")})
    barred = model.sweep(logits, base=INPUTS, metric=METRIC).run()

    moved = set()
    for layer in range(2):
        gate = module.model.layers[layer].mlp.gate
        for expert in range(4):
            number = 4 * layer + expert
            with _hooked(gate, _routing(gate, partial(_share_off, expert))):
                expected = _measured(module).mean()
            assert torch.allclose(result.values.flatten()[number], expected, atol=1e-5), (layer, expert)
            with _hooked(gate, _routing(gate, partial(_logit_off, expert))):
                expected = _measured(module).mean()
            assert torch.allclose(barred.values.flatten()[number], expected, atol=1e-5), (layer, expert)
            moved.add(round(float(result.values.flatten()[number]), 5))
    assert len(moved) > 4  # the experts matter, each in its own way
    assert result.spreads[0].axes == ("layer", "expert")
    assert list(result.to_dataframe()["expert"][:4]) == [0, 1, 2, 3]


def test_the_router_is_read_in_axes_of_its_own(mixture: Any) -> None:
    module, model = mixture
    run = model.run(**INPUTS)
    assert run["expert_weights", 1].shape == (2, 6, 4)
    assert torch.allclose(run["expert_weights", 1].sum(-1), torch.ones(2, 6))
    assert torch.equal(run["router_logits.0"].softmax(-1), run["expert_weights.0"])
    assert run["blocks.1.mlp.hook_expert_weights"].shape == (2, 6, 4)
    assert module.model.layers[0].mlp.gate.weight.shape[0] == 4


def test_a_router_that_chooses_in_groups_has_its_logits() -> None:
    module: Any = _made("glm4_moe")
    seen: dict[str, Tensor] = {}

    def keep(gate: Any, args: Any, out: Any) -> None:
        seen["logits"] = nn.functional.linear(args[0].reshape(-1, 32).float(), gate.weight.float())

    model = cw.capture(module, **INPUTS)
    with _hooked(module.model.layers[1].mlp.gate, keep):
        _measured(module)
    run = model.run(**INPUTS)
    assert torch.allclose(run["router_logits", 1].reshape(-1, 4), seen["logits"], atol=1e-5)
    with pytest.raises(
        MissingSiteError, match="layer 1 has no 'expert_weights': experts are not chosen once"
    ):
        run["expert_weights", 1]


def test_switching_off_each_entry_of_the_state_is_one_sweep(mamba: Any) -> None:
    """What a position writes goes through B, what is read through C: columns of one projection."""
    module, model = mamba
    rank = module.config.time_step_rank
    found = {
        kind: model.sweep(
            cw.sites(kind, layer=":", state=":"), base=INPUTS, source="zero", metric=METRIC
        ).run()
        for kind in ("ssm_write", "ssm_read")
    }
    for kind, first in (("ssm_write", rank), ("ssm_read", rank + 4)):
        for layer in range(2):
            projection = module.backbone.layers[layer].mixer.x_proj
            for state in range(4):
                with _hooked(projection, _zeroed(first + state)):
                    expected = _measured(module).mean()
                assert torch.allclose(found[kind].values[layer, state], expected, atol=1e-5), (kind, state)
    base = found["ssm_write"].base[0]
    assert all((abs(one.values - base) > 1e-4).any() for one in found.values())
    assert found["ssm_write"].spreads[0].axes == ("layer", "state")


def _zeroed(column: int, pos: int | None = None) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        fresh = out.clone()
        fresh[:, slice(None) if pos is None else pos, column] = 0
        return fresh

    return hook


def test_one_channel_at_one_position_is_cut_out(mamba: Any) -> None:
    """The output of a channel depends on its own state alone, so that hooks can put it together."""
    module, model = mamba
    place = cw.site("ssm_write", layer=-1, pos=2, channel=5, state=1)
    result = model.sweep([place], base=INPUTS, source="zero", metric=METRIC).run()

    mixer, seen = module.backbone.layers[1].mixer, dict[str, Tensor]()

    def keep(_: nn.Module, args: Any) -> None:
        seen["y"] = args[0].clone()

    zeroed = _zeroed(module.config.time_step_rank + 1, 2)
    with _hooked(mixer.x_proj, zeroed), _hooked(mixer.out_proj, keep, before=True):
        _measured(module)

    def mixed(_: nn.Module, args: Any) -> Any:
        fresh = args[0].clone()
        fresh[..., 5] = seen["y"][..., 5]
        return (fresh,)

    with _hooked(mixer.out_proj, mixed, before=True):
        expected = _measured(module).mean()
    assert torch.allclose(result.values.flatten()[0], expected, atol=1e-5)


def test_states_are_patched_from_another_run(mamba: Any) -> None:
    """All of what is written and read, from another run, is the other run's recurrence."""
    _, model = mamba
    base, source = model.run(**INPUTS), model.run(**OTHERS)
    both = model.sweep(
        [[("ssm_write", 0), ("ssm_read", 0)], [("ssm_write", 0)]], base=base, source=source, metric=METRIC
    ).run()
    assert both.values.flatten()[0] != both.values.flatten()[1]
    assert run_shapes(base) == ((2, 6, 32, 4), (2, 6, 4))


def run_shapes(run: cw.Run) -> tuple[tuple[int, ...], ...]:
    return tuple(run["ssm_write", -1].shape), tuple(run["ssm_read", -1].shape)


def test_models_without_experts_or_states_say_so(mamba: Any) -> None:
    _, model = mamba
    with pytest.raises(MissingSiteError, match="no layer 7: this model's layers are 0 to 1"):
        model.run(**INPUTS)["ssm_write", 7]
    with pytest.raises(MissingSiteError, match="Its kinds are ssm_write, ssm_read"):
        model.run(**INPUTS)["expert_weights", 0]
    with pytest.raises(MissingSiteError, match="no site 'ssm_write'"):
        cw.load("tiny").sweep(cw.sites("ssm_write", layer=0, state=":"), base="a b", metric=METRIC)
