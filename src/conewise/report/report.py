"""The results as files: one page that opens without a network, the figures, and the tables as CSV."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from plotly.offline import get_plotlyjs

from conewise.drawing.document import asset
from conewise.experiments.result import Result, Row
from conewise.files import write_whole
from conewise.report.figures import figure
from conewise.report.tables import as_csv, measured, number

PAGE, RESULTS, FIGURES, TABLES = "index.html", "results.json", "figures", "tables"
MARK = "<title>Conewise: the paper's claims, reproduced</title>"
"""What says that a page is one of ours."""


def write_report(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write index.html, results.json, figures/*.html and tables/*.csv into `folder`; returns the paths."""
    files = {folder / PAGE: page(results), folder / RESULTS: as_json(results)}
    for result in results:
        # plotly.js stands beside the figures, once, for all of them.
        drawn = figure(result).to_html(include_plotlyjs="directory", config=_CONFIG)
        files[folder / FIGURES / f"{result.name}.html"] = drawn
        files[folder / TABLES / f"{result.name}.csv"] = as_csv(result)
    for path, text in {**files, folder / FIGURES / "plotly.min.js": get_plotlyjs()}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    return list(files)


def taken(folder: Path) -> str | None:
    """The first file or folder that a report would replace, and none wrote; None where there is none.

    Raises OSError when the page that is there cannot be read.
    """
    try:
        is_ours = MARK in (folder / PAGE).read_text(encoding="utf-8", errors="replace")
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
    made = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
    links = "".join(
        f'<a href="#{result.name}">{html.escape(result.name)}{_mark(result.all_match)}</a>'
        for result in results
    )
    sections = "".join(_section(result) for result in results)
    versions = results[0].versions if results else {}
    facts = " · ".join(f"{html.escape(name)} {html.escape(text)}" for name, text in versions.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{MARK}
<style>{asset("theme.css")}{asset("report.css", __package__)}</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
<header>
<h1>The paper's claims, reproduced</h1>
<p>Each figure three times: as the paper prints it, as the theory predicts it from the graph alone, and as the
engine's ledger measured it on the real graph.</p>
<nav>{links}</nav>
</header>
<main>{sections}</main>
<footer>Made on {made}. {facts}</footer>
<script>{asset("report.js", __package__)}</script>
</body>
</html>
"""


def _section(result: Result) -> str:
    drawn = figure(result).to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
    verdict = "Every exact figure matches" if result.all_match else "Some exact figures differ"
    details = [row for row in result.rows if row.detail]
    more = (
        f"<details><summary>{len(details)} rows more, one for each site</summary>{_table(details)}</details>"
        if details
        else ""
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in result.notes)
    return f"""
<section id="{result.name}">
<h2><span>{html.escape(result.name)}</span> {html.escape(result.title)}</h2>
<p class="claim">{html.escape(result.claim)}</p>
<p class="verdict {"good" if result.all_match else "bad"}">{_mark(result.all_match)} {verdict}.
<small>Compared: {html.escape(result.compared)}.</small></p>
<div class="figure">{drawn}</div>
{_table([row for row in result.rows if not row.detail])}
{more}
<ul class="notes">{notes}</ul>
</section>"""


def _table(rows: Sequence[Row]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(row))}</tr>" for row in rows)
    return (
        '<div class="table"><table><thead><tr><th></th><th>paper</th><th>predicted</th><th>measured</th>'
        f"<th>match</th></tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _cells(row: Row) -> tuple[str, ...]:
    unit = " ms" if row.unit == "ms" else ""
    predicted = number(row.predicted, row) or "–"
    return html.escape(row.name), row.paper or "–", predicted, measured(row) + unit, _mark(row.match)


def _mark(match: bool | None) -> str:
    if match is None:
        return '<span class="mark none" title="a timing: reported, not judged">·</span>'
    kind, sign, title = ("good", "✓", "matches") if match else ("bad", "✗", "differs")
    return f'<span class="mark {kind}" title="{title}">{sign}</span>'


_CONFIG = {"displayModeBar": False, "responsive": True}
