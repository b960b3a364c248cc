"""What a patch changes at sites: what is put there less what is there, in natural axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from conewise.attributing.work import Work
from conewise.errors import GradientError
from conewise.locations.located import Located
from conewise.locations.places import Place
from conewise.locations.selectors import Cell
from conewise.program.tensors import Tensor, computing
from conewise.runs.backward.gradients import located_places
from conewise.runs.captured import Captured
from conewise.runs.edit import new_part
from conewise.structure.axes.selections import resolved

Site = tuple[str, int | None, str]
Sums = tuple[Site, tuple[str, ...]]
"""What products are summed to: a site, and the axes that stay."""


def site_of(place: Place) -> Site:
    """The site of a place, without its part."""
    return place.name, place.layer, place.stack


def each_call(model: Captured, cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells with all that they patch: every call of a module that is called several times."""
    if not model.site_table.has_repeated_calls:
        return tuple(cells)
    return tuple(replace(cell, places=model.each_call(cell.places)) for cell in cells)


class PatchedSites:
    """The sites that some cells patch: a sweep has looked that each is a node of the graph."""

    def __init__(self, model: Captured, cells: Sequence[Cell]) -> None:
        self.model, self.cells = model, each_call(model, cells)
        places = (place for cell in self.cells for place in cell.places)
        self.located = located_places(model, places)
        self.sites: dict[Site, Located] = {
            site_of(place): model.locate(Place(*site_of(place))) for place in self.located
        }

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes by whose values is differentiated."""
        return tuple(dict.fromkeys(found.node for found in self.sites.values()))

    @property
    def reads(self) -> tuple[str, ...]:
        """The values of a run that patches are made of."""
        inside = self.model.program.record_of
        return tuple(node for node in self.nodes if node in inside)


class Differences:
    """What the patches of some sites change in one batch."""

    def __init__(self, work: Work, sites: PatchedSites) -> None:
        self._work, self.model = work, work.model
        self.cells, self.located, self.sites, self.nodes = (
            sites.cells,
            sites.located,
            sites.sites,
            sites.nodes,
        )
        self._changes: dict[Site, Tensor] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the base."""
        return self._work.base._sizes

    def part(self, place: Place) -> Tensor:
        """What the patch at one place changes, in its natural axes."""
        present = self._work.base.read(place)
        given = self._work.batch.part(place)
        found = self.located.get(place, self.model.locate(place))
        return new_part(given, present.detach(), found, place) - present

    def whole(self, site: Site) -> Tensor:
        """What a patch of a whole site changes, in its natural axes."""
        if site not in self._changes:
            self._changes[site] = self.part(Place(*site))
        return self._changes[site]

    def is_of_wholes(self) -> bool:
        """Whether the patch of a part is that part of the whole site's patch."""
        return self._work.batch.intervention.whole is not None

    def in_node(self, site: Site) -> tuple[str, Tensor]:
        """The node of a site, and what a patch of the whole site changes of its value."""
        found, change = self.sites[site], self.whole(site)
        (value,) = self._work.base.demand([found.node])
        return found.node, found.view.replace(torch.zeros_like(value), {}, change, self.sizes)


class CellSums:
    """First-order effects by cell: change times gradient, summed over what each cell patches."""

    def __init__(self, differences: Differences, prompts: int) -> None:
        self._differences, self._prompts = differences, prompts

    def effects(self, gradients: Mapping[str, Tensor], cells: Iterable[Cell] | None = None) -> Tensor:
        """[cell, prompt] in float64, of gradients by node."""
        products: dict[Site, Tensor] = {}
        rows = []
        chosen = self._differences.cells if cells is None else tuple(cells)
        with computing():
            sums = self._sums([place for cell in chosen for place in cell.places], gradients, products)
            for cell in chosen:
                parts = [self._effect(place, gradients, products, sums) for place in cell.places]
                rows.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
            return torch.stack(rows).cpu() if rows else torch.zeros(0, self._prompts, dtype=torch.float64)

    def gradient(self, site: Site, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient by a whole site, in natural axes."""
        found = self._differences.sites[site]
        return found.view.read(gradients[found.node], {}, self._differences.sizes)

    def _sums(
        self, places: Sequence[Place], gradients: Mapping[str, Tensor], products: dict[Site, Tensor]
    ) -> dict[Sums, Tensor]:
        """Products summed over all axes but the batch and those along which places are single parts.

        All of them come from a device at once: each that came alone would be waited for.
        """
        found: dict[Sums, Tensor] = {}
        if not self._differences.is_of_wholes():
            return found
        for place in places:
            kept = self._kept(place)
            key = None if kept is None else (site_of(place), kept)
            if key is not None and key not in found:
                product = self._product(key[0], gradients, products)
                axes = self._differences.located[place].view.axes
                over = [dim for dim, axis in enumerate(axes) if axis not in key[1]]
                wide = product.double()
                found[key] = wide.sum(over) if over else wide
        if not found or len({one.device for one in found.values()}) > 1:
            return {key: one.cpu() for key, one in found.items()}
        numbers = torch.cat([one.reshape(-1) for one in found.values()]).cpu()
        pieces = torch.split_with_sizes(numbers, [one.numel() for one in found.values()])
        return {key: piece.reshape(found[key].shape) for key, piece in zip(found, pieces, strict=True)}

    def _kept(self, place: Place) -> tuple[str, ...] | None:
        """The axes along which a place is a single part, and the batch; None where it is no single part."""
        if "batch" in place.part or not all(isinstance(index, int) for index in place.part.values()):
            return None
        axes = self._differences.located[place].view.axes
        return tuple(axis for axis in axes if axis in place.part or axis == "batch")

    def _product(self, site: Site, gradients: Mapping[str, Tensor], products: dict[Site, Tensor]) -> Tensor:
        if site not in products:
            products[site] = self._differences.whole(site) * self.gradient(site, gradients)
        return products[site]

    def _effect(
        self,
        place: Place,
        gradients: Mapping[str, Tensor],
        products: dict[Site, Tensor],
        sums: Mapping[Sums, Tensor],
    ) -> Tensor:
        """[prompt]: the effect of the patch at one place."""
        differences, site = self._differences, site_of(place)
        axes = differences.located[place].view.axes
        if "batch" not in axes and self._prompts != 1:
            raise GradientError(
                f"{place} has no prompts (its axes are {', '.join(axes)}), so that its gradient is not of "
                "one prompt alone. Give the prompts one by one: a list of bases, and a list of sources."
            )
        if not differences.is_of_wholes():
            gradient = self.gradient(site, gradients)
            index = resolved(axes, place.part, gradient.shape)
            product = torch.zeros_like(gradient)
            product[index] = differences.part(place) * gradient[index]
            return self._summed(product, axes)
        kept = self._kept(place)
        if kept is not None:
            index = tuple(slice(None) if axis == "batch" else place.part[axis] for axis in kept)
            found = sums[site, kept][index]
            return found if "batch" in kept else found[None]
        product = self._product(site, gradients, products)
        alone = torch.zeros_like(product)
        index = resolved(axes, place.part, product.shape)
        alone[index] = product[index]
        return self._summed(alone, axes)

    def _summed(self, product: Tensor, axes: Sequence[str]) -> Tensor:
        over = [dim for dim, axis in enumerate(axes) if axis != "batch"]
        found = product.double().sum(over).cpu() if over else product.double().cpu()
        return found if "batch" in axes else found[None]
