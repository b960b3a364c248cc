"""The meaning of the dimensions of a program's inputs: along which prompts lie, and along which positions.

The index of a dimension does not say it. The program does: attention computes each prompt by itself and mixes
positions, and so do recurrent layers. Sites, layouts, regions and metrics all ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from conewise.anatomy.attention import attention_sizes
from conewise.anatomy.wiring import Wiring
from conewise.errors import CaptureError
from conewise.program.records import RECURRENT, Dimensions, Program, Record, Ref
from conewise.program.sizes import symbols_in
from conewise.program.walk import Interpreter

BATCH_FIRST = frozenset(
    {
        *("input_ids", "attention_mask", "token_type_ids", "inputs_embeds"),
        *("decoder_input_ids", "decoder_inputs_embeds"),
        *("pixel_values", "input_values", "input_features"),
    }
)
"""Inputs that are batch-first wherever they are used: the names of Hugging Face's models."""


FLAT = 99
"""The depth of a size that is a dimension of no input but those of one dimension."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """A size of the inputs that may vary: its symbol, and the dimensions that have it; no symbol if fixed.

    `depth` is the outermost dimension that it is, among inputs of two dimensions or more. `is_square`: an
    input has it twice.
    """

    symbol: str
    dims: tuple[tuple[str, int], ...]
    depth: int = FLAT

    @property
    def is_square(self) -> bool:
        return len(dict(self.dims)) < len(self.dims)


def find_dimensions(
    program: Program,
    example: Mapping[str, torch.Tensor],
    module: Any,
    batch_dim: Any = None,
) -> Dimensions:
    """Find the sizes that are the batch's, and those that are positions'.

    `batch_dim` says which dimension of the inputs is the batch; None leaves it to the program. There,
    dimension 0 is the batch unless the program shows that it is not: then another one is, if that is
    certain, and otherwise none is known, with the reason as `doubt`. Inputs of one dimension are a batch
    where each entry is computed by itself, and else the positions of one prompt.
    """
    inputs = _Inputs(program, example, module)
    return inputs.found() if batch_dim is None else inputs.as_given(batch_dim)


class _Inputs:
    """The sizes of a program's inputs, and what attention shows of each."""

    def __init__(self, program: Program, example: Mapping[str, torch.Tensor], module: Any) -> None:
        self.program, self.example, self.module = program, example, module
        dims: dict[str, list[tuple[str, int]]] = {}
        depths: dict[str, list[int]] = {}
        for leaf in program.inputs:
            for dim, size in enumerate(leaf.shape):
                if isinstance(size, sympy.Symbol):
                    dims.setdefault(str(size), []).append((leaf.name, dim))
                    depths.setdefault(str(size), []).append(dim if len(leaf.shape) > 1 else FLAT)
        self.axes = [_Axis(symbol, tuple(own), min(depths[symbol])) for symbol, own in dims.items()]
        self.votes = list(attention_sizes(Wiring(program)))
        self.score = Counter[str]()
        """How many attentions compute along a size independently, less those that mix it."""
        for vote in self.votes:
            self.score.update(dict.fromkeys(vote.independent - vote.mixed, 1))
            self.score.subtract(dict.fromkeys(vote.mixed, 1))
        self.mixed = {symbol for vote in self.votes for symbol in vote.mixed}

    def found(self) -> Dimensions:
        """Return what the program shows."""
        conventional = self._conventional()
        if conventional is None:
            return self._without_leading_size()
        shared = {name for name, _ in conventional.dims}
        others = [
            axis
            for axis in self.axes
            if axis is not conventional and shared & {name for name, _ in axis.dims}
        ]
        if not others:
            return self._alone(conventional)
        ordered = self._ordered()
        if not ordered.isdisjoint(axis.symbol for axis in (conventional, *others)):
            first = (axis for axis in (conventional, *others) if axis.symbol not in ordered)
            return self._with_positions(next(first, conventional))
        if any(name.rpartition(".")[2] in BATCH_FIRST for name, _ in conventional.dims):
            return self._with_positions(conventional)
        rival = self._rival(others, conventional)
        if rival is None:
            return self._with_positions(conventional)
        if self._says_sequence_first():
            return self._with_positions(rival)
        name, dim = conventional.dims[0]
        return _in_doubt(name, dim, dict(rival.dims).get(name, rival.dims[0][1]))

    def as_given(self, batch_dim: Any) -> Dimensions:
        """The batch is dimension `batch_dim` of the inputs, where one varies; a fixed one has to lead."""
        rank = max((len(leaf.shape) for leaf in self.program.inputs), default=0)
        if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or not 0 <= batch_dim < rank:
            raise CaptureError(f"batch_dim is {batch_dim!r}; the inputs have dimensions 0 to {rank - 1}.")
        here = [axis for axis in self.axes if any(dim == batch_dim for _, dim in axis.dims)]
        # An input of fewer dimensions, such as positions [pos], has its only one elsewhere. One that a
        # square input has twice, as a mask [pos, pos], is the batch of none.
        batch = min(here, key=lambda axis: (axis.is_square, axis.depth != batch_dim), default=None)
        if batch is None and batch_dim:
            return Dimensions(
                doubt=f"dimension {batch_dim} of the inputs is said to be the batch, and its size is fixed "
                "in this capture, because the module's computation depends on it"
            )
        return self._with_positions(batch)

    def _with_positions(self, batch: _Axis | None) -> Dimensions:
        """Positions are what attention mixes; without attention, the other leading sizes of the inputs."""
        others = [axis for axis in self.axes if axis is not batch]
        positions = {axis.symbol for axis in others if axis.symbol in self.mixed}
        if not positions:
            independent = {symbol for vote in self.votes for symbol in vote.independent}
            leading = (axis.symbol for axis in others if any(dim < 2 for _, dim in axis.dims))
            positions = set(leading) - independent
        return Dimensions(frozenset({batch.symbol} if batch else ()), frozenset(positions))

    def _conventional(self) -> _Axis | None:
        """The size that is dimension 0 of the first input that has more dimensions than one.

        A mask [pos, pos] or a memory [entry, feature] may come first: where several sizes lead inputs, it is
        one that attention does not mix, or without attention the first whose entries are independent.
        """
        leading = [leaf.shape[0] for leaf in self.program.inputs if len(leaf.shape) > 1]
        found = [axis for axis in self.axes if axis.depth == 0 and axis.symbol in set(map(str, leading))]
        found = [axis for axis in found if not axis.is_square] or found
        fixed = sum(isinstance(size, int) for size in leading)
        if self.votes and len(found) + fixed > 1:
            unmixed = [axis for axis in found if self.score[axis.symbol] >= 0]
            found = unmixed if unmixed or fixed else found
        elif len(found) > 1:
            found = [axis for axis in found if self._is_independent(axis)] or found
        return found[0] if found else None

    def _alone(self, one: _Axis) -> Dimensions:
        """The only size of its inputs that varies leads them: the batch, unless attention mixes it.

        Then inputs [pos, feature] are one prompt, where positions along it are distinguished. Where a
        dimension of fixed size is computed independently, that may be the batch. Else it is a batch whose
        rows see each other.
        """
        if self.score[one.symbol] >= 0:
            return self._with_positions(one)
        leaves = [leaf for leaf in self.program.inputs if leaf.name in dict(one.dims)]
        has_features = all(len(leaf.shape) == 1 + leaf.dtype.is_floating_point for leaf in leaves)
        if has_features and one.symbol in self._ordered() and len(leaves) == len(self.program.inputs):
            return Dimensions(positions=frozenset({one.symbol}), is_unbatched=True)
        name, dim = one.dims[0]
        (leading,) = (leaf for leaf in leaves if leaf.name == name)
        for other, size in enumerate(leading.shape):
            fixed = _Axis("", ((name, other),))
            if isinstance(size, int) and size > 1 and self._is_independent(fixed, beside=one.symbol):
                return _in_doubt(name, dim, other)
        return self._with_positions(one)

    def _without_leading_size(self) -> Dimensions:
        """No input of several dimensions has a leading size that varies.

        Where that size is fixed and positions', another one is the batch. Inputs of one dimension are a
        batch, or one prompt.
        """
        inner = [axis for axis in self.axes if 0 < axis.depth < FLAT]
        sequence_first = self._says_sequence_first()
        batch = next((axis for axis in inner if self.score[axis.symbol] > 0), None)
        if batch is None and not self.votes and sequence_first:
            batch = next(filter(self._is_independent, inner), None)
        if batch is not None:
            return self._with_positions(batch)
        symbols = frozenset(axis.symbol for axis in self.axes)
        if self._runs_along_rows():
            return Dimensions(positions=symbols, is_unbatched=True)
        inputs = self.program.inputs
        if any(len(leaf.shape) != 1 for leaf in inputs):
            if not sequence_first:
                return self._with_positions(None)
            return Dimensions(
                doubt="the module's layers take positions first and the batch second, and its size is fixed "
                "in this capture, so it is not known where the batch lies"
            )
        for axis in self.axes or [_Axis("", tuple((leaf.name, 0) for leaf in inputs))]:
            if axis.symbol not in self.mixed and self._is_independent(axis):
                return self._with_positions(axis if self.axes else None)
        return Dimensions(positions=self._with_positions(None).positions or symbols, is_unbatched=True)

    def _ordered(self) -> set[str]:
        """The sizes along which positions are distinguished: by a causal mask, or by embeddings of them."""
        found = {symbol for vote in self.votes if vote.is_causal for symbol in vote.mixed - vote.independent}
        for record in self.program.records:
            if record.op in {"embedding", "sin", "cos"} and record.name not in self.program.varying:
                found.update(*map(symbols_in, record.shape or ()))
        return found

    def _rival(self, others: Sequence[_Axis], conventional: _Axis) -> _Axis | None:
        """Another size of the same inputs, computed independently, where the conventional one is mixed."""
        if self.votes:
            best = max(others, key=lambda axis: self.score[axis.symbol])
            return best if self.score[conventional.symbol] < 0 < self.score[best.symbol] else None
        return (
            None if self._is_independent(conventional) else next(filter(self._is_independent, others), None)
        )

    def _says_sequence_first(self) -> bool:
        """True if the module says so: torch's layers that take a batch know whether it comes first."""
        attentions = [one for one in self.module.modules() if isinstance(one, torch.nn.MultiheadAttention)]
        if attentions and not any(one.batch_first for one in attentions):
            return True
        recurrent = [record for record in self.program.records if record.op in RECURRENT]
        return bool(recurrent) and not any(map(_recurrent_batch_first, recurrent))

    def _runs_along_rows(self) -> bool:
        """True if all inputs are [pos, feature], and a recurrent layer runs along them as one sequence."""
        if any(len(leaf.shape) != 2 or not leaf.dtype.is_floating_point for leaf in self.program.inputs):
            return False
        for record in self.program.records:
            if record.op in RECURRENT and len(record.args) == 9 and isinstance(record.args[0], Ref):
                shape = self.program.shapes.get(record.args[0].name) or ()
                if len(shape) == 3 and shape[0 if _recurrent_batch_first(record) else 1] == 1:
                    return True
        return False

    def _is_independent(self, axis: _Axis, beside: str = "") -> bool:
        """True if entries along a size do not influence each other in any output: tried on the example.

        A size without a symbol is looked for in dimension 0 of the outputs; with `beside`, in any that is as
        long and does not vary with that symbol.

        The first entry and the last one are changed, since what is computed from right to left carries
        nothing of the first to the others; each a little and a lot, as of a maximum nothing small may show.
        """
        interpreter, example, is_changed = Interpreter(self.program), self.example, False
        try:
            before = interpreter.values(example)
            for entry, is_large in ((0, False), (0, True), (-1, False), (-1, True)):
                changed = dict(example)
                for name, dim in axis.dims:
                    changed[name] = _changed_entry(example[name], dim, entry, is_large=is_large)
                if all(torch.equal(changed[name], example[name]) for name, _ in axis.dims):
                    continue
                after, is_changed = interpreter.values(changed), True
                for out in self.program.outputs:
                    if isinstance(out, Ref) and isinstance(before[out.name], torch.Tensor):
                        dims = self._dims_along(out.name, axis, beside)
                        if not _others_are_equal(before[out.name], after[out.name], dims, entry):
                            return False
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        return is_changed

    def _dims_along(self, output: str, axis: _Axis, beside: str) -> list[int] | None:
        """The dimensions of an output that may be an input's; None where one holds more than that."""
        own = list(enumerate(self.program.shapes.get(output) or ()))
        if beside:
            name, along = axis.dims[0]
            return [dim for dim, size in own if size == self.example[name].shape[along]]
        if not axis.symbol:
            return [0] if own else []
        dims = [dim for dim, size in own if axis.symbol in symbols_in(size)]
        is_plain = len(dims) < 2 and all(isinstance(own[dim][1], sympy.Symbol) for dim in dims)
        return dims if is_plain else None


def _in_doubt(name: str, dim: int, other: int) -> Dimensions:
    return Dimensions(
        doubt=f"dimension {dim} of {name!r} is mixed and dimension {other} is not, so it is not known which "
        f"is the batch. Say it with `capture(..., batch_dim={dim})` or `batch_dim={other}`"
    )


def _recurrent_batch_first(record: Record) -> bool:
    """`batch_first` is the last of the nine arguments; a packed sequence has no layout of its own."""
    return len(record.args) != 9 or bool(record.args[-1])


def _others_are_equal(
    before: torch.Tensor, after: torch.Tensor, dims: Iterable[int] | None, entry: int
) -> bool:
    """True if along one of the dimensions just one entry differs; without any, if nothing does."""
    if dims is None or before.shape != after.shape:
        return False
    if not dims:
        return torch.equal(before, after)
    same = (before == after) | ((before != before) & (after != after))
    return any(bool(same.narrow(dim, 0 if entry else 1, same.shape[dim] - 1).all()) for dim in dims)


def _changed_entry(value: torch.Tensor, dim: int, entry: int, *, is_large: bool) -> torch.Tensor:
    """A value with another entry: made of numbers like those that are there, or of large ones of both signs.

    Of integers, a large one is the largest that is there, or the least.
    """
    changed = value.clone()
    own = changed.select(dim, entry % value.shape[dim])
    if own.dtype == torch.bool:
        new = own.logical_not()
    elif not (own.is_floating_point() or own.is_complex()):
        most = value.max()
        little = torch.where(own > 0, own - 1, own + 1)
        new = torch.where(own == most, value.min(), most) if is_large else little
    elif is_large:
        signs = torch.arange(own.numel(), device=own.device).remainder(2).mul(2).sub(1)
        new = own + (4 * value.abs().max() + 1) * signs.view(own.shape).to(own.dtype)
    else:
        new = own * 0.5 + 0.25
    own.copy_(new)
    return changed
