"""Folding: a model's nodes counted in a few dozen parts, and every cell's cone in them, for drawings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conewise.anatomy.attention import Attention, find_attention
from conewise.anatomy.places import Place, PlaceLike, SourcedPlace, as_place
from conewise.anatomy.residual_names import Layer, find_layers
from conewise.anatomy.selectors import Cell
from conewise.anatomy.wiring import Wiring
from conewise.errors import SweepError
from conewise.program.records import CASTS, REARRANGEMENTS, ModuleCall, Program
from conewise.program.walk import output_names
from conewise.reactive.graph import Graph
from conewise.report.folded import Cone, Folded, Part
from conewise.runs.captured import Captured
from conewise.runs.reading import Reading
from conewise.sweeps.planning.costs import Costs
from conewise.sweeps.planning.layout import Layout
from conewise.sweeps.planning.schedule import schedule


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
    """True if a patch at a place leaves nothing of what would have been there; `whole`: the sweep's do."""
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


ROLES: Mapping[str, tuple[str, str]] = {
    "norm": ("norm", "norm before attention"),
    "qkv": ("q k v", "queries, keys and values"),
    "heads": ("heads", "attention heads"),
    "out": ("out", "attention output"),
    "add": ("+", "stream + attention"),
    "cross_norm": ("norm", "norm before cross-attention"),
    "cross_qkv": ("q k v", "queries, keys and values of cross-attention"),
    "cross_heads": ("cross heads", "cross-attention heads"),
    "cross_out": ("out", "cross-attention output"),
    "cross_add": ("+", "stream + cross-attention"),
    "mlp_norm": ("norm", "norm before the MLP"),
    "mlp": ("MLP", "MLP neurons"),
    "mlp_out": ("out", "MLP output"),
    "mlp_add": ("+", "stream + MLP"),
    "after": ("after", "what follows the last sum"),
    "rest": ("other", "other operations"),
}
"""The roles of a layer's parts in the order of computation: their labels in a drawing, and words for them."""

ENTRANCES: Mapping[str, tuple[str, str]] = {
    "positions": ("positions, mask", "positions and mask, computed once for all layers"),
    "embedding": ("", "makes the stream that enters the layers"),
}
"""The roles of what stands before a stack's layers: labels and words; the embedding has its row's name."""

_MOVES = REARRANGEMENTS | CASTS


@dataclass(slots=True)
class Grouped:
    """The nodes of one part: its row, its role (a column of the drawing), its names, its nodes."""

    row: str
    role: str
    label: str
    meaning: str
    layer: int | None = None
    stack: str = ""
    nodes: list[str] = field(default_factory=list)


def group(program: Program) -> list[Grouped]:
    """The parts of a program, inputs first; every input and every record stands in exactly one of them."""
    wiring = Wiring(program)
    blocks = find_layers(wiring, find_attention(wiring))
    found = list(_by_layer(wiring, blocks) if blocks else _by_module(program))
    inputs = [leaf.name for leaf in program.inputs]
    given = Grouped(
        found[0].row if blocks else "input", "input", "input", "what a run is given", nodes=inputs
    )
    return [given, *found]


# -- a transformer ---------------------------------------------------------------------------


def _by_layer(wiring: Wiring, blocks: list[Layer]) -> Iterator[Grouped]:
    inside: dict[str, int] = {}
    for place, block in enumerate(blocks):
        for name in block.members:
            inside.setdefault(name, place)
    last, feeds = _around(wiring, inside)
    outside = [name for name in wiring.records if name not in inside]
    entrances = _entrances(wiring, blocks, {name for name in outside if name not in last})
    for place, block in enumerate(blocks):
        for role, names in entrances.pop(block.stack, {}).items():
            row = f"{block.stack} embedding".strip()
            label, meaning = ENTRANCES[role]
            yield Grouped(row, role, label or row, meaning, stack=block.stack, nodes=names)
        yield from _layer(wiring, block, [name for name in wiring.records if inside.get(name) == place])
        joined = [name for name in outside if last.get(name) == place and name in feeds]
        if joined:
            label = f"after {block.stack} layer {block.number}".replace("  ", " ")
            yield Grouped(label, "between", label, "between layers", nodes=joined)
    yield from _ending(wiring, [name for name in outside if name in last and name not in feeds])


def _around(wiring: Wiring, inside: Mapping[str, int]) -> tuple[dict[str, int], set[str]]:
    """For each node the last block that it is in or depends on; and the nodes that some block reads."""
    last: dict[str, int] = {}
    for name, record in wiring.records.items():
        above = [last[read] for read in record.inputs if read in last]
        above += [inside[name]] if name in inside else []
        if above:
            last[name] = max(above)
    feeds: set[str] = set()
    for name in reversed(list(wiring.records)):
        if any(reader.name in inside or reader.name in feeds for reader in wiring.readers.get(name, ())):
            feeds.add(name)
    return last, feeds


def _entrances(wiring: Wiring, blocks: list[Layer], unplaced: set[str]) -> dict[str, dict[str, list[str]]]:
    """For each stack what makes the stream that enters it; for the first also what all layers share."""
    made: dict[str, set[str]] = {}
    for block in blocks:
        if block.stack not in made:
            stream = block.nodes.get("resid_pre")
            found = _above(wiring, stream, unplaced) if stream else unplaced & wiring.varying
            made[block.stack] = found.difference(*made.values())
    shared = unplaced.difference(*made.values())
    # Positions that both a stream and the mask are made from stand with the mask, in front.
    shared |= {n for one in shared for n in _above(wiring, one, unplaced) if n not in wiring.varying}
    entrances = {stack: {"embedding": names - shared} for stack, names in made.items()}
    first = blocks[0].stack
    entrances[first] = {"positions": shared, **entrances[first]}
    return {
        stack: {role: [n for n in wiring.records if n in names] for role, names in roles.items() if names}
        for stack, roles in entrances.items()
    }


def _ending(wiring: Wiring, names: list[str]) -> Iterator[Grouped]:
    """Yield the parts behind the layers: a norm up to the first weight, then the projection to outputs."""
    weighted = _weighted(wiring, names)
    roles = dict.fromkeys(weighted, "unembedding")
    _lead(wiring, names, roles, lambda _: "final_norm")
    last = "unembedding" if _reaches_vocabulary(wiring, weighted) else "output"
    for role, label in (("final_norm", "final norm"), ("unembedding", last)):
        found = [name for name in names if roles[name] == role]
        if found:
            yield Grouped("output", role, label, f"{label}, after the last layer", nodes=found)


def _reaches_vocabulary(wiring: Wiring, names: Collection[str]) -> bool:
    """True if a product among `names` has as many outputs as an embedding has rows."""
    rows = {source.name: source.value.shape[:1] for source in wiring.program.sources}
    tables = {
        rows[read]
        for record in wiring.records.values()
        if record.op == "embedding"
        for read in record.inputs
        if read in rows
    }
    shapes = (wiring.shape(name) for name in names)
    return any(shape is not None and tuple(shape[-1:]) in tables for shape in shapes)


def _layer(wiring: Wiring, block: Layer, names: list[str]) -> Iterator[Grouped]:
    roles = _roles(wiring, block, names)
    row = f"{block.stack} {block.number}".strip()
    for role, (label, meaning) in ROLES.items():
        found = [name for name in names if roles[name] == role]
        if found:
            yield Grouped(row, role, label, meaning, block.number, block.stack, found)


def _roles(wiring: Wiring, block: Layer, names: list[str]) -> dict[str, str]:
    """The role of each node of a layer: told by what lies between the sums of its stream."""
    members, nodes = set(names), block.nodes
    roles: dict[str, str] = {}
    last = "mlp_add" if "mlp_out" in nodes else "add"
    for kind, role in (("resid_mid", "add"), ("resid_mid_cross", "cross_add"), ("resid_post", last)):
        if nodes.get(kind) in members:
            roles[nodes[kind]] = role
    for kind, prefix, attention in (
        ("attn_out", "", block.attention),
        ("cross_attn_out", "cross_", block.cross),
    ):
        if attention is not None:
            term = nodes.get(kind, attention.core.name)
            _attention_roles(wiring, attention, _above(wiring, term, members - set(roles)), prefix, roles)
    if "mlp_out" in nodes:
        _mlp_roles(wiring, nodes, _above(wiring, nodes["mlp_out"], members - set(roles)), roles)
    # Sums of several steps lie in front of the last one, a norm of the sum behind it.
    total = nodes.get("resid_post")
    summed = _above(wiring, total, members) if total else set()
    behind = wiring.cone(total, frozenset(members)) if total else frozenset()
    changed = [name for name in names if name in wiring.varying and name not in roles]
    started: set[str] = {*roles}
    for name in changed:
        if any(read in started for read in wiring.records[name].inputs):
            roles[name] = last if name in summed else "after" if name in behind else "rest"
            started.add(name)
    _lead(wiring, names, roles, lambda _: "rest")
    return roles


def _attention_roles(
    wiring: Wiring, attention: Attention, names: set[str], prefix: str, roles: dict[str, str]
) -> None:
    """Norm, q k v, heads, output: cut where queries meet keys, and behind z."""
    within = frozenset(names)
    core, places = attention.core.name, attention.activations
    scored = {core} | wiring.cone(core, within)
    if "rot_q" in places and "rot_k" in places:
        scored |= wiring.cone(places["rot_q"].node, within) & wiring.cone(places["rot_k"].node, within)
    out: frozenset[str] = frozenset()
    if "z" in places and places["z"].node in scored:
        out = wiring.cone(places["z"].node, within)
    elif attention.projection is not None:
        out = wiring.cone(attention.projection.name, within) | {attention.projection.name}
    ordered = [name for name in wiring.records if name in names]
    for name in _weighted(wiring, ordered) | (scored & within):
        roles[name] = prefix + ("out" if name in out else "heads" if name in scored else "qkv")
    _lead(wiring, ordered, roles, lambda name: prefix + "norm" if name in wiring.varying else "")


def _mlp_roles(wiring: Wiring, nodes: Mapping[str, str], names: set[str], roles: dict[str, str]) -> None:
    """Norm, neurons, output: cut behind the neurons where they are known."""
    post = nodes.get("post")
    out = wiring.cone(post, frozenset(names)) if post in names else frozenset()
    ordered = [name for name in wiring.records if name in names]
    for name in _weighted(wiring, ordered):
        roles[name] = "mlp_out" if name in out else "mlp"
    _lead(wiring, ordered, roles, lambda name: "mlp_norm" if name in wiring.varying else "")


def _weighted(wiring: Wiring, names: Iterable[str]) -> set[str]:
    """Those of `names`, given inputs first, that are a product with a weight or depend on one among them."""
    found: set[str] = set()
    for name in names:
        record = wiring.records[name]
        if wiring.is_linear(record) or not found.isdisjoint(record.inputs):
            found.add(name)
    return found


def _lead(wiring: Wiring, names: list[str], roles: dict[str, str], own: Callable[[str], str]) -> None:
    """Give a role to those of `names` that have none: their own, or that of their reader.

    What only moves values about, and what has no role of its own (`own` says ''), belongs to its reader.
    """
    for name in reversed(names):
        if name in roles:
            continue
        read_as = [roles[reader.name] for reader in wiring.readers.get(name, ()) if reader.name in roles]
        role = own(name)
        is_moved = wiring.records[name].op in _MOVES and all(other != role for other in read_as)
        roles[name] = read_as[0] if read_as and (is_moved or not role) else role or "rest"


def _above(wiring: Wiring, name: str | None, members: Collection[str]) -> set[str]:
    """`name` and all it depends on, as far as it lies within `members`."""
    found: set[str] = set()
    stack = [name] if name in members else []
    while stack:
        at = stack.pop()
        if at is not None and at not in found:
            found.add(at)
            stack += [read for read in wiring.records[at].inputs if read in members]
    return found


# -- any other module ------------------------------------------------------------------------


def _by_module(program: Program) -> Iterator[Grouped]:
    """A part for each call of a submodule, and one for each run of operations between such calls.

    The submodules are the outermost that do not hold the whole; a list of layers counts as its layers.
    """
    paths = [record.modules for record in program.records]
    whole = {call for call in paths[0] if all(call in modules for modules in paths)} if paths else set()
    held = {call for modules in paths for call in modules[-1:]} - whole
    for record in program.records:
        for at, call in enumerate(record.modules):
            numbered = record.modules[at + 1 : at + 2]
            if numbered and call not in held and numbered[0].path.rpartition(".")[2].isdigit():
                whole.add(call)
    current: Grouped | None = None
    made: dict[ModuleCall, Grouped] = {}
    for record in program.records:
        outer = next((call for call in record.modules if call not in whole), None)
        if outer is None:
            if current is None:
                current = Grouped(f"between {len(made)}", "ops", "operations", "operations between modules")
                yield current
            current.nodes.append(record.name)
            continue
        current = None
        if outer not in made:
            made[outer] = Grouped(str(outer), "module", str(outer), f"module {outer}")
            yield made[outer]
        made[outer].nodes.append(record.name)
