"""Which kernels a computation calls, and with what: that of a module, and that of its captured program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

HEAVY = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_softmax", "convolution", "native_layer_norm")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in HEAVY or "scaled_dot_product" in name:
            leaves, spec = tree_flatten((args, kwargs or {}))
            self.calls.append((name, str(spec), *map(_described, leaves)))
        return func(*args, **(kwargs or {}))


def _described(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


def kernels(compute: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Products, attentions, softmaxes and norms in their order: shapes, strides, masks, flags."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        compute()
    return recorder.calls
