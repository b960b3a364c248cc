"""Attention, found in the graph: two matrix products with a softmax between, or the fused op.

Nothing here knows an architecture. Heads are found by following axes from the products back to
the projections and on to the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from conewise.program.operations import ATTENTION, CASTS, PROBABILITIES, REARRANGEMENTS, SELECTIONS, TRIANGLES
from conewise.program.records import Record, Ref
from conewise.program.sizes import Size, coefficient, quotient, symbols_in
from conewise.structure.axes import Axes, Axis, after, before, one_per_dimension
from conewise.structure.views import View, view_of
from conewise.structure.wiring import Wiring

_SCORE_OPS = REARRANGEMENTS | frozenset(
    {
        "add", "sub", "mul", "div", "masked_fill", "where", "maximum", "max", "clamp", "to", "_to_copy",
        "tanh", "type_as", "float",
    }
)  # fmt: skip
_BEHIND_HEAD = frozenset({"d_head", "query_pos"})
_WEIGHT_OPS = REARRANGEMENTS | CASTS | {"type_as", "mul"}


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
    missing: dict[str, str]
    projection: Record | None
    query_source: str | None
    key_source: str | None
    lead: tuple[Axis, ...] | None = None
    operand: Axes | None = None
    modules: tuple[object, ...] = field(default=())


_Operand = tuple[str, Axes | None]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The operands of an attention with their axes, and the records in between.

    `beside` is how many heads share a dimension with the positions of the queries, 1 where none do.
    """

    core: Record
    query: _Operand
    key: _Operand
    value: _Operand
    scores: str | None
    pattern: str | None
    seen: tuple[str, ...]
    result: tuple[str, ...]
    beside: int = 1


def find_attention(wiring: Wiring) -> list[Attention]:
    """Every attention over positions, in the order of computation; one over the rows of a batch is none."""
    found = [one for one in (*_fused(wiring), *_spelled_out(wiring)) if not _is_over_batch(wiring, one)]
    found.sort(key=lambda parts: wiring.order[parts.core.name])
    return [_attention(wiring, parts) for parts in found]


def _is_over_batch(wiring: Wiring, parts: _Parts) -> bool:
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


def _fused(wiring: Wiring) -> Iterator[_Parts]:
    for record in wiring.program.records:
        if record.op == ATTENTION:
            names = _leading_by_size(wiring, record.args[0].name, ("batch", "head", "pos", "d_head"))
            query, key, value = (
                (arg.name, _operand_axes(wiring, arg.name, names)) for arg in record.args[:3]
            )
            beside = _heads_beside_positions(wiring, query, key)
            split = (query[0], _split_off(query[1], "pos", beside))
            seen = (*names[:2], "query_pos", "key_pos")
            yield _Parts(record, split, key, value, None, None, seen, names, beside)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes along which one attention computes entries independently, and those along which it mixes.

    `is_causal` where no entry sees a later one, as far as that is known without computing a mask.
    """

    independent: frozenset[str]
    mixed: frozenset[str]
    is_causal: bool


def attention_sizes(wiring: Wiring) -> Iterator[AttentionSizes]:
    """What each attention of the program does along the sizes that vary."""
    for record in wiring.program.records:
        if record.op == ATTENTION:
            query, key = (wiring.shape(arg.name) or () for arg in record.args[:2])
            mask = [*record.args[3:4], record.kwargs.get("attn_mask")]
            is_causal = bool([*record.args[5:6], record.kwargs.get("is_causal")][0])
            is_causal = is_causal or any(isinstance(m, Ref) and _is_triangular(wiring, m.name) for m in mask)
            yield _sizes([*query[:-2], *key[:-2]], [*query[-2:-1], *key[-2:-1]], is_causal)
    for _, scores, above, _, _ in _softmaxed_products(wiring):
        found = _product_sizes(wiring, above)
        if found is not None:
            yield _sizes(*found, _is_triangular(wiring, scores))


def _sizes(independent: Sequence[Size], mixed: Sequence[Size], is_causal: bool) -> AttentionSizes:
    one, other = (frozenset[str]().union(*map(symbols_in, sizes)) for sizes in (independent, mixed))
    return AttentionSizes(one, other, is_causal)


def _product_sizes(wiring: Wiring, product: Record) -> tuple[list[Size], list[Size]] | None:
    """The sizes that the factors of scores share, and those that only one of them has."""
    one, other = (wiring.shape(name) or () for name in wiring.factors(product))
    if product.op != "einsum":
        return [*one[:-2], *other[:-2]], [*one[-2:-1], *other[-1:]]
    letters = _letters(product)
    if letters is None:
        return None
    left, right, out = letters
    lengths = [*zip(left, one, strict=False), *zip(right, other, strict=False)]
    shared = {letter for letter in out if letter in left and letter in right}
    return (
        [size for letter, size in lengths if letter in shared],
        [size for letter, size in lengths if letter in out and letter not in shared],
    )


def _is_triangular(wiring: Wiring, name: str) -> bool:
    """Whether what masks the scores is a triangle: cut to one, or stored as one."""
    queue, seen = [name], {name}
    stored = wiring.program.source_values
    while queue:
        current = queue.pop()
        record = wiring.records.get(current)
        if record is None:
            if current in stored and _is_stored_triangle(stored[current]):
                return True
            continue
        if record.op in TRIANGLES:
            return True
        if not wiring.is_product(record):
            fresh = [read for read in record.inputs if read not in seen]
            seen.update(fresh)
            queue += fresh
    return False


def _is_stored_triangle(value: torch.Tensor) -> bool:
    """A mask that shows, or hides, just what lies above the diagonal."""
    if value.ndim < 2 or value.shape[-1] != value.shape[-2] or value.shape[-1] < 2 or value.is_meta:
        return False
    marked = value if value.dtype == torch.bool else value != 0
    return torch.equal(marked, torch.ones_like(marked).tril()) or torch.equal(
        marked, torch.ones_like(marked).triu(1)
    )


def _softmaxed_products(wiring: Wiring) -> Iterator[tuple[Record, str, Record, Record, str]]:
    """Products whose softmax is a factor of another: (softmax, scores, the one, the other, pattern)."""
    for record in wiring.program.records:
        if record.op not in PROBABILITIES or record.name not in wiring.varying:
            continue
        scores = str(record.args[0].name)
        above = next(_products_above(wiring, scores), None)
        below = _product_below(wiring, record)
        if above is not None and below is not None:
            yield record, scores, above, *below


def _spelled_out(wiring: Wiring) -> Iterator[_Parts]:
    for softmax, scores, above, core, pattern in _softmaxed_products(wiring):
        left, right = wiring.factors(above)
        weights, value = wiring.factors(core)
        names = _names(above, core)
        if weights != pattern or names is None or not _is_over_last(wiring, softmax):
            continue
        leading = _leading_by_size(wiring, left, names[0])
        renamed = dict(zip(names[0], leading, strict=True))
        names = tuple(tuple(renamed.get(name, name) for name in one) for one in names)
        query = left, _operand_axes(wiring, left, names[0])
        key = right, _operand_axes(wiring, right, names[1])
        if len(list(_products_above(wiring, scores))) > 1:
            query, key = (left, None), (right, None)  # which product is that of queries and keys is not known
        beside = _heads_beside_positions(wiring, query, key)
        yield _Parts(
            core,
            (left, _split_off(query[1], "pos", beside)),
            key,
            (value, _operand_axes(wiring, value, names[2])),
            scores,
            pattern,
            (renamed["batch"], renamed.get("head", "head"), "query_pos", "key_pos"),
            names[3],
            beside,
        )


def _is_over_last(wiring: Wiring, softmax: Record) -> bool:
    """Whether a softmax is over the last dimension: over keys."""
    shape = wiring.shape(softmax.name) or ()
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    return dim in {-1, len(shape) - 1}


def _heads_beside_positions(wiring: Wiring, query: _Operand, key: _Operand) -> int:
    """How many heads share a dimension with positions, [batch, pos·head, d_head]; 1 where none do.

    There are so many times more rows of queries than of keys then, and in the projection that the queries
    come from, what is left of the rows lies beside the features.
    """
    name, axes = query
    rows, others = _length(axes, "pos"), _length(key[1], "pos")
    if axes is None or rows is None or others is None:
        return 1
    for known in _axes_above(wiring, name, axes).values():
        for packed in known:
            rest = [axis.length for axis in packed if axis.name == "pos.rest"]
            if rest and isinstance(rest[0], int) and any(axis.name == "d_head" for axis in packed):
                return rest[0] if quotient(rows, others) == rest[0] else 1
    return 1


def _split_off(axes: Axes | None, name: str, heads: int) -> Axes | None:
    """The axes with `heads` set apart from the positions that they share a dimension with."""
    if axes is None or heads == 1:
        return axes
    length = _length(axes, name)
    rest = None if length is None else quotient(length, heads)
    if rest is None:
        return None
    apart = (Axis(name, rest), Axis("head", heads))
    return tuple(
        tuple(part for axis in packed for part in (apart if axis.name == name else (axis,)))
        for packed in axes
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


def _leading_by_size(wiring: Wiring, query: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the queries' axes, with batch and heads exchanged where heads lie in front.

    Heads are split off the features that a projection makes. What is not is a `fold`: rows that are attended
    to by themselves, such as the lines of an image.
    """
    shape = wiring.shape(query)
    if shape is None or len(shape) != 4:
        return names
    linear = _projection_above(wiring, query)
    above = {} if linear is None else _axes_above(wiring, query, one_per_dimension(names, shape))
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


def _operand_axes(wiring: Wiring, name: str, names: Sequence[str]) -> Axes | None:
    """The axes of a factor: its last two dimensions, and batch and head before them."""
    shape = wiring.shape(name)
    if shape is None or not 3 <= len(shape) <= 4:
        return None
    if len(shape) == len(names):
        axes = one_per_dimension(names, shape)
        rest = "fold" if "head" in names else "head"
    elif len(shape) == 4:
        return None
    else:
        axes = one_per_dimension(("batch", *names[2:]), shape)
        rest = "head"
    found = _with_batch_split(wiring, name, axes, rest)
    return found if found is None or rest == "fold" else _with_fold(wiring, name, found)


def _with_fold(wiring: Wiring, name: str, axes: Axes) -> Axes:
    """The axes with what is folded into the batch set apart from the heads.

    Where all three share a dimension, its size does not distinguish heads from the rest; a value that holds
    the heads in a dimension of their own, above or below, does.
    """
    known = [*_axes_above(wiring, name, axes).values()]
    known += [found for _, found in _through_layout(wiring, name, axes) if found is not None]
    for found in known:
        rest = _length(found, "head.rest")
        outer = _length(found, "head")
        if isinstance(rest, int) and outer is not None:
            return tuple(
                tuple(
                    part
                    for axis in packed
                    for part in (
                        (Axis("fold", outer), Axis("head", rest)) if axis.name == "head" else (axis,)
                    )
                )
                for packed in axes
            )
    return axes


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
        elif not _may_be_fixed_batch(wiring, length):
            return None
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


def _may_be_fixed_batch(wiring: Wiring, length: Size) -> bool:
    """Whether a dimension may be a batch of fixed size and nothing else: it is as long as the inputs are."""
    leading = {leaf.shape[0] for leaf in wiring.program.inputs if len(leaf.shape) > 1}
    return length == 1 or length in leading or not leading


def _attention(wiring: Wiring, parts: _Parts) -> Attention:
    activations: dict[str, Activation] = {}
    missing: dict[str, str] = {}
    sides = {"q": parts.query, "k": parts.key, "v": parts.value}
    above = {kind: _ancestors(wiring, name) for kind, (name, _) in sides.items()}
    linears: dict[str, Record] = {}
    heads = _length(parts.query[1], "head")
    for kind, (name, axes) in sides.items():
        others = frozenset().union(*(above[other] for other in sides if other != kind))
        linear = _projection_above(wiring, name)
        if linear is None or axes is None:
            missing[kind] = "its projection could not be determined from the graph"
            continue
        linears[kind] = linear
        found = _first_activation(wiring, linear, name, axes, above[kind] - others, heads)
        if found is None:
            missing[kind] = "no value of the graph holds it with its heads apart"
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
        axes = _operand_axes(wiring, node, parts.seen) if node else None
        axes = _split_off(axes, "query_pos", parts.beside)
        if axes is not None and "fold" not in parts.seen:
            axes = _with_head(axes)
        natural = natural_axes(wiring, axes or (), ("batch", "head", "query_pos", "key_pos"))
        if "fold" in parts.seen:
            natural = tuple(name for name in natural if name != "head")
        view = view_of(axes, natural, wiring.program.sizes) if shape else None
        if node and view:
            activations[kind] = Activation(node, view)
        elif node:
            missing[kind] = f"the axes of {node!r} could not be determined from the graph"
        else:
            missing[kind] = (
                "attention is computed by the fused operation scaled_dot_product_attention, which "
                "never holds it. Build the model with attn_implementation='eager' and capture again"
            )
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
    known = _axes_above(wiring, name, axes).get(linear.name)
    if known is None:
        return None
    found = tuple(axis for packed in known[:-1] for axis in packed)
    expected = {axis.name for packed in axes for axis in packed} - {"head", "kv_head", "d_head"}
    return found if {axis.name for axis in found} == expected else None


def _activation(wiring: Wiring, linear: Record | None) -> str | None:
    return wiring.operands(linear)[0] if linear is not None else None


def _ancestors(wiring: Wiring, name: str) -> frozenset[str]:
    return frozenset(r.name for r in wiring.upward(name, wiring.is_linear))


def _projection_above(wiring: Wiring, name: str) -> Record | None:
    """The nearest projection that the operand comes from, when there is exactly one."""
    linears = [record for record in wiring.upward(name, wiring.is_linear) if wiring.is_linear(record)]
    return linears[0] if len(linears) == 1 else None


def _first_activation(
    wiring: Wiring, linear: Record, operand: str, axes: Axes, own: frozenset[str], heads: object
) -> Activation | None:
    """The earliest value that holds this operand alone, its heads apart, before any arithmetic."""
    prefix = _layout_prefix(wiring, linear) & own
    best: Activation | None = None
    for name, known in _axes_above(wiring, operand, axes).items():
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
    axes = _with_head(axes)
    name = "head" if _length(axes, "head") == (heads or 1) else "kv_head"
    renamed = tuple(tuple(Axis(name, a.length) if a.name == "head" else a for a in packed) for packed in axes)
    natural = ("batch", "pos", name, "d_head")
    return view_of(renamed, natural_axes(wiring, renamed, natural), wiring.program.sizes)


def _with_head(axes: Axes) -> Axes:
    """The axes with that of the heads, where there is just one: it has a dimension of its own, or none."""
    if _length(axes, "head") is not None:
        return axes
    alone = (Axis("head", 1),)
    if () in axes:
        at = axes.index(())
        return (*axes[:at], alone, *axes[at + 1 :])
    return tuple(
        tuple(part for axis in packed for part in ((*alone, axis) if axis.name in _BEHIND_HEAD else (axis,)))
        for packed in axes
    )


def natural_axes(wiring: Wiring, axes: Axes, natural: Sequence[str]) -> tuple[str, ...]:
    """The axes in natural order: what is folded into the batch behind it; no batch where there is none."""
    present = {axis.name for packed in axes for axis in packed}
    if "fold" in present:
        natural = ("batch", "fold", *natural[1:])
    if "batch" not in present and wiring.program.dimensions.is_unbatched:
        natural = natural[1:]
    return tuple(natural)


def _length(axes: Axes | None, name: str) -> Size | None:
    found = [axis.length for packed in axes or () for axis in packed if axis.name == name]
    return found[0] if found else None


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


def _add_z(
    wiring: Wiring, parts: _Parts, activations: dict[str, Activation], missing: dict[str, str]
) -> tuple[Record | None, Axes | None]:
    """Find z: the last value in front of the output projection that still has its heads apart.

    Returns the projection, and the axes of what it reads.
    """
    axes = _split_off(_operand_axes(wiring, parts.core.name, parts.result), "pos", parts.beside)
    record = parts.core
    while True:
        view = _head_view(wiring, axes, _length(parts.query[1], "head"))
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
        missing["z"] = "no value in front of the output projection has its heads apart"
    found = [
        (reader, known)
        for reader, known in _through_layout(wiring, record.name, axes)
        if wiring.is_linear(reader)
    ]
    return found[0] if len(found) == 1 else (None, None)


def _through_layout(wiring: Wiring, name: str, axes: Axes | None) -> Iterator[tuple[Record, Axes | None]]:
    """What reads a value, rearranged or not, and the axes of what it reads then."""
    queue = [(name, axes)]
    while queue:
        current, known = queue.pop()
        for reader in wiring.readers.get(current, ()):
            yield reader, known
            if reader.op in REARRANGEMENTS:
                queue.append((reader.name, None if known is None else after(reader, known)))


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
