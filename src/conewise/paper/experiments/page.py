"""The experiments' results as files: a page that opens without a network, figures, and tables as CSV."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from conewise.extras import needs
from conewise.files import write_whole
from conewise.paper.experiments.figures import figure
from conewise.paper.experiments.result import Number, Result, Row, paragraphs, plain
from conewise.report.document import document, script
from conewise.templates import asset

with needs("plots"):
    from plotly.offline import get_plotlyjs

PAGE, RESULTS, FIGURES, TABLES = "index.html", "results.json", "figures", "tables"
TITLE = "Conewise: the paper's claims, reproduced"
SCRIPT = "javascript/experiments/main.js"
MARK = f"<title>{TITLE}</title>"
"""A text near the beginning of a page that marks it as one of ours."""

HEAD = 10_000
"""The number of characters of a page in which the mark is looked for."""


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
    """Return the first file or folder that a report would replace, and none wrote; None if there is none.

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
    """Return one object, with a key for each experiment."""
    return {result.name: result.as_dict() for result in results}


def as_json(results: Sequence[Result]) -> str:
    """Return the same as JSON."""
    return json.dumps(as_dict(results), indent=2, ensure_ascii=False)


def page(results: Sequence[Result]) -> str:
    """Return the whole report as one HTML page, plotly.js included."""
    versions = results[0].versions if results else {}
    return _document(
        "paper/experiments/page.html",
        TITLE,
        results,
        experiments=[_shown(result) for result in results],
        made=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        versions=[f"{name} {text}" for name, text in versions.items()],
    )


def figure_page(result: Result) -> str:
    """Return the figure of one experiment as a page of its own."""
    return _document(
        "paper/experiments/figure.html", f"{result.name}: {result.title}", [result], name=result.name
    )


def _document(template: str, title: str, results: Sequence[Result], **values: object) -> str:
    return document(
        template,
        title,
        styles=[asset("report/theme.css"), asset("paper/experiments/page.css")],
        early=[get_plotlyjs()],
        scripts=[script(SCRIPT)],
        data={"conewise-figures": {result.name: json.loads(figure(result).to_json()) for result in results}},
        **values,
    )


def _shown(result: Result) -> dict[str, object]:
    """Return what the page shows of an experiment; rows of single sites are details."""
    return {
        "name": result.name,
        "title": result.title,
        "claim": result.claim,
        "compared": result.compared,
        "all_match": result.all_match,
        "notes": paragraphs(result.notes),
        "rows": [_row(row) for row in result.rows if not row.detail],
        "details": [_row(row) for row in result.rows if row.detail],
    }


def _row(row: Row) -> dict[str, object]:
    unit = " ms" if row.unit == "ms" else ""
    predicted = number(row.predicted, row) or "–"
    return {"texts": [row.name, row.paper or "–", predicted, measured(row) + unit], "match": row.match}


# -- Results as tables: on a terminal with rich, and as CSV ----------------------------------------


MARKS = {True: "[green]✓ match[/green]", False: "[bold red]✗ differs[/bold red]", None: "[dim]reported[/dim]"}


def table(result: Result) -> Table:
    """Return paper, predicted, measured, match: a row for each figure but the details."""
    shown = Table(title=f"{result.name}: {result.title}", title_justify="left", caption_justify="left")
    shown.add_column("")
    for heading in ("paper", "predicted", "measured"):
        shown.add_column(heading, justify="right")
    shown.add_column("match")
    for row in result.rows:
        if not row.detail or row.match is False:
            shown.add_row(
                row.name, row.paper or "", number(row.predicted, row), measured(row), MARKS[row.match]
            )
    details = sum(row.detail for row in result.rows)
    if details:
        shown.caption = f"and {details} rows more, one for each site: with --json or --out"
    return shown


def measured(row: Row) -> str:
    """Return the measured figure, with its interval where it has one."""
    text = number(row.measured, row)
    if "low" in row.facts:
        text += f" [{number(row.facts['low'], row)}, {number(row.facts['high'], row)}]"
    return text


def number(value: Number | None, row: Row) -> str:
    """Return a number in the digits that its row is read in."""
    plainly = plain(value)
    if plainly is None:
        return ""
    if isinstance(plainly, int):
        return str(plainly)
    if row.unit == "ms":
        return f"{plainly:.3g}"
    return f"{plainly:.4f}" if abs(plainly) >= 0.001 or plainly == 0 else f"{plainly:.2g}"


def as_csv(result: Result) -> str:
    """Return every row, details included, with all of its facts as columns."""
    rows = [row.as_dict() for row in result.rows]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: _cell(value) for column, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    """Return a value as a cell of CSV: a text that would be taken for a formula has a quote before it."""
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )
