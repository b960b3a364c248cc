"""One baseline of a sweep, and what is put into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from conewise.locations.located import Located
from conewise.locations.places import EdgePlace, Place, SourcedPlace, Writers
from conewise.program.tensors import Tensor
from conewise.runs.edit import Edit
from conewise.runs.interventions.filling import has_nan, stacked_values
from conewise.runs.interventions.interventions import Intervention
from conewise.runs.metrics import Metric
from conewise.runs.reader import reader
from conewise.runs.reading import Reading
from conewise.sweeps.execution.edge_values import EdgeValues
from conewise.sweeps.execution.fills import PartFunction, PassFills, Site, nan_flags


@dataclass(frozen=True)
class Batch:
    """`base` is the run that is changed; `source` the run that values come from, where they do.

    `own` are the sources that cells have of their own, by number. `metrics` are what is
    read of it: metrics with answers for the prompts of all batches have those of this one here.
    """

    base: Reading
    source: Reading | None
    intervention: Intervention
    own: Sequence[Intervention] = ()
    metrics: tuple[Metric, ...] = ()

    def reader(self) -> Callable[[str], Any]:
        """Reads values of the base by the graph's own names, each once."""
        return reader(self.base)

    @cached_property
    def edges(self) -> EdgeValues:
        """What edges put in."""
        return EdgeValues(self.base, self.source, self.intervention)

    def part(self, place: Place) -> Tensor | PartFunction:
        """What a world puts at one place."""
        if isinstance(place, EdgePlace):
            return self.edges.part(place)
        if isinstance(place, SourcedPlace):
            return self.own[place.number].part(place, self.base)
        return self.intervention.part(place, self.base)

    def expect_possible(self, cells: Sequence[Sequence[Place]]) -> None:
        """Raise PatchError where nothing meaningful can be put at the places of some cell."""
        for number, put in ((None, self.intervention), *enumerate(self.own)):
            if put.expect_base is not None:
                if self.own:
                    own = [[place for place in places if _source_of(place) == number] for places in cells]
                    put.expect_base([places for places in own if places], self.base)
                else:
                    put.expect_base(cells, self.base)

    def seen(self, place: EdgePlace) -> tuple[Tensor, bool]:
        """What the reader of an edge sees more than in the base; or all that it sees, and True."""
        return self.edges.seen(place)


def _source_of(place: Place) -> int | None:
    return place.number if isinstance(place, SourcedPlace) else None


class BatchValues:
    """What the worlds of a batch put in; see `fills.Values`. `sites` are all that are put into.

    `wholes` are kept from batch to batch where the source's values lie in the same memory each time.
    """

    def __init__(
        self, batch: Batch, sites: Sequence[Site], wholes: dict[Site, Tensor | None] | None = None
    ) -> None:
        self.batch = batch
        self._wholes = wholes if wholes is not None and batch.intervention.is_run else {}
        self._own: dict[Any, Tensor | None] = {}
        self._looked_at: list[Site] = []
        self._flags: Tensor | None = None
        self._suspicious: frozenset[Site] | None = None
        if batch.intervention.is_run:
            found = {site: whole for site in sites if (whole := self.whole(site)) is not None}
            floats = {s: one for s, one in found.items() if one.is_floating_point() and one.numel()}
            self._looked_at, self._flags = list(floats), nan_flags(list(floats.values()))

    def expect_no_nan(self, fills: PassFills) -> None:
        """Raise PatchError where a pass put NaN in. Waits for the device."""
        if self._suspicious is None:
            flags = [] if self._flags is None else self._flags.tolist()
            marked = zip(self._looked_at, flags, strict=False)
            self._suspicious = frozenset(site for site, flag in marked if flag)
        if self._suspicious:
            fills.expect_no_nan(self, self._suspicious)

    def whole(self, site: Site) -> Tensor | None:
        """The value of a whole site, of which parts are taken."""
        if site not in self._wholes:
            found, put = None, self.batch.intervention
            if put.whole is not None:
                place, base = Place(*site), self.batch.base
                found = put.whole(place, base)
                base.model.locate(place).expect(found, base.read(place), place)
            self._wholes[site] = found
        return self._wholes[site]

    def own_whole(self, site: Site, source: int) -> Tensor | None:
        """The same of a cell's own source; None where it has NaN in it, or no whole value."""
        key = site, source
        if key not in self._own:
            found, put = None, self.batch.own[source]
            if put.whole is not None:
                place, base = Place(*site), self.batch.base
                found = put.whole(place, base)
                base.model.locate(place).expect(found, base.read(place), place)
                if put.is_run and has_nan(found):
                    found = None  # part by part: those without NaN are put in
            self._own[key] = found
        return self._own[key]

    def own_rows(self, located: Located, sources: tuple[int, ...], like: Tensor) -> Tensor:
        """Values or shifts of sources, a row for each, with as many dimensions behind as the part has axes.

        They have the dtype of `like`, and lie where it lies. A dimension of length 1 stands for all.
        """
        key = sources, len(located.part_axes), like.dtype, like.device
        found = self._own.get(key)
        if found is None:
            rows = [_row(self.batch.own[number], like) for number in sources]
            found = self._own[key] = stacked_values(rows, len(located.part_axes))
        return found

    def of_edges(self, site: Site, writers: Sequence[Writers], at_once: int, live: str) -> Tensor:
        """A site as edges from these writers make it."""
        return self.batch.edges.of_edges(site, writers, at_once, live)

    def part(self, place: Place) -> Tensor | PartFunction:
        """What is put at one place."""
        base = self.batch.base
        part = self.batch.part(place)
        if isinstance(part, Tensor):
            base.model.locate(place).expect(part, base.read(place), place)
        return part

    def edit(self, number: int) -> Edit:
        """An edit that stands in the base."""
        return self.batch.base.edits[number]


def _row(put: Intervention, like: Tensor) -> Tensor:
    """The value or the shift of a source, as it is put into a tensor like that."""
    if put.shift is not None:
        return put.scale * put.shift.to(like.device, like.dtype)
    assert put.value is not None
    return put.value if isinstance(put.value, Tensor) else like.new_full((), put.value)
