"""The region behind a last-position demand: nodes of which only the last position has to be computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from conewise.frontends.torch.records import SIZES, Program, Record
from conewise.frontends.torch.rules import compile_rule
from conewise.frontends.torch.stacking import Layout

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

CLOSE = 1e-3
"""How far a row computed alone may lie from the same row computed among others, relative to the largest
value: far above rounding, far below what acting along the positions would do."""


def last_region(
    program: Program,
    layout: Layout,
    read: Callable[[str], Any],
    targets: Sequence[str],
    whole: Collection[str],
) -> frozenset[str]:
    """The nodes that lead to `targets` at the last position only, and can be computed there alone.

    Nodes of `whole` are left out. The region is tried on the baseline: where a row computed alone is not the
    row of the baseline, the region is given up.
    """
    readers: dict[str, list[Record]] = {}
    for record in program.records:
        for name in record.inputs:
            readers.setdefault(name, []).append(record)
    records = {record.name: record for record in program.records}
    region: set[str] = set()
    wanted: set[str] = set(targets)
    for record in reversed(program.records):
        name = record.name
        if name not in wanted:
            continue
        used_by = [reader for reader in readers.get(name, ()) if reader.name in wanted]
        is_last = (name in targets and layout.pos_dim.get(name) is not None) or (
            bool(used_by) and all(reader.name in region for reader in used_by) and name not in targets
        )
        can_be = record.op in ROW_WISE and name in layout.varying and name not in whole
        if (_takes_last(record, layout, read) and not is_last) or (is_last and can_be and _has_positions(record, layout, records)):
            region.add(name)
        wanted.update(record.inputs)
    return frozenset(region) if _holds(region, program, layout, read) else frozenset()


def _takes_last(record: Record, layout: Layout, read: Callable[[str], Any]) -> bool:
    """Whether the record is a slice that takes the last position of what it reads."""
    if record.op != "slice" or layout.pos_dim.get(record.name) is not None:
        return False
    source = record.inputs[0]
    if layout.pos_dim.get(source) is None or layout.pos_dim[source] == layout.batch_dim.get(source):
        return False
    return torch.equal(read(record.name), layout.last_row(source, read(source)))


def _has_positions(record: Record, layout: Layout, records: dict[str, Record]) -> bool:
    if record.shape is not None and layout.pos_dim.get(record.name) is None:
        return False
    return all(
        layout.pos_dim.get(name) is not None or records[name].shape is None
        for name in record.inputs
        if name in layout.varying and name in records
    )


def _holds(region: Collection[str], program: Program, layout: Layout, read: Callable[[str], Any]) -> bool:
    values: dict[str, Any] = {}
    for record in program.records:
        if record.name not in region:
            continue
        operands = []
        for name in record.inputs:
            if name == SIZES:
                operands.append(layout.sizes(1, last=True))
            elif name in values:
                operands.append(values[name])
            else:
                value = read(name)
                operands.append(layout.last_row(name, value) if isinstance(value, torch.Tensor) else value)
        try:
            value = compile_rule(record)(*operands)
        except (RuntimeError, TypeError, IndexError):
            return False
        values[record.name] = value
        if isinstance(value, torch.Tensor):
            whole = layout.last_row(record.name, read(record.name))
            if value.shape != whole.shape:
                return False
            scale = float(whole.abs().max()) if whole.numel() else 0.0
            if whole.is_floating_point() and float((value - whole).abs().max()) > CLOSE * max(scale, 1e-30):
                return False
    return True
