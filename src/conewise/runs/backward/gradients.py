"""Gradients of a metric by the sites of a run: one backward pass over what lies behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from conewise.errors import MissingSiteError
from conewise.locations.located import Located
from conewise.locations.places import EdgePlace, Place, as_place
from conewise.locations.selectors import SelectorLike, as_selectors
from conewise.program.tensors import Tensor
from conewise.runs.backward.tape import Tape
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric, expect_prompts, nodes_read
from conewise.runs.spreading import spread
from conewise.structure.axes.outputs import Outputs


class Gradients(Mapping[Place, Tensor]):
    """Gradients of one metric, by place: `gradients["z", 2]`, `gradients[cw.site("z", layer=2, head=1)]`.

    Each has the natural axes of its place, less those that it selects by a number. `metric` is the metric's
    name, `numbers` what it was, [prompt].
    """

    def __init__(self, metric: str, numbers: Tensor, found: Mapping[Place, Tensor]) -> None:
        self.metric, self.numbers, self._found = metric, numbers, dict(found)

    def __getitem__(self, place: object) -> Tensor:
        """The gradient by one of the places that were asked for."""
        place = as_place(place)
        if place not in self._found:
            known = [str(one) for one in self._found]
            shown = ", ".join(known if len(known) <= 4 else [*known[:3], "..."])
            raise MissingSiteError(
                f"no gradient by {place}: those by {len(known)} places are known ({shown})."
            )
        return self._found[place]

    def __contains__(self, place: object) -> bool:
        return as_place(place) in self._found

    def __iter__(self) -> Iterator[Place]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Gradients of {self.metric} by {len(self)} places"


def gradients_of(tape: Tape, metric: Metric, sites: SelectorLike, inputs: Mapping[str, Tensor]) -> Gradients:
    """The gradients of a metric by every place of `sites`."""
    model = tape.model
    expect_prompts(metric, Outputs(model.program).prompts(inputs), "this run")
    cells = spread(as_selectors(sites), model, [lambda found: lengths_of(tape, found)]).cells
    located = located_places(model, (place for cell in cells for place in cell.places))
    nodes = tuple(dict.fromkeys(node_of(found) for found in located.values()))
    values = tape.record(nodes, nodes_read(tape.model.program, metric))
    measured = tape.measure(metric, values, inputs)
    by_node = dict(zip(nodes, tape.gradients(measured, [values[node] for node in nodes]), strict=True))
    shown = {
        place: found.view.read(shown_gradient(tape, found, by_node[node_of(found)]), found.part, tape.sizes)
        for place, found in located.items()
    }
    return Gradients(metric.name, measured.numbers.detach(), shown)


def located_places(model: Captured, places: Iterable[Place]) -> dict[Place, Located]:
    """Every place once, found in the model. Raises MissingSiteError for an edge, which is no site."""
    found: dict[Place, Located] = {}
    for place in places:
        if isinstance(place, EdgePlace):
            raise MissingSiteError(
                f"{place} is an edge, and gradients are by sites. Attribute to edges with "
                "`cw.attribution(model, edges, ..., method='eap')`."
            )
        if place not in found:
            found[place] = model.locate(place)
    return found


def node_of(found: Located) -> str:
    """The node by whose value is differentiated: for `result` the sum of all heads' shares."""
    return found.node if found.result is None else found.result.projection.name


def lengths_of(tape: Tape, found: Located) -> dict[str, int]:
    """The lengths of the natural axes of a site."""
    view = found.view if found.result is None else found.z_view
    shape = view.present(tape.value(found.node), tape.sizes).shape
    lengths = dict(zip(view.axes, shape, strict=True))
    if found.result is not None:
        lengths["d_model"] = tape.value(found.result.projection.name).shape[-1]
    return {axis: lengths[axis] for axis in found.view.axes}


def shown_gradient(tape: Tape, found: Located, gradient: Tensor) -> Tensor:
    """The gradient by a node's value as the site's view reads it; the shares of heads all have the sum's."""
    if found.result is None:
        return gradient
    lengths = lengths_of(tape, found)
    batch, pos, heads, width = (lengths[axis] for axis in ("batch", "pos", "head", "d_model"))
    if found.result.is_pos_first:
        by_pos = gradient.reshape(pos, batch, width).transpose(0, 1)
    else:
        by_pos = gradient.reshape(batch, pos, width)
    return by_pos.unsqueeze(2).expand(batch, pos, heads, width)
