"""A sweep as a page: one file that opens from disk and fetches nothing.

The words (what was asked, what it cost, how it was checked, where it comes from) are those of `sections`. The
maps and the table are drawn in the browser, by the scripts, from the numbers that `packing` sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from conewise.drawing import wave
from conewise.drawing.document import document
from conewise.drawing.wave import cone_section, wave_section
from conewise.errors import SweepError
from conewise.extras import needs
from conewise.files import expect_file, expect_replaceable, write_whole
from conewise.report.inside import Inside
from conewise.report.packing import packed, spread
from conewise.report.sections import (
    accounting,
    checked,
    inside_tables,
    origin,
    question,
    shown_inside,
    speeds,
)
from conewise.report.story import Story
from conewise.report.swept import Swept
from conewise.scripts import script
from conewise.templates import asset

with needs("plots"):
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

if TYPE_CHECKING:
    from conewise.drawing.folding import Folded

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


def write_page(
    path: str | Path,
    result: Swept,
    story: Story | None = None,
    folded: Folded | None = None,
    inside: Inside | None = None,
) -> Path:
    """Write the page of a sweep to a file, whole or not at all; returns its path."""
    path = Path(path)
    text = sweep_page(result, story, folded, inside)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        expect_replaceable(path)
        write_whole(path, text.encode())
    return path


def expect_page(path: str | Path) -> None:
    """A page can be written there, as far as can be known before; raises SweepError if not."""
    path = Path(path)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        expect_replaceable(path)
        expect_file(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # no file can have such a name: ValueError
        why = getattr(error, "strerror", None) or error
        raise SweepError(f"the page cannot be written to {path}: {why}. Name another file.") from None


def sweep_page(
    result: Swept,
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
    styles = [asset("drawing/theme.css"), asset("report/page.css")]
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


def heading(result: Swept, story: Story | None) -> str:
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


def _facts(result: Swept, story: Story | None) -> list[tuple[str, str]]:
    """The numbers below the title, and what each is of."""
    count, unit = len(result.cells), "prompt" if story is None else story.unit
    prompts = result.per_prompt.shape[-1]
    return [
        (f"{count:,}", "site" if count == 1 else "sites"),
        (f"{prompts:,}", unit if prompts == 1 else f"{unit}s"),
        (f"{result.plan.ratio:.2f}×", "fewer node evaluations than full re-runs"),
        (f"{result.ledger.seconds:.3g} s", "to compute"),
    ]
