"""Circuit: some edges of a model's graph of components, as a value.

It is made by a search (`model.find_circuit`), from scores, or from nodes; it can be drawn, compared, saved
and read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conewise.anatomy.components import Components
from conewise.anatomy.edge_graph import EdgeGraph
from conewise.arguments import Positive, PositiveNumber, checked
from conewise.circuits.circuit_data import (
    SELECTIONS,
    CircuitData,
    Decision,
    best,
    between,
    checked_log,
    checked_scores,
    chosen,
    expect_same_graph,
    levels,
    pruned,
    score_array,
    stops,
)
from conewise.circuits.circuit_files import from_json, read, to_json, write
from conewise.circuits.curve import FaithfulnessCurve, curve_of
from conewise.circuits.evaluation import Evaluation, evaluate
from conewise.circuits.learned import Training, in_batches, optimal_constants
from conewise.circuits.question import CircuitQuestion, OptimalAblation, circuit_question
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import CircuitError, describe
from conewise.files import as_path
from conewise.jobs.pool import Pool
from conewise.report.circuit import (
    Curve,
    CurvePoint,
    DrawnCircuit,
    colours_in_words,
    dot,
    drawing,
    figure,
    write_circuit_page,
)
from conewise.runs.captured import Captured
from conewise.templates import folded, heading, note, shown, table
from conewise.threads import Turn, one_thread

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from conewise.report.story import Story


@dataclass(frozen=True, slots=True)
class Comparison:
    """The edges that both circuits have, and those that only one of them has, each in graph order."""

    both: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def jaccard(self) -> float:
        """The edges in both circuits over the edges in either: 1 if equal, 0 if disjoint."""
        either = len(self.both) + len(self.only_first) + len(self.only_second)
        return len(self.both) / either if either else 1.0

    @property
    def overlap(self) -> float:
        """The number of shared edges over the size of the smaller circuit: 1 if one contains the other."""
        smaller = len(self.both) + min(len(self.only_first), len(self.only_second))
        return len(self.both) / smaller if smaller else 1.0

    def __repr__(self) -> str:
        return (
            f"Comparison: {len(self.both):,} edges in both, {len(self.only_first):,} only in the first, "
            f"{len(self.only_second):,} only in the second (Jaccard {self.jaccard:.3f}, "
            f"overlap {self.overlap:.3f})"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("both", f"{len(self.both):,}"),
            ("only in the first", f"{len(self.only_first):,}"),
            ("only in the second", f"{len(self.only_second):,}"),
            ("Jaccard", f"{self.jaccard:.3f}"),
            ("overlap", f"{self.overlap:.3f}"),
        ]
        return heading("Comparison", "of two circuits' edges") + table(rows)


Points = tuple[CurvePoint, ...]

POINTS, MORE, FEW = 24, 4, 60
"""The thresholds of a curve, its edges as a multiple of the circuit's, and their least number."""

MOST = 1_000_000
"""More edges, or points of a curve, than that there are not."""

SHOWN = 10
"""The number of edges that a notebook shows."""


@checked
@dataclass(frozen=True, repr=False)
class Circuit(CircuitData):
    """A subset of the edges of a model's graph of components.

    Edges are in the graph's order: readers first to last, and for each reader its writers. `of` is the
    model's name, `graph` the graph, `edges` the names of the circuit's edges. `scores` holds the scores of
    all edges that were scored. `method` and `threshold` describe how the circuit was found, and `log` lists
    the decisions in order. A circuit holds the model that it was made with; a circuit that was read from a
    file holds none until `bind` assigns one.
    """

    model: Captured | None = field(default=None, compare=False)

    # -- making ----------------------------------------------------------------------------------------

    @classmethod
    def made(
        cls,
        graph: Components | EdgeGraph | Captured,
        edges: Iterable[str],
        *,
        of: str = "",
        method: str | None = None,
        threshold: float | None = None,
        scores: Mapping[str, float] | None = None,
        log: Iterable[Decision] = (),
        helps: float = -1.0,
        model: Captured | None = None,
    ) -> Circuit:
        """Create a circuit from edges of a model or a graph, given by their names in any order.

        Raises CircuitError for an unknown edge, and for a `log` that does not hold decisions about edges.
        """
        own, of, model = _home(graph, of, model)
        names = own.names(own.numbers(edges))
        known = None if scores is None else checked_scores(own, scores)
        return cls(of, own, names, method, threshold, known, checked_log(own, log), helps, model)

    @classmethod
    def from_scores(
        cls,
        graph: Components | EdgeGraph | Captured,
        scores: Mapping[str, float],
        *,
        top: int | None = None,
        threshold: float | None = None,
        connected: bool = True,
        select: str = "absolute",
        helps: float = -1.0,
        of: str = "",
        model: Captured | None = None,
    ) -> Circuit:
        """Create a circuit of the edges with the largest scores: at most `top`, or all from `threshold` on.

        With select="absolute", edges are ranked by the absolute value of their scores; with "signed", by how
        helpful they are: `helps` is the sign of a helpful edge's score, −1 if scores are effects of removal.

        With `connected`, only edges on a path from the input to the logits are kept: with `threshold`, other
        edges are dropped; with `top`, the circuit is grown from the logits, the largest score first. Without
        it, edges are selected by their scores alone.
        """
        own, of, model = _home(graph, of, model)
        known = checked_scores(own, scores)
        if select not in SELECTIONS:
            raise CircuitError(f"{select=} is none of {', '.join(map(repr, SELECTIONS))}.")
        signed = helps if select == "signed" else None
        numbers = chosen(
            own, score_array(own, known), top=top, threshold=threshold, connected=connected, signed=signed
        )
        way = f"top {top}" if top is not None else "scores"
        way = f"{way}, signed" if select == "signed" else way
        method = f"{way}, connected" if connected else way
        return cls(of, own, own.names(numbers), method, threshold, known, (), helps, model)

    @classmethod
    def from_nodes(
        cls,
        graph: Components | EdgeGraph | Captured,
        nodes: Iterable[str],
        *,
        of: str = "",
        model: Captured | None = None,
    ) -> Circuit:
        """Create a circuit of all edges between these components, the input and the logits.

        Components are named as in edges: "a0.h1", "m3".
        """
        own, of, model = _home(graph, of, model)
        return cls(of, own, own.names(between(own, nodes)), "nodes", model=model)

    def select(
        self,
        *,
        top: int | None = None,
        threshold: float | None = None,
        connected: bool = True,
        select: str = "absolute",
    ) -> Circuit:
        """Return another circuit selected by the scores of this one; see `from_scores`."""
        return self.from_scores(
            self.graph,
            self._scored("select"),
            top=top,
            threshold=threshold,
            connected=connected,
            select=select,
            helps=self.helps,
            of=self.of,
            model=self.model,
        )

    def prune(self) -> Circuit:
        """Return the circuit without dead ends: only edges on a path from the input to the logits."""
        return replace(self, edges=self.graph.names(pruned(self.graph, self.numbers)))

    # -- asking ----------------------------------------------------------------------------------------

    @property
    def complement(self) -> tuple[str, ...]:
        """Return the edges of the graph that are not in the circuit."""
        return tuple(edge for edge in self.graph.edges if edge not in self)

    def compare(self, other: Circuit) -> Comparison:
        """Compare the edges with another circuit's. Raises CircuitError if their graphs differ."""
        expect_same_graph(self.graph, other.graph, "the two circuits cannot be compared")
        first, second = set(self.numbers.tolist()), set(other.numbers.tolist())
        names = self.graph.names
        return Comparison(names(first & second), names(first - second), names(second - first))

    def bind(self, model: Captured) -> Circuit:
        """Return this circuit bound to a model. Raises CircuitError if the components differ."""
        graph = edge_facts(model).graph
        expect_same_graph(self.graph, graph, f"the circuit does not fit {model.name}")
        return replace(self, graph=graph, of=self.of or model.name, model=model)

    @property
    def _turn(self) -> Turn | None:
        return None if self.model is None else self.model._turn

    @one_thread
    def evaluate(
        self,
        prompts: Any = None,
        *,
        base: Any = None,
        source: Any = None,
        metric: Any = None,
        only: str | None = None,
        minimality: bool = True,
        max_memory: int | str | None = None,
        workers: int | str | Pool | None = None,
    ) -> Evaluation:
        """Evaluate how well the circuit alone, with all other edges ablated, reproduces the model.

        Give `prompts`, pairs of any lengths, whose clean prompts are the base; or `base` and `source`, runs
        of one shape. With only="faithfulness", nothing else is computed. `source` selects the values that
        ablated edges carry: their values in a run, in inputs or in texts; "zero"; "mean", their mean over the
        base; "mean-positional", their mean at each position; "mean-template", the same for each template's
        prompts; `cw.mean(...)`, a mean over another batch; or an `optimal_ablation`. With `minimality`, each
        edge of the circuit is also removed in turn. A circuit that was read from a file has to be bound to
        its model first: `circuit.bind(model)`.
        """
        given = self._question("evaluate", prompts, base, source, metric, max_memory)
        return evaluate(given, [self.edges], only=only, minimality=minimality, workers=workers)[0]

    @one_thread
    def optimal_ablation(
        self,
        prompts: Any = None,
        *,
        base: Any = None,
        metric: Any = None,
        steps: Positive = 100,
        lr: PositiveNumber = 0.01,
        batch_size: Positive | None = None,
    ) -> OptimalAblation:
        """Learn the values that removed edges carry (optimal ablation): one vector for each writer.

        Use the result as a `source`: `circuit.evaluate(prompts, source=circuit.optimal_ablation(prompts))`
        (Li & Janson 2024). Vectors start at the means over prompts and positions and are trained for `steps`
        steps of Adam with learning rate `lr`. If the metric is a loss ("kl", the default), it is minimised;
        otherwise its squared difference from the model's value is minimised. See `Model.find_circuit` for
        `batch_size`.
        """
        metric = "kl" if metric is None and prompts is not None else metric
        batches = in_batches(self._own_model("optimal_ablation"), prompts, batch_size)
        given = self._question("optimal_ablation", batches, base, "mean", metric)
        return optimal_constants(given, self.numbers, Training(steps, lr, in_turn=batch_size is not None))

    @one_thread
    def faithfulness_curve(
        self,
        prompts: Any = None,
        *,
        base: Any = None,
        source: Any = None,
        metric: Any = None,
        sizes: Sequence[float] | None = None,
        select: str | None = None,
        greedy: bool = False,
        max_memory: int | str | None = None,
    ) -> FaithfulnessCurve:
        """Compute the benchmark's curve over circuits selected by these scores: areas, a table and a figure.

        Circuits contain the best edges of these `sizes` (shares of the edges, by default those of the
        benchmark, or counts). They are ranked by signed and by absolute score, or only as `select` requests,
        "signed" or "absolute"; edges that are on no path are dropped. With `greedy`, circuits grow from the
        logits. See `evaluate` for the other arguments.
        """
        self._scored("faithfulness_curve")
        given = self._question("faithfulness_curve", prompts, base, source, metric, max_memory)
        scores = self.helps * self.score_array()
        return curve_of(given, scores, select=select, sizes=sizes, greedy=greedy, method=self.method or "")

    @one_thread
    def curve(
        self,
        *,
        base: Any,
        source: Any = None,
        metric: Any,
        n: int = POINTS,
        top: int | None = None,
        max_memory: int | str | None = None,
        workers: int | str | Pool | None = None,
    ) -> Curve:
        """Evaluate circuits of decreasing thresholds and this one, for the slider of `report`.

        A circuit of a threshold has the edges of at least that score that lie on a path of such edges, as
        `select` finds them. At most `n` circuits are evaluated, each of at most `top` edges, by default four
        times as many as this one has. See `evaluate` for the other arguments.
        """
        self._scored("curve")
        for name, given in (("n", n), ("top", top)):
            if given is not None and not 1 <= given <= MOST:
                raise CircuitError(f"{name}={given!r} is no count: it is a whole number, 1 or more.")
        level = levels(self.graph, self.score_array())
        found = self._points(level, n, top)
        circuits = [self.graph.names(np.flatnonzero(level >= point.threshold)) for point in found]
        question = self._question("curve", None, base, source, metric, max_memory)
        own, *faithful = [
            one.faithfulness
            for one in evaluate(question, [self.edges, *circuits], only="faithfulness", workers=workers)
        ]
        measured = (replace(point, faithfulness=one) for point, one in zip(found, faithful, strict=True))
        return Curve(tuple(measured), question.metric.name, own)

    def _question(
        self, what: str, prompts: Any, base: Any, source: Any, metric: Any, max_memory: Any = None
    ) -> CircuitQuestion:
        """What the circuit is asked about by the method `what`."""
        given = {"prompts": prompts, "base": base, "source": source, "metric": metric}
        return circuit_question(self._own_model(what), **given, max_memory=max_memory)

    def _own_model(self, what: str) -> Captured:
        if self.model is None:
            raise CircuitError(
                f"this circuit holds no model to run it in: `circuit.bind(model).{what}(...)`."
            )
        return self.model

    def _scored(self, what: str) -> Mapping[str, float]:
        if not self.scores:
            raise CircuitError(f"this circuit has no scores, which `{what}` goes by.")
        return self.scores

    # -- drawing ---------------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """Draw components by layer, and edges by the sign and size of their scores, with Plotly."""
        return figure(self.of, self.graph, self.edges, self.scores)

    def to_dot(self) -> str:
        """Return the circuit in Graphviz's language; `dot -Tsvg` draws it."""
        return dot(self.of, self.graph, self.edges, self.scores)

    def report(
        self,
        path: str | Path,
        *,
        curve: Curve | None = None,
        evaluation: Evaluation | None = None,
        story: Story | None = None,
    ) -> Path:
        """Write the circuit as an HTML page, one file that opens offline, and return its path.

        The page draws the circuit in layers, with a slider for the threshold, which also shows faithfulness
        if a `curve` is given. `evaluation` is the return value of `evaluate`; `story` describes the question.
        Raises CircuitError if the file cannot be written.
        """
        level = levels(self.graph, self.score_array())
        drawn = DrawnCircuit(
            of=self.of,
            graph=self.graph,
            edges=self.edges,
            nodes=len(self.nodes),
            method=self.method,
            threshold=self.threshold,
            scores=self.scores,
            levels={self.graph.edges[at]: float(level[at]) for at in np.flatnonzero(level >= 0)},
            curve=Curve(self._points(level)) if curve is None else curve,
            measured=() if evaluation is None else _measured(evaluation),
            notes=() if evaluation is None else _notes(evaluation),
            finding="" if evaluation is None else evaluation.finding,
            certainty="" if evaluation is None else evaluation.certainty,
            story=story,
        )
        return write_circuit_page(as_path(path), drawn)

    def _points(self, level: np.ndarray, points: int = POINTS, most: int | None = None) -> Points:
        """Thresholds to choose by, of which nothing is measured."""
        limit = max(MORE * len(self.edges), FEW) if most is None else most
        return tuple(CurvePoint(threshold, edges) for threshold, edges in stops(level, points, limit))

    # -- files -----------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, format: str = "conewise") -> Path:  # noqa: A002 - as people say it
        """Save the circuit as JSON, completely or not at all, and return the path.

        `load` and `cw.open` read it. A path that ends in ".json" names the file; any other path names a
        folder, in which the file is `circuit.json`.

        The format "eap" is the JSON that EAP-IG's tools and the benchmark read. "eap-pt" is their format of
        tensors, in a file whose name ends in ".pt". Both list every edge with its score, positive if the edge
        helps, and its membership in the circuit.
        """
        write(as_path(path), self, format)
        return as_path(path)

    def equals(self, other: object) -> bool:
        """Return True if both are circuits with the same edges, scores and decisions."""
        return isinstance(other, Circuit) and to_json(self) == to_json(other)

    @classmethod
    def load(cls, path: str | Path, model: Captured | None = None) -> Circuit:
        """Load the circuit of a file that `save` wrote, or of a graph of EAP-IG's tools.

        With a model, the circuit is bound to it, and can be evaluated. Raises CircuitError if the file holds
        no circuit, or the circuit of a model with other components.
        """
        graph = None if model is None else edge_facts(model).graph
        made = _made(read(as_path(path), graph))
        return made if model is None else made.bind(model)

    def __reduce__(self) -> tuple[Callable[[str], Circuit], tuple[str]]:
        # As a file: pickled, it leaves its model behind.
        return _from_text, (to_json(self),)

    def __copy__(self) -> Circuit:
        return self  # nothing of it changes

    def __deepcopy__(self, _: dict[int, Any]) -> Circuit:
        return self

    # -- reading ---------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        how = "" if self.method is None else f" by {self.method}"
        at = "" if self.threshold is None else f" (threshold {self.threshold:g})"
        return (
            f"Circuit of {self.of or 'a model'}: {len(self.edges):,} of {self.graph.count:,} edges, "
            f"{len(self.nodes):,} nodes{how}{at}"
        )

    def _repr_html_(self) -> str:
        title = heading("Circuit", repr(self).removeprefix("Circuit "))
        if not self.edges:
            return title
        picture = drawing(self.graph, self.edges, self.scores)
        listed = folded("The edges", self._edges_html())
        return shown(title, picture, note(colours_in_words(self.scores)), listed)

    def _edges_html(self) -> str:
        if self.scores is None:
            return table([[edge] for edge in self.edges[:SHOWN]], ["edge"]) + self._more()
        scores = self.scores
        order = best(np.abs(score_array(self.graph, {e: scores[e] for e in self.edges if e in scores})))
        rows = [[name, f"{scores[name]:+.4g}"] for name in (self.graph.edges[at] for at in order[:SHOWN])]
        return table(rows, ["edge", "score"], numbers=[1]) + self._more()

    def _more(self) -> str:
        left = len(self.edges) - SHOWN
        return heading("", f"and {left:,} more: circuit.edges") if left > 0 else ""


def _from_text(text: str) -> Circuit:
    return _made(from_json(text))


def _made(found: CircuitData) -> Circuit:
    return Circuit(**{one.name: getattr(found, one.name) for one in fields(CircuitData)})


@checked
def evaluate_together(
    circuits: Sequence[Circuit],
    prompts: Any = None,
    *,
    base: Any = None,
    source: Any = None,
    metric: Any = None,
    only: str | None = None,
    max_memory: int | str | None = None,
    workers: int | str | Pool | None = None,
) -> list[Evaluation]:
    """Evaluate several circuits of one model together, as one stack of worlds; see `Circuit.evaluate`.

    Minimality is not computed. Raises CircuitError if the circuits belong to different models.
    """
    given = list(circuits)
    if not given or not all(isinstance(one, Circuit) for one in given):
        raise CircuitError("circuits are evaluated together from a list of one or more.")
    model = given[0]._own_model("evaluate")
    if any(one._own_model("evaluate") is not model for one in given):
        raise CircuitError("these are circuits of several models: evaluate those of each model together.")
    question = given[0]._question("evaluate", prompts, base, source, metric, max_memory)
    return evaluate(question, [one.edges for one in given], only=only, workers=workers)


def _measured(found: Evaluation) -> list[tuple[str, float]]:
    """An evaluation as the rows of a page."""
    return [
        ("faithfulness", found.faithfulness),
        ("completeness", found.completeness),
        *([] if found.minimality is None else [("minimality", found.minimality)]),
        (f"{found.metric} of the model", found.full),
        (f"{found.metric} of the circuit", found.circuit),
        (f"{found.metric} of the complement", found.complement),
        (f"{found.metric} with all edges removed", found.ablated),
    ]


def _notes(found: Evaluation) -> list[str]:
    weakest = [] if found.weakest is None else [f"The edge that is needed least is {found.weakest}."]
    return [f"Removed edges: {found.source}.", *weakest]


def _home(given: Any, of: str, model: Captured | None) -> tuple[EdgeGraph, str, Captured | None]:
    """The graph that a circuit is made in, the name of its model, and the model, if one is given."""
    if isinstance(given, Captured):
        if model is not None and model is not given:
            raise CircuitError(
                f"two models were given, {given.name} and model={model.name}: a circuit is one of a single "
                "model. Leave out `model`."
            )
        return edge_facts(given).graph, of or given.name, given
    if isinstance(given, str) or not hasattr(given, "readers"):
        raise CircuitError(f"a circuit is made in a model, or in a graph of edges, not in {describe(given)}.")
    own = EdgeGraph.of(given)
    if model is not None:
        expect_same_graph(own, edge_facts(model).graph, f"the graph is not that of {model.name}")
    return own, of or ("" if model is None else model.name), model
