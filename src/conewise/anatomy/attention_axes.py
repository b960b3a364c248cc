"""The dimensions of an attention's operands: batch, heads, positions, features, and what is folded.

Axes are followed from the products back to the projections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conewise.anatomy.axes import Axes, Axis, after, before, one_per_dimension
from conewise.anatomy.wiring import Wiring
from conewise.program.records import REARRANGEMENTS, Record
from conewise.program.sizes import Size, coefficient, quotient, symbols_in

_BEHIND_HEAD = frozenset({"d_head", "query_pos"})
Operand = tuple[str, Axes | None]


def operand_axes(wiring: Wiring, name: str, names: Sequence[str]) -> Axes | None:
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
    """True if a dimension may be a batch of fixed size and nothing else: it is as long as the inputs are."""
    leading = {leaf.shape[0] for leaf in wiring.program.inputs if len(leaf.shape) > 1}
    return length == 1 or length in leading or not leading


def _with_fold(wiring: Wiring, name: str, axes: Axes) -> Axes:
    """The axes with what is folded into the batch set apart from the heads.

    Where all three share a dimension, its size does not distinguish heads from the rest; a value that holds
    the heads in a dimension of their own, above or below, does.
    """
    known = [*axes_above(wiring, name, axes).values()]
    known += [found for _, found in through_layout(wiring, name, axes) if found is not None]
    for found in known:
        rest = length_of(found, "head.rest")
        outer = length_of(found, "head")
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
    if rest is None:
        return None
    apart = (Axis(name, rest), Axis("head", heads))
    return tuple(
        tuple(part for axis in packed for part in (apart if axis.name == name else (axis,)))
        for packed in axes
    )


def with_head(axes: Axes) -> Axes:
    """The axes with that of the heads, where there is just one: it has a dimension of its own, or none."""
    if length_of(axes, "head") is not None:
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
