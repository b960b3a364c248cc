"""Positions: a sweep over (layer, position) in a stack of layers, counted in node-rows.

A node-row is what a node computes at one position. A patch at one position changes later rows alone where
attention is causal, and of the last layer only what a demand at the last position reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.theory.sweeps import Orientation, limit_ratio
from conewise.theory.weights import (
    Weight,
    answer_ratio,
    exact,
    expect_count,
    expect_flag,
    expect_number,
    expect_one_of,
    ratio,
    shown,
)

Rows = Literal["all", "last"]
_ROWS: Final[tuple[Rows, ...]] = ("all", "last")
Computed = Literal["row by row", "from the first on"]
_COMPUTED: Final[tuple[Computed, ...]] = ("row by row", "from the first on")


@dataclass(frozen=True, slots=True)
class RowStack:
    """A uniform stack of layers over positions, with a site at the end of each layer, at each position.

    docs/beyond-the-paper.md#positions. Of each layer, `keys` nodes are computed from one row of the stream
    and read by other rows (norm, keys, values), `queries` nodes are read by their own row alone, and `mixed`
    nodes, at least one, lie behind the attention, up to the layer's output. `terminal` nodes follow the last
    layer, row by row. With `causal`, a row reads the keys of its own position and of earlier ones; else of
    all. A demand is of "all" rows, or of the "last" one. What has to be `computed` is counted "row by row";
    a wavefront computes "from the first on": each node that changes at all rows from the first that does, or
    at the last one if it lies behind every attention and no other is wanted.
    """

    layers: int
    positions: int
    keys: int
    queries: int
    mixed: int
    terminal: int = 1
    causal: bool = True

    def __post_init__(self) -> None:
        least = {"layers": 1, "positions": 1, "keys": 1, "queries": 0, "mixed": 1, "terminal": 1}
        for name, count in least.items():
            object.__setattr__(self, name, expect_count(getattr(self, name), f"`{name}`", count))
        object.__setattr__(self, "causal", expect_flag(self.causal, "`causal`"))

    @property
    def layer(self) -> int:
        """M: the nodes of a layer."""
        return self.keys + self.queries + self.mixed

    def full(self, demand: Rows = "last") -> int:
        """N: the node-rows of a full run; for the last row, those of the last layer's keys and of one row."""
        T, before = self.positions, (self.layers - 1) * self.layer * self.positions
        if is_last(demand):
            return before + self.keys * T + self.queries + self.mixed + self.terminal
        return before + (self.layer + self.terminal) * T

    def cost(
        self, layer: int, position: int, demand: Rows = "last", *, computed: Computed = "row by row"
    ) -> int:
        """The node-rows that a patch at the end of `layer`, at `position`, makes stale; both count from 0.

        The next layer is computed at one row up to its attention, and behind it at R rows: those from the
        position on, or all where attention is not causal; each layer after that at R rows.
        """
        i, t = expect_count(layer, "the layer", 0), expect_count(position, "the position", 0)
        if i >= self.layers or t >= self.positions:
            raise TheoryError(
                f"layer {shown(i)} at position {shown(t)}: there are {shown(self.layers)} layers and "
                f"{shown(self.positions)} positions, both counted from 0."
            )
        R = self.positions - t if self.causal else self.positions
        wants_last, is_end = is_last(demand), t == self.positions - 1
        behind = self.layers - 1 - i
        if not is_row_by_row(computed):
            return self._from_the_first(behind, self.positions - t, R, wants_last)
        if behind == 0:
            return self.terminal * (is_end or not wants_last)
        if not wants_last:
            return self.keys + self.queries + (self.mixed + (behind - 1) * self.layer + self.terminal) * R
        if behind == 1:
            return self.keys + self.queries * is_end + self.mixed + self.terminal
        end = self.queries + self.mixed + self.terminal
        return self.keys + self.queries + (self.mixed + (behind - 2) * self.layer + self.keys) * R + end

    def _from_the_first(self, behind: int, own: int, R: int, wants_last: bool) -> int:
        """The same from the first row on: `own` rows up to the next attention, R rows behind it."""
        before, b, e, M = self.keys + self.queries, self.mixed, self.terminal, self.layer
        if not wants_last:
            return before * own + (b + (behind - 1) * M + e) * R if behind else e * own
        if behind == 0:
            return e
        # The last attention is computed at as many rows as its keys, what lies behind it at one.
        deep = (b + (behind - 2) * M + before) * R if behind > 1 else 0
        return before * own + deep + R + b - 1 + e

    def sweep(self, demand: Rows = "last", first: int = 0, *, computed: Computed = "row by row") -> int:
        """The node-rows of a sweep over all layers, and all positions from `first` on, in closed form.

        `first` is where base and source begin to differ: a patch before it changes nothing.
        """
        L, S = self.layers, self.positions - self._expect_first(first)
        Q = S * (S + 1) // 2 if self.causal else S * self.positions
        k, q, b, e, M = self.keys, self.queries, self.mixed, self.terminal, self.layer
        wants_last, own = is_last(demand), S * (S + 1) // 2
        if not is_row_by_row(computed):
            if not wants_last:
                deep = (L - 1) * ((k + q) * own + (b + e) * Q) + M * Q * ((L - 1) * (L - 2) // 2)
                return deep + e * own
            deep = (L - 1) * ((k + q) * own + Q + (b - 1 + e) * S) + e * S
            between = (b + k + q) * (L - 2) + M * ((L - 2) * (L - 3) // 2) if L > 1 else 0
            return deep + between * Q
        if not wants_last:
            return (L - 1) * ((k + q) * S + (b + e) * Q) + M * Q * ((L - 1) * (L - 2) // 2) + e * S
        if L == 1:
            return e
        deep = (L - 2) * ((k + q) * S + (b + k) * Q + (q + b + e) * S) + M * Q * ((L - 2) * (L - 3) // 2)
        return deep + (k + b + e) * S + q + e

    def ratio(self, demand: Rows = "last", first: int = 0, *, computed: Computed = "row by row") -> Fraction:
        """ρ: a full run for each site, over the sweep."""
        sites = self.layers * (self.positions - self._expect_first(first))
        return Fraction(sites * self.full(demand), self.sweep(demand, first, computed=computed))

    def _expect_first(self, first: object) -> int:
        found = expect_count(first, "`first`", 0)
        if found >= self.positions:
            raise TheoryError(
                f"`first` is {shown(found)}, and the positions are 0 to {shown(self.positions - 1)}: base "
                "and source differ somewhere."
            )
        return found


def position_limit(
    q: Weight = 0, profile: Orientation = "output-heavy", *, shared: Weight = 0, causal: bool = True
) -> Fraction | float:
    """The limit of ρ over layers and positions, as both grow: 2 · `limit_ratio(q)` / (1 − shared).

    docs/beyond-the-paper.md#positions. 4 for the uniform profile, for either demand. `shared` is the part of
    the positions at which base and source agree, from the first on. Where attention is not causal every row
    behind a patch changes, and the limit is that of whole nodes, whatever is shared.
    """
    whole, part = limit_ratio(q, profile), expect_number(shared, "`shared`")
    if not 0 <= part < 1:
        raise TheoryError(f"`shared` is {shown(part)}; it is a part of the positions, from 0 to below 1.")
    if not expect_flag(causal, "`causal`"):
        return whole
    is_float = isinstance(whole, float) or isinstance(part, float)
    return answer_ratio(ratio(2 * Fraction(exact(whole)), 1 - exact(part)), is_float)


def is_last(demand: object) -> bool:
    """Whether a demand is of the last row."""
    return expect_one_of(demand, _ROWS, "the demand") == "last"


def is_row_by_row(computed: object) -> bool:
    """Whether only what has to be computed is counted."""
    return expect_one_of(computed, _COMPUTED, "`computed`") == "row by row"
