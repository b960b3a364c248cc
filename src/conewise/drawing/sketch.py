"""A sketch: boxes and wires as SVG, for a model folded by layer or for a small graph.

Every box has the same elements, whatever it stands for, and is painted by classes and widths alone: here for
a file, in the browser by wave.js. What a box means is told by shape as well as by colour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from conewise.drawing.document import asset

KEYS = (
    ("site", "is-site", "patched"),
    ("lost", "is-lost", "invalid"),
    ("wanted", "is-lost is-wanted", "demanded"),
    ("done", "is-done is-full", "recomputed"),
    ("reused", "is-reused", "reused"),
    ("kept", "", "kept"),
    ("source", "cw-source", "given"),
)
"""What a box may be painted as: a name, its classes, and what that means."""

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


@dataclass(frozen=True, slots=True)
class Paint:
    """How a box is painted: shares of its width from 0 to 1, a short text, and marks."""

    lost: float = 0.0
    done: float = 0.0
    text: str = ""
    is_site: bool = False
    is_reused: bool = False

    @property
    def classes(self) -> str:
        """The classes that a box of this paint has; wave.js uses the same."""
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
    ) -> str:
        """The drawing; `prefix` keeps the names of its patterns apart from those of other drawings.

        One that stands alone brings its style, and has a caption and keys (classes, meaning) below.
        """
        painted = paints or {}
        edge = min(box.x for box in self.boxes)
        size = f"{self.width:g} {self.height + (18 if caption else 0) + (24 if keys else 0):g}"
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="cw-svg" viewBox="0 0 {size}" role="img" ',
            f'aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="11">',
            f'<style>{style}</style><rect class="cw-ground" width="100%" height="100%"/>' if style else "",
            _hatch(prefix),
        ]
        lit = {at for at, paint in painted.items() if paint.done or paint.is_site}
        for start, end, path in self.wires:
            hot = " is-hot" if start in lit and end in lit and painted[end].done else ""
            lines.append(f'<path class="cw-wire{hot}" data-from="{start}" data-to="{end}" d="{path}"/>')
        lines += [
            f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
            for x, y, text, kind in self.texts
        ]
        lines += [_box(at, box, painted.get(at, Paint()), prefix) for at, box in enumerate(self.boxes)]
        if caption:
            lines.append(
                f'<text class="cw-label" x="{edge:g}" y="{self.height + 8:g}">{escape(caption)}</text>'
            )
        x = edge - 5
        for classes, meaning in keys:
            place = f"{x:g},{self.height + (14 if caption else 0):g}"
            lines.append(
                f'<g transform="translate({place})">{_sample(classes, prefix)}'
                f'<text class="cw-row cw-meaning" x="36" y="17">{escape(meaning)}</text></g>'
            )
            x += 52 + 5.2 * len(meaning)
        return "\n".join(line for line in lines if line) + "\n</svg>\n"


def key(prefix: str, classes: str) -> str:
    """One box of a legend, painted by these classes."""
    return f'<svg viewBox="0 0 34 26" aria-hidden="true">{_hatch(prefix)}{_sample(classes, prefix)}</svg>'


def _sample(classes: str, prefix: str) -> str:
    box, paint = Box(5, 5, 24, 16, "", ""), Paint(float("is-lost" in classes), float("is-done" in classes))
    # Painted like an item, but none of them.
    drawn = _box(0, box, paint, prefix)
    return re.sub(r'class="cw-item[^"]*" data-item="0"', f'class="cw-key {classes}"', drawn, count=1)


def _hatch(prefix: str) -> str:
    return (
        f'<defs><pattern id="{prefix}-hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="cw-stripe" width="2" height="5"/></pattern></defs>'
    )


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
    rules = asset("sketch.css")

    def in_colours(shade: int) -> str:
        return re.sub(r"var\(--cw-([a-z-]+)\)", lambda found: COLOURS[found[1]][shade], rules)

    ground = ".cw-ground { fill:%s }\n"
    return (
        f"{ground % COLOURS['page'][0]}{in_colours(0)}"
        f"@media (prefers-color-scheme: dark) {{\n{ground % COLOURS['page'][1]}{in_colours(1)}}}\n"
    )


def _box(at: int, box: Box, paint: Paint, prefix: str) -> str:
    x, y, width, height = box.x, box.y, box.width, box.height
    corner = height / 2 if box.kind == "sum" else 4
    frame = f'x="{x:g}" y="{y:g}" height="{height:g}" rx="{corner:g}"'
    middle = y + height / 2 + 3.8
    label = (
        f'<text class="cw-label" x="{x + 7:g}" y="{middle:g}">{escape(box.label)}</text>' if box.label else ""
    )
    # Beside a label the count stands at the right, alone it stands in the middle.
    where = (x + width - 7, "end") if box.label else (x + width / 2, "middle")
    text = "+" if box.kind == "sum" else paint.text
    classes = f"cw-item cw-{box.kind} {paint.classes}".strip()
    return (
        f'<g class="{classes}" data-item="{at}" data-width="{width:g}">'
        f"<title>{escape(box.title)}</title>"
        f'<rect class="cw-box" {frame} width="{width:g}"/>'
        f'<rect class="cw-lost" {frame} width="{width * paint.lost:g}" fill="url(#{prefix}-hatch)"/>'
        f'<rect class="cw-done" {frame} width="{width * paint.done:g}"/>'
        f'<rect class="cw-edge" {frame} width="{width:g}"/>'
        f'<path class="cw-diamond" d="M{x:g},{y - 5:g} l5,5 l-5,5 l-5,-5 z"/>'
        f'<circle class="cw-ring" cx="{x + width:g}" cy="{y:g}" r="3.5"/>{label}'
        f'<text class="cw-count" x="{where[0]:g}" y="{middle:g}" text-anchor="{where[1]}">'
        f"{escape(text)}</text></g>"
    )
