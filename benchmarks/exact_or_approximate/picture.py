"""Approximate effects over exact ones, as an SVG: a panel for each method, a row for each task."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.exact_or_approximate.pieces import Numbers
from conewise.attributing.approximation import largest

SIDE, GAP, LEFT, TOP = 190, 34, 62, 44
RIGHT_SIGN, WRONG_SIGN = "#0072b2", "#d55e00"
DECADES = 2.5
"""So many powers of ten below the largest effect the scale turns linear."""

LABEL = "Effects by each method over exact effects, one panel for each method and task"

STYLE = """
text { font-family:system-ui, sans-serif }
.ground { fill:#ffffff }
.frame { fill:none; stroke:#b9c1cb }
.line { stroke:#b9c1cb; stroke-width:1 }
.same { stroke:#57606c; stroke-width:1; stroke-dasharray:3 3 }
.title { fill:#1a1e24; font-size:13px; font-weight:600 }
.said { fill:#57606c; font-size:11px }
.tick { fill:#57606c; font-size:10px }
.name { fill:#1a1e24; font-size:10px; paint-order:stroke; stroke:#ffffff; stroke-width:3px }
.points { fill:none; stroke-width:3.4; stroke-linecap:round; stroke-opacity:.55 }
"""


@dataclass(frozen=True)
class Panel:
    """Effects of the same cells, and what is said of them above."""

    title: str
    said: str
    names: tuple[str, ...]
    approx: Numbers
    exact: Numbers


@dataclass(frozen=True)
class Scale:
    """Effects to pixels from the middle of a panel: linear near 0, logarithmic far from it."""

    largest: float

    @property
    def near(self) -> float:
        """Where the scale turns."""
        return self.largest / 10**DECADES

    def __call__(self, value: float) -> float:
        return SIDE / 2 * 0.94 * math.asinh(value / self.near) / math.asinh(self.largest / self.near)

    def ticks(self) -> list[float]:
        """Powers of ten that are not too near to 0, both ways, and 0."""
        top = math.floor(math.log10(self.largest))
        sizes = [10.0**power for power in (top - 1, top) if 10.0**power > 2 * self.near]
        return [*(-size for size in reversed(sizes)), 0.0, *sizes]


def picture(rows: Sequence[tuple[str, Sequence[Panel]]]) -> str:
    """The SVG of rows of panels, each row with its title. Panels of one row have scales of their own kind."""
    columns = max(len(panels) for _, panels in rows)
    width = LEFT + columns * (SIDE + GAP)
    tall = SIDE + TOP + 48
    size = f"{width} {tall * len(rows) + 12}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-label="{LABEL}">',
        f"<style>{STYLE}</style>",
        '<rect class="ground" width="100%" height="100%"/>',
    ]
    for number, (title, panels) in enumerate(rows):
        top = number * tall + TOP
        parts.append(
            f'<text class="title" transform="translate(16 {top + SIDE / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(title)}</text>'
        )
        for column, panel in enumerate(panels):
            parts += _panel(panel, LEFT + column * (SIDE + GAP), top, is_first=column == 0)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: float, top: float, *, is_first: bool) -> list[str]:
    scale = Scale(max(float(abs(panel.approx).max()), float(abs(panel.exact).max())))
    middle = SIDE / 2

    def at(exact: float, approx: float) -> tuple[float, float]:
        return middle + scale(exact), middle - scale(approx)

    parts = [
        f'<g transform="translate({left} {top})">',
        f'<text class="title" x="0" y="-20">{escape(panel.title)}</text>',
        f'<text class="said" x="0" y="-6">{escape(panel.said)}</text>',
        f'<rect class="frame" width="{SIDE}" height="{SIDE}"/>',
        f'<path class="line" d="M{middle} 0V{SIDE}M0 {middle}H{SIDE}"/>',
        f'<path class="same" d="M0 {SIDE}L{SIDE} 0"/>',
    ]
    for tick in scale.ticks():
        x, y = at(tick, tick)
        shown = f"{tick:g}".replace("-", "−")
        parts.append(f'<text class="tick" x="{x:.1f}" y="{SIDE + 13}" text-anchor="middle">{shown}</text>')
        parts.append(f'<text class="tick" x="-4" y="{y + 3:.1f}" text-anchor="end">{shown}</text>')
    parts.append(f'<text class="said" x="{middle}" y="{SIDE + 29}" text-anchor="middle">exact effect</text>')
    if is_first:
        parts.append(
            f'<text class="said" transform="translate(-30 {middle}) rotate(-90)" text-anchor="middle">'
            "by the method</text>"
        )
    for colour, is_wrong in ((RIGHT_SIGN, False), (WRONG_SIGN, True)):
        points = {
            "M{:.1f} {:.1f}h0".format(*at(float(x), float(y)))
            for x, y in zip(panel.exact, panel.approx, strict=True)
            if (x * y < 0) == is_wrong
        }
        parts.append(f'<path class="points" stroke="{colour}" d="{"".join(sorted(points))}"/>')
    taken: list[float] = []
    for number in largest(panel.approx - panel.exact, 2):
        x, y = at(float(panel.exact[number]), float(panel.approx[number]))
        is_right = x > middle
        y -= 12 * any(abs(y - other) < 11 for other in taken)  # no name over another
        taken.append(y)
        parts.append(
            f'<text class="name" x="{x - 5 if is_right else x + 5:.1f}" y="{y + 3.5:.1f}" '
            f'text-anchor="{"end" if is_right else "start"}">{escape(short(panel.names[number]))}</text>'
        )
    return [*parts, "</g>"]


def short(name: str) -> str:
    """A cell as edges name its component: a3.h1 for a head, m3 for an MLP."""
    head = re.fullmatch(r"z\[layer=(\d+), head=(\d+)\]", name)
    mlp = re.fullmatch(r"mlp_out\[layer=(\d+)\]", name)
    return f"a{head[1]}.h{head[2]}" if head else f"m{mlp[1]}" if mlp else name
