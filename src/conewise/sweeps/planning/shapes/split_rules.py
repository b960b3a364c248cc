"""Rules of products in bfloat16 parts, and the parts of a model's weights: made once, and kept."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from conewise.program.records import Program, Record
from conewise.program.rules import Rule
from conewise.program.split_products import (
    Arrangement,
    SplitWeight,
    split_factor,
    split_product,
    split_weight,
)
from conewise.sweeps.planning.shapes.splitting import factors_of

Tensor = torch.Tensor


class SplitWeights:
    """The parts of weights, by name. A weight with numbers that are not finite has none.

    The value that was multiplied last is kept in parts as well, for as long as it is there itself: queries,
    keys and values are made of one.
    """

    def __init__(self, program: Program) -> None:
        self._records, self._sources = program.record_of, program.source_values
        self._parts: dict[tuple[str, bool], SplitWeight | None] = {}
        self._last: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget the parts: the weights are others."""
        self._parts.clear()
        self.forget_value()

    def forget_value(self) -> None:
        """Forget the parts of the value that was multiplied last."""
        self._last.clear()

    @torch.no_grad()
    def prepare(self, nodes: Iterable[str]) -> None:
        """Split the weights that some products read: it waits for the device, and cannot be captured."""
        for node in nodes:
            self._of(self._records[node])

    def taken_by(self, nodes: Iterable[str]) -> int:
        """Bytes of the parts of the weights that some products read, once these are split."""
        found = {id(parts): parts for node in nodes if (parts := self._of(self._records[node])) is not None}
        return sum(one.parts.nbytes for one in found.values())

    def rule(self, record: Record) -> Rule | None:
        """The rule of a product in parts; None where its weight has none."""
        parts = self._of(record)
        if parts is None:
            return None
        if record.op == "addmm":
            return lambda bias, value, _: self._product(value, parts, bias)
        return lambda value, _, bias=None: self._product(value, parts, bias)

    @torch.no_grad()
    def _of(self, record: Record) -> SplitWeight | None:
        factors = factors_of(record)
        assert factors is not None, f"{record.name} is no product with a weight"
        key = factors.weight, factors.is_turned
        if key not in self._parts:
            weight = self._sources[factors.weight].detach()
            self._parts[key] = split_weight(weight.t() if factors.is_turned else weight)
        return self._parts[key]

    def _product(self, value: Tensor, weight: SplitWeight, bias: Tensor | None) -> Tensor:
        flat = value.reshape(-1, weight.inner)
        out = split_product(flat, weight, self._parts_of(value, flat, weight.arrangement))
        if bias is not None:
            out += bias
        return out.view(*value.shape[:-1], weight.columns)

    def _parts_of(self, value: Tensor, flat: Tensor, arrangement: Arrangement) -> Tensor | None:
        version, parts = self._last.get(value, (None, None))
        if version == value._version:
            return parts
        self.forget_value()  # before the next ones are made
        parts = split_factor(flat, arrangement)
        if parts is not None:
            self._last[value] = value._version, parts
        return parts
