"""Programs that are written by hand, of records over whole numbers: what plans them needs no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from conewise.program.records import SIZES, Dimensions, Input, Program, Record, Ref, SizeRef, Source
from conewise.program.sizes import Size, SizeTable
from conewise.program.walk import compile_rule

B, T = sympy.Symbol("b", integer=True, positive=True), sympy.Symbol("t", integer=True, positive=True)
"""The batch and the positions of a handmade program's inputs."""

WIDTH = 4


class Handmade:
    """A program that grows by one record after another; `sizes` numbers the sizes that it uses."""

    def __init__(self, **inputs: tuple[Size, ...]) -> None:
        self.sizes = SizeTable()
        self.records: list[Record] = []
        self.sources: list[Source] = []
        self.inputs = [Input(name, shape, torch.int64, torch.device("cpu")) for name, shape in inputs.items()]
        for leaf in self.inputs:
            self.sizes.bind(leaf.name, leaf.shape)

    def size(self, expression: Size) -> SizeRef:
        """A size that an operation is given."""
        return SizeRef(self.sizes.index(expression))

    def source(self, name: str, value: Tensor) -> Ref:
        """A weight."""
        self.sources.append(Source(name, value, is_parameter=True))
        return Ref(name)

    def record(
        self, name: str, target: Callable[..., Any], *args: Any, shape: tuple[Size, ...] | None
    ) -> Ref:
        """An operation."""
        self.records.append(Record(name, target, args, {}, shape=shape, dtype=torch.int64))
        return Ref(name)

    def program(self, *outputs: str, positions: frozenset[str] = frozenset({"t"})) -> Program:
        """The whole."""
        program = Program(
            tuple(self.records),
            tuple(self.sources),
            tuple(self.inputs),
            tuple(map(Ref, outputs)),
            tree_structure([0] * len(outputs)),
            self.sizes,
            (),
            "Handmade",
            dimensions=Dimensions(frozenset({"b"}), positions),
        )
        program.check()
        return program


def run_by_hand(
    program: Program,
    inputs: Mapping[str, Tensor],
    sizes: Sequence[int],
    change: Callable[[str, Any], Any] = lambda _, value: value,
) -> dict[str, Any]:
    """Every value, record after record; `change` may change each before anything reads it."""
    values: dict[str, Any] = {SIZES: sizes} | {source.name: source.value for source in program.sources}
    values |= {name: change(name, value) for name, value in inputs.items()}
    for record in program.records:
        value = compile_rule(record)(*(values[name] for name in record.inputs))
        values[record.name] = change(record.name, value)
    return values


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: sums and products of a few of them are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
