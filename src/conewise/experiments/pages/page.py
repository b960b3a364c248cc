"""The experiments' results as files: a page that opens without a network, figures, and tables as CSV."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from conewise.drawing.document import document
from conewise.experiments.pages.figures import figure
from conewise.experiments.pages.tables import as_csv, measured, number
from conewise.experiments.result import Result, Row
from conewise.extras import needs
from conewise.files import write_whole
from conewise.scripts import script
from conewise.templates import asset

with needs("plots"):
    from plotly.offline import get_plotlyjs

PAGE, RESULTS, FIGURES, TABLES = "index.html", "results.json", "figures", "tables"
TITLE = "Conewise: the paper's claims, reproduced"
SCRIPT = "javascript/experiments/main.js"
MARK = f"<title>{TITLE}</title>"
"""What says that a page is one of ours; it stands near the beginning."""

HEAD = 10_000
"""How many characters of a page are looked at for it."""


def write_report(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write index.html, results.json, figures/*.html and tables/*.csv into `folder`; returns the paths."""
    files = {folder / PAGE: page(results), folder / RESULTS: as_json(results)}
    for result in results:
        files[folder / FIGURES / f"{result.name}.html"] = figure_page(result)
        files[folder / TABLES / f"{result.name}.csv"] = as_csv(result)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    return list(files)


def taken(folder: Path) -> str | None:
    """The first file or folder that a report would replace, and none wrote; None where there is none.

    Raises OSError when the page that is there cannot be read.
    """
    try:
        with (folder / PAGE).open(encoding="utf-8", errors="replace") as file:
            is_ours = MARK in html.unescape(file.read(HEAD))
    except FileNotFoundError:
        is_ours = False
    names = (PAGE, RESULTS, FIGURES, TABLES)
    return None if is_ours else next((name for name in names if (folder / name).exists()), None)


def as_dict(results: Sequence[Result]) -> dict[str, object]:
    """One object, a key for each experiment."""
    return {result.name: result.as_dict() for result in results}


def as_json(results: Sequence[Result]) -> str:
    """The same as JSON."""
    return json.dumps(as_dict(results), indent=2, ensure_ascii=False)


def page(results: Sequence[Result]) -> str:
    """The whole report as one HTML page, plotly.js included."""
    versions = results[0].versions if results else {}
    return _document(
        "experiments/pages/page.html",
        TITLE,
        results,
        experiments=[_shown(result) for result in results],
        made=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        versions=[f"{name} {text}" for name, text in versions.items()],
    )


def figure_page(result: Result) -> str:
    """The figure of one experiment as a page of its own."""
    return _document(
        "experiments/pages/figure.html", f"{result.name}: {result.title}", [result], name=result.name
    )


def _document(template: str, title: str, results: Sequence[Result], **values: object) -> str:
    return document(
        template,
        title,
        styles=[asset("drawing/theme.css"), asset("experiments/pages/page.css")],
        early=[get_plotlyjs()],
        scripts=[script(SCRIPT)],
        data={"conewise-figures": {result.name: json.loads(figure(result).to_json()) for result in results}},
        **values,
    )


def _shown(result: Result) -> dict[str, object]:
    """What the page shows of an experiment; rows of single sites are details."""
    return {
        "name": result.name,
        "title": result.title,
        "claim": result.claim,
        "compared": result.compared,
        "all_match": result.all_match,
        "notes": result.notes,
        "rows": [_row(row) for row in result.rows if not row.detail],
        "details": [_row(row) for row in result.rows if row.detail],
    }


def _row(row: Row) -> dict[str, object]:
    unit = " ms" if row.unit == "ms" else ""
    predicted = number(row.predicted, row) or "–"
    return {"texts": [row.name, row.paper or "–", predicted, measured(row) + unit], "match": row.match}
