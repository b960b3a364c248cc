"""First-order effects of patches at sites: attribution patching, AtP*, integrated gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from conewise.anatomy.axes import resolved
from conewise.anatomy.places import Place
from conewise.anatomy.selectors import Cell
from conewise.anatomy.sites import Located
from conewise.attributing.relevance import Relevance
from conewise.attributing.work import OnePass, Work
from conewise.errors import GradientError, MissingSiteError
from conewise.program.tensors import Tensor, computing
from conewise.runs.captured import Captured
from conewise.runs.gradients import Recorded, located_places
from conewise.runs.values import new_part

Site = tuple[str, int | None, str]
Sums = tuple[Site, tuple[str, ...]]
"""The key of summed products: a site, and the axes that stay."""


def site_of(place: Place) -> Site:
    """The site of a place, without its part."""
    return place.name, place.layer, place.stack


class PatchedSites:
    """The sites that some cells patch: a sweep has looked that each is a node of the graph."""

    def __init__(self, model: Captured, cells: Sequence[Cell]) -> None:
        self.model, self.given = model, cells
        self.cells = tuple(cells)
        if model.site_table.has_repeated_calls:  # all calls of a module are patched
            self.cells = tuple(replace(cell, places=model.each_call(cell.places)) for cell in cells)
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


class SiteEffects(OnePass):
    """Attribution patching: first-order effects of patches, (source − base) · gradient in the base.

    One forward pass over what lies behind the sites, one backward pass for each metric. With `rules`, what
    these pass back stands in the place of the gradient: relevance patching (Jafari et al. 2025), in which
    queries and keys have none; gradient interaction modifications (Edin et al. 2025).
    """

    def __init__(self, work: Work, sites: PatchedSites, rules: type[Relevance] | None = None) -> None:
        super().__init__(work, rules)
        self._patched, self._changes = sites, dict[Site, Tensor]()
        self._values: Recorded = {}
        self._shapes: dict[Sums, torch.Size] = {}

    @property
    def is_apart(self) -> bool:
        """True if all cells patch single parts, by one run."""
        places = self._patched.located
        return self._work.has_source and all(self._kept(place) is not None for place in places)

    def forward(self) -> Recorded:
        """See `OnePass`."""
        self._values = self._work.record(self._patched.nodes, relevance=self._relevance)
        if self._work.is_recording:
            with computing():
                for site in self._patched.sites:
                    self._whole(site)
        return self._values

    def wanted(self) -> list[Tensor]:
        """See `OnePass`."""
        return [self._values[node] for node in self._patched.nodes]

    def scored(self, gradients: Sequence[Tensor]) -> Tensor:
        """See `OnePass`."""
        return self.by_cell(dict(zip(self._patched.nodes, gradients, strict=True)))

    def backward(self, gradients: Sequence[Tensor]) -> Tensor:
        """See `OnePass`."""
        by_node = dict(zip(self._patched.nodes, gradients, strict=True))
        with computing():
            found = self._sums(self._patched.located, by_node, {})
            self._shapes = {key: one.shape for key, one in found.items()}
            return torch.cat([one.reshape(-1) for one in found.values()])

    def finish(self, numbers: Tensor) -> Tensor:
        """See `OnePass`."""
        return self._of_cells(self._patched.cells, {}, {}, self._apart(numbers))

    def has_nan(self) -> Tensor:
        """See `OnePass`."""
        return torch.stack([change.isnan().any() for change in self._changes.values()]).any()

    def _part(self, place: Place) -> Tensor:
        """Return the change that the patch at one place makes, in its natural axes."""
        patched, present = self._patched, self._work.base.read(place)
        found = patched.located.get(place, patched.model.locate(place))
        put = self._work.batch.intervention
        if self._work.is_recording and put.whole is not None:  # whether it has NaN is looked at later
            part: Any = put.whole(place, self._work.base)
        else:
            part = self._work.batch.part(place)
        return new_part(part, present.detach(), found, place) - present

    def _whole(self, site: Site) -> Tensor:
        """Return the change that a patch of a whole site makes, in its natural axes."""
        if site not in self._changes:
            self._changes[site] = self._part(Place(*site))
        return self._changes[site]

    def _is_of_wholes(self) -> bool:
        """True if the patch of a part is that part of the whole site's patch."""
        return self._work.batch.intervention.whole is not None

    def in_node(self, site: Site) -> tuple[str, Tensor]:
        """Return the node of a site, and what a patch of the whole site changes of its value."""
        found, change = self._patched.sites[site], self._whole(site)
        (value,) = self._work.base.demand([found.node])
        return found.node, found.view.replace(torch.zeros_like(value), {}, change, self._work.base._sizes)

    def by_cell(self, gradients: Mapping[str, Tensor], cells: Iterable[Cell] | None = None) -> Tensor:
        """[cell, prompt] in float64, of gradients by node."""
        products: dict[Site, Tensor] = {}
        chosen = self._patched.cells if cells is None else tuple(cells)
        with computing():
            found = self._sums([place for cell in chosen for place in cell.places], gradients, products)
            self._shapes = {key: one.shape for key, one in found.items()}
            if len({one.device for one in found.values()}) == 1:
                # All come from a device at once: each that came alone would be waited for.
                sums = self._apart(torch.cat([one.reshape(-1) for one in found.values()]).cpu())
            else:
                sums = {key: one.cpu() for key, one in found.items()}
            return self._of_cells(chosen, gradients, products, sums)

    def _apart(self, numbers: Tensor) -> dict[Sums, Tensor]:
        """Return the sums that stand in one line."""
        pieces = torch.split_with_sizes(numbers, [shape.numel() for shape in self._shapes.values()])
        pairs = zip(self._shapes.items(), pieces, strict=True)
        return {key: piece.reshape(shape) for (key, shape), piece in pairs}

    def _of_cells(
        self,
        cells: Iterable[Cell],
        gradients: Mapping[str, Tensor],
        products: dict[Site, Tensor],
        sums: Mapping[Sums, Tensor],
    ) -> Tensor:
        rows = []
        for cell in cells:
            parts = [self._effect(place, gradients, products, sums) for place in cell.places]
            rows.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        return torch.stack(rows).cpu() if rows else torch.zeros(0, self._work.prompts, dtype=torch.float64)

    def _gradient(self, site: Site, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient by a whole site, in natural axes."""
        found = self._patched.sites[site]
        return found.view.read(gradients[found.node], {}, self._work.base._sizes)

    def _sums(
        self, places: Iterable[Place], gradients: Mapping[str, Tensor], products: dict[Site, Tensor]
    ) -> dict[Sums, Tensor]:
        """Products summed over all axes but the batch and those along which places are single parts."""
        found: dict[Sums, Tensor] = {}
        if not self._is_of_wholes():
            return found
        for place in places:
            kept = self._kept(place)
            key = None if kept is None else (site_of(place), kept)
            if key is not None and key not in found:
                product = self._product(key[0], gradients, products)
                axes = self._patched.located[place].view.axes
                over = [dim for dim, axis in enumerate(axes) if axis not in key[1]]
                wide = product.double()
                found[key] = wide.sum(over) if over else wide
        return found

    def _kept(self, place: Place) -> tuple[str, ...] | None:
        """The axes along which a place is a single part, and the batch; None where it is no single part."""
        if "batch" in place.part or not all(isinstance(index, int) for index in place.part.values()):
            return None
        axes = self._patched.located[place].view.axes
        return tuple(axis for axis in axes if axis in place.part or axis == "batch")

    def _product(self, site: Site, gradients: Mapping[str, Tensor], products: dict[Site, Tensor]) -> Tensor:
        if site not in products:
            products[site] = self._whole(site) * self._gradient(site, gradients)
        return products[site]

    def _effect(
        self,
        place: Place,
        gradients: Mapping[str, Tensor],
        products: dict[Site, Tensor],
        sums: Mapping[Sums, Tensor],
    ) -> Tensor:
        """[prompt]: the effect of the patch at one place."""
        site = site_of(place)
        axes = self._patched.located[place].view.axes
        if "batch" not in axes and self._work.prompts != 1:
            raise GradientError(
                f"{place} has no prompts (its axes are {', '.join(axes)}), so that its gradient is not of "
                "one prompt alone. Give the prompts one by one: a list of bases, and a list of sources."
            )
        if not self._is_of_wholes():
            gradient = self._gradient(site, gradients)
            index = resolved(axes, place.part, gradient.shape)
            product = torch.zeros_like(gradient)
            product[index] = self._part(place) * gradient[index]
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


def integrated(work: Work, sites: PatchedSites, steps: int) -> Tensor:
    """Integrated gradients: [metric, cell, prompt], (source − base) · the mean gradient along a line.

    For each site of a layer, its whole value goes from the base's to the source's, base + k/steps · (source −
    base) for k = 0, ..., steps − 1, while all that does not lie behind it is the base's; the gradient by a
    cell's part is taken there. Parts of one site (the heads of a layer) thus go together, as in the
    literature: for a patch of a part alone that is not the line of its own world. With one step it is `atp`.
    """
    patches = SiteEffects(work, sites)
    for cell in sites.cells:
        if len({site_of(place) for place in cell.places}) > 1:
            raise GradientError(
                f"{cell.name} patches several sites together, and integrated gradients are along the line of "
                "one site's value. Take method='atp', or cells of one site each."
            )
    effects = torch.zeros(len(work.metrics), len(sites.cells), max(work.prompts, 1), dtype=torch.float64)
    numbers: dict[object, list[int]] = {}
    for number, cell in enumerate(sites.cells):
        numbers.setdefault(site_of(cell.places[0]), []).append(number)
    for site, own in numbers.items():
        node, change = patches.in_node(site)  # type: ignore[arg-type]
        (base,) = work.base.demand([node])
        some = [sites.cells[number] for number in own]
        for step in range(steps):
            values = work.record([node], given={node: base + (step / steps) * change})
            for row, (measured, is_last) in enumerate(work.measured(values)):
                (found,) = work.gradients(measured, [values[node]], is_last=is_last)
                part = work.by_prompt(measured.is_shared, patches.by_cell({node: found}, some))
                effects[row, own] += part / steps
    return effects


THROUGH_SOFTMAX = ("q", "k", "rot_q", "rot_k", "attn_scores")
"""The kinds of sites whose whole effect goes through the softmax of their layer's attention."""

TERMS = ("attn_out", "cross_attn_out", "mlp_out")
"""The kinds of sites that a layer adds to the stream."""


def atp_star(work: Work, sites: PatchedSites, _: int = 1) -> Tensor:
    """[metric, cell, prompt]: the sign of the corrected first-order effect, the size of its dropped ones.

    With a gradient dropped at layer l, nothing that layer l adds to the stream passes it on. The size is the
    mean over layers of the absolute effects with the gradient dropped there; layers without which a cell has
    no way to the metric, its own above all, are left out. A model of one layer has no other to drop.
    """
    star = _Star(work, sites.cells)
    values = work.record(star.nodes, keep=[term for terms in star.layers for term in terms])
    rows = []
    for measured, is_last in work.measured(values):
        wanted = [values[node] for node in star.nodes]
        signed = star.effects(work.gradients(measured, wanted, is_last=is_last and not star.layers))
        size = torch.zeros_like(signed)
        for terms in star.layers:
            with ExitStack() as hooks:
                for term in (values[name] for name in terms if values[name].requires_grad):
                    hooks.callback(term.register_hook(torch.zeros_like).remove)
                ends = is_last and terms is star.layers[-1]
                size += star.effects(work.gradients(measured, wanted, is_last=ends)).abs()
        left = star.left[:, None].expand_as(size)
        size = torch.where(left > 0, size / left.clamp(min=1), signed.abs())
        effects = torch.where(signed < 0, -size, size)
        rows.append(work.by_prompt(measured.is_shared, effects))
    return torch.stack(rows)


class _Star:
    """The effects of cells in one batch, those through a softmax by what this makes of them: z.

    `layers` are the terms that each layer adds to the stream, at which gradients are dropped; `left` says at
    how many of them a cell has a way to the metric left.
    """

    def __init__(self, work: Work, cells: Sequence[Cell]) -> None:
        self._work, self._count = work, len(cells)
        model = work.model
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
        self._changes: list[tuple[int, Located, Tensor]] = []
        plain = {number: own for number, cell in enumerate(cells) if (own := self._plain_part(number, cell))}
        self._plain_numbers = list(plain)
        patched = PatchedSites(model, list(plain.values()))
        self._plain = SiteEffects(work, patched)
        z_nodes = [z.node for _, z, _ in self._changes]
        self.nodes = tuple(dict.fromkeys([*patched.nodes, *z_nodes]))
        needed = [
            model.support(work.targets, terms) - set(model.graph.numbers(terms)) for terms in self.layers
        ]
        numbers = [model.graph.numbers([model.locate(one).node for one in cell.places]) for cell in cells]
        self.left = torch.tensor(
            [sum(not behind.isdisjoint(own) for behind in needed) for own in map(set, numbers)]
        )

    def _plain_part(self, number: int, cell: Cell) -> Cell | None:
        """Compute what a cell's queries and keys change; the cell with its other places, if it has any."""
        work, others = self._work, []
        by_attention: dict[Site, list[Place]] = {}
        for place in cell.places:
            site = work.model.locate(place).site
            cross = "cross_" if site.kind.startswith("cross_") else ""
            if site.kind.removeprefix("cross_") in THROUGH_SOFTMAX:
                by_attention.setdefault((f"{cross}z", site.layer, site.stack), []).append(place)
            else:
                others.append(place)
        for z, places in by_attention.items():
            try:
                found = work.model.locate(Place(*z))
            except MissingSiteError as error:
                raise GradientError(
                    f"{places[0]} goes through a softmax, whose result is not known here: {error}"
                ) from error
            before = work.base.read(Place(*z))
            with work.base.fork() as world, computing():
                for place in places:
                    world.patch(place, work.batch.part(place))
                change = world.read(Place(*z)) - before
                work.count(world.ledger.count("recomputed"))
            self._changes.append((number, found, change))
        return Cell(tuple(others), cell.selector, cell.at) if others else None

    def effects(self, gradients: Sequence[Tensor]) -> Tensor:
        """[cell, prompt] in float64, of gradients by `nodes`."""
        by_node = dict(zip(self.nodes, gradients, strict=True))
        found = torch.zeros(self._count, max(self._work.prompts, 1), dtype=torch.float64)
        if self._plain_numbers:
            found[self._plain_numbers] = self._plain.by_cell(by_node)
        with computing():
            for number, z, change in self._changes:
                gradient = z.read(by_node[z.node], self._work.base._sizes)
                over = [dim for dim, axis in enumerate(z.view.axes) if axis != "batch"]
                found[number] += (change * gradient).double().sum(over).cpu()
        return found
