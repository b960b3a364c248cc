"""Folding: a model's nodes counted in a few dozen parts, and every cell's cone in them, for drawings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conewise.drawing.folded import Cone, Folded, Part
from conewise.drawing.parts import group
from conewise.errors import SweepError
from conewise.locations.places import Place, PlaceLike, SourcedPlace, as_place
from conewise.locations.selectors import Cell
from conewise.program.streaming import output_names
from conewise.reactive.graph import Graph
from conewise.runs.captured import Captured
from conewise.runs.reading import Reading
from conewise.sweeps.planning.schedule import schedule
from conewise.sweeps.planning.shapes.costs import Costs
from conewise.sweeps.planning.shapes.layout import Layout

__all__ = ["Cone", "Folded", "Part", "fold"]


def fold(
    model: Captured,
    cells: Iterable[Cell | PlaceLike],
    *,
    targets: Sequence[str] | None = None,
    base: Reading | None = None,
    whole: bool = True,
) -> Folded:
    """Fold a model by layer, with the cones of these cells: those of a sweep, or places.

    `targets` are the nodes that are demanded (`sweep.targets()`); all outputs where none are given.
    `base` is the baseline: it says how long inputs are, so that FLOPs can be told, and what is patched in
    it already. `whole=False` where patches are functions of what stood there. The sum of the cones is what
    the plan of such a sweep says, exactly.
    """
    graph = model.graph
    demanded = tuple(targets) if targets is not None else output_names(model.program)
    groups = group(model.program)
    part_of = {graph.number(name): at for at, found in enumerate(groups) for name in found.nodes}
    flops = node_flops(model, base)
    parts = tuple(
        Part(
            found.row,
            found.role,
            found.label,
            found.meaning,
            nodes=sum(not graph.is_source(name) for name in found.nodes),
            flops=sum(flops.get(name, 0) for name in found.nodes),
            layer=found.layer,
            stack=found.stack,
        )
        for found in groups
    )
    patches, names, runs = _patches(model, cells, base, whole)
    cones = _cones(model, list(patches), demanded, part_of, len(parts), flops)
    wires = Counter(
        (part_of[read], part_of[reader])
        for reader in part_of
        for read in graph.table.inputs[reader]
        if read in part_of and part_of[read] != part_of[reader]
    )
    support = [n for n in model.support(demanded) if graph.table.rules[n] is not None]
    return Folded(
        model=model.name,
        parts=parts,
        edges=tuple((a, b, count) for (a, b), count in sorted(wires.items())),
        cones=tuple(replace(cone, names=tuple(names[at])) for at, cone in enumerate(cones)),
        runs=runs,
        demanded=demanded,
        full_evaluations=len(support),
        full_flops=sum(flops.get(graph.name(number), 0) for number in support),
    )


Patched = tuple[tuple[int, bool], ...]


def _patches(
    model: Captured, cells: Iterable[Cell | PlaceLike], base: Reading | None, whole: bool
) -> tuple[dict[Patched, int], list[dict[str, None]], tuple[tuple[int, int], ...]]:
    """The sets of patched nodes (and whether whole), each once; the names of the places there; the runs."""
    found: dict[Patched, int] = {}
    names: list[dict[str, None]] = []
    known: dict[tuple[tuple[str, int | None, str, bool], ...], int] = {}
    runs: list[list[int]] = []
    for cell in cells:
        places = cell.places if isinstance(cell, Cell) else (as_place(cell),)
        key = tuple((p.name, p.layer, p.stack, _is_whole(p, whole)) for p in places)
        if key not in known:
            bare = [(Place(name, layer, stack), is_whole) for name, layer, stack, is_whole in key]
            known[key] = found.setdefault(_patched(model, bare, base), len(found))
            if known[key] == len(names):
                names.append({})
            names[known[key]][" + ".join(str(place) for place, _ in bare)] = None
        if runs and runs[-1][0] == known[key]:
            runs[-1][1] += 1
        else:
            runs.append([known[key], 1])
    return found, names, tuple((cone, count) for cone, count in runs)


def _is_whole(place: Place, whole: bool) -> bool:
    """Whether a patch at a place leaves nothing of what would have been there; `whole`: the sweep's do."""
    replaces = not place.is_function if isinstance(place, SourcedPlace) else whole
    return replaces and not place.part


def _patched(model: Captured, places: Iterable[tuple[Place, bool]], base: Reading | None) -> Patched:
    """The nodes that a world patches: the cell's, and those of the base's own that it must patch again."""
    graph = model.graph
    patched: dict[int, bool] = {}
    calls = ((one, is_whole) for place, is_whole in places for one in model.each_call([place]))
    for place, is_whole in calls:
        found = model.locate(place)
        if found.result is not None:
            raise SweepError(
                f"{place} is computed from z and is no node of the graph: it has no cone of its own. Ask "
                "for the cone of z, which includes it."
            )
        number = graph.number(found.node)
        patched[number] = patched.get(number, False) or is_whole
    standing = base.edits if base is not None else ()
    if standing:
        cone = graph.table.cone(list(patched))
        for edit in standing:
            number = graph.number(edit.node)
            if number in cone:
                patched[number] = patched.get(number, False) or edit.covers
    return tuple(sorted(patched.items()))


def _computed(graph: Graph, worlds: Sequence[Mapping[int, bool]], targets: Iterable[str]) -> dict[int, int]:
    """In which worlds each node is computed, by its number."""
    patched: dict[str, int] = {}
    whole: dict[str, int] = {}
    for world, own in enumerate(worlds):
        for number, is_whole in own.items():
            node = graph.name(number)
            patched[node] = patched.get(node, 0) | 1 << world
            if is_whole:
                whole[node] = whole.get(node, 0) | 1 << world
    steps = schedule(graph, patched, whole, len(worlds), tuple(targets)).steps
    return {graph.number(node): mask for node, mask in steps}


def _cones(
    model: Captured,
    patches: Sequence[Patched],
    demanded: Sequence[str],
    part_of: Mapping[int, int],
    parts: int,
    flops: Mapping[str, int],
) -> list[Cone]:
    """The cones of worlds that patch these nodes, all counted together: a world is a bit of a mask."""
    graph, table = model.graph, model.graph.table
    worlds = [dict(patched) for patched in patches]
    targets = graph.numbers(demanded)
    computed = _computed(graph, worlds, demanded)
    # A baseline has computed what its outputs need; of that, all is invalid that a patch reaches.
    valid = [n for n in model.support(output_names(model.program)) if table.rules[n] is not None]
    lost = _computed(graph, worlds, graph.names(valid)) if worlds else {}
    read: dict[int, int] = dict.fromkeys(targets, (1 << len(worlds)) - 1)
    for node, mask in computed.items():
        for site in table.inputs[node]:
            read[site] = read.get(site, 0) | mask
    reused = {n: mask & ~computed.get(n, 0) for n, mask in read.items() if table.rules[n] is not None}
    cost = {node: flops.get(graph.name(node), 0) for node in computed}
    rows = [
        _tallied(masks, part_of, parts, len(worlds), weights)
        for masks, weights in ((computed, None), (lost, None), (reused, None), (computed, cost))
    ]
    return [
        Cone(
            names=(),
            sites=graph.names(node for node, _ in patched),
            at=tuple(dict.fromkeys(part_of[node] for node, _ in patched)),
            recomputed=tuple(rows[0][world].tolist()),
            invalidated=tuple(rows[1][world].tolist()),
            reused=tuple(rows[2][world].tolist()),
            flops=tuple(rows[3][world].tolist()),
        )
        for world, patched in enumerate(patches)
    ]


def _tallied(
    masks: Mapping[int, int],
    part_of: Mapping[int, int],
    parts: int,
    worlds: int,
    weights: Mapping[int, int] | None,
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[world, part]: the number, or the weight, of the nodes of the part whose mask has the world's bit."""
    tally = np.zeros((parts, worlds), dtype=np.int64)
    size = (worlds + 7) // 8
    for node, mask in masks.items():
        if node in part_of:
            bits = np.unpackbits(np.frombuffer(mask.to_bytes(size, "little"), np.uint8), bitorder="little")
            tally[part_of[node]] += bits[:worlds].astype(np.int64) * (1 if weights is None else weights[node])
    return tally.T


def node_flops(model: Captured, base: Reading | None) -> dict[str, int]:
    """The floating-point operations of each node, for inputs as long as the base's."""
    if base is None:
        return {}
    program = model.program
    given = {name: tuple(value.shape) for name, value in base.inputs.items()}
    symbols = program.sizes.symbols_of({leaf.name: leaf.shape for leaf in program.inputs}, given)
    costs = Costs(program, Layout(program, symbols))
    return {record.name: costs.flops(record.name) for record in program.records}
