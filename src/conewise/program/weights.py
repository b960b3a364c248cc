"""The weights of a captured program as they are now: whether they were replaced, and what bits they hold.

Torch counts writes to a tensor, but not those made through `.data`, through a numpy array that shares its
memory, or by another process. Such a write shows in the bits alone, so the bits are read: as one number for
each weight, a sum of its words with random odd factors of 64 bits. One word that changes always changes the
sum; any other change leaves it equal with a probability of at most 2⁻³¹.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from conewise.errors import WeightsChangedError
from conewise.program.build import bitwise_same
from conewise.program.records import Program
from conewise.program.tensors import writes_to

READ_WHOLE_BYTES = 8 << 20
"""Weights on a CPU that take no more than this are read whole each time that something is computed."""

LINE_BYTES, LINES_TO_ONE = 64, 61
"""Of larger ones, one line of the processor's cache in 61: a number of which few sizes are multiples."""

_BLOCK = {"cpu": 1 << 17}
"""Words that are multiplied at a time; elsewhere `_LARGE_BLOCK`."""
_LARGE_BLOCK = 1 << 21

Sums = tuple[int, ...]
"""A number for each weight: equal ones mean equal bits."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What weights held at one moment: counted writes to each, a sum of some of its bits, a sum of all."""

    writes: Sums
    glance: Sums
    whole: Sums


class Weights:
    """The parameters, buffers and constants of a program, which are the module's own tensors.

    A tensor that the module has under the same name and with the same bits counts as the same.
    """

    def __init__(self, program: Program, module: nn.Module) -> None:
        self._model = program.module_name
        self._module = module
        self._names = [" = ".join(map(repr, (source.name, *source.aliases))) for source in program.sources]
        self._tensors = [source.value for source in program.sources]
        self._forms = [_form(tensor) for tensor in self._tensors]
        paths = [(path, n) for n, s in enumerate(program.sources) for path in (s.name, *s.aliases)]
        # A constant that export lifted out of the code has no name in the module.
        self._paths = [(path, n) for path, n in paths if _at(module, path) is self._tensors[n]]
        self._readers: tuple[Sums, _Reader | _Glance, _Reader] | None = None
        self._known: Contents | None = None

    def writes(self) -> Sums:
        """How often each tensor was written to in place, as far as torch counts."""
        return tuple(map(writes_to, self._tensors))

    def addresses(self) -> Sums:
        """The address of each tensor in memory."""
        return tuple(tensor.data_ptr() for tensor in self._tensors)

    def glance(self) -> Sums:
        """Sums over the bits that are cheap to read: all, or on a CPU a part of those of a large model."""
        self._expect_forms()
        return self._reading()[0].read()

    def contents(self) -> Contents:
        """What the weights hold now.

        All bits of a large model are read only where counted writes or the glance differ from the last time;
        `whole_contents` reads them in any case.
        """
        self.expect_captured()
        writes, glance, known = self.writes(), self.glance(), self._known
        if known is None or known.writes != writes or known.glance != glance:
            return self.whole_contents()
        return known

    def whole_contents(self) -> Contents:
        """What the weights hold now, every bit of them read."""
        self.expect_captured()
        some, every = self._reading()
        whole = every.read()
        self._known = Contents(self.writes(), whole if some is every else some.read(), whole)
        return self._known

    def changed(self, old: Sums, new: Sums) -> str:
        """The weights that differ, in words; nothing where none does."""
        names = [name for name, a, b in zip(self._names, old, new, strict=True) if a != b]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def expect_captured(self) -> None:
        """Raise WeightsChangedError where the module has other tensors than those that were captured."""
        self._expect_forms()
        for path, number in self._paths:
            now, captured = _at(self._module, path), self._tensors[number]
            if now is captured:
                continue
            if not isinstance(now, Tensor):
                raise WeightsChangedError(
                    f"{path!r} of {self._model} is gone since the capture. {_CAPTURE_AGAIN}"
                )
            if _form(now) != self._forms[number] or not bitwise_same(now, captured):
                raise WeightsChangedError(
                    f"{path!r} of {self._model} was replaced by another tensor after the capture, and the "
                    f"captured model still has the old one. {_CAPTURE_AGAIN} Or write into the old one: "
                    "`with torch.no_grad(): weight.copy_(new)`, `load_state_dict` without `assign=True`."
                )

    def _expect_forms(self) -> None:
        for name, tensor, form in zip(self._names, self._tensors, self._forms, strict=True):
            now = _form(tensor)
            if now != form:
                found = ", ".join(f"{a} → {b}" for a, b in zip(form, now, strict=True) if a != b)
                raise WeightsChangedError(
                    f"{name} of {self._model} is another kind of tensor than at the capture: {found}. "
                    f"{_CAPTURE_AGAIN}"
                )

    def _reading(self) -> tuple[_Reader | _Glance, _Reader]:
        """Readers of some bits and of all, for where the tensors lie now."""
        addresses = self.addresses()
        if self._readers is None or self._readers[0] != addresses:
            every = _Reader([_words(tensor) for tensor in self._tensors])
            on_cpu = sum(t.nbytes for t in self._tensors if t.device.type == "cpu")
            some = (
                every if on_cpu <= READ_WHOLE_BYTES else _Glance([_words(tensor) for tensor in self._tensors])
            )
            self._readers = addresses, some, every
        return self._readers[1:]


_NOTHING = torch.empty(0)
_CAPTURE_AGAIN = "Capture the module again: `cw.capture(module, ...)`."


def bits_of(values: Sequence[object]) -> Sums:
    """The sum over all bits of each of these values; 0 for what is no tensor."""
    return _Reader([_words(value if isinstance(value, Tensor) else _NOTHING) for value in values]).read()


class _Reader:
    """Reads given words, and makes of each tensor's one number; a device is waited for once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._blocks: dict[torch.device, list[tuple[int, int, Tensor]]] = {}
        for number, words in enumerate(tensors):
            if words.numel() and not words.is_meta:
                found = self._blocks.setdefault(words.device, [])
                found += [(number, index, block) for index, block in enumerate(_blocks(words))]

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def read(self) -> Sums:
        """The number of each tensor; 0 for one without bits."""
        totals = torch.zeros(self._count, dtype=torch.int64)
        for device, blocks in self._blocks.items():
            numbers, indices, _ = zip(*blocks, strict=True)
            keys, product = _keys(device), _scratch(device)
            sums = torch.empty(len(blocks), dtype=torch.int64, device=device)
            for row, (*_, block) in enumerate(blocks):
                count = block.numel()
                torch.mul(block, keys[:count], out=product[:count])
                torch.sum(product[:count], dim=0, out=sums[row])
            factors = _factors(max(indices) + 1)[torch.tensor(indices)]
            totals.index_add_(0, torch.tensor(numbers), sums.cpu() * factors)
        return tuple(totals.tolist())


class _Glance:
    """Reads a few lines from all over each large tensor, and small ones whole, as plain and cheap sums."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lines = [_lines(words) for words in tensors]

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def read(self) -> Sums:
        """A number for each tensor."""
        return tuple(0 if words.is_meta else int(words.sum()) for words in self._lines)


def _lines(words: Tensor) -> Tensor:
    if words.dtype == torch.int32 and words.numel() % 2 == 0 and words.storage_offset() % 2 == 0:
        words = words.view(torch.int64)  # the widest words are added fastest
    line = LINE_BYTES // words.itemsize
    step = line * LINES_TO_ONE
    if words.numel() < 16 * step or words.is_meta:
        return words
    return words.as_strided((words.numel() // step, line), (step, 1), words.storage_offset())


def _blocks(words: Tensor) -> Iterator[Tensor]:
    yield from torch.split(words, _block_size(words.device))


def _block_size(device: torch.device) -> int:
    return _BLOCK.get(device.type, _LARGE_BLOCK)


@cache
def _keys(device: torch.device) -> Tensor:
    return _odd(_block_size(device)).to(device)


_SCRATCH = threading.local()


def _scratch(device: torch.device) -> Tensor:
    """Room for the products of a block, kept: a sweep is measured by what it takes."""
    known: dict[torch.device, Tensor] = vars(_SCRATCH).setdefault("rooms", {})
    if device not in known:
        known[device] = torch.empty(_block_size(device), dtype=torch.int64, device=device)
    return known[device]


_FACTORS = [torch.empty(0, dtype=torch.int64)]


def _factors(count: int) -> Tensor:
    """A factor for each block: blocks of a tensor that are swapped change its number."""
    if len(_FACTORS[0]) < count:
        _FACTORS[0] = torch.cat([_FACTORS[0], _odd(count)])
    return _FACTORS[0][:count]


def _odd(count: int) -> Tensor:
    """Random odd numbers of 64 bits, others in each process; torch's own generator is left alone."""
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7)))
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64)
    return drawn | 1


def _words(tensor: Tensor) -> Tensor:
    """The memory of a tensor, read as integers of 32 bits, or as bytes where it cannot be cut into such."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    if not flat.is_contiguous():
        # In the order in which it lies in memory: a transposed weight is read without a copy.
        flat = flat.permute(sorted(range(flat.ndim), key=flat.stride, reverse=True)).contiguous()
    flat = flat.reshape(-1)
    if flat.stride(0) != 1:
        # One element of a larger tensor counts as contiguous, whatever its stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    octets = flat.view(torch.uint8)
    is_cut = octets.numel() % 4 == 0 and octets.storage_offset() % 4 == 0
    return octets.view(torch.int32) if is_cut else octets


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _at(module: nn.Module, path: str) -> object:
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
