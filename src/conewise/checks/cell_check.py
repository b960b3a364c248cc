"""The verdict on cells of a result: how far they are from full forwards of the module, and may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from conewise.markup import verdict


@dataclass(frozen=True, slots=True)
class CellCheck:
    """Cells of a result against plain full forwards of the original module, with hooks.

    `hooked` cells were run again by the module itself. The sites of the `interpreted` ones lie at no boundary
    of a module, so that the captured operations were all run again, one by one, without an engine: they do
    not show that the program itself is right. `largest_deviation` is from these forwards.

    `relative` has to be at most `tolerance`; both are shares of the metric's largest value. With a
    `reference`, the module in that higher precision, `relative` is the result's distance from it, or from the
    module's own forwards where that is larger, and `own_error` is that of these forwards from the reference;
    else it is the largest deviation. `unchecked` says why there is no reference where there has to be one,
    and is empty otherwise.
    """

    cells: int
    hooked: int
    interpreted: int
    largest_deviation: float
    relative: float
    tolerance: float
    own_error: float | None = None
    reference: str = ""
    unchecked: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was found to be wrong; `passed` says whether the module itself says so."""
        return self.relative <= self.tolerance and not self.unchecked

    @property
    def excess(self) -> float:
        """How much more was found than is allowed, as a factor; 0 where nothing was found."""
        return self.relative / self.tolerance if self.tolerance else math.inf if self.relative else 0.0

    @property
    def passed(self) -> bool:
        """Whether every cell was run again by the module itself, and was right."""
        return self.ok and not self.interpreted

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return f"{self._verdict()}: largest deviation {self.largest_deviation:.3g}, {self._sizes()}"

    def _verdict(self) -> str:
        alone = "the captured program alone, operation by operation (no module shows the site)"
        with_hooks = f"{self.hooked} with hooks on the module"
        if self.ok and not self.hooked:
            return f"not checked by the module: {self.cells} random cells agree with {alone}"
        word = "passed in part" if self.interpreted else "passed"
        if not self.ok:
            word = "FAILED" if self.excess > 1 else "NOT CHECKED"
        ways = [with_hooks] if self.hooked else []
        ways += [f"{self.interpreted} against {alone}"] if self.interpreted else []
        return f"{word}: {self.cells} random cells against full forwards, {' and '.join(ways)}"

    def _sizes(self) -> str:
        if self.unchecked:
            return f"{self.relative:.2g} of the largest value, which says nothing here: {self.unchecked}"
        if not self.reference:
            return f"{self.relative:.2g} of the largest value (allowed: {self.tolerance:.0e})"
        return (
            f"{self.relative:.2g} of the largest value from the module in {self.reference}, where the "
            f"module's own forwards are {self.own_error:.2g} off (allowed: {self.tolerance:.2g})"
        )

    def __repr__(self) -> str:
        return f"CellCheck {self}"

    def _repr_html_(self) -> str:
        return verdict(self.ok, str(self))
