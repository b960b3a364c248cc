"""`result`: each head's share of the output projection, which no node of a graph holds.

It is read as z times the head's rows of the weight. It is replaced by letting another rule
compute the projection: the same product, plus what the replacement adds to the head's share.
That is exact, but sums in another order than the module does: the last bits may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from conewise.program.records import Record
from conewise.program.rules import Rule, compile_rule
from conewise.structure.axes.selections import Selection, resolved
from conewise.structure.axes.views import View

AXES = ("batch", "pos", "head", "d_model")


@dataclass(frozen=True, slots=True)
class HeadResult:
    """How `result` is made of z: through which projection, and whether its weight is [out, in].

    `is_pos_first`: what the projection reads has its positions in front of the batch.
    """

    projection: Record
    weight: str
    out_in: bool
    is_pos_first: bool = False

    def read(
        self, z: torch.Tensor, weight: torch.Tensor, view: View, sizes: Sequence[int] = ()
    ) -> torch.Tensor:
        """[batch, pos, head, d_model], of the value of z's node and of the weight."""
        heads = view.present(z, sizes)
        by_head = (weight.T if self.out_in else weight).unflatten(0, heads.shape[-2:])  # type: ignore[no-untyped-call]
        return torch.einsum("bphd,hdm->bphm", heads, by_head)

    def replaced(self, selection: Selection, part: torch.Tensor, heads: int, shape: Sequence[int]) -> Rule:
        """A rule for the projection under which the selected part of `result` is `part`."""

        def change(result: torch.Tensor) -> torch.Tensor:
            fresh = result.clone()
            fresh[resolved(AXES, selection, result.shape)] = part
            return fresh

        return self.changed(compile_rule(self.projection), change, heads, shape)

    def changed(
        self, own: Rule, change: Callable[[torch.Tensor], torch.Tensor], heads: int, shape: Sequence[int]
    ) -> Rule:
        """A rule for the projection under which `result` is `change` of what it would have been.

        It takes the inputs of `own`, which is the projection's rule. `shape` is (batch, pos) of the run.
        """
        weight_at = self.projection.inputs.index(self.weight)
        view = View(AXES, tuple((axis,) for axis in AXES), {})

        def rule(*inputs: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = own(*inputs)
            weight = inputs[weight_at]
            wide = weight.shape[1] if self.out_in else weight.shape[0]
            activation = next(
                x for i, x in enumerate(inputs) if i != weight_at and x.shape[-1] == wide and x.ndim > 1
            )
            lead = tuple(reversed(shape)) if self.is_pos_first else tuple(shape)
            z = activation.reshape(*lead, heads, wide // heads)
            result = self.read(z.transpose(0, 1) if self.is_pos_first else z, weight, view)
            added = (change(result) - result).sum(2)
            return value + (added.transpose(0, 1) if self.is_pos_first else added).reshape(value.shape)

        return rule
