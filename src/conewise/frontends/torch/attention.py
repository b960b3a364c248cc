"""Attention, found in the graph: two matrix products with a softmax between, or the fused op.

Nothing here knows an architecture. Heads are told by following axes from the products back to
the projections and on to the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from conewise.frontends.torch.axes import Axes, Axis, after, before, one_per_dimension
from conewise.frontends.torch.records import Record, Ref
from conewise.frontends.torch.sizes import coefficient
from conewise.frontends.torch.views import View, view_of
from conewise.frontends.torch.wiring import LAYOUT, PARTS, Wiring

_SCORE_OPS = LAYOUT | frozenset(
    {"add", "sub", "mul", "div", "masked_fill", "where", "to", "_to_copy", "tanh", "type_as", "float"}
)
_WEIGHT_OPS = LAYOUT | frozenset({"to", "_to_copy", "type_as", "mul"})


@dataclass(frozen=True, slots=True)
class Place:
    """A node, and how its value is shown in natural axes."""

    node: str
    view: View


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention of the model: where its parts lie, by kind; `missing` says why one is not there.

    `core` is the record whose value is the per-head result; `projection` multiplies z by W_O.
    """

    core: Record
    places: dict[str, Place]
    missing: dict[str, str]
    projection: Record | None
    query_source: str | None
    key_source: str | None
    modules: tuple[object, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class _Parts:
    """The operands of an attention with their axes, and the records in between."""

    core: Record
    query: tuple[str, Axes | None]
    key: tuple[str, Axes | None]
    value: tuple[str, Axes | None]
    scores: str | None
    pattern: str | None
    result: tuple[str, ...] = ("batch", "head", "pos", "d_head")


def find_attention(wiring: Wiring) -> list[Attention]:
    """Every attention of the program, in the order of computation."""
    found = [*_fused(wiring), *_spelled_out(wiring)]
    found.sort(key=lambda parts: wiring.order[parts.core.name])
    return [_attention(wiring, parts) for parts in found]


def _fused(wiring: Wiring) -> Iterator[_Parts]:
    for record in wiring.program.records:
        if record.op == "scaled_dot_product_attention":
            query, key, value = (arg.name for arg in record.args[:3])
            names = ("batch", "head", "pos", "d_head")
            yield _Parts(
                record,
                (query, _operand_axes(wiring, query, names)),
                (key, _operand_axes(wiring, key, names)),
                (value, _operand_axes(wiring, value, names)),
                None,
                None,
            )


def _spelled_out(wiring: Wiring) -> Iterator[_Parts]:
    for record in wiring.program.records:
        if record.op not in {"softmax", "_softmax"} or record.name not in wiring.varying:
            continue
        scores = str(record.args[0].name)
        above = next(_products_above(wiring, scores), None)
        below = _product_below(wiring, record)
        if above is None or below is None:
            continue
        core, pattern = below
        left, right = wiring.factors(above)
        weights, value = wiring.factors(core)
        names = _names(above, core)
        if weights != pattern or names is None:
            continue
        yield _Parts(
            core,
            (left, _operand_axes(wiring, left, names[0])),
            (right, _operand_axes(wiring, right, names[1])),
            (value, _operand_axes(wiring, value, names[2])),
            scores,
            pattern,
            names[3],
        )


def _names(above: Record, core: Record) -> tuple[tuple[str, ...], ...] | None:
    """The axes' names of queries, keys, values and result, as the two products have them."""
    scores, result = _letters(above), _letters(core)
    if scores is None or result is None:
        return None
    (left, right, out), (weights, value, last) = scores, result
    shared = [letter for letter in out if letter in left and letter in right]
    summed = [letter for letter in left if letter in right and letter not in out]
    keys = [letter for letter in weights if letter in value and letter not in last]
    if len(summed) != 1 or len(keys) != 1 or len(weights) != len(out):
        return None
    if len(shared) != 2 or not out.startswith("".join(shared)) or out[-1] not in right:
        return None  # only scores that lie as [batch, head, query_pos, key_pos]
    above_names = {shared[0]: "batch", shared[1]: "head", summed[0]: "d_head"}
    core_names = {weights[out.index(s)]: n for s, n in above_names.items() if s in out}
    core_names |= {letter: "pos" for letter in weights if letter not in core_names}
    return (
        tuple(above_names.get(letter, "pos") for letter in left),
        tuple(above_names.get(letter, "pos") for letter in right),
        tuple(core_names.get(letter, "d_head") for letter in value),
        tuple(core_names.get(letter, "d_head") for letter in last),
    )


def _letters(product: Record) -> tuple[str, str, str] | None:
    """The axes of a product as `einsum` writes them: (left, right, result)."""
    if product.op != "einsum":
        return "bhij", "bhjk", "bhik"
    equation = str(product.args[0]).replace(" ", "")
    factors, _, result = equation.partition("->")
    left, _, right = factors.partition(",")
    return (left, right, result) if equation.replace("->", "").replace(",", "").isalpha() else None


def _products_above(wiring: Wiring, scores: str) -> Iterator[Record]:
    def stop(record: Record) -> bool:
        return record.op not in _SCORE_OPS

    for record in wiring.upward(scores, stop):
        if wiring.is_product(record):
            yield record


def _product_below(wiring: Wiring, softmax: Record) -> tuple[Record, str] | None:
    """The product that reads the softmax's value, and the name under which it does."""
    queue = [softmax.name]
    while queue:
        name = queue.pop(0)
        for reader in wiring.readers.get(name, ()):
            if wiring.is_product(reader):
                return reader, name
            if reader.op in _WEIGHT_OPS:
                queue.append(reader.name)
    return None


def _operand_axes(wiring: Wiring, name: str, names: Sequence[str]) -> Axes | None:
    """The axes of a factor: its last two dimensions, and batch and head before them."""
    shape = wiring.shape(name)
    if shape is None or not 3 <= len(shape) <= 4:
        return None
    if len(shape) == 4:
        return one_per_dimension(names, shape)
    tail = one_per_dimension(names[2:], shape[1:])
    heads, batch = coefficient(shape[0])
    packed = (Axis("batch", batch), Axis("head", heads)) if heads != 1 else (Axis("batch", batch),)
    return (packed, *tail)


def _attention(wiring: Wiring, parts: _Parts) -> Attention:
    places: dict[str, Place] = {}
    missing: dict[str, str] = {}
    sides = {"q": parts.query, "k": parts.key, "v": parts.value}
    above = {kind: _ancestors(wiring, name) for kind, (name, _) in sides.items()}
    linears: dict[str, Record] = {}
    heads = _length(parts.query[1], "head")
    for kind, (name, axes) in sides.items():
        others = frozenset().union(*(above[other] for other in sides if other != kind))
        linear = _projection_above(wiring, name)
        if linear is None or axes is None:
            missing[kind] = "its projection could not be told from the graph"
            continue
        linears[kind] = linear
        place = _first_place(wiring, linear, name, axes, above[kind] - others, heads)
        if place is None:
            missing[kind] = "no value of the graph holds it with its heads apart"
        else:
            places[kind] = place
    for kind, side in (("rot_q", parts.query), ("rot_k", parts.key)):
        place = _rotated_place(wiring, side, heads)
        unrotated = places.get(kind.removeprefix("rot_"))
        if place is not None and (unrotated is None or place.node != unrotated.node):
            places[kind] = place
    projection = _add_result_places(wiring, parts, places, missing)
    for kind, node in (("attn_scores", parts.scores), ("pattern", parts.pattern)):
        shape = wiring.shape(node) if node else None
        axes = _operand_axes(wiring, node, ("batch", "head", "query_pos", "key_pos")) if node else None
        natural = ("batch", "head", "query_pos", "key_pos")
        view = view_of(axes, natural, wiring.program.sizes) if shape else None
        if node and view:
            places[kind] = Place(node, view)
        else:
            missing[kind] = (
                "attention is computed by the fused operation scaled_dot_product_attention, which "
                "never holds it. Build the model with attn_implementation='eager' and capture again"
            )
    return Attention(
        parts.core,
        places,
        missing,
        projection,
        _activation(wiring, linears.get("q")),
        _activation(wiring, linears.get("k")),
    )


def _activation(wiring: Wiring, linear: Record | None) -> str | None:
    return wiring.operands(linear)[0] if linear is not None else None


def _ancestors(wiring: Wiring, name: str) -> frozenset[str]:
    return frozenset(r.name for r in wiring.upward(name, wiring.is_linear))


def _projection_above(wiring: Wiring, name: str) -> Record | None:
    """The nearest projection that the operand comes from, when there is exactly one."""
    linears = [record for record in wiring.upward(name, wiring.is_linear) if wiring.is_linear(record)]
    return linears[0] if len(linears) == 1 else None


def _first_place(
    wiring: Wiring, linear: Record, operand: str, axes: Axes, own: frozenset[str], heads: object
) -> Place | None:
    """The earliest value that holds this operand alone, its heads apart, before any arithmetic."""
    prefix = _layout_prefix(wiring, linear) & own
    best: Place | None = None
    for name, known in _axes_above(wiring, operand, axes).items():
        view = _head_view(wiring, known, heads) if name in prefix else None
        if view is not None and not _packs_positions(view):
            best = Place(name, view) if best is None else _earlier(wiring, best, Place(name, view))
    return best


def _packs_positions(view: View) -> bool:
    """Whether positions share a dimension, which only values flattened for a projection do."""
    return any("pos" in packed and len(packed) > 1 for packed in view.packing)


def _rotated_place(wiring: Wiring, side: tuple[str, Axes | None], heads: object) -> Place | None:
    """What enters the scores: after norms and rotary embedding, keys before they are repeated."""
    name, axes = side
    while axes is not None:
        record = wiring.records.get(name)
        if record is None or record.op not in LAYOUT | {"repeat_interleave"}:
            break
        operand = wiring.operands(record)[0]
        axes, name = before(record, axes, wiring.shape(operand)), operand
    view = _head_view(wiring, axes, heads)
    return Place(name, view) if view else None


def _head_view(wiring: Wiring, axes: Axes | None, heads: object) -> View | None:
    """The view in (batch, pos, head, d_head); kv_head where there are fewer heads than queries have."""
    if axes is None:
        return None
    count = _length(axes, "head")
    if count is None and heads is not None and () in axes:
        axes = tuple(packed or (Axis("head", 1),) for packed in axes)
        count = 1
    name = "head" if count in {heads, None} else "kv_head"
    renamed = tuple(tuple(Axis(name, a.length) if a.name == "head" else a for a in packed) for packed in axes)
    natural = ("batch", "pos", name, "d_head") if count is not None else ("batch", "pos", "d_head")
    return view_of(renamed, natural, wiring.program.sizes)


def _length(axes: Axes | None, name: str) -> object:
    found = [axis.length for packed in axes or () for axis in packed if axis.name == name]
    return found[0] if found else None


def _earlier(wiring: Wiring, one: Place, other: Place) -> Place:
    return one if wiring.order[one.node] <= wiring.order[other.node] else other


def _layout_prefix(wiring: Wiring, linear: Record) -> frozenset[str]:
    """The projection's value and everything that only rearranges it or takes parts of it."""
    reached, queue = {linear.name}, [linear.name]
    while queue:
        for reader in wiring.readers.get(queue.pop(), ()):
            if reader.op in LAYOUT | PARTS and reader.name not in reached:
                reached.add(reader.name)
                queue.append(reader.name)
    return frozenset(reached)


def _axes_above(wiring: Wiring, start: str, axes: Axes) -> dict[str, Axes]:
    """The axes of what `start` is made from, up to the projections, where they can be followed."""
    known = {start: axes}
    for record in wiring.upward(start, wiring.is_linear):
        if record.name not in known or wiring.is_linear(record):
            continue
        for operand in wiring.operands(record):
            found = before(record, known[record.name], wiring.shape(operand))
            if found is not None:
                known.setdefault(operand, found)
    return known


def _add_result_places(
    wiring: Wiring, parts: _Parts, places: dict[str, Place], missing: dict[str, str]
) -> Record | None:
    """Find z: the last value in front of the output projection that still has its heads apart."""
    axes = _operand_axes(wiring, parts.core.name, parts.result)
    record = parts.core
    while True:
        view = _head_view(wiring, axes, _length(parts.query[1], "head"))
        if view is not None and not _packs_positions(view):
            places["z"] = Place(record.name, view)
        readers = wiring.readers.get(record.name, [])
        if len(readers) != 1 or axes is None:
            break
        if readers[0].op not in LAYOUT | {"to", "_to_copy"}:
            break
        record = readers[0]
        axes = after(record, axes)
    if "z" not in places:
        missing["z"] = "no value in front of the output projection has its heads apart"
    readers = [r for r in _through_layout(wiring, record.name) if wiring.is_linear(r)]
    return readers[0] if len(readers) == 1 else None


def _through_layout(wiring: Wiring, name: str) -> Iterator[Record]:
    queue = [name]
    while queue:
        for reader in wiring.readers.get(queue.pop(), ()):
            yield reader
            if reader.op in LAYOUT:
                queue.append(reader.name)


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
