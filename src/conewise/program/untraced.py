"""Let `torch.export` see what a module computes when it runs, not what it computes because it is traced.

The attention masks of Hugging Face models ask whether somebody traces them, and are then made in full. A
Llama that runs hands its attention no mask and its few keys as they are; one that is traced hands it a mask
and keys repeated for every head. That is another kernel, and other last bits. So while a module is exported
these questions are answered as they are when it runs, wherever the answer depends on no value of a tensor.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from conewise.program.sizes import size_of

MASKS, EXPERTS = "transformers.masking_utils", "transformers.integrations.moe"

GIVEN = (
    "an attention mask is given: the module leaves it out where it hides nothing, which depends on its values"
)
TRACED = "the module makes all of its masks in full while it is traced"
POSITIONS = (
    "positions are given: the module looks at their values for several sequences in one row, and leaves its "
    "mask out where there are none"
)


class Untraced:
    """The answers given during one export, as in a run of the module.

    `used`: whether an answer was another one than `transformers` gives to whoever traces it. `reasons`: why
    the captured computation is not the one of every run, as far as that was seen.
    """

    def __init__(self) -> None:
        self.used = False
        self._reasons: dict[str, None] = {}

    @property
    def reasons(self) -> tuple[str, ...]:
        """Each once, in the order in which they were found."""
        return tuple(self._reasons)

    def because(self, reason: str) -> None:
        """Note why a run may compute otherwise."""
        self._reasons[reason] = None


@contextmanager
def untraced(answers: Untraced) -> Iterator[None]:
    """Answer as in a run while the block lasts; nothing is left behind.

    Where `transformers` was not imported, or has none of the functions that are known here, nothing changes.
    """
    masks = sys.modules.get(MASKS)
    if masks is None:
        yield
        return
    positions = CountingUp()
    with _replaced(masks, _answers(masks, answers, positions)), positions:
        yield


@contextmanager
def traced(answers: Untraced) -> Iterator[None]:
    """Answer as `transformers` does: every mask is made in full."""
    answers.because(TRACED)
    yield


def _answers(masks: ModuleType, answers: Untraced, positions: CountingUp) -> dict[str, Callable[..., Any]]:
    """The stand-ins for the functions of `masking_utils` that ask whether they are traced."""
    is_tracing = getattr(masks, "is_tracing", None)
    packed = getattr(masks, "find_packed_sequence_indices", None)

    def is_exporting() -> bool:
        answers.used = True
        return False

    def is_tracing_values(tensor: Any = None) -> bool:
        # Asked about no tensor, the question is whether a shape may decide. Asked about one, it is whether
        # values may, and these no capture knows.
        if tensor is None:
            answers.used = True
            return False
        return bool(is_tracing(tensor))  # type: ignore[misc]

    def sequences_in(position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if positions.counts(position_ids):
            answers.used = True
            return None
        answers.because(POSITIONS)
        return packed(position_ids, *args, **kwargs)  # type: ignore[misc]

    found: dict[str, Callable[..., Any]] = {
        "is_torchdynamo_exporting": is_exporting,
        "is_tracing": is_tracing_values,
        "find_packed_sequence_indices": sequences_in,
    }
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        if hasattr(masks, name):
            found[name] = _skipping(getattr(masks, name), answers)
    return {name: function for name, function in found.items() if hasattr(masks, name)}


def _skipping(original: Callable[..., bool], answers: Untraced) -> Callable[..., bool]:
    """True if a mask can be left out, as `original` says; one of a window stays where the example needs it.

    Such a mask is right for every length, so that shorter runs are no reason to fix the length.
    """
    signature = inspect.signature(original)

    def can_be_skipped(*args: Any, **kwargs: Any) -> bool:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("padding_mask") is not None:
            answers.because(GIVEN)
        window, length = given.get("local_attention_size"), given.get("kv_length")
        if isinstance(window, int) and length is not None and _hint(length) >= window:
            answers.because(f"the module leaves out its mask where there are fewer positions than {window}")
            return False
        return original(*args, **kwargs)

    return can_be_skipped


def _hint(size: int | torch.SymInt) -> int:
    """The size in the example, without a guard: asking for it says nothing about other runs."""
    return size if isinstance(size, int) else int(size.node.hint)


def as_run(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return what a module calls when it runs, where it calls `op` when it is traced.

    That is `op` itself, but for the products of experts: `torch.export` takes torch's own in bfloat16 only,
    so that a traced module multiplies one expert after another.
    """
    experts = sys.modules.get(EXPERTS)
    if str(op) == "transformers.grouped_mm_fallback.default" and hasattr(experts, "_grouped_mm"):
        return experts._grouped_mm  # type: ignore[union-attr, no-any-return]
    return op._op


@contextmanager
def _replaced(module: ModuleType, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(module, name, function)


MOVES = frozenset(
    {"unsqueeze", "expand", "expand_as", "view", "reshape", "to", "long", "contiguous", "clone"}
)
"""Operations that keep rows as they are, as long as the last dimension is the one that it was."""
WRITES = frozenset(
    {"__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__ifloordiv__", "__imod__"}
)


class CountingUp(TorchFunctionMode):
    """Knows which tensors count up by one along their last dimension, whatever a run's inputs are.

    These are the ones that were made so: `torch.arange(n)`, a number added, dimensions put before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {}

    def counts(self, tensor: object) -> bool:
        """True if it is certain that the tensor counts up by one, in every run."""
        return id(tensor) in self._known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and note whether what it returns counts up."""
        given = kwargs or {}
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        found = func(*args, **given)
        if name in WRITES or "out" in given or (name.endswith("_") and not name.endswith("__")):
            # What is written to may share memory with anything that was known.
            if not (args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()):
                self._known.clear()
        elif isinstance(found, torch.Tensor) and self._is_counting(func, name, args, given, found):
            self._known[id(found)] = found
        return found

    def _is_counting(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: torch.Tensor
    ) -> bool:
        if found.dtype not in {torch.int32, torch.int64} or not args:
            return False
        if func is torch.arange:
            step = args[2] if len(args) > 2 else kwargs.get("step", 1)
            return isinstance(step, int) and step == 1
        if name in {"add", "__add__", "__radd__"} and len(args) == 2 and not kwargs:
            return any(map(self.counts, args)) and any(isinstance(one, int) for one in args)
        if name not in MOVES or not self.counts(args[0]):
            return False
        return found.ndim > 0 and size_of(found.shape[-1]) == size_of(args[0].shape[-1])
