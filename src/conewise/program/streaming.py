"""Weights that stream: they stay in files or in host memory, and lie on the device only around their use.

A `Streamed` is a weight by name: a tensor with a shape, a dtype and a device, and no memory. Every operation
that reads one asks its `WeightStream` for the numbers, which lie in a ring of memory on the device. Threads
read ahead, in the order in which the program uses its weights, and what was used longest ago makes room. So
whatever computes with a module or its program streams: nothing else knows of it.

What is moved when is decided by `Ring`, which holds no tensor: a plan asks another one, and finds the same.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from conewise.errors import Argument, InputMismatchError, LoadError, PatchError
from conewise.program.records import COPIES, REARRANGEMENTS, SELECTIONS, Program
from conewise.program.rehearsal import is_rehearsal
from conewise.program.tensors import is_wrapper
from conewise.threads import helping

ALIGNED = 512
"""The bytes at whose multiples the places of weights begin in a ring."""

CACHE_LINE = 64
"""Products may round by where weights begin in a line; on the CPU they begin as in their file."""

PIECE_BYTES = 16 << 20
"""So much is read at a time by one thread."""

THREADS = 8
"""Threads that read: one copies 7 GB/s out of pageable memory, and a card takes 54."""

Bytes = Any
"""Memory as a NumPy array of bytes."""


class Origin(Protocol):
    """The place where the bytes of a weight stay."""

    @property
    def address(self) -> int:
        """Where it begins in memory when it is resident, but for whole pages."""

    def read(self, out: Bytes, at: int) -> None:
        """Fill `out` with the bytes from `at` on. Raises LoadError."""

    def stamp(self) -> int:
        """A number that another one stands for where the bytes were changed, as far as that shows."""


_OPEN: dict[Path, int] = {}
_OPENING = threading.Lock()


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file."""

    path: Path
    offset: int

    @property
    def address(self) -> int:
        """Where it begins in memory, but for whole pages, when the file is mapped."""
        return self.offset

    def read(self, out: Bytes, at: int) -> None:
        """Fill `out` with the bytes from `at` on. Raises LoadError where the file does not have them."""
        view, done = memoryview(out), 0
        try:
            while done < len(view):
                got = os.preadv(self._number(), [view[done:]], self.offset + at + done)
                if not got:
                    raise LoadError(
                        f"the weights file {self.path} ends early: {self.path.stat().st_size:,} bytes are "
                        f"there, and a weight lies behind them. It is damaged or was cut short since it was "
                        "loaded: fetch or save it again, and load the model again."
                    )
                done += got
        except OSError as error:
            raise LoadError(
                f"the weights file {self.path} cannot be read any more ({error.strerror or error}). Look "
                "after the disk that it lies on; what was computed and stored is kept, and `resume` goes on."
            ) from error

    def stamp(self) -> int:
        """The file's size and the time of its last change, as one number."""
        try:
            found = self.path.stat()
        except OSError:
            return -1
        return (found.st_mtime_ns * 1_000_003 + found.st_size) % (1 << 62)

    def _number(self) -> int:
        if self.path not in _OPEN:
            with _OPENING:
                if self.path not in _OPEN:
                    _OPEN[self.path] = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        return _OPEN[self.path]


@dataclass(frozen=True, slots=True)
class HostPart:
    """A tensor in host memory."""

    tensor: Tensor

    @property
    def address(self) -> int:
        """Where it begins in memory."""
        return self.tensor.data_ptr()

    def read(self, out: Bytes, at: int) -> None:
        """Fill `out` with the bytes from `at` on."""
        np.copyto(out, as_bytes(self.tensor)[at : at + len(out)])

    def stamp(self) -> int:
        """The number of writes to it that torch counts."""
        return int(self.tensor._version)


def as_bytes(tensor: Tensor) -> Bytes:
    """The memory of a contiguous tensor of the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a stream: what it is, and where its bytes stay, in the dtype `stored`.

    `trains` is what its module says of it: `requires_grad`, by which torch chooses how it multiplies.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype
    origin: Origin
    trains: bool = True

    @property
    def count(self) -> int:
        """The number of its elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """The bytes that it takes on the device."""
        return self.count * self.dtype.itemsize

    @property
    def shift(self) -> int:
        """Where it begins in a cache line when it is resident; a converted one has memory of its own."""
        shift = self.origin.address % CACHE_LINE if self.stored == self.dtype else 0
        return 0 if shift % self.dtype.itemsize else shift

    def read(self, out: Tensor, first: int) -> None:
        """Fill `out` with elements from number `first` on; it lies on the CPU and is contiguous."""
        if self.stored == self.dtype:
            self.origin.read(as_bytes(out), first * self.stored.itemsize)
            return
        held = torch.empty(out.numel(), dtype=self.stored)
        self.origin.read(as_bytes(held), first * self.stored.itemsize)
        out.copy_(held.view(out.shape))


# ------------------------------------------------------------------------------------------
# What lies where, and what is moved: numbers alone, so that a plan can follow it.


class Ring:
    """The room for weights on a device: `size` bytes, for weights of `sizes` that are used in this order.

    `want` says what has to be moved, in order, before an operation reads some weights: those themselves,
    where they are not there, and after them what comes next, for as long as it finds room that no weight
    before them holds. What was used longest ago makes room first. `moved` counts bytes.
    """

    def __init__(self, sizes: Sequence[int], size: int, order: Sequence[int] | None = None) -> None:
        self.sizes, self.size = [_aligned(one) for one in sizes], size
        self._bytes = list(sizes)
        self.moved = 0
        self._at: dict[int, int] = {}
        """The places of weights in the ring, those that were used longest ago first."""
        self.follow(range(len(sizes)) if order is None else order)
        self._last, self._step = -1, 1

    def like(self) -> Ring:
        """Another ring of this size for these weights, with nothing in it."""
        return Ring(self._bytes, self.size, self._order)

    def follow(self, order: Iterable[int]) -> None:
        """Be told in which order weights are used; others are not read ahead."""
        self._order = list(order)
        self._place = {number: place for place, number in enumerate(self._order)}

    def want(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the weights to be moved and the places for them, for an operation on these.

        Raises LoadError where they do not fit together.
        """
        kept = set(numbers)
        found = self._placed(numbers, kept)
        if found is None:
            self._at.clear()  # what lay in the way was one of them
            found = self._placed(numbers, kept)
        if found is None:
            raise LoadError(
                f"an operation reads weights of {sum(self.sizes[one] for one in kept):,} bytes together, and "
                f"the ring for them has {self.size:,}. Give the model more memory with ",
                Argument("max_memory"),
                ".",
            )
        for number in self._ahead(numbers[-1]):
            if number not in self._at:
                place = self._room(self.sizes[number], kept)
                if place is None:
                    break
                self._at[number] = place
                found.append((number, place))
            kept.add(number)
        self.moved += sum(self._bytes[number] for number, _ in found)
        return found

    def _placed(self, numbers: Sequence[int], kept: set[int]) -> list[tuple[int, int]] | None:
        """The places of those that were not there; None where they do not fit beside the others."""
        found: list[tuple[int, int]] = []
        for number in numbers:
            if number in self._at:
                self._at[number] = self._at.pop(number)
                continue
            place = self._room(self.sizes[number], kept)
            if place is None:
                return None
            self._at[number] = place
            found.append((number, place))
        return found

    def clear(self) -> None:
        """Drop all."""
        self._at.clear()
        self._last, self._step = -1, 1

    def drop(self, number: int) -> None:
        """Drop a weight that did not come."""
        self._at.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._at

    def where(self, number: int) -> int:
        """The place of a weight that is there."""
        return self._at[number]

    def _ahead(self, number: int) -> Iterator[int]:
        """The weights that are used next: those behind this one, or before it where the last ones were."""
        place = self._place.get(number)
        if place is None:
            return
        if place != self._last and self._last >= 0:
            self._step = -1 if 0 < self._last - place <= len(self._order) // 2 else 1
        self._last = place
        stop = len(self._order) if self._step > 0 else -1
        for at in range(place + self._step, stop, self._step):
            yield self._order[at]

    def _room(self, size: int, kept: set[int]) -> int | None:
        """A place of so many bytes, made by dropping what was used longest ago; None where there is none."""
        droppable = [number for number in self._at if number not in kept]
        for gone in (None, *droppable):
            if gone is not None:
                del self._at[gone]
            place = self._gap(size)
            if place is not None:
                return place
        return None

    def _gap(self, size: int) -> int | None:
        end, best = 0, None
        for number, place in sorted(self._at.items(), key=lambda one: one[1]):
            if place - end >= size:
                best = end
                break
            end = place + self.sizes[number]
        if best is None and self.size - end >= size:
            best = end
        return best


def _aligned(size: int) -> int:
    return -(-(size + CACHE_LINE) // ALIGNED) * ALIGNED


# ------------------------------------------------------------------------------------------
# The stream: a ring with memory, and threads that fill it.


class WeightStream:
    """Weights that stay elsewhere, and a ring of `size` bytes on `device` for those that are in use.

    A copy of a stream, in another process too, has a ring of its own, and the same files.
    """

    def __init__(self, weights: Sequence[Weight], device: torch.device, size: int) -> None:
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.weights, self.device = tuple(weights), device
        self.ring = Ring([one.nbytes for one in weights], size)
        self.order: Sequence[int] = range(len(weights))
        """The order in which the program uses them; that of the module until it is captured."""
        self.rows_moved = 0
        self._lock = threading.RLock()
        self._memory: _Memory | None = None
        self._coming: dict[int, Future[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": self.weights, "device": self.device, "size": self.ring.size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def lifted(self, dtype: torch.dtype) -> WeightStream:
        """The same weights in another precision, with a ring of its own for as many of them."""
        made = [replace(one, dtype=dtype) if one.dtype.is_floating_point else one for one in self.weights]
        size = Ring([one.nbytes for one in made], 1).sizes
        share = max(map(operator.truediv, size, self.ring.sizes), default=1)
        return WeightStream(made, self.device, math.ceil(share * self.ring.size))

    @property
    def moved(self) -> int:
        """The bytes that were moved so far; rows of tables, which are looked up where they stay, apart."""
        return self.ring.moved

    @cached_property
    def total(self) -> int:
        """The bytes of all weights."""
        return sum(one.nbytes for one in self.weights)

    def stamp(self, number: int) -> int:
        """A number for the contents of a weight, as far as a change of them shows."""
        return self.weights[number].origin.stamp()

    def held(self, numbers: Sequence[int]) -> list[Tensor]:
        """The numbers of some weights, on the device, until others are asked for."""
        if (place := getattr(_SIDE_BY_SIDE, "place", None)) is not None:
            place[0].wait(place[1], tuple(numbers))
        with self._lock, _disable_current_modes():
            if self._memory is None:
                self._memory = _Memory(self.device, self.ring.size)
            wanted = list(dict.fromkeys(numbers))
            moves = self.ring.want(wanted)
            if moves:
                # What lay there was read by what is under way on the device; or it is still being filled.
                after = self._memory.mark()
                again = {number for number, _ in moves}
                for number in [one for one in self._coming if one in again or one not in self.ring]:
                    wait([self._coming.pop(number)])
                for number, place in moves:
                    self._coming[number] = self._memory.fill(self.weights[number], place, after)
            found = {}
            for number in wanted:
                if (coming := self._coming.get(number)) is not None:
                    self._await(number, coming)
                weight = self.weights[number]
                found[number] = self._memory.at(self.ring.where(number), weight)
            return [found[number] for number in numbers]

    def _await(self, number: int, coming: Future[Any]) -> None:
        assert self._memory is not None
        try:
            self._memory.wait(coming)
        except BaseException:
            del self._coming[number]
            self.ring.drop(number)  # what asks again tries again
            raise

    @contextmanager
    def following(self, order: Sequence[int] | None = None) -> Iterator[Callable[[], int]]:
        """Begin with nothing in the ring, for weights in this order, or in that of the program.

        The result says how many bytes were moved since.
        """
        before = self.moved
        try:
            with self._lock:
                wait(self._coming.values())
                self._coming.clear()
                self.ring.clear()
                self.ring.follow(self.order if order is None else order)
            yield lambda: self.moved - before
        finally:
            self.ring.follow(self.order)

    def room_of(self, number: int) -> Tensor:
        """A tensor of a weight's shape in the memory of the ring, without a meaning."""
        if self._memory is None:
            self._memory = _Memory(self.device, self.ring.size)
        found: Tensor = torch.utils.dlpack.from_dlpack(self._memory.at(0, self.weights[number]))
        return found

    def rows(self, number: int, index: Tensor) -> Tensor:
        """The rows of a weight that an index names, [*index, ...]."""
        weight = self.weights[number]
        with _disable_current_modes():
            wanted, back = torch.unique(index.detach().cpu(), return_inverse=True)
            if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < weight.shape[0]:
                raise InputMismatchError(
                    f"index out of range in {weight.name}, which has {weight.shape[0]:,} rows"
                )
            each = weight.count // weight.shape[0]
            rows = torch.empty((len(wanted), *weight.shape[1:]), dtype=weight.dtype)
            for place, row in enumerate(wanted.tolist()):
                weight.read(rows[place], row * each)
            self.rows_moved += rows.nbytes
            return rows.to(self.device)[back.to(self.device)]

    def is_own(self, tensor: Tensor) -> bool:
        """True if a tensor lies in the ring, whose memory is soon another weight's."""
        own = self._memory
        return own is not None and tensor.untyped_storage().data_ptr() == own.address


T = TypeVar("T")
_SIDE_BY_SIDE = threading.local()


class _SideBySide:
    """Tasks that wait for each other at every weight, so that one pass over the weights serves them all.

    Each has a thread, and one of them runs at a time: it has the `turn` until it asks for other weights than
    the `now`. Then the others come, and when all have asked, those that asked for the first ones go on.
    """

    def __init__(self, stream: WeightStream, count: int) -> None:
        self._place = {number: place for place, number in enumerate(stream.order)}
        self._asked: dict[int, tuple[int, ...]] = dict.fromkeys(range(count), ())
        self._changed = threading.Condition()
        self._now: tuple[int, ...] = ()
        self._turn = 0
        self.failed: list[BaseException] = []

    def wait(self, task: int, numbers: tuple[int, ...]) -> None:
        """Be asked for some weights by the task that has the turn; returns when it goes on."""
        with self._changed:
            if numbers != self._now:
                self._asked[task] = numbers
                self._pass_on()
                self._begin(task)
        if self.failed:
            raise CancelledError("another task failed, or the wait for them was interrupted")

    def begin(self, task: int) -> None:
        """Wait for the first turn of a task."""
        with self._changed:
            self._begin(task)

    def end(self, task: int) -> None:
        """Be told that a task is done."""
        with self._changed:
            del self._asked[task]
            self._pass_on()

    def _begin(self, task: int) -> None:
        self._changed.wait_for(lambda: self._turn == task)

    def _pass_on(self) -> None:
        if not self._asked:
            return
        if self._now not in self._asked.values():
            self._now = min(self._asked.values(), key=lambda one: [self._place.get(n, -1) for n in one])
        self._turn = next(task for task, numbers in self._asked.items() if numbers == self._now)
        self._changed.notify_all()


def side_by_side(stream: WeightStream | None, tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What tasks return. Where weights stream, one pass over them does all: each has a thread meanwhile.

    They run in turns, never two at a time, and hold what they compute with all the while.
    """
    if stream is None or len(tasks) < 2:
        return [task() for task in tasks]
    found: dict[int, T] = {}
    turns, grad = _SideBySide(stream, len(tasks)), torch.is_grad_enabled()

    def run(number: int) -> None:
        turns.begin(number)
        _SIDE_BY_SIDE.place = turns, number
        try:
            with torch.set_grad_enabled(grad):
                if not turns.failed:
                    found[number] = tasks[number]()
        except BaseException as error:  # noqa: BLE001  # it is raised by who waits for all
            turns.failed.append(error)
        finally:
            turns.end(number)

    threads = [helping(functools.partial(run, number)) for number in range(len(tasks))]
    for one in threads:
        one.start()
    try:
        for one in threads:
            one.join()
    except BaseException as error:  # interrupted: no task works on behind the caller's back
        turns.failed.append(error)
        for one in threads:
            one.join()
        raise
    if turns.failed:
        raise turns.failed[0]
    return [found[number] for number in range(len(tasks))]


class _Memory:
    """The memory of a ring, and what fills it: threads, and on a GPU pinned memory and a second stream."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.address = self.bytes.untyped_storage().data_ptr()
        self._is_cuda = device.type == "cuda"
        self._pool = ThreadPoolExecutor(THREADS if self._is_cuda else 2, "conewise-weights")
        self._own = threading.local()
        self._device = device
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]

    def at(self, place: int, weight: Weight) -> Tensor:
        """A weight in the ring."""
        place += 0 if self._is_cuda else weight.shift
        return self.bytes[place : place + weight.nbytes].view(weight.dtype).view(weight.shape)

    def mark(self) -> Any:
        """The work that is under way on the device; None where there is no waiting for it."""
        return torch.cuda.current_stream(self._device).record_event() if self._is_cuda else None

    def fill(self, weight: Weight, place: int, after: Any) -> Future[Any]:
        """Begin to fill a place; the result is what `wait` waits for."""
        out = self.at(place, weight).view(-1)
        step = max(1, PIECE_BYTES // weight.dtype.itemsize)
        starts = range(0, weight.count, step)
        whole: Future[Any] = Future()
        left, lock = [len(starts)], threading.Lock()

        def piece(first: int) -> None:
            try:
                self._piece(weight, out[first : first + step], first, after)
            except BaseException as error:  # noqa: BLE001  # it is raised where the weight is used
                with suppress(Exception):
                    whole.set_exception(error)
                return
            with lock:
                left[0] -= 1
                if not left[0] and not whole.done():
                    whole.set_result(None if self._stream is None else self._stream.record_event())

        for first in starts:
            self._pool.submit(piece, first)
        if not starts:
            whole.set_result(None)
        return whole

    def _piece(self, weight: Weight, out: Tensor, first: int, after: Any) -> None:
        if self._stream is None:
            weight.read(out, first)
            return
        room, copied = self._pinned()
        copied.synchronize()
        part = room[: out.nbytes].view(weight.dtype)
        weight.read(part, first)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            out.copy_(part, non_blocking=True)
        copied.record(self._stream)

    def _pinned(self) -> tuple[Tensor, Any]:
        """Pinned memory of this thread, and the event after which it is free."""
        known: list[Any] | None = getattr(self._own, "rooms", None)
        if known is None:
            torch.cuda.set_device(self._device)
            rooms = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            known = self._own.rooms = [
                (room, torch.cuda.Event())  # type: ignore[no-untyped-call]
                for room in rooms
            ]
        known.reverse()
        found: tuple[Tensor, Any] = known[0]
        return found

    def wait(self, coming: Future[Any]) -> None:
        """Wait until a place is filled; on a GPU, let the device wait."""
        ready = coming.result()
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)


# ------------------------------------------------------------------------------------------
# The weight as a tensor without memory.

_NATIVE = frozenset(
    {
        "__get__", "__set__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset",
        "is_floating_point", "is_complex", "is_contiguous", "element_size", "__len__", "requires_grad_",
        "get_device", "is_inference", "untyped_storage", "__hash__", "is_signed", "is_conj", "is_neg",
    }
)  # fmt: skip
"""Questions about a tensor that its shape, dtype and device answer."""


class Streamed(Tensor):
    """A weight of a stream, or a view of one: its shape, its strides and where it begins say which."""

    stream: WeightStream
    number: int

    @staticmethod
    def __new__(cls, stream: WeightStream, number: int, like: Tensor | None = None) -> Streamed:
        """`like` has the shape, strides and begin of a view; without it, it is the whole weight."""
        weight = stream.weights[number]
        if like is None:
            like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        made: Streamed = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=stream.device,
        )
        made.stream, made.number = stream, number
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _streamed, (self.stream, self.number, self.empty(), isinstance(self, nn.Parameter))

    def __deepcopy__(self, memo: Any) -> Any:
        return _streamed(self.stream, self.number, self, isinstance(self, nn.Parameter))

    @property
    def is_whole(self) -> bool:
        """True for a weight as it is stored, not a view of one."""
        return self.shape == self.stream.weights[self.number].shape and self.is_contiguous()

    def of(self, whole: Tensor) -> Tensor:
        """The same view of the whole weight."""
        begin = whole.storage_offset() + self.storage_offset()
        return whole if self.is_whole else whole.as_strided(self.shape, self.stride(), begin)

    def empty(self) -> Tensor:
        """The same view of a weight on the meta device."""
        weight = self.stream.weights[self.number]
        return self.of(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Streamed({self.stream.weights[self.number].name}, {tuple(self.shape)}, {self.dtype})"

    def on_host(self) -> Tensor:
        """The numbers on the CPU, past the ring."""
        weight = self.stream.weights[self.number]
        value = torch.empty(weight.shape, dtype=weight.dtype)
        weight.read(value.view(-1), 0)
        return self.of(value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        with torch._C.DisableTorchFunctionSubclass():
            if name in _NATIVE or torch.is_grad_enabled() or is_rehearsal():
                return func(*args, **(kwargs or {}))
            return _computed(func, name, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Autograd keeps the weight without memory, and asks for the numbers again on its way back.
        return _computed(func, func.overloadpacket.__name__, args, kwargs or {})


VIEWS = (REARRANGEMENTS - COPIES) | SELECTIONS
"""Operations that may show a weight in another way, without a copy."""


def _streamed(stream: WeightStream, number: int, like: Tensor | None, is_parameter: bool) -> Any:
    made = Streamed(stream, number, like)
    return nn.Parameter(made, requires_grad=stream.weights[number].trains) if is_parameter else made


def streamed_parameter(stream: WeightStream, number: int) -> nn.Parameter:
    """A weight of a stream, as a parameter of a module."""
    found: nn.Parameter = _streamed(stream, number, None, True)
    return found


def _computed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What an operation makes of the numbers of weights; views of weights are made when they are read."""
    leaves, spec = tree_flatten((args, kwargs))
    own = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, Streamed)]
    first = own[0][1]
    if name in {"detach", "alias"}:
        return Streamed(first.stream, first.number, first)
    if name.endswith("_") and not name.endswith("__") and leaves[0] is first and name != "requires_grad_":
        raise PatchError(
            f"{first.stream.weights[first.number].name} is streamed, and was to be written to ({name}): it "
            "stays in its file. Load the model without `weights='stream'` to change its weights."
        )
    if len(own) == 1 and first.is_whole and (found := _rows(name, args, kwargs, first)) is not None:
        return found
    if (
        len(own) == 1
        and name in _SHOWING
        and not any(isinstance(one, Tensor) for one in _others(leaves, own))
    ):
        leaves[own[0][0]] = empty = first.empty()
        given, options = tree_unflatten(leaves, spec)
        made = func(*given, **options)
        views, made_spec = tree_flatten(made)
        place = empty.untyped_storage()._cdata
        if all(one.untyped_storage()._cdata == place and one.dtype == empty.dtype for one in _tensors(made)):
            shown = [
                Streamed(first.stream, first.number, one) if isinstance(one, Tensor) else one for one in views
            ]
            return tree_unflatten(shown, made_spec)
        leaves[own[0][0]] = first
    stream = first.stream
    values = stream.held([leaf.number for _, leaf in own])
    for (place, leaf), whole in zip(own, values, strict=True):
        # A matrix that trains, and views of it, are multiplied otherwise, with gradients or without.
        value = whole.detach().requires_grad_(stream.weights[leaf.number].trains)
        leaves[place] = leaf.of(value)
    args, kwargs = tree_unflatten(leaves, spec)
    made = func(*args, **kwargs)
    return _kept(made, stream)


_SHOWING = frozenset({*VIEWS, "numpy_t", "t", "as_strided", "__getitem__", "unsafe_chunk", "unsafe_split"})


def _others(leaves: Sequence[Any], own: Sequence[tuple[int, Any]]) -> list[Any]:
    places = {place for place, _ in own}
    return [leaf for place, leaf in enumerate(leaves) if place not in places]


def _tensors(made: Any) -> list[Tensor]:
    return [one for one in tree_flatten(made)[0] if isinstance(one, Tensor)]


def _kept(made: Any, stream: WeightStream) -> Any:
    """The same with copies of what lies in the ring: another weight will lie there."""
    if not any(map(stream.is_own, _tensors(made))):
        return made
    leaves, spec = tree_flatten(made)
    found = [one.clone() if isinstance(one, Tensor) and stream.is_own(one) else one for one in leaves]
    return tree_unflatten(found, spec)


def _rows(name: str, args: Any, kwargs: Any, weight: Streamed) -> Tensor | None:
    """Rows of a weight where an operation reads no more of it: tokens of an embedding, rows by number."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    index: Any
    if name == "embedding":
        # torch.embedding takes the weight first, and the function of `nn` second.
        first = given.get(0) is weight
        index = given.get(1, given.get("indices")) if first else given.get(0, given.get("input"))
    elif name == "index_select" and given.get(1, given.get("dim")) == 0:
        index = given.get(2, given.get("index"))
    else:
        return None
    if not isinstance(index, Tensor) or given.get("max_norm") is not None:
        return None
    return weight.stream.rows(weight.number, index)


@contextmanager
def standing_in(module: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Let plain tensors stand for streamed weights, and for those that wrap others, while a module is traced.

    A trace reads shapes and strides, and no number: they all lie in the same memory. The result has the
    weights by the identities of what stands for them.
    """
    tables: list[dict[str, Any]] = [
        table for part in module.modules() for table in (part._parameters, part._buffers)
    ]
    held: list[tuple[dict[str, Any], str, Any]] = [
        (table, name, weight)
        for table in tables
        for name, weight in table.items()
        if isinstance(weight, Streamed) or is_wrapper(weight)
    ]
    wrapping = {id(weight): weight for _, _, weight in held if not isinstance(weight, Streamed)}
    rooms = {
        device: torch.empty(max(w.nbytes for w in wrapping.values()), dtype=torch.uint8, device=device)
        for device in {weight.device for weight in wrapping.values()}
    }
    made: dict[int, Tensor] = {}
    try:
        for table, name, weight in held:
            if id(weight) not in made:
                if isinstance(weight, Streamed):
                    room = weight.stream.room_of(weight.number)
                else:
                    flat = rooms[weight.device][: weight.numel() * weight.itemsize].view(weight.dtype)
                    room = torch.utils.dlpack.from_dlpack(flat.view(weight.shape))
                is_parameter = isinstance(weight, nn.Parameter)
                made[id(weight)] = nn.Parameter(room, weight.requires_grad) if is_parameter else room
            table[name] = made[id(weight)]
        yield {id(made[id(weight)]): weight for _, _, weight in held}
    finally:
        for table, name, weight in held:
            table[name] = weight


class Reads:
    """The streamed weights that steps of a program read; nothing where it has none.

    `moved` follows a ring through steps, and returns the bytes that it moves.
    """

    def __init__(self, program: Program) -> None:
        self._records = program.record_of
        self._own: dict[str, tuple[int, ...]] = {
            one.name: (one.value.number,) for one in program.sources if isinstance(one.value, Streamed)
        }
        streams = streams_of(one.value for one in program.sources)
        self.stream = streams[0] if streams else None
        if self.stream is not None:
            for record in program.records:
                if record.op in VIEWS and record.name not in program.varying and self._of(record.inputs):
                    self._own[record.name] = self._of(record.inputs)

    def _of(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple([number for name in names for number in self._own.get(name, ())])

    def at(self, node: str, names: Iterable[str] | None = None) -> tuple[int, ...]:
        """The weights that are moved for a node, which reads these names; rows of tables are not."""
        record = self._records[node]
        if record.op == "embedding" or node in self._own:
            return ()
        return self._of(record.inputs if names is None else names)

    def order(self, nodes: Iterable[str]) -> list[int]:
        """The weights in the order in which nodes first read them."""
        return list(dict.fromkeys(number for node in nodes for number in self.at(node)))

    def moved(self, groups: Iterable[Sequence[tuple[int, ...]]], *, as_program: bool = False) -> int:
        """The bytes that are moved for groups of steps, each of which begins with nothing in the ring.

        What is read ahead is what a group reads, or with `as_program` what the program does.
        """
        assert self.stream is not None
        ring = self.stream.ring.like()
        for steps in groups:
            ring.clear()
            ring.follow(self.stream.order if as_program else first_uses(steps))
            for numbers in steps:
                if numbers:
                    ring.want(numbers)
        return ring.moved


_READS: weakref.WeakKeyDictionary[Program, Reads] = weakref.WeakKeyDictionary()


def reads_of(program: Program) -> Reads:
    """The streamed weights that a program reads, found once."""
    if program not in _READS:
        _READS[program] = Reads(program)
    return _READS[program]


def first_uses(steps: Iterable[Sequence[int]]) -> list[int]:
    """The weights that steps read, in the order of their first use."""
    return list(dict.fromkeys(number for numbers in steps for number in numbers))


def streams_of(tensors: Iterable[object]) -> tuple[WeightStream, ...]:
    """The streams that some weights belong to."""
    return tuple(dict.fromkeys(one.stream for one in tensors if isinstance(one, Streamed)))
