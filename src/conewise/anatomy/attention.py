"""Attention, found in the graph, and its activations: queries, keys, values, patterns, results by head.

Nothing here knows an architecture. Heads are found by following axes (batch, heads, positions, features, and
what is folded) from the products back to the projections and on to the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.anatomy.axes import Axes, Axis, View, after, before, one_per_dimension, view_of
from conewise.anatomy.wiring import Wiring, reached
from conewise.errors import Argument, Piece
from conewise.program.records import (
    ATTENTION,
    CASTS,
    PROBABILITIES,
    REARRANGEMENTS,
    SELECTIONS,
    TRIANGLES,
    Record,
    Ref,
)
from conewise.program.sizes import Size, coefficient, quotient, symbols_in

Operand = tuple[str, Axes | None]


def operand_axes(wiring: Wiring, name: str, names: Sequence[str]) -> Axes | None:
    """The axes of a factor: its last two dimensions, and batch and head before them."""
    shape = wiring.shape(name)
    if shape is None or len(shape) > 4 or len(shape) not in {3, len(names)}:
        return None
    is_by_head = len(shape) == len(names)
    axes = one_per_dimension(names if is_by_head else ("batch", *names[2:]), shape)
    rest = "fold" if is_by_head and "head" in names else "head"
    found = _with_batch_split(wiring, name, axes, rest)
    return found if found is None or rest == "fold" else _with_fold(wiring, name, found)


def names_by_size(wiring: Wiring, query: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the queries' axes, with batch and heads exchanged where heads lie in front.

    Heads are split off the features that a projection makes. What is not is a `fold`: rows that are attended
    to by themselves, such as the lines of an image.
    """
    shape = wiring.shape(query)
    if shape is None or len(shape) != 4:
        return names
    linear = projection_above(wiring, query)
    above = {} if linear is None else axes_above(wiring, query, one_per_dimension(names, shape))
    known = None if linear is None else above.get(linear.name)
    features = {axis.name.partition(".")[0] for axis in known[-1]} if known else set()
    batch = wiring.program.dimensions.batch
    has_batch = {
        name: not batch.isdisjoint(symbols_in(size)) for name, size in zip(names, shape, strict=True)
    }
    if (has_batch["head"] and not has_batch["batch"]) or (
        "batch" in features and "head" not in features and shape[names.index("batch")] != 1
    ):
        exchanged = {"batch": "head", "head": "batch"}
        return tuple(exchanged.get(name, name) for name in names)
    if features == {"d_head"} and shape[names.index("head")] != 1:
        return tuple("fold" if name == "head" else name for name in names)
    return names


def _with_batch_split(wiring: Wiring, name: str, axes: Axes, rest: str) -> Axes | None:
    """The axes with what shares a dimension with the batch set apart, under the name `rest`.

    None where the order in which they share it is not known.
    """
    known = wiring.program.dimensions
    at = next(dim for dim, packed in enumerate(axes) if packed[0].name == "batch")
    length = axes[at][0].length
    placement = wiring.batch.of(name)
    packed: tuple[Axis, ...]
    if not known.batch:
        if known.is_unbatched:
            packed = (Axis("head", length),) if rest == "head" else ()
            if rest == "fold" and length != 1:
                return None
        elif length != 1 and (leading := _leading(wiring)) and length not in leading:
            return None  # as long as no input is, so it is more than a batch of fixed size
        elif rest == "fold":
            return axes
        else:
            heads, batch = coefficient(length)
            packed = (Axis("batch", batch), Axis("head", heads)) if heads != 1 else (Axis("batch", batch),)
    elif symbols_in(length).isdisjoint(known.batch):
        packed = axes[at] if rest == "fold" else (Axis(rest, length),)
    elif placement is None or placement.dim != at:
        return None
    elif placement.outer == 1:
        packed = (Axis("batch", placement.size), Axis(rest, placement.inner))
    elif placement.inner == 1:
        packed = (Axis(rest, placement.outer), Axis("batch", placement.size))
    else:
        return None
    packed = tuple(axis for axis in packed if axis.name == "batch" or axis.length != 1)
    return (*axes[:at], packed, *axes[at + 1 :])


def _leading(wiring: Wiring) -> set[Size]:
    """The first sizes of the inputs of several dimensions."""
    return {leaf.shape[0] for leaf in wiring.program.inputs if len(leaf.shape) > 1}


def _with_fold(wiring: Wiring, name: str, axes: Axes) -> Axes:
    """The axes with what is folded into the batch set apart from the heads.

    Where all three share a dimension, its size does not distinguish heads from the rest; a value that holds
    the heads in a dimension of their own, above or below, does.
    """
    known = [*axes_above(wiring, name, axes).values()]
    known += [found for _, found in through_layout(wiring, name, axes) if found is not None]
    for found in known:
        rest, outer = length_of(found, "head.rest"), length_of(found, "head")
        if isinstance(rest, int) and outer is not None:
            return parted(axes, "head", Axis("fold", outer), Axis("head", rest))
    return axes


def parted(axes: Axes, name: str, *parts: Axis) -> Axes:
    """The axes with `parts` in the place of the axis of that name, in the same dimension."""
    return tuple(
        tuple(part for axis in packed for part in (parts if axis.name == name else (axis,)))
        for packed in axes
    )


def heads_beside_positions(wiring: Wiring, query: Operand, key: Operand) -> int:
    """Count the heads that share a dimension with positions, [batch, pos·head, d_head]; 1 where none do.

    There are so many times more rows of queries than of keys then, and in the projection that the queries
    come from, what is left of the rows lies beside the features.
    """
    name, axes = query
    rows, others = length_of(axes, "pos"), length_of(key[1], "pos")
    if axes is None or rows is None or others is None:
        return 1
    for known in axes_above(wiring, name, axes).values():
        for packed in known:
            rest = [axis.length for axis in packed if axis.name == "pos.rest"]
            if rest and isinstance(rest[0], int) and any(axis.name == "d_head" for axis in packed):
                return rest[0] if quotient(rows, others) == rest[0] else 1
    return 1


def split_off(axes: Axes | None, name: str, heads: int) -> Axes | None:
    """The axes with `heads` set apart from the positions that they share a dimension with."""
    if axes is None or heads == 1:
        return axes
    length = length_of(axes, name)
    rest = None if length is None else quotient(length, heads)
    return None if rest is None else parted(axes, name, Axis(name, rest), Axis("head", heads))


def with_head(axes: Axes) -> Axes:
    """The axes with that of the heads, where there is just one: it has a dimension of its own, or none."""
    alone = Axis("head", 1)
    if length_of(axes, "head") is not None:
        return axes
    if () in axes:
        at = axes.index(())
        return (*axes[:at], (alone,), *axes[at + 1 :])
    for name in ("d_head", "query_pos"):
        if (length := length_of(axes, name)) is not None:
            axes = parted(axes, name, alone, Axis(name, length))
    return axes


def natural_axes(wiring: Wiring, axes: Axes, natural: Sequence[str]) -> tuple[str, ...]:
    """The axes in natural order: what is folded into the batch behind it; no batch where there is none."""
    present = {axis.name for packed in axes for axis in packed}
    if "fold" in present:
        natural = ("batch", "fold", *natural[1:])
    if "batch" not in present and wiring.program.dimensions.is_unbatched:
        natural = natural[1:]
    return tuple(natural)


def length_of(axes: Axes | None, name: str) -> Size | None:
    """The length of the axis of that name; None where there is none."""
    found = [axis.length for packed in axes or () for axis in packed if axis.name == name]
    return found[0] if found else None


def projection_above(wiring: Wiring, name: str) -> Record | None:
    """The nearest projection that the operand comes from, when there is exactly one."""
    linears = [record for record in wiring.upward(name, wiring.is_linear) if wiring.is_linear(record)]
    return linears[0] if len(linears) == 1 else None


def axes_above(wiring: Wiring, start: str, axes: Axes) -> dict[str, Axes]:
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


def through_layout(wiring: Wiring, name: str, axes: Axes | None) -> Iterator[tuple[Record, Axes | None]]:
    """Yield the records that read a value, rearranged or not, and the axes of what they read then."""
    queue = [(name, axes)]
    while queue:
        current, known = queue.pop()
        for reader in wiring.readers.get(current, ()):
            yield reader, known
            if reader.op in REARRANGEMENTS:
                queue.append((reader.name, None if known is None else after(reader, known)))


_SCORE_OPS = REARRANGEMENTS | frozenset(
    {
        "add", "sub", "mul", "div", "masked_fill", "where", "maximum", "max", "clamp", "to", "_to_copy",
        "tanh", "type_as", "float",
    }
)  # fmt: skip
_WEIGHT_OPS = REARRANGEMENTS | CASTS | {"type_as", "mul"}


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The operands of an attention with their axes, and the records in between.

    `beside` is how many heads share a dimension with the positions of the queries, 1 where none do.
    """

    core: Record
    query: Operand
    key: Operand
    value: Operand
    scores: str | None
    pattern: str | None
    seen: tuple[str, ...]
    result: tuple[str, ...]
    beside: int = 1


def fused(wiring: Wiring) -> Iterator[AttentionParts]:
    """Every attention that the fused operation computes."""
    for record in wiring.program.records:
        if record.op == ATTENTION:
            names = names_by_size(wiring, record.args[0].name, ("batch", "head", "pos", "d_head"))
            query, key, value = ((arg.name, operand_axes(wiring, arg.name, names)) for arg in record.args[:3])
            beside = heads_beside_positions(wiring, query, key)
            split = (query[0], split_off(query[1], "pos", beside))
            seen = (*names[:2], "query_pos", "key_pos")
            yield AttentionParts(record, split, key, value, None, None, seen, names, beside)


def spelled_out(wiring: Wiring) -> Iterator[AttentionParts]:
    """Every attention that is two products with a softmax between."""
    for softmax, scores, above, core, pattern in softmaxed_products(wiring):
        left, right = wiring.factors(above)
        weights, value = wiring.factors(core)
        names = _names(above, core)
        if weights != pattern or names is None or not _is_over_last(wiring, softmax):
            continue
        leading = names_by_size(wiring, left, names[0])
        renamed = dict(zip(names[0], leading, strict=True))
        names = tuple(tuple(renamed.get(name, name) for name in one) for one in names)
        query = left, operand_axes(wiring, left, names[0])
        key = right, operand_axes(wiring, right, names[1])
        if len(list(_products_above(wiring, scores))) > 1:
            query, key = (left, None), (right, None)  # which product is that of queries and keys is not known
        beside = heads_beside_positions(wiring, query, key)
        yield AttentionParts(
            core,
            (left, split_off(query[1], "pos", beside)),
            key,
            (value, operand_axes(wiring, value, names[2])),
            scores,
            pattern,
            (renamed["batch"], renamed.get("head", "head"), "query_pos", "key_pos"),
            names[3],
            beside,
        )


def softmaxed_products(wiring: Wiring) -> Iterator[tuple[Record, str, Record, Record, str]]:
    """Products whose softmax is a factor of another: (softmax, scores, the one, the other, pattern)."""
    for record in wiring.program.records:
        if record.op not in PROBABILITIES or record.name not in wiring.varying:
            continue
        scores = str(record.args[0].name)
        above = next(_products_above(wiring, scores), None)
        below = _product_below(wiring, record)
        if above is not None and below is not None:
            yield record, scores, above, *below


def _is_over_last(wiring: Wiring, softmax: Record) -> bool:
    """True if a softmax is over the last dimension: over keys."""
    shape = wiring.shape(softmax.name) or ()
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    return dim in {-1, len(shape) - 1}


def _names(above: Record, core: Record) -> tuple[tuple[str, ...], ...] | None:
    """The axes' names of queries, keys, values and result, as the two products have them."""
    scores, result = letters_of(above), letters_of(core)
    if scores is None or result is None:
        return None
    (left, right, out), (weights, value, last) = scores, result
    shared = [letter for letter in out if letter in left and letter in right]
    summed = [letter for letter in left if letter in right and letter not in out]
    keys = [letter for letter in weights if letter in value and letter not in last]
    if len(summed) != 1 or len(keys) != 1 or len(weights) != len(out):
        return None
    if len(shared) not in {1, 2} or not out.startswith("".join(shared)) or out[-1] not in right:
        return None  # only scores that lie as [batch, head, query_pos, key_pos], or without a head
    above_names = dict(zip(shared, ("batch", "head"), strict=False)) | {summed[0]: "d_head"}
    core_names = {weights[out.index(s)]: n for s, n in above_names.items() if s in out}
    core_names |= {letter: "pos" for letter in weights if letter not in core_names}
    return (
        tuple(above_names.get(letter, "pos") for letter in left),
        tuple(above_names.get(letter, "pos") for letter in right),
        tuple(core_names.get(letter, "d_head") for letter in value),
        tuple(core_names.get(letter, "d_head") for letter in last),
    )


def letters_of(product: Record) -> tuple[str, str, str] | None:
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


PLACES = {"attn_mask": 3, "dropout_p": 4, "is_causal": 5}


def attention_argument(record: Record, name: str) -> Any:
    """An argument of a fused attention, given by place or by name."""
    place = PLACES[name]
    return record.args[place] if len(record.args) > place else record.kwargs.get(name)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes along which one attention computes entries independently, and those along which it mixes.

    `is_causal` where no entry sees a later one, as far as that is known without computing a mask.
    """

    independent: frozenset[str]
    mixed: frozenset[str]
    is_causal: bool


def attention_sizes(wiring: Wiring) -> Iterator[AttentionSizes]:
    """Yield what each attention of the program does along the sizes that vary."""
    for record in wiring.program.records:
        if record.op == ATTENTION:
            query, key = (wiring.shape(arg.name) or () for arg in record.args[:2])
            mask = attention_argument(record, "attn_mask")
            is_causal = bool(attention_argument(record, "is_causal"))
            is_causal = is_causal or (isinstance(mask, Ref) and _is_triangular(wiring, mask.name))
            yield _sizes([*query[:-2], *key[:-2]], [*query[-2:-1], *key[-2:-1]], is_causal)
    for _, scores, above, _, _ in softmaxed_products(wiring):
        found = _product_sizes(wiring, above)
        if found is not None:
            yield _sizes(*found, _is_triangular(wiring, scores))


def _sizes(independent: Sequence[Size], mixed: Sequence[Size], is_causal: bool) -> AttentionSizes:
    one, other = (frozenset[str]().union(*map(symbols_in, sizes)) for sizes in (independent, mixed))
    return AttentionSizes(one, other, is_causal)


def _product_sizes(wiring: Wiring, product: Record) -> tuple[list[Size], list[Size]] | None:
    """The sizes that the factors of scores share, and those that only one of them has."""
    letters = letters_of(product)
    if letters is None:
        return None
    *sides, out = letters
    shapes = [wiring.shape(name) or () for name in wiring.factors(product)]
    lengths = [
        pair
        for own, shape in zip(sides, shapes, strict=True)
        for pair in zip(own[-len(shape) :], shape, strict=False)
    ]
    shared = set(sides[0]) & set(sides[1]) & set(out)
    return (
        [size for letter, size in lengths if letter in shared],
        [size for letter, size in lengths if letter in out and letter not in shared],
    )


def _is_triangular(wiring: Wiring, name: str) -> bool:
    """True if what masks the scores is a triangle: cut to one, or stored as one."""
    stored = wiring.program.source_values

    def onward(current: str) -> Sequence[str]:
        record = wiring.records.get(current)
        return () if record is None or wiring.is_product(record) else record.inputs

    for current in reached([name], onward):
        record = wiring.records.get(current)
        if record is not None and record.op in TRIANGLES:
            return True
        if record is None and current in stored and _is_stored_triangle(stored[current]):
            return True
    return False


def _is_stored_triangle(value: torch.Tensor) -> bool:
    """A mask that shows, or hides, just what lies above the diagonal."""
    if value.ndim < 2 or value.shape[-1] != value.shape[-2] or value.shape[-1] < 2 or value.is_meta:
        return False
    marked = value if value.dtype == torch.bool else value != 0
    whole = torch.ones_like(marked)
    return torch.equal(marked, whole.tril()) or torch.equal(marked, whole.triu(1))


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


def find_attention(wiring: Wiring) -> list[Attention]:
    """Every attention over positions, in the order of computation; one over the rows of a batch is none."""
    found = [one for one in (*fused(wiring), *spelled_out(wiring)) if not _is_over_batch(wiring, one)]
    found.sort(key=lambda parts: wiring.order[parts.core.name])
    return [_attention(wiring, parts) for parts in found]


def _is_over_batch(wiring: Wiring, parts: AttentionParts) -> bool:
    sides, batch = (parts.query, parts.key), wiring.program.dimensions.batch
    rows = [size for name, _ in sides for size in (wiring.shape(name) or ())[-2:-1]]
    named = [length for _, axes in sides if (length := length_of(axes, "pos")) is not None]
    return any(not batch.isdisjoint(symbols_in(size)) for size in named or rows)


def _attention(wiring: Wiring, parts: AttentionParts) -> Attention:
    activations: dict[str, Activation] = {}
    missing: dict[str, tuple[Piece, ...]] = {}
    sides = {"q": parts.query, "k": parts.key, "v": parts.value}
    above = {
        kind: frozenset(record.name for record in wiring.upward(name, wiring.is_linear))
        for kind, (name, _) in sides.items()
    }
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
    sources = {kind: wiring.operands(linear)[0] for kind, linear in linears.items()}
    return Attention(
        parts.core,
        activations,
        missing,
        projection,
        sources.get("q"),
        sources.get("k"),
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


def _first_activation(
    wiring: Wiring, linear: Record, operand: str, axes: Axes, own: frozenset[str], heads: object
) -> Activation | None:
    """The earliest value that holds this operand alone, its heads apart, before any arithmetic."""

    def onward(name: str) -> list[str]:
        """Whatever only rearranges a value or takes parts of it."""
        readers = wiring.readers.get(name, ())
        return [reader.name for reader in readers if reader.op in REARRANGEMENTS | SELECTIONS]

    prefix = reached([linear.name], onward).keys() & own
    found: list[Activation] = []
    for name, known in axes_above(wiring, operand, axes).items():
        view = _head_view(wiring, known, heads) if name in prefix else None
        if view is not None and not _packs_positions(view):
            found.append(Activation(name, view))
    return min(found, key=lambda one: wiring.order[one.node], default=None)


def _packs_positions(view: View) -> bool:
    """True if positions share a dimension, which only values flattened for a projection do."""
    return any("pos" in packed and len(packed) > 1 for packed in view.packing)


def _rotated(wiring: Wiring, side: tuple[str, Axes | None], heads: object) -> Activation | None:
    """Find what enters the scores: after norms and rotary embedding, keys before they are repeated."""
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
    name, length = "head", length_of(axes, "head")
    if length is not None and length != (heads or 1):
        name = "kv_head"
        axes = parted(axes, "head", Axis(name, length))
    natural = natural_axes(wiring, axes, ("batch", "pos", name, "d_head"))
    return view_of(axes, natural, wiring.program.sizes)


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
    reading = through_layout(wiring, record.name, axes)
    found = [(reader, known) for reader, known in reading if wiring.is_linear(reader)]
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
