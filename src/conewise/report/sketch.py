"""A sketch: boxes and wires as SVG, for a model folded by layer or for a small graph.

Every box has the same elements, whatever it stands for, and is painted by classes and widths alone: here for
a file, in the browser by `javascript/wave`. What a box means is told by shape as well as by colour.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conewise.extras import needs
from conewise.report.folded import Folded
from conewise.report.folding import ROLES
from conewise.templates import asset, macro

with needs("plots"):
    from markupsafe import Markup

TEMPLATE = "report/sketch.svg"

KEYS = (
    ("site", "is-site", "patched"),
    ("lost", "is-lost", "invalid"),
    ("wanted", "is-lost is-wanted", "demanded"),
    ("done", "is-done is-full", "recomputed"),
    ("reused", "is-reused", "reused"),
    ("kept", "", "kept"),
    ("source", "cw-source", "given"),
)
"""The paints of a box: a name, its classes, and what that means."""

CONE_KEYS = ("site", "done", "reused", "kept")
WAVE_KEYS = ("site", "lost", "wanted", "done", "reused", "kept")

COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#1a1e24", "#e8ebef"),
    "soft": ("#57606c", "#a4adb8"),
    "page": ("#ffffff", "#14171b"),
    "card": ("#f6f7f9", "#1b1f25"),
    "line": ("#dde1e6", "#313741"),
    "link": ("#0060a8", "#71b9f4"),
    "box": ("#eceff3", "#262c34"),
    "wire": ("#b9c1cb", "#465060"),
    "site": ("#d98900", "#ffb224"),
    "done": ("#0072b2", "#56b4e9"),
    "on-done": ("#ffffff", "#06131c"),
    "lost": ("#d55e00", "#ff8a3d"),
    "wanted": ("#8a3d76", "#e79fcb"),
    "reused": ("#007d5b", "#3ecf9f"),
}
"""Light and dark, after Okabe and Ito's palette: told apart by colour-blind readers too."""

OF_THE_PAGE: Mapping[str, tuple[str, ...]] = {
    "ink": ("ink", "fg"),
    "soft": ("soft", "muted"),
    "page": ("page", "bg"),
    "card": ("card",),
    "line": ("line",),
    "link": ("link", "accent"),
}
"""The colours that a page around a drawing may have already, by the names of its variables."""

Kind = Literal["part", "sum", "source"]


@dataclass(frozen=True, slots=True)
class Box:
    """One item of a drawing, where it stands, and what is written in it."""

    x: float
    y: float
    width: float
    height: float
    label: str
    title: str
    kind: Kind = "part"

    @property
    def corner(self) -> float:
        """The radius of its corners."""
        return self.height / 2 if self.kind == "sum" else 4

    @property
    def middle(self) -> float:
        """The height of a line of text in the middle of it."""
        return self.y + self.height / 2 + 3.8


@dataclass(frozen=True, slots=True)
class Paint:
    """The paint of a box: shares of its width from 0 to 1, a short text, and marks."""

    lost: float = 0.0
    done: float = 0.0
    text: str = ""
    is_site: bool = False
    is_reused: bool = False

    @property
    def classes(self) -> str:
        """The classes that a box of this paint has; `javascript/wave/painter.js` uses the same."""
        found = ["is-site"] if self.is_site else []
        found += ["is-done"] if self.done else []
        found += ["is-full"] if self.done > 0.5 else []  # what is written on it has to be seen
        found += ["is-lost"] if self.lost else []
        found += ["is-reused"] if self.is_reused else []
        return " ".join(found)


@dataclass(frozen=True, slots=True)
class Sketch:
    """Boxes, the wires between them as paths, and texts beside them: (x, y, text, class)."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    wires: tuple[tuple[int, int, str], ...]
    texts: tuple[tuple[float, float, str, str], ...] = ()

    def svg(
        self,
        prefix: str,
        label: str,
        paints: Mapping[int, Paint] | None = None,
        *,
        style: str = "",
        caption: str = "",
        keys: Sequence[tuple[str, str]] = (),
    ) -> Markup:
        """The drawing; `prefix` keeps the names of its patterns apart from those of other drawings.

        One that stands alone brings its style, and has a caption and keys (classes, meaning) below.
        """
        painted = [(paints or {}).get(at, Paint()) for at in range(len(self.boxes))]
        lit = {at for at, paint in enumerate(painted) if paint.done or paint.is_site}
        x, placed = min(box.x for box in self.boxes) - 5, []
        for classes, meaning in keys:
            placed.append({"x": x, "meaning": meaning, **_sample(classes)})
            x += 52 + 5.2 * len(meaning)
        # The style is a sheet of ours; all else is text.
        return macro(
            TEMPLATE, "drawing", self, prefix, label, painted, lit, Markup(style), caption, placed
        )  # fmt: skip


def key(prefix: str, classes: str) -> Markup:
    """One box of a legend, painted by these classes."""
    sample = _sample(classes)
    return macro(TEMPLATE, "key", sample["box"], classes, sample["paint"], prefix)


def _sample(classes: str) -> dict[str, Any]:
    """A box of a legend: painted like an item, but none of them."""
    paint = Paint(float("is-lost" in classes), float("is-done" in classes))
    return {"box": Box(5, 5, 24, 16, "", ""), "classes": classes, "paint": paint}


def variables() -> str:
    """The colours as variables of a style sheet: the page's own where it has them."""
    lines = []
    for name, (light, dark) in COLOURS.items():
        value = f"light-dark({light}, {dark})"
        for outer in reversed(OF_THE_PAGE.get(name, ())):
            value = f"var(--{outer}, {value})"
        lines.append(f"--cw-{name}:{value};")
    return f".cw-cone, .cw-wave {{ {' '.join(lines)} }}\n"


def literal_style() -> str:
    """The style of a drawing that stands alone: no variables, which few programs but browsers know."""
    rules = asset("report/sketch.css")

    def in_colours(shade: int) -> str:
        return re.sub(r"var\(--cw-([a-z-]+)\)", lambda found: COLOURS[found[1]][shade], rules)

    ground = ".cw-ground { fill:%s }\n"
    return (
        f"{ground % COLOURS['page'][0]}{in_colours(0)}"
        f"@media (prefers-color-scheme: dark) {{\n{ground % COLOURS['page'][1]}{in_colours(1)}}}\n"
    )


LEFT, TOP, CELL, HEIGHT, SUM, GAP, LANE = 44, 8, 44, 20, 20, 8, 14
WIDE = 300
"""The width of a drawing that has no columns."""

FEW_ROWS = 2
"""A part that is read in more rows than this is not wired up: the wires would be all that one sees."""


def folded_sketch(folded: Folded) -> Sketch:
    """Rows from the inputs down. Layers have a column for each role; other rows share the width out."""
    found = {part.role for part in folded.parts if part.layer is not None}
    columns, width = _columns([role for role in ROLES if role in found])
    boxes: dict[int, Box] = {}
    texts: list[tuple[float, float, str, str]] = []
    row_of: dict[int, int] = {}
    y = float(TOP)
    headed: str | None = None
    for row, (name, members) in enumerate(folded.rows):
        first = folded.parts[members[0]]
        is_layer = first.layer is not None
        if is_layer and headed != first.stack:
            headed = first.stack
            texts += [
                (x + w / 2, y + 8, ROLES[role][0], "cw-head") for role, (x, w) in columns.items() if w > SUM
            ]
            y += LANE + 8
        if is_layer:
            texts.append((LEFT - 10, y + HEIGHT / 2 + 3.8, _short(first.stack, first.layer), "cw-row"))
        share = (width - GAP * (len(members) - 1)) / len(members)
        for place, at in enumerate(members):
            part = folded.parts[at]
            row_of[at] = row
            x, w = columns[part.role] if is_layer else (LEFT + place * (share + GAP), share)
            label = "" if is_layer else cut(part.label, w - 30)
            where = f"layer {name}, " if is_layer else ""
            title = f"{where}{part.meaning}: {part.nodes} {'node' if part.nodes == 1 else 'nodes'}"
            boxes[at] = Box(x, y, w, HEIGHT, label, title, "sum" if is_layer and w == SUM else "part")
        y += HEIGHT + LANE
    placed = tuple(boxes[at] for at in range(len(folded.parts)))
    rows_read: dict[int, set[int]] = defaultdict(set)
    for start, end, _ in folded.edges:
        rows_read[start].add(row_of[end])
    drawn = [
        (start, end, row_of[end] - row_of[start])
        for start, end, _ in folded.edges
        if len(rows_read[start] - {row_of[start]}) <= FEW_ROWS
    ]
    far = [start for start, _, rows in drawn if rows > 1]
    rails = {start: LEFT + width + 6 + 5 * place for place, start in enumerate(dict.fromkeys(far))}
    wires = tuple(
        (
            start,
            end,
            _folded_wire(placed[start], placed[end], rows, rails.get(start, 0.0) if columns else 0.0),
        )
        for start, end, rows in drawn
    )
    beside = (12 + 5 * len(rails) if columns else 40) if far else 10
    return Sketch(LEFT + width + beside, y, placed, wires, tuple(texts))


def _columns(roles: Sequence[str]) -> tuple[dict[str, tuple[float, float]], float]:
    """Return the start and the width of each role's column, and the width of all together."""
    x = float(LEFT)
    columns: dict[str, tuple[float, float]] = {}
    for role in roles:
        width = SUM if role.endswith("add") else CELL
        columns[role] = (x, width)
        x += width + GAP
    return columns, max(x - GAP - LEFT, WIDE)


def _folded_wire(start: Box, end: Box, rows: int, rail: float) -> str:
    """Side by side: straight. Past others of the row: above them. To the next row: down, along, down.

    Further down: along a rail beside the rows where there is one, else in a bow.
    """
    (x1, right), (x2, left) = (
        (start.x + start.width / 2, start.x + start.width),
        (end.x + end.width / 2, end.x),
    )
    if rows == 0 and 0 < left - right <= GAP:
        return f"M{right:g},{start.y + HEIGHT / 2:g} H{left:g}"
    if rows == 0:
        return f"M{x1:g},{start.y:g} V{start.y - 4:g} H{x2:g} V{end.y:g}"
    if rows == 1:
        # Higher in the lane than a wire past others of the row, so that the two are told apart.
        return f"M{x1:g},{start.y + HEIGHT:g} V{end.y - 8.5:g} H{x2:g} V{end.y:g}"
    if rail:
        side = start.y + HEIGHT / 2 if right > rail - 40 else start.y + HEIGHT + 3
        leave = f"M{right:g},{side:g}" if right > rail - 40 else f"M{x1:g},{start.y + HEIGHT:g} V{side:g}"
        return f"{leave} H{rail:g} V{end.y - 6:g} H{x2:g} V{end.y:g}"
    out = max(right, end.x + end.width)
    bulge = out + min(34, 8 + 6 * rows)
    y1, y2 = start.y + HEIGHT / 2, end.y + HEIGHT / 2
    return f"M{right:g},{y1:g} C{bulge:g},{y1:g} {bulge:g},{y2:g} {end.x + end.width:g},{y2:g}"


def _short(stack: str, layer: int | None) -> str:
    return f"{stack[:3]} {layer}".strip()


def cut(text: str, width: float) -> str:
    """Return the text, shortened to what fits a width in pixels."""
    most = max(4, int(width / 6.2))
    return text if len(text) <= most else f"{text[: most - 1]}…"
