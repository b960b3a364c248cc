"""Random inputs like those that a module was captured with, to check the capture on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from conewise.frontends.torch.calls import Call, Signature


def random_call(
    signature: Signature, module: Any, seed: int, *, batch: int | None = None, length: int | None = None
) -> Call:
    """A call like the captured one with other values, and other sizes where asked for.

    Floats are drawn anew; token ids are drawn from the vocabulary where the module has one; other
    integers (masks, positions, labels) are drawn from the values of the example.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)

    def fresh(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = list(value.shape)
        if batch is not None and shape:
            shape[0] = batch
        if length is not None and len(shape) > 1 and _is_sequence(value):
            shape[1] = length
        if value.is_floating_point():
            return torch.randn(shape, generator=generator).to(value.dtype).to(value.device)
        if name.endswith("input_ids") and isinstance(vocabulary, int):
            drawn = torch.randint(0, vocabulary, shape, generator=generator)
            return drawn.to(value.dtype).to(value.device)
        flat = value.reshape(-1).cpu()
        picks = torch.randint(0, len(flat), shape, generator=generator)
        if "mask" in name and len(shape) == 2:
            # A mask that hides all of a row leaves nothing to attend to: keep the first position.
            drawn = flat[picks]
            drawn[:, 0] = flat.max()
            return drawn.to(value.device)
        return flat[picks].to(value.device)

    kwargs: Mapping[str, Any] = signature.example.kwargs
    return Call(
        tuple(_mapped(fresh, f"args.{i}", value) for i, value in enumerate(signature.example.args)),
        {name: _mapped(fresh, name, value) for name, value in kwargs.items()},
    )


def one_row(call: Call, row: int, batch: int) -> Call:
    """The call with one row of the batch alone."""

    def pick(_: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == batch:
            return value[row : row + 1]
        return value

    return Call(
        tuple(_mapped(pick, "", value) for value in call.args),
        {name: _mapped(pick, name, value) for name, value in call.kwargs.items()},
    )


def module_leaves(module: Any, call: Call) -> list[torch.Tensor]:
    """The tensors that the module itself returns for a call, in order."""
    with torch.no_grad():
        outputs = module(*call.args, **call.kwargs)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def tensor_leaves(outputs: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def batch_of(call: Call) -> int | None:
    """The batch size of a call: the first dimension of its first tensor."""
    for _, value in call.leaves()[0]:
        if isinstance(value, torch.Tensor) and value.ndim:
            return int(value.shape[0])
    return None


def _is_sequence(value: torch.Tensor) -> bool:
    return value.ndim == 2 if not value.is_floating_point() else value.ndim == 3


def _mapped(function: Any, name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(function, f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(function, f"{name}.{i}", item) for i, item in enumerate(value))
    return function(name, value)
