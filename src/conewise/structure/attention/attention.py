"""Attention, found in the graph, and its activations: queries, keys, values, patterns, results by head.

Nothing here knows an architecture. Heads are found by following axes from the products back to
the projections and on to the output projection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conewise.errors import Argument, Piece
from conewise.program.operations import CASTS, REARRANGEMENTS, SELECTIONS
from conewise.program.records import Record, Ref
from conewise.program.sizes import symbols_in
from conewise.structure.attention.operand_axes import (
    axes_above,
    length_of,
    natural_axes,
    operand_axes,
    projection_above,
    split_off,
    through_layout,
    with_head,
)
from conewise.structure.attention.products import AttentionParts, fused, spelled_out
from conewise.structure.axes.axes import Axes, Axis, after, before
from conewise.structure.axes.views import View, view_of
from conewise.structure.wiring.wiring import Wiring


@dataclass(frozen=True, slots=True)
class Activation:
    """A node, and the view of its value in natural axes."""

    node: str
    view: View


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention of the model: its activations by kind; `missing` says why one is not there.

    `core` is the record whose value is the per-head result; `projection` multiplies z by W_O, and reads a
    value of the axes `operand`. `lead` are the axes of the residual stream in front of its features, in the
    order in which they lie there. Both are None where they are not known.
    """

    core: Record
    activations: dict[str, Activation]
    missing: dict[str, tuple[Piece, ...]]
    projection: Record | None
    query_source: str | None
    key_source: str | None
    lead: tuple[Axis, ...] | None = None
    operand: Axes | None = None
    modules: tuple[object, ...] = field(default=())


def find_attention(wiring: Wiring) -> list[Attention]:
    """Every attention over positions, in the order of computation; one over the rows of a batch is none."""
    found = [one for one in (*fused(wiring), *spelled_out(wiring)) if not _is_over_batch(wiring, one)]
    found.sort(key=lambda parts: wiring.order[parts.core.name])
    return [_attention(wiring, parts) for parts in found]


def _is_over_batch(wiring: Wiring, parts: AttentionParts) -> bool:
    batch = wiring.program.dimensions.batch
    sides = [wiring.shape(name) or () for name, _ in (parts.query, parts.key)]
    rows = [size for shape in sides for size in shape[-2:-1]]
    named = [
        axis.length
        for _, axes in (parts.query, parts.key)
        for packed in axes or ()
        for axis in packed
        if axis.name == "pos"
    ]
    return any(not batch.isdisjoint(symbols_in(size)) for size in named or rows)


def _attention(wiring: Wiring, parts: AttentionParts) -> Attention:
    activations: dict[str, Activation] = {}
    missing: dict[str, tuple[Piece, ...]] = {}
    sides = {"q": parts.query, "k": parts.key, "v": parts.value}
    above = {kind: _ancestors(wiring, name) for kind, (name, _) in sides.items()}
    linears: dict[str, Record] = {}
    heads = length_of(parts.query[1], "head")
    for kind, (name, axes) in sides.items():
        others = frozenset().union(*(above[other] for other in sides if other != kind))
        linear = projection_above(wiring, name)
        if linear is None or axes is None:
            missing[kind] = ("its projection could not be determined from the graph",)
            continue
        linears[kind] = linear
        found = _first_activation(wiring, linear, name, axes, above[kind] - others, heads)
        if found is None:
            missing[kind] = ("no value of the graph holds it with its heads apart",)
        else:
            activations[kind] = found
    for kind, side in (("rot_q", parts.query), ("rot_k", parts.key)):
        found = _rotated(wiring, side, heads)
        unrotated = activations.get(kind.removeprefix("rot_"))
        if found is not None and (unrotated is None or found.node != unrotated.node):
            activations[kind] = found
    projection, operand = _add_z(wiring, parts, activations, missing)
    for kind, node in (("attn_scores", parts.scores), ("pattern", parts.pattern)):
        shape = wiring.shape(node) if node else None
        axes = operand_axes(wiring, node, parts.seen) if node else None
        axes = split_off(axes, "query_pos", parts.beside)
        if axes is not None and "fold" not in parts.seen:
            axes = with_head(axes)
        natural = natural_axes(wiring, axes or (), ("batch", "head", "query_pos", "key_pos"))
        if "fold" in parts.seen:
            natural = tuple(name for name in natural if name != "head")
        view = view_of(axes, natural, wiring.program.sizes) if shape else None
        if node and view:
            activations[kind] = Activation(node, view)
        elif node:
            missing[kind] = (f"the axes of {node!r} could not be determined from the graph",)
        else:
            why = (
                "attention is computed by the fused operation scaled_dot_product_attention, which "
                "never holds it. Load the model with "
            )
            missing[kind] = (why, Argument("attn_implementation", "eager"))
    return Attention(
        parts.core,
        activations,
        missing,
        projection,
        _activation(wiring, linears.get("q")),
        _activation(wiring, linears.get("k")),
        _lead(wiring, parts.query, linears.get("q")),
        operand,
    )


def _lead(wiring: Wiring, query: tuple[str, Axes | None], linear: Record | None) -> tuple[Axis, ...] | None:
    """The axes in front of the features, as the projection of the queries has them."""
    name, axes = query
    if axes is None or linear is None:
        return None
    known = axes_above(wiring, name, axes).get(linear.name)
    if known is None:
        return None
    found = tuple(axis for packed in known[:-1] for axis in packed)
    expected = {axis.name for packed in axes for axis in packed} - {"head", "kv_head", "d_head"}
    return found if {axis.name for axis in found} == expected else None


def _activation(wiring: Wiring, linear: Record | None) -> str | None:
    return wiring.operands(linear)[0] if linear is not None else None


def _ancestors(wiring: Wiring, name: str) -> frozenset[str]:
    return frozenset(r.name for r in wiring.upward(name, wiring.is_linear))


def _first_activation(
    wiring: Wiring, linear: Record, operand: str, axes: Axes, own: frozenset[str], heads: object
) -> Activation | None:
    """The earliest value that holds this operand alone, its heads apart, before any arithmetic."""
    prefix = _layout_prefix(wiring, linear) & own
    best: Activation | None = None
    for name, known in axes_above(wiring, operand, axes).items():
        view = _head_view(wiring, known, heads) if name in prefix else None
        if view is not None and not _packs_positions(view):
            best = Activation(name, view) if best is None else _earlier(wiring, best, Activation(name, view))
    return best


def _packs_positions(view: View) -> bool:
    """Whether positions share a dimension, which only values flattened for a projection do."""
    return any("pos" in packed and len(packed) > 1 for packed in view.packing)


def _rotated(wiring: Wiring, side: tuple[str, Axes | None], heads: object) -> Activation | None:
    """What enters the scores: after norms and rotary embedding, keys before they are repeated."""
    name, axes = side
    while axes is not None:
        record = wiring.records.get(name)
        if record is None or record.op not in REARRANGEMENTS | {"repeat_interleave"}:
            break
        operands = wiring.operands(record)
        if not operands:
            break  # learned queries, which no input determines
        axes, name = before(record, axes, wiring.shape(operands[0])), operands[0]
    view = _head_view(wiring, axes, heads)
    return Activation(name, view) if view else None


def _head_view(wiring: Wiring, axes: Axes | None, heads: object) -> View | None:
    """The view in (batch, pos, head, d_head); kv_head where there are fewer heads than queries have."""
    if axes is None:
        return None
    axes = with_head(axes)
    name = "head" if length_of(axes, "head") == (heads or 1) else "kv_head"
    renamed = tuple(tuple(Axis(name, a.length) if a.name == "head" else a for a in packed) for packed in axes)
    natural = ("batch", "pos", name, "d_head")
    return view_of(renamed, natural_axes(wiring, renamed, natural), wiring.program.sizes)


def _earlier(wiring: Wiring, one: Activation, other: Activation) -> Activation:
    return one if wiring.order[one.node] <= wiring.order[other.node] else other


def _layout_prefix(wiring: Wiring, linear: Record) -> frozenset[str]:
    """The projection's value and everything that only rearranges it or takes parts of it."""
    reached, queue = {linear.name}, [linear.name]
    while queue:
        for reader in wiring.readers.get(queue.pop(), ()):
            if reader.op in REARRANGEMENTS | SELECTIONS and reader.name not in reached:
                reached.add(reader.name)
                queue.append(reader.name)
    return frozenset(reached)


def _add_z(
    wiring: Wiring,
    parts: AttentionParts,
    activations: dict[str, Activation],
    missing: dict[str, tuple[Piece, ...]],
) -> tuple[Record | None, Axes | None]:
    """Find z: the last value in front of the output projection that still has its heads apart.

    Returns the projection, and the axes of what it reads.
    """
    axes = split_off(operand_axes(wiring, parts.core.name, parts.result), "pos", parts.beside)
    record = parts.core
    while True:
        view = _head_view(wiring, axes, length_of(parts.query[1], "head"))
        if view is not None and not _packs_positions(view):
            activations["z"] = Activation(record.name, view)
        readers = wiring.readers[record.name]
        if len(readers) != 1 or axes is None:
            break
        if readers[0].op not in REARRANGEMENTS | CASTS:
            break
        record = readers[0]
        axes = after(record, axes)
    if "z" not in activations:
        missing["z"] = ("no value in front of the output projection has its heads apart",)
    found = [
        (reader, known)
        for reader, known in through_layout(wiring, record.name, axes)
        if wiring.is_linear(reader)
    ]
    return found[0] if len(found) == 1 else (None, None)


def weight_of(wiring: Wiring, projection: Record) -> tuple[str, bool] | None:
    """The weight of a projection, and whether it is stored as [out, in]; None if unclear."""
    names = [arg.name for arg in projection.args if isinstance(arg, Ref)]
    match projection.op:
        case "linear":
            return names[1], True
        case "addmm":
            return names[2], False
        case "mm" | "matmul" if names[1] in wiring.parametric:
            return names[1], False
        case _:
            return None
