"""Which positions of the logits a plain function reads: watched while it runs, not guessed.

Most metrics begin with `logits[:, -1]`. One that reads nothing else does not need the other positions, which
in a sweep are most of the memory and often most of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensor = torch.Tensor

ROW_BY_ROW = frozenset(
    {"bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "to"}
)
"""What changes each position on its own, so that its result may be watched in the place of the logits."""
ALONG_THE_VOCABULARY = frozenset({"log_softmax", "softmax"})
"""The same, if the dimension is the last one."""


class ReadsMoreError(Exception):
    """Something else than the last position was read of logits that hold no other."""


class LastPosition(Tensor):
    """Logits [prompt, pos, vocabulary] of which only the last position is real: reading another one raises.

    Sizes, dtype and device may be asked for. What is taken of the last position is an ordinary tensor.
    """

    @classmethod
    def of(cls, last: Tensor, length: int) -> LastPosition:
        """The logits [prompt, vocabulary] of the last of `length` positions."""
        return last[:, None].expand(-1, length, -1).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every use of such a tensor comes by here."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        logits = args[0] if args else None
        # The first argument is the only one that may be watched: `gather` by logits reads all of them.
        if not isinstance(logits, cls) or any(isinstance(arg, cls) for arg in (*args[1:], *options.values())):
            raise ReadsMoreError(name)
        with torch._C.DisableTorchFunctionSubclass():
            plain = logits.as_subclass(Tensor)
            if name == "__getitem__":
                if not reads_last(args[1], plain.shape):
                    raise ReadsMoreError(name)
                return plain[args[1]]
            found = func(plain, *args[1:], **options)
            if not isinstance(found, Tensor):
                if name in {"__get__", "dim", "numel", "size", "__len__", "is_floating_point"}:
                    return found
                raise ReadsMoreError(name)
            along = options.get("dim", args[1] if len(args) > 1 else None)
            if name in ROW_BY_ROW or (name in ALONG_THE_VOCABULARY and along in {-1, plain.ndim - 1}):
                return found.as_subclass(cls)
            raise ReadsMoreError(name)


def reads_last(index: Any, shape: Sequence[int]) -> bool:
    """Whether an index into [prompt, pos, vocabulary] reads the last position and no other."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(entry is None or isinstance(entry, bool) or _is_mask(entry) for entry in entries):
        return False
    for place, entry in enumerate(entries):
        if entry is Ellipsis:
            entries[place : place + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
            break
    if len(entries) < 2:
        return False
    entry, length = entries[1], shape[1]
    if isinstance(entry, slice):
        return list(range(length))[entry] == [length - 1]
    numbers = torch.as_tensor(entry).reshape(-1).tolist()
    return bool(numbers) and all(number in {-1, length - 1} for number in numbers)


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype in {torch.bool, torch.uint8}


def reads_only_last(function: Callable[[Tensor], Any], logits: Tensor) -> bool:
    """Whether a function of these logits reads their last position alone, as far as this one call shows."""
    try:
        with torch.no_grad():
            function(LastPosition.of(logits[:, -1], logits.shape[1]))
    except ReadsMoreError:
        return False
    return True
