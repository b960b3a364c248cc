"""The batches of a sweep: what was given as base and source, and the runs that are made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from conewise.errors import InputMismatchError, PromptError, SweepError, describe, nearest_names
from conewise.program.tensors import Tensor, copy_of
from conewise.program.weights import Sums
from conewise.report.story import Story, TokenizedPair
from conewise.runs.captured import Captured
from conewise.runs.inputs import encoded, is_text, text_input, text_inputs
from conewise.runs.interventions import WORDS, Intervention, as_intervention
from conewise.runs.metrics import Metric, expect_prompts
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun, bound, sizes_of
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.planning.planner import facts_of
from conewise.text.tokens import token_texts


def base_story(base: Reading) -> Story:
    """The prompts of a base with their tokens; none where the model has no tokenizer, or reads no tokens."""
    model = base.model
    try:
        name = text_input(model.program)
    except PromptError:
        return Story(model.label)
    ids = base.inputs[name]
    if model.tokenizer is None or ids.ndim != 2:
        return Story(model.label)
    rows = [token_texts(model.tokenizer, row) for row in ids.tolist()]
    return Story(model.label, tuple(TokenizedPair("".join(row), "", row) for row in rows))


Base = Reading | Mapping[str, Any] | str | Iterable[Mapping[str, Any] | Reading | str | Sequence[str]]


class Batches:
    """One base, or a list of them, each with its source. Inputs are run when their batch is asked for.

    Inputs are copied: whatever is written to them later, numbers, provenance and checks are of the same.
    """

    def __init__(
        self,
        model: Captured,
        base: Base,
        source: Any,
        own: Sequence[Intervention] = (),
        metrics: Sequence[Metric] = (),
    ) -> None:
        """`own` are the sources that cells have of their own, `metrics` what is read of all batches.

        Raises InputMismatchError, PromptError, SweepError or MetricError for what does not fit.
        """
        copies: dict[int, Any] = {}
        base = _read(model, base)
        source = _read_source(model, source, is_listed=isinstance(base, list))
        self.model, self._base, self._source = model, _copied(base, copies), _copied(source, copies)
        self.own, self._metrics = own, tuple(metrics)
        self._metrics_of: dict[int, tuple[Metric, ...]] = {}
        self._first: Batch | None = None
        self.shapes: list[Mapping[str, Tensor]] = []
        """The inputs of a base of each shape that is known before any is run."""
        self._expect_fitting()

    def __len__(self) -> int:
        return len(self._base) if isinstance(self._base, Sequence) else 1

    def given(self, number: int) -> tuple[Any, Any]:
        """Return what was given as base and source of one batch."""
        base: Any = self._base
        source: Any = self._source
        if isinstance(base, Reading):
            return base, source
        if not isinstance(base, Sequence) or isinstance(base, str):
            base = [base]
        if not base:
            raise SweepError("base is a run, or a list of runs or of inputs; it has at least one.")
        if isinstance(source, list | tuple):
            if len(source) != len(base):
                raise SweepError(f"base has {len(base)} batches and source {len(source)}; they go in pairs.")
            source = source[number]
        return base[number], source

    def all_given(self) -> list[tuple[Any, Any]]:
        """Return what was given as base and source of each batch."""
        return [self.given(number) for number in range(len(self))]

    def __getitem__(self, number: int) -> Batch:
        """One batch. The first is kept until it was run, so that inputs are run once."""
        if number == 0 and self._first is not None:
            return self._first
        base, source = self.given(number)
        base = self._as_run(base)
        if isinstance(source, Mapping):
            source = self._as_run(source)
        self.model.expect_own("base is a run", base.model)
        run = source if isinstance(source, Reading) else None
        if run is not None:
            _expect_alike(base.inputs, run.inputs)
        batch = Batch(base, run, as_intervention(source, self.model), self.own, self.metrics(number))
        if number == 0:
            self._first = batch
        return batch

    def metrics(self, number: int) -> tuple[Metric, ...]:
        """Return the metrics of one batch: of those with answers for the prompts of all batches, its own."""
        return self._metrics_of.get(number, self._metrics)

    def forget(self) -> None:
        """Forget the first batch, so that no two are held at a time."""
        self._first = None

    def expect_weights(self, now: Sums) -> None:
        """Forget runs of inputs that were made with other weights; those that were given are not ours."""
        if self._first is not None:
            runs = (self._first.base, self._first.source)
            if any(isinstance(run, InputRun) and not run.is_of(now) for run in runs):
                self._first = None

    def _as_run(self, given: Any) -> Reading:
        if isinstance(given, Reading):
            return given
        if not isinstance(given, Mapping):
            text = " A text is one where the model was captured with its tokenizer."
            raise SweepError(
                f"base is a run, or a list of runs or of inputs, and {describe(given)} is neither. Inputs "
                "are written as for `model.run`: {'input_ids': ...}."
                + (text if isinstance(given, str) else "")
            )
        return InputRun(self.model, bound(self.model, (), given))

    def _expect_fitting(self) -> None:
        """Raise where inputs do not fit the model or their source, or answers their prompts: before any run.

        A metric with answers for the prompts of all batches together is cut into those of each. What makes
        its runs when asked is not looked at.
        """
        if not isinstance(self._base, Reading | Mapping | list | tuple):
            return
        outputs = facts_of(self.model).read
        prompts: list[int] = []
        shapes: dict[Any, Mapping[str, Tensor]] = {}
        for number, (base, source) in enumerate(self.all_given()):
            of = "" if len(self) == 1 else f"batch {number} of "
            inputs, others = self._inputs_of(base, f"{of}base"), self._inputs_of(source, f"{of}source")
            if isinstance(source, Intervention):
                source.expect_model(self.model)
            if inputs and others:
                _expect_alike(inputs, others, of)
            if inputs:
                shapes.setdefault(tuple((name, one.shape) for name, one in inputs.items()), inputs)
            prompts.append(outputs.prompts(inputs) if inputs else 0)
        self.shapes = list(shapes.values())
        cut = [_cut(metric, prompts) for metric in self._metrics]
        self._metrics_of = dict(enumerate(zip(*cut, strict=True)))

    def known_inputs(self) -> list[tuple[Mapping[str, Tensor], str]]:
        """The inputs of each base that are known before it is run, and of which batch they are, in words."""
        if not isinstance(self._base, Reading | Mapping | list | tuple):
            return [(self[0].base.inputs, "")]
        found = []
        for number, (base, _) in enumerate(self.all_given()):
            of = "" if len(self) == 1 else f"batch {number}: "
            found.append((self._inputs_of(base, "base"), of))
        return [(inputs, of) for inputs, of in found if inputs]

    def _inputs_of(self, given: Any, where: str) -> Mapping[str, Tensor]:
        """The inputs of what was given; none where they are not known before it is run."""
        if isinstance(given, Reading):
            self.model.expect_own(f"{'the ' * (where == 'source')}{where} is a run", given.model)
            return given.inputs
        if not isinstance(given, Mapping):
            return {}
        try:
            inputs = self.model.signature.bind((), given)
            sizes_of(self.model, inputs)
        except InputMismatchError as error:
            raise InputMismatchError(f"{where}: {error}") from error
        return inputs


def _read(model: Captured, given: Any) -> Any:
    """Return what was given, with texts as inputs: a list of texts is one batch, with a row for each.

    A tensor is token ids; what a tokenizer returns are inputs.
    """
    if isinstance(given, Tensor) and given.dtype == torch.int64:
        return {text_input(model.program): given}
    if isinstance(given, Mapping):
        return encoded(model, given)
    if not model._has_tokenizer:
        return given
    if is_text(given):
        return text_inputs(model, given)
    if isinstance(given, list | tuple):
        return [text_inputs(model, one) if is_text(one) else one for one in given]
    return given


def _read_source(model: Captured, given: Any, *, is_listed: bool) -> Any:
    """A source with texts as inputs; in a list, each is that of a batch where bases are listed too."""
    if isinstance(given, Mapping) or (isinstance(given, Tensor) and given.dtype == torch.int64):
        return _read(model, given)
    if not model._has_tokenizer:
        return given
    if isinstance(given, str):
        # A word: 'zero', 'mean', or what was probably meant so, which is refused later.
        is_word = given in WORDS or (" " not in given and bool(nearest_names(given, WORDS)))
        return given if is_word else text_inputs(model, given)
    if isinstance(given, list | tuple) and (is_listed or any(isinstance(one, str) for one in given)):
        if not is_listed and is_text(given) and not any(one in WORDS for one in given):
            return text_inputs(model, given)
        return [_read_source(model, one, is_listed=False) for one in given]
    return given


def _cut(metric: Metric, prompts: Sequence[int]) -> list[Metric]:
    """A metric for each batch of so many prompts; 0 is a number that is not known. Raises MetricError."""
    wanted, total = metric.prompts, sum(prompts)
    if wanted is None or all(count in {0, wanted} for count in prompts):
        return [metric] * len(prompts)
    if wanted == total and 0 not in prompts and metric.of_prompts is not None:
        starts = accumulate(prompts, initial=0)
        return [
            metric.of_prompts(range(start, start + count))
            for start, count in zip(starts, prompts, strict=False)
        ]
    for number, count in enumerate(prompts):
        expect_prompts(metric, count, "base" if len(prompts) == 1 else f"batch {number} of base", total)
    return [metric] * len(prompts)


def _copied(given: Any, copies: dict[int, Any]) -> Any:
    """Copy the inputs in what was given, each once; what makes its runs when asked stays as it is."""
    if isinstance(given, list | tuple):
        return [_copied(one, copies) for one in given]
    if not isinstance(given, Mapping):
        return given
    if id(given) not in copies:
        copies[id(given)] = {
            name: copy_of(value) if isinstance(value, Tensor) else value for name, value in given.items()
        }
    return copies[id(given)]


def _expect_alike(base: Mapping[str, Tensor], source: Mapping[str, Tensor], of: str = "") -> None:
    """Raise SweepError where inputs differ in shape; `of` says of which batch they are."""
    for name, value in base.items():
        other = source.get(name)
        if other is not None and other.shape != value.shape:
            raise SweepError(
                f"{of}base and source differ in shape: {name!r} is {tuple(value.shape)} in the base and "
                f"{tuple(other.shape)} in the source. Pad or cut the prompts to one length, so that "
                "position means the same in both."
            )
