"""A sweep as a page: one file that opens from disk and fetches nothing.

The words (what was asked, what it cost, how it was checked, where it comes from) are those of `sections`. The
maps and the table are drawn in the browser, by the scripts, from the numbers that `packed` sends: numbers as
bytes, names of sites as a rule and not as a list. A million cells are 8 MB of values; their names, written
out, would be 40 MB more. So names are sent as pieces of text between the numbers along the axes wherever
every cell's name is really that, and listed otherwise.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from conewise.anatomy.places import Place
from conewise.anatomy.selectors import Spread
from conewise.errors import SweepError
from conewise.extras import needs
from conewise.files import expect_file
from conewise.program.tensors import Tensor
from conewise.report import wave
from conewise.report.document import document, script, write_document, writing_page
from conewise.report.folded import Folded
from conewise.report.inside import Inside
from conewise.report.sections import (
    accounting,
    checked,
    inside_tables,
    origin,
    question,
    shown_inside,
    speeds,
)
from conewise.report.sent import Colour, SentAlong, SentCosts, SentFixed, SentListed, SentPart, SentSweep
from conewise.report.story import ResultLike, Story
from conewise.report.wave import cone_section, wave_section
from conewise.templates import DARK, LIGHT, asset

with needs("plots"):
    from markupsafe import Markup
    from plotly.colors import diverging, unlabel_rgb
    from plotly.offline import get_plotlyjs


STATES = ("state of the residual stream", "states of the residual stream")
KINDS = {
    "z": ("attention head", "attention heads"),
    "mlp_out": ("MLP", "MLPs"),
    "attn_out": ("attention output", "attention outputs"),
    "resid_pre": STATES,
    "resid_mid": STATES,
    "resid_post": STATES,
    "sites": ("site", "sites"),
}
"""What a part of a sweep is called in a title: one, and many."""

SCRIPT = "javascript/sweep/main.js"

MOST_PER_PROMPT = 4_000_000
"""How many numbers of single prompts a page holds at most; above that it has the means alone."""

COLUMNS = {"layer": ("layer",), "head": ("head", "kv_head"), "pos": ("pos",), "neuron": ("neuron",)}
"""The coordinates that a table shows, and the axes that they are."""

MISSING = -(2**31)


def write_page(
    path: str | Path,
    result: ResultLike,
    story: Story | None = None,
    folded: Folded | None = None,
    inside: Inside | None = None,
) -> Path:
    """Write the page of a sweep to a file, whole or not at all; returns its path."""
    return write_document(path, sweep_page(result, story, folded, inside), SweepError)


def expect_page(path: str | Path) -> None:
    """Raise SweepError where a page cannot be written to `path`, as far as can be known before."""
    with writing_page(Path(path), SweepError):
        expect_file(Path(path))


def sweep_page(
    result: ResultLike,
    story: Story | None = None,
    folded: Folded | None = None,
    inside: Inside | None = None,
    *,
    made_at: datetime | None = None,
) -> str:
    """The page of a sweep as HTML, plotly.js included.

    Without a story the page says what the result itself knows; without a folded graph it has no cones and no
    second view; without the inside of the base run, no attention and no lens.
    """
    styles = [asset("report/theme.css"), asset("report/page.css")]
    scripts = [script(SCRIPT)]
    data: dict[str, object] = {
        "conewise-data": packed(result, story, folded),
        "conewise-speeds": speeds(result, story),
    }
    if folded is not None:
        styles.append(wave.style())
        scripts.insert(0, wave.script())
        data |= wave.data(folded)
    if inside is not None:
        data["conewise-inside"] = shown_inside(inside)
    return document(
        "report/sweep.html",
        heading(result, story),
        styles=styles,
        early=[get_plotlyjs()],
        scripts=scripts,
        data=data,
        facts=_facts(result, story),
        question=question(result, story),
        metrics=result.metrics,
        has_source=result.source is not None,
        unit="prompt" if story is None else story.unit,
        prompt_count=result.per_prompt.shape[-1],
        spread=spread(result),
        inside=None if inside is None else inside_tables(inside),
        cone="" if folded is None else Markup(cone_section(folded, assets=False)),
        accounting=accounting(result, story),
        checked=checked(result),
        origin=origin(result, story, made_at or datetime.now(UTC)),
        wave="" if folded is None else Markup(wave_section(folded, assets=False)),
    )


def heading(result: ResultLike, story: Story | None) -> str:
    """The title of a page: the story's own, or what was patched in which model."""
    if story is not None and story.title:
        return story.title
    model = story.model if story is not None else str(result.provenance.get("model", "a model"))
    counted: dict[str, int] = {}
    for part in result.spreads:
        counted[part.name] = counted.get(part.name, 0) + len(part.cells)
    counts = [f"{count:,} {KINDS.get(name, (name, name))[count != 1]}" for name, count in counted.items()]
    each = "" if len(result.cells) == 1 else " one at a time"
    what = " and ".join(counts) if len(counts) < 3 else f"{len(result.cells):,} sites"
    by = f", approximated by {result.method}" if result.method else ""
    return f"{what} of {model} patched{each}{by}"


def _facts(result: ResultLike, story: Story | None) -> list[tuple[str, str]]:
    """The numbers below the title, and what each is of."""
    count, unit = len(result.cells), "prompt" if story is None else story.unit
    prompts = result.per_prompt.shape[-1]
    return [
        (f"{count:,}", "site" if count == 1 else "sites"),
        (f"{prompts:,}", unit if prompts == 1 else f"{unit}s"),
        (f"{result.plan.ratio:.2f}×", "fewer node evaluations than full re-runs"),
        (f"{result.ledger.seconds:.3g} s", "to compute"),
    ]


def packed(result: ResultLike, story: Story | None, folded: Folded | None = None) -> SentSweep:
    """All numbers of a result, what it takes to name each cell, and what each costs."""
    prompts = result.per_prompt.shape[-1]
    whole = spread(result)
    return {
        "metrics": list(result.metrics),
        "table": floats(result.table),
        "base": floats(result.base),
        "source": _maybe(result.source),
        "prompts": prompts,
        "unit": "prompt" if story is None else story.unit,
        "perPrompt": _maybe(result.per_prompt) if whole else None,
        "basePerPrompt": _maybe(result.base_per_prompt) if whole else None,
        "sourcePerPrompt": _maybe(result.source_per_prompt) if whole else None,
        "parts": [_part(part, start) for part, start in result.parts()],
        "tokens": tokens(story),
        "costs": _costs(result, folded),
        "colours": {
            "light": [_rgb(one) for one in getattr(diverging, LIGHT)],
            "dark": DARK,
        },
    }


def spread(result: ResultLike) -> bool:
    """Whether the page holds the numbers of single prompts."""
    prompts = result.per_prompt.shape[-1]
    return prompts > 1 and result.table.numel() * prompts <= MOST_PER_PROMPT


def floats(numbers: Tensor) -> str:
    """Numbers as the base64 of their 64 bits each, low byte first: NaN and infinities as they are."""
    return _bytes(np.asarray(numbers.detach().cpu().numpy(), dtype="<f8"))


def _maybe(numbers: Tensor | None) -> str | None:
    return None if numbers is None else floats(numbers)


def tokens(story: Story | None) -> list[str]:
    """The token at each position of the base prompts; none where these have different lengths."""
    return [] if story is None else list(story.position_tokens())


def _costs(result: ResultLike, folded: Folded | None) -> SentCosts | None:
    """What the cones of the cells cost; None where it is not known, or known of other cells."""
    if folded is None or sum(count for _, count in folded.runs) != len(result.cells):
        return None
    return {
        "runs": folded.runs,
        "evaluations": [cone.node_evaluations for cone in folded.cones],
        "flops": [sum(cone.flops) for cone in folded.cones],
        "full": (folded.full_evaluations, folded.full_flops),
    }


def _part(part: Spread, start: int) -> SentPart:
    kinds = [cell.kind for cell in part.cells]
    pieces = _pieces(part)
    return {
        "name": part.name,
        "axes": list(part.axes),
        "coordinates": [list(along) for along in part.coordinates],
        "labels": [list(part.labels.get(axis, ())) for axis in part.axes] if part.labels else None,
        "start": start,
        "count": len(part.cells),
        "pieces": pieces,
        "names": None if pieces else [cell.name for cell in part.cells],
        "kind": kinds[0] if len(set(kinds)) == 1 else None,
        "kinds": None if len(set(kinds)) == 1 else kinds,
        "at": {
            name: found
            for name, axes in COLUMNS.items()
            if (found := _column(part, [_first(cell.at, axes) for cell in part.cells])) is not None
        },
    }


def _first(at: Any, axes: Sequence[str]) -> int:
    return next((at[axis] for axis in axes if axis in at), MISSING)


def _column(part: Spread, values: list[int]) -> SentFixed | SentAlong | SentListed | None:
    """A coordinate of every cell: the same for all, the number along an axis, or a list."""
    column = np.asarray(values, dtype=np.int64)
    if (column == column[0]).all():
        return None if values[0] == MISSING else {"fixed": values[0]}
    if column.size == np.prod(part.shape):
        for axis, along in enumerate(part.coordinates):
            shape = [-1 if place == axis else 1 for place in range(len(part.shape))]
            if (column.reshape(part.shape) == np.asarray(along).reshape(shape)).all():
                return {"axis": axis}
    return {"list": _bytes(column.astype("<i4"))}


def _pieces(part: Spread) -> list[str | int] | None:
    """A cell's name as texts and numbers of axes in turn, if that is the name of every cell."""
    is_grid = len(part.cells) == math.prod(part.shape)
    if "site" in part.axes or not is_grid or len(part.cells[0].places) != 1:
        return None
    pieces = _name(part.cells[0].places[0], part.axes)
    for cell, point in zip(part.cells, itertools.product(*part.coordinates), strict=True):
        own = (piece if isinstance(piece, str) else str(point[piece]) for piece in pieces)
        if "".join(own) != cell.name:
            return None
    return pieces


def _name(place: Place, axes: Sequence[str]) -> list[str | int]:
    """A place's name, cut where the numbers along `axes` stand in it."""
    pieces: list[str | int] = [f"{place.name}["]
    where = ({} if place.layer is None else {"layer": place.layer}) | dict(place.part)
    for number, (axis, index) in enumerate(where.items()):
        pieces.append(f"{', ' if number else ''}{axis}=")
        pieces.append(axes.index(axis) if axis in axes else str(index))
    pieces.append(f"{', ' if where else ''}stack={place.stack!r}]" if place.stack else "]")
    return pieces if where or place.stack else [place.name]


def _rgb(text: str) -> Colour:
    """A colour as plotly names it, "rgb(103,0,31)", as whole numbers."""
    red, green, blue = map(int, unlabel_rgb(text))
    return red, green, blue


def _bytes(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
