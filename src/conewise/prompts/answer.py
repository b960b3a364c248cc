"""The answer to a question: one result over prompts of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from conewise.checks.cell_check import CellCheck
from conewise.checks.recheck import recheck
from conewise.errors import SweepError
from conewise.report.folded import Folded
from conewise.report.inside import Inside
from conewise.report.story import ResultLike, Story
from conewise.runs.captured import Captured
from conewise.sweeps.result import Result
from conewise.sweeps.statistics import statistics_of
from conewise.sweeps.sweep import Sweep

if TYPE_CHECKING:
    from conewise.circuits.circuit.circuit import Circuit


class Asked(Protocol):
    """What an answer has to know of its question."""

    @property
    def model(self) -> Captured:
        """The model that was asked."""

    @property
    def numbers(self) -> Sequence[Sequence[int]]:
        """Which prompts each group has, by number."""

    def sweep(self, group: int) -> Sweep:
        """The sweep of one group."""

    def folded(self) -> Folded:
        """The model folded by layer, with the cone of every cell."""

    def inside(self, result: ResultLike, story: Story | None = None) -> Inside | None:
        """Where the strongest heads look, and the lens, on the first prompts of the base."""


@dataclass(frozen=True, eq=False, repr=False)
class Answer(Result):
    """A result over all prompts of a question, in the order in which they were given.

    `table` and `values` are means over prompts, each weighing the same, whatever its length;
    `effect_by_prompt` has the effect for each, and `statistics()` how far the means can be trusted. Plots and
    pages have the tokens of the prompts on their axes.
    """

    question: Asked | None = field(default=None, repr=False)

    @classmethod
    def of(cls, result: Result, question: Asked, story: Story | None) -> Answer:
        """A result as the answer to a question."""
        held: dict[str, Any] = {one.name: getattr(result, one.name) for one in fields(Result)}
        return cls(**{**held, "story": story}, question=question)

    def verify(self, n: int = 32, seed: int = 0) -> CellCheck:
        """Run `n` random cells again for every prompt, as plain full forwards of the module with hooks."""
        if self.question is None or self.method:
            return super().verify(n, seed)
        self._expect_weights(self.question.model)
        is_serial = self.plan.evaluator == "serial"
        checks = [
            recheck(
                self._of_prompts(numbers), self.question.sweep(group).rerun(), n, seed, is_serial=is_serial
            )
            for group, numbers in enumerate(self.question.numbers)
        ]
        return whole_check(checks)

    def _of_prompts(self, numbers: Sequence[int]) -> Result:
        """The result of some of the prompts."""
        rows = list(numbers)
        base, source = self.base_per_prompt, self.source_per_prompt
        per_prompt = self.per_prompt[..., rows]
        return replace(
            self,
            table=per_prompt.mean(-1),
            per_prompt=per_prompt,
            base=self.base if base is None else base[:, rows].mean(-1),
            source=self.source if source is None else source[:, rows].mean(-1),
            base_per_prompt=None if base is None else base[:, rows],
            source_per_prompt=None if source is None else source[:, rows],
        )

    def report(self, path: str | Path, *, story: Story | None = None) -> Path:
        """Write a page of it, one file that opens without a network; see `Result.report`."""
        from conewise.report.page import expect_page, write_page  # noqa: PLC0415  # needs plotly

        expect_page(path)
        story = self.story if story is None else story
        if self.question is None or self.question.model.changed_sites:
            return write_page(path, self, story)
        inside = self.question.inside(self, story)
        return write_page(path, self, story, self.question.folded(), inside)

    def circuit(
        self,
        *,
        top: int | None = None,
        threshold: float | None = None,
        connected: bool = True,
        metric: str | None = None,
        model: Captured | None = None,
    ) -> Circuit:
        """The circuit of the edges with the largest effects, after a question about edges: see `Result`."""
        own = self.question.model if model is None and self.question is not None else model
        return super().circuit(top=top, threshold=threshold, connected=connected, metric=metric, model=own)

    def __str__(self) -> str:
        prompts = self.per_prompt.shape[-1]
        if prompts < 2 or self.base_per_prompt is None:
            return super().__str__()
        lines = [repr(self)]
        for name in self.metrics:
            row = self._number(name)
            over = f"{name} over {prompts} prompts: {self._ends(name)}"
            lines.append(f"  {over}; the largest effects, with 95% intervals:")
            cells = list(self.cells)
            strongest = self.strongest(name)
            places = [cells.index(cell) for cell, _, _ in strongest]
            found = statistics_of(self._effects(row)[places])
            for number, (cell, effect, _) in enumerate(strongest):
                low, high, p = (float(part[number]) for part in (found.low, found.high, found.p))
                lines.append(f"    {effect:+.6g}  [{low:+.4g}, {high:+.4g}]  p = {p:.2g}  {cell.name}")
            lines += [f"    {found.note}"] if found.note else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return super().__repr__().replace("Result", "Answer", 1)


def whole_check(checks: Sequence[CellCheck]) -> CellCheck:
    """The same cells were checked in every group: the worst deviation counts."""
    if not checks:
        raise SweepError("nothing was checked.")
    hooked = min(check.hooked for check in checks)
    worst = max(checks, key=lambda check: (bool(check.unchecked), check.excess))
    return replace(
        worst,
        hooked=hooked,
        interpreted=worst.cells - hooked,
        largest_deviation=max(check.largest_deviation for check in checks),
    )
