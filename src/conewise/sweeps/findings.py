"""What a result found, in sentences and laid out in rows and columns: for notebooks, pages and terminals."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conewise.anatomy.places import Place, SourcedPlace
from conewise.anatomy.selectors import Cell, Spread
from conewise.sweeps.statistics import statistics_of
from conewise.sweeps.storage.result_data import ResultData
from conewise.templates import Heatmap

TOLD, FEW, ALL = 3, 0.1, 0.95
"""So many sites are told of, which move the metric by this share at least; from which share on it is all."""

MOST_SHARE = 10
"""An effect of more than so many times the difference of base and source is not a share of it."""

SPOKEN = {
    "z": "head",
    "head_out": "head",
    "mlp_out": "MLP",
    "attn_out": "attention",
    "resid_pre": "the residual stream before layer",
    "resid_mid": "the residual stream between attention and MLP of layer",
    "resid_post": "the residual stream after layer",
}


def spoken(cell: Cell) -> str:
    """A cell as people say it: head 23.3, MLP 0, the residual stream after layer 4 at position 9."""
    return " + ".join(_spoken(place) for place in cell.places)


def _spoken(place: Place) -> str:
    part = dict(place.part)
    kind, layer = SPOKEN.get(place.name), place.layer
    if kind is None or layer is None or place.stack:
        return str(place)
    head = part.pop("head", None)
    at = part.pop("pos", None)
    if part or (kind == "head") != isinstance(head, int) or not isinstance(at, int | None):
        return str(place)
    number = f"{layer}.{head}" if head is not None else f"{layer}"
    label = f" ({place.label})" if isinstance(place, SourcedPlace) else ""
    return f"{kind} {number}" + ("" if at is None else f" at position {at}") + label


def strongest(result: ResultData, metric: int, count: int) -> list[tuple[float, Cell]]:
    """The cells with the largest finite effects on a metric, either way, and these effects."""
    effects = result.table[metric] - result.base[metric]
    sizes = effects.abs().where(effects.isfinite(), -1.0)
    order = sizes.topk(min(count, len(sizes))).indices.tolist()
    cells = result.cells
    return [(float(effects[at]), cells[at]) for at in order if sizes[at] >= 0]


def finding(result: ResultData, metric: int = 0) -> str:
    """The finding in a sentence: the sites that move a metric most, and how far each of them does."""
    name, base = result.metrics[metric], float(result.base[metric])
    known = strongest(result, metric, TOLD)
    about = "By estimate, " if result.method else ""
    if not known or known[0][0] == 0:
        what = "no site changes" if known else "nothing is known of"
        return _sentence(f"{about}{what} {name} (base {base:.4g})")
    told, span = _told(result, metric), _span(result, metric)
    if not span:
        (effect, cell), *others = told
        first = f"{spoken(cell)} moves {name} most, by {effect:+.3g} (base {base:.4g})"
        return _sentence(about + "; ".join([first, *(f"{spoken(one)} by {by:+.3g}" for by, one in others)]))
    verb = _verb(result)
    ends = f" of the difference in {name} (base {base:.4g}, source {base + span:.4g})"
    moved = [_moved(cell, effect / span, verb, "" if at else ends) for at, (effect, cell) in enumerate(told)]
    return _sentence(about + "; ".join(moved))


def _span(result: ResultData, metric: int) -> float:
    """The distance from the base to the source; 0 where there is no source, or next to no distance."""
    if result.source is None:
        return 0.0
    span = float(result.source[metric] - result.base[metric])
    largest = max((abs(effect) for effect, _ in strongest(result, metric, 1)), default=0.0)
    return 0.0 if largest > MOST_SHARE * abs(span) else span


def _told(result: ResultData, metric: int) -> list[tuple[float, Cell]]:
    """The effects that a finding names, the largest first; those of any change of the words come last."""
    known, span = strongest(result, metric, TOLD), _span(result, metric)
    told = [one for one in known if abs(one[0]) >= FEW * abs(known[0][0])]
    return sorted(told, key=lambda one: bool(span) and _is_word_itself(one[1], one[0] / span))


def _verb(result: ResultData) -> str:
    """Clean values restore what the corrupted run lost; corrupted ones remove what the clean run has."""
    story = result.story
    if story is None:
        return "accounts for"
    return "removes" if story.base == "clean" else "restores"


def _moved(cell: Cell, share: float, verb: str, of: str) -> str:
    """Describe how far a site moves the metric; `of` is said of the first one alone."""
    name = spoken(cell)
    alone = " alone" if of and len(cell.places) == 1 else ""
    if share < 0:
        return f"{name} has the opposite effect, {-share:.0%}{of}"
    if not ALL <= share <= 2 - ALL:
        return f"{name}{alone} {verb} {share:.0%}{of}"
    why = ", as any change of the words would" if _is_word_itself(cell, share) else ""
    return f"{name}{alone} {verb} all{of or ' of it'}{why}"


def _is_word_itself(cell: Cell, share: float) -> bool:
    """True where patching a site is much the same as changing the prompt."""
    place = cell.places[0]
    is_early = len(cell.places) == 1 and place.layer == 0 and not place.part and place.name in SPOKEN
    return is_early and share >= ALL


def _sentence(words: str) -> str:
    first = words.split(" ", 1)[0]
    is_word = first.isalpha()  # and no name of a site, which is written as it is
    return f"{words[:1].upper() if is_word else words[:1]}{words[1:]}."


def certainty(result: ResultData, metric: int = 0) -> str:
    """The certainty of a finding: its number of prompts, its interval, and whether it was verified."""
    prompts = result.per_prompt.shape[-1]
    unit = "prompt" if result.story is None else result.story.unit
    said = [f"{prompts:,} {unit}s" if prompts > 1 else f"one {unit}, so nothing is known about others"]
    if prompts > 1 and result.base_per_prompt is not None:
        for _, cell in _told(result, metric)[:1]:
            at = result.cells.index(cell)
            effects = result.per_prompt[metric, at] - result.base_per_prompt[metric]
            found = statistics_of(effects.double()[None], resamples=1)
            low, high = float(found.low[0]), float(found.high[0])
            said.append(f"{found.level:.0%} interval of {spoken(cell)} {low:+.3g} to {high:+.3g}")
    if result.method:
        said.append(f"approximate ({result.method}), `check()` computes some of them exactly")
    elif result.verification is None:
        said.append("not verified yet, `verify()` runs random sites again with hooks on the module")
    elif result.verification.ok:
        said.append(f"{result.verification.cells:,} random sites were run again, and agree")
    else:
        said.append(f"verification {result.verification}")
    if result.missing:
        said.append(f"{sum(len(one.cells) for one in result.missing):,} sites could not be computed")
    return _sentence("; ".join(said))


def cost(result: ResultData) -> str:
    """The cost of a result, in a sentence."""
    plan, ledger = result.plan, result.ledger
    saved = f", {plan.ratio:.2f} times fewer than full re-runs" if plan.full_evaluations else ""
    return _sentence(
        f"{len(result.cells):,} worlds, {ledger.node_evaluations:,} node evaluations{saved}; "
        f"{ledger.seconds:.3g} s ({plan.evaluator})"
    )


# ------------------------------------------------------------------------------------------
# A selector's cells as rows and columns, for the figures of plotly and the heatmaps of notebooks.

LETTERS = {
    "layer": "L",
    "head": "H",
    "kv_head": "K",
    "expert": "E",
    "pos": "P",
    "query_pos": "Q",
    "key_pos": "K",
    "neuron": "N",
    "latent": "F",
}

POSITIONS = ("pos", "query_pos", "key_pos")
"""Axes that are labelled by tokens."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Cells in rows and columns, by their number in the selector; None where there is no cell."""

    rows: list[str]
    columns: list[str]
    cells: list[list[int | None]]
    row_title: str = ""
    column_title: str = ""

    def laid_out(self, values: Sequence[Any], gap: Any = None) -> list[list[Any]]:
        """Return what there is for each cell, in rows; `gap` where there is no cell."""
        return [[gap if one is None else values[one] for one in row] for row in self.cells]


def panel(part: Spread, tokens: Sequence[str] = ()) -> Panel:
    """Edges as writers by readers, pairs as cells by cells, else the last axis across and the others down.

    One axis alone is one row. `tokens` are those at each position, where they are known.
    """
    if part.axes == ("edge",):
        return _edges(part)
    if part.ends:
        return _pairs(part)
    if len(part.axes) < 2:
        axis = part.axes[0] if part.axes else "site"
        columns = (
            [cell.name for cell in part.cells]
            if axis == "site" or not part.axes
            else _labels(part, 0, tokens)
        )
        return Panel([""], columns, [list(range(len(part.cells)))], "", axis)
    width = part.shape[-1]
    numbers = list(range(len(part.cells)))
    rows = [list[int | None](numbers[start : start + width]) for start in range(0, len(numbers), width)]
    return Panel(
        _row_labels(part, tokens), _labels(part, -1, tokens), rows, " × ".join(part.axes[:-1]), part.axes[-1]
    )


STRONG = 0.99
"""The share of the effects that colours tell apart: the few larger ones have the strongest colour too."""


def strong(result: ResultData, metric: int) -> float:
    """The effect from which on a heatmap has its strongest colour."""
    sizes = (result.table[metric] - result.base[metric]).abs()
    sizes = sizes[sizes.isfinite()].sort().values
    return float(sizes[min(len(sizes) - 1, math.ceil(STRONG * (len(sizes) - 1)))]) if len(sizes) else 0.0


def heatmaps(result: ResultData, metric: int, tokens: Sequence[str] = ()) -> list[str]:
    """The effects on a metric, a heatmap for each selector, all by one scale."""
    base, largest = float(result.base[metric]), strong(result, metric)
    values = result.table[metric].tolist()
    effects = [value - base for value in values]
    is_by_layer = any(part.axes[:1] == ("layer",) and len(part.axes) == 2 for part in result.spreads)
    drawn = []
    for part, start in result.parts():
        own = range(start, start + len(part.cells))
        laid = panel(part, tokens)
        if is_by_layer and part.axes == ("layer",):  # beside the others, whose rows are layers
            laid = Panel(laid.columns, [""], [[one] for one in laid.cells[0]], laid.column_title)
        told = [
            f"{cell.name}: {effects[at]:+.4g} ({values[at]:.4g})"
            for cell, at in zip(part.cells, own, strict=True)
        ]
        made = Heatmap(
            laid.laid_out([effects[at] for at in own]),
            [html.unescape(name) for name in laid.rows],
            [html.unescape(name) for name in laid.columns],
            laid.laid_out(told, ""),
            laid.row_title,
            laid.column_title,
            part.name,
            largest,
        )
        drawn.append(made.html())
    return drawn


def plain(token: str) -> str:
    """A token as text that Plotly does not take for tags."""
    return html.escape(token.replace("\n", "⏎").strip() or "␣", quote=False)


def _edges(part: Spread) -> Panel:
    """Writers by readers; what is no edge stays empty."""
    ends = [cell.name.split("->", 1) for cell in part.cells]
    ends = [[writer, reader.replace(f"{writer}->", "")] for writer, reader in ends]
    rows, columns = (
        {name: at for at, name in enumerate(dict.fromkeys(one))} for one in zip(*ends, strict=True)
    )
    cells: list[list[int | None]] = [[None] * len(columns) for _ in rows]
    for number, (writer, reader) in enumerate(ends):
        cells[rows[writer]][columns[reader]] = number
    return Panel(list(rows), list(columns), cells, "writer", "reader")


def _pairs(part: Spread) -> Panel:
    """Cells by cells, the same on both sides of the diagonal; single cells stand on it, or nothing does."""
    cells: list[list[int | None]] = [[None] * len(part.ends) for _ in part.ends]
    for number, (row, other) in enumerate(part.pairs()):
        cells[row][other] = cells[other][row] = number
    return Panel(list(part.ends), list(part.ends), cells)


def _labels(part: Spread, axis: int, tokens: Sequence[str]) -> list[str]:
    """The labels along an axis: numbers, names, or a position's token with its number."""
    labels = part.labels_of(axis)
    if part.axes[axis] not in POSITIONS or not tokens:
        return labels
    numbers = part.coordinates[axis]
    return [
        f"{plain(tokens[number])} {number}" if 0 <= number < len(tokens) else label
        for number, label in zip(numbers, labels, strict=True)
    ]


def _row_labels(part: Spread, tokens: Sequence[str]) -> list[str]:
    """The numbers along the first of two axes; along the first of more, numbers with letters: L0 H3."""
    if len(part.axes) == 2:
        return _labels(part, 0, tokens)
    letters = [LETTERS.get(axis, f"{axis} ") for axis in part.axes[:-1]]
    along = [part.labels_of(axis) for axis in range(len(part.axes) - 1)]
    return [
        " ".join(f"{letter}{name}" for letter, name in zip(letters, point, strict=True))
        for point in itertools.product(*along)
    ]
