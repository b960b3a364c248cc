"""Along which sizes the attentions of a program compute entries independently, and along which they mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.program.operations import ATTENTION, TRIANGLES
from conewise.program.records import Record, Ref
from conewise.program.sizes import Size, symbols_in
from conewise.structure.attention.products import letters_of, softmaxed_products
from conewise.structure.wiring.wiring import Wiring

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
    """What each attention of the program does along the sizes that vary."""
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
    one, other = (wiring.shape(name) or () for name in wiring.factors(product))
    if product.op != "einsum":
        return [*one[:-2], *other[:-2]], [*one[-2:-1], *other[-1:]]
    letters = letters_of(product)
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
