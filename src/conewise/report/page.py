"""A sweep as a page: one file that opens from disk and fetches nothing.

The texts (the question, the cost, the check, the origin) are written here, by the template `sweep.html`. The
maps and the table are drawn in the browser, by the scripts, from the numbers that `packed` sends: numbers as
bytes, names of sites as a rule and not as a list. A million cells are 8 MB of values; their names, written
out, would be 40 MB more. So names are sent as pieces of text between the numbers along the axes wherever
every cell's name is really that, and listed otherwise.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
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
from conewise.report.accounting import Row, accounting, saved_shares
from conewise.report.document import (
    document,
    number,
    origin,
    prompt_pairs,
    script,
    write_document,
    writing_page,
)
from conewise.report.folded import Folded
from conewise.report.inside import Inside, Likely
from conewise.report.sent import (
    Colour,
    SentAlong,
    SentCosts,
    SentFixed,
    SentInside,
    SentListed,
    SentPart,
    SentPattern,
    SentSweep,
)
from conewise.report.story import Story
from conewise.sweeps.findings import certainty, finding
from conewise.sweeps.storage.result_data import CellCheck, ResultData
from conewise.templates import DARK, LIGHT, asset

with needs("plots"):
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
"""Words of a title for the parts of a sweep: one, and many."""

SCRIPT = "javascript/sweep/main.js"

MOST_PER_PROMPT = 4_000_000
"""The most numbers of single prompts that a page holds; above that it has the means alone."""

COLUMNS = {"layer": ("layer",), "head": ("head", "kv_head"), "pos": ("pos",), "neuron": ("neuron",)}
"""The coordinates that a table shows, and the axes that they are."""

MISSING = -(2**31)


def write_page(
    path: str | Path,
    result: ResultData,
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
    result: ResultData,
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
        "conewise-speeds": saved_shares(result, story),
    }
    if folded is not None:
        styles.append(wave.style())
        scripts.insert(0, wave.script())
        data |= wave.data(folded)
    if inside is not None:
        data["conewise-inside"] = _inside(inside)
    return document(
        "report/sweep.html",
        heading(result, story),
        styles=styles,
        early=[get_plotlyjs()],
        scripts=scripts,
        data=data,
        facts=_facts(result, story),
        finding=finding(result),
        certainty=certainty(result),
        question=question(result, story),
        metrics=result.metrics,
        has_source=result.source is not None,
        unit="prompt" if story is None else story.unit,
        prompt_count=result.per_prompt.shape[-1],
        spread=spread(result),
        inside=None if inside is None else inside_tables(inside),
        cone="" if folded is None else wave.cone_section(folded),
        accounting=accounting(result, story),
        checked=checked(result),
        origin=origin(story, origin_rows(result), made_at),
        wave="" if folded is None else wave.wave_section(folded),
    )


def heading(result: ResultData, story: Story | None) -> str:
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


def _facts(result: ResultData, story: Story | None) -> list[tuple[str, str]]:
    """The numbers below the title, and what each is of."""
    count, unit = len(result.cells), "prompt" if story is None else story.unit
    prompts = result.per_prompt.shape[-1]
    return [
        (f"{count:,}", "site" if count == 1 else "sites"),
        (f"{prompts:,}", unit if prompts == 1 else f"{unit}s"),
        (f"{result.plan.ratio:.2f}×", "fewer node evaluations than full re-runs"),
        (f"{result.ledger.seconds:.3g} s", "to compute"),
    ]


def packed(result: ResultData, story: Story | None, folded: Folded | None = None) -> SentSweep:
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


def spread(result: ResultData) -> bool:
    """True if the page holds the numbers of single prompts."""
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


def _costs(result: ResultData, folded: Folded | None) -> SentCosts | None:
    """Return the costs of the cells' cones; None where they are not known, or known of other cells."""
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
    for at, (axis, index) in enumerate(where.items()):
        pieces.append(f"{', ' if at else ''}{axis}=")
        pieces.append(axes.index(axis) if axis in axes else str(index))
    pieces.append(f"{', ' if where else ''}stack={place.stack!r}]" if place.stack else "]")
    return pieces if where or place.stack else [place.name]


def _rgb(text: str) -> Colour:
    """A colour as plotly names it, "rgb(103,0,31)", as whole numbers."""
    red, green, blue = map(int, unlabel_rgb(text))
    return red, green, blue


def _bytes(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


# -- the texts of the sections ------------------------------------------------------------


def question(result: ResultData, story: Story | None) -> dict[str, Any]:
    """Return the prompts with their tokens, the metric, and the run that is changed."""
    pairs = {} if story is None else prompt_pairs(story, result)
    return {"story": story, "runs": _runs(result, story), **pairs}


def _runs(result: ResultData, story: Story | None) -> dict[str, Any]:
    """Return the metrics of the two runs themselves, between which effects lie."""
    base, source = ("", "") if story is None else (f" ({story.base})", f" ({story.source})")
    heads = ["metric", f"base{base}"]
    rows: list[Row] = [[name, number(float(result.base[row]))] for row, name in enumerate(result.metrics)]
    if result.source is not None:
        heads.append(f"source{source}")
        for row, cells in enumerate(rows):
            cells.append(number(float(result.source[row])))
    return {"heads": heads, "rows": rows}


def inside_tables(inside: Inside) -> dict[str, Any]:
    """Return the texts of the base run's inside: the lens, row by row, the last on top."""
    tables = [
        {
            "prompt": table.prompt,
            "number": inside.numbers[table.prompt] + 1,
            "tokens": inside.tokens[table.prompt][-len(table.cells[0]) :] if table.cells else (),
            "rows": [
                ("input" if name == "input" else f"after {name}", [_likely(cell) for cell in row])
                for name, row in reversed(list(zip(table.rows, table.cells, strict=True)))
            ],
        }
        for table in inside.lenses
    ]
    prompts = sorted({one.prompt for one in inside.patterns} | {one.prompt for one in inside.lenses})
    numbered = [(prompt, inside.numbers[prompt] + 1) for prompt in prompts]
    return {"tables": tables, "prompts": numbered, "data": inside}


def _likely(cell: Sequence[Likely]) -> dict[str, Any]:
    """Return one cell of the lens: the likeliest token, its probability in tenths, the others in words."""
    told = ", ".join(f"{one.text} {one.prob:.3f}" for one in cell)
    return {"text": cell[0].text, "tenths": round(cell[0].prob * 10), "told": told}


def _inside(inside: Inside) -> SentInside:
    """Return what scripts draw of the base run's inside: tokens, and where heads look."""
    patterns: list[SentPattern] = [
        {
            "layer": one.layer,
            "head": one.head,
            "effect": one.effect,
            "prompt": one.prompt,
            "weights": one.weights,
        }
        for one in inside.patterns
    ]
    return {"tokens": inside.tokens, "patterns": patterns}


def checked(result: ResultData) -> dict[str, Any]:
    """Return how the numbers were verified, or that they were not, in words."""
    check = result.verification
    if check is None:
        return {"verdict": "none", "words": "These numbers were not verified.", "check": None}
    agree = f"{check.cells:,} random cells agree with"
    if not check.ok:
        word = "were run again, and some differ" if check.excess > 1 else "could not be checked"
        verdict, words = "bad", f"✗ {check.cells:,} random cells {word}."
    elif check.hooked:
        verdict, words = "good", f"✓ {agree} full forwards."
    else:
        verdict, words = "none", f"{agree} the captured program; the module does not show them."
    ways = [f"{check.hooked:,} by the original module itself, with hooks"] if check.hooked else []
    if check.interpreted:
        ways.append(
            f"{check.interpreted:,} by the captured program alone, operation by operation, because no module "
            "shows the site"
        )
    deviation = f"The largest deviation is {check.largest_deviation:.3g}{_allowed(check)}."
    return {
        "verdict": verdict,
        "words": words,
        "check": f"Run again: {' and '.join(ways)}. {deviation}",
    }


def _allowed(check: CellCheck) -> str:
    """Return what a check compares, and the deviation that it allows, in words."""
    if check.unchecked:
        return f", which says nothing here: {check.unchecked}"
    if check.reference:
        return (
            f". From the module in {check.reference} the result is {check.relative:.2g} of the metric's "
            f"largest value away, and the module's own forwards are {check.own_error:.2g}; it has to be at "
            f"most {check.tolerance:.2g}"
        )
    allowed = "0, equal in every bit" if check.tolerance == 0 else f"at most {check.tolerance:.1g}"
    return f", which is {check.relative:.2g} of the metric's largest value; it has to be {allowed}"


def origin_rows(result: ResultData) -> list[tuple[str, str]]:
    """Return all that the numbers depend on."""
    given = result.provenance
    named = (
        ("model", "captured as"),
        ("weights", "fingerprint"),
        ("dtype", "dtype"),
        ("precision", "products in"),
        ("device", "device"),
    )
    known = {key: str(given[key]) for key, _ in named if given.get(key) is not None}
    if known.get("precision") == "split":
        known["precision"] = "three bfloat16 parts"
    rows = [(label, known[key]) for key, label in named if key in known]
    rows += [(f"inputs of the {run}", digest) for run, digest in _inputs(given)]
    versions = given.get("versions")
    if isinstance(versions, Mapping):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return rows


def _inputs(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    batches = given.get("batches")
    if not isinstance(batches, list) or len(batches) != 1 or not isinstance(batches[0], Mapping):
        return []
    return [(run, str(batches[0][run])) for run in ("base", "source") if batches[0].get(run) is not None]
