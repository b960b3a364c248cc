"""A question: prompts with their answers, sites, and what is put there; one sweep for each group of prompts.

Prompts of several lengths cannot stand in one batch, and each has answers of its own. So every group is a
sweep, and the question plans and runs them as one: its counts are the sums of theirs.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from conewise.anatomy.places import EdgePlace
from conewise.anatomy.selectors import POSITIONS, Cell, SelectorLike, Selectors, as_selectors
from conewise.arguments import Count, Samples, checked, expect
from conewise.attributing.attribution import Attribution, attributed_together
from conewise.attributing.pieces import HYBRID, AttributionPlan, with_steps_from
from conewise.errors import Argument, MetricError, MissingSiteError, PromptError, SweepError
from conewise.jobs.progress import bar
from conewise.jobs.runnable import How, Runnable
from conewise.program.calls import forward_parameters
from conewise.program.export import eager
from conewise.report.folded import Folded
from conewise.report.folding import fold
from conewise.report.inside import Inside, inside_of
from conewise.report.story import PATCHES, Story
from conewise.runs.captured import Captured
from conewise.runs.inputs import find_embedding
from conewise.runs.interventions import mean, noise
from conewise.runs.metric_words import as_metric, logit, takes_rows
from conewise.runs.metrics import Metric
from conewise.runs.run import Run, baseline, bound
from conewise.sweeps.execution.growth import Holes
from conewise.sweeps.planning.costs import synchronize
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.result import SHOWN, Result
from conewise.sweeps.running import Options, calibrate
from conewise.sweeps.storage.result_data import ResultData
from conewise.sweeps.sweep import Sweep, expect_each, swept_together
from conewise.templates import heading, note, shown, table
from conewise.text.answer import (
    Answer,
    HeldOut,
    expect_counts,
    strongest,
    whole_plan,
    whole_result,
    without_steps,
)
from conewise.text.prompts import METRICS, Progress, TokenizedPrompts
from conewise.threads import Turn, one_module, one_thread

DIRECTIONS = {"denoise": ("corrupted", "clean"), "noise": ("clean", "corrupted")}
"""The base and the source of each direction."""


def default_direction(patch: str) -> str:
    """Return the usual direction: clean values go into the corrupted run, and the clean run is ablated."""
    return "denoise" if patch == "source" else "noise"


def noise_scale(source: str, scale: float | None) -> float:
    """The standard deviation of noise, 1 unless given. Raises SweepError where no noise is put in."""
    if scale is not None and source != "noise":
        raise SweepError(
            Argument("scale", scale),
            " is the standard deviation of noise, and ",
            Argument("source", source),
            " adds none. Leave it out, or give ",
            Argument("source", "noise"),
            ".",
        )
    return 1.0 if scale is None else scale


def expect_asked(
    model: Captured, prompts: TokenizedPrompts, direction: str, patch: str, metric: Any, scale: Any, seed: Any
) -> None:
    """Raise where prompts cannot be asked so: what is known of that before there is a model."""
    if direction not in DIRECTIONS:
        raise SweepError(f"no direction {direction!r}; there are {', '.join(DIRECTIONS)}.")
    if patch not in PATCHES:
        raise SweepError(f"no patch {patch!r}; there are {', '.join(PATCHES)}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SweepError(f"the seed is {seed!r}; it is a whole number.")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
        raise SweepError(f"scale is {scale!r}; it is the standard deviation of the noise, 0 or more.")
    if isinstance(metric, str):
        prompts.expect_answers(metric)
    else:
        made = as_metric(metric, model)
        if made.prompts not in {None, len(prompts.pairs)}:
            raise MetricError(
                f"the metric {made.name!r} is made for {made.prompts} prompts, and {len(prompts.pairs)} were "
                "given. Give one answer for all prompts, or one for each."
            )
    if patch == "source":
        expect_two_runs(prompts)


def expect_two_runs(prompts: TokenizedPrompts) -> None:
    """Raise PromptError where clean and corrupted are the same prompts."""
    if prompts.clean == prompts.corrupted:
        raise PromptError(
            "clean and corrupted have the same tokens in every pair, so patching one into the other "
            "changes nothing."
        )


def expect_vocabulary(model: Captured, prompts: TokenizedPrompts, metric: Metric | None) -> None:
    """Raise where a tokenizer has tokens that the model has not, or a metric reads such."""
    try:
        known = len(find_embedding(model.program).table)
    except MissingSiteError:
        return
    for number, rows in enumerate(
        zip(prompts.clean, prompts.corrupted, prompts.answers, prompts.wrong_answers, strict=True)
    ):
        above = [token for tokens in rows for token in tokens if token >= known]
        if above:
            raise PromptError(
                f"prompt {number + 1} has the token {above[0]}, and {model.label} knows {known}, from 0: "
                "this is not its tokenizer. Give the one that it was trained with."
            )
    above = [token for token in (metric.tokens if metric is not None else ()) if not 0 <= token < known]
    if metric is not None and above:
        raise MetricError(
            f"the metric {metric.name!r} reads the token {above[0]}, which is not in the vocabulary of "
            f"{model.label}: it has {known}, from 0."
        )


Alone = Callable[[Sweep, How], Result]
Together = Callable[[Sequence[Sweep], Sequence[Path | None], How], Sequence[Result]]


@checked
@dataclass(frozen=True, repr=False)
class Question(Runnable[Answer]):
    """The effect of every site on the metric, when `patch` is applied there in one run of each pair.

    `direction`: "denoise" changes the corrupted run and takes values from the clean one, "noise" the
    opposite. `patch` is "source" (the other run's values), "zero", "mean" (over the base's prompts and
    positions, of all groups) or "noise" (Gaussian, of standard deviation `scale`). `metric` is one of
    `METRICS` ("kl" compares with the clean run); or a metric, with answers for all prompts or for each in the
    order of the pairs; or a function of the module's outputs, which receives the pairs of the batch if it has
    an argument `rows`. `precision`: see `Sweep`.

    All arguments are validated before anything is run. Raises PromptError, SweepError, SiteError, MetricError
    or InputMismatchError for invalid ones.
    """

    model: Captured
    prompts: TokenizedPrompts
    sites: SelectorLike
    direction: str = "denoise"
    patch: str = "source"
    metric: Any = "logit_diff"
    scale: float = 1.0
    seed: int = 0
    precision: str | None = None

    def __post_init__(self) -> None:
        expect_asked(self.model, self.prompts, self.direction, self.patch, self.metric, self.scale, self.seed)
        facts = facts_of(self.model)
        own = None if isinstance(self.metric, str) else as_metric(self.metric, self.model)
        expect_vocabulary(self.model, self.prompts, own)
        for group in range(len(self.prompts.groups)):
            for run in ("clean", "corrupted"):
                bound(self.model, (), self.prompts.inputs_of(group, run, facts.input_device))
        self._expect_one_meaning()

    def __repr__(self) -> str:
        pairs, cells = len(self.prompts.pairs), len(self.cells)
        return (
            f"Question of {pairs:,} prompt{'s' if pairs > 1 else ''} to {self.model.label}: "
            f"{cells:,} cells, {self.direction}, patch {self.patch!r}, reading {self.metric_name}"
        )

    def _repr_html_(self) -> str:
        rows = [
            (pair.clean, pair.corrupted, ", ".join(pair.answers), ", ".join(pair.wrong_answers))
            for pair in self.prompts.pairs[:SHOWN]
        ]
        left = len(self.prompts.pairs) - len(rows)
        more = note(f"and {left:,} more prompts") if left else ""
        columns = ("clean", "corrupted", "answer", "wrong answer")
        return shown(heading("Question", repr(self).removeprefix("Question ")), table(rows, columns), more)

    def _expect_one_meaning(self) -> None:
        """Refuse sites that the model has not, and positions that differ in prompts of several lengths."""
        lengths = {length: group for group, length in enumerate(self.prompts.lengths)}
        parts = [place.part for cell in self.cells for place in cell.places]
        chosen = [part[axis] for part in parts for axis in POSITIONS & part.keys()]
        if len(lengths) == 1 or not chosen:
            return
        names = {tuple(cell.name for cell in self._unrun(group).cells) for group in lengths.values()}
        if len(names) > 1 or not all(map(_counts_from_end, chosen)):
            raise PromptError(
                f"the prompts have {_listed(sorted(lengths))} tokens, so that a position does not mean the "
                "same in all of them. Count positions from the end (pos=-1 is the last), sweep by position "
                "over prompts of one length, or leave positions out."
            )

    # -- the sweeps --------------------------------------------------------------------------

    @property
    def base(self) -> str:
        """The run that is changed: "clean" or "corrupted"."""
        return DIRECTIONS[self.direction][0]

    @property
    def source(self) -> str | None:
        """The run that provides the values; None if they come from no run."""
        return DIRECTIONS[self.direction][1] if self.patch == "source" else None

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """The prompts of each group, by number."""
        return self.prompts.groups

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The cells, the same in every group."""
        return self._unrun(0).cells

    @cached_property
    def _selectors(self) -> Selectors:
        """The sites; positions of several lengths are counted from the end, where they mean the same."""
        given = as_selectors(self.sites)
        return replace(given, from_end=given.from_end or len(set(self.prompts.lengths)) > 1)

    def _unrun(self, group: int) -> Sweep:
        """The sweep of a group, to look at what is asked: nothing is run for it."""
        # What KL compares with is a run, which there is none of yet.
        return self._over(group, logit(0) if self._is_kl else self._metric(group, None))

    def sweep(self, group: int) -> Sweep:
        """The sweep of one group."""
        if group == 0:
            reference = self._first.metrics[0].reference
            if self._is_kl and reference is not None and not reference.is_current:
                vars(self).pop("_first")  # the clean run is another one now
            return self._first
        if not 0 < group < len(self.prompts.groups):
            raise PromptError(f"no group {group} of prompts: there are {len(self.prompts.groups)}, from 0.")
        found = self._sweep(group)
        if [cell.name for cell in found.cells] != [cell.name for cell in self.cells]:
            raise SweepError(
                "the sites have different parts in prompts of different lengths; sweep them apart."
            )
        return found

    def _expect_room(self, plan: Callable[[Sweep], object], max_memory: int | str | None) -> None:
        """Raise BudgetError where a group takes more than the budget, however it is cut."""
        if max_memory is None or len(self.numbers) == 1:
            return
        sizes = zip(self.prompts.lengths, map(len, self.numbers), strict=True)
        shapes = {size: group for group, size in enumerate(sizes)}

        def look(group: int) -> None:
            with self._swept(group) as sweep:
                plan(sweep)

        expect_each(look, shapes.values())

    @contextmanager
    def _swept(self, group: int) -> Iterator[Sweep]:
        """The sweep of one group; the runs that are made for it go at the end."""
        sweep = self.sweep(group)
        try:
            yield sweep
        finally:
            sweep.forget()
            self._holes.settle()

    @cached_property
    def _holes(self) -> Holes:
        return Holes()

    def _of_group(self, result: Result) -> Result:
        """The result of a group; of several, without the sweep: only one group's is held at a time."""
        if len(self.numbers) == 1:
            return result
        return replace(result, sweep=None, plan=without_steps(result.plan))

    @cached_property
    def _first(self) -> Sweep:
        return self._sweep(0)

    @property
    def _is_kl(self) -> bool:
        """True if the metric compares with the clean run."""
        return isinstance(self.metric, str) and self.metric == "kl"

    def _sweep(self, group: int) -> Sweep:
        clean = None
        if self._is_kl:
            inputs = self.prompts.inputs_of(group, "clean", facts_of(self.model).input_device)
            clean = baseline(self.model, (), inputs, keep=())
        return self._over(group, self._metric(group, clean))

    def _over(self, group: int, metric: Metric) -> Sweep:
        """The sweep of a group's inputs: they are run when it is, and their values go when it has ended."""
        device = facts_of(self.model).input_device
        source = self._put if self.source is None else self.prompts.inputs_of(group, self.source, device)
        base = self.prompts.inputs_of(group, self.base, device)
        return Sweep(
            self.model, self._selectors, base=base, source=source, metric=metric, precision=self.precision
        )

    def _metric(self, group: int, clean: Run | None) -> Metric:
        """Return the metric of one group."""
        if isinstance(self.metric, str):
            return self.prompts.metric(group, self.metric, clean)
        numbers = self.prompts.groups[group]
        metric = as_metric(self.metric, self.model)
        if metric.whole and takes_rows(metric.compute):
            rows = tuple(self.prompts.pairs[number] for number in numbers)
            return replace(metric, compute=partial(metric.compute, rows=rows))
        if metric.prompts is None or metric.of_prompts is None:
            return metric
        return metric.of_prompts(numbers)

    @property
    def metric_name(self) -> str:
        """The name of the metric."""
        return self.metric if isinstance(self.metric, str) else as_metric(self.metric, self.model).name

    @cached_property
    def _put(self) -> Any:
        """The values that are put at the sites, where they do not come from a run; one for all groups."""
        if self.patch == "mean":
            return mean(self.model, self.prompts.inputs(self.base, facts_of(self.model).input_device))
        return noise(self.scale, self.seed) if self.patch == "noise" else self.patch

    # -- planned and run as one --------------------------------------------------------------

    @property
    def _turn(self) -> Turn:
        return self.model._turn

    @one_thread
    def plan(
        self,
        max_memory: int | str | None = None,
        evaluator: str = "auto",
        progress: Progress | None = None,
    ) -> SweepPlan:
        """Plan all sweeps together, with their cost; nothing is computed.

        `progress` is called with the number of planned prompts, and their total.
        """
        calibrate(self.model)  # people want to know how long it takes
        self._expect_room(lambda sweep: sweep.plan(max_memory, evaluator), max_memory)
        plans, done = [], 0
        for group, numbers in enumerate(self.prompts.groups):
            with self._swept(group) as sweep:
                plan = sweep.plan(max_memory, evaluator)
            plans.append(plan if len(self.numbers) == 1 else without_steps(plan))
            done += len(numbers)
            if progress is not None:
                progress(done, len(self.prompts.pairs))
        return whole_plan(plans)

    @checked
    def _run(self, how: How, *, evaluator: str = "auto", verify: Count = 0) -> Answer:
        """Run every sweep. Several groups are stored in folders of their own in `out`."""
        if not how.resume:  # a run that is resumed stays cut as it was
            self._expect_room(lambda sweep: sweep.plan(how.max_memory, evaluator), how.max_memory)

        def alone(sweep: Sweep, how: How) -> Result:
            return sweep._run(how, evaluator=evaluator)

        def together(sweeps: Sequence[Sweep], folders: Sequence[Path | None], how: How) -> list[Result]:
            return swept_together(sweeps, folders, how, Options.of(evaluator, how.max_memory, None))

        whole = self._in_groups(how, alone, together, verify)
        return Answer.of(whole, self, self.story())

    def _in_groups(self, how: How, alone: Alone, together: Together | None, verify: int = 0) -> Result:
        """The results of all groups as one: group by group here, all of them together by workers."""
        groups = range(len(self.prompts.groups))
        folders = [None if how.out is None else self.folder_of(Path(how.out), group) for group in groups]
        results: list[Result] = []
        with bar(how.progress, len(groups) * len(self.cells), facts_of(self.model).device) as tell:
            if how.workers is not None and together is not None:
                how = replace(how, progress=tell)
                results += together([self.sweep(group) for group in groups], folders, how)
            else:
                for group in groups:
                    with self._swept(group) as sweep:
                        found = alone(sweep, replace(how, out=folders[group], progress=tell))
                        if verify:
                            found = replace(found, verification=found.verify(n=verify))
                    results.append(self._of_group(found))
            if verify and results[0].verification is None:
                results = [replace(one, verification=one.verify(n=verify)) for one in results]
        return results[0] if len(results) == 1 else whole_result(results, self.prompts.groups)

    def attribute(
        self, method: str, *, steps: int | None = None, seed: int = 0, steps_from: str | None = None
    ) -> QuestionAttribution:
        """Return a job that estimates the result of every sweep by gradients; see `Model.attribute`."""
        return QuestionAttribution(self, with_steps_from(method, steps_from), steps, seed)

    # -- on some of the prompts ----------------------------------------------------------------

    def split(self, share: Any = 0.5, seed: Any = 0) -> tuple[Question, Question]:
        """Split the question at random into two questions: on a share of the prompts, and on the others.

        Raises PromptError if a part would have no prompt.
        """
        count = len(self.prompts.pairs)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise PromptError(f"share is {share!r}; it is how much of the prompts, between 0 and 1.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise PromptError(f"the seed is {seed!r}; it is a whole number.")
        if count < 2:
            raise PromptError("one prompt cannot be split; ask about two or more.")
        order = random.Random(seed).sample(range(count), count)
        cut = min(max(round(share * count), 1), count - 1)
        return self._of(sorted(order[:cut])), self._of(sorted(order[cut:]))

    def _of(self, numbers: Sequence[int]) -> Question:
        metric = self.metric if isinstance(self.metric, str) else as_metric(self.metric, self.model)
        if isinstance(metric, Metric) and metric.prompts is not None and metric.of_prompts is not None:
            metric = metric.of_prompts(numbers)
        # Positions mean what they mean in all of the prompts, also where some have one length.
        return replace(self, prompts=self.prompts.of(numbers), metric=metric, sites=self._selectors)

    def faithfulness(
        self, top: int | Sequence[int] = (1, 2, 4, 8), *, share: float = 0.5, seed: int = 0, **how: Any
    ) -> HeldOut:
        """Measure how much of the behaviour the strongest sites recover on held-out prompts.

        The sites are found on a `share` of the prompts, see `split`: the `top` sites that move the metric
        furthest towards the source, for each number in `top`. Each such set is patched together, in the other
        prompts. `how` as in `run`.
        """
        counts = [top] if isinstance(top, int) else list(top)
        if self.source is None:
            raise SweepError(
                f"faithfulness is how far patches go from the base to the source, and {self.patch!r} has no "
                "source. Leave `source` out when you ask."
            )
        if any(isinstance(place, EdgePlace) for cell in self.cells for place in cell.places):
            raise SweepError(
                "edges are a circuit, which has its own faithfulness: `answer.circuit(top=...)`, then "
                "`circuit.evaluate(...)`."
            )
        expect_counts(counts, len(self.cells))
        first, second = self.split(share, seed)
        found = first.run(**how)
        sets = strongest(found, counts)
        tried, on_found = (
            replace(one, sites=[list(places) for places in sets]).run(**how) for one in (second, first)
        )
        return HeldOut(sets, found, tried, on_found)

    def folder_of(self, out: Path, group: int) -> Path:
        """Return the folder that stores a group's sweep."""
        return out if len(self.prompts.groups) == 1 else out / f"group-{group + 1}"

    # -- for pages and drawings --------------------------------------------------------------

    def story(self, model: str | None = None, command: str | None = None, forwards: Count = 0) -> Story:
        """The question in words; so many full forwards are timed for it."""
        seconds = self._forward_times(expect("forwards", forwards, "Samples")) if forwards else []
        return Story(
            model=self.model.label if model is None else model,
            prompts=self.prompts.tokenized_pairs(),
            base=self.base,
            source=self.source,
            patch=self.patch,
            metric=METRICS[self.metric] if isinstance(self.metric, str) else self.metric_name,
            command=command,
            seed=self.seed,
            forwards_timed=forwards,
            forward_seconds=fmean(seconds) if seconds else None,
            forward_range=(min(seconds), max(seconds)) if seconds else None,
        )

    def forward_seconds(self, times: Samples) -> float:
        """Return the mean seconds of one full forward of all prompts by the module itself."""
        return fmean(self._forward_times(times))

    def _forward_times(self, times: int) -> list[float]:
        """Return the seconds of so many full forwards of all prompts, after one that is not timed.

        A module that can computes the logits of the last position alone: nobody reads the others.
        """
        facts, module = facts_of(self.model), self.model.module
        inputs = self.prompts.inputs(self.base, facts.input_device)
        last = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(module) else {}
        constants, found = self.model.signature.example.kwargs, []
        for number in range(times + 1):
            started = time.perf_counter()
            with one_module(), torch.no_grad(), eager(module):
                for one in inputs:
                    module(**{**constants, **one, **last})
            synchronize(facts.device)
            if number:  # the first is not counted: kernels are chosen and memory is taken in it
                found.append(time.perf_counter() - started)
        return found

    def folded(self) -> Folded:
        """The model folded by layer, with the cone of every cell, for drawings."""
        base, is_function = self._first.batch(0).base, self.patch == "noise"
        return fold(self.model, self.cells, targets=self._first.targets(), base=base, whole=not is_function)

    def inside(self, result: ResultData, story: Story | None = None) -> Inside | None:
        """The attention of the strongest heads, and the lens, on the first prompts of the base, for pages."""
        base = self._first.batch(0).base
        return inside_of(base, result, story, self.prompts.tokenizer, self.numbers[0])

    def described(self) -> dict[str, Any]:
        """Return the question as plain values: equal questions have equal values."""
        return {
            "direction": self.direction,
            "patch": [self.patch, *([self.scale, self.seed] if self.patch == "noise" else [])],
            "metric": self.metric_name,
            "sites": [cell.name for cell in self.cells],
            "prompts": [
                [pair.clean, pair.corrupted, list(pair.answers), list(pair.wrong_answers)]
                for pair in self.prompts.pairs
            ],
            "groups": [list(group) for group in self.prompts.groups],
        }


@checked
@dataclass(frozen=True)
class QuestionAttribution(Runnable[Result]):
    """The effects of sites on the metric of a question, estimated by gradients: see `Question.attribute`."""

    question: Question
    method: str
    steps: int | None = None
    seed: int = 0

    @property
    def _turn(self) -> Turn:
        return self.question._turn

    def _of(self, sweep: Sweep) -> Attribution:
        return Attribution(sweep, self.method, self.steps, seed=self.seed)

    @one_thread
    def plan(self, max_memory: int | str | None = None) -> tuple[AttributionPlan, ...]:
        """Return what estimating takes, for each group of prompts; nothing is computed."""
        found = []
        for group in range(len(self.question.prompts.groups)):
            with self.question._swept(group) as sweep:
                found.append(self._of(sweep).plan(max_memory))
        return tuple(found)

    def _run(self, how: How) -> Result:
        question, budget = self.question, how.max_memory

        def alone(sweep: Sweep, how: How) -> Result:
            return self._of(sweep)._run(how)

        def together(sweeps: Sequence[Sweep], folders: Sequence[Path | None], how: How) -> Sequence[Result]:
            return attributed_together([self._of(sweep) for sweep in sweeps], folders, how)

        question._expect_room(lambda sweep: self._of(sweep).plan(budget), budget)
        whole = question._in_groups(how, alone, None if self.method == HYBRID else together)
        if len(question.numbers) > 1:  # the sweeps are gone, and what it is a result of is the question
            return Answer.of(whole, question, question.story())
        return replace(whole, story=question.story())


def _counts_from_end(index: Any) -> bool:
    """True if the positions that a part of a place means are counted from the end."""
    if isinstance(index, slice):
        return all(bound is None or bound < 0 for bound in (index.start, index.stop))
    return all(number < 0 for number in (index if isinstance(index, Sequence) else [index]))


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
