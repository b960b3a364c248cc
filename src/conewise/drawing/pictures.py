"""Cones and waves as pictures and lines of text that stand alone: for files, documents and terminals."""

from __future__ import annotations

from conewise.drawing import layouts, sketch
from conewise.drawing.folded import Cone, Folded
from conewise.drawing.sketch import CONE_KEYS, KEYS, Paint
from conewise.drawing.waves import GraphWave
from conewise.errors import MissingSiteError
from conewise.reactive.graph import Site


def cone_svg(folded: Folded, site: str) -> str:
    """The cone of a site on the model's layers as an SVG file of its own, light and dark."""
    cone = folded.cone(site)
    paints = {at: _paint(folded, cone, at) for at in range(len(folded.parts))}
    caption = f"{site}: {_summary(folded, cone)}"
    keys = [(classes, meaning) for name, classes, meaning in KEYS if name in CONE_KEYS]
    drawn = layouts.of_folded(folded).svg(
        "cone",
        f"The cone of {site} in {folded.model}: {_summary(folded, cone)}",
        paints,
        style=sketch.literal_style(),
        caption=caption,
        keys=keys,
    )
    return str(drawn)


def wave_svg(wave: GraphWave, site: Site) -> str:
    """What a recorded patch at a site of a small graph recomputed and reused, as an SVG file of its own."""
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
    keys = [(classes, meaning) for name, classes, meaning in KEYS if name in (*CONE_KEYS, "source")]
    drawn = layouts.of_graph(wave)
    return str(drawn.svg("wave", caption, paints, style=sketch.literal_style(), caption=caption, keys=keys))


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
