"""Where a sweep's changes begin: read off the inputs and the places, before anything is computed.

In a causal model, runs whose inputs agree up to a position agree in every value up to there. So the first
position at which base and source inputs differ is the first that a patch from the source can change.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conewise.runs.reading import Reading
from conewise.structure.axes.views import View
from conewise.sweeps.planning.passes.fill_tables import PlaceGroup
from conewise.sweeps.planning.shapes.layout import Layout
from conewise.sweeps.planning.shapes.regions import RegionFinder


def first_changes(
    groups: Sequence[PlaceGroup],
    numbers: Sequence[Sequence[tuple[int, ...]]],
    cells: int,
    finder: RegionFinder,
    layout: Layout,
    from_source: Mapping[str, int],
) -> tuple[int, ...]:
    """For each cell, the first position that it changes; 0 where nothing is known.

    `from_source` has the nodes whose values in the source differ from the base's from a position on only.
    """
    length = only_length(layout)
    found = [length] * cells
    for group, own in zip(groups, numbers, strict=True):
        if "pos" in group.axes and _shows_positions(group, finder):
            at = group.axes.index("pos")
            for cell, index in zip(group.cells, own, strict=True):
                found[cell] = min(found[cell], index[at])
            continue
        start = _start(group, length, finder, from_source)
        for cell in group.cells:
            found[cell] = min(found[cell], start)
    return tuple(found)


def only_length(layout: Layout) -> int:
    """How many positions a run has; 0 where its inputs have several lengths, or none."""
    lengths = layout.lengths
    return next(iter(lengths)) if len(lengths) == 1 else 0


def _start(group: PlaceGroup, length: int, finder: RegionFinder, from_source: Mapping[str, int]) -> int:
    """The first position of a group that selects no single one."""
    if not finder.has_rows(group.node) or "pos" in group.axes:
        return 0
    part = group.place.part.get("pos")
    if part is None:
        if group.sources is not None:
            return 0  # what is not the source's differs from the base anywhere
        return from_source.get(group.node, 0)
    return first_position(part, length) if _shows_positions(group, finder) else 0


def _shows_positions(group: PlaceGroup, finder: RegionFinder) -> bool:
    view: View = group.located.site.view or group.located.view
    return finder.has_rows(group.node) and finder.shows_positions(group.node, view)


def first_position(part: Any, length: int) -> int:
    """The first of the positions that are selected."""
    rows = range(length)
    picked = [rows[part]] if isinstance(part, int) else rows[part] if isinstance(part, slice) else part
    return min((row % length for row in picked), default=0)


@torch.no_grad()
def first_difference(
    base: Reading, source: Reading, finder: RegionFinder, layout: Layout
) -> tuple[int, frozenset[str]]:
    """The first position at which two runs can differ, and the inputs that do.

    They differ in their inputs, or where either was patched; where nothing does, it is the last position. The
    device is waited for once.
    """
    length = only_length(layout)
    if not length:
        return 0, frozenset()
    found, differing, whole = length - 1, set[str](), set[str]()
    for run in (base, source):
        for edit in run.edits:
            part = edit.place.part.get("pos")
            view = edit.found.site.view or edit.found.view
            if part is None or not finder.shows_positions(edit.node, view):
                return 0, frozenset()
            found = min(found, first_position(part, length))
    if not base.inputs.keys() <= source.inputs.keys():
        return 0, frozenset()
    flags: dict[str, torch.Tensor] = {}
    for name, value in base.inputs.items():
        differs = value != source.inputs[name]
        dim, batch = layout.pos_dim.get(name), layout.batch_dim.get(name)
        if dim is None or layout.length(name) != length or (dim == batch and not finder.has_rows(name)):
            flags[name] = differs.any().reshape(1)
            whole.add(name)
            continue
        if dim == batch:
            differs, dim = differs.unflatten(dim, (-1, length)), dim + 1  # type: ignore[no-untyped-call]
        flags[name] = differs.movedim(dim, 0).reshape(differs.shape[dim], -1).any(1)
    for name, rows in _read(flags).items():
        if True in rows:
            if name in whole:
                return 0, frozenset()
            found = min(found, rows.index(True))
            differing.add(name)
    return found, frozenset(differing)


def _read(flags: Mapping[str, torch.Tensor]) -> dict[str, list[bool]]:
    """The flags of each name, read at once where they lie on one device."""
    if len({one.device for one in flags.values()}) > 1:
        return {name: one.tolist() for name, one in flags.items()}
    together = iter(torch.cat(list(flags.values())).tolist() if flags else [])
    return {name: list(itertools.islice(together, len(one))) for name, one in flags.items()}
