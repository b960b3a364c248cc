"""From a program to a graph: a source for each leaf, a node for each record."""

from __future__ import annotations

from typing import Any

import torch

from conewise.program.records import SIZES, Program
from conewise.program.rules import compile_rule
from conewise.reactive.graph import Graph


def build_graph(program: Program) -> Graph:
    """The graph of `program`, under the program's own names.

    Parameters, buffers and constants are sources with their values; inputs and `SIZES` are
    sources without one, which each run sets. Demand under `torch.no_grad()`: the sources are the
    module's own tensors.
    """
    graph = Graph()
    for source in program.sources:
        graph.source(source.name, source.value, param=source.is_parameter)
    for leaf in program.inputs:
        graph.source(leaf.name)
    graph.source(SIZES)
    for record in program.records:
        graph.node(record.name, compile_rule(record), record.inputs)
    return graph


def run_sources(program: Program, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a run sets: its inputs and its sizes, by source name.

    Raises InputMismatchError when the shapes do not fit what was captured.
    """
    given = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    return {**inputs, SIZES: program.sizes.of(program.symbols_of(given))}


def bitwise_same(old: object, new: object) -> bool:
    """Whether two values are equal bit for bit: dtype, shape and every element, NaN equal to NaN."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.dtype != new.dtype or old.shape != new.shape or old.device != new.device:
            return False
        return torch.equal(_bits(old), _bits(new))
    if isinstance(old, tuple | list) and isinstance(new, tuple | list):
        return len(old) == len(new) and all(map(bitwise_same, old, new))
    return type(old) is type(new) and bool(old == new)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:
        # One element of a larger tensor counts as contiguous, whatever its stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
