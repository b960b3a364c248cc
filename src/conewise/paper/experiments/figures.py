"""The figure of each experiment, which shows its claim at a glance."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from conewise.extras import needs
from conewise.paper.experiments.result import Result, Row, plain

with needs("plots"):
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

# Okabe and Ito's colours, which colour-blind readers tell apart; the blue is a little lighter than
# theirs, so that it shows on a dark page too.
BLUE, ORANGE, GREEN, PINK, RED, SKY = "#2b8ccd", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
GREY = "#8a8f98"
PROFILES = ("output-heavy", "input-heavy")
SYMBOLS = ("circle", "square", "diamond", "triangle-up")


class Drawing:
    """A figure in the making, of one panel or several side by side.

    Traces of one name are one entry of the legend, in all panels together.
    """

    def __init__(self, *titles: str) -> None:
        self.figure = make_subplots(
            cols=max(1, len(titles)), subplot_titles=titles or None, horizontal_spacing=0.1
        )
        self._named: set[str] = set()

    def line(
        self, x: Any, y: Any, name: str, colour: str, panel: int = 1, *, dash: str = "solid", **more: Any
    ) -> None:
        """Add a line; with `marker`, points on it too."""
        mode = "lines+markers" if "marker" in more else "lines"
        self._add(go.Scatter(x=x, y=y, mode=mode, line={"color": colour, "dash": dash}, **more), name, panel)

    def dots(
        self,
        x: Any,
        y: Any,
        name: str,
        colour: str,
        panel: int = 1,
        *,
        symbol: str = "circle",
        size: int = 9,
        width: float | None = None,
        **more: Any,
    ) -> None:
        """Add points; `width` is that of the lines of open symbols."""
        marker: dict[str, Any] = {"color": colour, "symbol": symbol, "size": size}
        if width is not None:
            marker["line"] = {"width": width}
        self._add(go.Scatter(x=x, y=y, mode="markers", marker=marker, **more), name, panel)

    def printed(self, x: Any, rows: Sequence[Row], panel: int = 1) -> None:
        """Add what the paper prints of these rows."""
        self.dots(x, papers_of(rows), "paper", RED, panel, symbol="diamond-open", size=13, width=2)

    def bars(
        self, x: Any, y: Sequence[Any], name: str, colour: str, panel: int = 1, *, digits: str = ""
    ) -> None:
        """Add bars; with `digits`, a format, each has its height above it."""
        text: dict[str, Any] = {}
        if digits:
            shown = [format(height, digits) for height in y if height is not None]
            text = {"text": shown, "textposition": "outside", "cliponaxis": False}
        self._add(go.Bar(x=x, y=y, marker={"color": colour}, **text), name, panel)

    def entry(self, name: str, colour: str) -> None:
        """Add an entry to the legend for dotted lines that are no traces."""
        self.line([None], [None], name, colour, dash="dot")

    def at_height(self, y: float, colour: str = GREY) -> None:
        """Add a dotted line across the first panel."""
        self.figure.add_hline(y=y, line={"color": colour, "dash": "dot"}, row=1, col=1)

    def at_place(self, x: float, colour: str, panel: int) -> None:
        """Add a dotted line from the bottom of a panel to its top."""
        self.figure.add_vline(x=x, line={"color": colour, "dash": "dot"}, row=1, col=panel)

    def x(self, title: str | None, panel: int | None = None, **more: Any) -> None:
        """Name the horizontal axis of a panel, or of all; `log`, `ticks` and plotly's own settings."""
        self.figure.update_xaxes(title=title, col=panel, **_axis(**more))

    def y(self, title: str | None, panel: int | None = None, **more: Any) -> None:
        """Name the vertical axis; `zero` lets it begin at 0."""
        self.figure.update_yaxes(title=title, col=panel, **_axis(**more))

    def _add(self, trace: Any, name: str, panel: int) -> None:
        trace.update(name=name, legendgroup=name, showlegend=name not in self._named)
        self._named.add(name)
        self.figure.add_trace(trace, row=1, col=panel)


def _axis(
    *, log: bool = False, ticks: Sequence[float] | None = None, zero: bool = False, **more: Any
) -> dict[str, Any]:
    if log:
        more["type"] = "log"
    if ticks is not None:
        more["tickvals"] = ticks
    if zero:
        more["rangemode"] = "tozero"
    return more


FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Drawing, Result], None]]] = {}
"""The titles of the panels of each experiment's figure, and the function that draws it, by its name."""


def _figure(*titles: str) -> Callable[[Callable[[Drawing, Result], None]], None]:
    def entered(draw: Callable[[Drawing, Result], None]) -> None:
        FIGURES[draw.__name__.removeprefix("_")] = titles, draw

    return entered


def figure(result: Result) -> go.Figure:
    """Return the figure of an experiment, without a background of its own."""
    titles, draw = FIGURES[result.name]
    made = Drawing(*(title.format(**result.series) for title in titles))
    draw(made, result)
    drawn = made.figure
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


# -- Rows as they are drawn ------------------------------------------------------------------------


def measured_of(rows: Iterable[Row]) -> list[int | float | None]:
    """Return what was measured."""
    return [plain(row.measured) for row in rows]


def predicted_of(rows: Iterable[Row]) -> list[int | float | None]:
    """Return what was predicted."""
    return [plain(row.predicted) for row in rows]


def papers_of(rows: Iterable[Row]) -> list[float | None]:
    """Return what the paper prints."""
    return [None if row.paper is None else float(row.paper) for row in rows]


def facts_of(rows: Iterable[Row], fact: str) -> list[Any]:
    """Return one fact of each row."""
    return [row.facts[fact] for row in rows]


def where(rows: Iterable[Row], **facts: Hashable) -> list[Row]:
    """Return the rows that have these facts; of a fact that is `...` any value will do."""
    return [
        row
        for row in rows
        if all(fact in row.facts and value in (..., row.facts[fact]) for fact, value in facts.items())
    ]


def by(rows: Iterable[Row], *facts: str) -> list[tuple[Any, list[Row]]]:
    """Return the rows in groups of one value of a fact, or of several, in the order in which they come."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row.facts[fact] for fact in facts)
        groups.setdefault(key if len(facts) > 1 else key[0], []).append(row)
    return list(groups.items())


def coloured(items: Iterable[Any], colours: Sequence[str] = COLOURS) -> Iterable[tuple[Any, str]]:
    """Return each item with a colour of its own."""
    return zip(items, colours, strict=False)


def layers_word(count: int) -> str:
    """Return the number with its noun."""
    return f"{count} layer{'s' if count > 1 else ''}"


# -- The paper's experiments -----------------------------------------------------------------------


@_figure()
def _locality(drawn: Drawing, result: Result) -> None:
    touched, times, degrees = (result.series[key] for key in ("touched", "milliseconds", "degree"))
    for (degree, colour), symbol in zip(coloured(dict.fromkeys(degrees)), SYMBOLS, strict=False):
        points = [(x, y) for x, y, d in zip(touched, times, degrees, strict=True) if d == degree and y > 0]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        drawn.dots(xs, ys, f"nodes that read {degree}", colour, symbol=symbol, size=8)
    slope, fixed = result.series["line"]
    ends = sorted(x for x in touched if slope * x + fixed > 0)
    heights = [slope * x + fixed for x in ends]
    drawn.line(ends, heights, "least squares: fixed + slope · x", GREY, dash="dot")
    drawn.x(
        "nodes looked at and edges followed, |V⁺| + |E⁺| + 1 + d(s)",
        log=True,
        ticks=[1, 10, 100, 1_000, 10_000, 100_000],
    )
    drawn.y("milliseconds of a wave", log=True, ticks=[0.01, 0.1, 1, 10, 100])


@_figure(*PROFILES)
def _e4(drawn: Drawing, result: Result) -> None:
    rows = where(result.rows, limit=...)
    for panel, profile in enumerate(PROFILES, start=1):
        here = where(rows, profile=profile)
        for (q, line), colour in coloured(by(here, "q")):
            depths, name = facts_of(line, "L"), f"q = {q:g}"
            drawn.line(depths, measured_of(line), name, colour, panel, marker={"size": 7})
            ends, limit = [depths[0], depths[-1]], [line[0].facts["limit"]] * 2
            hover = "limit %{y:.4f}<extra></extra>"
            drawn.line(ends, limit, name, colour, panel, dash="dot", hovertemplate=hover)
        printed = [row for row in here if row.paper is not None]
        drawn.printed(facts_of(printed, "L"), printed, panel)
    drawn.entry("limit", GREY)
    drawn.x("layers L", log=True, ticks=[20, 40, 80, 160, 320])
    drawn.y("ρ, full re-runs over cones", 1)


@_figure()
def _e5(drawn: Drawing, result: Result) -> None:
    paper, exact = where(result.rows, count="paper"), where(result.rows, count="exact")
    lines = by(paper, "profile", "q")
    for _, line in lines:
        name, hover = f"paper's count, {len(lines)} profiles", [row.name for row in line]
        drawn.line(facts_of(line, "L"), measured_of(line), name, BLUE, marker={}, hovertext=hover)
    printed = [line[-1] for _, line in by(paper, "L")]
    drawn.printed(facts_of(printed, "L"), printed)
    squares = {"symbol": "square", "size": 8}
    name = "exact, gradients as nodes"
    drawn.line(facts_of(exact, "L"), measured_of(exact), name, GREEN, marker=squares)
    drawn.at_height(1)
    drawn.x("layers L", log=True, ticks=[5, 10, 20, 40, 80, 160])
    drawn.y("ρ under backpropagation", rangemode="normal")


@_figure("cost of each graft, in the order made", "overcount Δ, and the batched total")
def _e7(drawn: Drawing, result: Result) -> None:
    steps = where(result.rows, step=...)
    orders = by(steps, "order")
    for (order, line), colour in coloured(orders):
        drawn.line(facts_of(line, "step"), measured_of(line), order, colour, marker={"size": 8})
    drawn.printed(facts_of(steps, "step"), steps)
    for kind, colour, name in (("overcount Δ", PINK, "overcount Δ"), ("batched", SKY, "batched total")):
        heights = measured_of(row for row in result.rows if row.name.endswith(f", {kind}"))
        drawn.bars([order for order, _ in orders], heights, name, colour, 2, digits="g")
    drawn.x("graft", 1, dtick=1)
    drawn.y("nodes recomputed", 1, zero=True)
    drawn.y("nodes", 2, zero=True)


@_figure("bookkeeping, median of each block", "patch and demand, by graph size")
def _drift(drawn: Drawing, result: Result) -> None:
    block, samples = result.series["block"], result.series["ceiling"]["samples"]
    for kind, colour, printed in (("graft", BLUE, 0.035), ("redefinition", ORANGE, 0.024)):
        medians = result.series[kind]
        at = [block * (number + 0.5) for number in range(len(medians))]
        drawn.dots(at, medians, f"{kind}, measured", colour, size=5)
        drawn.line([0, at[-1]], [printed] * 2, f"{kind}, paper (100 of them)", colour, dash="dot")
    for cone, colour in coloured(dict.fromkeys(cone for cone, *_ in samples), (SKY, GREEN, PINK, RED)):
        points = [(size, time) for of, size, time in samples if of == cone]
        sizes, times = [size for size, _ in points], [time for _, time in points]
        drawn.line(sizes, times, f"cone of {cone} nodes", colour, 2, marker={})
    drawn.x("mutations made before", 1)
    drawn.x("nodes in the graph", 2, log=True, ticks=list(dict.fromkeys(size for _, size, _ in samples)))
    drawn.y("milliseconds", 1, zero=True)
    drawn.y("milliseconds", 2, log=True, ticks=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])


@_figure("looks at the graph's nodes", "full runs over the sweep")
def _compiled(drawn: Drawing, result: Result) -> None:
    for panel, (kind, digits) in enumerate((("looks", ".0f"), ("ratio", ".2f")), start=1):
        for (layers, rows), colour in coloured(by(where(result.rows, **{kind: ...}), "layers")):
            name = layers_word(layers)
            drawn.bars(facts_of(rows, kind), measured_of(rows), name, colour, panel, digits=digits)
    drawn.x("done by", 1, tickangle=0)
    drawn.y("looks", 1, zero=True)
    drawn.x("counted in", 2)
    drawn.y("ratio", 2, zero=True)


@_figure("cones: every head and MLP", "sweep ratio: counts and clock")
def _e9(drawn: Drawing, result: Result) -> None:
    cones = [row for row in result.rows if row.detail]
    longest = max((value or 0 for value in measured_of(cones)), default=1)
    drawn.line([0, longest], [0, longest], "equal", GREY, dash="dot")
    symbols = ("circle-open", "square-open", "x-thin-open", "cross-thin-open")
    groups = by(cones, "family", "layers", "heads")
    for (((family, layers, heads), rows), colour), symbol in zip(coloured(groups), symbols, strict=False):
        name = f"{family}, {layers} × {heads}: {len(rows)} sites"
        xs, ys = predicted_of(rows), measured_of(rows)
        drawn.dots(xs, ys, name, colour, symbol=symbol, size=8, width=1.5)
    clocks = where(result.rows, ratios=...)
    sizes = [f"{row.facts['layers']} layers, {row.facts['heads']} heads" for row in clocks]
    ours = f"our clock ({clocks[0].facts['device']})" if clocks else "our clock"
    drawn.bars(sizes, predicted_of(clocks), "predicted", GREY, 2, digits=".3f")
    drawn.bars(sizes, papers_of(clocks), "paper's clock", RED, 2, digits=".3f")
    drawn.bars(sizes, measured_of(clocks), ours, BLUE, 2, digits=".3f")
    drawn.x("nodes by the closed form", 1)
    drawn.y("nodes recomputed", 1)
    drawn.y("ρ", 2, zero=True)


@_figure()
def _skips(drawn: Drawing, result: Result) -> None:
    bypassing = where(result.rows, kind="bypassing")
    for ratio, limit, formula, colour in (
        ("ρ", "forward", "2/(1−y)", BLUE),
        ("ρ_train", "training", "1/(1−y)", ORANGE),
    ):
        name = f"limit of {ratio}, {formula}"
        drawn.line(result.series["y"], result.series[limit], name, colour, dash="dot")
        for (span, points), symbol in zip(by(where(bypassing, ratio=ratio), "span"), SYMBOLS, strict=False):
            name, hover = f"{ratio}, span {span}", [row.name for row in points]
            xs, ys = facts_of(points, "y"), measured_of(points)
            drawn.dots(xs, ys, name, colour, symbol=symbol, hovertext=hover)
    drawn.x("y, the chance that two layers are parallel", range=[-0.02, 0.9])
    drawn.y("ratio, log scale", log=True, ticks=[1, 1.5, 2, 3, 4, 6, 8, 12, 16])


@_figure("loss", "nodes recomputed by a step", "captured language model")
def _growth(drawn: Drawing, result: Result) -> None:
    for key, name, colour in (("grown", "grown", BLUE), ("plain", "not grown", ORANGE)):
        losses = result.series[key]
        drawn.line(list(range(1, len(losses) + 1)), losses, name, colour)
    steps = [row for row in result.rows if row.detail]
    at = facts_of(steps, "step")
    stairs = {"color": GREY, "shape": "hv"}
    drawn.line(at, predicted_of(steps), "predicted", GREY, 2)
    drawn.figure.data[-1].line = stairs
    drawn.dots(at, measured_of(steps), "measured", GREEN, 2, size=4)
    captured, swept = result.series["captured"], result.series["swept_at"]
    drawn.line(list(range(1, len(captured) + 1)), captured, "captured, loss", SKY, 3)
    drawn.dots([at + 0.5 for at in swept], result.series["effects"], "largest effect of a sweep", RED, 3)
    for panel, key in ((1, "grown_at"), (2, "grown_at"), (3, "captured_at")):
        for place in result.series[key]:
            drawn.at_place(place + 0.5, PINK, panel)
    drawn.entry("a graft", PINK)
    drawn.y("cross entropy", 3, zero=True)
    drawn.x("steps")
    drawn.y("mean squared error, log scale", 1, log=True)
    drawn.y("nodes", 2, zero=True)


@_figure("ratio of the sweep", "index of the layers")
def _index(drawn: Drawing, result: Result) -> None:
    rows = where(result.rows, index=...)
    ratios = [value for value in (*predicted_of(rows), *measured_of(rows)) if value]
    ends = [min(ratios, default=1), max(ratios, default=3)]
    drawn.line(ends, ends, "equal", GREY, dash="dot")
    for unit, colour, symbol in (
        ("nodes", BLUE, "circle"),
        ("FLOPs", ORANGE, "square"),
        ("time", GREEN, "diamond"),
    ):
        points = where(rows, weight=unit)
        names = facts_of(points, "network")
        xs, ys = predicted_of(points), measured_of(points)
        drawn.dots(xs, ys, unit, colour, symbol=symbol, size=8, hovertext=names)
        signs = [1 if row.facts["orientation"] == "output-heavy" else -1 for row in points]
        xs = [sign * row.facts["index"] for sign, row in zip(signs, points, strict=True)]
        drawn.dots(xs, names, unit, colour, 2, symbol=symbol, size=8)
    drawn.at_place(0, GREY, 2)
    drawn.x("ρ by the index, at the network's depth", 1)
    drawn.y("ρ of the sweep", 1)
    drawn.x("← input-heavy · q · output-heavy →", 2)
    drawn.y(None, 2, autorange="reversed", dtick=1, tickfont={"size": 9})


# -- Beyond the paper: edges, searches, positions, stacks of worlds, reverse passes ----------------

POWERS_OF_TWO = [1, 2, 4, 8, 16, 32, 64]


@_figure("full runs over the sweep of all edges", "share of the sweep that readers compute")
def _edges(drawn: Drawing, result: Result) -> None:
    for (name, ratios), colour in coloured(result.series["ratio"].items()):
        for panel, values in ((1, ratios), (2, result.series["shared"][name])):
            drawn.line(result.series["layers"], values, f"{name}, closed form", colour, panel)
        rows = where(result.rows, model=name)
        points = [row for row in rows if row.name.endswith("over the sweep")]
        drawn.dots(facts_of(points, "layers"), measured_of(points), f"{name}, ledger", colour)
        (limit,) = facts_of(where(rows, limit=...), "limit")
        drawn.at_height(limit, colour)
    drawn.x("layers", log=True, ticks=POWERS_OF_TWO)
    drawn.y("ratio, and its limit", 1, zero=True)
    drawn.y("share", 2, zero=True)


@_figure("gain over one by one, a launch of {launch} worlds' time", "worlds for each candidate")
def _greedy(drawn: Drawing, result: Result) -> None:
    widths = result.series["widths"]
    for (chance, gains), colour in coloured(result.series["gain"].items()):
        for panel, values in ((1, gains), (2, result.series["worlds"][chance])):
            drawn.line(widths, values, f"guesses right: {chance}", colour, panel)
        best, gain = result.series["best"][chance]
        drawn.dots([best], [gain], f"best width {best}", colour, symbol="star", size=12)
    drawn.x("candidates at once", log=True, ticks=POWERS_OF_TWO)
    drawn.y("gain", 1, zero=True)
    drawn.y("worlds, those in vain included", 2, log=True)


@_figure()
def _positions(drawn: Drawing, result: Result) -> None:
    ratios = [row for row in result.rows if row.name.endswith("the ratio")]
    for (case, values), colour in coloured(result.series["ratio"].items()):
        drawn.line(result.series["size"], values, f"{case}, closed form", colour)
        rows = where(ratios, case=case)
        points = [row for row in rows if row.facts["layers"] == row.facts["positions"]]
        drawn.dots(facts_of(points, "layers"), measured_of(points), f"{case}, ledger", colour)
    for limit in sorted(set(result.series["limit"].values())):
        drawn.at_height(limit)
    drawn.x("layers, and as many positions", log=True, ticks=[1, 4, 16, 64])
    drawn.y("ratio in node-rows, log scale", log=True, ticks=[1, 2, 3, 4, 6, 8, 12, 16])


@_figure("launches, and the two bounds", "values held", "milliseconds, and as predicted")
def _wavefront(drawn: Drawing, result: Result) -> None:
    for (depth, rows), colour in coloured(by(where(result.rows, width=...), "layers")):
        widths, name = facts_of(rows, "width"), layers_word(depth)
        drawn.dots(widths, measured_of(rows), name, colour)
        for bound in ("least", "most"):
            drawn.line(widths, facts_of(rows, bound), f"{name}, at {bound}", colour, dash="dot")
    for (how, rows), colour in coloured(by(where(result.rows, branches=...), "order"), COLOURS[2:]):
        drawn.bars(list(map(str, facts_of(rows, "branches"))), measured_of(rows), how, colour, 2)
    for (depth, rows), colour in coloured(sorted(by(where(result.rows, timed=...), "timed"))):
        widths, name = facts_of(rows, "at_once"), f"{layers_word(depth)}, measured"
        drawn.dots(widths, measured_of(rows), name, colour, 3, symbol="square", size=8)
        drawn.line(widths, predicted_of(rows), "launches · c + work / rate", colour, 3)
    drawn.x("worlds at once", 1, log=True)
    drawn.y("launches", 1, log=True)
    drawn.x("branches", 2, type="category")
    drawn.y("sizes of values together", 2, zero=True)
    drawn.x("worlds at once", 3, log=True)
    drawn.y("milliseconds", 3, log=True)


@_figure()
def _backward(drawn: Drawing, result: Result) -> None:
    names = result.series["network"]
    for key, name, colour in (
        ("forward", "forward pass, ρ", BLUE),
        ("joint", "both passes, exact", GREEN),
        ("paper", "the paper's count", ORANGE),
    ):
        drawn.bars(names, result.series[key], name, colour)
    dense = result.series["dense"]
    drawn.dots(names, dense, "if every gradient were stale", GREY, symbol="line-ew-open", size=26, width=2)
    drawn.at_height(1)
    drawn.figure.update_layout(barmode="group")
    drawn.x("network, and loss")
    drawn.y("full passes over the sweep", zero=True)
