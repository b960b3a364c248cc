"""Grouped queries with keys and values of their own for every head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from conewise.errors import LoadError


def split_groups(module: nn.Module) -> nn.Module:
    """A copy of a module in which every head has keys and values of its own, equal to those of its group.

    All other weights are the module's own. It computes what the module does, but for the rounding of wider
    products. Raises LoadError where no attention with grouped queries is found whose keys and values are
    linear modules `k_proj` and `v_proj`.
    """
    shared = [*module.parameters(), *module.buffers()]
    made: Any = copy.deepcopy(module, {id(one): one for one in shared})
    found = 0
    for block in made.modules():
        times = getattr(block, "num_key_value_groups", 1)
        slots = [getattr(block, name, None) for name in ("k_proj", "v_proj")]
        if times == 1 or not all(isinstance(one, nn.Linear) for one in slots):
            continue
        for name, linear in zip(("k_proj", "v_proj"), slots, strict=True):
            setattr(block, name, _repeated(linear, block.head_dim, times))
        norm = getattr(getattr(block, "k_norm", None), "weight", None)
        if norm is not None and norm.shape[0] != block.head_dim:
            raise LoadError("keys are normed across heads in this model, so that groups cannot be split.")
        block.num_key_value_groups = 1
        found += 1
    if not found:
        raise LoadError(
            "no attention with grouped queries was found here with keys and values as `k_proj` and `v_proj`, "
            "so that there are no groups to split. Leave `split_groups` out."
        )
    config = made.config
    config.num_key_value_heads = config.num_attention_heads
    split: nn.Module = made
    return split


def _repeated(linear: Any, width: int, times: int) -> nn.Linear:
    """A linear module whose heads are each there so many times, one behind the other."""
    made = nn.Linear(linear.in_features, linear.out_features * times, linear.bias is not None, device="meta")
    for name, value in (("weight", linear.weight), ("bias", linear.bias)):
        if value is not None:
            by_head = value.detach().unflatten(0, (-1, width))
            whole = torch.repeat_interleave(by_head, times, 0).flatten(0, 1)
            setattr(made, name, nn.Parameter(whole, requires_grad=value.requires_grad))
    return made.train(linear.training)
