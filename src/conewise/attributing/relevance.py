"""Relevance instead of gradients: how each operation of a program passes relevance back (RelP).

Values are those of the program. What is recorded for the way back is linear: norms with their scale as a
constant, attention with its pattern as a constant, an activation function as a multiple of what it reads, and
of a product of two values each factor with half of it (Jafari et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from conewise.anatomy.attention import Attention
from conewise.anatomy.wiring import Wiring, reached
from conewise.errors import GradientError
from conewise.program.records import (
    ATTENTION,
    BIASED_PRODUCTS,
    CONTRACTIONS,
    CONVOLUTIONS,
    DIMENSION_MOVES,
    DISPATCHES,
    ELEMENTWISE,
    LINEAR,
    LOOKUPS,
    NORMS,
    PADS,
    RECURRENT,
    SCALINGS,
    SELECTIONS,
    TRIANGLES,
    Program,
    Record,
    Ref,
)
from conewise.program.walk import WalkStep

Tensor = torch.Tensor

Ruled = Callable[[Callable[..., Any], Sequence[Any], Any], Any]
"""A record's value by its rule: of the operation, what it reads, and the value that relevance goes to."""

SOFTMAXES = frozenset({"softmax", "_softmax"})
"""Operations that make a pattern of scores."""

SCALES = frozenset({"rsqrt", "sqrt", "std", "var", "linalg_vector_norm", "norm"})
"""The operations of a norm's divisor: constants on the way back."""

_LINEAR = (
    LINEAR
    | (CONTRACTIONS - RECURRENT)
    | CONVOLUTIONS
    | LOOKUPS
    | PADS
    | DIMENSION_MOVES
    | SELECTIONS
    | TRIANGLES
    | (DISPATCHES - {"one_hot"})
    | {"where", "masked_fill", "dropout", "cumsum", "roll", "flip", "expand_as", "movedim"}
)
_AFFINE = frozenset({"add", "sub", "rsub", "neg"}) | (ELEMENTWISE & LINEAR)


class Relevance:
    """The rules of one program, by record: `rules`, and `entries`, where relevance goes past several records.

    `expect(nodes)` raises GradientError for an operation on the way back that has no rule.
    """

    def __init__(self, program: Program, attentions: Sequence[Attention], targets: Collection[str]) -> None:
        self._program, self._records = program, program.record_of
        self.rules: dict[str, Ruled] = {}
        self.entries: dict[str, str] = {}
        self.inside: dict[str, str] = {}
        self._cut = dict(self._cuts(attentions))
        for name, cut in self._cut.items():
            self.rules[name] = _detaching(self._records[name], cut)
        self._activations()
        self._carrying = self._found_carrying()
        self.live = self._found_live(targets)
        self.rules = {name: rule for name, rule in self.rules.items() if name in self.live}
        self._without: dict[str, str] = {}
        for name in self.live:
            if name in self._records and name not in self.rules:
                self._give(self._records[name])

    def compute(self, step: WalkStep, operands: list[Any], values: Mapping[str, Any]) -> Any:
        """Return the value of a step of a walk, recorded by the rule of its record."""
        rule = self.rules.get(step.node)
        if rule is None:
            return step.rule(*operands)
        return rule(step.rule, operands, values.get(self.entries.get(step.node, "")))

    def expect(self, nodes: Collection[str], behind: Collection[str]) -> None:
        """Raise GradientError where relevance would pass an operation without a rule."""
        for name in nodes:
            if name in self.inside and name not in self.entries.values():
                raise GradientError(
                    f"{name!r} lies inside of the activation function that ends in {self.inside[name]!r}, "
                    "which 'relp' passes as a whole. Attribute to what it reads, or to what it returns."
                )
        for name in behind:
            if name in self._without:
                record = self._records[name]
                where = f", {record.modules[-1]}" if record.modules and str(record.modules[-1]) else ""
                raise GradientError(
                    f"'relp' has no rule for {name!r} ({record.op}{where}): {self._without[name]}. Take "
                    "method='atp' or 'eap', or attribute to sites behind it."
                )

    # -- where relevance goes ------------------------------------------------------------------

    def _cuts(self, attentions: Sequence[Attention]) -> Iterator[tuple[str, frozenset[str]]]:
        """The records that read something as a constant, and what."""
        wiring = Wiring(self._program)
        for attention in attentions:
            core = attention.core
            if core.op == ATTENTION:
                value = core.args[2].name
                yield core.name, frozenset(core.inputs) - {value}
            else:
                yield core.name, frozenset({wiring.factors(core)[0]})
        for record in self._program.records:
            if self._is_scale(record):
                yield record.name, frozenset(record.inputs)

    def _is_scale(self, record: Record) -> bool:
        if record.op == "pow" and len(record.args) > 1:
            return isinstance(record.args[1], int | float) and record.args[1] < 0
        return record.op in SCALES

    def _varying(self, record: Record) -> list[str]:
        """Return the inputs of a record that vary, and are no constants on the way back."""
        varying, cut = self._program.varying, self._cut.get(record.name, frozenset())
        return [name for name in record.inputs if name in varying and name not in cut]

    def _activations(self) -> None:
        """Find functions of single values: what they begin and end with."""
        roots: dict[str, str] = {}
        affine: set[str] = set()
        groups: dict[str, list[str]] = {}
        for record in self._program.records:
            own = self._varying(record)
            found = {roots.get(name, name) for name in own}
            if record.op not in ELEMENTWISE or len(found) != 1 or record.name in self._cut:
                continue
            (root,) = found
            roots[record.name] = root
            groups.setdefault(root, []).append(record.name)
            if self._is_affine(record, own) and all(name == root or name in affine for name in own):
                affine.add(record.name)
        outputs = {out.name for out in self._program.outputs if isinstance(out, Ref)}
        for root, members in groups.items():
            inside = set(members)
            for name in members:
                readers = self._program.readers.get(name, ())
                if name in affine or (name not in outputs and all(one.name in inside for one in readers)):
                    continue
                self._note_activation(name, root, inside, affine)

    def _is_affine(self, record: Record, own: Sequence[str]) -> bool:
        """Return True if an operation on single values is affine in what varies."""
        if record.op not in SCALINGS | {"divide"}:
            return record.op in _AFFINE
        varies = [isinstance(arg, Ref) and arg.name in own for arg in record.args]
        return sum(varies) == 1 and (varies[0] or record.op not in {"div", "divide"})

    def _note_activation(self, end: str, root: str, members: set[str], affine: set[str]) -> None:
        """The function that ends there: it begins with the last value through which all ways lead."""
        region = self._above(end, root, members)
        ahead = [name for name in region if name in affine]
        ahead.sort(key=self._program.order.__getitem__, reverse=True)
        begin = next((name for name in ahead if root not in self._above(end, root, members, name)), root)
        self.entries[end] = begin
        self.rules[end] = _multiple
        for name in self._above(end, begin, members) - {end, begin}:
            self.inside[name] = end

    def _above(self, end: str, root: str, members: set[str], without: str = "") -> set[str]:
        """The members that lie before `end`, and the root where a way leads there, not past one."""

        def onward(name: str) -> list[str]:
            read = () if name == root else self._varying(self._records[name])
            return [one for one in read if one != without and (one in members or one == root)]

        return set(reached([end], onward))

    def _found_carrying(self) -> set[str]:
        """Return the values that depend on inputs by more than constants."""
        found = {leaf.name for leaf in self._program.inputs}
        for record in self._program.records:
            if any(name in found for name in self._passed_to(record)):
                found.add(record.name)
        return found

    def _found_live(self, targets: Collection[str]) -> set[str]:
        """The values that relevance of `targets` goes to."""

        def onward(name: str) -> list[str]:
            record = self._records.get(name)
            return [] if record is None else self._passed_to(record)

        return set(reached(targets, onward))

    def _passed_to(self, record: Record) -> list[str]:
        """Return what relevance of a record's value goes to."""
        entry = self.entries.get(record.name)
        return self._varying(record) if entry is None else [entry]

    def _give(self, record: Record) -> None:
        """Find the rule of a record, or why it has none."""
        own = [name for name in self._varying(record) if name in self._carrying]
        op = record.op
        if not own:
            return
        divisors = [arg.name for arg in record.args[1:] if isinstance(arg, Ref)]
        if op in NORMS:
            self.rules[record.name] = _norm(record)
        elif op in {"div", "divide"}:
            if any(name in own for name in divisors):
                self._without[record.name] = "it divides by a value that varies"
        elif op in SCALINGS:
            if len(own) > 1:
                self.rules[record.name] = _half
        elif op in CONTRACTIONS:
            if len([name for name in own if name in _factors(record)]) > 1:
                self._without[record.name] = "it multiplies two values that vary"
        elif op not in _LINEAR:
            self._without[record.name] = "it is not linear, and no function of single values"


TEMPERATURE = 2.0
"""How much softer the softmax is on the way back that GIM takes."""


class GradientInteractions(Relevance):
    """The rules of GIM (Edin et al. 2025): gradients that see what several factors do together.

    Norms have their scale as a constant. Of a product of two values that vary (scores, the pattern's with the
    values, a gate) each factor has half of the gradient. The softmax of attention passes back by the pattern
    of scores that are divided by `TEMPERATURE`.
    """

    def __init__(self, program: Program, attentions: Sequence[Attention], targets: Collection[str]) -> None:
        self._fused = {one.core.name for one in attentions if one.core.op == ATTENTION}
        super().__init__(program, attentions, targets)

    def _cuts(self, _: Sequence[Attention]) -> Iterator[tuple[str, frozenset[str]]]:
        for record in self._program.records:
            if self._is_scale(record):
                yield record.name, frozenset(record.inputs)

    def _activations(self) -> None:
        """Find activation functions, which pass back their gradients: no product inside of one is halved."""
        kept = dict(self.rules)
        super()._activations()
        self._elementwise = {*self.inside, *self.entries}
        self.rules, self.entries, self.inside = kept, {}, {}

    def _give(self, record: Record) -> None:
        own = [name for name in self._varying(record) if name in self._carrying]
        if record.op in NORMS and own:
            self.rules[record.name] = _norm(record)
        elif record.name in self._fused:
            self.rules[record.name] = _attention(record)
        elif record.op in SOFTMAXES:
            self.rules[record.name] = _softened
        else:
            factors = own if record.op in SCALINGS - {"div", "divide"} else []
            factors = factors or [name for name in own if name in _factors(record)]
            is_product = record.op in SCALINGS - {"div", "divide"} or record.op in CONTRACTIONS
            if is_product and len(factors) > 1 and record.name not in self._elementwise:
                self.rules[record.name] = _half


def _factors(record: Record) -> set[str]:
    """Return the factors of a product, without what it adds."""
    args = record.args[1:3] if record.op in BIASED_PRODUCTS else record.args
    return {leaf.name for leaf in tree_leaves(args) if isinstance(leaf, Ref)}


def _arguments(record: Record, inputs: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what a record reads by the names of its operation's arguments."""
    given = dict(zip(record.inputs, inputs, strict=True))
    args = {**dict(zip(names, record.args, strict=False)), **record.kwargs}
    return {name: given[one.name] if isinstance(one, Ref) else one for name, one in args.items()}


# -- the rules -----------------------------------------------------------------------------------


def _plainly(compute: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    with torch.no_grad():
        return compute(*inputs)


def _constant(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _detaching(record: Record, cut: Collection[str]) -> Ruled:
    """Some of what a record reads is a constant."""

    def rule(compute: Callable[..., Any], inputs: Sequence[Any], _: Any) -> Any:
        pairs = zip(record.inputs, inputs, strict=True)
        return compute(*[_constant(value) if name in cut else value for name, value in pairs])

    return rule


def _multiple(compute: Callable[..., Any], inputs: Sequence[Any], entry: Any) -> Any:
    """f(x) as a multiple of x, with f(x) / x as a constant; where x is 0, that is 0."""
    value = _plainly(compute, inputs)
    if not isinstance(entry, torch.Tensor) or not entry.requires_grad:
        return value
    own = entry.detach()
    ratio = torch.where(own == 0, torch.zeros_like(value), value / own.to(value.dtype))
    return _carried(value, entry.to(value.dtype) * ratio)


def _halved(value: Tensor) -> Tensor:
    return _carried(value, 0.5 * value)


def _half(compute: Callable[..., Any], inputs: Sequence[Any], _: Any) -> Any:
    """A product of two values: each with half of it."""
    return _halved(compute(*inputs))


def _norm(record: Record) -> Ruled:
    """A norm with its scale as a constant."""
    names = ("bias", "eps") if record.op == "layer_norm" else ("eps",)

    def rule(compute: Callable[..., Any], inputs: Sequence[Any], _: Any) -> Any:
        value = _plainly(compute, inputs)
        given = _arguments(record, inputs, ("x", "shape", "weight", *names))
        x, weight, eps = given["x"], given.get("weight"), given.get("eps")
        if not x.requires_grad:
            return value
        over = list(range(-len(given["shape"]), 0))
        if record.op == "layer_norm":
            x, eps = x - x.mean(over, keepdim=True), 1e-5 if eps is None else eps
        elif eps is None:
            eps = torch.finfo(x.dtype).eps
        scale = x.detach().square().mean(over, keepdim=True).add(eps).rsqrt()
        linear = x * scale if weight is None else x * scale * _constant(weight)
        return _carried(value, linear.to(value.dtype))

    return rule


def _carried(value: Tensor, linear: Tensor) -> Tensor:
    """The value, with what `linear` passes on."""
    found: Tensor = _Carried.apply(value.detach(), linear)  # type: ignore[no-untyped-call]
    return found


class _Carried(torch.autograd.Function):
    """A value whose gradient goes to another one."""

    @staticmethod
    def forward(_: Any, value: Tensor, __: Tensor) -> Tensor:
        """The value as it is."""
        return value.view_as(value)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        """All to the other one."""
        return None, gradients[0]


class _Softened(torch.autograd.Function):
    """A softmax over the last dimension whose way back is that of a softer one."""

    @staticmethod
    def forward(context: Any, scores: Tensor) -> Tensor:
        """The softmax as it is."""
        context.save_for_backward((scores / TEMPERATURE).softmax(-1))
        return scores.softmax(-1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """The Jacobian of the softer pattern."""
        (pattern,) = context.saved_tensors
        (gradient,) = gradients
        found: Tensor = pattern * (gradient - (gradient * pattern).sum(-1, keepdim=True))
        return found


def _softer(scores: Tensor) -> Tensor:
    found: Tensor = _Softened.apply(scores)  # type: ignore[no-untyped-call]
    return found


def _softened(compute: Callable[..., Any], inputs: Sequence[Any], _: Any) -> Any:
    """A softmax, passed back by a softer one."""
    value = _plainly(compute, inputs)
    scores = inputs[0]
    return value if not scores.requires_grad else _carried(value, _softer(scores).to(value.dtype))


def _attention(record: Record) -> Ruled:
    """Fused attention: scores and the pattern's product with half each, the softmax by a softer one."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

    def rule(compute: Callable[..., Any], inputs: Sequence[Any], _: Any) -> Any:
        value, given = _plainly(compute, inputs), _arguments(record, inputs, names)
        query, key, values = (given[name] for name in names[:3])
        if given.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, values = (one.repeat_interleave(times, -3) for one in (key, values))
        scale = given.get("scale") or query.shape[-1] ** -0.5
        scores = _halved(query @ key.transpose(-1, -2)) * scale
        mask = given.get("attn_mask")
        if given.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return _carried(value, _halved(_softer(scores) @ values).to(value.dtype))

    return rule
