"""The cone of a site drawn on the model's layers, and the wave of a patch step by step: in pages and files.

What a browser test or a page around it may hold on to:

    #cone-view               the cone, a `.cw-cone`; `window.conewise.showCone(name)` shows another site's
    #cone-site               the select of sites
    #cone-view [data-cone=…] its texts: name, recomputed, share, kept, reused, flops, words, rows (a tbody)
    #wave-view               the player, a `.cw-wave`; data-phase is baseline, patch, invalidate, demand,
                             recompute, read or drop
    #wave-pick               the select of sites; #wave-site is the name of the one that is patched
    #wave-first #wave-prev #wave-play #wave-next #wave-last #wave-slider   the controls; arrow keys too
    #wave-place              "3 / 41"; .wave-step is what happens, in words; .cw-phases a button for each
    #wave-invalidated #wave-recomputed #wave-reused #wave-kept             the ledger so far
    .cw-item[data-item=…]    a part or a node in either drawing, with is-site, is-lost (invalid), is-wanted,
                             is-done (recomputed), is-reused, can-patch

A page that has a section puts `style()`, `script()` and `data(...)` where it puts its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conewise.errors import GraphError, MissingSiteError
from conewise.extras import needs
from conewise.files import expect_replaceable, write_whole
from conewise.reactive.graph import Graph, Site
from conewise.reactive.world import Event, World
from conewise.report import sketch
from conewise.report.document import document
from conewise.report.document import script as joined
from conewise.report.folded import Cone, Folded
from conewise.report.sent import SentFolded, SentWaves
from conewise.report.sketch import (
    CONE_KEYS,
    KEYS,
    WAVE_KEYS,
    Box,
    Kind,
    Paint,
    Sketch,
    cut,
    folded_sketch,
)
from conewise.templates import asset, rendered

with needs("plots"):
    from markupsafe import Markup

SCRIPT = "javascript/wave/main.js"

# -- waves through a small graph, as the engine reports them ----------------------------------------

MOST_NODES = 400
"""More nodes than this cannot be told apart in a drawing; a model is folded by layer instead."""

LONGEST_TEXT = 24
"""The number of characters of a value that are shown."""


@dataclass(frozen=True, slots=True)
class Wave:
    """One patch, one demand: the events in their order, and what the sites' values looked like.

    `invalidated`, `recomputed` and `reused` are the sites of the ledger. `planned` is what the demand
    decided to compute before it did. `before` and `after` are values in words, `after` for what changed.
    `restored` is how many nodes the baseline had to compute for the same demand afterwards: none.
    """

    site: Site
    invalidated: tuple[Site, ...]
    planned: tuple[Site, ...]
    recomputed: tuple[Site, ...]
    reused: tuple[Site, ...]
    after: Mapping[Site, str]
    restored: int


@dataclass(frozen=True)
class GraphWave:
    """The waves of several patches through one small graph, each in a fork of the same baseline.

    `full_evaluations` is how many nodes the targets need from nothing.
    """

    nodes: tuple[Site, ...]
    sources: frozenset[Site]
    inputs: Mapping[Site, tuple[Site, ...]]
    targets: tuple[Site, ...]
    before: Mapping[Site, str]
    full_evaluations: int
    waves: tuple[Wave, ...] = field(default=())

    @classmethod
    def record(
        cls, graph: Graph | World, patches: Mapping[Site, Any], targets: Site | Iterable[Site]
    ) -> GraphWave:
        """Patch each site in a fork of its own, demand the targets there, and keep what the engine reports.

        `graph` may be a world: then it is the baseline, with what is patched in it. A callable patch is a
        function of what would have stood there.
        """
        base = graph if isinstance(graph, World) else World(graph)
        graph = base.graph
        if len(graph) > MOST_NODES:
            raise GraphError(
                f"this graph has {len(graph)} nodes, and a drawing shows up to {MOST_NODES}. Fold a captured "
                "model by layer: `fold(model, sites)`."
            )
        wanted = (targets,) if isinstance(targets, str) else tuple(targets)
        base.demand(wanted)
        known = [site for site in graph.sites if not base.is_stale(site)]
        return cls(
            nodes=graph.sites,
            sources=frozenset(graph.sources),
            inputs=MappingProxyType({site: graph.inputs(site) for site in graph.sites}),
            targets=wanted,
            before=MappingProxyType({site: value_text(base[site]) for site in known}),
            full_evaluations=sum(not graph.is_source(site) for site in graph.support(wanted)),
            waves=tuple(_wave(base, site, value, wanted) for site, value in patches.items()),
        )


def _wave(base: World, site: Site, value: Any, targets: tuple[Site, ...]) -> Wave:
    events: list[Event] = []
    with base.fork() as world:
        world.listen(events.append)
        world.patch(site, value)
        planned = world.plan(targets).sites
        world.demand(targets)
        sites = {
            kind: tuple(site for event in events if event.kind == kind for site in event.sites)
            for kind in ("invalidated", "recomputed", "reused")
        }
        changed = dict.fromkeys((site, *sites["recomputed"]))
        after = {name: value_text(world[name]) for name in changed if not world.is_stale(name)}
    with base.ledger.interval() as again:
        base.demand(targets)
    return Wave(
        site, planned=planned, after=MappingProxyType(after), restored=again.count("recomputed"), **sites
    )


def value_text(value: Any) -> str:
    """A value in a few characters: a number as it is, an array by its shape and its length as a vector."""
    try:
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape):
            return f"{'×'.join(map(str, shape))}, norm {float((value * value).sum()) ** 0.5:.4g}"
        text = f"{float(value):.4g}" if hasattr(value, "__float__") else repr(value)
    except Exception:  # noqa: BLE001 - a value that cannot be shown is no reason not to draw the others
        return type(value).__name__
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


NODE, SPACE_X, SPACE_Y, MARGIN, WIDEST = 26, 34, 16, 12, 130


def graph_sketch(wave: GraphWave) -> Sketch:
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
            boxes[at[site]] = Box(x, y, width, NODE, cut(site, width - 8), title, kind)
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


# -- pages and pictures ----------------------------------------------------------------------

Drawable = Folded | GraphWave


def style() -> str:
    """The style sheet of both sections; all of it is under `.cw-cone` and `.cw-wave`, or named `cw-…`."""
    return sketch.variables() + asset("report/sketch.css") + asset("report/wave.css")


def script() -> str:
    """The script of both sections. It fetches nothing, and makes no markup of data."""
    return joined(SCRIPT)


def data(drawable: Drawable) -> dict[str, SentFolded | SentWaves]:
    """Return what the script reads, by the id of the element that has to hold it as JSON."""
    return {_source(drawable): drawable.sent() if isinstance(drawable, Folded) else _graph_data(drawable)}


def cone_section(folded: Folded) -> Markup:
    """The drawing of a model's layers with one site's cone in it, and what that costs, as HTML."""
    return rendered(
        "report/cone.html",
        source=_source(folded),
        drawing=folded_sketch(folded).svg("cw-cone", f"The layers of {folded.model}"),
        legend=_legend("cw-cone-key", CONE_KEYS),
    )


def wave_section(drawable: Drawable) -> Markup:
    """The player of a wave as HTML: through a small graph node by node, through a model layer by layer."""
    is_graph = isinstance(drawable, GraphWave)
    drawn = graph_sketch(drawable) if isinstance(drawable, GraphWave) else folded_sketch(drawable)
    label = "The graph" if isinstance(drawable, GraphWave) else f"The layers of {drawable.model}"
    return rendered(
        "report/wave.html",
        source=_source(drawable),
        is_graph=is_graph,
        natural=f"{drawn.width * 0.8:.0f}",
        drawing=drawn.svg("cw-wave", label),
        legend=_legend("cw-wave-key", (*WAVE_KEYS, "source") if is_graph else WAVE_KEYS),
    )


def wave_page(
    drawable: Drawable | Graph | World,
    patches: Mapping[Site, Any] | None = None,
    targets: Site | Iterable[Site] | None = None,
    *,
    title: str = "The wave of a patch",
    out: str | Path | None = None,
) -> str:
    """A page of its own: the wave of a patch, and a folded model's cones. Written to `out` if that is given.

    `wave_page(graph, patches={"h": 10.0}, targets=["y"], out="wave.html")` patches each site of a small
    graph in a fork of its own, and records what the engine does. A folded model has its cones already.
    """
    if isinstance(drawable, Graph | World):
        graph = drawable if isinstance(drawable, Graph) else drawable.graph
        ends = (
            targets if targets is not None else [site for site in graph.computed if not graph.consumers(site)]
        )
        drawable = GraphWave.record(drawable, patches or {}, ends)
    page = document(
        "report/wave_page.html",
        title,
        styles=[asset("report/theme.css"), PAGE, style()],
        scripts=[script(), READY],
        data=data(drawable),
        model=drawable.model if isinstance(drawable, Folded) else "",
        cone=cone_section(drawable) if isinstance(drawable, Folded) else "",
        wave=wave_section(drawable),
    )
    if out is not None:
        expect_replaceable(Path(out))
        write_whole(Path(out), page.encode())
    return page


class Framed:
    """A page as a notebook shows it: in a frame of its own, which can run its script and nothing else."""

    def __init__(self, page: str, height: int) -> None:
        self.page = page
        self.height = height

    def _repr_html_(self) -> str:
        return str(rendered("report/frame.html", page=self.page, height=self.height))


def show(
    drawable: Drawable | Graph | World,
    patches: Mapping[Site, Any] | None = None,
    targets: Site | Iterable[Site] | None = None,
    *,
    height: int = 640,
) -> Framed:
    """The page of `wave_page` in a notebook: `show(graph, {"h": 10.0}, "y")`."""
    return Framed(wave_page(drawable, patches, targets), height)


READY = 'document.documentElement.dataset.ready = "true";'
"""A mark that the page has been drawn, for programs that look at it."""

PAGE = """
body { margin:0; background:var(--page); color:var(--ink); font:16px/1.55 var(--sans) }
.cw-page { max-width:72rem; margin:0 auto; padding:24px 16px 48px }
.cw-page h1 { font-size:28px; margin:0 0 12px; letter-spacing:-.01em }
.cw-page h2 { font-size:20px; margin:28px 0 12px }
"""


def _legend(prefix: str, names: Iterable[str]) -> Markup:
    """A box of each kind, as it is painted, and what it means."""
    keys = [
        (sketch.key(f"{prefix}-{name}", classes), meaning) for name, classes, meaning in KEYS if name in names
    ]
    return rendered("report/legend.html", keys=keys)


def _source(drawable: Drawable) -> str:
    return "conewise-folded" if isinstance(drawable, Folded) else "conewise-waves"


def _graph_data(wave: GraphWave) -> SentWaves:
    at = {site: number for number, site in enumerate(wave.nodes)}
    return {
        "kind": "conewise waves",
        "nodes": [(site, site in wave.sources) for site in wave.nodes],
        "targets": [at[site] for site in wave.targets],
        "full": wave.full_evaluations,
        "before": {at[site]: text for site, text in wave.before.items()},
        "waves": [
            {
                "site": at[one.site],
                "after": {at[site]: text for site, text in one.after.items()},
                "restored": one.restored,
                "invalidated": [at[site] for site in one.invalidated],
                "planned": [at[site] for site in one.planned],
                "recomputed": [at[site] for site in one.recomputed],
                "reused": [at[site] for site in one.reused],
            }
            for one in wave.waves
        ],
    }


def cone_svg(folded: Folded, site: str) -> str:
    """Return the cone of a site on the model's layers as an SVG file of its own, light and dark."""
    cone = folded.cone(site)
    paints = {at: _paint(folded, cone, at) for at in range(len(folded.parts))}
    caption = f"{site}: {_summary(folded, cone)}"
    label = f"The cone of {site} in {folded.model}: {_summary(folded, cone)}"
    return _alone(folded_sketch(folded), "cone", label, paints, caption, CONE_KEYS)


def wave_svg(wave: GraphWave, site: Site) -> str:
    """Return what a recorded patch at a site recomputed and reused, as an SVG file of its own."""
    found = next((one for one in wave.waves if one.site == site), None)
    if found is None:
        recorded = ", ".join(one.site for one in wave.waves)
        raise MissingSiteError(f"no wave of {site!r} was recorded, only of {recorded}.")
    paints = {
        at: Paint(done=float(name in found.recomputed), is_site=name == site, is_reused=name in found.reused)
        for at, name in enumerate(wave.nodes)
    }
    done = len(found.recomputed)
    caption = f"{site} is patched: {done} of {wave.full_evaluations} nodes are recomputed"
    return _alone(graph_sketch(wave), "wave", caption, paints, caption, (*CONE_KEYS, "source"))


def _alone(
    drawn: Sketch, prefix: str, label: str, paints: Mapping[int, Paint], caption: str, names: Sequence[str]
) -> str:
    """Return a drawing as a file of its own, with its style, a caption and the keys of these names."""
    keys = [(classes, meaning) for name, classes, meaning in KEYS if name in names]
    style = sketch.literal_style()
    return str(drawn.svg(prefix, label, paints, style=style, caption=caption, keys=keys))


def cone_text(folded: Folded, site: str) -> str:
    """The cone of a site as lines of text: a bar for each row of the drawing."""
    cone = folded.cone(site)
    lines = [f"{site}: {_summary(folded, cone)}", ""]
    width = max(len(_row_name(folded, members[0])) for _, members in folded.rows)
    for _, members in folded.rows:
        nodes, done = (sum(counts[at] for at in members) for counts in (_nodes(folded), cone.recomputed))
        mark = "◆" if any(at in cone.at for at in members) else " "
        filled = round(24 * done / nodes) if nodes else 0
        bar = "█" * (max(1, filled) if done else 0)
        lines.append(f"{mark} {_row_name(folded, members[0]):<{width}}  {bar:·<24}  {done:>4} of {nodes}")
    return "\n".join(lines)


def _nodes(folded: Folded) -> list[int]:
    return [part.nodes for part in folded.parts]


def _row_name(folded: Folded, at: int) -> str:
    part = folded.parts[at]
    return part.row if part.layer is None else f"layer {part.row}"


def _summary(folded: Folded, cone: Cone) -> str:
    done, full = cone.node_evaluations, folded.full_evaluations
    cost = f", {sum(cone.flops) / folded.full_flops:.1%} of the FLOPs" if folded.full_flops else ""
    return f"{done:,} of {full:,} nodes recomputed ({done / full if full else 0:.1%}){cost}"


def _paint(folded: Folded, cone: Cone, at: int) -> Paint:
    done = cone.recomputed[at]
    return Paint(
        done=done / folded.parts[at].nodes if done else 0.0,
        text=str(done) if done else "",
        is_site=at in cone.at,
        is_reused=cone.reused[at] > 0,
    )
