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

Both sections work alone. A page that has both, or a policy for scripts, takes them with `assets=False`, and
puts `style()`, `script()` and `data(...)` where it puts its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from conewise.drawing import layouts, sketch
from conewise.drawing.document import asset, document, inert
from conewise.drawing.folded import Folded
from conewise.drawing.pictures import cone_svg, cone_text, wave_svg
from conewise.drawing.sketch import CONE_KEYS, KEYS, WAVE_KEYS
from conewise.drawing.waves import GraphWave
from conewise.engine.world import World
from conewise.files import write_whole
from conewise.graph.graph import Graph, Site

__all__ = [
    "Framed",
    "GraphWave",
    "cone_section",
    "cone_svg",
    "cone_text",
    "data",
    "script",
    "show",
    "style",
    "wave_page",
    "wave_section",
    "wave_svg",
]

Shown = Folded | GraphWave


def style() -> str:
    """The style sheet of both sections; all of it is under `.cw-cone` and `.cw-wave`, or named `cw-…`."""
    return sketch.variables() + asset("sketch.css") + asset("wave.css")


def script() -> str:
    """The script of both sections. It fetches nothing, and makes no markup of data."""
    return asset("wave.js")


def data(shown: Shown) -> dict[str, Any]:
    """What the script reads, by the id of the element that has to hold it as JSON."""
    return {_source(shown): json.loads(shown.to_json()) if isinstance(shown, Folded) else _graph_data(shown)}


def cone_section(folded: Folded, *, assets: bool = True) -> str:
    """The drawing of a model's layers with one site's cone in it, and what that costs, as HTML."""
    drawing = layouts.of_folded(folded).svg("cw-cone", f"The layers of {folded.model}")
    facts = "".join(
        f'<div><dt>{term}</dt><dd><span data-cone="{name}"></span><small data-cone="{more}"></small>'
        "</dd></div>"
        for term, name, more in (
            ("recomputed", "recomputed", "share"),
            ("kept", "kept", "kept-share"),
            ("read as they were", "reused", "reused-share"),
            ("cost", "flops", "flops-share"),
        )
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("part", "recomputed", "read as it was"))
    return f"""<div class="cw-cone" id="cone-view" data-source="{_source(folded)}">
<div class="cw-split">
<div class="cw-stage" tabindex="0" role="region" aria-label="The model, layer by layer">{drawing}</div>
<div class="cw-side">
<label class="cw-pick">Site <select id="cone-site"></select></label>
<p class="cw-soft" data-cone="none">Choose a site to see its cone.</p>
<div class="cw-told cw-side" hidden aria-live="polite">
<p class="cw-name" data-cone="name"></p>
<dl class="cw-facts">{facts}</dl>
<p class="cw-say" data-cone="words"></p>
<details class="cw-words"><summary>The cone, part by part</summary>
<div><table><thead><tr>{heads}</tr></thead><tbody data-cone="rows"></tbody></table></div></details>
</div>
{_keys("cw-cone-key", CONE_KEYS)}
</div></div></div>
{_assets(folded) if assets else ""}"""


def wave_section(shown: Shown, *, assets: bool = True) -> str:
    """The player of a wave as HTML: through a small graph node by node, through a model layer by layer."""
    is_graph = isinstance(shown, GraphWave)
    drawn = layouts.of_graph(shown) if isinstance(shown, GraphWave) else layouts.of_folded(shown)
    drawing = drawn.svg(
        "cw-wave", "The graph" if isinstance(shown, GraphWave) else f"The layers of {shown.model}"
    )
    natural = f' style="--cw-natural:{drawn.width * 0.8:.0f}px"' if is_graph else ""
    kind = " cw-graph" if is_graph else ""
    controls = "".join(
        f'<button type="button" id="wave-{name}" aria-label="{said}" title="{said}">{sign}</button>'
        for name, sign, said in (
            ("first", "«", "first step"),
            ("prev", "‹", "step back"),
            ("play", "▶ Play", "play or pause"),
            ("next", "›", "next step"),
            ("last", "»", "last step"),
        )
    )
    ledger = "".join(
        f'<div><dt>{said}</dt><dd id="wave-{name}">0</dd></div>'
        for name, said in (
            ("invalidated", "invalidated"),
            ("recomputed", "recomputed"),
            ("reused", "reused"),
            ("kept", "not computed"),
        )
    )
    return f"""<div class="cw-wave" id="wave-view" data-source="{_source(shown)}">
<div class="cw-player">
<div class="cw-pick"><strong class="cw-name" id="wave-site"></strong> <span>is patched.</span>
<label class="cw-pick"><span>Another site:</span> <select id="wave-pick"></select></label>
<span>Or click a {"node" if is_graph else "part"}.</span></div>
<div class="cw-buttons" role="group" aria-label="Steps">{controls}
<input type="range" id="wave-slider" min="0" max="0" value="0" step="1" aria-label="step">
<output id="wave-place" for="wave-slider"></output></div>
<ol class="cw-phases" aria-label="Phases"></ol>
<p class="wave-step" aria-live="polite"></p>
</div>
<div class="{"" if is_graph else "cw-split"}">
<div class="cw-stage{kind}"{natural} tabindex="0" role="region" aria-label="The graph">{drawing}</div>
<div class="cw-side">
<dl class="cw-facts" aria-label="The ledger so far">{ledger}</dl>
{_keys("cw-wave-key", (*WAVE_KEYS, "source") if is_graph else WAVE_KEYS)}
</div></div></div>
{_assets(shown) if assets else ""}"""


def wave_page(
    shown: Shown | Graph | World,
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
    if isinstance(shown, Graph | World):
        graph = shown if isinstance(shown, Graph) else shown.graph
        ends = (
            targets if targets is not None else [site for site in graph.computed if not graph.consumers(site)]
        )
        shown = GraphWave.record(shown, patches or {}, ends)
    parts = [f"<h1>{escape(title)}</h1>"]
    if isinstance(shown, Folded):
        parts += [f"<p>{escape(shown.model)}, folded by layer.</p><h2>The cone of a site</h2>"]
        parts += [cone_section(shown, assets=False), "<h2>The wave of a patch</h2>"]
    parts.append(wave_section(shown, assets=False))
    page = document(
        title,
        f'<main class="cw-page">{"".join(parts)}</main>',
        styles=[asset("theme.css"), PAGE, style()],
        scripts=[script(), READY],
        data=data(shown),
    )
    if out is not None:
        write_whole(Path(out), page.encode())
    return page


class Framed:
    """A page as a notebook shows it: in a frame of its own, which can run its script and nothing else."""

    def __init__(self, page: str, height: int) -> None:
        self.page = page
        self.height = height

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.page)}" sandbox="allow-scripts" title="The wave of a patch" '
            f'style="width:100%;height:{self.height}px;border:0"></iframe>'
        )


def show(
    shown: Shown | Graph | World,
    patches: Mapping[Site, Any] | None = None,
    targets: Site | Iterable[Site] | None = None,
    *,
    height: int = 640,
) -> Framed:
    """The page of `wave_page` in a notebook: `show(graph, {"h": 10.0}, "y")`."""
    return Framed(wave_page(shown, patches, targets), height)


READY = 'document.documentElement.dataset.ready = "true";'
"""What says that a page has been drawn, to whoever looks at it by program."""

PAGE = """
body { margin:0; background:var(--page); color:var(--ink); font:16px/1.55 var(--sans) }
.cw-page { max-width:72rem; margin:0 auto; padding:24px 16px 48px }
.cw-page h1 { font-size:28px; margin:0 0 12px; letter-spacing:-.01em }
.cw-page h2 { font-size:20px; margin:28px 0 12px }
"""


def _keys(prefix: str, names: Iterable[str]) -> str:
    """The legend: a box of each kind, as it is painted, and what it means."""
    lines = []
    for name, classes, meaning in KEYS:
        if name in names:
            box = sketch.key(f"{prefix}-{name}", classes)
            lines.append(f"<li>{box}{escape(meaning)}</li>")
    return f'<ul class="cw-keys" aria-label="Legend">{"".join(lines)}</ul>'


def _source(shown: Shown) -> str:
    return "conewise-folded" if isinstance(shown, Folded) else "conewise-waves"


def _assets(shown: Shown) -> str:
    held = "".join(
        f'<script type="application/json" id="{name}">{inert(value)}</script>\n'
        for name, value in data(shown).items()
    )
    return f"<style>{style()}</style>\n{held}<script>{script()}</script>\n"


def _graph_data(wave: GraphWave) -> dict[str, Any]:
    at = {site: number for number, site in enumerate(wave.nodes)}
    numbers = {"invalidated", "planned", "recomputed", "reused"}
    return {
        "kind": "conewise waves",
        "nodes": [[site, site in wave.sources] for site in wave.nodes],
        "targets": [at[site] for site in wave.targets],
        "full": wave.full_evaluations,
        "before": {at[site]: text for site, text in wave.before.items()},
        "waves": [
            {
                "site": at[one.site],
                "after": {at[site]: text for site, text in one.after.items()},
                "restored": one.restored,
                **{kind: [at[site] for site in getattr(one, kind)] for kind in sorted(numbers)},
            }
            for one in wave.waves
        ],
    }
