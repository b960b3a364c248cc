"""From the residual stream to the logits: the final norm with a run's own scale, and the unembedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.edges.edge_facts import EdgeFacts
from conewise.edges.linear_steps import normed, stepped
from conewise.edges.stacked_values import StackedValues
from conewise.errors import DecompositionError
from conewise.program.operations import BIASED_PRODUCTS, NUMBER_KEEPING, POINTWISE
from conewise.program.records import Record, Ref
from conewise.program.tensors import computing
from conewise.structure.axes.outputs import Outputs
from conewise.structure.components.components import Reader
from conewise.structure.wiring.affine import SAME, Walk, walk_to
from conewise.sweeps.planning.shapes.layout import compile_stacked_rule

Tensor = torch.Tensor
Read = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of logits of some tokens: `parts` is [part, prompt, pos, token], `rest` [prompt, pos, token].

    `rest` is what no part has: biases of the norm and of the unembedding. All add up to the logits.
    """

    parts: Tensor
    rest: Tensor


class Unembedding:
    """The way from the stream behind the last layer to the logits, as a linear map once scales are a run's.

    That is the final norm and one product with the vocabulary. Behind the product, logits may be scaled, or
    capped (Gemma 2): the factor that a cap comes to in the run is frozen, as the norm's scale is. Raises
    DecompositionError for a model that has something else there.
    """

    def __init__(self, facts: EdgeFacts, logits: str | None) -> None:
        self._facts = facts
        self._program = facts.components.program
        self._wiring = facts.components.wiring
        self._values = StackedValues(self._program)
        self.output = self._expect_logits(logits)
        self.reader = self._expect_reader()
        self._product = self._expect_product()
        (self._operand,) = self._wiring.operands(self._product)
        self._norm = self._expect_affine(self.reader.entry, self._operand)
        self._linear = [compile_stacked_rule(step.linear) for step in self._norm.steps]
        self._affine = [compile_stacked_rule(step.record) for step in self._norm.steps]
        self._behind = walk_to(self._wiring, [self._product.name], self.output)
        self._expect_pointwise()

    def shares(
        self, read: Read, parts: Tensor, constant: Tensor, tokens: Sequence[int], prompts: int
    ) -> Shares:
        """What the parts [part, batch, pos, d_model] of the stream have in the logits of these tokens.

        `constant` is what of the stream no part has, [batch, pos, d_model].
        """
        with computing():
            parts = self._facts.parts.as_node(self.reader.entry, parts)
            constant = self._facts.parts.as_node(self.reader.entry, constant[None])[0]
            reading = self._values.reading(read, 1)
            known: dict[str, Tensor] = {self.reader.entry: parts}
            fixed: dict[str, Tensor] = {self.reader.entry: constant}
            for step, linear, affine in zip(self._norm.steps, self._linear, self._affine, strict=True):
                name, record = step.record.name, step.record
                known[name] = stepped(step, linear, {one: known[one] for one in step.carried}, reading)
                if step.is_norm:
                    fixed[name] = normed(record, fixed[step.carried[0]], reading, with_bias=True)
                else:
                    fixed[name] = affine(
                        *[fixed[one] if one in step.carried else reading(one) for one in record.inputs]
                    )
            rows, bias = self._directions(read, tokens)
            found = known[self._operand].to(rows.dtype) @ rows.T
            rest = fixed[self._operand].to(rows.dtype) @ rows.T + bias
            arranged = self._arranged(torch.cat([found, rest[None]]), prompts)
            return self._at_logits(read, arranged, tokens, prompts)

    @property
    def dtypes(self) -> set[torch.dtype | None]:
        """The precisions of all that lies on the way."""
        wiring, entry = self._wiring, self.reader.entry
        names = wiring.above(self.output, frozenset(wiring.records), frozenset({entry})) & wiring.cone(entry)
        return {self._program.dtypes.get(name) for name in names}

    # -- what lies on the way ------------------------------------------------------------------

    def _expect_logits(self, name: str | None) -> str:
        if name is None:
            raise DecompositionError(
                "this model returns no logits, so nothing can be attributed to them. Take the stream apart "
                "instead: `run.decompose(...)`."
            )
        return name

    def _expect_reader(self) -> Reader:
        found = [one for one in self._facts.components.readers if one.slot == "logits"]
        if not found:
            raise DecompositionError(
                "the logits of this model are not made of this stack's stream alone. Where there are "
                "several stacks, say which with `stack`."
            )
        return found[0]

    def _expect_product(self) -> Record:
        wiring, entry = self._wiring, self.reader.entry
        cone = wiring.cone(entry)
        products = [
            record
            for record in wiring.upward(self.output, lambda r: r.name == entry or wiring.is_linear(r))
            if wiring.is_linear(record) and record.name in cone
        ]
        if len(products) != 1 or products[0].op not in {"linear", "mm", "matmul", "addmm"}:
            shown = ", ".join(f"{record.name!r} ({record.op})" for record in products) or "none"
            raise DecompositionError(
                f"the logits are not one product of the normed stream with a vocabulary: found {shown}."
            )
        return products[0]

    def _expect_affine(self, entry: str, end: str) -> Walk:
        walk = walk_to(self._wiring, [entry], end)
        if walk.bent is not None:
            raise DecompositionError(
                f"between the stream and the unembedding lies {walk.bent.name!r} ({walk.bent.op}), which is "
                "neither a norm nor a projection: logits are not a sum of what components wrote, and "
                "direct logit attribution is not defined for this model. `run.lens()` is."
            )
        return walk

    def _expect_pointwise(self) -> None:
        """Raise DecompositionError where logits are made of each other behind the product."""
        wiring = self._wiring
        own = wiring.above(self.output, frozenset(wiring.records), frozenset({self._product.name}))
        for name in sorted(own & wiring.cone(self._product.name), key=wiring.order.__getitem__):
            record = wiring.records[name]
            if record.op not in POINTWISE | NUMBER_KEEPING | SAME:
                raise DecompositionError(
                    f"behind the unembedding lies {name!r} ({record.op}), which mixes the logits of tokens "
                    "or positions: they are not a sum of what components wrote."
                )

    def _directions(self, read: Read, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The rows of the vocabulary for some tokens, [token, d_model], and what is added for each."""
        record = self._product
        shift = 1 if record.op in BIASED_PRODUCTS else 0
        weight = read(record.args[1 + shift].name)
        index = torch.tensor(list(tokens), device=weight.device)
        rows = weight[index] if record.op == "linear" else weight[..., index].T
        wide = torch.promote_types(rows.dtype, torch.float32)
        added = (
            record.args[0] if shift else record.args[2] if len(record.args) > 2 else record.kwargs.get("bias")
        )
        bias = (
            read(added.name)[index].to(wide) if isinstance(added, Ref) else torch.zeros(len(tokens)).to(rows)
        )
        return rows.to(wide), bias.to(wide)

    def _arranged(self, stack: Tensor, prompts: int) -> Tensor:
        """[part, prompt, pos, token] of a stack of values that lie as the product's do."""
        parts, tokens = stack.shape[0], stack.shape[-1]
        # Parts stand beside tokens meanwhile: what is last is not looked at where prompts are found.
        beside = stack.movedim(0, -1).flatten(-2)
        placed = Outputs(self._program).arranged(self._product.name, beside, 1, prompts)[0]
        if placed.ndim == 2:
            placed = placed.unsqueeze(1)
        return placed.unflatten(-1, (tokens, parts)).movedim(-1, 0)  # type: ignore[no-untyped-call,no-any-return]

    def _at_logits(self, read: Read, arranged: Tensor, tokens: Sequence[int], prompts: int) -> Shares:
        """The shares behind all that follows the product: scales, caps, and what is added there."""
        found, rest = arranged[:-1], arranged[-1]
        steps = self._behind.steps
        if self._behind.bent is None and all(step.keeps_numbers for step in steps):
            return Shares(found, rest)
        raw = self._picked(read, self._product.name, tokens, prompts).to(found.dtype)
        made = self._picked(read, self.output, tokens, prompts).to(found.dtype)
        if self._behind.bent is None and any(step.added or step.is_sum for step in steps):
            raise DecompositionError(
                f"something is added to the logits behind the unembedding ({steps[-1].record.name!r}), which "
                "no component wrote."
            )
        # One number for each logit, read off the run: its cap or scale at work.
        factor = torch.where(raw == 0, torch.ones_like(raw), made / torch.where(raw == 0, 1.0, raw))
        return Shares(found * factor, rest * factor)

    def _picked(self, read: Read, name: str, tokens: Sequence[int], prompts: int) -> Tensor:
        """[prompt, pos, token] of the logits of a run."""
        value = Outputs(self._program).arranged(name, read(name), 1, prompts)[0]
        value = value.unsqueeze(1) if value.ndim == 2 else value
        return value[..., torch.tensor(list(tokens), device=value.device)]
