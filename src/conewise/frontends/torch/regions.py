"""The region behind a last-position demand: nodes of which only the last position has to be computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from conewise.frontends.torch.records import SIZES, Program, Record, SizeRef
from conewise.frontends.torch.stacking import Layout, compile_stacked_rule, tolerance_of

# Operations that treat each position by itself, as long as they do not act along the positions.
ROW_WISE = frozenset(
    {
        "linear", "addmm", "mm", "matmul", "layer_norm", "rms_norm", "native_layer_norm",
        "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "exp", "square", "reciprocal",
        "mean", "sum", "gelu", "silu", "relu", "tanh", "sigmoid", "softplus", "clamp", "abs",
        "view", "reshape", "_unsafe_view", "to", "_to_copy", "type_as", "contiguous", "clone", "alias",
        "split", "split_with_sizes", "chunk", "getitem", "slice", "unsqueeze", "squeeze",
    }
)  # fmt: skip


def last_region(
    program: Program,
    layout: Layout,
    read: Callable[[str], Any],
    targets: Sequence[str],
    whole: Collection[str],
) -> frozenset[str]:
    """The nodes that lead to `targets` at the last position only, and can be computed there alone.

    Nodes of `whole` are left out. Each node of the region is tried on the baseline: where its last row,
    computed alone, is not that of the baseline, the node is left out too, and all that then leads elsewhere.
    """
    left_out = set(whole)
    while True:
        region = _leads_to_last(program, layout, read, targets, left_out)
        failing = set(_failing(region, program, layout, read))
        if not failing:
            return frozenset(region)
        left_out |= failing


def _leads_to_last(
    program: Program,
    layout: Layout,
    read: Callable[[str], Any],
    targets: Sequence[str],
    left_out: Collection[str],
) -> set[str]:
    readers: dict[str, list[str]] = {}
    for record in program.records:
        for name in record.inputs:
            readers.setdefault(name, []).append(record.name)
    records = {record.name: record for record in program.records}
    region: set[str] = set()
    wanted: set[str] = set(targets)
    for record in reversed(program.records):
        name = record.name
        if name not in wanted:
            continue
        wanted.update(record.inputs)
        if name in left_out:
            continue
        used_by = [reader for reader in readers.get(name, ()) if reader in wanted]
        if name in targets:
            is_last = layout.pos_dim.get(name) is not None and region.issuperset(used_by)
        else:
            is_last = bool(used_by) and region.issuperset(used_by)
        can_be = record.op in ROW_WISE and name in layout.varying and _has_positions(record, layout, records)
        if (is_last and can_be) or _takes_last(record, layout, read):
            region.add(name)
    return region


def _takes_last(record: Record, layout: Layout, read: Callable[[str], Any]) -> bool:
    """Whether the record is a slice that takes the last position, whatever reads it."""
    if record.op != "slice" or len(record.args) < 3 or layout.pos_dim.get(record.name) is not None:
        return False
    source, (dim, start) = record.inputs[0], record.args[1:3]
    if (
        source not in layout.varying
        or dim != layout.pos_dim.get(source)
        or dim == layout.batch_dim.get(source)
    ):
        return False
    if isinstance(start, SizeRef):
        start = layout.sizes(1)[start.index]
    length = read(source).shape[dim]
    return isinstance(start, int) and start % length == length - 1 and read(record.name).shape[dim] == 1


def _has_positions(record: Record, layout: Layout, records: dict[str, Record]) -> bool:
    if record.shape is not None and layout.pos_dim.get(record.name) is None:
        return False
    return all(
        layout.pos_dim.get(name) is not None or records[name].shape is None
        for name in record.inputs
        if name in layout.varying and name in records
    )


def _failing(
    region: Collection[str], program: Program, layout: Layout, read: Callable[[str], Any]
) -> Iterator[str]:
    """The nodes of the region whose last row, computed from last rows, is not the baseline's."""
    several: dict[str, Any] = {}
    for record in program.records:
        if record.name not in region:
            continue
        operands: list[Any] = []
        for name in record.inputs:
            if name == SIZES:
                operands.append(layout.sizes(1, last=True))
            elif name in several:
                operands.append(several[name])
            else:
                value = read(name)
                operands.append(layout.last_row(name, value) if isinstance(value, torch.Tensor) else value)
        try:
            value = compile_stacked_rule(record)(*operands)
        except (RuntimeError, TypeError, IndexError):
            yield record.name
            continue
        if not isinstance(value, torch.Tensor):
            several[record.name] = value
        elif not _close(value, layout.last_row(record.name, read(record.name))):
            yield record.name


def _close(row: torch.Tensor, whole: torch.Tensor) -> bool:
    if row.shape != whole.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(row, whole)
    scale = float(whole.abs().max()) if whole.numel() else 0.0
    return float((row - whole).abs().max()) <= tolerance_of(whole.dtype) * max(scale, 1e-30)
