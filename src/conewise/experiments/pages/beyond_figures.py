"""The figures of what lies beyond the paper: edges, searches, positions, stacks of worlds, reverse passes."""

from __future__ import annotations

from collections.abc import Sequence

from conewise.experiments.pages.palette import BLUE, COLOURS, GREEN, GREY, ORANGE, measured_of
from conewise.experiments.result import Result, Row, plain
from conewise.extras import needs

with needs("plots"):
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots


def edges_figure(result: Result) -> go.Figure:
    """Ratios and shared work by depth."""
    titles = ("full runs over the sweep of all edges", "share of the sweep that readers compute")
    drawn = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.12)
    for (name, ratios), colour in zip(result.series["ratio"].items(), COLOURS, strict=False):
        for column, values in ((1, ratios), (2, result.series["shared"][name])):
            drawn.add_scatter(
                x=result.series["layers"],
                y=values,
                mode="lines",
                line={"color": colour},
                name=f"{name}, closed form",
                legendgroup=name,
                showlegend=column == 1,
                col=column,
                row=1,
            )
        rows = [row for row in result.rows if row.facts["model"] == name]
        points = [row for row in rows if row.name.endswith("over the sweep")]
        drawn.add_scatter(
            x=[row.facts["layers"] for row in points],
            y=measured_of(points),
            mode="markers",
            marker={"color": colour, "size": 9},
            name=f"{name}, ledger",
            legendgroup=name,
            col=1,
            row=1,
        )
        (limit,) = [row.facts["limit"] for row in rows if "limit" in row.facts]
        drawn.add_hline(y=limit, line={"color": colour, "dash": "dot"}, col=1, row=1)
    drawn.update_xaxes(title="layers", type="log", tickvals=[1, 2, 4, 8, 16, 32, 64])
    drawn.update_yaxes(title="ratio, and its limit", rangemode="tozero", col=1)
    drawn.update_yaxes(title="share", rangemode="tozero", col=2)
    return drawn


def greedy_figure(result: Result) -> go.Figure:
    """What guessing ahead gains, by width."""
    launch = result.series["launch"]
    titles = (f"gain over one by one, a launch of {launch} worlds' time", "worlds for each candidate")
    drawn = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.12)
    widths = result.series["widths"]
    for (chance, gains), colour in zip(result.series["gain"].items(), COLOURS, strict=False):
        for column, values in ((1, gains), (2, result.series["worlds"][chance])):
            drawn.add_scatter(
                x=widths,
                y=values,
                mode="lines",
                line={"color": colour},
                name=f"guesses right: {chance}",
                legendgroup=str(chance),
                showlegend=column == 1,
                col=column,
                row=1,
            )
        best, gain = result.series["best"][chance]
        drawn.add_scatter(
            x=[best],
            y=[gain],
            mode="markers",
            marker={"color": colour, "symbol": "star", "size": 12},
            name=f"best width {best}",
            legendgroup=str(chance),
            col=1,
            row=1,
        )
    drawn.update_xaxes(title="candidates at once", type="log", tickvals=[1, 2, 4, 8, 16, 32, 64])
    drawn.update_yaxes(title="gain", rangemode="tozero", col=1)
    drawn.update_yaxes(title="worlds, those in vain included", type="log", col=2)
    return drawn


def positions_figure(result: Result) -> go.Figure:
    """Ratios in node-rows by size."""
    drawn = go.Figure()
    for (case, ratios), colour in zip(result.series["ratio"].items(), COLOURS, strict=False):
        drawn.add_scatter(
            x=result.series["size"],
            y=ratios,
            mode="lines",
            line={"color": colour},
            name=f"{case}, closed form",
        )
        points = [
            row
            for row in result.rows
            if row.name.endswith("the ratio")
            and row.facts["case"] == case
            and row.facts["layers"] == row.facts["positions"]
        ]
        drawn.add_scatter(
            x=[row.facts["layers"] for row in points],
            y=measured_of(points),
            mode="markers",
            marker={"color": colour, "size": 9},
            name=f"{case}, ledger",
        )
    for limit in sorted(set(result.series["limit"].values())):
        drawn.add_hline(y=limit, line={"color": GREY, "dash": "dot"})
    drawn.update_xaxes(title="layers, and as many positions", type="log", tickvals=[1, 4, 16, 64])
    drawn.update_yaxes(title="ratio in node-rows, log scale", type="log", tickvals=[1, 2, 3, 4, 6, 8, 12, 16])
    return drawn


def wavefront_figure(result: Result) -> go.Figure:
    """Launches by width, and values held by order."""
    titles = ("launches, and the two bounds", "values held", "milliseconds, and as predicted")
    drawn = make_subplots(cols=3, subplot_titles=titles, horizontal_spacing=0.09)
    launched = [row for row in result.rows if "width" in row.facts]
    depths = list(dict.fromkeys(row.facts["layers"] for row in launched))
    for depth, colour in zip(depths, COLOURS, strict=False):
        rows = [row for row in launched if row.facts["layers"] == depth]
        widths = [row.facts["width"] for row in rows]
        marker, dotted = {"color": colour, "size": 9}, {"color": colour, "dash": "dot"}
        name = f"{depth} layer{'s' if depth > 1 else ''}"
        drawn.add_scatter(
            x=widths, y=measured_of(rows), mode="markers", marker=marker, name=name, col=1, row=1
        )
        for bound in ("least", "most"):
            values = [row.facts[bound] for row in rows]
            drawn.add_scatter(
                x=widths, y=values, mode="lines", line=dotted, name=f"{name}, at {bound}", col=1, row=1
            )
    held = [row for row in result.rows if "branches" in row.facts]
    for how, colour in zip(dict.fromkeys(row.facts["order"] for row in held), COLOURS[2:], strict=False):
        rows = [row for row in held if row.facts["order"] == how]
        drawn.add_bar(
            x=[str(row.facts["branches"]) for row in rows],
            y=measured_of(rows),
            marker={"color": colour},
            name=how,
            col=2,
            row=1,
        )
    drawn.update_xaxes(title="worlds at once", type="log", col=1)
    drawn.update_yaxes(title="launches", type="log", col=1)
    drawn.update_xaxes(title="branches", type="category", col=2)
    drawn.update_yaxes(title="sizes of values together", rangemode="tozero", col=2)
    _clock(drawn, [row for row in result.rows if "timed" in row.facts])
    return drawn


def _clock(drawn: go.Figure, timed: Sequence[Row]) -> None:
    """Milliseconds of stacks by width: measured, and by launches and work."""
    depths = sorted({row.facts["timed"] for row in timed})
    for depth, colour in zip(depths, COLOURS, strict=False):
        rows = [row for row in timed if row.facts["timed"] == depth]
        widths = [row.facts["at_once"] for row in rows]
        marker = {"color": colour, "size": 8, "symbol": "square"}
        name = f"{depth} layer{'s' if depth > 1 else ''}, measured"
        drawn.add_scatter(
            x=widths, y=measured_of(rows), mode="markers", marker=marker, name=name, col=3, row=1
        )
        predicted = [plain(row.predicted) for row in rows]
        line = {"color": colour}
        drawn.add_scatter(
            x=widths, y=predicted, mode="lines", line=line, name="launches · c + work / rate", col=3, row=1
        )
    drawn.update_xaxes(title="worlds at once", type="log", col=3)
    drawn.update_yaxes(title="milliseconds", type="log", col=3)


def backward_figure(result: Result) -> go.Figure:
    """Ratios of the forward pass, of both passes, and by the paper's count, for each network."""
    drawn = go.Figure()
    bars = (
        ("forward", "forward pass, ρ", BLUE),
        ("joint", "both passes, exact", GREEN),
        ("paper", "the paper's count", ORANGE),
    )
    for key, name, colour in bars:
        drawn.add_bar(x=result.series["network"], y=result.series[key], marker={"color": colour}, name=name)
    drawn.add_scatter(
        x=result.series["network"],
        y=result.series["dense"],
        mode="markers",
        marker={"color": GREY, "symbol": "line-ew-open", "size": 26, "line": {"width": 2}},
        name="if every gradient were stale",
    )
    drawn.add_hline(y=1, line={"color": GREY, "dash": "dot"})
    drawn.update_layout(barmode="group")
    drawn.update_xaxes(title="network, and loss")
    drawn.update_yaxes(title="full passes over the sweep", rangemode="tozero")
    return drawn
