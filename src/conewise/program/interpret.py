"""Run a program record by record, without an engine: the reference that a world must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from conewise.program.build import run_sources
from conewise.program.records import SIZES, Program
from conewise.program.rules import Rule, compile_rule
from conewise.program.streaming import assembled


class Interpreter:
    """The rules of a program, compiled once, and the loop over them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._steps: list[tuple[str, Rule, tuple[str, ...]]] = [
            (record.name, compile_rule(record), record.inputs) for record in program.records
        ]

    @torch.no_grad()
    def values(
        self,
        inputs: Mapping[str, torch.Tensor],
        patches: Mapping[str, Any] | None = None,
        edits: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> dict[str, Any]:
        """Every value of a run: sources, inputs, sizes and records, by name.

        A name in `patches` has that value in place of its own; one in `edits` has what the function makes
        of the value that it would have had.
        """
        values: dict[str, Any] = dict(self.program.source_values)
        values.update(run_sources(self.program, dict(inputs)))
        for name in edits or ():
            if name in values:
                values[name] = edits[name](values[name])  # type: ignore[index]
        for name, rule, names in self._steps:
            if patches and name in patches:
                values[name] = patches[name]
            else:
                values[name] = rule(*[values[i] for i in names])
            if edits and name in edits:
                values[name] = edits[name](values[name])
        return values

    def output(self, values: Mapping[str, Any]) -> Any:
        """The module's output, in its own structure."""
        return assembled(self.program, values, values[SIZES])
