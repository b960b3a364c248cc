"""Names along the residual stream: layers, norms and neurons, where they are certain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from conewise.anatomy.attention import Attention
from conewise.anatomy.positionwise import (
    Branch,
    branch_of,
    by_position,
    has_features_last,
    is_elementwise,
    is_light,
    projections,
)
from conewise.anatomy.residual import Addition, LayerNumber, Stream, numbers_of, short_names
from conewise.anatomy.wiring import Wiring
from conewise.program.records import (
    ADDITIONS,
    CASTS,
    CHOICES,
    NORMS,
    NUMBER_KEEPING,
    REARRANGEMENTS,
    SELECTIONS,
    SOFTMAX,
    ModuleCall,
    Record,
    Ref,
)
from conewise.program.walk import field_names


def find_neurons(wiring: Wiring, branch: Branch) -> dict[str, str]:
    """pre, post and (of a gated MLP) pre_linear: the neurons before and after the activation and the gate.

    Empty where the branch is not one projection up (or two, one of which gates the other), elementwise
    operations, and one projection down.
    """
    members = frozenset(record.name for record in branch.records)
    if projections(wiring, branch, branch.entries) != 2:
        return {}
    above = wiring.upward(branch.term, lambda r: wiring.is_weighted(r) or r.name not in members)
    down = [record for record in above if wiring.is_weighted(record)]
    if len(down) != 1 or not wiring.is_linear(down[0]):
        return {}
    post = wiring.operands(down[0])[0]
    while (record := wiring.records.get(post)) is not None and record.op in REARRANGEMENTS:
        if len(wiring.shape(post) or ()) != 2:
            break
        post = wiring.operands(record)[0]  # as it was before it was flattened for the projection

    def is_edge(record: Record) -> bool:
        """True for the last rearranged value of a projection."""
        while record.op in REARRANGEMENTS | SELECTIONS and record.name in members:
            operand = wiring.operands(record)
            if not operand or operand[0] not in wiring.records:
                return True
            record = wiring.records[operand[0]]
        return wiring.is_linear(record) or record.name not in members

    between = list(wiring.upward(post, is_edge))
    edges = [record.name for record in between if is_edge(record)]
    if post not in members or post in edges or not 1 <= len(edges) <= 2:
        return {}
    for record in between:
        if record.name in edges:
            if (wiring.shape(record.name) or ())[-1:] != (wiring.shape(post) or ())[-1:]:
                return {}
        elif not is_elementwise(record) and record.op not in REARRANGEMENTS:
            return {}
    if len(edges) == 1:
        return {"pre": edges[0], "post": post}
    product = wiring.records[post]
    while product.op in REARRANGEMENTS | CASTS:
        product = wiring.records[wiring.operands(product)[0]]
    plain = [edge for edge in edges if edge in wiring.operands(product)]
    if product.op != "mul" or len(plain) != 1:
        return {}  # not an activated projection times a plain one
    gate = next(edge for edge in edges if edge != plain[0])
    return {"pre": gate, "pre_linear": plain[0], "post": post}


def find_router(wiring: Wiring, branch: Branch) -> dict[str, str]:
    """router_logits, and expert_weights where a softmax or a sigmoid makes shares of them before the choice.

    Experts may be chosen in several steps (groups first), all of them from one projection of each position:
    then there are router_logits alone. Empty where the choices are made from several projections.
    """
    choices = [record for record in branch.records if record.op in CHOICES]
    above = {
        record.name: record
        for choice in choices
        for record in wiring.upward(wiring.operands(choice)[0], wiring.is_linear)
    }
    logits = [name for name, record in above.items() if wiring.is_linear(record)]
    if len(logits) != 1:
        return {}
    found = {"router_logits": logits[0]}
    between = [one for name, one in above.items() if name not in logits and one.op not in NUMBER_KEEPING]
    if len(choices) > 1 or len(between) != 1 or between[0].op not in SOFTMAX | {"sigmoid"}:
        return found
    return {**found, "expert_weights": wiring.operands(choices[0])[0]}


KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "pre", "post")
_ORDER = (
    *("attn_out", "resid_mid", "resid_pre", "cross_attn_out", "resid_mid_cross", "resid_post"),
    *("mlp_out", "pre", "pre_linear", "post", "router_logits", "expert_weights"),
)


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
    attention: Attention
    stack: str = ""
    number: int = 0
    cross: Attention | None = None
    members: frozenset[str] = frozenset()
    has_features_last: bool = False
    nodes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Term:
    """A term that is added to the stream, and what it is: attention, cross or mlp; '' for anything else.

    `why` says why it is not an MLP, or what an attention's term holds beside it.
    """

    node: str
    kind: str
    why: str = ""
    is_routed: bool = False


class Naming:
    """Gives names to one layer: its `nodes` by kind, and for every other kind of `KINDS` why it is missing.

    The layer is a module where that holds the sums; else it is what lies around the attention's sum, as far
    as the numbers in the paths of modules say that it is of the same layer.
    """

    def __init__(
        self, everything: Stream, layer: Layer, number: LayerNumber, cores: frozenset[str], *, is_alone: bool
    ) -> None:
        """`cores` are the results of all layers' attentions."""
        self._everything, self._wiring = everything, everything.wiring
        self._layer, self._call, self._number = layer, layer.call, number
        self.nodes, self.missing = layer.nodes, layer.missing
        self._core = layer.attention.core.name
        self._cross = None if layer.cross is None else layer.cross.core.name
        self._others: frozenset[str | None] = cores - {self._core, self._cross}
        self._is_alone = is_alone

    def give_names(self) -> None:
        """Find the additions of the layer, and name what is certain of them."""
        layer = self._layer
        layer.members = self._wiring.members(self._call)
        own = Stream(self._wiring, layer.members)
        found = bool(self._call.path) and self._follow(own, is_module=True)
        if not found or not (
            self._number.is_of(self._call) or any(part.kind == "mlp" for part in self._terms)
        ):
            found = self._follow(self._everything, is_module=False)
            layer.members |= self._between() if found else frozenset()
        if not found:
            self._miss(KINDS, "no sum adds the attention's result to a stream that the attention reads")
            return
        # Attention shows that the stream's features lie last, and nothing denies it.
        shown = [
            (part.kind, has_features_last(self._wiring, self._branch(part.node))) for part in self._terms
        ]
        layer.has_features_last = ("attention", True) in shown and all(last is not False for _, last in shown)
        self._name_attention()
        self._name_sums()
        self._name_mlp()
        layer.nodes = {kind: self.nodes[kind] for kind in _ORDER if kind in self.nodes}

    def _miss(self, kinds: Sequence[str], reason: str) -> None:
        self.missing.update(dict.fromkeys(kinds, reason))

    # -- which additions are the layer's ------------------------------------------------------

    def _follow(self, stream: Stream, *, is_module: bool) -> bool:
        """Find the layer's additions along a stream; False where attention is added to none."""
        self._stream, self._is_module = stream, is_module
        first = stream.first_with(self._core)
        if first is None:
            return False
        self._additions = [first]
        self._doubt = self._extend()
        self._at = self._additions.index(first)
        self._values = {value for one in self._additions for value in (one.source, one.total)}
        self._parts = [[part for term in one.terms for part in self._split(term)] for one in self._additions]
        self._terms = [part for parts in self._parts for part in parts]
        return True

    def _extend(self) -> str:
        """Find the additions before and behind the attention's; says why the end is not certain."""
        found, stream = self._additions, self._stream
        while (before := stream.addition(found[0].source)) is not None and self._belongs(before):
            found.insert(0, before)
        while True:
            behind = stream.behind(found)
            if len(behind) > 1:
                totals = " and ".join(repr(one.total) for one in behind)
                return f"the stream goes on in more than one sum, {totals}"
            if not behind:
                return self._why_not_leaving() if self._is_module else ""
            belongs = self._belongs(behind[0])
            if belongs is None:
                return f"nothing says whether {behind[0].total!r} is of this layer or of the next"
            if not belongs:
                return ""
            found.append(behind[0])

    def _belongs(self, addition: Addition) -> bool | None:
        """True if an addition is of this layer; None where nothing says so."""
        records = self._added(addition)
        if any(record.name in self._others for record in records):
            return False
        if self._is_module or self._is_alone:
            return True
        calls = {r.modules[-1] for r in records if self._wiring.is_weighted(r) and r.modules}
        verdicts = {
            self._number.holds(call) if self._number.number is not None else call.call == self._call.call
            for call in calls
        }
        return verdicts.pop() if len(verdicts) == 1 else None

    def _added(self, addition: Addition) -> list[Record]:
        """The records that the terms of an addition are made by."""
        stop = (addition.source,)
        branches = (branch_of(self._wiring, term, self._stream.members, stop) for term in addition.terms)
        return [record for branch in branches for record in branch.records]

    def _why_not_leaving(self) -> str:
        """Why the last sum is not what leaves the module; '' where it is, normed or not."""
        wiring, last = self._wiring, self._additions[-1].total
        leaving = [
            name
            for name in self._layer.members & wiring.varying
            if Ref(name) in wiring.program.outputs
            or any(reader.name not in self._layer.members for reader in wiring.readers.get(name, ()))
        ]
        if not any(self._stream.source(name) == last for name in leaving):
            return f"what leaves {str(self._call)!r} is not the last sum that attention is in, {last!r}"
        behind = self._everything.behind(self._additions) if self._number.is_ambiguous else ()
        if any(all(one.name not in self._others for one in self._added(addition)) for addition in behind):
            return f"what is added behind {str(self._call)!r} may be of the same layer, or not"
        return ""

    def _between(self) -> frozenset[str]:
        """The records between the stream that enters and the last sum."""
        members = self._stream.members
        entering = self._wiring.above(self._additions[0].carried, members)
        return self._wiring.above(self._additions[-1].total, members) - entering

    # -- what the terms are -------------------------------------------------------------------

    def _split(self, term: str) -> list[Term]:
        """The term as one part where all that it adds up is of one kind, else the parts of its operands."""
        operands = self._stream.operands(term)
        if operands is None:
            return [self._term(term)]
        parts = [part for operand in operands for part in self._split(operand)]
        whole = self._term(term)
        return [whole] if whole.kind and all(part.kind == whole.kind for part in parts) else parts

    def _term(self, node: str) -> Term:
        wiring, branch = self._wiring, self._branch(node)
        names = {record.name for record in branch.records}
        for kind, core in (("attention", self._core), ("cross", self._cross)):
            if core in names:
                return Term(node, kind, self._beside(branch, core))
        if not names.isdisjoint(self._others):
            return Term(node, "", f"{node!r} is another attention's")
        if not has_features_last(wiring, branch):
            return Term(node, "", f"{node!r} reads a stream whose features are not known to lie last")
        verdict = by_position(wiring, branch)
        if verdict.doubt:
            return Term(node, "", f"{node!r} {verdict.doubt}")
        if projections(wiring, branch, branch.entries) < 2:
            return Term(node, "", f"{node!r} is not two projections with a nonlinearity between")
        return Term(node, "mlp", is_routed=verdict.is_routed)

    def _branch(self, node: str) -> Branch:
        return branch_of(self._wiring, node, self._stream.members, self._values)

    def _beside(self, branch: Branch, core: str) -> str:
        """Describe what the term of an attention holds beside it; '' where it is the attention's alone."""
        wiring = self._wiring
        names = frozenset(record.name for record in branch.records)
        if not names.isdisjoint((self._others | {self._core, self._cross}) - {core}):
            return f"{branch.term!r} holds another attention too"
        if projections(wiring, branch, [core]) > 1:
            return f"{branch.term!r} holds more than attention and its output projection"
        cone, above = wiring.cone(core, names) | {core}, wiring.above(core, names)
        for record in branch.records:
            if record.name in cone and record.name != core:
                beside = [read for read in wiring.operands(record) if read not in cone and read not in above]
                gates = is_elementwise(record) and record.op not in ADDITIONS
                dtypes = [one.dtype if one else None for one in map(wiring.records.get, beside)]
                if not gates and any(dtype is None or dtype.is_floating_point for dtype in dtypes):
                    return f"{record.name!r} joins attention with {beside[0]!r}"
        return ""

    # -- names --------------------------------------------------------------------------------

    def _name_attention(self) -> None:
        for kind, name in (("attention", "attn_out"), ("cross", "cross_attn_out")):
            parts = [part for part in self._terms if part.kind == kind]
            if len(parts) == 1 and not parts[0].why:
                self.nodes[name] = parts[0].node
            elif parts:
                self._miss([name], parts[0].why or f"it is added in {len(parts)} parts")
            elif kind == "cross" and self._cross is not None:
                self._miss([name], "no sum adds cross-attention's result to the stream")

    def _name_sums(self) -> None:
        self._name_entry(self._additions[0])
        if self._doubt:
            self._miss(["resid_post"], self._doubt)
        else:
            self.nodes["resid_post"] = self._additions[-1].total
        why = self._why_no_middle()
        if why:
            self._miss(["resid_mid"], why)
        else:
            self.nodes["resid_mid"] = self._additions[self._at].total
        if self._cross is not None:
            behind = self._parts[self._at + 1 : self._at + 2]
            if "resid_mid" in self.nodes and "cross_attn_out" in self.nodes and len(behind[0]) == 1:
                self.nodes["resid_mid_cross"] = self._additions[self._at + 1].total
            else:
                self._miss(["resid_mid_cross"], "no sum behind resid_mid adds cross_attn_out alone")

    def _name_entry(self, first: Addition) -> None:
        """resid_pre: what enters the layer's module, or what the first sum begins with."""
        entry = self._stream.unchanged(first.carried)
        if self._is_module and first.source not in self._layer.members:
            self.nodes["resid_pre"] = first.source
        elif self._is_module:
            self._miss(["resid_pre"], f"the first sum begins with {entry!r}, which is made within the layer")
        elif all(part.node in self._wiring.cone(entry, self._stream.members) for part in self._parts[0]):
            self.nodes["resid_pre"] = entry
        else:
            self._miss(["resid_pre"], f"the first sum begins with {entry!r}, which not every branch reads")

    def _why_no_middle(self) -> str:
        """Why no sum is resid_pre + attn_out with something added behind it; '' where one is."""
        at, parts = self._at, self._parts[self._at]
        carried = self._additions[0].carried
        none = ", so no sum is resid_pre + attn_out"
        if any(part.kind == "mlp" for part in parts):
            return "attention and MLP are computed in parallel here, so no value of the stream lies between"
        if len(parts) > 1:
            other = next(part for part in parts if part.kind != "attention")
            return f"{other.node!r} is added together with attention{none}"
        if "attn_out" not in self.nodes:
            return f"attn_out is not certain: {self.missing['attn_out']}"
        if at:
            return f"{self._additions[at - 1].total!r} is summed before attention is added{none}"
        if "resid_pre" not in self.nodes:
            return f"resid_pre is not certain: {self.missing['resid_pre']}"
        if self._stream.unchanged(carried) != self.nodes["resid_pre"]:
            return f"attention is added to {carried!r}, which is not resid_pre itself{none}"
        if len(self._additions) == 1:
            return self._doubt or "nothing is added behind attention: its sum is resid_post"
        return ""

    def _name_mlp(self) -> None:
        mlps = [part for part in self._terms if part.kind == "mlp"]
        others = [part.why for part in self._terms if not part.kind]
        kinds = ["mlp_out", "pre", "post"]
        if len(mlps) > 1:
            nodes = " and ".join(repr(part.node) for part in mlps)
            self._miss(kinds, f"{len(mlps)} MLPs are added to the stream in this layer, {nodes}")
        elif self._doubt:
            self._miss(kinds, self._doubt)
        elif not mlps:
            why = f"no term of the stream is an MLP for certain: {'; '.join(others)}"
            self._miss(kinds, why if others else "nothing but attention is added to the stream in this layer")
        elif not self._layer.has_features_last:
            self._miss(kinds, "features are not known to be the last dimension of the stream")
        else:
            self.nodes["mlp_out"] = mlps[0].node
            self._name_neurons(mlps[0])

    def _name_neurons(self, mlp: Term) -> None:
        if mlp.is_routed:
            self._miss(["pre", "post"], "the MLP is a mixture of experts, each with neurons of its own")
            router = find_router(self._wiring, self._branch(mlp.node))
            self.nodes |= router
            if not router:
                self._miss(["router_logits", "expert_weights"], "experts are not chosen from one projection")
            elif len(router) == 1:
                why = "experts are not chosen once, from a softmax or a sigmoid of the router_logits alone"
                self._miss(["expert_weights"], why)
            return
        neurons = find_neurons(self._wiring, self._branch(mlp.node))
        self.nodes |= neurons
        if not neurons:
            self._miss(["pre", "post"], "the MLP is not one pair of projections with an activation between")


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
            found.append(Layer(call or ModuleCall(""), attention))
        elif id(attention) in crossing:
            same.cross = attention
    numbered = numbers_of([layer.call for layer in found])
    _number(found, numbered)
    cores = frozenset(attention.core.name for attention in attentions)
    for layer, number in zip(found, numbered, strict=True):
        Naming(everything, layer, number, cores, is_alone=len(found) == 1).give_names()
    return found


def _number(layers: Sequence[Layer], numbered: Sequence[LayerNumber]) -> None:
    """Give each layer its layer within its stack, and stacks a name where there are several."""
    stacks = [
        number.path if number.number is not None else layer.call.path.rpartition(".")[0]
        for layer, number in zip(layers, numbered, strict=True)
    ]
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
    """True if keys come from another stack than queries: from outside of the attention's layer."""
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


SCALES = ("ln1_scale", "ln2_scale")
"""The scales of a layer: of the norm that attention reads, and of that which the MLP reads."""

FINAL_SCALE = "ln_final_scale"
"""The scale of the norm that the unembedding reads."""


def scale_of(wiring: Wiring, layer: Layer, kind: str) -> tuple[str | None, str]:
    """The node of the scale of a norm, of a layer or behind the last one; or None, and why there is none."""
    nodes = layer.nodes
    if kind == FINAL_SCALE:
        names = field_names(wiring.program, "logits") or ()
        if len(names) != 1 or "resid_post" not in nodes:
            return None, "this model returns no logits that are made of its stream"
        return _between(wiring, nodes["resid_post"], names[0])
    if kind == "ln1_scale":
        query = layer.attention.activations.get("q")
        begin, end, what = nodes.get("resid_pre"), query.node if query else None, "queries"
    else:
        begin = nodes.get("resid_mid") or nodes.get("resid_pre")
        end, what = nodes.get("mlp_out"), "mlp_out"
    if begin is None or end is None:
        return None, f"its stream or its {what} could not be determined"
    return _between(wiring, begin, end)


def _between(wiring: Wiring, begin: str, end: str) -> tuple[str | None, str]:
    """The first 1/√ of the stream's own numbers on the way from one of its values."""
    cone = wiring.cone(begin)
    for name in sorted(wiring.above(end, until={begin}) & cone, key=wiring.order.__getitem__):
        record, shape = wiring.records[name], wiring.shape(name)
        above = wiring.above(name, until={begin}) & cone
        if not all(is_light(wiring.records[one]) for one in above):
            break  # behind the norm
        if record.op in NORMS:
            return None, (
                f"its norm is one operation ({record.op}, {name!r}), which never holds its scale. "
                "`run.decompose` and `run.logit_attribution` freeze it; to patch it, write the norm out in "
                "the module"
            )
        if record.op == "rsqrt" and shape and shape[-1] == 1:
            return name, ""
    return None, "no norm of the stream with a 1/√ of its own was found there"
