"""Tensors, arrays and their numbers: by their contents."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from conewise.identity.digests import inputs_digest
from conewise.identity.kinds.objects import object_text
from conewise.identity.short_text import sha, short
from conewise.identity.walk import Walk
from conewise.program.weights import bits_of

_DIGESTS: dict[tuple[object, ...], str] = {}


def tensor_text(walk: Walk, value: torch.Tensor) -> str:
    """A tensor, by its numbers; of a class of its own, by what that adds."""
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        raise walk.refused(f"a tensor whose numbers cannot be read ({value.layout}, on {value.device})")
    digest = f"tensor {_digest(value.resolve_conj().resolve_neg())}"
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return digest
    return short(f"{walk.at('class', type(value))} {digest}", walk.attributes(vars(value)))


def array_text(walk: Walk, value: np.ndarray[Any, Any]) -> str:
    """An array of numpy, by its numbers or objects."""
    if type(value) not in (np.ndarray, np.memmap):
        return object_text(walk, value)
    if value.dtype.hasobject:
        return short(f"array {value.shape}", walk.items(value.ravel().tolist()))
    data = np.ascontiguousarray(value).tobytes()
    return f"array {value.shape} {sha(f'{value.dtype.descr}{hashlib.sha256(data).hexdigest()}')}"


def number_text(walk: Walk, value: np.generic) -> str:
    """A number of numpy."""
    return f"{value.dtype} {value.item()!r}" if not value.dtype.hasobject else object_text(walk, value)


def _digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's numbers. A large one that was digested before is known by its bits."""
    if tensor.nbytes < 1 << 20:
        return inputs_digest({"": tensor})[:16]
    known = (bits_of([tensor]), tensor.shape, tensor.stride(), tensor.dtype)
    if known not in _DIGESTS:
        _DIGESTS[known] = inputs_digest({"": tensor})[:16]
    return _DIGESTS[known]
