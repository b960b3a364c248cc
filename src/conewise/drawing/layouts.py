"""Where the boxes and wires of a sketch stand: a model folded by layer in rows, a small graph in columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from conewise.drawing.folded import Folded
from conewise.drawing.parts import LABELS
from conewise.drawing.sketch import Box, Kind, Sketch
from conewise.drawing.waves import GraphWave

LEFT, TOP, CELL, HEIGHT, SUM, GAP, LANE = 44, 8, 44, 20, 20, 8, 14
WIDE = 300
"""How wide a drawing is that has no columns."""

FEW_ROWS = 2
"""A part that is read in more rows than this is not wired up: the wires would be all that one sees."""

# -- a model folded by layer -----------------------------------------------------------------


def of_folded(folded: Folded) -> Sketch:
    """Rows from the inputs down. Layers have a column for each role; other rows share the width out."""
    found = {part.role for part in folded.parts if part.layer is not None}
    columns, width = _columns([role for role in LABELS if role in found])
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
                (x + w / 2, y + 8, LABELS[role], "cw-head") for role, (x, w) in columns.items() if w > SUM
            ]
            y += LANE + 8
        if is_layer:
            texts.append((LEFT - 10, y + HEIGHT / 2 + 3.8, _short(first.stack, first.layer), "cw-row"))
        share = (width - GAP * (len(members) - 1)) / len(members)
        for place, at in enumerate(members):
            part = folded.parts[at]
            row_of[at] = row
            x, w = columns[part.role] if is_layer else (LEFT + place * (share + GAP), share)
            label = "" if is_layer else _cut(part.label, w - 30)
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
    """Where each role's column starts and how wide it is; how wide all are together."""
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


def _cut(text: str, width: float) -> str:
    most = max(4, int(width / 6.2))
    return text if len(text) <= most else f"{text[: most - 1]}…"


# -- a small graph ---------------------------------------------------------------------------

NODE, SPACE_X, SPACE_Y, MARGIN, WIDEST = 26, 34, 16, 12, 130


def of_graph(wave: GraphWave) -> Sketch:
    """Columns by depth, inputs at the left; a source stands right before its first reader."""
    columns = by_depth(wave.nodes, wave.inputs, wave.sources)
    tallest = max((len(column) for column in columns), default=1) + 1  # a row's room for wires that rise
    at = {site: number for number, site in enumerate(wave.nodes)}
    boxes: dict[int, Box] = {}
    x = float(MARGIN)
    for column in columns:
        width = max(min(WIDEST, 6.6 * len(site) + 26) for site in column)
        top = (tallest + 1 - len(column)) / 2
        for place, site in enumerate(column):
            y = MARGIN + (top + place) * (NODE + SPACE_Y)
            is_source = site in wave.sources
            title = f"{'source' if is_source else 'node'} {site}"
            title += f" = {wave.before[site]}" if site in wave.before else ""
            kind: Kind = "source" if is_source else "part"
            boxes[at[site]] = Box(x, y, width, NODE, _cut(site, width - 8), title, kind)
        x += width + SPACE_X
    placed = tuple(boxes[number] for number in range(len(wave.nodes)))
    wires = tuple(
        (at[read], at[site], _graph_wire(placed[at[read]], placed[at[site]]))
        for site in wave.nodes
        for read in dict.fromkeys(wave.inputs[site])
    )
    return Sketch(x - SPACE_X + MARGIN, 2 * MARGIN + tallest * (NODE + SPACE_Y), placed, wires)


def by_depth(
    nodes: Iterable[str], inputs: Mapping[str, Sequence[str]], sources: Collection[str]
) -> list[list[str]]:
    """The nodes, given inputs first, by depth: one more than the deepest input."""
    depth: dict[str, int] = {}
    readers: dict[str, list[str]] = defaultdict(list)
    listed = list(nodes)
    for site in listed:
        for read in inputs[site]:
            readers[read].append(site)
        if site not in sources:
            depth[site] = 1 + max((depth.get(read, 0) for read in inputs[site]), default=0)
    for source in sources:
        depth[source] = min((depth[reader] for reader in readers[source]), default=1) - 1
    columns: dict[int, list[str]] = defaultdict(list)
    for site in listed:
        columns[depth[site]].append(site)
    return [columns[place] for place in sorted(columns)]


def _graph_wire(start: Box, end: Box) -> str:
    x1, y1, x2, y2 = start.x + start.width, start.y + NODE / 2, end.x, end.y + NODE / 2
    bend = max((x2 - x1) / 2, SPACE_X / 2)
    # A wire that passes other columns rises above the boxes there.
    rise = min(4 * NODE, 0.35 * (x2 - x1 - SPACE_X)) if x2 - x1 > SPACE_X + 50 else 0
    return f"M{x1:g},{y1:g} C{x1 + bend:g},{y1 - rise:g} {x2 - bend:g},{y2 - rise:g} {x2:g},{y2:g}"
