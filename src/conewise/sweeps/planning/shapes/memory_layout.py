"""How values lie in memory: which show another's, which a product has to copy; found without computing.

The program is walked with tensors that have shapes and strides, and no data. Where an operation cannot be
walked so, its value is taken for a new one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conewise.program.operations import ALLOCATING, ATTENTION, MAYBE_ALIASING, POINTWISE
from conewise.program.records import SIZES, Record
from conewise.sweeps.planning.shapes.layout import Layout, compile_stacked_rule

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """`aliases`: for each view the node (or source) whose memory it shares. `copied`: what products copy."""

    aliases: Mapping[str, str]
    copied: Mapping[str, tuple[str, ...]]

    def copies(self, node: str, patched: Collection[str]) -> Iterator[str]:
        """What a product has to copy first; where something is patched, values were put together anew."""
        for read in self.copied.get(node, ()):
            one: str | None = read
            while one is not None and one not in patched:
                one = self.aliases.get(one)
            if one is None:
                yield read


@torch.no_grad()
def memory_layout(layout: Layout, device: torch.device) -> MemoryLayout:
    """How the values of a program lie in memory, for runs of one shape."""
    program = layout.program
    values: dict[str, Any] = {source.name: _empty_like(source.value) for source in program.sources}
    sizes, symbols = program.sizes, layout.symbols

    def plain(shape: Any, dtype: torch.dtype | None) -> Any:
        numbers = tuple(sizes.value(size, symbols) for size in shape)
        return torch.empty(numbers, dtype=dtype, device=META)

    values |= {leaf.name: plain(leaf.shape, leaf.dtype) for leaf in program.inputs}
    values[SIZES] = layout.sizes(1)
    aliases: dict[str, str] = {}
    copied: dict[str, tuple[str, ...]] = {}
    for record in program.records:
        name = record.name
        if name not in layout.varying:
            values[name] = None if record.shape is None else plain(record.shape, record.dtype)
            continue
        reads = [values[read] for read in record.inputs]
        value = None
        if record.op == ATTENTION and record.shape is not None:
            value = _attended(plain(record.shape, record.dtype), device)
        elif all(read is not None for read in reads) and _may_be_strided(record, reads):
            value = _walked(record, reads)
        if value is None and record.shape is not None:
            value = plain(record.shape, record.dtype)
        values[name] = value
        own = _storages(value)
        for read, known in zip(record.inputs, reads, strict=True):
            if own & _storages(known):
                aliases[name] = read
        if record.op == "matmul" and len(reads) == 2:
            scattered = zip(record.inputs, map(_is_scattered, reads), strict=True)
            copied[name] = tuple(read for read, is_scattered in scattered if is_scattered)
    return MemoryLayout(aliases, copied)


def _walked(record: Record, reads: list[Any]) -> Any:
    try:
        return compile_stacked_rule(record)(*reads)
    except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
        return None


def _may_be_strided(record: Record, reads: list[Any]) -> bool:
    """Whether the value may be a view, or be laid out in memory otherwise than in its own order."""
    if record.op in ALLOCATING or any(isinstance(leaf, torch.device) for leaf in record.leaves()):
        return False
    return record.op not in POINTWISE or record.op in MAYBE_ALIASING or not all(map(_is_plain, reads))


def _is_scattered(value: Any) -> bool:
    """Whether the matrices of a value do not lie one behind the other: a product of many copies them."""
    if not isinstance(value, torch.Tensor) or value.dim() < 4:
        return False
    outer, inner = value.stride(0), value.stride(1)
    return value.shape[1] > 1 and outer != inner * value.shape[1]


def _is_plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.is_contiguous()


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
        out = torch.nn.functional.scaled_dot_product_attention(small, small, small, mask)
    except RuntimeError:
        return False
    return out.stride(1) < out.stride(2)


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    return set().union(*map(_storages, value)) if isinstance(value, tuple | list) else set()
