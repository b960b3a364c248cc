"""Names along the residual stream: which sums and which terms of a layer are what, for certain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conewise.program.operations import ADDITIONS
from conewise.program.records import ModuleCall, Ref
from conewise.structure.residual.branches import Branch, branch_of, is_elementwise, projections
from conewise.structure.residual.neurons import find_neurons
from conewise.structure.residual.numbering import LayerNumber
from conewise.structure.residual.positionwise import by_position, has_features_last
from conewise.structure.residual.stream import Addition, Stream

KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "pre", "post")
_ORDER = (
    "attn_out",
    "resid_mid",
    "resid_pre",
    "cross_attn_out",
    "resid_mid_cross",
    "resid_post",
    "mlp_out",
    "pre",
    "pre_linear",
    "post",
)


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
    """The names of one layer: `nodes` by kind, and for every other kind of `KINDS` the reason in `missing`.

    The layer is a module where that holds the sums; else it is what lies around the attention's sum, as far
    as the numbers in the paths of modules say that it is of the same layer. `members` are its records.
    """

    def __init__(
        self,
        everything: Stream,
        call: ModuleCall,
        number: LayerNumber,
        *,
        core: str,
        cross: str | None,
        others: Iterable[str | None],
        is_alone: bool,
    ) -> None:
        """For the attention whose result is `core`; `others` are the results of other layers' attentions."""
        self._wiring = everything.wiring
        self._everything = everything
        self._call = call
        self._number = number
        self._core, self._cross = core, cross
        self._others = frozenset(others)
        self._is_alone = is_alone
        self.members = self._wiring.members(call)
        self.has_features_last = False
        self.nodes: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def give_names(self) -> None:
        """Find the additions of the layer, and name what is certain of them."""
        own = Stream(self._wiring, self.members)
        found = bool(self._call.path) and self._follow(own, is_module=True)
        if not found or not (self._number.is_of(self._call) or self._has_mlp()):
            found = self._follow(self._everything, is_module=False)
            self.members |= self._between() if found else frozenset()
        if not found:
            self._miss(KINDS, "no sum adds the attention's result to a stream that the attention reads")
            return
        self.has_features_last = self._find_features()
        self._name_attention()
        self._name_sums()
        self._name_mlp()
        self.nodes = {kind: self.nodes[kind] for kind in _ORDER if kind in self.nodes}

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
        """Whether an addition is of this layer; None where nothing says so."""
        records = [record for term in addition.terms for record in self._above(term, addition).records]
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

    def _above(self, term: str, addition: Addition) -> Branch:
        return branch_of(self._wiring, term, self._stream.members, (addition.source,))

    def _why_not_leaving(self) -> str:
        """Why the last sum is not what leaves the module; '' where it is, normed or not."""
        wiring, last = self._wiring, self._additions[-1].total
        leaving = [
            name
            for name in self.members & wiring.varying
            if Ref(name) in wiring.program.outputs
            or any(reader.name not in self.members for reader in wiring.readers.get(name, ()))
        ]
        if not any(self._stream.source(name) == last for name in leaving):
            return f"what leaves {str(self._call)!r} is not the last sum that attention is in, {last!r}"
        if self._number.is_ambiguous and any(map(self._is_beside, self._everything.behind(self._additions))):
            return f"what is added behind {str(self._call)!r} may be of the same layer, or not"
        return ""

    def _is_beside(self, addition: Addition) -> bool:
        """Whether an addition holds no attention of another layer."""
        records = [record for term in addition.terms for record in self._above(term, addition).records]
        return not any(record.name in self._others for record in records)

    def _between(self) -> frozenset[str]:
        """The records between the stream that enters and the last sum."""
        members = self._stream.members
        entering = self._wiring.above(self._additions[0].carried, members)
        return self._wiring.above(self._additions[-1].total, members) - entering

    # -- what the terms are -------------------------------------------------------------------

    def _all_terms(self) -> list[Term]:
        return [part for parts in self._parts for part in parts]

    def _has_mlp(self) -> bool:
        return any(part.kind == "mlp" for part in self._all_terms())

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
        """What the term of an attention holds beside it; '' where it is the attention's alone."""
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
                if not gates and any(map(self._is_float, beside)):
                    return f"{record.name!r} joins attention with {beside[0]!r}"
        return ""

    def _is_float(self, name: str) -> bool:
        record = self._wiring.records.get(name)
        return record is None or record.dtype is None or record.dtype.is_floating_point

    def _find_features(self) -> bool:
        """Whether the stream's features are known to lie last: attention shows it, and nothing denies it."""
        shown = [(p.kind, has_features_last(self._wiring, self._branch(p.node))) for p in self._all_terms()]
        return ("attention", True) in shown and all(is_last is not False for _, is_last in shown)

    # -- names --------------------------------------------------------------------------------

    def _name_attention(self) -> None:
        for kind, name in (("attention", "attn_out"), ("cross", "cross_attn_out")):
            parts = [part for part in self._all_terms() if part.kind == kind]
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
        if self._is_module and first.source not in self.members:
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
        parts = self._all_terms()
        mlps = [part for part in parts if part.kind == "mlp"]
        others = [part.why for part in parts if not part.kind]
        kinds = ["mlp_out", "pre", "post"]
        if len(mlps) > 1:
            nodes = " and ".join(repr(part.node) for part in mlps)
            self._miss(kinds, f"{len(mlps)} MLPs are added to the stream in this layer, {nodes}")
        elif self._doubt:
            self._miss(kinds, self._doubt)
        elif not mlps:
            why = f"no term of the stream is an MLP for certain: {'; '.join(others)}"
            self._miss(kinds, why if others else "nothing but attention is added to the stream in this layer")
        elif not self.has_features_last:
            self._miss(kinds, "features are not known to be the last dimension of the stream")
        else:
            self.nodes["mlp_out"] = mlps[0].node
            self._name_neurons(mlps[0])

    def _name_neurons(self, mlp: Term) -> None:
        if mlp.is_routed:
            self._miss(["pre", "post"], "the MLP is a mixture of experts, each with neurons of its own")
            return
        neurons = find_neurons(self._wiring, self._branch(mlp.node))
        self.nodes |= neurons
        if not neurons:
            reason = "the MLP is not one pair of projections with an activation between"
            self._miss(["pre", "post"], reason)
