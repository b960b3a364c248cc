"""Scores of cells by what they are of: edges, nodes (heads, MLPs, the input) or neurons in the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.anatomy.places import EdgePlace, Place
from conewise.anatomy.selectors import Cell
from conewise.circuits.curve import FaithfulnessCurve, curve_of
from conewise.circuits.forwards import asked
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import SweepError
from conewise.runs.captured import Captured
from conewise.threads import one_thread

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

    `question` says what circuits are evaluated on, as `asked` takes it.
    """
    given = asked(model, **question)
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
