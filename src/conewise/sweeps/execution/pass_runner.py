"""A pass that runs again and again: on CUDA it is recorded once as a graph, and then replayed.

A replay launches no kernel from Python, so what is left is the work itself. Recording pays where shapes
repeat: chunks of one size, prompts of one length, the same sweep run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from conewise.locations.located import Located
from conewise.locations.places import Place, Writers
from conewise.program.tensors import computing
from conewise.runs.edit import Edit
from conewise.sweeps.execution.cuda_graph import Record, Replayed
from conewise.sweeps.execution.fills import PartFunction, PassFills, Site, Values
from conewise.sweeps.execution.wavefront import ReadValue, Wavefront
from conewise.sweeps.planning.passes.instructions import PassProgram

Tensor = torch.Tensor


class PassRunner:
    """One pass of a plan, ready to run over any baseline of its shape.

    The first run is eager. With `record`, and where all that is put in are tensors, the second one records a
    graph over slots for what the pass reads of baselines, and every further run is a replay. `reads` are the
    nodes whose values in the base it reads.
    """

    def __init__(
        self,
        wavefront: Wavefront,
        program: PassProgram,
        fills: PassFills,
        reads: tuple[str, ...] = (),
        record: Record | None = None,
    ) -> None:
        self._wavefront, self.program, self.fills = wavefront, program, fills
        self._names = tuple(name for name in reads if name in wavefront.layout.varying)
        self._record = record
        self._replayed: Replayed | None = None
        self._held: dict[str, Any] = {}  # constants that the graph reads: they must outlive their run
        self._runs = 0

    @property
    def held(self) -> int:
        """What the graph holds that is replayed, in bytes; 0 where there is none."""
        return 0 if self._replayed is None else self._replayed.held

    def run(
        self,
        read: ReadValue,
        values: Values,
        columns: Mapping[str, Tensor],
        room_for: Callable[[int], None] | None = None,
        *,
        stays: bool = False,
    ) -> dict[str, Tensor]:
        """The targets in all worlds, stacked. They hold until the next run.

        `room_for` is told before bytes are taken, where operations are run one by one. With `stays`, what is
        read of the baselines lies where it lay at the last run and will lie at the next.
        """
        self._runs += 1
        given = None if self._record is None or self._runs == 1 else self._given(read, values, columns)
        if given is None:
            return self._wavefront.run(self.program, read, self.fills, values, room_for, columns=columns)
        with computing():
            if self._replayed is None:
                self._replayed = self._recorded(given, read, values, columns, stays)
            return self._replayed.run(given)

    def _given(
        self, read: ReadValue, values: Values, columns: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        """All that changes from run to run, by name; None where some of it is no tensor."""
        if self.fills.has_edits() or self.fills.has_edges() or self.fills.has_own():
            return None
        found: dict[str, Any] = {name: read(name) for name in self._names}
        found |= {_site_slot(site): values.whole(site) for site in self.fills.sites()}
        found |= {_column_slot(node): index for node, index in columns.items()}
        return found if all(isinstance(one, torch.Tensor) for one in found.values()) else None

    def _recorded(
        self,
        given: Mapping[str, Tensor],
        read: ReadValue,
        values: Values,
        columns: Mapping[str, Tensor],
        stays: bool,
    ) -> Replayed:
        """The pass, recorded over slots for all that changes from run to run."""
        assert self._record is not None
        own = {_column_slot(node) for node in columns}
        slots = {name: value if stays and name not in own else value.clone() for name, value in given.items()}

        def action(slot: Mapping[str, Tensor]) -> dict[str, Tensor]:
            def from_slots(name: str) -> Any:
                if name in slot:
                    return slot[name]
                if name not in self._held:
                    self._held[name] = read(name)
                return self._held[name]

            sites = {site: slot[_site_slot(site)] for site in self.fills.sites()}
            picked = {node: slot[_column_slot(node)] for node in columns}
            put = _Slotted(sites, values)
            return self._wavefront.run(self.program, from_slots, self.fills, put, columns=picked)

        return Replayed(action, slots, self._record)


def _site_slot(site: Site) -> str:
    return f"site {site}"


def _column_slot(node: str) -> str:
    return f"columns of {node}"


class _Slotted:
    """Values from slots, which are written to before each replay; edits of the base are its own."""

    def __init__(self, slots: dict[Site, Tensor], values: Values) -> None:
        self._slots, self._values = slots, values

    def whole(self, site: Site) -> Tensor | None:
        return self._slots[site]

    def of_edges(self, site: Site, writers: Sequence[Writers], at_once: int, live: str) -> Tensor:
        return self._values.of_edges(site, writers, at_once, live)

    def own_whole(self, site: Site, source: int) -> Tensor | None:
        return self._values.own_whole(site, source)

    def own_rows(self, located: Located, sources: tuple[int, ...], like: Tensor) -> Tensor:
        return self._values.own_rows(located, sources, like)

    def part(self, place: Place) -> Tensor | PartFunction:
        return self._values.part(place)

    def edit(self, number: int) -> Edit:
        return self._values.edit(number)
