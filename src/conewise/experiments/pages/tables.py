"""Results as tables: on a terminal with rich, and as CSV."""

from __future__ import annotations

import csv
import io

from rich.table import Table

from conewise.experiments.result import Number, Result, Row, plain

MARKS = {True: "[green]✓ match[/green]", False: "[bold red]✗ differs[/bold red]", None: "[dim]reported[/dim]"}


def table(result: Result) -> Table:
    """Paper, predicted, measured, match: a row for each figure but the details."""
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
    """The measured figure, with its interval where it has one."""
    text = number(row.measured, row)
    if "low" in row.facts:
        text += f" [{number(row.facts['low'], row)}, {number(row.facts['high'], row)}]"
    return text


def number(value: Number | None, row: Row) -> str:
    """A number in the digits that its row is read in."""
    plainly = plain(value)
    if plainly is None:
        return ""
    if isinstance(plainly, int):
        return str(plainly)
    if row.unit == "ms":
        return f"{plainly:.3g}"
    return f"{plainly:.4f}" if abs(plainly) >= 0.001 or plainly == 0 else f"{plainly:.2g}"


def as_csv(result: Result) -> str:
    """Every row, details included, with all of its facts as columns."""
    rows = [row.as_dict() for row in result.rows]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
