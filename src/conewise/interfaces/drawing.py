"""A small graph as a picture: where a change starts, what it reaches, what stays as it is."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from conewise.graph.graph import Graph, Site

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 74, 30, 30, 18, 24

# Okabe and Ito's palette: told apart by colour-blind readers too.
FILL = {"changed": "#e69f00", "cone": "#56b4e9", "kept": "#f2f2f2", "source": "#ffffff"}
MEANING = {
    "changed": "patched",
    "cone": "its cone: recomputed",
    "kept": "kept as it was",
    "source": "source",
}


def cone_picture(graph: Graph, site: Site) -> str:
    """An SVG of the whole graph, columns by depth, with the cone of `site` marked."""
    cone = set(graph.cone(site))

    def kind(name: Site) -> str:
        if name == site:
            return "changed"
        if graph.is_source(name):
            return "source"
        return "cone" if name in cone else "kept"

    columns = _columns(graph)
    tallest = max(len(column) for column in columns) + 1  # a row's room for wires that rise
    where = {}
    for x, column in enumerate(columns):
        top = (tallest + 1 - len(column)) / 2
        for y, name in enumerate(column):
            where[name] = (MARGIN + x * (WIDTH + GAP_X), MARGIN + (top + y) * (HEIGHT + GAP_Y))
    width = 2 * MARGIN + len(columns) * (WIDTH + GAP_X) - GAP_X
    floor = 2 * MARGIN + tallest * (HEIGHT + GAP_Y) - GAP_Y
    parts = [_wire(where[a], where[b], a == site or a in cone) for a, b in graph.edges]
    parts += [_box(*where[name], name, kind(name)) for name in graph.sites]
    for place, (name, meaning) in enumerate(MEANING.items()):
        parts.append(_key(MARGIN + place * (width - 2 * MARGIN) / 4, floor, FILL[name], meaning))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {floor + 40}" role="img" '
        f'aria-label="The cone of {escape(site)}" font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _columns(graph: Graph) -> list[list[Site]]:
    """The sites by depth: one more than their deepest input; a source stands right before its reader."""
    depth: dict[Site, int] = {}
    for node in graph:
        if node.rule is not None:
            depth[node.site] = 1 + max((depth.get(site, 0) for site in node.inputs), default=0)
    for source in graph.sources:
        depth[source] = min((depth[reader] for reader in graph.consumers(source)), default=1) - 1
    columns: dict[int, list[Site]] = defaultdict(list)
    for site in graph.sites:
        columns[depth[site]].append(site)
    return [columns[place] for place in sorted(columns)]


def _wire(start: tuple[float, float], end: tuple[float, float], is_hot: bool) -> str:
    x1, y1, x2, y2 = start[0] + WIDTH, start[1] + HEIGHT / 2, end[0], end[1] + HEIGHT / 2
    bend = max((x2 - x1) / 2, GAP_X / 2)
    # A wire that passes other columns rises above the boxes there.
    rise = min(4 * HEIGHT, 0.35 * (x2 - x1 - GAP_X)) if x2 - x1 > WIDTH else 0
    colour, thickness = ("#0072b2", 1.8) if is_hot else ("#b0b0b0", 1)
    return (
        f'<path d="M{x1:g},{y1:g} C{x1 + bend:g},{y1 - rise:g} {x2 - bend:g},{y2 - rise:g} {x2:g},{y2:g}" '
        f'fill="none" stroke="{colour}" stroke-width="{thickness}"/>'
    )


def _box(x: float, y: float, name: str, kind: str) -> str:
    dashes = ' stroke-dasharray="4 3"' if kind == "source" else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="7" fill="{FILL[kind]}" '
        f'stroke="#666666"{dashes}/>'
        f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 4:g}" text-anchor="middle" fill="#111111">'
        f"{escape(name)}</text>"
    )


def _key(x: float, y: float, fill: str, meaning: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="14" height="14" rx="3" fill="{fill}" stroke="#666666"/>'
        f'<text x="{x + 20:g}" y="{y + 11:g}" fill="#333333">{escape(meaning)}</text>'
    )
