"""The inside of a base run, for pages: where the strongest heads look, and what the lens reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.anatomy.places import EdgePlace
from conewise.errors import ConewiseError, SweepError
from conewise.files import Format
from conewise.report.story import JsonRecord, Story
from conewise.runs.reading import Reading
from conewise.runs.run import InputRun
from conewise.sweeps.storage.result_data import ResultData
from conewise.templates import visible

HEADS = 6
"""The number of heads that are shown: those with the largest effects."""

PROMPTS = 2
"""The number of prompts that are shown."""

POSITIONS = 48
"""The number of positions that are shown, the last ones."""

TOP = 3
"""The number of tokens that the lens lists."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """The attention of a head on one prompt: `weights` are [query, key]; `effect` is that of patching it."""

    layer: int
    head: int
    effect: float
    prompt: int
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Likely:
    """A token that the lens finds likely, and its probability."""

    text: str
    prob: float


@dataclass(frozen=True, slots=True)
class LensTable:
    """The lens on one prompt: `cells` are [row, position, rank], `rows` what was read, the input first.

    Its positions are the last ones of the prompt: one, where a model computes logits of the last alone.
    """

    prompt: int
    rows: tuple[str, ...]
    cells: tuple[tuple[tuple[Likely, ...], ...], ...]

    def check(self, most: int) -> None:
        """Raise SweepError where it is no table of probabilities, for a prompt of so many tokens at most."""
        if len({len(row) for row in self.cells}) > 1 or any(len(row) > most for row in self.cells):
            raise SweepError(f"a lens whose rows are not of the last of {most} tokens.")
        if len(self.rows) != len(self.cells):
            raise SweepError(f"a lens of {len(self.cells)} rows with {len(self.rows)} names.")
        for row in self.cells:
            for cell in row:
                if not cell or not all(0 <= one.prob <= 1 for one in cell):
                    raise SweepError("a cell of the lens has no token, or one without a probability.")


@dataclass(frozen=True, slots=True)
class Inside(JsonRecord):
    """The inside of a base run as plain data: JSON both ways.

    `tokens` are those of each prompt that is shown, the last ones of a long prompt; `skipped` says how many
    positions stand before them, `numbers` which prompts of the result they are, from 0. `why_no_patterns` and
    `why_no_lens` say what is in the way, where there are none.
    """

    FORMAT = Format("conewise inside", 1)
    CALLED = "the inside of a run"

    tokens: tuple[tuple[str, ...], ...]
    skipped: int = 0
    numbers: tuple[int, ...] = (0, 1)
    patterns: tuple[Pattern, ...] = ()
    lenses: tuple[LensTable, ...] = ()
    why_no_patterns: str = ""
    why_no_lens: str = ""

    def __post_init__(self) -> None:
        if len(self.numbers) != len(self.tokens):
            raise SweepError(
                f"{len(self.numbers)} numbers of prompts for {len(self.tokens)} prompts' tokens."
            )
        shown: list[Pattern | LensTable] = [*self.patterns, *self.lenses]
        for one in shown:
            if not 0 <= one.prompt < len(self.tokens):
                raise SweepError(f"something of prompt {one.prompt}, and there are {len(self.tokens)}.")
            wide = len(self.tokens[one.prompt])
            if isinstance(one, LensTable):
                one.check(wide)
            elif len(one.weights) != wide or any(len(row) != wide for row in one.weights):
                raise SweepError(f"a pattern that is not of the {wide} tokens of its prompt.")


def inside_of(
    run: Reading,
    result: ResultData,
    story: Story | None = None,
    tokenizer: Any = None,
    numbers: Sequence[int] | None = None,
) -> Inside | None:
    """The strongest heads' attention, and the lens, on the first prompts of a base run.

    `result` says which heads are the strongest: those of its cells that are one head each, by the first
    metric. `numbers` says which prompts of the result are those of the run. Tokens are written by the
    tokenizer, or as the story has them. What the model does not show is left out, and said why. None where
    there is nothing to show.
    """
    run, heads = _first_prompts(run), strongest_heads(result)
    patterns, why_no_patterns, labels = _patterns(run, heads, tokenizer)
    lenses, why_no_lens, read = _lenses(run, tokenizer)
    labels = labels or read
    if not patterns and not lenses:
        return None
    shown = tuple(range(len(labels)) if numbers is None else numbers)[: min(PROMPTS, len(labels))]
    tokens = tuple(_told(row, at, story)[-POSITIONS:] for at, row in zip(shown, labels, strict=False))
    skipped = max(len(labels[0]) - POSITIONS, 0)
    return Inside(tokens, skipped, shown, patterns, lenses, why_no_patterns, why_no_lens)


def _first_prompts(run: Reading) -> Reading:
    """A run of the first prompts alone: a page has no use for what others would cost."""
    model = run.model
    known, given = model.program.dimensions.batch, dict(run.inputs)
    if run.edits or model.batch_is_fixed or not known:
        return run
    for leaf in model.program.inputs:
        for dim, size in enumerate(leaf.shape):
            if str(size) in known and leaf.name in given:
                given[leaf.name] = given[leaf.name][(slice(None),) * dim + (slice(PROMPTS),)]
    return InputRun(model, given)


def _told(labels: tuple[str, ...], prompt: int, story: Story | None) -> tuple[str, ...]:
    """The tokens of a prompt: as they were written, or where only numbers are known, as a story has them."""
    is_numbered = labels == tuple(map(str, range(len(labels))))
    if not is_numbered or story is None or prompt >= len(story.prompts):
        return labels
    pair = story.prompts[prompt]
    own = pair.clean_tokens if story.base == "clean" else pair.corrupted_tokens or pair.clean_tokens
    return tuple(map(visible, own)) if len(own) == len(labels) else labels


def strongest_heads(result: ResultData) -> list[tuple[int, int, float]]:
    """(layer, head, effect) of the cells that patch one head, the largest finite effects first."""
    effects = (result.table[0] - result.base[0]).tolist()
    found: dict[tuple[int, int], float] = {}
    for cell, effect in zip(result.cells, effects, strict=True):
        place = cell.places[0]
        if isinstance(place, EdgePlace):
            continue
        head = place.part.get("head")
        is_head = len(cell.places) == 1 and place.layer is not None and place.name in _HEAD_KINDS
        if is_head and isinstance(head, int) and math.isfinite(effect):
            at = (place.layer or 0, head)
            if abs(effect) > abs(found.get(at, 0.0)):
                found[at] = effect
    order = sorted(found.items(), key=lambda item: -abs(item[1]))
    return [(layer, head, effect) for (layer, head), effect in order[:HEADS]]


_HEAD_KINDS = ("z", "q", "rot_q", "result", "pattern", "attn_scores")
Labels = tuple[tuple[str, ...], ...]


def _patterns(
    run: Reading, heads: list[tuple[int, int, float]], tokenizer: Any
) -> tuple[tuple[Pattern, ...], str, Labels]:
    if not heads:
        return (), "", ()
    found: list[Pattern] = []
    labels: Labels = ()
    for layer, head, effect in heads:
        try:
            seen = run.attention(layer, tokenizer=tokenizer)
        except ConewiseError as error:
            return (), str(error), ()
        labels = seen.labels
        for prompt in range(min(PROMPTS, len(labels))):
            own = seen.tensor[0, prompt, head, -POSITIONS:, -POSITIONS:].double().cpu()
            weights = tuple(tuple(round(weight, 4) for weight in row) for row in own.tolist())
            if torch.isfinite(own).all():
                found.append(Pattern(layer, head, effect, prompt, weights))
    return tuple(found), "", labels


def _lenses(run: Reading, tokenizer: Any) -> tuple[tuple[LensTable, ...], str, Labels]:
    try:
        seen = run.lens(top=TOP, tokenizer=tokenizer)
    except ConewiseError as error:
        return (), str(error), ()
    top, probs = (one[:, :PROMPTS, -POSITIONS:].tolist() for one in (seen.top, seen.top_probs))
    tables = []
    for prompt in range(min(PROMPTS, len(seen.labels))):
        cells = tuple(
            tuple(
                tuple(
                    Likely(seen.text(token), round(prob, 4) if prob == prob else 0.0)
                    for token, prob in zip(*both, strict=True)
                )
                for both in zip(top[row][prompt], probs[row][prompt], strict=True)
            )
            for row in range(len(seen.rows))
        )
        tables.append(LensTable(prompt, seen.rows, cells))
    return tuple(tables), "", seen.labels
