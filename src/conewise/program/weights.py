"""The weights of a captured program as they are now: whether they were replaced, and what bits they hold.

Torch counts writes to a tensor, but not those made through `.data`, through a numpy array that shares its
memory, or by another process. Such a write shows in the bits alone, so the bits are read: as one number for
each weight, a sum of its words with random odd factors of 64 bits. One word that changes always changes the
sum; any other change leaves it equal with a probability of at most 2⁻³¹.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conewise.errors import WeightsChangedError
from conewise.program.module_state import ModuleState, Unbuilt
from conewise.program.records import Program
from conewise.program.rehearsal import with_numbers
from conewise.program.streaming import Streamed
from conewise.program.tensors import inner_tensors, is_wrapper, writes_to
from conewise.program.walk import bitwise_same
from conewise.threads import one_module, own_settings

READ_WHOLE_BYTES, READ_WHOLE_WORDS = 8 << 20, 1 << 13
"""Weights on a CPU that take no more than this are read whole each time that something is computed.

So are tensors of fewer words.
"""

SMALL_BYTES = 1 << 20
STEPS = {True: (127, 131, 137), False: (1009, 997, 991, 983, 1013, 1019, 491, 499, 503, 509)}
"""Of larger ones, a word of 8 bytes in 127 of each small tensor, in about 1,000 of others: the first of these
steps that meets all blocks. Each word lies in a page of its own, which is what takes time. Steps are primes,
since few widths are multiples of one."""

TILE = 64
"""The sample of a large matrix has an element of every block of so many rows and columns."""

_BLOCK = {"cpu": 1 << 17}
"""Words that are multiplied at a time; elsewhere `_LARGE_BLOCK`."""
_LARGE_BLOCK = 1 << 21


class Sums:
    """A number for each weight: equal ones mean equal bits.

    Where they are made on a GPU, they are fetched from there when they are first looked at.
    """

    def __init__(self, numbers: Sequence[int] | Callable[[], Sequence[int]]) -> None:
        self._numbers = numbers

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers themselves. Waits for the device that makes them."""
        self._numbers = tuple(self._numbers() if callable(self._numbers) else self._numbers)
        return self._numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __getitem__(self, place: int) -> int:
        return self.numbers[place]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Sums) and self.numbers == other.numbers)

    def __hash__(self) -> int:
        return hash(self.numbers)

    def __repr__(self) -> str:
        return f"Sums({list(self.numbers)})"


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of weights at one moment: counted writes to each, a sum of some of its bits, a sum of all."""

    writes: Sums
    glance: Sums
    whole: Sums


class Weights:
    """The parameters, buffers and constants of a program, which are the module's own tensors.

    A tensor that the module has under the same name and with the same bits counts as the same.
    """

    def __init__(self, program: Program, module: nn.Module | None, state: ModuleState | Unbuilt) -> None:
        """`state` is the rest of the module, which is looked at wherever the weights are.

        A module that was not built yet, as that of a program from the cache, is None; see `attach`.
        """
        self._model = program.module_name
        parts = [(source, one) for source in program.sources for one in inner_tensors(source.value)]
        self._names = [" = ".join(map(repr, (source.name, *source.aliases))) for source, _ in parts]
        self._tensors = [one for _, one in parts]
        self._forms = [_form(tensor) for tensor in self._tensors]
        self._kinds = _kinds(self._tensors)
        # Streamed ones have no bits here: what they lie in says whether it was changed.
        self._streamed = {n: one for n, one in enumerate(self._tensors) if isinstance(one, Streamed)}
        self._read = [_NOTHING if n in self._streamed else one for n, one in enumerate(self._tensors)]
        self._are_counted = not any(map(Tensor.is_inference, self._read))
        self._all_paths = [(path, s.value) for s in program.sources for path in (s.name, *s.aliases)]
        self.attach(module, state)
        self._readers: tuple[tuple[int, ...], _Reader | _Glance, _Reader] | None = None
        self._known: Contents | None = None

    def attach(self, module: nn.Module | None, state: ModuleState | Unbuilt) -> None:
        """Look at this module from now on, whose tensors they are."""
        self._module, self._state = module, state
        # A constant that export lifted out of the code has no name in the module.
        self._paths = [(path, one) for path, one in self._all_paths if _at(module, path) is one]
        self._are_replaced = False  # by others of the same bits, which may be written to

    @property
    def are_on_gpu(self) -> bool:
        """True if any of them lies on a CUDA device."""
        return any(tensor.is_cuda for tensor in self._read)

    @property
    def held_bytes(self) -> int:
        """The bytes of those that do not stream."""
        return sum(tensor.nbytes for tensor in self._read)

    def writes(self) -> Sums:
        """The number of writes to each tensor in place, as far as torch counts."""
        return self._stamped(Sums(list(map(_VERSION if self._are_counted else writes_to, self._read))))

    def _stamped(self, sums: Sums) -> Sums:
        """The same with the stamps of streamed weights in their places."""
        if not self._streamed:
            return sums
        found = list(sums)
        for place, one in self._streamed.items():
            found[place] = one.stream.stamp(one.number)
        return Sums(found)

    def addresses(self) -> tuple[int, ...]:
        """The address of each tensor in memory."""
        return tuple([tensor.data_ptr() for tensor in self._read])

    @with_numbers()
    def glance(self) -> Sums:
        """Sums over the bits that are cheap to read: all, or on a CPU a part of those of a large model."""
        self._expect_forms()
        return self._stamped(self._reading()[0].read())

    @with_numbers()
    def contents(self) -> Contents:
        """Return the present contents of the weights.

        All bits of a large model are read only where counted writes or the glance differ from the last time;
        `whole_contents` reads them in any case.
        """
        some, every = self._reading()
        if some is every:
            return self.whole_contents()
        self.expect_captured()
        writes, glance, known = self.writes(), self.glance(), self._known
        if known is None or known.writes != writes or known.glance != glance:
            return self.whole_contents()
        return known

    @own_settings()
    def whole_contents(self) -> Contents:
        """Return the present contents of the weights, every bit of them read."""
        self.expect_captured()
        some, every = self._reading()
        whole = self._stamped(every.read())
        self._known = Contents(self.writes(), whole if some is every else self._stamped(some.read()), whole)
        return self._known

    def assumed(self) -> Contents | None:
        """The contents when all bits were last read; None where a write was counted since.

        Whoever works with it reads all bits afterwards: where they are these, they were these all the while.
        What kinds of tensors they are is looked at then too.
        """
        self._expect_untouched()
        known = self._known
        return known if known is not None and known.writes == self.writes() else None

    def changed(self, old: Sums, new: Sums) -> str:
        """The weights that differ, in words; nothing where none does."""
        names = [name for name, a, b in zip(self._names, old, new, strict=True) if a != b]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def expect_captured(self) -> None:
        """Raise WeightsChangedError where the module has other tensors than those that were captured.

        Raises ModuleChangedError where anything else of it changed what it computes.
        """
        self._expect_forms()
        self._expect_untouched()

    def _expect_untouched(self) -> None:
        if self._are_replaced or not self._state.is_untouched():
            self._expect_forms()
            self._expect_same_tensors()
            self._state.expect_captured()

    @one_module()  # a thread that traces the module has other tensors in it meanwhile
    def _expect_same_tensors(self) -> None:
        found = [(path, _at(self._module, path), captured) for path, captured in self._paths]
        self._are_replaced = any(now is not captured for _, now, captured in found)
        for path, now, captured in found if self._are_replaced else ():
            if now is captured:
                continue
            if not isinstance(now, Tensor):
                raise WeightsChangedError(
                    f"{path!r} of {self._model} is gone since the capture. {_CAPTURE_AGAIN}"
                )
            is_plain = now.layout is torch.strided and not is_wrapper(now)
            if not is_plain or _form(now) != _form(captured) or not bitwise_same(now, captured):
                raise WeightsChangedError(
                    f"{path!r} of {self._model} was replaced by another tensor after the capture, and the "
                    f"captured model still has the old one. {_CAPTURE_AGAIN} Or write into the old one: "
                    "`with torch.no_grad(): weight.copy_(new)`, `load_state_dict` without `assign=True`."
                )

    def _expect_forms(self) -> None:
        if _kinds(self._tensors) == self._kinds:
            return
        for name, tensor, form in zip(self._names, self._tensors, self._forms, strict=True):
            now = _form(tensor)
            if now != form:
                parts = zip(form, now, strict=True)
                found = ", ".join(f"{_shown(a)} → {_shown(b)}" for a, b in parts if a != b)
                raise WeightsChangedError(
                    f"{name} of {self._model} is another kind of tensor than at the capture: {found}. "
                    f"{_CAPTURE_AGAIN}"
                )

    def _reading(self) -> tuple[_Reader | _Glance, _Reader]:
        """Readers of some bits and of all, for where the tensors lie now."""
        addresses = self.addresses()
        if self._readers is None or self._readers[0] != addresses:
            every = _Reader(self._read)
            on_cpu = sum(t.nbytes for t in self._read if t.device.type == "cpu")
            some = every if on_cpu <= READ_WHOLE_BYTES else _Glance(self._read)
            self._readers = addresses, some, every
        return self._readers[1:]


_NOTHING = torch.empty(0)
_CAPTURE_AGAIN = "Capture the module again: `cw.capture(module, ...)`."


def bits_of(values: Sequence[object]) -> Sums:
    """The sum over all bits of each of these values; 0 for what is no tensor."""
    return _Reader([value if isinstance(value, Tensor) else _NOTHING for value in values]).read()


class _Reader:
    """Reads all bits of some tensors, and makes of each one number."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            if tensor.numel() and not tensor.is_meta:
                by_device.setdefault(tensor.device, []).append((number, tensor))
        self._parts: list[_DeviceReader | _KernelReader] = []
        for device, own in by_device.items():
            fast = _kernel_reader(device, own)
            left = own if fast is None else [one for one in own if not _is_plain(one[1])]
            self._parts += [] if fast is None else [fast]
            self._parts += [_DeviceReader(device, left)] if left else []

    def read(self) -> Sums:
        """The number of each tensor; 0 for one without bits. A GPU is not waited for."""
        parts = [(part, part.read()) for part in self._parts]

        def fetched() -> Sequence[int]:
            totals = torch.zeros(self._count, dtype=torch.int64)
            for part, sums in parts:
                part.add_to(totals, sums.cpu())
            return [int(total) for total in totals.tolist()]

        is_here = all(part.device.type == "cpu" for part in self._parts)
        return Sums(fetched() if is_here else fetched)


class _KernelReader:
    """Reads the tensors of a CUDA device that lie there as words of 32 bits, by one kernel."""

    def __init__(self, device: torch.device, tensors: Sequence[tuple[int, Tensor]]) -> None:
        from conewise.program import triton_kernels as cuda_sums  # noqa: PLC0415  # needs Triton

        self.device = device
        self._numbers = torch.tensor([number for number, _ in tensors])
        words = [_words(tensor) for _, tensor in tensors]
        factors = _factors(max(map(cuda_sums.KernelReader.blocks, words)))
        self._reader = cuda_sums.KernelReader(words, _keys(device)[: cuda_sums.WORDS], factors)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def read(self) -> Tensor:
        """A number for each tensor."""
        return self._reader.read()

    def add_to(self, totals: Tensor, sums: Tensor) -> None:
        """Put the numbers where they belong."""
        totals.index_add_(0, self._numbers, sums)


def _kernel_reader(device: torch.device, tensors: Sequence[tuple[int, Tensor]]) -> _KernelReader | None:
    """None where there is no Triton, or no compiler for what it makes: operations of torch do as well."""
    plain = [one for one in tensors if device.type == "cuda" and _is_plain(one[1])]
    if not plain or _HAS_KERNEL.get(device) is False:
        return None
    try:
        reader = _KernelReader(device, plain)
        if device not in _HAS_KERNEL:
            reader.read()
    except Exception:  # noqa: BLE001  # whatever a compiler says
        _HAS_KERNEL[device] = False
        return None
    _HAS_KERNEL[device] = True
    return reader


_HAS_KERNEL: dict[torch.device, bool] = {}
"""True if the kernel runs on a device: tried once."""


class _DeviceReader:
    """Reads tensors of one device, block by block."""

    def __init__(self, device: torch.device, tensors: Sequence[tuple[int, Tensor]]) -> None:
        self.device, self._tensors = device, tensors
        # Blocks of a tensor's own memory are cut once; one with holes is copied at each reading.
        dense = [(number, tensor) for number, tensor in tensors if _is_dense(tensor)]
        self._kept = {number: list(_blocks(_words(tensor))) for number, tensor in dense}
        blocks = [(number, index) for number, own in self._cut() for index in range(len(own))]
        numbers, indices = zip(*blocks, strict=True)
        self._numbers = torch.tensor(numbers)
        self._factors = _factors(max(indices) + 1)[torch.tensor(indices)]

    def _cut(self) -> Iterator[tuple[int, list[Tensor]]]:
        for number, tensor in self._tensors:
            yield number, self._kept.get(number) or list(_blocks(_words(tensor)))

    def add_to(self, totals: Tensor, sums: Tensor) -> None:
        """Add the sums of all blocks, each with its factor, to the numbers of their tensors."""
        totals.index_add_(0, self._numbers, sums * self._factors)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def read(self) -> Tensor:
        """The sum of each block."""
        keys, product = _keys(self.device), _scratch(self.device)
        sums = torch.empty(len(self._numbers), dtype=torch.int64, device=self.device)
        row = 0
        for _, blocks in self._cut():
            for block in blocks:
                count = block.numel()
                torch.mul(block, keys[:count], out=product[:count])
                torch.sum(product[:count], dim=0, out=sums[row])
                row += 1
        return sums


class _Glance:
    """Reads a few words from all over each large tensor, and small ones whole; and makes of each one number.

    Of a large matrix at least one element of each block of 64 by 64 is read.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._pieces: list[tuple[int, Callable[[], Tensor]]] = []
        for number, tensor in enumerate(tensors):
            if tensor.is_meta or not tensor.numel():
                continue
            step, is_dense = _step(tensor), _is_dense(tensor)
            sample, corners = _sampled(tensor, step), _corners(tensor, step)
            made = partial(_same, sample) if is_dense else partial(_sampled, tensor, step)
            self._pieces.append((number, made))
            if len(corners):
                self._pieces.append((number, partial(corners.reshape, -1)))
        ends = np.cumsum([len(make()) for _, make in self._pieces], dtype=np.int64)
        self._starts, self._keys = [0, *ends[:-1].tolist()], _odd(int(ends[-1]) if len(ends) else 0)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def read(self) -> Sums:
        """A number for each tensor."""
        sums = [0] * self._count
        if self._pieces:
            words = torch.cat([make().cpu() for _, make in self._pieces]).to(torch.int64).mul_(self._keys)
            found: list[int] = np.add.reduceat(words.numpy(), self._starts).tolist()
            for (number, _), one in zip(self._pieces, found, strict=True):
                sums[number] += one
        return Sums(sums)


def _same(words: Tensor) -> Tensor:
    return words


_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _corners(tensor: Tensor, step: int) -> Tensor:
    """The first element of each block of 64 by 64, where words at that step leave whole blocks out."""
    if step == 1 or tensor.ndim < 2 or not _is_dense(tensor) or tensor.itemsize not in _WORD:
        return _NOTHING
    if _meets_blocks(tensor, step):
        return _NOTHING
    return _in_memory(tensor).view(_WORD[tensor.itemsize]).flatten(0, -2)[::TILE, ::TILE]


def _meets_blocks(tensor: Tensor, step: int) -> bool:
    """True if words at that step meet every block of 64 by 64: in 64 rows they begin all over a row."""
    return _meet_blocks(_in_memory(tensor).shape[-1], tensor.itemsize, _wide(tensor).itemsize, step)


@cache
def _meet_blocks(columns: int, item: int, word: int, step: int) -> bool:
    width, left = divmod(columns * item, word)
    begins = sorted({row * width % step for row in range(TILE)})
    gaps = [after - before for before, after in pairwise([*begins, begins[0] + step])]
    return not left and max(gaps) <= TILE * item // word


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions in the order in which they lie in memory."""
    return tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _step(tensor: Tensor) -> int:
    """The step from one word to the next in the sample of a tensor; 1 where all are read."""
    words = _wide(tensor)
    if words.is_meta or words.numel() < READ_WHOLE_WORDS:
        return 1
    steps = STEPS[words.nbytes <= SMALL_BYTES]
    is_matrix = tensor.ndim > 1 and _is_dense(tensor)
    return next((one for one in steps if is_matrix and _meets_blocks(tensor, one)), steps[0])


def _sampled(tensor: Tensor, step: int) -> Tensor:
    return _wide(tensor)[::step]


def _wide(tensor: Tensor) -> Tensor:
    """The memory of a tensor in the widest words that it can be cut into: they are added fastest."""
    words = _words(tensor)
    is_cut = words.dtype == torch.int32 and words.numel() % 2 == 0 and words.storage_offset() % 2 == 0
    return words.view(torch.int64) if is_cut else words


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


def _is_dense(tensor: Tensor) -> bool:
    """True if `_words` are the tensor's own memory, not a copy."""
    return tensor.is_meta or tensor.numel() == 0 or _words(tensor).data_ptr() == tensor.data_ptr()


def _is_plain(tensor: Tensor) -> bool:
    """True if a tensor's own memory is words of 32 bits."""
    return tensor.numel() > 0 and _is_dense(tensor) and _words(tensor).dtype == torch.int32


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
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


_KIND = operator.attrgetter("dtype", "shape", "device")
_VERSION: Callable[[Tensor], int] = operator.attrgetter("_version")


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    """What `_form` says of each, by column: it is asked at every public call, and in C."""
    return [*map(_KIND, tensors), *map(Tensor.stride, tensors)]


def _shown(part: Any) -> str:
    return str(tuple(part) if isinstance(part, torch.Size) else part)


def _at(module: nn.Module | None, path: str) -> object:
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
