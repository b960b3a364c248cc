"""The methods of attribution, by name: what each is of, how it scores, and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conewise.attributing.differences import PatchedSites
from conewise.attributing.edge_scores import eap, eap_activations, eap_inputs, relp_edges
from conewise.attributing.edge_table import EdgeTable, edge_table, is_known
from conewise.attributing.node_scores import atp, integrated, relp
from conewise.attributing.star_scores import atp_star
from conewise.attributing.work import Work
from conewise.errors import SweepError
from conewise.locations.places import EdgePlace
from conewise.locations.selectors import Cell
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured

Cells = PatchedSites | EdgeTable
"""The cells of an attribution, by the sites that they patch or by the ends of their edges."""

Scores = Callable[[Work, Any, int], Tensor]

HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Method:
    """A way to estimate effects: `of_sites` and `of_edges` score cells of a kind, [metric, cell, prompt].

    `default_steps` where it takes several. `is_one_pass`: one forward is recorded, whatever the cells.
    """

    name: str
    of_sites: Scores | None = None
    of_edges: Scores | None = None
    default_steps: int | None = None
    is_one_pass: bool = False

    def described(self, steps: int) -> str:
        """The method in words."""
        return self.name if self.default_steps is None else f"{self.name}, {steps} steps"

    def scores(self, work: Work, cells: Cells, steps: int) -> Tensor:
        """[metric, cell, prompt]: the estimated effects of one batch."""
        own = self.of_edges if isinstance(cells, EdgeTable) else self.of_sites
        assert own is not None
        return own(work, cells, steps)

    def steps(self, given: int | None) -> int:
        """How many steps are taken. Raises SweepError where none are, or for what is no number of them."""
        if self.default_steps is None:
            if given is not None:
                raise SweepError(
                    f"{self.name!r} takes one gradient, and no steps: leave out steps={given!r}."
                )
            return 1
        if given is None:
            return self.default_steps
        if not 1 <= given <= MOST_STEPS:
            raise SweepError(f"steps is a number from 1 to {MOST_STEPS:,}, and not {given!r}.")
        return given

    def cells(self, model: Captured, cells: tuple[Cell, ...]) -> Cells:
        """The cells as it reads them. Raises SweepError for a kind of cells that it does not attribute to."""
        if is_known(model, cells) and self.of_edges is not None:
            return edge_table(model, cells)
        are_edges = self._are_edges(cells)
        return edge_table(model, cells) if are_edges else PatchedSites(model, cells)

    def _are_edges(self, cells: Sequence[Cell]) -> bool:
        for cell in cells:
            is_edge = any(isinstance(place, EdgePlace) for place in cell.places)
            if (self.of_edges if is_edge else self.of_sites) is None:
                these = "edges" if is_edge else "sites"
                of_these = [
                    one.name for one in METHODS.values() if (one.of_edges if is_edge else one.of_sites)
                ]
                raise SweepError(
                    f"{self.name!r} attributes to {'sites' if is_edge else 'edges'}, and {cell.name} "
                    f"is {'an edge' if is_edge else 'a site'}: for {these} there are {', '.join(of_these)}."
                )
            if is_edge != isinstance(cells[0].places[0], EdgePlace):
                raise SweepError(
                    f"{cells[0].name} and {cell.name} are an edge and a site: attribute to edges and to "
                    "sites one after the other."
                )
        return isinstance(cells[0].places[0], EdgePlace)


def _plain(scores: Callable[[Work, Any], Tensor]) -> Scores:
    return lambda work, cells, _: scores(work, cells)


MOST_STEPS = 1_000_000
"""More steps than that would not end."""

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("atp", of_sites=_plain(atp), is_one_pass=True),
        Method("atp*", of_sites=_plain(atp_star)),
        Method("ig", of_sites=integrated, default_steps=10),
        Method("relp", of_sites=_plain(relp), of_edges=_plain(relp_edges), is_one_pass=True),
        Method("eap", of_edges=_plain(eap), is_one_pass=True),
        Method("eap-ig", of_edges=eap_inputs, default_steps=5),
        Method("eap-ig-activations", of_edges=eap_activations, default_steps=5),
    )
}
"""The methods, by name."""


def method_of(name: str) -> Method:
    """The method of that name. Raises SweepError with those that there are."""
    if name not in METHODS:
        raise SweepError(f"no method {name!r} of attribution; there are {', '.join((*METHODS, HYBRID))}.")
    return METHODS[name]
