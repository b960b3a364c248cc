"""The products of an attention, found in the graph: two with a softmax between, or the fused operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conewise.program.operations import ATTENTION, CASTS, PROBABILITIES, REARRANGEMENTS
from conewise.program.records import Record
from conewise.structure.attention.operand_axes import (
    Operand,
    heads_beside_positions,
    names_by_size,
    operand_axes,
    split_off,
)
from conewise.structure.wiring.wiring import Wiring

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
    """Whether a softmax is over the last dimension: over keys."""
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
