"""The layers of a transformer, with the sums that make up its residual stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from conewise.program.records import ModuleCall
from conewise.structure.attention.attention import Attention
from conewise.structure.residual.naming import Naming
from conewise.structure.residual.numbering import LayerNumber, numbers_of, short_names, stack_of
from conewise.structure.residual.stream import Stream
from conewise.structure.wiring.wiring import Wiring


@dataclass(slots=True)
class Layer:
    """One layer: its call, its number in its stack, its attentions, and its nodes by kind.

    The stream's kinds are found by sums. `attn_out` and `mlp_out` are the terms that are added
    to the stream, after any norm of their own; `resid_mid` and `resid_post` are the sums, before
    any norm of theirs. So resid_mid = resid_pre + attn_out and resid_post = resid_mid + mlp_out
    hold in every sequential layer, wherever its norms are. A parallel layer has one sum only,
    resid_post = resid_pre + attn_out + mlp_out, and no resid_mid; a layer without an MLP has
    resid_post = resid_pre + attn_out. Where the layer norms its sums (BERT), what the next layer
    reads is the normed value: it is that layer's resid_pre.

    A kind is there only where it is certain; `missing` says of each other one why it is not.
    `members` are the records of the layer. `has_features_last`: features are the last dimension of the
    stream, for certain.
    """

    call: ModuleCall
    stack: str
    number: int
    attention: Attention
    cross: Attention | None = None
    members: frozenset[str] = frozenset()
    has_features_last: bool = False
    nodes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def find_layers(wiring: Wiring, attentions: list[Attention]) -> list[Layer]:
    """The layers that hold the attentions, in the order of computation.

    Attentions that share the innermost module are in none: no path says which is a layer's own.
    """
    everything = Stream(wiring, frozenset(wiring.records))
    crossing = {id(a) for a in attentions if _is_cross(everything, a)}
    holders = Counter(call for a in attentions if id(a) not in crossing for call in a.core.modules)
    found: list[Layer] = []
    for attention in attentions:
        call = _layer_call(attention, holders)
        if call is None and attention.core.modules and len(attentions) - len(crossing) > 1:
            continue
        same = next((layer for layer in found if call is not None and layer.call == call), None)
        if same is None:
            found.append(Layer(call or ModuleCall(""), "", 0, attention))
        elif id(attention) in crossing:
            same.cross = attention
    numbered = numbers_of([layer.call for layer in found])
    _number(found, numbered)
    cores = frozenset(attention.core.name for attention in attentions)
    for layer, number in zip(found, numbered, strict=True):
        cross = None if layer.cross is None else layer.cross.core.name
        naming = Naming(
            everything,
            layer.call,
            number,
            core=layer.attention.core.name,
            cross=cross,
            others=cores - {layer.attention.core.name, cross},
            is_alone=len(found) == 1,
        )
        naming.give_names()
        layer.members, layer.nodes, layer.missing = naming.members, naming.nodes, naming.missing
        layer.has_features_last = naming.has_features_last
    return found


def _number(layers: Sequence[Layer], numbered: Sequence[LayerNumber]) -> None:
    """Give each layer its layer within its stack, and stacks a name where there are several."""
    stacks = [stack_of(layer.call, number) for layer, number in zip(layers, numbered, strict=True)]
    names = short_names(list(dict.fromkeys(stacks)))
    for stack, name in names.items():
        members = [at for at, other in enumerate(stacks) if other == stack]
        numbers = [numbered[at].number for at in members]
        by_number = len(set(numbers)) == len(numbers)
        for i, at in enumerate(members):
            number = numbered[at].number
            layers[at].number = number if by_number and number is not None else i
            layers[at].stack = name


def _is_cross(everything: Stream, attention: Attention) -> bool:
    """Whether keys come from another stack than queries: from outside of the attention's layer."""
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


def _layer_call(attention: Attention, holders: Counter[ModuleCall]) -> ModuleCall | None:
    """The outermost numbered module that holds one self-attention; else the outermost at all."""
    alone = [call for call in attention.core.modules if holders[call] <= 1]
    numbered = [call for call in alone if call.path.rpartition(".")[2].isdigit()]
    return next(iter(numbered or alone), None)
