"""Chains of operations that one kernel computes: found in the program, used where nothing looks inside.

GELU is often written out as eight pointwise operations, each of which reads and writes the widest values of
the model. On a stack of worlds they are one, equal up to rounding. On CUDA so are norms and rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conewise.program.records import Program, Record, Ref
from conewise.program.rules import Rule
from conewise.sweeps.planning.shapes.norm_chains import NormChains
from conewise.sweeps.planning.shapes.rotary_chains import rotation_ending_in

CUBE, SCALE = 0.044715, 0.7978845608028654  # of the tanh approximation: √(2/π)


@dataclass(frozen=True, slots=True)
class Fusion:
    """`node` from `inputs` by one `rule`, without the nodes `inside`."""

    node: str
    inside: frozenset[str]
    inputs: tuple[str, ...]
    rule: Rule


def find_fusions(program: Program, device: torch.device) -> tuple[Fusion, ...]:
    """The chains of a program that one kernel of a device can compute, whatever reads them."""
    records = program.record_of
    found = [_tanh_gelu(record, records) for record in program.records]
    if device.type == "cuda":
        norms = NormChains(program)
        for record in program.records:
            chain = norms.ending_in(record) or rotation_ending_in(record, records)
            found.append(None if chain is None else Fusion(record.name, *chain))
    fusions = tuple(fusion for fusion in found if fusion is not None)
    return (
        fusions if len(program.devices) < 2 else tuple(one for one in fusions if _fits(one, program, device))
    )


def _fits(fusion: Fusion, program: Program, device: torch.device) -> bool:
    """Whether a chain is computed on one device, of the kind that it was looked for on."""
    where = {record.name: record.device for record in program.records}
    where |= {leaf.name: leaf.device for leaf in program.inputs}
    where |= {name: value.device for name, value in program.source_values.items()}
    (own, *others) = {where[name] for name in (fusion.node, *fusion.inside, *fusion.inputs)}
    return not others and own is not None and own.type == device.type


def fitting(
    fusions: Iterable[Fusion],
    steps: Mapping[str, Any],
    kept: Collection[str],
    readers: Callable[[str], Iterable[str]],
) -> dict[str, Fusion]:
    """Those that some steps (node: all that says how it is computed) can use, by the node that they compute.

    Nodes of `kept` are looked at. What is inside of a fusion is computed just as its last node is, and
    nothing else reads it.
    """
    fit = {}
    for fusion in fusions:
        how = steps.get(fusion.node)
        if how is None:
            continue
        alone = all(
            steps.get(node) == how
            and node not in kept
            and all(one == fusion.node or one in fusion.inside or one not in steps for one in readers(node))
            for node in fusion.inside
        )
        if alone:
            fit[fusion.node] = fusion
    return fit


def _tanh_gelu(record: Record, records: Mapping[str, Record]) -> Fusion | None:
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    inside: list[str] = []

    def operands(ref: Any, op: str, number: float | None) -> list[Ref] | None:
        """What the record at `ref` reads, if it is this operation, with this number."""
        found = records.get(ref.name) if isinstance(ref, Ref) else None
        if found is None or found.op != op or found.kwargs:
            return None
        numbers = [arg for arg in found.args if isinstance(arg, int | float)]
        if numbers != ([] if number is None else [number]):
            return None
        inside.append(found.name)
        return [arg for arg in found.args if isinstance(arg, Ref)]

    if record.op != "mul" or record.kwargs or len(record.args) != 2:
        return None
    if not all(isinstance(arg, Ref) for arg in record.args):
        return None
    for half, rest in (record.args, record.args[::-1]):
        inside.clear()
        read = operands(half, "mul", 0.5)
        one = operands(rest, "add", 1.0)
        bent = operands(one[0], "tanh", None) if one else None
        scaled = operands(bent[0], "mul", SCALE) if bent else None
        total = operands(scaled[0], "add", None) if scaled else None
        for first, second in (total, total[::-1]) if read and total and len(total) == 2 else ():
            before = len(inside)
            cube = operands(second, "mul", CUBE)
            power = operands(cube[0], "pow", 3.0) if cube else None
            if read and power and first == read[0] == power[0]:
                return Fusion(record.name, frozenset(inside), (first.name,), _gelu)
            del inside[before:]  # x itself may be such a product
    return None


def product_then_bias(record: Record) -> Rule | None:
    """The rule of a product with a bias; on CUDA the bias of a narrow one is added afterwards."""
    if record.kwargs or len(record.args) != 3 or len(record.inputs) != 3:
        return None
    if record.device is not None and record.device.type != "cuda":
        return _PRODUCTS.get(record.op)
    return {"addmm": _addmm, "linear": _linear}.get(record.op)


_PRODUCTS: dict[str, Rule] = {"addmm": torch.addmm, "linear": torch.nn.functional.linear}


def _addmm(bias: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda or bias.dim() != 1 or not _is_narrow(value, *weight.shape):
        return torch.addmm(bias, value, weight)
    return torch.mm(value, weight).add_(bias)


def _linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda or not _is_narrow(value, weight.shape[1], weight.shape[0]):
        return torch.nn.functional.linear(value, weight, bias)
    return torch.nn.functional.linear(value, weight).add_(bias)


def _is_narrow(value: torch.Tensor, inner: int, columns: int) -> bool:
    """Whether a device multiplies faster without a bias: on an H200 up to twice as fast."""
    rows = value.numel() // max(inner, 1)
    return columns <= 1024 and (inner > columns or rows <= 1024)


def _gelu(value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(value, approximate="tanh")
