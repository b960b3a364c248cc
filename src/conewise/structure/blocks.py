"""Blocks: the layers of a transformer, with the sums that make up its residual stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from conewise.program.records import ModuleCall
from conewise.structure.attention import Attention
from conewise.structure.naming import Naming
from conewise.structure.numbering import LayerPlace, places_of, short_names, stack_of
from conewise.structure.stream import Stream
from conewise.structure.wiring import Wiring


@dataclass(slots=True)
class Block:
    """One layer: its call, its place in its stack, its attentions, and its nodes by kind.

    The stream's kinds are told by sums. `attn_out` and `mlp_out` are the terms that are added
    to the stream, after any norm of their own; `resid_mid` and `resid_post` are the sums, before
    any norm of theirs. So resid_mid = resid_pre + attn_out and resid_post = resid_mid + mlp_out
    hold in every sequential block, wherever its norms are. A parallel block has one sum only,
    resid_post = resid_pre + attn_out + mlp_out, and no resid_mid; a block without an MLP has
    resid_post = resid_pre + attn_out. Where the block norms its sums (BERT), what the next block
    reads is the normed value: it is that block's resid_pre.

    A kind is there only where it is certain; `missing` says of each other one why it is not.
    `members` are the records of the layer. `has_features_last`: features are the last dimension of the
    stream, for certain.
    """

    call: ModuleCall
    stack: str
    layer: int
    attention: Attention
    cross: Attention | None = None
    members: frozenset[str] = frozenset()
    has_features_last: bool = False
    nodes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def find_blocks(wiring: Wiring, attentions: list[Attention]) -> list[Block]:
    """The blocks that hold the attentions, in the order of computation.

    Attentions that share the innermost module are in none: no path says which is a layer's own.
    """
    everything = Stream(wiring, frozenset(wiring.records))
    crossing = {id(a) for a in attentions if _is_cross(everything, a)}
    holders = Counter(call for a in attentions if id(a) not in crossing for call in a.core.modules)
    found: list[Block] = []
    for attention in attentions:
        call = _block_call(attention, holders)
        if call is None and attention.core.modules and len(attentions) - len(crossing) > 1:
            continue
        same = next((block for block in found if call is not None and block.call == call), None)
        if same is None:
            found.append(Block(call or ModuleCall(""), "", 0, attention))
        elif id(attention) in crossing:
            same.cross = attention
    places = places_of([block.call for block in found])
    _number(found, places)
    cores = frozenset(attention.core.name for attention in attentions)
    for block, place in zip(found, places, strict=True):
        cross = None if block.cross is None else block.cross.core.name
        naming = Naming(
            everything,
            block.call,
            place,
            core=block.attention.core.name,
            cross=cross,
            others=cores - {block.attention.core.name, cross},
            is_alone=len(found) == 1,
        )
        naming.give_names()
        block.members, block.nodes, block.missing = naming.members, naming.nodes, naming.missing
        block.has_features_last = naming.has_features_last
    return found


def _number(blocks: Sequence[Block], places: Sequence[LayerPlace]) -> None:
    """Give each block its layer within its stack, and stacks a name where there are several."""
    stacks = [stack_of(block.call, place) for block, place in zip(blocks, places, strict=True)]
    names = short_names(list(dict.fromkeys(stacks)))
    for stack, name in names.items():
        members = [at for at, other in enumerate(stacks) if other == stack]
        numbers = [places[at].number for at in members]
        by_number = len(set(numbers)) == len(numbers)
        for i, at in enumerate(members):
            number = places[at].number
            blocks[at].layer = number if by_number and number is not None else i
            blocks[at].stack = name


def _is_cross(everything: Stream, attention: Attention) -> bool:
    """Whether keys come from another stack than queries: from outside of the attention's block."""
    query, key = attention.query_source, attention.key_source
    if query is None or key is None or query == key:
        return False
    calls = [call for call in attention.core.modules if call.path.rpartition(".")[2].isdigit()]
    if calls:
        members = everything.wiring.members(calls[0])
        return query in members and key not in members
    stream = everything.source(query)
    if stream is None or stream == everything.source(key):
        return False
    return key not in everything.wiring.cone(stream)


def _block_call(attention: Attention, holders: Counter[ModuleCall]) -> ModuleCall | None:
    """The outermost numbered module that holds one self-attention; else the outermost at all."""
    alone = [call for call in attention.core.modules if holders[call] <= 1]
    numbered = [call for call in alone if call.path.rpartition(".")[2].isdigit()]
    return next(iter(numbered or alone), None)
