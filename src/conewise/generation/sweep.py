"""A sweep whose demand is a text: in each world the model goes on writing, with the patches of one cell."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conewise.anatomy.places import EdgePlace, Place, SourcedPlace
from conewise.anatomy.selectors import SelectorLike, Sources, as_selectors, with_sources
from conewise.arguments import as_bytes, checked, shown_bytes
from conewise.checks.hooking import Hook
from conewise.errors import BudgetError, CaptureError, InputMismatchError, PatchError, SweepError
from conewise.generation.decoding import CellPatch, Decoding, Layers, Prompts, Texts, inputs_for, layers_of
from conewise.generation.recorded import is_steppable
from conewise.generation.result import WrittenTexts
from conewise.jobs.digests import inputs_digest
from conewise.jobs.identity import identified
from conewise.jobs.job import BatchPlan, Computed, Computing, Job, JobRun, run_job
from conewise.jobs.runnable import How, Runnable
from conewise.jobs.scheduling import Share
from conewise.jobs.store import Request
from conewise.program.calls import forward_parameters
from conewise.program.export import eager
from conewise.program.foreign import within_memory
from conewise.runs.generate import (
    Positions,
    SiteReader,
    StepPatch,
    When,
    as_shown,
    checked_options,
    decoding_defaults,
    encoder_of,
    expect_padded_in_front,
    expect_reached,
    expect_writes,
    generate,
    hooks_for,
    is_in,
    naming_dtypes,
    prompt_inputs,
    refusing_options,
    step_patch,
)
from conewise.runs.interventions import OwnSources, as_intervention, at_layer
from conewise.runs.metric_words import logit
from conewise.runs.run import can_be_recorded, recorder
from conewise.runs.spreading import spread
from conewise.sweeps.execution.cuda_graph import Record
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.planning.compiler import DEFAULT_MEMORY
from conewise.sweeps.planning.patching import axis_lengths
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.spec import StoredCut, SweepSpec
from conewise.sweeps.storage.provenance import Given, provenance
from conewise.templates import aligned, heading, shown, table
from conewise.threads import Turn, one_module, one_thread

LOGITS = 4
"""Tensors as large as the logits that reading given tokens holds: these, their logarithms, and products."""

NOT_TOGETHER = (
    "num_beams",
    "num_return_sequences",
    "assistant_model",
    "prompt_lookup_num_tokens",
    "streamer",
)
"""Options of `generate` that write several texts, or in another way, for one prompt."""


@dataclass(frozen=True)
class Writing:
    """How texts are written; see `writing`."""

    n: int
    pos: Positions = "all"
    when: When | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """Return what a stored run is compared by."""
        when = None if self.when is None else identified(self.when)
        options = {name: repr(value) for name, value in sorted(self.options.items())}
        return {"n": self.n, "pos": self.pos, "when": when, "seed": self.seed, "options": options}


@checked
def writing(
    n: int,
    *,
    pos: Positions = "all",
    when: Callable[[int], bool] | None = None,
    seed: int = 0,
    **options: Any,
) -> Writing:
    """Create the generation options of a sweep: `model.sweep(..., generate=cw.writing(20, do_sample=True))`.

    Each world generates up to `n` tokens, greedily unless `options` select another strategy: those of the
    module's own `generate` (`do_sample`, `temperature`, `top_k`, `stop_strings`, ...). A sampled text has its
    own random numbers, seeded with `seed`: it equals the text that the same world generates alone after
    `torch.manual_seed(seed)`. `pos` and `when` are those of `Model.generate`: "new" patches no position of
    the prompt, and `when=lambda step: step < 5` patches no step from the fifth generated token on.
    """
    found = checked_options(n, pos, options)
    given = [name for name in NOT_TOGETHER if options.get(name) not in (None, 1)]
    if given:
        raise InputMismatchError(
            f"a sweep writes one text in each world, so that {given[0]!r} means nothing there. Leave it out, "
            "or write one world at a time with `model.generate`."
        )
    return Writing(n, pos, when, seed, found)


@dataclass(frozen=True, repr=False)
class WritingPlan:
    """What a sweep over texts takes; nothing of it is computed.

    `cells` worlds write up to `n` tokens behind each of `prompts` prompts, and so does the unpatched model;
    `chunks` has the cells of each chunk. A pass is a forward of the module: one for the prompts, then one for
    each token. `prompt_rows` is exact: the rows × positions × layers of the prompts' passes; a sweep of one
    world at a time has `prompt_rows_alone`. How many rows the later passes have depends on what is
    written: none is shared at `most_rows`, as many as can be where all texts are equal at `least_rows`.
    `cache_bytes` is the most that keys and values of a chunk take, `logit_bytes` the most for its logits.
    """

    name: str
    cells: int
    prompts: int
    n: int
    layers: int
    chunks: tuple[int, ...]
    order: tuple[int, ...]
    prompt_rows: int
    prompt_rows_alone: int
    least_rows: int
    most_rows: int
    flops: int
    cache_bytes: int
    logit_bytes: int
    max_memory: int
    seconds: float | None = None

    @property
    def passes(self) -> int:
        """The most forwards of the module that there can be."""
        return self.n * len(self.chunks)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a chunk takes: caches, and what is computed with logits."""
        return self.cache_bytes + self.logit_bytes

    def rows(self) -> list[tuple[str, str]]:
        """Return what it says, as labels and values."""
        alone = self.prompt_rows_alone / max(self.prompt_rows, 1)
        return [
            ("texts", f"{self.cells:,} patched, {self.prompts:,} unpatched, up to {self.n} tokens each"),
            (
                "passes",
                f"at most {self.passes:,}, in {len(self.chunks):,} chunks of {max(self.chunks):,} cells",
            ),
            (
                "prompt",
                f"{self.prompt_rows:,} positions through a layer ({alone:.2f} times as many one by one)",
            ),
            ("tokens", f"between {self.least_rows:,} and {self.most_rows:,} positions through a layer"),
            ("FLOPs", f"at most {self.flops:,}"),
            (
                "memory",
                f"caches {shown_bytes(self.cache_bytes)}, logits {shown_bytes(self.logit_bytes)} at most",
            ),
        ]

    def __repr__(self) -> str:
        return (
            f"WritingPlan of {self.cells:,} patched texts and {self.prompts:,} unpatched: at most "
            f"{self.passes:,} passes, {self.flops:,} FLOPs, {shown_bytes(self.peak_bytes)}"
        )

    def __str__(self) -> str:
        return f"WritingPlan, {self.name}:\n" + "\n".join(aligned(self.rows(), "  "))

    def _repr_html_(self) -> str:
        return shown(heading("WritingPlan", self.name), table(self.rows()))


@checked
@one_thread
class WritingSweep(Runnable[WrittenTexts]):
    """Generate text in a world for each cell; created by `model.sweep(..., generate=20)`.

    `base` is text, several texts of any lengths, messages for the tokenizer's chat template, token ids, or
    inputs by name. All texts are generated together: one forward for each new token, over all unfinished
    texts.
    """

    @within_memory("this sweep over texts")
    def __init__(
        self, model: Any, sites: SelectorLike, *, base: Any, source: Any, writing: Writing, judge: Any = None
    ) -> None:
        expect_writes(model)
        if not {"past_key_values", "cache_params"} & forward_parameters(model.module).keys():
            raise CaptureError(
                f"{model.name} writes without a cache, so that each token would take a forward over the "
                "whole text. Write one text at a time with `model.generate`."
            )
        self._encoder = encoder_of(model.module)
        self.model, self.writing, self.judge, self.base = model, writing, judge, base
        self.source = source
        reads = model.tokenizer
        if "stop_strings" in writing.options and reads is None:
            raise InputMismatchError(
                "`stop_strings` are looked for in texts, and the model has no tokenizer."
            )
        given = prompt_inputs(model, conversation(base, reads), reads)
        model.expect_known_ids(given)
        ids, mask = given["input_ids"], given["attention_mask"].long()
        if self._encoder is None:
            expect_padded_in_front(mask)
        self.prompts = Prompts(ids, mask) if self._encoder is None else Prompts(ids, mask).behind()
        lengths = sorted({*self.prompts.lengths})
        self.own, self.selectors = OwnSources(model), as_selectors(sites)
        if isinstance(source, Sources):
            self.selectors, self.source = with_sources(self.selectors, source), None
        found = spread(self.selectors, model, [self._lengths(own) for own in lengths], self.own.sourced)
        self.spreads, self.cells, self._found = found.spreads, found.cells, found
        bare = (place for cell in self.cells for place in cell.places if not isinstance(place, SourcedPlace))
        if self.source is None and (place := next(bare, None)) is not None:
            raise SweepError(
                f"no source for {place}: give the sweep one, `source=cw.add(...)`, or each cell its own, "
                "`cw.cell(place, source=...)`."
            )
        self.patches = [
            [self._patch(place) for place in self._places(at)] for at in range(1, len(self.cells) + 1)
        ]

    def _places(self, world: int) -> Sequence[Place]:
        """The places of a patched world, counted from 1; of modules that are called again, each call."""
        found: Sequence[Place] = self.model.each_call(self.cells[world - 1].places)
        return found

    def _lengths(self, length: int) -> Callable[[Any], dict[str, int]]:
        """The lengths of a site's axes in a prompt of so many tokens; its module may never have seen one."""
        example = self.model.signature.example
        shape = facts_of(self.model).shape(self.model.signature.bind(example.args, example.kwargs))
        changed = dict.fromkeys(("pos", "query_pos", "key_pos"), length)

        def lengths(located: Any) -> dict[str, int]:
            found = axis_lengths(located, shape)
            return {axis: changed.get(axis, own) for axis, own in found.items()}

        return lengths

    def value_of(self, place: Place) -> tuple[Place, Any]:
        """A place, and what is put there."""
        if isinstance(place, EdgePlace):
            raise PatchError(f"{place} is an edge, which is patched in runs; texts are swept over sites.")
        if not isinstance(place, SourcedPlace):
            return place, at_layer(self.source, place)
        bare = Place(place.name, place.layer, place.stack, place.part)
        return bare, at_layer(self.own.given[place.number], bare)

    def _patch(self, given: Place) -> CellPatch:
        """The patch of a place, for prompts of each length."""
        place, value = self.value_of(given)
        node = self.model.locate(place).node
        hook = hooks_for(self.model, {node: place})[node]
        made = {length: self._step_patch(place, value, hook, length) for length in {*self.prompts.lengths}}
        first = next(iter(made.values()))
        if hook.shape is not None:
            made = {length: as_shown(self.model, one) for length, one in made.items()}
        is_zero = first.value is torch.zeros_like
        return CellPatch(hook, made.__getitem__, self._shift(value, first), is_zero)

    def _shift(self, value: Any, patch: StepPatch) -> tuple[Tensor, float] | None:
        """The vector that a patch adds and its scale, where it does so and texts have rows of its part."""
        vector, axes = getattr(value, "shift", None), patch.found.part_axes
        if vector is None or axes[:1] != ("batch",) or vector.ndim >= len(axes):
            return None
        return vector, value.scale

    def _step_patch(self, place: Place, value: Any, hook: Hook, length: int) -> StepPatch:
        how, is_read = self.writing, is_in(hook.boundary.call.path, self._encoder)
        length = length if is_read or self._encoder is None else 1  # a decoder begins with one token
        at = counted_from_start(place, length)
        expect_reached(at, length if is_read else length + how.n - 1)
        return step_patch(self.model, at, value, is_new=how.pos == "new", when=how.when)

    @cached_property
    def layers(self) -> Layers:
        """The layers that rows are shared in."""
        known: dict[str, Layers] = vars(self.model).setdefault("_writing_layers", {})
        if "found" not in known:
            with self.model_alone():
                known["found"] = layers_of(self.model.module)
        return known["found"]

    @property
    def _turn(self) -> Turn:
        found: Turn = self.model._turn
        return found

    def decoding(self, cells: Sequence[int]) -> Decoding:
        """Return what writes the texts of some cells, and the unpatched ones."""
        patches = [self.patches[cell] for cell in cells]
        module, program = self.model.module, self.model.program
        how, record = self.writing, self._record
        return Decoding(module, program, self.layers, self.prompts, patches, how.n, how.seed, record)

    @property
    def _record(self) -> Record | None:
        """Records steps, where they can be replayed; found out once for a model."""
        known, program = vars(self.model), self.model.program
        if "_writing_record" not in known:
            is_able = can_be_recorded(program) and is_steppable(self.model.module, self._forward)
            known["_writing_record"] = recorder(next(iter(program.devices))) if is_able else None
        found: Record | None = known["_writing_record"]
        return found

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Any:
        return self.model.module(**inputs_for(self.model.module, ids, mask, cache))

    def written(self, cells: Sequence[int]) -> Texts:
        """Write the unpatched texts, and those of some cells."""
        options = {**decoding_defaults(self.model.module), **self.writing.options}
        if "stop_strings" in options:
            options["tokenizer"] = self.model.tokenizer
        with refusing_options(options), self.model_alone():
            return self.decoding(cells).run(options)

    # -- one text at a time --------------------------------------------------------------------

    def alone(self, world: int, text: int) -> list[int]:
        """The tokens of one text, written alone by hooks on the module; world 0 is unpatched."""
        how, length = self.writing, self.prompts.lengths[text]
        options = dict(how.options)
        patches = []
        for patch, place in zip(self.patches[world - 1], self._places(world), strict=True) if world else ():
            patches.append((patch.of(length).place, self.value_of(place)[1]))
        ids = self.prompts.rows[text][None]
        with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
            torch.manual_seed(how.seed)
            found = generate(
                self.model,
                ids,
                how.n,
                patches,
                how.pos,
                self.model.tokenizer,
                how.when,
                options,
            )
        tokens: list[int] = found.new[0].tolist()
        return tokens

    @contextmanager
    def model_alone(self) -> Iterator[None]:
        """Have the module to oneself, as texts are written with it."""
        with one_module(), eager(self.model.module), naming_dtypes(self.model.module):
            yield

    def forced(self, tokens: Tensor, read: Place | None = None) -> Iterator[tuple[slice, Tensor, Any]]:
        """Read given tokens [world, prompt, n] in their worlds, some worlds at a time: nothing is written.

        Yields which worlds they are, the logits that predict the tokens, and the values that `read` names, at
        the positions of these. The first world of `tokens` is the unpatched one.
        """
        worlds, prompts, n = tokens.shape
        module = self.model.module
        row = int(getattr(module.config.get_text_config(), "vocab_size", 1)) * n * 4 * LOGITS
        count = max(1, DEFAULT_MEMORY // (prompts * row))
        for start in range(0, worlds, count):
            some = range(start, min(start + count, worlds))
            cells = [world - 1 for world in some if world]
            with self.model_alone():
                decoding = self.decoding(cells)
                reader = None if read is None else SiteReader(self.model, read)
                # The unpatched world stands in front of each.
                own = tokens[[0, *(cell + 1 for cell in cells)]]
                logits = decoding.forced(own, () if reader is None else (reader,))
            value = None if reader is None else reader.value()[:, -n:]
            value = None if value is None else value.reshape(*own.shape, *value.shape[2:])
            first = 0 if start == 0 else 1
            yield slice(start, some.stop), logits[first:], None if value is None else value[first:]

    def said(self, tokens: Tensor, prompts: Tensor) -> Tensor:
        """The unpatched model's log probabilities of tokens [text, n] behind the prompts of these numbers."""
        known = Prompts(self.prompts.ids[prompts], self.prompts.mask[prompts])
        module, how = self.model.module, self.writing
        unpatched = Decoding(module, self.model.program, self.layers, known, [], how.n, how.seed)
        logits = unpatched.forced(tokens[None])[0]
        found: Tensor = torch.log_softmax(logits, -1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
        return found

    # -- plan ----------------------------------------------------------------------------------

    def plan(self, max_memory: int | str | None = None) -> WritingPlan:
        """Return the cost of generating all texts; nothing is generated."""
        return self._planned(as_bytes(max_memory), None)

    def _planned(self, max_memory: int | None, cut: StoredCut | None) -> WritingPlan:
        layers, texts, n = max(len(self.layers.paths), 1), len(self.prompts.ids), self.writing.n
        first = [min((self._level(one) for one in own), default=layers + 1) for own in self.patches]
        order = sorted(range(len(first)), key=lambda cell: -first[cell])
        width = self.prompts.ids.shape[1] + (self._encoder is not None)
        row = self.layers.cached * (width + n)
        module = self.model.module
        vocabulary = int(getattr(module.config.get_text_config(), "vocab_size", 0))
        logits = vocabulary * 4 * 3  # scores, their probabilities, and what is chosen from
        limit = DEFAULT_MEMORY if max_memory is None else max_memory
        fits = limit // max(texts * (row + logits), 1) - 1
        if cut is not None and cut.chunks is not None:
            chunks = list(cut.chunks)
        else:
            least = 2 * texts * (row + logits)
            if fits < 1:
                taken = f"two texts of {texts:,} prompts take {shown_bytes(least)}"
                raise BudgetError(taken, shown_bytes(limit), least)
            chunks = [len(part) for part in np.array_split(np.arange(len(order)), -(-len(order) // fits))]
        prompt_rows = fewest = start = 0
        for count in chunks:
            own = [first[cell] for cell in order[start : start + count]]
            start += count
            for level in range(layers):
                rows = texts * (1 + sum(level >= one for one in own))
                prompt_rows += rows * width
                fewest += rows * (n - 1)
        worlds = len(order) + len(chunks)
        weights = sum(p.numel() for p in module.parameters())
        most = worlds * texts * layers * (n - 1)
        flops = 2 * weights * (prompt_rows // layers + most // layers)
        peak = max(chunks) + 1
        return WritingPlan(
            self.model.name,
            len(order) * texts,
            texts,
            n,
            layers,
            tuple(chunks),
            tuple(order),
            prompt_rows,
            len(order) * layers * (sum(self.prompts.lengths) + texts * (self._encoder is not None)),
            fewest,
            most,
            flops,
            peak * texts * row,
            peak * texts * logits,
            limit,
        )

    def _level(self, patch: CellPatch) -> int:
        return self.layers.level(patch.hook.boundary) if self.layers.paths else 0

    # -- run -----------------------------------------------------------------------------------

    @within_memory("this sweep over texts")
    def _run(self, how: How, *, verify: int = 0) -> WrittenTexts:
        """`verify`: so many random texts are written again, each alone, by hooks on the module."""
        found: WrittenTexts = run_job(WritingJob(self, how.max_memory), how)
        if self.judge is not None:
            found = found.judged(self.judge)
        return replace(found, verification=found.verify(n=verify)) if verify else found

    def request(self, weights: Any) -> Request:
        """Return what identifies the sweep, for a store."""
        names = ["unpatched", *(cell.name for cell in self.cells)]
        spec = SweepSpec(self._found.places, self._found.names, (logit(0),))
        given = {"input_ids": self.prompts.ids, "attention_mask": self.prompts.mask}
        own = [] if self.source is None else [as_intervention(self.source, self.model)]

        def identity() -> dict[str, Any]:
            about = provenance(self.model, spec, Given((), [*self.own, *own]), weights, strict=True)
            return {**about, "prompts": inputs_digest(given), "generate": self.writing.identity()}

        return Request(len(names), 1, identity, lambda: names, self.prompts.ids.device, "sweep over texts")

    def __repr__(self) -> str:
        return (
            f"Sweep over texts: {len(self.cells)} worlds of {self.model.name}, up to {self.writing.n} tokens "
            f"behind {len(self.prompts.ids)} prompts"
        )

    def _repr_html_(self) -> str:
        return heading("Sweep over texts", repr(self).removeprefix("Sweep over texts: "))


def conversation(base: Any, tokenizer: Any) -> Any:
    """The prompts of messages, by the tokenizer's chat template; all else as it was given."""

    def is_messages(one: Any) -> bool:
        is_list = isinstance(one, list | tuple) and len(one) > 0
        return is_list and all(isinstance(turn, Mapping) and "role" in turn for turn in one)

    if not isinstance(base, list | tuple) or not base:
        return base
    several = [base] if is_messages(base) else list(base)
    if not all(map(is_messages, several)):
        return base
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputMismatchError(
            "messages were given, and the model has no tokenizer with a chat template to make a prompt of "
            "them. Give the prompt as text."
        )
    rows = [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
        for one in several
    ]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def counted_from_start(place: Place, length: int) -> Place:
    """The place with positions counted from the start of a prompt of so many tokens."""
    pos = place.part.get("pos")

    def counted(at: int | None) -> int | None:
        return at + length if at is not None and at < 0 else at

    if pos is None:
        return place
    if isinstance(pos, slice):
        found: Any = slice(counted(pos.start), counted(pos.stop), pos.step)
    else:
        found = counted(pos) if isinstance(pos, int) else tuple(map(counted, pos))
    return Place(place.name, place.layer, place.stack, {**place.part, "pos": found})


# -- the job ---------------------------------------------------------------------------------------


class WritingJob(Job[WrittenTexts]):
    """One run of a sweep over texts. The first world is the unpatched one."""

    def __init__(self, sweep: WritingSweep, max_memory: int | None) -> None:
        super().__init__(sweep.model, len(sweep.cells) + 1, 1)
        self.sweep, self.max_memory = sweep, max_memory

    def stored(self) -> Request:
        """Return what identifies the sweep."""
        return self.sweep.request(self.weights.whole)

    def plan(self, batch: int, cut: Callable[[str], StoredCut | None]) -> BatchPlan:
        """Cut the cells into chunks that fit."""
        del batch
        with self.phases.during("planning"):
            known = cut("texts")
            own = None if known is None else replace(known, chunks=_less_first(known.chunks))
            plan = self.sweep._planned(self.max_memory, own)
        sizes = [plan.chunks[0] + 1, *plan.chunks[1:]]
        ends = np.cumsum(sizes).tolist()
        chunks = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        order = [0, *(cell + 1 for cell in plan.order)]
        text = json.dumps({"chunks": sizes, "order": order})
        cut_now = StoredCut("texts", tuple(sizes))
        return BatchPlan(cut_now, self.max_memory, chunks, sizes, order, lambda: text, plan=plan)

    def here(self) -> WritingComputing:
        """Return what writes in this process."""
        return WritingComputing(self.sweep, self)

    def elsewhere(self) -> tuple[Any, dict[str, Any]]:
        """Return what makes the same of a worker's own model."""
        sweep = self.sweep
        return WritingComputing.of, {
            "kind": type(sweep),
            "sites": sweep.selectors,
            "base": {"input_ids": sweep.prompts.ids, "attention_mask": sweep.prompts.mask},
            "source": sweep.source,
            "writing": sweep.writing,
        }

    def names(self, cells: Sequence[int]) -> tuple[str, ...]:
        """Return the names of cells."""
        return tuple("unpatched" if cell == 0 else self.sweep.cells[cell - 1].name for cell in cells)

    def result(self, run: JobRun[WrittenTexts]) -> WrittenTexts:
        """Return all texts. Raises SweepError where some of them could not be written."""
        if run.missing:
            whys = dict.fromkeys(one.why for one in run.missing)
            raise SweepError(f"some texts could not be written: {'; '.join(whys)}")
        (batch,), n = run.batches, self.sweep.writing.n
        rows = run.values(0)
        numbers = torch.empty_like(rows)
        numbers[torch.tensor(list(batch.plan.order))] = rows
        return WrittenTexts.of(
            self.sweep, batch.plan.plan, run.ledger, numbers.reshape(len(numbers), 2, n, -1)
        )


def _less_first(chunks: Any) -> Any:
    """The cells of each chunk without the unpatched world, which stands in the first."""
    return None if chunks is None else (chunks[0] - 1, *chunks[1:])


class WritingComputing(Computing):
    """Writes the texts of chunks; `sweep` is that of this process."""

    def __init__(self, sweep: WritingSweep, job: WritingJob | None = None) -> None:
        super().__init__()
        self.sweep, self._job = sweep, job
        self.sizes: list[int] = []
        self.order: list[int] = []

    @classmethod
    def of(cls, model: Any, kind: Any, **asked: Any) -> WritingComputing:
        """Return that of a worker, of its model and of what was asked."""
        return cls(kind(model, asked.pop("sites"), **asked))

    def know_plan(self, batch: int, text: str) -> None:
        """Be told how the cells are cut."""
        del batch
        found = json.loads(text)
        self.sizes, self.order = found["chunks"], found["order"]

    @contextmanager
    def begin(self, batch: int) -> Iterator[WritingComputing]:
        """Begin with the prompts, all of which every chunk has."""
        del batch
        yield self

    def count(self, chunk: int, ledger: SweepLedger) -> None:
        """Count nothing: how much a chunk took is known when it is written."""

    def compute(self, share: Share, ledger: SweepLedger, memory: int | None, ahead: Any = None) -> Computed:
        """Write the texts of chunks, or of some worlds of one."""
        del memory
        if self._job is not None and not self.sizes:
            text = self._job.plan(0, lambda _: None).text
            assert text is not None
            self.know_plan(0, text())
        ends = np.cumsum(self.sizes).tolist()
        if share.worlds is not None:
            spans = [(share.first, share.first + share.worlds)]
        else:
            spans = [(ends[chunk] - self.sizes[chunk], ends[chunk]) for chunk in share.chunks]

        def rows() -> Generator[Tensor]:
            for number, (first, stop) in enumerate(spans):
                if ahead is not None and number == len(spans) - 1:
                    ahead()
                yield self._written(self.order[first:stop], ledger)

        prompts = len(self.sweep.prompts.ids)
        nothing = torch.zeros(2 * self.sweep.writing.n, prompts, dtype=torch.float64)
        return Computed(rows(), lambda: nothing, lambda: None)

    def _written(self, worlds: Sequence[int], ledger: SweepLedger) -> Tensor:
        """[world, tokens and log probabilities, prompt] of some worlds."""
        patched = [world - 1 for world in worlds if world]
        texts = self.sweep.written(patched)
        ledger.launches += len(texts.layer_rows)
        ledger.node_evaluations += sum(texts.layer_rows)
        numbers = np.concatenate([texts.tokens.astype(np.float64), texts.log_probs], axis=2)
        at = {cell: number for number, cell in enumerate(patched, start=1)}
        rows = [at[world - 1] if world else 0 for world in worlds]
        return torch.from_numpy(numbers[rows]).transpose(1, 2)
