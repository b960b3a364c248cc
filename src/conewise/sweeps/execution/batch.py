"""One baseline of a sweep, and what is put into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from conewise.anatomy.components import Reader
from conewise.anatomy.places import EdgePlace, Place, SourcedPlace, Writers
from conewise.circuits.replaced_parts import (
    EdgeFacts,
    Mask,
    Norms,
    edge_facts,
    mixed,
    mostly_kept,
    part_norms,
)
from conewise.circuits.walks import some_of
from conewise.errors import NAN_OF_PADDING, EdgeError, PatchError
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
from conewise.runs.interventions import Intervention
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.runs.values import reader
from conewise.sweeps.planning.layout import Layout
from conewise.sweeps.planning.planner import facts_of

PartFunction = Callable[[Tensor], Tensor]
Site = tuple[str, int | None, str]
"""A site by its name, layer and stack."""


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

    @property
    def runs(self) -> list[Reading]:
        """The base, and the source where there is one."""
        return [self.base] if self.source is None else [self.base, self.source]

    @cached_property
    def edges(self) -> EdgeValues:
        """The values that edges put in."""
        return EdgeValues(self.base, self.source, self.intervention)

    def part(self, place: Place) -> Tensor | PartFunction:
        """Return what a world puts at one place."""
        if isinstance(place, EdgePlace):
            return self.edges.part(place)
        if isinstance(place, SourcedPlace):
            return self.own[place.number].part(place, self.base)
        return self.intervention.part(place, self.base)

    def expect_possible(self, cells: Sequence[Sequence[Place]]) -> None:
        """Raise PatchError where nothing meaningful can be put at the places of some cell."""
        for number, put in ((None, self.intervention), *enumerate(self.own)):
            if put.expect_base is not None:
                given = cells
                if self.own:
                    own = [[one for one in cell if getattr(one, "number", None) == number] for cell in cells]
                    given = [places for places in own if places]
                put.expect_base(given, self.base)

    def seen(self, place: EdgePlace) -> tuple[Tensor, bool]:
        """Return what the reader of an edge sees more than in the base; or all that it sees, and True."""
        return self.edges.seen(place)


# ------------------------------------------------------------------------------------------
# What edges put into the sites of their readers, for many writers at once.
#
# In the world of an edge its reader sees the stream with another part of its writer. What lies between the
# stream and the reader's site is computed for all writers together; then it is a patch like others.


def edge_stacks(model: Captured) -> list[EdgeFacts]:
    """Return what is known of the edges of each stack that has some."""
    found = []
    for stack in dict.fromkeys(layer.stack for layer in model.site_table.model_layers):
        try:
            found.append(edge_facts(model, stack))
        except EdgeError:
            continue
    return found


def _reading(run: Reading) -> Callable[[str], Any]:
    """Reads values of a run by the graph's own names, each once; weights are the model's."""
    weights, values = run.model.program.source_values, reader(run)
    return lambda name: weights[name] if name in weights else values(name)


@dataclass(slots=True)
class _Written:
    """Change of what writers write, [writer, batch, pos, d_model], and what they are given.

    `norms` are those of their own parts and of what they are given; `constants` are the base's, by entry.
    """

    more: Tensor
    norms: tuple[Norms, Norms]
    given: Tensor | None
    constants: dict[str, Tensor] = field(default_factory=dict)
    near: dict[int, Mask] = field(default_factory=dict)

    def is_near(self, count: int) -> Mask:
        """[writer]: True where the streams that so many writers wrote are mostly kept without its part."""
        if count not in self.near:
            gone, put = (norms[:count] for norms in self.norms)
            self.near[count] = mostly_kept(gone, put, gone.sum(0))
        return self.near[count]


class EdgeValues:
    """Values that the edges of a model put into one base, by an intervention on what their writers wrote."""

    def __init__(self, base: Reading, source: Reading | None, intervention: Intervention) -> None:
        self._base, self._source, self._intervention = base, source, intervention
        self._read = _reading(base)
        self._written: dict[str, _Written] = {}
        self._last: tuple[tuple[str, tuple[Writers, ...], str], Tensor] | None = None
        self._last_live: tuple[tuple[str, tuple[Writers, ...], str], Tensor] | None = None
        self._last_both: tuple[tuple[int, str], tuple[Tensor, Tensor]] | None = None
        self._evaluations = self._calls = 0

    def counted(self) -> tuple[int, int]:
        """Return how many nodes were computed, and by how many calls, since this was last asked.

        It is asked behind every pass: nothing is kept for the next.
        """
        self._last = self._last_live = self._last_both = None
        found = self._evaluations, self._calls
        self._evaluations = self._calls = 0
        return found

    def part(self, place: EdgePlace) -> Tensor:
        """Return what the world of one edge puts in."""
        located = self._base.model.locate(place)
        site = place.name, place.layer, place.stack
        node = self._computed(site, (place.written_by,), 1, place.live)
        self._last = None
        return located.read(node, self._base._sizes)

    def seen(self, place: EdgePlace) -> tuple[Tensor, bool]:
        """Return what the reader of an edge sees more than in the base, shaped like its entry's value.

        Or what it sees, and True: where so much goes that what it sees more is nearly all of the stream.
        """
        facts = self.facts_at(place.entry)
        (seen,) = self._streams(facts, place.entry, (place.written_by,), place.live)
        stream = facts.parts.stream(self._read, place.entry)
        norms, whole = part_norms(seen[None]), part_norms(stream[None])
        is_whole = bool((2 * norms < whole).any())
        found = seen if is_whole else seen - stream
        return facts.parts.views.as_node(place.entry, found), is_whole

    def of_edges(self, site: Site, writers: Sequence[Writers], at_once: int, live: str = "") -> Tensor:
        """A site in natural axes as edges from these writers make it: [writer, ...]."""
        located = self._base.model.locate(Place(*site))
        stack = self._computed(site, tuple(writers), at_once, live)
        dim = self._layout.batch_dim[located.node]
        assert dim is not None
        each = stack.unflatten(dim, (len(writers), -1)).movedim(dim, 0)  # type: ignore[no-untyped-call]
        return located.view.present(each, self._layout.sizes(1), leading=1)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _computed(self, site: Site, writers: tuple[Writers, ...], at_once: int, live: str) -> Tensor:
        """The node of a site for streams that hold another part of each of these writers, stacked."""
        if site not in self._readers:
            raise EdgeError(f"no edge of this model leads into {Place(*site)}: it was made for another one.")
        one, facts = self._readers[site]
        key = one.node, writers, live
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None
        made: list[Tensor] = []
        for first in range(0, len(writers), at_once):
            own = writers[first : first + at_once]
            rows = self._streams(facts, one.entry, own, live).flatten(0, 1)
            made.append(facts.readers.values(one.entry, (one.slot,), rows, self._read)[one.slot])
            steps = facts.readers.count(one.entry, (one.slot,))
            self._evaluations += steps * len(own)
            self._calls += steps
        dim = self._layout.batch_dim[one.node]
        assert dim is not None
        stack = made[0] if len(made) == 1 else torch.cat(made, dim)
        self._last = key, stack
        return stack

    def changes_at(self, entry: str, *, is_checked: bool = True) -> Tensor:
        """[writer, batch, pos, d_model]: what each writer would write more, where the stream is read.

        Raises PatchError where that has NaN in it, unless it is not `is_checked`: then no host waits for it.
        """
        facts = self.facts_at(entry)
        if is_checked:
            return self._parts(facts, entry).more
        with torch.no_grad():
            own, given = self._both(facts, entry)
            return given - own

    def _streams(self, facts: EdgeFacts, entry: str, writers: tuple[Writers, ...], live: str) -> Tensor:
        """[writer, batch, pos, d_model]: the stream at `entry` with what each of these writers is given."""
        if live:
            return self._live_streams(facts, entry, writers, live)
        written, count = self._parts(facts, entry), facts.components.entries[entry][0].writers
        stream = facts.parts.stream(self._read, entry)
        groups = [[one] if isinstance(one, int) else list(one) for one in writers]
        if isinstance(writers[0], int):
            own = [one for group in groups for one in group]
            rows, is_near = stream + some_of(written.more, own), written.is_near(count)[own]
        else:
            rows = stream + torch.stack([written.more[group].sum(0) for group in groups])
            gone, put = (np.stack([norms[group].sum(0) for group in groups]) for norms in written.norms)
            is_near = mostly_kept(gone, put, written.norms[0][:count].sum(0))
        if not is_near.all():
            far = np.flatnonzero(~is_near)
            lost = np.zeros((len(far), count), dtype=bool)
            for row, at in enumerate(far):
                lost[row, groups[at]] = True
            with torch.no_grad():
                parts, given = (one[:count] for one in self._both(facts, entry))
                if entry not in written.constants:
                    written.constants |= facts.parts.constants(self._read)
                found = mixed(~lost, parts) + mixed(lost, given) + written.constants[entry]
            rows[torch.from_numpy(far).to(rows.device)] = found.to(rows.dtype)
        return rows

    def _live_streams(self, facts: EdgeFacts, entry: str, writers: tuple[Writers, ...], live: str) -> Tensor:
        """The same, where components between are computed anew."""
        key = entry, writers, live
        if self._last_live is None or self._last_live[0] != key:
            if self._source is None:
                raise EdgeError(
                    "paths through live components take what senders put out from a source run. Give one as "
                    "`source`, or freeze all between sender and receiver: freeze='all'."
                )
            self._last_live = None
            own = [writer for writer in writers if isinstance(writer, int)]
            with torch.no_grad():
                seen = facts.live.streams(entry, own, live, self._read, _reading(self._source))
            if bool(torch.isnan(seen).any()):
                raise PatchError(
                    f"what the source puts out has NaN in it; nothing was patched. {NAN_OF_PADDING}"
                )
            self._last_live = key, seen
        return self._last_live[1]

    def _parts(self, facts: EdgeFacts, entry: str) -> _Written:
        """Return what each writer would write in the place of its own part, at a value of the stream."""
        parts = facts.parts
        key = "" if parts.is_carried_unchanged else entry
        if key not in self._written:
            with torch.no_grad():
                own, given = self._both(facts, entry)
                more = given - own
                norms = part_norms(own), part_norms(given)
            if bool(torch.isnan(more).any()):
                which = "the base writes" if bool(torch.isnan(own).any()) else "is written instead"
                raise PatchError(
                    f"what {which} into the stream has NaN in it; nothing was patched. {NAN_OF_PADDING}"
                )
            if key:
                self._written.clear()
            # A run writes the same once more, and what a function or noise wrote is kept.
            self._written[key] = _Written(more, norms, None if self._intervention.is_run else given)
        return self._written[key]

    def _both(self, facts: EdgeFacts, entry: str) -> tuple[Tensor, Tensor]:
        """The parts of the writers before `entry`, or of all, and what they are given; kept for a pass."""
        key = "" if facts.parts.is_carried_unchanged else entry
        if self._last_both is None or self._last_both[0] != (id(facts), key):
            self._last_both = None
            found = facts.parts.parts(self._read, key or None), self._given(facts, entry)
            self._last_both = (id(facts), key), found
        return self._last_both[1]

    def _given(self, facts: EdgeFacts, entry: str) -> Tensor:
        """[writer, batch, pos, d_model]: what each writer is given in the place of its own part."""
        key = "" if facts.parts.is_carried_unchanged else entry
        known = self._written[key].given if key in self._written else None
        if known is not None:
            return known
        put = self._intervention
        if put.written is None:
            raise EdgeError(
                f"edges cannot be patched with {put.name}: it does not say what a component would write "
                "instead. Give a run, 'zero', 'mean', `mean(...)`, `noise(...)`, `add(...)`, a function."
            )
        return put.written(lambda run: facts.parts.parts(self._reading(run), key or None), self._base, entry)

    def _reading(self, run: Reading) -> Callable[[str], Any]:
        return self._read if run is self._base else _reading(run)

    @cached_property
    def _layout(self) -> Layout:
        return facts_of(self._base.model).shape(self._base.inputs).layout

    @cached_property
    def _known(self) -> dict[str, EdgeFacts]:
        """The facts of each stack, by the values of its stream that are read."""
        stacks = edge_stacks(self._base.model)
        return {entry: facts for facts in stacks for entry in facts.components.entries}

    @cached_property
    def _readers(self) -> dict[Site, tuple[Reader, EdgeFacts]]:
        """One of the readers that are patched at each site: all read the stream in the same place."""
        stacks = {id(facts): facts for facts in self._known.values()}.values()
        return {one.site: (one, facts) for facts in stacks for one in facts.components.readers}

    def facts_at(self, entry: str) -> EdgeFacts:
        """The facts of the stack whose stream is read there. Raises EdgeError where none of this model is."""
        if entry not in self._known:
            raise EdgeError(f"no edge of this model reads the stream at {entry!r}: it was made for another.")
        return self._known[entry]
