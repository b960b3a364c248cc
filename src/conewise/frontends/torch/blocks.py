"""Blocks: the layers of a transformer, with the sums that make up its residual stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from conewise.frontends.torch.attention import Attention
from conewise.frontends.torch.records import ModuleCall, Record, Ref
from conewise.frontends.torch.wiring import LAYOUT, PARTS, Wiring


@dataclass(slots=True)
class Block:
    """One layer: its call, its place in its stack, its attentions, and its nodes by kind.

    The stream's kinds are told by sums. `attn_out` and `mlp_out` are the terms that are added
    to the stream, after any norm of their own; `resid_mid` and `resid_post` are the sums, before
    any norm of theirs. So resid_mid = resid_pre + attn_out and resid_post = resid_mid + mlp_out
    hold in every sequential block, wherever its norms are. A parallel block has one sum only,
    resid_post = resid_pre + attn_out + mlp_out, and no resid_mid. Where the block norms its
    sums (BERT), what the next block reads is the normed value: it is that block's resid_pre.
    """

    call: ModuleCall
    stack: str
    layer: int
    attention: Attention
    cross: Attention | None = None
    nodes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def find_blocks(wiring: Wiring, attentions: list[Attention]) -> list[Block]:
    """The blocks that hold the attentions, in the order of computation."""
    crossing = {id(a) for a in attentions if _is_cross(wiring, a)}
    holders = Counter(call for a in attentions if id(a) not in crossing for call in a.core.modules)
    blocks: dict[ModuleCall, Block] = {}
    for attention in attentions:
        call = _block_call(attention, holders)
        if call is None and len(attentions) - len(crossing) > 1:
            continue
        call = call or ModuleCall("")
        if id(attention) in crossing and call in blocks:
            blocks[call].cross = attention
        elif call not in blocks:
            blocks[call] = Block(call, call.path.rpartition(".")[0], 0, attention)
    found = list(blocks.values())
    _number(found)
    for block in found:
        _find_stream(wiring, block)
    return found


def _is_cross(wiring: Wiring, attention: Attention) -> bool:
    """Whether keys come from another stack than queries: from outside of the attention's block."""
    query, key = attention.query_source, attention.key_source
    if query is None or key is None or query == key:
        return False
    calls = [call for call in attention.core.modules if call.path.rpartition(".")[2].isdigit()]
    if not calls:
        return False
    members = wiring.members(calls[0])
    return query in members and key not in members


def _block_call(attention: Attention, holders: Counter[ModuleCall]) -> ModuleCall | None:
    """The outermost numbered module that holds one self-attention; else the outermost at all."""
    alone = [call for call in attention.core.modules if holders[call] <= 1]
    numbered = [call for call in alone if call.path.rpartition(".")[2].isdigit()]
    return next(iter(numbered or alone), None)


def _number(blocks: list[Block]) -> None:
    """Give each block its layer within its stack, and stacks a name where there are several."""
    stacks = list(dict.fromkeys(block.stack for block in blocks))
    for stack in stacks:
        members = [block for block in blocks if block.stack == stack]
        tails = [block.call.path.rpartition(".")[2] for block in members]
        by_number = len(set(tails)) == len(tails) and all(tail.isdigit() for tail in tails)
        for i, (block, tail) in enumerate(zip(members, tails, strict=True)):
            block.layer = int(tail) if by_number else i
    for block in blocks:
        block.stack = _short(block.stack, stacks) if len(stacks) > 1 else ""


def _short(stack: str, stacks: list[str]) -> str:
    """The first part of a stack's path that no other stack shares in its place."""
    parts = stack.split(".")
    for i, part in enumerate(parts):
        if all(other == stack or other.split(".")[i : i + 1] != [part] for other in stacks):
            return part
    return stack


def _find_stream(wiring: Wiring, block: Block) -> None:
    members = wiring.members(block.call)
    merge = _merge(wiring, block.attention.core.name, members)
    if merge is None:
        reason = "no sum joins the attention's result to a residual stream"
        block.missing.update(dict.fromkeys(("resid_pre", "resid_mid", "resid_post", "attn_out"), reason))
        return
    total, term, other = merge
    block.nodes["attn_out"] = term
    if _has_linear(wiring, other, members):
        _find_parallel(wiring, block, members, total, term)
        return
    block.nodes["resid_mid"] = total
    origin = _origin(wiring, other, members)
    if origin:
        block.nodes["resid_pre"] = origin
    if block.cross is not None:
        crossed = _merge(wiring, block.cross.core.name, members)
        if crossed is not None:
            total, block.nodes["cross_attn_out"], _ = crossed
            block.nodes["resid_mid_cross"] = total
    _find_mlp(wiring, block, members, total)


def _merge(wiring: Wiring, core: str, members: frozenset[str]) -> tuple[str, str, str] | None:
    """The first sum of what depends on `core` with what does not: (sum, our term, the other)."""
    cone = wiring.cone(core, members) | {core}
    for name in sorted(cone, key=wiring.order.__getitem__):
        terms = _terms(wiring, wiring.records[name])
        if terms is None:
            continue
        inside = [term for term in terms if term in cone]
        outside = [term for term in terms if term not in cone]
        if len(inside) == 1 and len(outside) == 1:
            return name, inside[0], outside[0]
    return None


def _terms(wiring: Wiring, record: Record) -> tuple[str, str] | None:
    """The two varying terms of equal shape that the record adds up, or None."""
    if record.op != "add" or len(record.args) < 2:
        return None
    names = [leaf.name for leaf in record.leaves() if isinstance(leaf, Ref)]
    if len(names) != 2 or not wiring.varying.issuperset(names):
        return None
    first, second = names
    shape = wiring.shape(first)
    return (first, second) if shape and len(shape) >= 2 and shape == wiring.shape(second) else None


def _has_linear(wiring: Wiring, name: str, members: frozenset[str], above: str = "") -> bool:
    """Whether a weight is multiplied between the block's entry (or `above`) and `name`."""

    def stop(record: Record) -> bool:
        return record.name not in members or record.name == above

    return any(
        wiring.is_linear(record) and record.name in members and record.name != above
        for record in wiring.upward(name, stop)
    )


def _origin(wiring: Wiring, name: str, members: frozenset[str]) -> str | None:
    """The value of the same shape that enters the block and that `name` is made from."""
    shape = wiring.shape(name)
    queue = [name]
    while queue:
        current = queue.pop(0)
        if current not in members:
            if wiring.shape(current) == shape:
                return current
            continue
        queue.extend(wiring.operands(wiring.records[current]))
    return None


def _find_parallel(wiring: Wiring, block: Block, members: frozenset[str], total: str, term: str) -> None:
    """A block whose attention and MLP read the same stream and are added together."""
    block.missing["resid_mid"] = (
        "attention and MLP are computed in parallel here, so no value of the stream lies between"
    )
    cone = wiring.cone(total, members) | {total}
    sums = [n for n in cone if _terms(wiring, wiring.records[n])]
    last = max(sums, key=wiring.order.__getitem__)
    leaves, queue = [], [last]
    while queue:
        name = queue.pop()
        terms = _terms(wiring, wiring.records[name]) if name in members and name != term else None
        if terms:
            queue.extend(terms)
        else:
            leaves.append(name)
    block.nodes["resid_post"] = last
    for leaf in leaves:
        if leaf == term:
            continue
        if not _has_linear(wiring, leaf, members):
            block.nodes["resid_pre"] = _origin(wiring, leaf, members) or leaf
        else:
            block.nodes["mlp_out"] = leaf
            _find_neurons(wiring, block, members)


def _find_mlp(wiring: Wiring, block: Block, members: frozenset[str], middle: str) -> None:
    """The last sum of the block that joins the stream with what a weight made of it."""
    cone = wiring.cone(middle, members)
    for name in sorted(cone, key=wiring.order.__getitem__, reverse=True):
        terms = _terms(wiring, wiring.records[name])
        if terms is None or not all(term in cone or term == middle for term in terms):
            continue
        weighted = [t for t in terms if t != middle and _has_linear(wiring, t, members, middle)]
        if len(weighted) == 1:
            block.nodes["resid_post"], block.nodes["mlp_out"] = name, weighted[0]
            _find_neurons(wiring, block, members)
            return
    reason = "no sum after the attention's joins an MLP to the stream"
    block.missing.update(dict.fromkeys(("resid_post", "mlp_out"), reason))


def _find_neurons(wiring: Wiring, block: Block, members: frozenset[str]) -> None:
    """pre, pre_linear and post: the neurons before and after the activation (and the gate)."""
    reason = "the MLP is not one pair of projections with an activation between"
    block.missing.update(dict.fromkeys(("pre", "post"), reason))

    def stop(record: Record) -> bool:
        return wiring.is_linear(record) or record.name not in members

    above = list(wiring.upward(block.nodes["mlp_out"], stop))
    down = [record for record in above if wiring.is_linear(record)]
    if len(down) != 1:
        return
    post = _unflattened(wiring, wiring.operands(down[0])[0])
    edges = _projected(wiring, post, members)
    if post not in wiring.records or not 1 <= len(edges) <= 2:
        return
    if len(edges) == 2:
        gate = _gate(wiring, post, edges)
        if gate is None:
            return
        block.nodes["pre"], block.nodes["pre_linear"] = gate
    else:
        block.nodes["pre"] = edges[0]
    block.nodes["post"] = post
    for kind in ("pre", "post"):
        block.missing.pop(kind)


def _unflattened(wiring: Wiring, name: str) -> str:
    """The value before it was flattened to two dimensions for a projection, if it was."""
    record = wiring.records.get(name)
    shape = wiring.shape(name)
    while record is not None and record.op in LAYOUT and shape and len(shape) == 2:
        name = wiring.operands(record)[0]
        record, shape = wiring.records.get(name), wiring.shape(name)
    return name


def _projected(wiring: Wiring, post: str, members: frozenset[str]) -> list[str]:
    """The last rearranged values of projections that `post` is computed from."""

    def is_edge(record: Record) -> bool:
        current = record
        while current.op in LAYOUT | PARTS and current.name in members:
            operand = wiring.operands(current)
            if not operand or operand[0] not in wiring.records:
                return True
            current = wiring.records[operand[0]]
        return wiring.is_linear(current) or current.name not in members

    return [record.name for record in wiring.upward(post, is_edge) if is_edge(record)]


def _gate(wiring: Wiring, post: str, edges: list[str]) -> tuple[str, str] | None:
    """(gate, other) when `post` is the product of an activated projection and a plain one."""
    record = wiring.records[post]
    while record.op in LAYOUT | {"to", "_to_copy"}:
        record = wiring.records[wiring.operands(record)[0]]
    if record.op != "mul":
        return None
    plain = [edge for edge in edges if edge in wiring.operands(record)]
    return (next(e for e in edges if e != plain[0]), plain[0]) if len(plain) == 1 else None
