"""Which values of an exported graph share memory, and what a write to one of them does.

`torch.export` keeps the module's in-place operations. Here each becomes an operation that
returns a new value of the *root* (the tensor that owns the memory); every view of the root
that is used later is taken again from the new value. The same kernels run on the same
numbers, so the result is the module's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten

HANDED_THROUGH = frozenset(
    {
        _aten.dropout.default,
        _aten.dropout_.default,
        _aten.feature_dropout.default,
        _aten.feature_dropout_.default,
        _aten.alpha_dropout.default,
        _aten.feature_alpha_dropout.default,
        _aten.detach.default,
        _aten.detach_.default,
        _aten.alias.default,
    }
)
"""Operations that return their own input: dropouts when they are not training, and detaching."""


def written_argument(node: fx.Node) -> int | None:
    """The position of the argument that `node` writes to in place, or None."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or node.target in HANDED_THROUGH:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return position if position < len(node.args) else None
    return None


def viewed_argument(node: fx.Node) -> fx.Node | None:
    """The first argument, when the node's value shares its memory; else None.

    Export's own tensors show it: they carry no data, but they share storage as the real ones do.
    """
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    first = node.args[0]
    if node.target in HANDED_THROUGH:
        return first
    return first if _storages(first.meta.get("val")) & _storages(node.meta.get("val")) else None


def is_identity(node: fx.Node) -> bool:
    """Whether the node hands its first argument through: same memory, same shape and strides."""
    if node.target in HANDED_THROUGH:
        return True
    source = viewed_argument(node)
    if source is None:
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return False
    return _geometry(before) == _geometry(after)


def functional_twin(node: fx.Node, position: int) -> Callable[..., Any] | None:
    """The operation that returns what `node` writes, with its dtype and layout, or None.

    Only where both are certain: the written tensor is contiguous and floating, and no other
    floating argument has another dtype. Everywhere else a copy is written to instead.
    """
    target = node.target
    if position != 0 or not isinstance(target, torch._ops.OpOverload):
        return None
    packet = target._schema.name.removeprefix("aten::")
    if packet not in _TWINS:
        return None
    written: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    others = [arg.meta.get("val") for arg in node.all_input_nodes]
    dtypes = {
        other.dtype
        for other in others
        if isinstance(other, torch.Tensor) and (other.is_floating_point() or other.is_complex())
    }
    if not written.is_floating_point() or dtypes != {written.dtype} or not written.is_contiguous():
        return None
    twin = getattr(getattr(_aten, packet.removesuffix("_")), target._overloadname, None)
    return twin if isinstance(twin, torch._ops.OpOverload) else None


class WriteThrough:
    """A new root: a copy of the old one, written to through views of it by `target`."""

    def __init__(self, target: Callable[..., Any], position: int) -> None:
        packet = getattr(target, "overloadpacket", target)
        self.target, self.position = target, position
        self.__name__ = f"{packet.__name__.removesuffix('_')}"

    def __call__(
        self,
        root: torch.Tensor,
        views: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Copy `root`, take `views` of the copy one after another, write to the last of them."""
        fresh = root.clone()
        value: Any = fresh
        for target, step_args, step_kwargs in views:
            value = target(value, *step_args, **step_kwargs)
        self.target(*args[: self.position], value, *args[self.position :], **kwargs)
        return fresh


_TWINS = frozenset(
    {
        "add_",
        "sub_",
        "mul_",
        "div_",
        "relu_",
        "gelu_",
        "silu_",
        "sigmoid_",
        "tanh_",
        "exp_",
        "neg_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "masked_fill_",
        "index_put_",
        "index_add_",
        "index_copy_",
        "index_fill_",
        "scatter_",
        "scatter_add_",
        "leaky_relu_",
        "elu_",
        "hardtanh_",
        "hardswish_",
        "sqrt_",
        "rsqrt_",
        "pow_",
    }
)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        tuple(map(str, tensor.shape)),
        tuple(map(str, tensor.stride())),
        str(tensor.storage_offset()),
    )


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, list | tuple):
        return set().union(*(_storages(item) for item in value))
    return set()
