"""The answer to a question: one result over prompts of any lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from conewise.anatomy.places import Place
from conewise.errors import SweepError
from conewise.program.tensors import Tensor
from conewise.report.story import Story
from conewise.runs.captured import Captured
from conewise.sweeps.execution.reading import summed
from conewise.sweeps.findings import certainty, finding
from conewise.sweeps.planning.plan import Lazy, SweepPlan
from conewise.sweeps.recheck import recheck
from conewise.sweeps.result import Result
from conewise.sweeps.statistics import statistics_of
from conewise.sweeps.storage.result_data import CellCheck, Missing


@dataclass(frozen=True, eq=False, repr=False)
class Answer(Result):
    """A result over all prompts of a question, in the order in which they were given.

    `table` and `values` are means over prompts with equal weights, whatever their lengths; `effect_by_prompt`
    has the effect for each prompt, and `statistics()` the uncertainty of the means. Plots and pages have the
    tokens of the prompts on their axes.
    """

    question: Any = field(default=None, repr=False)
    """The `Question`."""

    @classmethod
    def of(cls, result: Result, question: Any, story: Story | None) -> Answer:
        """Create the answer to a question from a result."""
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
        """Write an HTML page, one file that opens offline; see `Result.report`."""
        from conewise.report.page import expect_page, write_page  # noqa: PLC0415  # needs plotly

        expect_page(path)
        story = self.story if story is None else story
        if self.question is None or self.question.model.changed_sites:
            return write_page(path, self, story)
        inside = self.question.inside(self, story)
        return write_page(path, self, story, self.question.folded(), inside)

    def _model_for_circuits(self, model: Captured | None) -> Captured:
        own = self.question.model if model is None and self.question is not None else model
        return super()._model_for_circuits(own)

    def __str__(self) -> str:
        prompts = self.per_prompt.shape[-1]
        if prompts < 2 or self.base_per_prompt is None:
            return super().__str__()
        lines = [finding(self), f"  {certainty(self)}"]
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
        return "\n".join([*lines, *self._costs()])

    def _summary(self) -> str:
        return super()._summary().replace("Result", "Answer", 1)


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


def whole_plan(plans: Sequence[SweepPlan]) -> SweepPlan:
    """The plans of all groups as one: counts are added up, the peak is the largest.

    `chunks` are those of the group that is cut most. The steps are those of each group's own plan.
    """
    if len(plans) == 1:
        return plans[0]
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    added: dict[str, Any] = {}
    for name in ("batches", "node_evaluations", "full_evaluations", "launches", "flops", "full_flops"):
        added[name] = sum(getattr(plan, name) for plan in plans)
    return replace(
        without_steps(plans[0]),
        **added,
        peak_bytes=max(plan.peak_bytes for plan in plans),
        chunks=max((plan.chunks for plan in plans), key=len),
        evaluator=_joined(plan.evaluator for plan in plans),
        why=_joined(plan.why for plan in plans),
        seconds=sum(seconds) if len(seconds) == len(plans) else None,
    )


def _joined(words: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(words))


def without_steps(plan: SweepPlan) -> SweepPlan:
    """The costs of a group's plan, without its steps and the sweep, which holds what its metric reads."""
    return replace(plan, compiled=None, spec={}, sweep=None)


def whole_result(results: Sequence[Result], groups: Sequence[Sequence[int]]) -> Result:
    """The results of all groups as one, each prompt weighing the same, in the order of the pairs."""
    numbers = [number for group in groups for number in group]
    order = sorted(range(len(numbers)), key=numbers.__getitem__)

    def together(name: str) -> Tensor | None:
        known = [part for result in results if (part := getattr(result, name)) is not None]
        return torch.cat(known, dim=-1)[..., order] if len(known) == len(results) else None

    checks = [result.verification for result in results]
    origins = [result.origin for result in results]  # not the results, which have sweeps
    per_prompt, base = together("per_prompt"), together("base_per_prompt")
    source = together("source_per_prompt")
    assert per_prompt is not None
    assert base is not None
    return Result(
        whole_plan([result.plan for result in results]),
        summed(result.ledger for result in results),
        results[0].spreads,
        results[0].metrics,
        per_prompt.mean(-1),
        per_prompt,
        base.mean(-1),
        None if source is None else source.mean(-1),
        Lazy(lambda: _whole_provenance(origins)),
        None if None in checks else whole_check([check for check in checks if check is not None]),
        base_per_prompt=base,
        source_per_prompt=source,
        weights=results[0].weights,
        method=_joined(result.method for result in results),
        missing=tuple(_missing(results)),
        vectors=results[0].vectors,
    )


def _missing(results: Sequence[Result]) -> Iterator[Missing]:
    """Return what is missing, with batches counted through all groups."""
    before = 0
    for result in results:
        for one in result.missing:
            yield replace(one, batch=before + one.batch)
        before += result.plan.batches


def _whole_provenance(provenances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all groups share, their batches one after another, and every metric that was read."""
    metrics = [metric for one in provenances for metric in one["metrics"]]
    return {
        **provenances[0],
        "metrics": [metric for place, metric in enumerate(metrics) if metric not in metrics[:place]],
        "batches": [batch for one in provenances for batch in one["batches"]],
    }


def expect_counts(counts: Sequence[Any], most: int) -> None:
    """Raise SweepError for what are no numbers of sites, of which there are `most`."""
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
            raise SweepError(f"top is {count!r}; it is a number of sites, or several, from 1 to {most}.")
    if not counts:
        raise SweepError("top names no number of sites.")


def strongest(found: Answer, counts: Sequence[int]) -> tuple[tuple[Place, ...], ...]:
    """The places that move the metric furthest towards the source: the first so many, for each count."""
    assert found.source is not None
    towards = 1.0 if float(found.source[0]) > float(found.base[0]) else -1.0
    effects = (found.table[0] * towards).tolist()
    order = sorted(range(len(effects)), key=lambda number: -effects[number])
    return tuple(
        tuple(place for number in order[:count] for place in found.cells[number].places) for count in counts
    )


@dataclass(frozen=True)
class HeldOut:
    """Growing sets of the strongest sites, found on one part of the prompts and tested on the other.

    `sets` has the places of each set; all places of a set are patched together, in one world. `shares` are
    the fractions of the distance from the base to the source that the sets recover on held-out prompts (1 is
    all of it), and `found_shares` the same on the prompts that the sites were found on. `found`, `tried` and
    `tried_where_found` are the answers.
    """

    sets: tuple[tuple[Place, ...], ...]
    found: Answer = field(repr=False)
    tried: Answer = field(repr=False)
    tried_where_found: Answer = field(repr=False)

    @property
    def shares(self) -> Tensor:
        """The fraction that each set recovers on the held-out prompts."""
        return self.tried.normalised

    @property
    def found_shares(self) -> Tensor:
        """The fraction that each set recovers on the prompts that it was found on."""
        return self.tried_where_found.normalised

    def __str__(self) -> str:
        counts = (answer.per_prompt.shape[-1] for answer in (self.found, self.tried))
        lines = ["sites found on {} prompts, tried on {} others:".format(*counts)]
        for places, share, own in zip(
            self.sets, self.shares.tolist(), self.found_shares.tolist(), strict=True
        ):
            lines.append(f"  {len(places):>3}  {share:6.2f}  ({own:.2f} where found)  + {places[-1]}")
        return "\n".join(lines)
