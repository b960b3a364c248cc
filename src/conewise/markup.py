"""What values look like in a notebook: headings and small tables as HTML, in the notebook's own colours.

All text is escaped, nothing is fetched, and no colour is set but that of a verdict, so that a table is
readable on a light page and on a dark one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conewise.templates import macro

VERDICTS = {True: ("#2e9e5b", "✓"), False: ("#e0483e", "✗")}
"""Colour and sign of what held and of what did not; both colours stand out on white and on black."""

TEMPLATE = "markup.html"


def heading(title: str, words: str = "") -> str:
    """A line of what is shown: its title in bold, if it has one, then the rest in plain words."""
    return str(macro(TEMPLATE, "heading", title, words))


def verdict(ok: bool, words: str) -> str:
    """A line that says whether something held; the sign says it to those who do not see the colour."""
    return str(macro(TEMPLATE, "verdict", *VERDICTS[ok], words))


def progress(done: int, total: int, words: str) -> str:
    """A bar that is so far, and where that is in words."""
    return str(macro(TEMPLATE, "progress", done, total, words))


def table(rows: Iterable[Sequence[str]], columns: Sequence[str] = (), *, numbers: Iterable[int] = ()) -> str:
    """Rows of text as a table. `columns` are its headings; `numbers` says which columns are aligned right.

    Without headings, the first text of a row is what the row is about.
    """
    return str(macro(TEMPLATE, "table", rows, columns, frozenset(numbers)))
