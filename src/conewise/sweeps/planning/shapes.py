"""Facts about all runs of one shape: where dimensions lie, what values cost, how they lie in memory.

Found once for each model and shape, and kept: a new pair of prompts finds all of it.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides

from conewise.anatomy.attention import attention_argument
from conewise.program.records import (
    ALLOCATING,
    ATTENTION,
    MAYBE_ALIASING,
    POINTWISE,
    SIZES,
    Program,
    Record,
    Ref,
)
from conewise.program.tensors import without_cudnn_attention
from conewise.program.walk import Rule
from conewise.sweeps.planning.costs import Costs
from conewise.sweeps.planning.fusing import Fusion
from conewise.sweeps.planning.independence import Trial
from conewise.sweeps.planning.layout import Layout, compile_stacked_rule
from conewise.sweeps.planning.regions import Mask, Masks, RegionFinder, masks_of, read_masks

# Layout of values in memory: which show another's, which a product has to copy; found without computing.
#
# The program is walked with tensors that have shapes and strides, and no data: each operation once for reads
# that lie alike, so that of equal layers one is walked. Where an operation cannot be walked so, its value is
# taken for a new one.

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """`aliases`: for each view the node (or source) whose memory it shares. `copied`: what products copy."""

    aliases: Mapping[str, str]
    copied: Mapping[str, tuple[str, ...]]

    def copies(self, node: str, patched: Collection[str]) -> Iterator[str]:
        """Yield what a product copies first; where something is patched, values were put together anew."""
        for read in self.copied.get(node, ()):
            one: str | None = read
            while one is not None and one not in patched:
                one = self.aliases.get(one)
            if one is None:
                yield read


@torch.no_grad()
def memory_layout(layout: Layout, device: torch.device) -> MemoryLayout:
    """Return how the values of a program lie in memory, for runs of one shape on this device.

    A record that says on which device it is computed is laid out as on that one.
    """
    program, walk = layout.program, _Walk(layout, device)
    values: dict[str, _Value | None] = {one.name: walk.new(one.value) for one in program.sources}
    values |= {leaf.name: walk.plain(leaf.name, leaf.dtype) for leaf in program.inputs}
    values[SIZES] = walk.sizes
    aliases: dict[str, str] = {}
    copied: dict[str, tuple[str, ...]] = {}
    for record, way, rule in _ways_of(program):
        name, reads = record.name, [values[read] for read in record.inputs]
        values[name] = value = walk.value(record, way, rule, reads)
        if way == CONSTANT:
            continue
        if value is not None and value.is_walked:
            for read, known in zip(record.inputs, reads, strict=True):
                if known is not None and not set(known.memory).isdisjoint(value.memory):
                    aliases[name] = read
        if record.op == "matmul" and len(reads) == 2:
            scattered = zip(record.inputs, map(walk.is_scattered, reads), strict=True)
            copied[name] = tuple(read for read, is_scattered in scattered if is_scattered)
    return MemoryLayout(aliases, copied)


CONSTANT, ATTENDED, NEW, POINT, WALKED = "constant", "attended", "new", "pointwise", "walked"
"""Layouts of a record's value: as attention lays it out, newly, newly unless what it reads is strided, or
as the operation says."""

_WAYS: weakref.WeakKeyDictionary[Program, list[tuple[Record, str, Rule]]] = weakref.WeakKeyDictionary()


def _ways_of(program: Program) -> list[tuple[Record, str, Rule]]:
    """The records of a program, how the value of each lies, and what computes it; found once."""
    if program not in _WAYS:
        varying = program.varying
        _WAYS[program] = [
            (record, _way(record) if record.name in varying else CONSTANT, compile_stacked_rule(record))
            for record in program.records
        ]
    return _WAYS[program]


def _way(record: Record) -> str:
    if record.op == ATTENTION and record.shape is not None:
        return ATTENDED
    if record.op in ALLOCATING or any(isinstance(leaf, torch.device) for leaf in record.leaves()):
        return NEW
    return POINT if record.op in POINTWISE and record.op not in MAYBE_ALIASING else WALKED


@dataclass(slots=True)
class _Value:
    """A value without data: the number of how it lies, and the memory of its tensors, in order.

    Those that were not walked are new.
    """

    lies: int
    memory: tuple[int, ...] = ()
    is_walked: bool = False


Lie = tuple[Any, ...]
"""Layout of a value: a tensor's shape, strides and dtype; several such; a plain value."""


class _Walk:
    """One walk over a program. How values lie is numbered, memory too; equal numbers are equal."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._lies: list[Lie] = []
        self._numbers: dict[Hashable, int] = {}
        self._strided: set[int] = set()
        self._walked: dict[Hashable, tuple[int, tuple[tuple[int, int], ...]] | None] = {}
        self._plain: dict[Hashable, int] = {}
        self._memory = 0
        self.sizes = _Value(self._number(("plain", tuple, layout.sizes(1))))

    def value(self, record: Record, way: str, rule: Rule, reads: Sequence[_Value | None]) -> _Value | None:
        """The value of a record, given what it reads."""
        found = None
        if way == ATTENDED:
            shape = self._layout.shape(record.name)
            assert shape is not None
            out = torch.empty(shape, dtype=record.dtype, device=META)
            found = self.new(_attended(out, record.device or self._device))
        elif way in {POINT, WALKED} and None not in reads:
            known = [read for read in reads if read is not None]
            if way == POINT and any(read.lies in self._strided for read in known):
                found = self._pointwise(record, known)
            if found is None and (way == WALKED or any(read.lies in self._strided for read in known)):
                found = self._result(rule, known)
        return found if found is not None else self.plain(record.name, record.dtype)

    def new(self, tensor: torch.Tensor) -> _Value:
        """A tensor that shares no memory with the others."""
        return _Value(self._lie(tensor), (self._fresh(),))

    def plain(self, name: str, dtype: torch.dtype | None) -> _Value | None:
        """A new value in its own order; None where it is no tensor."""
        shape = self._layout.shape(name)
        if shape is None:
            return None
        key = shape, dtype
        if key not in self._plain:
            self._plain[key] = self._lie(torch.empty(shape, dtype=dtype, device=META))
        return _Value(self._plain[key], (self._fresh(),))

    def is_scattered(self, value: _Value | None) -> bool:
        """True if the matrices of a value do not lie one behind the other: a product of many copies them."""
        kind, *lie = self._lies[value.lies] if value is not None else ("",)
        if kind != "tensor" or len(lie[0]) < 4:
            return False
        shape, strides, _ = lie
        return bool(shape[1] > 1 and strides[0] != strides[1] * shape[1])

    def _pointwise(self, record: Record, reads: Sequence[_Value]) -> _Value | None:
        """Return the value of a pointwise operation, whose order in memory is that of what it reads.

        An operation on tensors without data would import half of torch for it, which takes half a second.
        """
        shape = self._layout.shape(record.name)
        if shape is None or record.dtype is None:
            return None
        key = (shape, record.dtype, *(read.lies for read in reads))
        if key not in self._plain:
            given = [one for read in reads for one in _tensors(self._made(read.lies))]
            try:
                strides = compute_elementwise_output_strides(*(one.expand(shape) for one in given))
            except RuntimeError:
                return None
            self._plain[key] = self._lie(torch.empty_strided(shape, strides, dtype=record.dtype, device=META))
        return _Value(self._plain[key], (self._fresh(),), is_walked=True)

    def _result(self, rule: Rule, reads: Sequence[_Value]) -> _Value | None:
        """Return what a rule makes of values that lie so; None where that takes computing."""
        key = (rule, *(read.lies for read in reads))
        if key not in self._walked:
            self._walked[key] = self._walk(rule, [self._made(read.lies) for read in reads])
        found = self._walked[key]
        if found is None:
            return None
        lies, shared = found
        fresh: dict[int, int] = {}
        memory = []
        for read, tensor in shared:
            if read >= 0:
                memory.append(reads[read].memory[tensor])
            else:
                memory.append(fresh[tensor] if tensor in fresh else fresh.setdefault(tensor, self._fresh()))
        return _Value(lies, tuple(memory), is_walked=True)

    def _walk(self, rule: Rule, given: Sequence[Any]) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """Return how the result lies, and whose memory each of its tensors has: a read's, or a new one."""
        try:
            result = rule(*given)
            lies = self._lie(result)
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
            return None
        owner = {
            _storage(tensor): (read, place)
            for read, one in enumerate(given)
            for place, tensor in enumerate(_tensors(one))
        }
        shared = []
        for tensor in _tensors(result):
            storage = _storage(tensor)
            shared.append(owner.setdefault(storage, (-1, len(owner))))
        return lies, tuple(shared)

    def _made(self, number: int) -> Any:
        """A value that lies so, with memory of its own."""
        kind, *lie = self._lies[number]
        if kind == "plain":
            return lie[1]
        if kind == "several":
            return lie[0](self._made(one) for one in lie[1])
        shape, strides, dtype = lie
        return torch.empty_strided(shape, strides, dtype=dtype, device=META)

    def _lie(self, value: Any) -> int:
        if isinstance(value, torch.Tensor):
            number = self._number(("tensor", tuple(value.shape), value.stride(), value.dtype))
            if not value.is_contiguous():
                self._strided.add(number)
            return number
        if type(value) in {tuple, list}:
            return self._number(("several", type(value), tuple(self._lie(one) for one in value)))
        return self._number(("plain", type(value), value))

    def _number(self, lie: Lie) -> int:
        if lie not in self._numbers:
            self._numbers[lie] = len(self._lies)
            self._lies.append(lie)
        return self._numbers[lie]

    def _fresh(self) -> int:
        self._memory += 1
        return self._memory


def _attended(out: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A value of attention as this device lays it out: some kernels put the heads inside the positions."""
    if out.dim() != 4 or not _heads_are_inside(device, out.dtype):
        return out
    return torch.empty_like(out.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@functools.lru_cache(maxsize=16)
def _heads_are_inside(device: torch.device, dtype: torch.dtype) -> bool:
    small = torch.zeros(2, 2, 3, 8, device=device, dtype=dtype)
    mask = torch.ones(2, 1, 3, 3, device=device, dtype=torch.bool)
    try:
        with without_cudnn_attention(device):
            out = torch.nn.functional.scaled_dot_product_attention(small, small, small, mask)
    except RuntimeError:
        return False
    return out.stride(1) < out.stride(2)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


# ------------------------------------------------------------------------------------------
# What operations take beside their values while they run: fused attention is the one that takes much.

QUERIES = ((768, 256), (192, 64), (0, 32))
"""The tiles of the CPU's kernel: the least number of queries, and the queries of a tile then."""
KEYS = 512
"""The keys of a tile of the CPU's kernel."""


class Workspace:
    """Bytes that operations take beside their values, for runs of one shape.

    `rows` is how many positions of a value are computed, None for all; `is_causal` says of a mask that it
    hides just what comes later.
    """

    def __init__(self, layout: Layout, costs: Costs, device: torch.device) -> None:
        self._layout, self._costs, self._device = layout, costs, device
        self._attention = {r.name: r for r in layout.program.records if r.op == ATTENTION}

    def each(self, name: str, rows: int | None, is_causal: Callable[[str], bool]) -> int:
        """For each world that is computed."""
        record = self._attention.get(name)
        if record is None:
            return 0
        query, key, value = (self._shape(record, place, rows if place == 0 else None) for place in range(3))
        size, counted = self._costs.itemsize(name), math.prod(query[:-1])
        taken = counted * max(size, 4)  # the logarithms of the sums, that a gradient would read
        if record.kwargs.get("enable_gqa"):
            taken += 2 * size * math.prod(query[:-2]) * math.prod(key[-2:])  # keys and values, repeated
        if len(query) != 4 or query[-1] != value[-1]:
            # No fused kernel: scores before and after their softmax, queries and keys scaled.
            taken += size * (2 * counted * key[-2] + math.prod(query) + math.prod(key))
        mask = self._mask(record, rows, is_causal)
        if mask is not None and self._layout.batch_dim.get(mask) is not None:
            taken += size * self._costs.elements(mask, rows=rows)
        return taken

    def fixed(self, name: str, rows: int | None, is_causal: Callable[[str], bool]) -> int:
        """For all worlds together, however many."""
        record = self._attention.get(name)
        if record is None:
            return 0
        size, taken = self._costs.itemsize(name), 0
        query, key = self._shape(record, 0, rows), self._shape(record, 1, None)
        mask = self._mask(record, rows, is_causal)
        if mask is not None and self._layout.batch_dim.get(mask) is None:
            taken += size * self._costs.elements(mask, rows=rows)
        if rows is not None and attention_argument(record, "is_causal"):
            taken += size * query[-2] * key[-2]
        if (record.device or self._device).type == "cpu" and len(query) == 4:
            queries = min(query[-2], next(tile for least, tile in QUERIES if query[-2] >= least))
            keys = min(key[-2], KEYS)
            tile = max(size, 4) * queries * (keys + 2 + query[-1]) + (
                size * queries * keys if size < 4 else 0
            )
            taken += torch.get_num_threads() * tile
        return taken

    def _mask(self, record: Record, rows: int | None, is_causal: Callable[[str], bool]) -> str | None:
        """The mask of booleans that is turned into numbers to be added; None where there is none."""
        mask = attention_argument(record, "attn_mask")
        if not isinstance(mask, Ref) or self._costs.itemsize(mask.name) != 1:
            return None
        if rows is None and mask.name not in self._layout.varying:
            return None if is_causal(mask.name) else mask.name
        return mask.name

    def _shape(self, record: Record, place: int, rows: int | None) -> tuple[int, ...]:
        given = record.args[place]
        shape = self._costs.shape(given.name, rows=rows) if isinstance(given, Ref) else None
        return shape or (1, 1)


# ------------------------------------------------------------------------------------------
# All of it.


class ShapeFacts:
    """The facts of one shape. `fusions` are chains that one kernel of the device computes."""

    def __init__(
        self,
        program: Program,
        symbols: dict[str, int],
        device: torch.device,
        fusions: tuple[Fusion, ...],
    ) -> None:
        self.program, self.device, self.fusions = program, device, fusions
        self.layout = Layout(program, symbols)
        self.costs = Costs(program, self.layout)
        self.finder = RegionFinder(self.layout)
        self.records = program.record_of
        self._narrow_costs: dict[tuple[tuple[str, int], ...], Costs] = {}
        self._masks = masks_of(program)
        self._constant_masks: dict[str, Mask] | None = None
        self._independent: dict[str, bool] = {}

    def device_of(self, node: str) -> torch.device:
        """Return the device on which the value of a node lies."""
        return self.records[node].device or self.device

    @cached_property
    def memory_layout(self) -> MemoryLayout:
        """The values that share memory, and those that a product has to copy."""
        return memory_layout(self.layout, self.device)

    def narrow_costs(self, columns: Mapping[str, int]) -> Costs:
        """Costs where only so many columns of some nodes are computed."""
        key = tuple(columns.items())
        if not key:
            return self.costs
        if key not in self._narrow_costs:
            wanted = {node: range(count) for node, count in columns.items()}
            self._narrow_costs[key] = Costs(self.program, self.layout, wanted)
        return self._narrow_costs[key]

    def workspace(self, costs: Costs) -> Workspace:
        """Return the bytes that operations take beside their values."""
        return Workspace(self.layout, costs, self.device)

    def masks(self, read: Callable[[str], Any]) -> Masks:
        """Return what the masks hide in a run whose values `read` gives; constant ones are read once."""
        if not self._masks:
            return {}
        varying = tuple(name for name in self._masks if name in self.layout.varying)
        if self._constant_masks is None:
            constant = tuple(name for name in self._masks if name not in self.layout.varying)
            self._constant_masks = read_masks(constant, read)
        return {**self._constant_masks, **read_masks(varying, read)} if varying else self._constant_masks

    def forget_values(self) -> None:
        """Forget what was found with other weights: what was tried, and what masks among them hide."""
        self._independent.clear()
        self._constant_masks = None

    def mixing(self, nodes: tuple[str, ...], read: Callable[[str], Any]) -> str:
        """The first of `nodes` that mixes the rows of the batch; empty where none does.

        Most are known from their kinds; the others are tried once, on the values of a run.
        """
        trial: Trial | None = None
        for node in nodes:
            if node not in self._independent:
                trial = trial or Trial(self.layout, read)
                self._independent[node] = trial.is_batch_independent(node)
            if not self._independent[node]:
                return node
        return ""
