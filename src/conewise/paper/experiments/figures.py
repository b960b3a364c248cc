"""What the figures have in common: colours, and figures of rows as they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from conewise.extras import needs
from conewise.paper.experiments.result import Result, Row, plain

# Okabe and Ito's colours, which colour-blind readers tell apart; the blue is a little lighter than
# theirs, so that it shows on a dark page too.
BLUE, ORANGE, GREEN, PINK, RED, SKY = "#2b8ccd", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
GREY = "#8a8f98"
PAPER_MARK: dict[str, Any] = {"symbol": "diamond-open", "size": 13, "color": RED, "line": {"width": 2}}


def measured_of(rows: Iterable[Row]) -> list[int | float | None]:
    """What was measured, as it is drawn."""
    return [plain(row.measured) for row in rows]


def papers_of(rows: Sequence[Row]) -> list[float | None]:
    """What the paper prints, as it is drawn."""
    return [None if row.paper is None else float(row.paper) for row in rows]


# -- One figure per experiment, which shows its claim at a glance ----------------------------------


with needs("plots"):
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots


def figure(result: Result) -> go.Figure:
    """The figure of an experiment, without a background of its own."""
    drawn = _FIGURES[result.name](result)
    drawn.update_layout(
        height=430,
        margin={"l": 64, "r": 24, "t": 44, "b": 56},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#333840"},
        legend={"orientation": "v", "x": 1.02, "y": 1, "xanchor": "left"},
        colorway=list(COLOURS),
    )
    drawn.update_xaxes(gridcolor="rgba(128,128,128,0.22)", zeroline=False, linecolor=GREY)
    drawn.update_yaxes(gridcolor="rgba(128,128,128,0.22)", zeroline=False, linecolor=GREY)
    return drawn


def _locality(result: Result) -> go.Figure:
    drawn = go.Figure()
    touched, times = result.series["touched"], result.series["milliseconds"]
    degrees = result.series["degree"]
    symbols = ("circle", "square", "diamond", "triangle-up")
    for degree, colour, symbol in zip(dict.fromkeys(degrees), COLOURS, symbols, strict=False):
        points = [(x, y) for x, y, d in zip(touched, times, degrees, strict=True) if d == degree and y > 0]
        drawn.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="markers",
            marker={"color": colour, "symbol": symbol, "size": 8},
            name=f"nodes that read {degree}",
        )
    slope, fixed = result.series["line"]
    ends = sorted(x for x in touched if slope * x + fixed > 0)
    drawn.add_scatter(
        x=ends,
        y=[slope * x + fixed for x in ends],
        mode="lines",
        line={"color": GREY, "dash": "dot"},
        name="least squares: fixed + slope · x",
    )
    drawn.update_xaxes(type="log", title="nodes looked at and edges followed, |V⁺| + |E⁺| + 1 + d(s)")
    drawn.update_xaxes(tickvals=[1, 10, 100, 1_000, 10_000, 100_000])
    drawn.update_yaxes(type="log", title="milliseconds of a wave", tickvals=[0.01, 0.1, 1, 10, 100])
    return drawn


def _e4(result: Result) -> go.Figure:
    profiles = ("output-heavy", "input-heavy")
    drawn = make_subplots(
        cols=2, subplot_titles=[f"{profile}" for profile in profiles], horizontal_spacing=0.08
    )
    rows = [row for row in result.rows if "limit" in row.facts]
    for column, profile in enumerate(profiles, start=1):
        for q, colour in zip(dict.fromkeys(row.facts["q"] for row in rows), COLOURS, strict=False):
            line = [row for row in rows if row.facts["q"] == q and row.facts["profile"] == profile]
            depths = [row.facts["L"] for row in line]
            drawn.add_scatter(
                x=depths,
                y=measured_of(line),
                mode="lines+markers",
                name=f"q = {q:g}",
                col=column,
                row=1,
                line={"color": colour},
                marker={"size": 7},
                legendgroup=str(q),
                showlegend=column == 1,
            )
            drawn.add_scatter(
                x=[depths[0], depths[-1]],
                y=[line[0].facts["limit"]] * 2,
                mode="lines",
                col=column,
                row=1,
                line={"color": colour, "dash": "dot"},
                legendgroup=str(q),
                showlegend=False,
                hovertemplate="limit %{y:.4f}<extra></extra>",
            )
        printed = [row for row in rows if row.paper is not None and row.facts["profile"] == profile]
        drawn.add_scatter(
            x=[row.facts["L"] for row in printed],
            y=papers_of(printed),
            mode="markers",
            marker=PAPER_MARK,
            name="paper",
            showlegend=column == 1,
            col=column,
            row=1,
        )
    drawn.add_scatter(x=[None], y=[None], mode="lines", line={"color": GREY, "dash": "dot"}, name="limit")
    drawn.update_xaxes(type="log", title="layers L", tickvals=[20, 40, 80, 160, 320])
    drawn.update_yaxes(title="ρ, full re-runs over cones", col=1)
    return drawn


def _e5(result: Result) -> go.Figure:
    drawn = go.Figure()
    paper = [row for row in result.rows if row.facts.get("count") == "paper"]
    exact = [row for row in result.rows if row.facts.get("count") == "exact"]
    lines: dict[tuple[str, float], list[Row]] = {}
    for row in paper:
        lines.setdefault((row.facts["profile"], row.facts["q"]), []).append(row)
    for number, line in enumerate(lines.values()):
        drawn.add_scatter(
            x=[row.facts["L"] for row in line],
            y=measured_of(line),
            mode="lines+markers",
            line={"color": BLUE},
            name=f"paper's count, {len(lines)} profiles",
            showlegend=number == 0,
            legendgroup="paper",
            hovertext=[row.name for row in line],
        )
    printed = list({row.facts["L"]: row for row in paper}.values())
    drawn.add_scatter(
        x=[row.facts["L"] for row in printed],
        y=papers_of(printed),
        mode="markers",
        marker=PAPER_MARK,
        name="paper",
    )
    drawn.add_scatter(
        x=[row.facts["L"] for row in exact],
        y=measured_of(exact),
        mode="lines+markers",
        line={"color": GREEN},
        name="exact, gradients as nodes",
        marker={"symbol": "square", "size": 8},
    )
    drawn.add_hline(y=1, line={"color": GREY, "dash": "dot"})
    drawn.update_xaxes(type="log", title="layers L", tickvals=[5, 10, 20, 40, 80, 160])
    drawn.update_yaxes(title="ρ under backpropagation", rangemode="normal")
    return drawn


def _e7(result: Result) -> go.Figure:
    titles = ("cost of each graft, in the order made", "overcount Δ, and the batched total")
    drawn = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    steps = [row for row in result.rows if "step" in row.facts]
    orders = list(dict.fromkeys(row.facts["order"] for row in steps))
    for order, colour in zip(orders, COLOURS, strict=False):
        line = [row for row in steps if row.facts["order"] == order]
        drawn.add_scatter(
            x=[row.facts["step"] for row in line],
            y=measured_of(line),
            mode="lines+markers",
            name=order,
            col=1,
            row=1,
            line={"color": colour},
            marker={"size": 8},
        )
    drawn.add_scatter(
        x=[row.facts["step"] for row in steps],
        y=papers_of(steps),
        mode="markers",
        marker=PAPER_MARK,
        name="paper",
        col=1,
        row=1,
    )
    kinds = (("overcount Δ", PINK, "overcount Δ"), ("batched", SKY, "batched total"))
    for kind, colour, label in kinds:
        bars = [row for row in result.rows if row.name.endswith(f", {kind}")]
        drawn.add_bar(
            x=orders,
            y=measured_of(bars),
            marker={"color": colour},
            name=label,
            col=2,
            row=1,
            text=[f"{value:g}" for value in measured_of(bars)],
            textposition="outside",
            cliponaxis=False,
        )
    drawn.update_xaxes(title="graft", col=1, dtick=1)
    drawn.update_yaxes(title="nodes recomputed", rangemode="tozero", col=1)
    drawn.update_yaxes(title="nodes", rangemode="tozero", col=2)
    return drawn


def _drift(result: Result) -> go.Figure:
    titles = ("bookkeeping, median of each block", "patch and demand, by graph size")
    drawn = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    block = result.series["block"]
    for kind, colour, printed in (("graft", BLUE, 0.035), ("redefinition", ORANGE, 0.024)):
        medians = result.series[kind]
        at = [block * (number + 0.5) for number in range(len(medians))]
        drawn.add_scatter(
            x=at,
            y=medians,
            mode="markers",
            marker={"color": colour, "size": 5},
            name=f"{kind}, measured",
            col=1,
            row=1,
        )
        drawn.add_scatter(
            x=[0, at[-1]],
            y=[printed] * 2,
            mode="lines",
            line={"color": colour, "dash": "dot"},
            name=f"{kind}, paper (100 of them)",
            col=1,
            row=1,
        )
    cones: dict[int, list[tuple[int, float]]] = {}
    for cone, size, milliseconds in result.series["ceiling"]["samples"]:
        cones.setdefault(cone, []).append((size, milliseconds))
    for (cone, points), colour in zip(cones.items(), (SKY, GREEN, PINK, RED), strict=False):
        drawn.add_scatter(
            x=[size for size, _ in points],
            y=[time for _, time in points],
            mode="lines+markers",
            name=f"cone of {cone} nodes",
            line={"color": colour},
            col=2,
            row=1,
        )
    drawn.update_xaxes(title="mutations made before", col=1)
    sizes = list(dict.fromkeys(size for _, size, _ in result.series["ceiling"]["samples"]))
    drawn.update_xaxes(title="nodes in the graph", type="log", tickvals=sizes, col=2)
    drawn.update_yaxes(title="milliseconds", rangemode="tozero", col=1)
    drawn.update_yaxes(title="milliseconds", type="log", tickvals=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], col=2)
    return drawn


def _compiled(result: Result) -> go.Figure:
    titles = ("looks at the graph's nodes", "full runs over the sweep")
    drawn = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    panels = (("looks", 1, "{:.0f}"), ("ratio", 2, "{:.2f}"))
    depths = list(dict.fromkeys(row.facts["layers"] for row in result.rows if "layers" in row.facts))
    for kind, column, shown in panels:
        rows = [row for row in result.rows if kind in row.facts]
        for layers, colour in zip(depths, COLOURS, strict=False):
            bars = [row for row in rows if row.facts["layers"] == layers]
            drawn.add_bar(
                x=[row.facts[kind] for row in bars],
                y=measured_of(bars),
                marker={"color": colour},
                name=f"{layers} layer{'s' if layers > 1 else ''}",
                legendgroup=str(layers),
                showlegend=column == 1,
                text=[shown.format(plain(row.measured)) for row in bars],
                textposition="outside",
                cliponaxis=False,
                col=column,
                row=1,
            )
    drawn.update_xaxes(title="done by", tickangle=0, col=1)
    drawn.update_yaxes(title="looks", rangemode="tozero", col=1)
    drawn.update_xaxes(title="counted in", col=2)
    drawn.update_yaxes(title="ratio", rangemode="tozero", col=2)
    return drawn


def _e9(result: Result) -> go.Figure:
    titles = ("cones: every head and MLP", "sweep ratio: counts and clock")
    drawn = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    cones = [row for row in result.rows if row.detail]
    groups: dict[str, list[Row]] = {}
    for row in cones:
        name = f"{row.facts['family']}, {row.facts['layers']} × {row.facts['heads']}"
        groups.setdefault(name, []).append(row)
    longest = max((plain(row.measured) or 0 for row in cones), default=1)
    drawn.add_scatter(
        x=[0, longest],
        y=[0, longest],
        mode="lines",
        line={"color": GREY, "dash": "dot"},
        name="equal",
        col=1,
        row=1,
    )
    symbols = ("circle-open", "square-open", "x-thin-open", "cross-thin-open")
    for (name, rows), colour, symbol in zip(groups.items(), COLOURS, symbols, strict=False):
        drawn.add_scatter(
            x=[plain(row.predicted) for row in rows],
            y=measured_of(rows),
            mode="markers",
            col=1,
            row=1,
            marker={"color": colour, "symbol": symbol, "size": 8, "line": {"width": 1.5}},
            name=f"{name}: {len(rows)} sites",
        )
    clocks = [row for row in result.rows if "ratios" in row.facts]
    sizes = [f"{row.facts['layers']} layers, {row.facts['heads']} heads" for row in clocks]
    bars = (
        ("predicted", [plain(row.predicted) for row in clocks], GREY),
        ("paper's clock", papers_of(clocks), RED),
        (f"our clock ({clocks[0].facts['device']})" if clocks else "our clock", measured_of(clocks), BLUE),
    )
    for name, heights, colour in bars:
        drawn.add_bar(
            x=sizes,
            y=heights,
            name=name,
            marker={"color": colour},
            col=2,
            row=1,
            text=[f"{height:.3f}" for height in heights if height is not None],
            textposition="outside",
            cliponaxis=False,
        )
    drawn.update_xaxes(title="nodes by the closed form", col=1)
    drawn.update_yaxes(title="nodes recomputed", col=1)
    drawn.update_yaxes(title="ρ", rangemode="tozero", col=2)
    return drawn


def _skips(result: Result) -> go.Figure:
    drawn = go.Figure()
    spans = list(dict.fromkeys(row.facts["span"] for row in result.rows if row.facts["kind"] == "bypassing"))
    symbols = ("circle", "square", "diamond", "triangle-up")
    for ratio, limit, colour in (("ρ", "forward", BLUE), ("ρ_train", "training", ORANGE)):
        formula = "2/(1−y)" if ratio == "ρ" else "1/(1−y)"
        drawn.add_scatter(
            x=result.series["y"],
            y=result.series[limit],
            mode="lines",
            line={"color": colour, "dash": "dot"},
            name=f"limit of {ratio}, {formula}",
        )
        for span, symbol in zip(spans, symbols, strict=False):
            points = [
                row
                for row in result.rows
                if row.facts["ratio"] == ratio
                and row.facts["span"] == span
                and row.facts["kind"] == "bypassing"
            ]
            drawn.add_scatter(
                x=[row.facts["y"] for row in points],
                y=measured_of(points),
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 9},
                name=f"{ratio}, span {span}",
                hovertext=[row.name for row in points],
            )
    drawn.update_xaxes(title="y, the chance that two layers are parallel", range=[-0.02, 0.9])
    drawn.update_yaxes(title="ratio, log scale", type="log", tickvals=[1, 1.5, 2, 3, 4, 6, 8, 12, 16])
    return drawn


def _growth(result: Result) -> go.Figure:
    titles = ("loss", "nodes recomputed by a step")
    drawn = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    for name, label, colour in (("grown", "grown", BLUE), ("plain", "not grown", ORANGE)):
        losses = result.series[name]
        drawn.add_scatter(
            x=list(range(1, len(losses) + 1)),
            y=losses,
            mode="lines",
            line={"color": colour},
            name=label,
            col=1,
            row=1,
        )
    steps = [row for row in result.rows if row.detail]
    at = [row.facts["step"] for row in steps]
    drawn.add_scatter(
        x=at,
        y=[plain(row.predicted) for row in steps],
        mode="lines",
        line={"color": GREY, "shape": "hv"},
        name="predicted",
        col=2,
        row=1,
    )
    drawn.add_scatter(
        x=at,
        y=measured_of(steps),
        mode="markers",
        marker={"color": GREEN, "size": 4},
        name="measured",
        col=2,
        row=1,
    )
    for column in (1, 2):
        for place in result.series["grown_at"]:
            drawn.add_vline(x=place + 0.5, line={"color": PINK, "dash": "dot"}, col=column, row=1)
    drawn.add_scatter(x=[None], y=[None], mode="lines", line={"color": PINK, "dash": "dot"}, name="a graft")
    drawn.update_xaxes(title="steps")
    drawn.update_yaxes(title="mean squared error, log scale", type="log", col=1)
    drawn.update_yaxes(title="nodes", rangemode="tozero", col=2)
    return drawn


def _index(result: Result) -> go.Figure:
    titles = ("ratio of the sweep", "index of the layers")
    drawn = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    rows = [row for row in result.rows if "index" in row.facts]
    ratios = [value for row in rows for value in (plain(row.predicted), plain(row.measured)) if value]
    ends = [min(ratios, default=1), max(ratios, default=3)]
    drawn.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dot"}, name="equal", col=1, row=1
    )
    units = (("nodes", BLUE, "circle"), ("FLOPs", ORANGE, "square"), ("time", GREEN, "diamond"))
    for unit, colour, symbol in units:
        points = [row for row in rows if row.facts["weight"] == unit]
        names = [row.facts["network"] for row in points]
        marker = {"color": colour, "symbol": symbol, "size": 8}
        drawn.add_scatter(
            x=[plain(row.predicted) for row in points],
            y=measured_of(points),
            mode="markers",
            marker=marker,
            name=unit,
            legendgroup=unit,
            hovertext=names,
            col=1,
            row=1,
        )
        signs = [1 if row.facts["orientation"] == "output-heavy" else -1 for row in points]
        drawn.add_scatter(
            x=[sign * row.facts["index"] for sign, row in zip(signs, points, strict=True)],
            y=names,
            mode="markers",
            marker=marker,
            name=unit,
            legendgroup=unit,
            showlegend=False,
            col=2,
            row=1,
        )
    drawn.add_vline(x=0, line={"color": GREY, "dash": "dot"}, col=2, row=1)
    drawn.update_xaxes(title="ρ by the index, at the network's depth", col=1)
    drawn.update_yaxes(title="ρ of the sweep", col=1)
    drawn.update_xaxes(title="← input-heavy · q · output-heavy →", col=2)
    drawn.update_yaxes(autorange="reversed", dtick=1, tickfont={"size": 9}, col=2)
    return drawn


# -- Beyond figures --------------------------------------------------------------------------------
# The figures of what lies beyond the paper: edges, searches, positions, stacks of worlds, reverse passes.


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


_FIGURES: dict[str, Callable[[Result], go.Figure]] = {
    "locality": _locality,
    "e4": _e4,
    "e5": _e5,
    "e7": _e7,
    "drift": _drift,
    "compiled": _compiled,
    "e9": _e9,
    "skips": _skips,
    "growth": _growth,
    "index": _index,
    "edges": edges_figure,
    "greedy": greedy_figure,
    "positions": positions_figure,
    "wavefront": wavefront_figure,
    "backward": backward_figure,
}
