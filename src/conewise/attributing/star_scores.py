"""AtP*: attribution patching with its two corrections (Kramár et al. 2024).

Queries and keys reach the metric through a softmax, which saturates: their effect on their layer's z is
computed exactly, and only from there on by gradients. And effects along different paths may cancel: gradients
are dropped at one layer after the other, and the absolute effects averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from conewise.attributing.differences import CellSums, Differences, PatchedSites, each_call
from conewise.attributing.work import Work
from conewise.errors import GradientError, MissingSiteError
from conewise.locations.places import Place
from conewise.locations.selectors import Cell
from conewise.program.tensors import Tensor, computing
from conewise.runs.backward.tape import Recorded
from conewise.runs.captured import Captured

THROUGH_SOFTMAX = ("q", "k", "rot_q", "rot_k", "attn_scores")
"""The kinds of sites whose whole effect goes through the softmax of their layer's attention."""

TERMS = ("attn_out", "cross_attn_out", "mlp_out")
"""What a layer adds to the stream."""


def atp_star(work: Work, sites: PatchedSites) -> Tensor:
    """[metric, cell, prompt]: the sign of the corrected first-order effect, the size of its dropped ones.

    With a gradient dropped at layer l, nothing that layer l adds to the stream passes it on. The size is the
    mean over layers of the absolute effects with the gradient dropped there; layers without which a cell has
    no way to the metric, its own above all, are left out. A model of one layer has no other to drop.
    """
    star = _Star(work, StarCells(work.model, sites.cells))
    values = work.record(star.nodes, keep=star.terms)
    drop = _Drop(values, star.layers)
    rows = []
    for number, metric in enumerate(work.metrics):
        measured = work.measure(metric, values)
        is_last = number == len(work.metrics) - 1
        wanted = [values[node] for node in star.nodes]
        signed = star.effects(work.gradients(measured, wanted, is_last=is_last and not star.layers))
        size = torch.zeros_like(signed)
        with drop.hooked():
            for layer in range(len(star.layers)):
                drop.layer = layer
                ends = is_last and layer == len(star.layers) - 1
                size += star.effects(work.gradients(measured, wanted, is_last=ends)).abs()
        left = star.left[:, None].expand_as(size)
        size = torch.where(left > 0, size / left.clamp(min=1), signed.abs())
        effects = torch.where(signed < 0, -size, size)
        rows.append(work.by_prompt(measured, effects))
    return torch.stack(rows)


@dataclass(frozen=True, slots=True)
class Softmaxed:
    """Places of one cell whose effect goes through one softmax, and what it makes of them: z."""

    cell: int
    z: Place
    places: tuple[Place, ...]


class StarCells:
    """The cells by what of them goes through a softmax, and the layers at which gradients are dropped."""

    def __init__(self, model: Captured, cells: Sequence[Cell]) -> None:
        self.model, self.cells = model, each_call(model, cells)
        layers = [
            tuple(layer.nodes[kind] for kind in TERMS if kind in layer.nodes)
            for layer in model.site_table.model_layers
        ]
        self.layers = [terms for terms in layers if terms]
        if not self.layers:
            raise GradientError(
                "'atp*' drops gradients layer by layer, and no layers that add to a stream were found in "
                "this model. Take method='atp'."
            )
        self.terms = [term for terms in self.layers for term in terms]
        self.softmaxed: list[Softmaxed] = []
        plain = [self._through_softmax(number, cell) for number, cell in enumerate(self.cells)]
        self.plain_numbers = [number for number, cell in enumerate(plain) if cell is not None]
        self.plain = PatchedSites(model, [cell for cell in plain if cell is not None])
        z_nodes = [model.locate(one.z).node for one in self.softmaxed]
        self.nodes = tuple(dict.fromkeys([*self.plain.nodes, *z_nodes]))

    def _through_softmax(self, number: int, cell: Cell) -> Cell | None:
        """Note a cell's queries and keys; the cell with its other places, if it has any."""
        others = []
        by_attention: dict[tuple[str, int | None, str], list[Place]] = {}
        for place in cell.places:
            site = self.model.locate(place).site
            cross = "cross_" if site.kind.startswith("cross_") else ""
            if site.kind.removeprefix("cross_") in THROUGH_SOFTMAX:
                by_attention.setdefault((f"{cross}z", site.layer, site.stack), []).append(place)
            else:
                others.append(place)
        for z, places in by_attention.items():
            self._expect_result(Place(*z), places)
            self.softmaxed.append(Softmaxed(number, Place(*z), tuple(places)))
        return Cell(tuple(others), cell.selector, cell.at) if others else None

    def _expect_result(self, z: Place, places: Sequence[Place]) -> None:
        try:
            self.model.locate(z)
        except MissingSiteError as error:
            raise GradientError(
                f"{places[0]} goes through a softmax, whose result is not known here: {error}"
            ) from error

    def computed_for(self, one: Softmaxed) -> int:
        """How many nodes are computed to know what z is where these places are patched."""
        model = self.model
        patched = frozenset(model.graph.numbers([model.locate(place).node for place in one.places]))
        cone = model.graph.table.cone(patched) - patched
        return len(cone & model.support((model.locate(one.z).node,), model.graph.names(patched)))


class _Star:
    """The effects of cells in one batch."""

    def __init__(self, work: Work, cells: StarCells) -> None:
        self._work, self._cells = work, cells
        self.layers, self.terms, self.nodes = cells.layers, cells.terms, cells.nodes
        self._support: dict[tuple[str, ...], frozenset[int]] = {}
        self._changes = [(one.cell, one.z, self._change_of_z(one)) for one in cells.softmaxed]
        self._sums = CellSums(Differences(work, cells.plain), work.prompts)
        self._z = {str(one.z): work.model.locate(one.z) for one in cells.softmaxed}
        self.left = torch.tensor([self._layers_left(cell) for cell in cells.cells])

    def _change_of_z(self, one: Softmaxed) -> Tensor:
        """What z is more than in the base when these places are patched, in natural axes."""
        work = self._work
        before = work.base.read(one.z)
        with work.base.fork() as world, computing():
            for place in one.places:
                world.patch(place, work.batch.part(place))
            change = world.read(one.z) - before
            work.count(world.ledger.count("recomputed"))
        return change

    def _layers_left(self, cell: Cell) -> int:
        """At how many layers a gradient can be dropped with a way to the metric left."""
        model, count = self._work.model, 0
        numbers = model.graph.numbers([model.locate(place).node for place in cell.places])
        for terms in self.layers:
            needed = self._needed(terms) - set(model.graph.numbers(terms))
            count += any(number in needed for number in numbers)
        return count

    def _needed(self, terms: tuple[str, ...]) -> frozenset[int]:
        if terms not in self._support:
            self._support[terms] = self._work.model.support(self._work.targets, terms)
        return self._support[terms]

    def effects(self, gradients: Sequence[Tensor]) -> Tensor:
        """[cell, prompt] in float64, of gradients by `nodes`."""
        by_node = dict(zip(self.nodes, gradients, strict=True))
        found = torch.zeros(len(self._cells.cells), max(self._work.prompts, 1), dtype=torch.float64)
        if self._cells.plain_numbers:
            found[self._cells.plain_numbers] = self._sums.effects(by_node)
        with computing():
            for number, place, change in self._changes:
                located = self._z[str(place)]
                gradient = located.read(by_node[located.node], self._work.base._sizes)
                over = [dim for dim, axis in enumerate(located.view.axes) if axis != "batch"]
                found[number] += (change * gradient).double().sum(over).cpu()
        return found


class _Drop:
    """Keeps gradients from passing what one layer adds to the stream: `layer` says which."""

    def __init__(self, values: Recorded, layers: Sequence[Sequence[str]]) -> None:
        self.layer = -1
        self._terms: Mapping[int, list[Tensor]] = {
            number: [values[term] for term in terms if values[term].requires_grad]
            for number, terms in enumerate(layers)
        }

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While it lasts, gradients are dropped."""
        with ExitStack() as hooks:
            for number, terms in self._terms.items():
                for term in terms:
                    handle = term.register_hook(self._dropping(number))  # type: ignore[no-untyped-call]
                    hooks.callback(handle.remove)
            yield

    def _dropping(self, number: int) -> Any:
        def hook(gradient: Tensor) -> Tensor | None:
            return torch.zeros_like(gradient) if self.layer == number else None

        return hook
