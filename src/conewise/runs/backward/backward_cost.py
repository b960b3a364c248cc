"""Which part of a reverse pass depends on a patch: counted on a run, before anything is patched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from conewise.errors import GradientError, MissingSiteError
from conewise.locations.selectors import SelectorLike, as_selectors
from conewise.markup import table
from conewise.paper.theory.backward import ReverseCost, reverse_cost, sites_with_gradients
from conewise.program.tensors import Tensor
from conewise.runs.backward.gradients import lengths_of, located_places, node_of
from conewise.runs.backward.reverse_graph import METRIC, reverse_graph
from conewise.runs.backward.tape import Tape
from conewise.runs.metrics import Metric, expect_prompts
from conewise.runs.spreading import spread
from conewise.structure.axes.outputs import Outputs


@dataclass(frozen=True, slots=True)
class Stale:
    """What a patch makes stale, in nodes: of the forward pass, of the reverse pass, and its share of that."""

    forward: int
    backward: int
    share: Fraction


class BackwardCost(Mapping[str, Stale]):
    """What patches make stale of a metric and of its gradients, by the name of their cells.

    `forward` and `backward` are the nodes of full passes: a node of the reverse pass is what flows along one
    edge, or the sum where several meet. `share` is the part of the reverse pass that a patch makes stale, on
    average; `ratio` full passes over what is computed again, and `forward_ratio` the same of the forward pass
    alone. Counted from the graph, and from what torch saves for each operation's gradient.
    """

    def __init__(self, metric: str, by: str, names: tuple[str, ...], cost: ReverseCost) -> None:
        self.metric, self.by, self.names, self.cost = metric, by, names, cost
        self.forward, self.backward, self.share = cost.forward, cost.backward, cost.share
        self.ratio, self.forward_ratio = cost.ratio, cost.forward_ratio
        counts = zip(cost.stale_forward, cost.stale_backward, cost.shares, strict=True)
        self._found = dict(zip(names, (Stale(*one) for one in counts), strict=True))

    def __getitem__(self, cell: str) -> Stale:
        """What the patch of one cell makes stale."""
        if str(cell) not in self._found:
            raise MissingSiteError(
                f"no patch at {cell} was counted: those at {len(self)} cells were, {self.names[0]} the first."
            )
        return self._found[str(cell)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def rows(self) -> list[tuple[str, str]]:
        """The counts as lines of a table."""
        least, most = min(self.cost.shares), max(self.cost.shares)
        spent = sum(self.cost.stale_forward) / len(self) / self.forward
        return [
            ("reverse pass", f"of {self.metric} by {self.by}: {self.backward:,} nodes"),
            ("forward pass", f"{self.forward:,} nodes"),
            ("patches", f"{len(self):,}"),
            (
                "stale of the reverse pass",
                f"{float(self.share):.1%} ({float(least):.1%} to {float(most):.1%})",
            ),
            ("stale of the forward pass", f"{spent:.1%}"),
            (
                "full passes over the sweep",
                f"{float(self.ratio):.3f} (forward alone {float(self.forward_ratio):.3f})",
            ),
        ]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {value}" for label, value in self.rows())

    def __repr__(self) -> str:
        return (
            f"BackwardCost of {len(self):,} patches: {float(self.share):.1%} of a reverse pass of "
            f"{self.backward:,} nodes, ρ = {float(self.ratio):.3f}"
        )

    def _repr_html_(self) -> str:
        return table(self.rows())


def backward_cost_of(
    tape: Tape, metric: Metric, sites: SelectorLike, inputs: Mapping[str, Tensor], *, weights: bool
) -> BackwardCost:
    """What a patch of each cell of `sites` makes stale, by the gradients by them, or by the weights."""
    if not isinstance(weights, bool):
        raise GradientError(
            f"`weights` is {weights!r}; it is True for gradients by every parameter, or False."
        )
    expect_prompts(metric, Outputs(tape.model.program).prompts(inputs), "this run")
    found = spread(as_selectors(sites), tape.model, [lambda one: lengths_of(tape, one)])
    located = located_places(tape.model, (place for places in found.places for place in places))
    patches = [sorted({node_of(located[place]) for place in places}) for places in found.places]
    both = reverse_graph(tape, metric, inputs)
    behind = sites_with_gradients(both.graph, METRIC)
    nodes = dict.fromkeys(both.parameters if weights else (node for patch in patches for node in patch))
    wrt = [node for node in nodes if node in behind]
    for name, patch in zip(found.names, patches, strict=True):
        if not weights and behind.isdisjoint(patch):
            raise GradientError(
                f"the metric {metric.name!r} has no gradient by {name}: it does not depend on it, or what "
                "lies between has no derivative. Leave it out."
            )
    if not wrt:
        raise GradientError(f"the metric {metric.name!r} has no gradient by any weight of the model.")
    cost = reverse_cost(both.graph, [[n for n in one if n in both.graph] for one in patches], METRIC, wrt)
    by = f"{len(wrt):,} {'weights' if weights else 'values'}"
    return BackwardCost(metric.name, by, found.names, cost)
