"""The numbers of a sweep with what they cost, and their packing as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import accumulate
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import torch

from conewise.anatomy.selectors import Cell, Spread
from conewise.checks.recheck import CellCheck
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.planning.plan import SweepPlan

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_LARGEST = 2**63


def decoded(value: Any, expected: Any, where: str) -> Any:
    """Return `value` as the type `expected`: a number, a text, None, sequences, records, unions of these.

    A list becomes a tuple, an object the dataclass or the TypedDict, without the fields that are not known.
    Numbers are finite, and whole ones have 64 bits. Raises ValueError, which says `where`.
    """
    if expected is Any:
        return value
    if get_origin(expected) is Literal:
        return _literal(value, get_args(expected), where)
    if get_origin(expected) is Sequence:
        return _items(value, (*get_args(expected), Ellipsis), where)
    if get_origin(expected) in (Union, UnionType):
        return _one_of(value, get_args(expected), where)
    if get_origin(expected) is tuple:
        return _items(value, get_args(expected), where)
    if get_origin(expected) in (dict, Mapping):
        kind = get_args(expected)[1]
        items = _object(value, where).items()
        return {str(name): decoded(item, kind, f"{where}.{name}") for name, item in items}
    if is_dataclass(expected) or is_typeddict(expected):
        return _record(value, expected, where)
    return _plain(value, expected, where)


def _literal(value: Any, known: tuple[Any, ...], where: str) -> Any:
    if value not in known:
        raise ValueError(f"{where} is {value!r}, where {' or '.join(map(repr, known))} is expected")
    return value


def _plain(value: Any, expected: Any, where: str) -> Any:
    if expected is float and type(value) is int and abs(value) < _LARGEST:
        return float(value)
    if type(value) is not expected:
        raise ValueError(f"{where} is {_shown(value)}, where {_WORDS[expected]} is expected")
    if expected is float and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, where a finite number is expected")
    if expected is int and not -_LARGEST <= value < _LARGEST:
        raise ValueError(f"{where} is a number of {len(str(abs(value)))} digits")
    return value


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not NoneType]
    for kind in rest[:-1]:
        try:
            return decoded(value, kind, where)
        except ValueError:
            continue
    return decoded(value, rest[-1], where)


def _items(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {_shown(value)}, where a list is expected")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(decoded(item, kinds[0], f"{where}[{place}]") for place, item in enumerate(value))
    if len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} items, where {len(kinds)} are expected")
    return tuple(
        decoded(item, kind, f"{where}[{place}]")
        for place, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _record(value: Any, kind: Any, where: str) -> Any:
    value = _object(value, where)
    optional = {one.name for one in fields(kind) if _has_default(one)} if is_dataclass(kind) else set()
    hints, given = _hints(kind), {}
    for name, hint in hints.items():
        if name in value:
            given[name] = decoded(value[name], hint, f"{where}.{name}")
        elif name not in optional:
            raise ValueError(f"{where} has no {name}")
    return kind(**given)


def _has_default(one: Field[Any]) -> bool:
    return one.default is not MISSING or one.default_factory is not MISSING


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {_shown(value)}, where an object is expected")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _shown(value: Any) -> str:
    words = {**_WORDS, list: "a list", dict: "an object"}
    return words.get(type(value), type(value).__name__)


def packed(value: torch.Tensor) -> bytes:
    """The numbers of a float64 tensor. Raises TypeError for another dtype: nothing is rounded."""
    if value.dtype != torch.float64:
        raise TypeError(f"only float64 is packed, and this is {value.dtype}.")
    return value.detach().cpu().contiguous().numpy().astype("<f8", copy=False).tobytes()


def unpacked(data: bytes, shape: Sequence[int]) -> torch.Tensor:
    """A float64 tensor of `shape`. Raises ValueError when the bytes are more or fewer than it takes."""
    return torch.from_numpy(np.frombuffer(data, "<f8").reshape(tuple(shape)).astype(np.float64))


def from_rows(rows: Sequence[Sequence[float]] | Sequence[float]) -> torch.Tensor:
    """A float64 tensor of nested lists."""
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, slots=True)
class Missing:
    """Cells of a batch that could not be computed, by number and by name, and why."""

    batch: int
    cells: tuple[int, ...]
    names: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        some = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        count = f"{len(self.names)} cell{'s' if len(self.names) > 1 else ''}"
        return f"{count} of batch {self.batch} could not be computed ({some}): {self.why}"


@dataclass(frozen=True, eq=False)
class ResultData:
    """Values by cell, in the order of the sites.

    `table` is [metric, cell] in float64, averaged over prompts; `per_prompt` is [metric, cell, prompt].
    `base` and `source` are the metrics of the runs themselves, [metric], and `base_per_prompt` and
    `source_per_prompt` those of each prompt, [metric, prompt]; `source` is None where the values did not
    come from a run. `origin` is what they depend on; see `provenance`. `method` is empty where every value
    was computed in its world; else values are approximate, and it says by which method. `story` says what was
    asked, where that is known: the prompts with their tokens, the metric in words. `missing` are the cells
    that could not be computed where a fleet ran the sweep: their values are NaN.
    """

    plan: SweepPlan
    ledger: SweepLedger
    spreads: tuple[Spread, ...]
    metrics: tuple[str, ...]
    table: Tensor
    per_prompt: Tensor
    base: Tensor
    source: Tensor | None
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False)
    verification: CellCheck | None = None
    sweep: Any = field(default=None, repr=False)
    base_per_prompt: Tensor | None = None
    source_per_prompt: Tensor | None = None
    weights: Sums | None = field(default=None, repr=False)
    method: str = ""
    story: Any = field(default=None, repr=False)
    missing: tuple[Missing, ...] = ()

    @property
    def provenance(self) -> dict[str, Any]:
        """All that the numbers depend on, as plain values. The weights are hashed when it is first read."""
        return dict(self.origin)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell, in the order of the sites."""
        return tuple(cell for part in self.spreads for cell in part.cells)

    def parts(self) -> list[tuple[Spread, int]]:
        """The selectors' cells, and where each begins in the order of all cells."""
        starts = accumulate((len(spread.cells) for spread in self.spreads), initial=0)
        return list(zip(self.spreads, starts, strict=False))
