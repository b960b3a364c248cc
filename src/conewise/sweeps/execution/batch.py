"""One baseline of a sweep, and what is put into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conewise.locations.places import Place
from conewise.program.tensors import Tensor
from conewise.runs.interventions import Intervention
from conewise.runs.reader import reader
from conewise.runs.run import Edit, Reading
from conewise.sweeps.execution.fills import PartFunction, Site, suspicious_sites


@dataclass(frozen=True)
class Batch:
    """`base` is the run that is changed; `source` the run that values come from, where they do."""

    base: Reading
    source: Reading | None
    intervention: Intervention

    def reader(self) -> Callable[[str], Any]:
        """Reads values of the base by the graph's own names, each once."""
        return reader(self.base)


@dataclass
class BatchValues:
    """What the worlds of a batch put in; see `fills.Values`. `sites` are those that are put into."""

    batch: Batch
    sites: tuple[Site, ...]
    suspicious: frozenset[Site] = frozenset()
    _wholes: dict[Site, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch.intervention.is_run:
            self.suspicious = suspicious_sites(self.sites, self)

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

    def part(self, place: Place) -> Tensor | PartFunction:
        """What is put at one place."""
        base = self.batch.base
        part = self.batch.intervention.part(place, base)
        if isinstance(part, Tensor):
            base.model.locate(place).expect(part, base.read(place), place)
        return part

    def edit(self, number: int) -> Edit:
        """An edit that stands in the base."""
        return self.batch.base.edits[number]
