"""What values look like in a notebook: headings and small tables as HTML, in the notebook's own colours.

All text is escaped, nothing is fetched, and no colour is set but that of a verdict, so that a table is
readable on a light page and on a dark one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

VERDICTS = {True: ("#2e9e5b", "✓"), False: ("#e0483e", "✗")}
"""Colour and sign of what held and of what did not; both colours stand out on white and on black."""


def heading(title: str, words: str = "") -> str:
    """A line of what is shown: its title in bold, if it has one, then the rest in plain words."""
    bold = f"<strong>{escape(title)}</strong> " if title else ""
    return f"<div>{bold}{escape(words)}</div>"


def verdict(ok: bool, words: str) -> str:
    """A line that says whether something held; the sign says it to those who do not see the colour."""
    colour, sign = VERDICTS[ok]
    return f'<div><strong style="color:{colour}">{sign}</strong> {escape(words)}</div>'


def table(rows: Iterable[Sequence[str]], columns: Sequence[str] = (), *, numbers: Iterable[int] = ()) -> str:
    """Rows of text as a table. `columns` are its headings; `numbers` says which columns are aligned right.

    Without headings, the first text of a row is what the row is about.
    """
    right = frozenset(numbers)
    lines = [_line(columns, right, range(len(columns)))] if columns else []
    lines += [_line(row, right, () if columns else (0,)) for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _line(row: Sequence[str], right: frozenset[int], named: Iterable[int]) -> str:
    """One row; the texts at `named` are headings."""
    tags = dict.fromkeys(named, "th")
    return (
        "<tr>"
        + "".join(_cell(tags.get(at, "td"), text, at in right) for at, text in enumerate(row))
        + "</tr>"
    )


def _cell(tag: str, text: str, is_number: bool) -> str:
    # Said in every cell: notebooks align all of them right, by rules that a style of the table does not beat.
    style = "text-align:right;white-space:nowrap" if is_number else "text-align:left"
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'
