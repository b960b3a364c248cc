"""Curves of faithfulness by size, as the Mechanistic Interpretability Benchmark has them (arXiv 2504.13151).

f(C) = (m(C) − m(∅)) / (m(N) − m(∅)) of the circuits of the best edges, nodes or neurons, at shares of all of
them. m is the mean over prompts, f is not clipped. CPR is the area under f, CMD that of |1 − f|: trapezoids
over the nominal shares, with no point at 0, so that f = 1 everywhere has the areas 0.999 and 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.circuits.circuit_data import is_number, pruned
from conewise.circuits.evaluation import ends_of, ratio
from conewise.circuits.forwards import Asked
from conewise.circuits.masked_forward import Numbers
from conewise.errors import CircuitError
from conewise.extras import needs
from conewise.files import as_path
from conewise.runs.metrics import Metric
from conewise.templates import heading, table

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The sizes of the benchmark, as shares of all edges, nodes or neurons."""

SELECTIONS = ("signed", "absolute")
LEVELS = ("edge", "node", "neuron")
LOSSES = ("kl", "kl_to", "cross_entropy")
"""Metrics that are the better the smaller they are."""

RESAMPLES, LEVEL = 2000, 0.95
"""The number of draws of prompts for intervals, and the share of the time that these hold."""

Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Selected:
    """The circuits of one selection: how many edges each keeps after pruning, and its metric by prompt."""

    edges: tuple[int, ...]
    values: Numbers


@dataclass(frozen=True, eq=False, repr=False)
class FaithfulnessCurve:
    """Faithfulness of growing circuits, and the areas of it.

    `shares` are the nominal sizes, `counts` how many edges, nodes or neurons (`level`) were chosen for each;
    `selections` has what "signed" selection found (helpful ones first) and what "absolute" did (large ones
    first). `full` and `ablated` are the metric of each prompt with all edges, and with none.
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
        """F at each size; of signed selection where there are both."""
        found = self._of(select or next(iter(self.selections)))
        values: Numbers = np.array(
            [ratio(one, self._whole) for one in found.values.mean(1) - self.ablated.mean()]
        )
        return values

    @property
    def cpr(self) -> float:
        """The area under f (circuit performance ratio), of signed selection where there are both."""
        return float(self._area(self.faithfulness(self._own("signed"))))

    @property
    def cmd(self) -> float:
        """The area of |1 − f| (circuit–model distance), of absolute selection where there are both."""
        return float(self._area(np.abs(1 - self.faithfulness(self._own("absolute")))))

    @property
    def cpr_interval(self) -> tuple[float, float]:
        """The 95 % interval of `cpr` over prompts: they are drawn anew many times."""
        return self._interval(self._area(self._resampled(self._own("signed"))))

    @property
    def cmd_interval(self) -> tuple[float, float]:
        """The 95 % interval of `cmd` over prompts."""
        return self._interval(self._area(np.abs(1 - self._resampled(self._own("absolute")))))

    def intervals(self, select: str | None = None) -> Numbers:
        """[size, (low, high)]: the 95 % interval of f at each size, over prompts."""
        drawn = self._resampled(select or next(iter(self.selections)))
        found: Numbers = np.stack([np.array(self._interval(column)) for column in drawn.T])
        return found

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each selection and size."""
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
        """A Plotly figure: faithfulness by size, with intervals over prompts."""
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
        """Write the figure and the table as a page, one file that opens without a network; its path."""
        from conewise.report.document import write_document  # noqa: PLC0415  # needs plotly

        frame = self.to_dataframe()
        cells = (
            [f"{one:.4g}" if isinstance(one, float) else str(one) for one in row] for row in frame.to_numpy()
        )
        below = table(cells, list(frame.columns), numbers=range(1, len(frame.columns)))
        page = self.plot().to_html(include_plotlyjs=True, full_html=True)
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
        return heading("Faithfulness", str(self).splitlines()[0])

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


def sizes_of(shares: Sequence[float] | None, items: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Nominal shares, and how many items each is: all are counts where one is above 1.

    Raises CircuitError.
    """
    given = list(SHARES if shares is None else shares)
    for one in given:
        if not is_number(one) or not 0 < one <= max(items, 1):
            raise CircuitError(
                f"{one!r} in `sizes` is no size: a share between 0 and 1, or a count up to {items:,}."
            )
    if len(given) < 2 or sorted(given) != given:
        raise CircuitError("`sizes` are two or more, from the smallest to the largest.")
    if given[-1] <= 1:
        return tuple(map(float, given)), tuple(int(one * items) for one in given)
    for one in given:
        if one != int(one):
            raise CircuitError(
                f"{one!r} in `sizes` is no count, and {given[-1]!r} is one: give shares, or counts."
            )
    return tuple(float(one / items) for one in given), tuple(map(int, given))


def ranked(scores: Scores, select: str) -> Scores:
    """Return keys of which the largest is taken first; `scores` are positive where something helps."""
    if select not in SELECTIONS:
        raise CircuitError(f"select={select!r} is none of {', '.join(map(repr, SELECTIONS))}.")
    return np.abs(scores) if select == "absolute" else scores


def best(keys: Scores, count: int) -> NDArray[np.int64]:
    """The numbers of the `count` largest, equal ones in order; those that are NaN are none."""
    flat = keys.ravel()
    known = np.flatnonzero(~np.isnan(flat))
    found: NDArray[np.int64] = known[np.argsort(-flat[known], kind="stable")][:count]
    return found


def greedy_edges(graph: EdgeGraph, keys: Scores, count: int) -> NDArray[np.int64]:
    """The largest edges by growing from the logits: always the largest into what is there by then.

    It is the benchmark's greedy selection: an edge may come in whose writer never gets an edge of its own,
    and is pruned then.
    """
    queue: list[tuple[float, int]] = []
    opened, found = set[int](), list[int]()

    def open_reader(reader: int) -> None:
        if reader not in opened:
            opened.add(reader)
            for edge in range(int(graph.starts[reader]), int(graph.starts[reader + 1])):
                if not np.isnan(keys[edge]):
                    heapq.heappush(queue, (-float(keys[edge]), edge))

    for number, reader in enumerate(graph.readers):
        if reader.slot == "logits":
            open_reader(number)
    while queue and len(found) < count:
        _, edge = heapq.heappop(queue)
        found.append(edge)
        for feeding in graph.feeding[int(graph.edge_writers[edge])]:
            open_reader(feeding)
    return np.asarray(found, dtype=np.int64)


def edges_of_nodes(graph: EdgeGraph, kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The edges out of the writers that are kept, without dead ends."""
    return pruned(graph, np.flatnonzero(kept[graph.edge_writers]))


# -- the curve -----------------------------------------------------------------------------------------


def curve_of(
    given: Asked,
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
