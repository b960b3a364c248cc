"""Causal tracing: noise on the subject's embeddings, and one clean state at a time restored in that run.

Every (layer, position) is a world on top of the corrupted run, so only what lies below the restored state
is computed; the samples of the noise are one batch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from conewise.anatomy.padding import shown_positions
from conewise.anatomy.places import Place
from conewise.anatomy.selectors import Cell, Choice, Spread, chosen
from conewise.arguments import as_bytes, checked
from conewise.errors import BudgetError, PromptError, SweepError, describe
from conewise.jobs.runnable import How, Runnable
from conewise.program.records import SIZES, Program
from conewise.program.tensors import Tensor
from conewise.program.walk import run_sources
from conewise.reactive.world import World
from conewise.report.story import Story, write_story
from conewise.runs.captured import Captured
from conewise.runs.inputs import Embedding, expect_tokenizer, find_embedding, is_text
from conewise.runs.interventions import Intervention, noise_of
from conewise.runs.metric_words import as_metric, last_logits, prob
from conewise.runs.metrics import Metric, expect_prompts
from conewise.runs.reading import Reading, RunWorld
from conewise.runs.run import Run, baseline
from conewise.sweeps.batches import base_story
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.planning.schedule import no_room
from conewise.sweeps.result import Result
from conewise.sweeps.storage.codec import decoded
from conewise.sweeps.storage.result_data import CellCheck
from conewise.sweeps.sweep import Sweep
from conewise.templates import note, shown
from conewise.text.tokens import AnswerReader, subject_positions
from conewise.threads import Turn, one_thread

DEVIATIONS = 3.0
"""The strength of noise="auto", in standard deviations of the embeddings: that of Meng et al., 2022."""

_POSITIONS = re.compile(r"\s*-?\d*\s*(:\s*-?\d*\s*){0,2}")
"""Positions as text: a number, or a slice."""

MOST_SAMPLES = 1_000_000
"""More samples of the noise than that take more memory than there is, for the shortest prompt."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of a trace beside its result, in plain values."""

    subject: tuple[int, ...]
    noise: str
    n: int
    window: int


@checked
@dataclass(frozen=True)
class Trace:
    """Effects of restoring each clean state on the metric of the corrupted run.

    `values` are [layer, pos], averaged over the `n` samples (and over the prompts); `per_sample` are [sample,
    layer, pos]. `clean` and `corrupted` are the metric without noise, and with noise and nothing restored.
    `noise` is its standard deviation. `result` is the complete result of the sweep, in which the corrupted
    run is the base and the clean run the source.
    """

    result: Result
    subject: tuple[int, ...]
    noise: float
    n: int
    window: int

    @property
    def values(self) -> Tensor:
        """The metric with each state restored, [layer, pos]."""
        return self.result.values

    @property
    def per_sample(self) -> Tensor:
        """The metric with each state restored, for each sample of the noise, [sample, layer, pos]."""
        rows = self.result.per_prompt[0]
        by_sample = rows.reshape(len(rows), self.n, -1).mean(-1)
        return by_sample.T.reshape(self.n, *self.values.shape)

    @property
    def effect(self) -> Tensor:
        """The indirect effect: the change of the corrupted run's metric when each state is restored."""
        return self.values - self.corrupted

    @property
    def clean(self) -> float:
        """The metric without noise."""
        assert self.result.source is not None
        return float(self.result.source[0])

    @property
    def corrupted(self) -> float:
        """The metric with noise and nothing restored, averaged over the samples."""
        return float(self.result.base[0])

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of `values`."""
        return self.result.spreads[0].coordinates[0]

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of `values`."""
        return self.result.spreads[0].coordinates[1]

    @property
    def plan(self) -> SweepPlan:
        """The plan of the sweep."""
        return self.result.plan

    @property
    def ledger(self) -> SweepLedger:
        """The ledger of the sweep, which counts the work done."""
        return self.result.ledger

    def to_dataframe(self) -> Any:
        """Return a row for each state and metric; `base` is the corrupted run, `source` the clean run."""
        return self.result.to_dataframe()

    def plot(self, *args: Any, **options: Any) -> Any:
        """Draw `values`; see `Result.plot`."""
        return self.result.plot(*args, **options)

    def report(self, path: str | Path, *, story: Story | None = None) -> Path:
        """Write an HTML page of the trace; see `Result.report`."""
        return self.result.report(path, story=story)

    def save(self, folder: str | Path) -> Path:
        """Save the trace to a folder that holds no result yet; `cw.open(folder)` reads it."""
        from conewise.sweeps.storage.archive import save  # noqa: PLC0415  # needs pyarrow

        if self.result.story is not None:
            write_story(Path(folder), self.result.story)
        return save(self.result, Path(folder), trace=self._settings())

    @classmethod
    def of(cls, result: Result, settings: Mapping[str, Any]) -> Trace:
        """Return the trace of a saved result and of what was beside it; ValueError for what is none."""
        given = {"n" if name == "samples" else name: one for name, one in settings.items()}  # of 0.1.0
        found: _Settings = decoded(given, _Settings, "trace")
        return cls(result, found.subject, float.fromhex(found.noise), found.n, found.window)

    def _settings(self) -> dict[str, Any]:
        return asdict(_Settings(self.subject, self.noise.hex(), self.n, self.window))

    def equals(self, other: object) -> bool:
        """Return True if both are traces with the same settings, and equal in every bit."""
        if not isinstance(other, Trace) or self._settings() != other._settings():
            return False
        return self.result.equals(other.result)

    def verify(self, n: int = 32, seed: int = 0) -> CellCheck:
        """Run `n` random states again, each as a full forward; see `Result.verify`."""
        return self.result.verify(n=n, seed=seed)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.values.shape))
        return (
            f"Trace of {self.result.metrics[0]} over {shape} (layer, pos): clean {self.clean:.4g}, corrupted "
            f"{self.corrupted:.4g} ({self.n} samples of noise {self.noise:.4g} at {list(self.subject)})"
        )

    def _repr_html_(self) -> str:
        return shown(note(repr(self)), self.result._repr_html_())


@checked
@one_thread
class CausalTrace(Runnable[Trace]):
    """A causal trace job, with `plan` and `run`; see `Model.causal_trace`."""

    def __init__(
        self,
        corruption: Corruption,
        spread: Spread,
        metric: Sequence[Any],
        story: Story | None,
        *,
        n: int,
        window: int,
        together: int | None,
    ) -> None:
        self.corruption, self.metric, self.story = corruption, metric, story
        self.n, self.window, self.together, self._spread = n, window, together, spread

    @property
    def _turn(self) -> Turn:
        return self.corruption.model._turn

    def plan(self, max_memory: int | str | None = None, evaluator: str = "auto") -> SweepPlan:
        """Return the cost of tracing, step by step; nothing is computed."""
        sweep, budget = self._fitting(as_bytes(max_memory), evaluator)
        return sweep.plan(budget, evaluator)

    def _fitting(self, max_memory: int | None, evaluator: str) -> tuple[Sweep, int | None]:
        """Return the sweep, with as many samples in a batch as fit, and what memory is left to its worlds."""
        corruption, n = self.corruption, self.n
        model, clean = corruption.model, corruption.clean
        size = 1 if model.batch_is_fixed else min(self.together or n, n)
        of_one = sum(model.estimated_bytes(clean.inputs).values())
        prompts = clean.inputs[corruption.embedding.input].shape[0]
        metrics = [sampled(as_metric(one, model), prompts) for one in self.metric]
        cells = [cell.places for cell in self._spread.cells]
        if (
            max_memory is not None and self.together is None
        ):  # half for the corrupted runs, half for the worlds
            sizes = [max(1, min(size, max_memory // (2 * of_one))), 1]
        else:
            sizes = [size]
        for size in sizes:
            corrupted = Corrupted(corruption, [range(n)[at : at + size] for at in range(0, n, size)])
            base = corrupted if len(corrupted) > 1 else corrupted[0]
            sweep = Sweep(model, cells, base=base, source=_restored(clean, prompts), metric=metrics)
            if max_memory is None:
                return sweep, None
            held = size * of_one
            try:
                sweep.plan(max(1, max_memory - held), evaluator)
            except BudgetError as error:
                what = f"a world, with {size} corrupted run{'s' * (size > 1)} beside it,"
                refused = no_room(held + error.least, max_memory, what)
            else:
                return sweep, max_memory - held
        raise refused from None

    def _run(self, how: How, *, evaluator: str = "auto") -> Trace:
        sweep, budget = self._fitting(how.max_memory, evaluator)
        result = sweep._run(replace(how, max_memory=budget), evaluator=evaluator)
        known = sweep.read_metrics(self.corruption.clean)
        result = replace(
            result,
            spreads=(self._spread,),
            source=known.mean(-1),
            source_per_prompt=known.repeat(1, self.n),
            story=self.story,
        )
        return Trace(result, self.corruption.subject, self.corruption.scale, self.n, self.window)


@checked
@one_thread
def causal_trace(
    model: Captured,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Any] | Run,
    *,
    subject: Choice,
    answer: str | Sequence[str] | None = None,
    metric: Any = None,
    kind: str = "resid_post",
    layer: Choice = ":",
    pos: Choice = ":",
    window: int = 1,
    noise: float | str = "auto",
    n: int = 10,
    seed: int = 0,
    together: int | None = None,
) -> CausalTrace:
    """Trace the states that carry the model's knowledge of the subject (Meng et al., 2022).

    In the corrupted run, the embeddings at the positions `subject` have Gaussian noise added. For each layer
    and position, the clean state of that `kind` (resid_post, mlp_out, attn_out, ...) is restored, and the
    metric is read.

    `inputs`: a text, if the model has its tokenizer, or several of one length; or the tokens, a mapping of
    the module's inputs, or their run. `subject`: the words of the text that receive the noise, wherever they
    occur; or positions. `answer`: the expected continuation as text, one for all prompts or one for each; its
    probability is read. Without it, and without a `metric`, the model's own likeliest token is used.

    `layer` and `pos` select the states, by default all. `window`: the number of layers to restore around
    each. `noise`: the standard deviation; "auto" is three times that of the embedding table. `n`: the number
    of noise samples; sample i is the same for the same seed, whatever `n` is. `together`: the number of
    samples computed as one batch; by default all of them, or, if `max_memory` is given, as many as leave half
    of it to the worlds. `run` also takes an `evaluator`: see `Sweep`.
    """
    model._capture_for(inputs)
    texts: tuple[str, ...] = ()
    if is_text(inputs):
        texts = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    subject = _subject(model, texts, subject)
    read = _read(model, texts, answer, metric)
    if isinstance(inputs, Run):
        model.expect_own("the clean run is one", inputs.model)
        clean = inputs
    else:
        clean = baseline(model, (), inputs) if isinstance(inputs, Mapping) else baseline(model, (inputs,), {})
    metric = prob(last_logits(clean).argmax(-1)) if read is None else read
    said = "the probability of what the model itself goes on with" if read is None else ""
    said = said if answer is None else "the probability of the answer"
    embedding = find_embedding(model.program)
    if noise == "auto":
        noise = DEVIATIONS * embedding.deviation
    elif isinstance(noise, str) or not float(noise) > 0:
        raise SweepError(f"noise is {noise!r}; it is 'auto' or a standard deviation above 0.")
    for name, value in (("n", n), ("window", window), ("together", together or 1)):
        if value < 1:
            raise SweepError(f"{name} is {value}; it is 1 or more.")
    if n > MOST_SAMPLES:
        raise SweepError(f"n is {n}; it is {MOST_SAMPLES:,} or fewer.")
    tokens = clean.inputs[embedding.input]
    layout = model.program.dimensions
    if layout.doubt or layout.is_unbatched or model.locate(embedding.node).view.axes[0] == "pos":
        raise SweepError(
            f"causal tracing stacks samples along dimension 0 of {embedding.input!r}, which has to be "
            f"the batch: {layout.doubt or 'here it is positions'}. Wrap the module so that it takes "
            "[batch, position]."
        )
    subjects = tuple(chosen(subject, tokens.shape[1], "pos", "the subject"))
    _expect_tokens(clean, embedding, subjects, "noise is put")
    spread = _spread(model, clean, kind, window, layer, pos)
    if isinstance(pos, int):
        _expect_tokens(clean, embedding, [pos], "a state is restored")
    corruption = Corruption(model, clean, embedding, subjects, float(noise), seed)
    story = _story(clean, texts, subjects, [answer] if isinstance(answer, str) else [], said, seed)
    metrics = list(metric) if isinstance(metric, list | tuple) else [metric]
    return CausalTrace(corruption, spread, metrics, story, n=n, window=window, together=together)


@dataclass(frozen=True)
class Corruption:
    """The corruption of a clean run: noise at the subject."""

    model: Captured
    clean: Run
    embedding: Embedding
    subject: tuple[int, ...]
    scale: float
    seed: int

    def of(self, samples: Sequence[int]) -> RunWorld:
        """The corrupted runs of some samples, as one batch: [sample, prompt]."""
        inputs = repeated_inputs(self.model.program, self.clean.inputs, len(samples))
        sources = run_sources(self.model.program, inputs)
        world = World(self.model.graph)
        for name, value in sources.items():
            world.set(name, value)
        # Nothing is demanded of this run but the embeddings: all the rest is computed with noise, once.
        run = Run(self.model, world, sources[SIZES], inputs)
        axes = self.model.locate(Place(self.embedding.node)).view.axes
        place = Place(self.embedding.node, part=MappingProxyType({axes[1]: self.subject}))
        fork = run.fork()
        fork.patch(place, noisy(run.read(place), self.scale, self.seed, samples))
        return fork


class Corrupted(Sequence[Any]):
    """The corrupted runs of groups of samples, each made when it is asked for."""

    def __init__(self, corruption: Corruption, numbers: Sequence[Sequence[int]]) -> None:
        self._corruption, self._numbers = corruption, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        return self._corruption.of(self._numbers[place])


def repeated_inputs(program: Program, inputs: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """The inputs `times` times along the batch; what has no batch stays as it is."""
    if times == 1:
        return dict(inputs)
    found = {}
    for name, value in inputs.items():
        times_along = [
            times if str(size) in program.dimensions.batch else 1 for size in program.shapes[name] or ()
        ]
        found[name] = value.repeat(times_along) if times in times_along else value
    return found


def noisy(present: Tensor, scale: float, seed: int, samples: Sequence[int]) -> Tensor:
    """`present` [sample·prompt, ...] with noise; a sample's depends on the seed and its own number alone."""
    rows = present.shape[0] // len(samples)
    drawn = [noise_of((rows, *present.shape[1:]), f"{seed}/{sample}") for sample in samples]
    return present + (scale * torch.cat(drawn)).to(present.device, present.dtype)


def sampled(metric: Metric, prompts: int) -> Metric:
    """A metric of `prompts` prompts, as one of a batch in which each sample has all of these prompts."""
    expect_prompts(metric, prompts, "the clean run")
    compute: Callable[..., Tensor] = metric.compute

    def of_stack(stack: Tensor) -> Tensor:
        """Samples are worlds to the metric: [world, sample·prompt, ...] as [world·sample, prompt, ...]."""
        worlds, rows = stack.shape[:2]
        found = compute(stack.reshape(worlds * (rows // prompts), prompts, *stack.shape[2:]))
        return found.reshape(worlds, rows) if found.numel() == worlds * rows else found

    def of_outputs(outputs: Any) -> Tensor:
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        rows = max((leaf.shape[0] for leaf in leaves), default=1)
        found = []
        for start in range(0, rows, prompts):

            def cut(leaf: Any, own: slice = slice(start, start + prompts)) -> Any:
                is_batch = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
                return leaf[own] if is_batch else leaf

            one = torch.as_tensor(compute(tree_map(cut, outputs)))
            found.append(one.expand(prompts) if one.ndim == 0 else one)
        return torch.cat(found)

    shown, among = metric.shown, metric.among
    return replace(
        metric,
        compute=of_outputs if metric.whole else of_stack,
        prompts=None,
        of_prompts=None,
        among=None if among is None else lambda columns: sampled(among(columns), prompts),
        shown=None if shown is None else lambda mask: sampled(shown(mask[:prompts]), prompts),
    )


def _subject(model: Captured, texts: Sequence[str], subject: Choice) -> Choice:
    """The positions of the subject: its words are looked for in texts, and are the same in all of them."""
    if not texts or not isinstance(subject, str):
        return subject
    expect_tokenizer(model)
    if _POSITIONS.fullmatch(subject) and not all(subject in text for text in texts):
        return subject
    found = {text: subject_positions(text, subject, model.tokenizer) for text in texts}
    if len(set(found.values())) > 1:
        raise PromptError(
            f"the subject {subject!r} stands at other positions in each prompt ("
            f"{', '.join(str(list(one)) for one in dict.fromkeys(found.values()))}), and noise is put on the "
            "same ones in a batch. Trace the prompts one by one."
        )
    return found[texts[0]]


def _read(model: Captured, texts: Sequence[str], answer: str | Sequence[str] | None, metric: Any) -> Any:
    """Return the metric that was given, the probability of the answer, or None where neither was."""
    if answer is None:
        return metric
    if metric is not None:
        raise SweepError("`answer` and `metric` both say what is read; leave one of them out.")
    if not texts:
        raise PromptError(
            "`answer` is a text, and the prompt was given as tokens: give it as a text too, or the metric as "
            "`cw.prob(token)`."
        )
    expect_tokenizer(model)
    if not is_text(answer):
        raise PromptError(f"`answer` is the text of a token, or one for each prompt, not {describe(answer)}.")
    answers = [answer] * len(texts) if isinstance(answer, str) else list(answer)
    if len(answers) != len(texts):
        raise PromptError(
            f"{len(answers)} answers for {len(texts)} prompts; give one for all, or one for each."
        )
    reader = AnswerReader(model.tokenizer)
    return prob([reader.token(one, text, "`answer`") for one, text in zip(answers, texts, strict=True)])


def _expect_tokens(clean: Run, embedding: Embedding, positions: Sequence[int], what: str) -> None:
    """Raise SweepError where one of some positions is padding in a prompt."""
    shown = shown_positions(clean.model.program, clean.inputs, embedding.node)
    if shown is not None and not bool(shown[:, list(positions)].all()):
        prompt = int((~shown[:, list(positions)]).any(1).nonzero()[0])
        raise SweepError(
            f"{what} at positions {list(positions)}, and in prompt {prompt} there is padding among them. "
            "Trace prompts of one length at a time, or pad on the side where nothing is traced."
        )


def _story(
    clean: Run, texts: Sequence[str], subject: tuple[int, ...], answers: Sequence[str], metric: str, seed: int
) -> Story | None:
    """Return the story of the trace, in words; None where the model has no tokenizer that could write it."""
    known = base_story(clean)
    if not known.prompts:
        return None
    pairs = [
        replace(pair, corrupted_tokens=pair.clean_tokens, answers=tuple(answers), noised=subject)
        for pair in known.prompts
    ]
    if texts:
        pairs = [replace(pair, clean=text) for pair, text in zip(pairs, texts, strict=True)]
    return replace(known, prompts=tuple(pairs), metric=metric, seed=seed)


def _restored(clean: Run, prompts: int) -> Intervention:
    """Put back the clean value, in every sample."""

    def part(place: Place, base: Reading) -> Tensor:
        value: Tensor = clean[place]
        return value.repeat(base.read(place).shape[0] // prompts, *[1] * (value.ndim - 1))

    return Intervention("clean", part, ("clean", clean), runs=(clean,))


def _spread(model: Captured, clean: Run, kind: str, window: int, layers: Choice, positions: Choice) -> Spread:
    """The cells: for each layer and position, the states of the layers in the window around it."""
    known = model.sites.layers(kind)
    if not known:
        model.locate(Place(kind, 0))  # says why there is none
    first = Place(kind, known[0])
    lengths = dict(zip(model.locate(first).view.axes, clean[first].shape, strict=True))
    if "pos" not in lengths:
        raise SweepError(f"{kind} has no positions to restore; its axes are {', '.join(lengths)}.")
    picked = chosen(layers, known[-1] + 1, "layer", kind)
    along = chosen(positions, lengths["pos"], "pos", kind)
    cells = []
    for layer, pos in itertools.product(picked, along):
        part = MappingProxyType({"pos": pos})
        near = [one for one in known if layer - window // 2 <= one < layer - (-window // 2)]
        places = tuple(Place(kind, one, part=part) for one in near)
        cells.append(Cell(places, 0, MappingProxyType({"layer": layer, "pos": pos})))
    return Spread(kind, ("layer", "pos"), (tuple(picked), tuple(along)), tuple(cells))
