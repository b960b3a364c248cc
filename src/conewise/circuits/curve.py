"""Curves of faithfulness by size, as the Mechanistic Interpretability Benchmark has them (arXiv 2504.13151).

f(C) = (m(C) − m(∅)) / (m(N) − m(∅)) of the circuits of the best edges, nodes or neurons, at shares of all of
them. m is the mean over prompts, f is not clipped. CPR is the area under f, CMD that of |1 − f|: trapezoids
over the nominal shares, with no point at 0, so that f = 1 everywhere has the areas 0.999 and 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.anatomy.places import EdgePlace, Place
from conewise.anatomy.selectors import Cell
from conewise.circuits.circuit_data import (
    SELECTIONS,
    Scores,
    best,
    edges_of_nodes,
    greedy_edges,
    pruned,
    ranked,
    sizes_of,
)
from conewise.circuits.evaluation import ends_of, ratio
from conewise.circuits.masked_forward import Numbers
from conewise.circuits.question import CircuitQuestion, circuit_question
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import CircuitError, SweepError
from conewise.extras import needs
from conewise.files import as_path
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric
from conewise.templates import beside, heading, line_chart, shown, table
from conewise.threads import one_thread

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

LOSSES = ("kl", "kl_to", "cross_entropy")
"""Metrics that are the better the smaller they are."""

RESAMPLES, LEVEL = 2000, 0.95
"""The number of draws of prompts for intervals, and the share of the time that these hold."""


@dataclass(frozen=True, slots=True)
class Selected:
    """The circuits of one selection: how many edges each keeps after pruning, and its metric by prompt."""

    edges: tuple[int, ...]
    values: Numbers


@dataclass(frozen=True, eq=False, repr=False)
class FaithfulnessCurve:
    """Faithfulness of circuits of growing size, and the areas under the curve.

    `shares` are the nominal sizes, and `counts` the number of edges, nodes or neurons (`level`) selected for
    each. `selections` holds the results of "signed" selection (most helpful first) and of "absolute"
    selection (largest first). `full` and `ablated` are the metric of each prompt with all edges, and with
    none.
    """

    metric: str
    source: str
    level: str
    greedy: bool
    shares: tuple[float, ...]
    counts: tuple[int, ...]
    selections: Mapping[str, Selected]
    full: Numbers
    ablated: Numbers
    method: str = ""
    _drawn: dict[str, Numbers] = field(default_factory=dict)

    def faithfulness(self, select: str | None = None) -> Numbers:
        """The faithfulness f at each size, for signed selection if both were computed."""
        found = self._of(select or next(iter(self.selections)))
        values: Numbers = np.array(
            [ratio(one, self._whole) for one in found.values.mean(1) - self.ablated.mean()]
        )
        return values

    @property
    def cpr(self) -> float:
        """The area under f (circuit performance ratio), for signed selection if both were computed."""
        return float(self._area(self.faithfulness(self._own("signed"))))

    @property
    def cmd(self) -> float:
        """The area under |1 − f| (circuit–model distance), for absolute selection if both were computed."""
        return float(self._area(np.abs(1 - self.faithfulness(self._own("absolute")))))

    @property
    def cpr_interval(self) -> tuple[float, float]:
        """The bootstrap 95 % interval of `cpr` over prompts."""
        return self._interval(self._area(self._resampled(self._own("signed"))))

    @property
    def cmd_interval(self) -> tuple[float, float]:
        """The bootstrap 95 % interval of `cmd` over prompts."""
        return self._interval(self._area(np.abs(1 - self._resampled(self._own("absolute")))))

    def intervals(self, select: str | None = None) -> Numbers:
        """[size, (low, high)]: the 95 % interval of f at each size, over prompts."""
        drawn = self._resampled(select or next(iter(self.selections)))
        found: Numbers = np.stack([np.array(self._interval(column)) for column in drawn.T])
        return found

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each selection and size."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        rows = []
        for select, found in self.selections.items():
            each = zip(
                self.shares,
                self.counts,
                found.edges,
                self.faithfulness(select),
                self.intervals(select),
                strict=True,
            )
            for share, count, edges, faithfulness, (low, high) in each:
                rows.append([select, share, count, edges, faithfulness, low, high])
        columns = ["select", "share", f"{self.level}s", "edges", "faithfulness", "low", "high"]
        if self.level == "edge":
            columns[2] = "chosen"
        return pd.DataFrame(rows, columns=columns)

    def plot(self) -> Figure:
        """Draw faithfulness by size, with intervals over prompts, as a Plotly figure."""
        with needs("plots"):
            import plotly.graph_objects as go  # noqa: PLC0415

        drawn, colours = go.Figure(), ("#2166ac", "#b2182b")
        for (select, _), colour in zip(self.selections.items(), colours, strict=False):
            found, bounds = self.faithfulness(select), self.intervals(select)
            drawn.add_scatter(
                x=list(self.shares),
                y=found.tolist(),
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": (bounds[:, 1] - found).tolist(),
                    "arrayminus": (found - bounds[:, 0]).tolist(),
                },
                mode="lines+markers",
                name=f"{select} selection",
                line={"color": colour},
            )
        drawn.add_hline(y=1, line={"dash": "dot", "color": "#6b7280"})
        drawn.update_xaxes(type="log", title_text=f"share of the {self.level}s", tickformat=",.1%")
        drawn.update_yaxes(title_text="faithfulness")
        drawn.update_layout(title=str(self).splitlines()[0], plot_bgcolor="rgba(0,0,0,0)")
        return drawn

    def report(self, path: str | Path) -> Path:
        """Write the figure and the table as a page, one file that opens offline, and return its path."""
        from conewise.report.document import write_document  # noqa: PLC0415  # needs plotly

        frame = self.to_dataframe()
        cells = (
            [f"{one:.4g}" if isinstance(one, float) else str(one) for one in row] for row in frame.to_numpy()
        )
        below = table(cells, list(frame.columns), numbers=range(1, len(frame.columns)))
        page = self.plot().to_html(include_plotlyjs=True, full_html=True, default_height="34rem")
        return write_document(as_path(path), page.replace("</body>", str(below) + "</body>"), CircuitError)

    def __repr__(self) -> str:
        how = f" by {self.method}" if self.method else ""
        return (
            f"FaithfulnessCurve of {len(self.shares)} sizes in {self.level}s{how} on {self.metric}: "
            f"CPR {self.cpr:.3f}, CMD {self.cmd:.3f}"
        )

    def __str__(self) -> str:
        (low, high), (least, most) = self.cpr_interval, self.cmd_interval
        areas = f"CPR {self.cpr:.3f} [{low:.3f}, {high:.3f}], CMD {self.cmd:.3f} [{least:.3f}, {most:.3f}]"
        over = f"{self.metric} over {len(self.full)} prompts"
        lines = [f"{areas} of {over}; removed edges: {self.source}"]
        for select, found in self.selections.items():
            lines.append(f"  {select}:")
            for share, edges, one in zip(self.shares, found.edges, self.faithfulness(select), strict=True):
                lines.append(f"    {share:6.1%} {edges:9,} edges  f {one:+.3f}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        selected = [
            beside(
                *(
                    line_chart(
                        list(
                            zip(map(math.log10, self.shares), self.faithfulness(select).tolist(), strict=True)
                        ),
                        f"log10 of the share of {self.level}s, {select} selection",
                        "faithfulness",
                        1.0,
                    )
                    for select in self.selections
                )
            )
        ]
        return shown(heading("Faithfulness", str(self).splitlines()[0]), *selected)

    @property
    def _whole(self) -> float:
        return float(self.full.mean() - self.ablated.mean())

    def _own(self, select: str) -> str:
        """A selection, or the one that there is."""
        return select if select in self.selections else next(iter(self.selections))

    def _of(self, select: str) -> Selected:
        if select not in self.selections:
            raise CircuitError(f"no selection {select!r} in this curve; it has {', '.join(self.selections)}.")
        return self.selections[select]

    def _area(self, heights: Numbers) -> Numbers:
        """The trapezoid of the last axis over the shares."""
        widths = np.diff(np.asarray(self.shares))
        found: Numbers = ((heights[..., 1:] + heights[..., :-1]) / 2 * widths).sum(-1)
        return found

    def _resampled(self, select: str) -> Numbers:
        """[draw, size]: f over prompts that are drawn anew, always the same way."""
        if select not in self._drawn:
            prompts = len(self.full)
            rows = np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))
            weights = np.zeros((RESAMPLES, prompts))
            np.add.at(weights, (np.arange(RESAMPLES)[:, None], rows), 1 / prompts)
            none = weights @ self.ablated
            whole = weights @ self.full - none
            parts = weights @ self._of(select).values.T - none[:, None]
            whole[whole == 0] = np.nan
            self._drawn[select] = parts / whole[:, None]
        return self._drawn[select]

    def _interval(self, values: Numbers) -> tuple[float, float]:
        known = values[~np.isnan(values)]
        if not known.size:
            return float("nan"), float("nan")
        low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)


# -- which edges a size keeps --------------------------------------------------------------------------


def helpful_sign(metric: str | Metric, *, is_removal: bool = True) -> float:
    """The sign of the effect of an edge that helps: removing it makes a metric smaller, and a loss larger."""
    name = metric if isinstance(metric, str) else (metric.described or (metric.name,))[0]
    return (-1.0 if is_removal else 1.0) * (-1.0 if name in LOSSES else 1.0)


# -- the curve -----------------------------------------------------------------------------------------


def curve_of(
    given: CircuitQuestion,
    scores: Scores,
    *,
    level: str = "edge",
    select: str | None = None,
    sizes: Sequence[float] | None = None,
    greedy: bool = False,
    method: str = "",
) -> FaithfulnessCurve:
    """The curve of the circuits that some scores choose; these are positive where something helps.

    `scores` are those of edges by number, of writers by number ("node") or of [writer, d_model] ("neuron").
    What is NaN was not scored: such edges are never chosen, such nodes and neurons always stay.
    """
    if greedy and level != "edge":
        raise CircuitError(
            "greedy=True grows a circuit from edge to edge, and these scores are of nodes or neurons."
        )
    shares, counts = sizes_of(sizes, int((~np.isnan(scores)).sum()))
    names = SELECTIONS if select is None else (select,)
    chosen = {
        name: [_chosen(given.graph, ranked(scores, name), count, level, greedy) for count in counts]
        for name in names
    }
    with given.forward() as forward:
        full, ablated = ends_of(given, forward)
        each = [(given.graph.all_but(edges), kept) for found in chosen.values() for edges, kept in found]
        if level == "neuron":
            whole = given.of_neurons(each)
        else:
            whole = forward.values(np.stack([removed for removed, _ in each]))
        values = {name: whole[at * len(counts) : (at + 1) * len(counts)] for at, name in enumerate(chosen)}
    selections = {
        name: Selected(tuple(len(edges) for edges, _ in found), values[name])
        for name, found in chosen.items()
    }
    return FaithfulnessCurve(
        given.metric.name, given.ablation, level, greedy, shares, counts, selections, full, ablated, method
    )


def _chosen(
    graph: EdgeGraph, keys: Scores, count: int, level: str, greedy: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The edges of a size, pruned, and which neurons of writers stay."""
    every = np.ones(0, dtype=bool)
    if level == "edge":
        chosen = greedy_edges(graph, keys, count) if greedy else best(keys, count)
        return pruned(graph, chosen), every
    kept: NDArray[np.bool_] = np.asarray(np.isnan(keys))
    kept.ravel()[best(keys, count)] = True
    if level == "node":
        return edges_of_nodes(graph, kept), every
    return edges_of_nodes(graph, np.asarray(kept.any(1))), kept


# -- scores by what they are of -----------------------------------------------------------------------------

NODES = {"z": "head", "result": "head", "mlp_out": "mlp", "resid_pre": "input", "embed": "input"}
"""The sites whose values are what a writer writes."""

FEATURE = "d_model"
"""The axis of the features of the residual stream."""


@one_thread
def curve_by_effects(
    model: Captured,
    cells: Sequence[Cell],
    effects: NDArray[np.float64],
    question: Mapping[str, Any],
    **how: Any,
) -> FaithfulnessCurve:
    """The curve of what some effects choose, which are positive where a cell helps; see `curve_of`.

    `question` says what circuits are evaluated on, as `circuit_question` takes it.
    """
    given = circuit_question(model, **question)
    level, scores = scores_of(model, cells, effects)
    return curve_of(given, scores, level=level, **how)


def scores_of(
    model: Captured, cells: Sequence[Cell], effects: NDArray[np.float64]
) -> tuple[str, NDArray[np.float64]]:
    """Return the level of cells and their scores by number: edges, writers, or [writer, feature]; NaN: none.

    Raises SweepError for a cell that is neither an edge, nor a component, nor a feature of what one writes.
    """
    graph = edge_facts(model).graph
    places = [cell.places[0] for cell in cells]
    if any(len(cell.places) != 1 for cell in cells):
        raise _no_item(next(cell.name for cell in cells if len(cell.places) != 1))
    edges = [place for place in places if isinstance(place, EdgePlace) and not (place.also or place.live)]
    if len(edges) == len(places):
        found = np.full(graph.count, np.nan)
        found[[graph.number(place.edge) for place in edges]] = effects
        return "edge", found
    if edges:
        raise SweepError("edges and sites are mixed here, and a curve is of one kind of them.")
    features = {FEATURE in place.part for place in places}
    if len(features) == 2:
        raise SweepError("whole components and their features are mixed here, and a curve is of one kind.")
    writers = [_writer(graph, place) for place in places]
    if features == {False}:
        found = np.full(len(graph.writers), np.nan)
        found[writers] = effects
        return "node", found
    if graph.width is None:
        raise SweepError(
            "how wide the residual stream is is not known here, so that neurons cannot be chosen."
        )
    found = np.full((len(graph.writers), graph.width), np.nan)
    for place, writer, effect in zip(places, writers, effects, strict=True):
        feature = place.part[FEATURE]
        if place.name == "z" or not isinstance(feature, int):
            raise _no_item(str(place))
        found[writer, feature] = effect
    return "neuron", found


def _writer(graph: EdgeGraph, place: Place) -> int:
    """The number of the writer whose value stands at a place."""
    part = {axis: index for axis, index in place.part.items() if axis != FEATURE}
    kind, head = NODES.get(place.name), part.pop("head", None)
    names = {"head": f"a{place.layer}.h{head}", "mlp": f"m{place.layer}", "input": "input"}
    is_whole = not part and (kind == "head") == isinstance(head, int)
    if kind is None or not is_whole or (kind == "input" and place.layer not in {None, 0}):
        raise _no_item(str(place))
    name = names[kind]
    if not graph.is_writer(name):
        raise _no_item(str(place))
    return graph.writer_number(name)


def _no_item(name: str) -> SweepError:
    return SweepError(
        f"{name} is neither an edge nor a component of the model, and circuits are made of these: take "
        "`model.edges()`, or sites such as 'z,mlp_out', or 'mlp_out[d=:]' for neurons."
    )
