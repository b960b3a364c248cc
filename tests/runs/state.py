"""All that could be left behind on a module: what it is made of, bit for bit, and what hangs on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def state_of(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers as they are, and every other attribute of every submodule."""
    tensors = {
        name: (tensor, tensor.detach().clone(), tensor._version, tensor.requires_grad, tensor.grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    attributes = {
        path: {name: _shown(value) for name, value in vars(part).items()}
        for path, part in module.named_modules()
    }
    return {
        "tensors": tensors,
        "attributes": attributes,
        "keys": list(module.state_dict()),
        "random": torch.get_rng_state(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
    }


def assert_untouched(module: nn.Module, before: dict[str, Any]) -> None:
    after = state_of(module)
    assert after["keys"] == before["keys"]
    assert after["attributes"] == before["attributes"]
    assert after["tensors"].keys() == before["tensors"].keys()
    for name, (tensor, bits, *rest) in before["tensors"].items():
        now, now_bits, *now_rest = after["tensors"][name]
        assert now is tensor, name
        assert now_rest == rest, name
        assert torch.equal(now_bits, bits), name
    assert torch.equal(after["random"], before["random"])
    assert (after["threads"], after["gradients"]) == (before["threads"], before["gradients"])


def _shown(value: Any) -> Any:
    """A value to compare later: containers by what is in them (hooks are in such), others by identity."""
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_shown(item) for item in value]
    if isinstance(value, Tensor | nn.Module) or callable(value):
        return id(value)
    return value if isinstance(value, int | float | str | bool | None) else id(value)
