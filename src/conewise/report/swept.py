"""What a page needs of a sweep's result, to be read only.

`Result` has all of it. Pages do not import results: results know of pages, so that each can write its own.
"""

# ruff: noqa: D102  # what each property is, `Result`, `SweepPlan` and `SweepLedger` say

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from conewise.checks.cell_check import CellCheck
from conewise.locations.selectors import Cell, Spread
from conewise.program.tensors import Tensor


class Planned(Protocol):
    """What a sweep was to compute, as `SweepPlan` says it."""

    @property
    def worlds(self) -> int: ...

    @property
    def node_evaluations(self) -> int: ...

    @property
    def full_evaluations(self) -> int: ...

    @property
    def launches(self) -> int: ...

    @property
    def flops(self) -> int: ...

    @property
    def full_flops(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def chunks(self) -> Sequence[int]: ...

    @property
    def evaluator(self) -> str: ...

    @property
    def why(self) -> str: ...

    @property
    def seconds(self) -> float | None: ...

    @property
    def ratio(self) -> float: ...


class Measured(Protocol):
    """What it took, as `SweepLedger` counted it."""

    @property
    def node_evaluations(self) -> int: ...

    @property
    def launches(self) -> int: ...

    @property
    def resumed(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def peak_bytes(self) -> int | None: ...

    @property
    def reserved_bytes(self) -> int | None: ...

    @property
    def phases(self) -> Mapping[str, float]: ...


class Swept(Protocol):
    """A result: the metric in every cell, what it cost, and where it comes from."""

    @property
    def plan(self) -> Planned: ...

    @property
    def ledger(self) -> Measured: ...

    @property
    def spreads(self) -> tuple[Spread, ...]: ...

    @property
    def cells(self) -> tuple[Cell, ...]: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    @property
    def table(self) -> Tensor: ...

    @property
    def per_prompt(self) -> Tensor: ...

    @property
    def base(self) -> Tensor: ...

    @property
    def source(self) -> Tensor | None: ...

    @property
    def base_per_prompt(self) -> Tensor | None: ...

    @property
    def source_per_prompt(self) -> Tensor | None: ...

    @property
    def provenance(self) -> Mapping[str, Any]: ...

    @property
    def verification(self) -> CellCheck | None: ...

    @property
    def method(self) -> str: ...

    def parts(self) -> list[tuple[Spread, int]]: ...
