"""Affine steps over stacks: the linear part of a record for many values at once."""

from __future__ import annotations

from typing import Any

import torch

from conewise.edges.stacked_values import Read
from conewise.errors import EdgeError
from conewise.program.records import Record
from conewise.program.rules import Rule
from conewise.structure.components.components import Components
from conewise.structure.wiring.affine import Step

Tensor = torch.Tensor


def stepped(step: Step, rule: Rule, stacks: dict[str, Tensor], reading: Read) -> Tensor:
    """The linear part of a step for a stack of values, whose first dimension numbers them."""
    record = step.linear
    if step.is_norm:
        return normed(record, stacks[step.carried[0]], reading, with_bias=False)
    inputs: list[Any] = []
    dims: list[int | None] = []
    for name in record.inputs:
        if name in stacks:
            inputs.append(stacks[name])
            dims.append(0)
        else:
            value = reading(name)
            inputs.append(torch.zeros_like(value) if name in step.added else value)
            dims.append(None)
    found: Tensor = torch.vmap(rule, in_dims=tuple(dims))(*inputs)
    return found


def normed(record: Record, value: Tensor, reading: Read, *, with_bias: bool) -> Tensor:
    """A fused norm of `value`, with the scale that the norm has in the run; leading dimensions are kept."""
    bias = () if record.op == "rms_norm" else ("bias",)
    names = ("input", "normalized_shape", "weight", *bias, "eps")
    given = dict(zip(names, record.args, strict=False)) | dict(record.kwargs)
    own = reading(given["input"].name)
    dims = tuple(range(-len(given["normalized_shape"]), 0))
    wide = torch.promote_types(own.dtype, torch.float32)
    eps, numbers = given.get("eps"), own.to(wide)
    if record.op == "layer_norm":
        eps = 1e-5 if eps is None else eps
        spread = numbers.var(dims, correction=0, keepdim=True)
        value = value.to(wide) - value.to(wide).mean(dims, keepdim=True)
    else:
        eps = torch.finfo(own.dtype).eps if eps is None else eps
        spread = numbers.square().mean(dims, keepdim=True)
        value = value.to(wide)
    value = value * torch.rsqrt(spread + eps)
    if given.get("weight") is not None:
        value = value * reading(given["weight"].name)
    if with_bias and given.get("bias") is not None:
        value = value + reading(given["bias"].name)
    return value.to(own.dtype)


def bent(components: Components, record: Record, what: str) -> EdgeError:
    """The error that says which record is not affine, and what passes through it."""
    layers = [layer for layer in components.layers if record.name in layer.members]
    reasons = [layer.missing["mlp_out"] for layer in layers if "mlp_out" in layer.missing]
    why = f" No MLP was found there: {reasons[0]}." if reasons else ""
    return EdgeError(
        f"{what} passes through {record.name!r} ({record.op}, {components.layer_of(record.name)}), which is "
        "neither a sum, a projection nor a norm: what one component wrote cannot be separated from what "
        f"others did behind it.{why} Edges are not defined for this model; its sites can be patched."
    )
