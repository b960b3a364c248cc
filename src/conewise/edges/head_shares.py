"""The shares that attention heads have in what their layer adds to the residual stream."""

from __future__ import annotations

import torch

from conewise.edges.linear_steps import bent, normed, stepped
from conewise.edges.stacked_values import Read, StackedValues
from conewise.locations.head_result import HeadResult
from conewise.locations.sites import SiteTable
from conewise.structure.axes.views import View
from conewise.structure.components.components import Components, HeadWriters
from conewise.structure.wiring.affine import walk_to
from conewise.sweeps.planning.shapes.layout import compile_stacked_rule

Tensor = torch.Tensor


class HeadShares:
    """The shares that the heads of one layer have in the term that their attention adds to the stream."""

    def __init__(
        self, sites: SiteTable, components: Components, heads: HeadWriters, values: StackedValues
    ) -> None:
        self.heads = heads
        self._values = values
        walk = walk_to(components.wiring, [heads.node], heads.term)
        if walk.bent is not None:
            raise bent(
                components, walk.bent, f"what the heads of layer {heads.layer.number} add to the stream"
            )
        self._steps = walk.steps
        self._linear = [compile_stacked_rule(step.linear) for step in walk.steps]
        self._affine = [compile_stacked_rule(step.record) for step in walk.steps]
        self._result, self._behind = self._plain_projection(sites)
        self.is_plain = self._result is not None and all(s.keeps_numbers for s in self._steps[self._behind :])

    def _plain_projection(self, sites: SiteTable) -> tuple[HeadResult | None, int]:
        """The output projection where it reads z as it is, and the number of the step behind it."""
        projection = self.heads.layer.attention.projection
        layer = self.heads.layer
        site = ("result", layer.stack, layer.number)
        if projection is None or site in sites.missing or self.heads.view.axes[0] != "batch":
            return None, 0
        for at, step in enumerate(self._steps):
            if step.record == projection:
                result = sites.find("result", layer.number, layer.stack).result
                return result, at + 1
            if not step.keeps_numbers:
                break
        return None, 0

    def projected(self, read: Read, out: Tensor | None = None) -> Tensor:
        """The shares behind the output projection, [head, batch, pos, d_model]; into `out` if given."""
        result = self._result
        assert result is not None
        z, weight = self._z(read), read(result.weight)
        by_head = (weight.T if result.out_in else weight).unflatten(0, z.shape[-2:])
        batch, pos, heads, width = z.shape
        rows = z.to(weight.dtype).permute(2, 0, 1, 3).reshape(heads, batch * pos, width)
        if out is None or out.dtype != weight.dtype or not out.is_contiguous():
            made = torch.bmm(rows, by_head).view(heads, batch, pos, -1)
            return made if out is None else out.copy_(made)
        torch.bmm(rows, by_head, out=out.view(heads, batch * pos, -1))
        return out

    def at_term(self, read: Read) -> Tensor:
        """The shares as the term is laid out, [head, *its shape]."""
        sizes, reading = self._reading(read)
        if self._result is not None:
            shares = self.projected(read)
            begin = self._steps[self._behind - 1].record.name
            if self._result.is_pos_first:
                shares = shares.transpose(1, 2)
            stack = shares.reshape(len(self.heads.rows), *self._shape_at(read, begin))
            first = self._behind
        else:
            stack, begin, first = self._apart(read(self.heads.node), sizes), self.heads.node, 0
        known = {begin: stack}
        for step, rule in zip(self._steps[first:], self._linear[first:], strict=True):
            stacks = {name: known[name] for name in step.carried}
            known[step.record.name] = stepped(step, rule, stacks, reading)
        return known[self.heads.term]

    def constant(self, read: Read) -> Tensor:
        """What the term has without any head: biases."""
        _, reading = self._reading(read)
        known = {self.heads.node: torch.zeros_like(read(self.heads.node))}
        for step, rule in zip(self._steps, self._affine, strict=True):
            record = step.record
            if step.is_norm:
                known[record.name] = normed(record, known[step.carried[0]], reading, with_bias=True)
            else:
                known[record.name] = rule(
                    *[known[one] if one in step.carried else reading(one) for one in record.inputs]
                )
        return known[self.heads.term]

    def _z(self, read: Read) -> Tensor:
        view = self.heads.view
        return view.present(read(self.heads.node), self._reading(read)[0] if _needs_sizes(view) else ())

    def _apart(self, z: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """[head, *z's shape]: z with one head each, and zeros for the others."""
        view, heads = self.heads.view, len(self.heads.rows)
        stack = z.new_zeros((heads, *z.shape))
        own, target = view.present(z, sizes), view.present(stack, sizes, leading=1)
        dim = view.axes.index("head")
        torch.diagonal(target, dim1=0, dim2=dim + 1).copy_(own.movedim(dim, -1))
        return stack

    def _shape_at(self, read: Read, name: str) -> tuple[int, ...]:
        layout = self._values.layout(read)
        shape = layout.shape(name)
        assert shape is not None
        dim = layout.batch_dim.get(name)
        worlds = self._values.worlds_in(read, self.heads.node, read(self.heads.node))
        return tuple(n * worlds if at == dim else n for at, n in enumerate(shape))

    def _reading(self, read: Read) -> tuple[tuple[int, ...], Read]:
        node = self.heads.node
        worlds = self._values.worlds_in(read, node, read(node))
        return self._values.layout(read).sizes(worlds), self._values.reading(read, worlds)


def _needs_sizes(view: View) -> bool:
    return any(not isinstance(length, int) for length in view.lengths.values())
