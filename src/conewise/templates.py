"""HTML and SVG from templates with every value escaped, notebook tables, texts and colours of figures."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from conewise.extras import needs

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

LIGHT = "RdBu"
"""ColorBrewer's red to blue, white between, by the name that plotly has for it."""

# From the colour of a dark page outwards: 0 is dark, both ends are light. Red and blue, as on a light page.
DARK = (
    (255, 210, 194),
    (247, 155, 128),
    (214, 95, 77),
    (141, 55, 51),
    (35, 39, 46),
    (43, 84, 120),
    (63, 138, 192),
    (131, 191, 227),
    (207, 232, 247),
)

RISING = "Blues"
"""White to blue, for shares between 0 and 1."""


def escaped(text: str) -> str:
    """Return a text for a label of plotly, which takes tags in labels for its own."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def visible(text: str) -> str:
    """Return a token with its spaces and line ends made visible."""
    return "".join(visible_parts(text))


def visible_parts(text: str) -> tuple[str, str]:
    """Return a sign for the space in front of a token, or for an empty one; and the rest of the token."""
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return "·" if text.startswith(" ") else "" if text else "∅", text.removeprefix(" ")


def asset(path: str) -> str:
    """The text of a file of the package."""
    return files("conewise").joinpath(path).read_text(encoding="utf-8")


def rendered(path: str, **values: object) -> Markup:
    """The template at `path` with these values in it. A value that it names and is not given is an error."""
    with needs("plots"):
        from markupsafe import Markup  # noqa: PLC0415 - only where something is drawn

    return Markup(_environment().get_template(path).render(values))


def macro(path: str, name: str, *values: object) -> Markup:
    """Return what one macro of the template at `path` makes of these values."""
    made: Markup = getattr(_environment().get_template(path).module, name)(*values)
    return made


@cache
def _environment() -> Environment:
    with needs("plots"):
        from jinja2 import Environment, FunctionLoader, StrictUndefined  # noqa: PLC0415 - as above

    found = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["g"] = "{:g}".format
    return found


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


def aligned(rows: Sequence[tuple[str, str]], indent: str = "") -> list[str]:
    """Return rows of a label and a value as lines, in which the values begin in one column."""
    width = max(len(label) for label, _ in rows)
    return [f"{indent}{label:<{width}}  {value}" for label, value in rows]


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Return rows of cells as lines, columns as wide as their widest cells; those of `right` end together."""
    ends, widths = set(right), [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at in ends else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(rows: Iterable[Sequence[str]], columns: Sequence[str] = (), *, numbers: Iterable[int] = ()) -> str:
    """Rows of text as a table. `columns` are its headings; `numbers` says which columns are aligned right.

    Without headings, the first text of a row is what the row is about.
    """
    return str(macro(TEMPLATE, "table", rows, columns, frozenset(numbers)))


# -- pictures for notebooks: HTML and SVG without scripts, which every notebook shows ------------------

MORE, LESS = "#2f7fc1", "#d6493a"
"""Above zero and below it: told apart by colour-blind readers."""

MOST_CELLS = 2500
"""A heatmap of more cells is one image, without a text for each cell under the pointer."""


def shown(*parts: str) -> str:
    """Return the parts of what a notebook shows, one below the other, so wide that lines can be read."""
    return str(macro(TEMPLATE, "shown", _safe(parts)))


def lead(words: str) -> str:
    """The line that a reader should see first: what was found."""
    return str(macro(TEMPLATE, "lead", words))


def note(words: str) -> str:
    """A line in small print."""
    return str(macro(TEMPLATE, "note", words))


def folded(summary: str, *parts: str) -> str:
    """Parts that are shown when a reader clicks on `summary`."""
    return str(macro(TEMPLATE, "folded", summary, _safe(parts)))


def beside(*parts: str) -> str:
    """Parts side by side, as far as the page is wide enough."""
    return str(macro(TEMPLATE, "beside", _safe(parts)))


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar for each name and number, blue above zero and red below, with a text behind it."""
    largest = max((abs(size) for _, size, _ in rows if math.isfinite(size)), default=0.0) or 1.0
    drawn = [(name, *_paint(size, largest), text) for name, size, text in rows]
    return str(macro(TEMPLATE, "bars", drawn))


def texts(
    rows: Sequence[Sequence[tuple[str, float, str]]], names: Sequence[str], columns: Sequence[str]
) -> str:
    """A table of short texts, each coloured by a share from 0 to 1, with a longer text under the pointer."""
    return str(macro(TEMPLATE, "texts", list(zip(names, rows, strict=True)), columns, MORE))


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Numbers in rows and columns; None is a gap. `told` has the text under the pointer of each.

    Blue is above zero and red below, and the strongest colour is `largest`, or the largest number there.
    """

    values: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    columns: Sequence[str]
    told: Sequence[Sequence[str]] = ()
    row_title: str = ""
    column_title: str = ""
    title: str = ""
    largest: float | None = None
    size: tuple[float, float] = (620, 300)

    def html(self) -> str:
        """The heatmap as SVG."""
        wide = max(3.0, min(26.0, self.size[0] / max(len(self.columns), 1)))
        high = max(3.0, min(18.0, self.size[1] / max(len(self.rows), 1)))
        longest = max(map(len, self.columns), default=0)
        is_turned = longest * 6.5 > wide * max(1, math.ceil(12 / wide)) and longest > 2
        left = 8 + 6.5 * max(map(len, self.rows), default=0) + (16 if self.row_title else 0)
        bottom = (6.2 * longest + 8 if is_turned else 16) + (16 if self.column_title else 0)
        top = 20.0 if self.title else 4.0
        width, height = wide * len(self.columns), high * len(self.rows)
        is_image = len(self.columns) * len(self.rows) > MOST_CELLS
        place = {
            "left": left,
            "top": top,
            "wide": wide,
            "high": high,
            "width": width,
            "height": height,
            "whole": (max(left + width + 8, left + 8.0 * len(self.title)), top + height + bottom),
            "turned": is_turned,
            "every": (
                max(1, math.ceil(12 / high)),
                max(1, math.ceil((12 if is_turned else 6.5 * longest + 4) / wide)),
            ),
        }
        return str(
            macro(
                TEMPLATE,
                "heatmap",
                self,
                place,
                () if is_image else self._cells(),
                self._image() if is_image else "",
            )
        )

    def _largest(self) -> float:
        found = (abs(one) for row in self.values for one in row if one is not None and math.isfinite(one))
        return self.largest or max(found, default=0.0) or 1.0

    def _cells(self) -> list[tuple[int, int, str, float, str]]:
        largest = self._largest()
        return [
            (at, number, *_paint(one, largest), self.told[number][at] if self.told else "")
            for number, row in enumerate(self.values)
            for at, one in enumerate(row)
            if one is not None
        ]

    def _image(self) -> str:
        """A picture with one pixel for each cell, as the text of a PNG."""
        largest = self._largest()
        lines = []
        for row in self.values:
            line = bytearray(b"\0")
            for one in row:
                colour, share = _paint(0.0 if one is None else one, largest)
                line += bytes.fromhex(colour[1:]) + bytes([round(255 * share)])
            lines.append(bytes(line))
        header = struct.pack(">IIBBBBB", len(self.columns), len(self.rows), 8, 6, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines))), (b"IEND", b""))
        whole = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in parts
        )
        return base64.b64encode(whole).decode("ascii")


def line_chart(
    points: Sequence[tuple[float, float]], across: str, up: str, marked: float | None = None
) -> str:
    """A line through points, with both axes named; `marked` is a height with a dotted line."""
    if not points:
        return ""
    (low_x, high_x), (low_y, high_y) = (
        (min(own), max(own))
        for own in ([x for x, _ in points], [*(y for _, y in points), marked or 0.0, 0.0])
    )
    wide, high, left, top = 420.0, 180.0, 56.0, 10.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + wide * (x - low_x) / (high_x - low_x or 1.0),
            top + high * (1 - (y - low_y) / (high_y - low_y or 1.0)),
        )

    drawn = [(*place(x, y), f"{up} {y:.4g} at {x:,.6g} {across}") for x, y in points]
    level = None if marked is None else place(low_x, marked)[1]
    ends = (f"{low_x:,.6g}", f"{high_x:,.6g}", f"{low_y:.3g}", f"{high_y:.3g}")
    return str(macro(TEMPLATE, "line_chart", drawn, (left, top, wide, high), ends, (across, up), level, MORE))


def _paint(size: float, largest: float) -> tuple[str, float]:
    """The colour of a number, and how strong it is: a share of the largest."""
    if not math.isfinite(size):
        return "#888888", 0.3
    return LESS if size < 0 else MORE, min(1.0, abs(size) / largest)


def _safe(parts: Iterable[str]) -> list[Markup]:
    with needs("plots"):
        from markupsafe import Markup  # noqa: PLC0415 - as above

    return [Markup(part) for part in parts if part]
