"""The meaning of the dimensions of a program's inputs: along which prompts lie, and along which positions.

The index of a dimension does not say it. The program does: attention computes each prompt by itself and mixes
positions, and so do recurrent layers. Sites, layouts, regions and metrics all ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from conewise.anatomy.attention import AttentionSizes, attention_sizes
from conewise.anatomy.wiring import Wiring
from conewise.errors import CaptureError
from conewise.program.records import RECURRENT, Dimensions, Program, Record, Ref
from conewise.program.sizes import Size, symbols_in
from conewise.program.walk import Interpreter

BATCH_FIRST = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "inputs_embeds",
        "decoder_input_ids",
        "decoder_inputs_embeds",
        "pixel_values",
        "input_values",
        "input_features",
    }
)
"""Inputs that are batch-first wherever they are used: the names of Hugging Face's models."""


FLAT = 99
"""The depth of a size that is a dimension of no input but those of one dimension."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """A size of the inputs that may vary: its symbol, and the dimensions that have it; no symbol if fixed."""

    symbol: str
    dims: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The outermost dimension that it is, among inputs of two dimensions or more."""
        return min(
            (dim for (_, dim), rank in zip(self.dims, self.ranks, strict=True) if rank > 1), default=FLAT
        )

    @property
    def is_square(self) -> bool:
        """True if an input has it twice."""
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
    axes, votes = _axes(program), list(attention_sizes(Wiring(program)))
    if batch_dim is not None:
        return _as_given(program, axes, votes, batch_dim)
    conventional = _conventional(program, axes, votes, example)
    if conventional is None:
        return _without_leading_size(program, axes, votes, example, module)
    others, ordered = _beside(axes, conventional), _ordered(program, votes)
    if not others:
        return _alone(program, axes, conventional, votes, ordered, example)
    if not ordered.isdisjoint(axis.symbol for axis in (conventional, *others)):
        first = next((axis for axis in (conventional, *others) if axis.symbol not in ordered), None)
        return _with_positions(axes, first or conventional, votes)
    if any(name.rpartition(".")[2] in BATCH_FIRST for name, _ in conventional.dims):
        return _with_positions(axes, conventional, votes)
    rival = _rival(program, others, votes, conventional, example)
    if rival is None:
        return _with_positions(axes, conventional, votes)
    if _says_sequence_first(program, module):
        return _with_positions(axes, rival, votes)
    name, dim = conventional.dims[0]
    other = dict(rival.dims).get(name, rival.dims[0][1])
    return Dimensions(
        doubt=f"dimension {dim} of {name!r} is mixed and dimension {other} is not, so it is not known which "
        f"is the batch. Say it with `capture(..., batch_dim={dim})` or `batch_dim={other}`"
    )


def _axes(program: Program) -> list[_Axis]:
    found: dict[str, list[tuple[str, int, int]]] = {}
    for leaf in program.inputs:
        for dim, size in enumerate(leaf.shape):
            if isinstance(size, sympy.Symbol):
                found.setdefault(str(size), []).append((leaf.name, dim, len(leaf.shape)))
    return [
        _Axis(symbol, tuple((name, dim) for name, dim, _ in dims), tuple(rank for *_, rank in dims))
        for symbol, dims in found.items()
    ]


def _as_given(
    program: Program, axes: Sequence[_Axis], votes: Sequence[AttentionSizes], batch_dim: Any
) -> Dimensions:
    """The batch is dimension `batch_dim` of the inputs, where one varies there; a fixed one has to lead."""
    ranks = [len(leaf.shape) for leaf in program.inputs]
    if (
        isinstance(batch_dim, bool)
        or not isinstance(batch_dim, int)
        or not 0 <= batch_dim < max(ranks, default=0)
    ):
        raise CaptureError(
            f"batch_dim is {batch_dim!r}; the inputs have dimensions 0 to {max(ranks, default=0) - 1}."
        )
    here = [axis for axis in axes if any(dim == batch_dim for _, dim in axis.dims)]
    # An input of fewer dimensions, such as positions [pos], has its only one elsewhere. One that a square
    # input has twice, as a mask [pos, pos], is the batch of none.
    batch = min(
        here, key=lambda axis: (axis.is_square, axis.depth != batch_dim, axes.index(axis)), default=None
    )
    if batch is None and batch_dim:
        return Dimensions(
            doubt=f"dimension {batch_dim} of the inputs is said to be the batch, and its size is fixed in "
            "this capture, because the module's computation depends on it"
        )
    return _with_positions(axes, batch, votes)


def _conventional(
    program: Program,
    axes: Sequence[_Axis],
    votes: Sequence[AttentionSizes],
    example: Mapping[str, torch.Tensor],
) -> _Axis | None:
    """The size that is dimension 0 of the first input that has more dimensions than one.

    A mask [pos, pos] or a memory [entry, feature] may come first: where several sizes lead inputs, it is one
    that attention does not mix, or without attention the first whose entries are independent.
    """
    leading = {str(leaf.shape[0]) for leaf in program.inputs if len(leaf.shape) > 1}
    found = [axis for axis in axes if axis.depth == 0 and axis.symbol in leading]
    found = [axis for axis in found if not axis.is_square] or found
    fixed = [leaf for leaf in program.inputs if len(leaf.shape) > 1 and isinstance(leaf.shape[0], int)]
    if votes and len(found) + len(fixed) > 1:
        score = _score(votes)
        unmixed = [axis for axis in found if score[axis.symbol] >= 0]
        found = unmixed if unmixed or fixed else found
    elif len(found) > 1:
        found = [axis for axis in found if _is_independent(program, axis, example)] or found
    return found[0] if found else None


def _score(votes: Sequence[AttentionSizes]) -> Counter[str]:
    """Count the attentions that compute along a size independently, less those that mix it."""
    score = Counter[str]()
    for vote in votes:
        score.update(dict.fromkeys(vote.independent - vote.mixed, 1))
        score.subtract(dict.fromkeys(vote.mixed, 1))
    return score


def _alone(
    program: Program,
    axes: Sequence[_Axis],
    one: _Axis,
    votes: Sequence[AttentionSizes],
    ordered: Set[str],
    example: Mapping[str, torch.Tensor],
) -> Dimensions:
    """The only size of its inputs that varies leads them: the batch, unless attention mixes it.

    Then inputs [pos, feature] are one prompt, where positions along it are distinguished. Where a dimension
    of fixed size is computed independently, that may be the batch. Else it is a batch whose rows see each
    other.
    """
    if _score(votes)[one.symbol] >= 0:
        return _with_positions(axes, one, votes)
    leaves = [leaf for leaf in program.inputs if leaf.name in dict(one.dims)]
    has_features = all(len(leaf.shape) == 1 + leaf.dtype.is_floating_point for leaf in leaves)
    if has_features and one.symbol in ordered and len(leaves) == len(program.inputs):
        return Dimensions(positions=frozenset({one.symbol}), is_unbatched=True)
    name, dim = one.dims[0]
    other = _fixed_rival(program, name, one, example)
    if other is None:
        return _with_positions(axes, one, votes)
    return Dimensions(
        doubt=f"dimension {dim} of {name!r} is mixed and dimension {other} is not, so it is not known which "
        f"is the batch. Say it with `capture(..., batch_dim={dim})` or `batch_dim={other}`"
    )


def _fixed_rival(program: Program, name: str, one: _Axis, example: Mapping[str, torch.Tensor]) -> int | None:
    """A dimension of fixed size, of the input that `one` leads, whose entries are computed independently."""
    (leaf,) = (leaf for leaf in program.inputs if leaf.name == name)
    for dim, size in enumerate(leaf.shape):
        if isinstance(size, int) and size > 1:
            fixed = _Axis("", ((name, dim),), (len(leaf.shape),))
            if _is_independent(program, fixed, example, beside=one.symbol):
                return dim
    return None


def _without_leading_size(
    program: Program,
    axes: Sequence[_Axis],
    votes: Sequence[AttentionSizes],
    example: Mapping[str, torch.Tensor],
    module: Any,
) -> Dimensions:
    """No input of several dimensions has a leading size that varies.

    Where that size is fixed and positions', another one is the batch. Inputs of one dimension are a batch, or
    one prompt.
    """
    inner = [axis for axis in axes if 0 < axis.depth < FLAT]
    score = _score(votes)
    batch = next((axis for axis in inner if score[axis.symbol] > 0), None)
    if batch is None and not votes and _says_sequence_first(program, module):
        batch = next((axis for axis in inner if _is_independent(program, axis, example)), None)
    if batch is not None:
        return _with_positions(axes, batch, votes)
    if _runs_along_rows(program):
        return Dimensions(positions=frozenset(axis.symbol for axis in axes), is_unbatched=True)
    if any(len(leaf.shape) != 1 for leaf in program.inputs):
        if not _says_sequence_first(program, module):
            return _with_positions(axes, batch, votes)
        return Dimensions(
            doubt="the module's layers take positions first and the batch second, and its size is fixed in "
            "this capture, so it is not known where the batch lies"
        )
    flat = axes or [_Axis("", tuple((leaf.name, 0) for leaf in program.inputs), (1,) * len(program.inputs))]
    mixed = {symbol for vote in votes for symbol in vote.mixed}
    alone = [axis for axis in flat if axis.symbol not in mixed and _is_independent(program, axis, example)]
    if alone:
        return _with_positions(axes, alone[0] if axes else None, votes)
    found = _with_positions(axes, None, votes)
    positions = found.positions or frozenset(axis.symbol for axis in axes)
    return Dimensions(positions=positions, is_unbatched=True)


def _beside(axes: Sequence[_Axis], one: _Axis) -> list[_Axis]:
    """The other sizes of the same inputs."""
    shared = {name for name, _ in one.dims}
    return [axis for axis in axes if axis is not one and shared & {name for name, _ in axis.dims}]


def _ordered(program: Program, votes: Sequence[AttentionSizes]) -> set[str]:
    """The sizes along which positions are distinguished: by a causal mask, or by embeddings of positions."""
    found = {symbol for vote in votes if vote.is_causal for symbol in vote.mixed - vote.independent}
    wiring = Wiring(program)
    for record in program.records:
        if record.op in {"embedding", "sin", "cos"} and record.name not in wiring.varying:
            found |= frozenset[str]().union(*map(symbols_in, record.shape or ()))
    return found


def _rival(
    program: Program,
    others: Sequence[_Axis],
    votes: Sequence[AttentionSizes],
    conventional: _Axis,
    example: Mapping[str, torch.Tensor],
) -> _Axis | None:
    """Another size of the same inputs that is computed independently, where the conventional one is mixed."""
    if votes:
        score = _score(votes)
        best = max(others, key=lambda axis: score[axis.symbol])
        return best if score[conventional.symbol] < 0 < score[best.symbol] else None
    if _is_independent(program, conventional, example):
        return None
    return next((axis for axis in others if _is_independent(program, axis, example)), None)


def _says_sequence_first(program: Program, module: Any) -> bool:
    """True if the module itself says so: torch's layers that take a batch know whether it comes first."""
    attentions = [one for one in module.modules() if isinstance(one, torch.nn.MultiheadAttention)]
    if attentions and not any(one.batch_first for one in attentions):
        return True
    recurrent = [record for record in program.records if record.op in RECURRENT]
    return bool(recurrent) and not any(_recurrent_batch_first(record) for record in recurrent)


def _runs_along_rows(program: Program) -> bool:
    """True if all inputs are [pos, feature], and a recurrent layer runs along them as one sequence."""
    if any(len(leaf.shape) != 2 or not leaf.dtype.is_floating_point for leaf in program.inputs):
        return False
    for record in program.records:
        if record.op in RECURRENT and len(record.args) == 9 and isinstance(record.args[0], Ref):
            shape = program.shapes.get(record.args[0].name) or ()
            if len(shape) == 3 and shape[0 if _recurrent_batch_first(record) else 1] == 1:
                return True
    return False


def _recurrent_batch_first(record: Record) -> bool:
    """`batch_first` is the last of the nine arguments; a packed sequence has no layout of its own."""
    return len(record.args) != 9 or bool(record.args[-1])


def _with_positions(
    axes: Sequence[_Axis], batch: _Axis | None, votes: Sequence[AttentionSizes]
) -> Dimensions:
    """Positions are what attention mixes; without attention, the other leading sizes of the inputs."""
    others = [axis for axis in axes if axis is not batch]
    mixed = {symbol for vote in votes for symbol in vote.mixed}
    independent = {symbol for vote in votes for symbol in vote.independent}
    positions = [axis for axis in others if axis.symbol in mixed]
    if not positions:
        positions = [
            axis for axis in others if axis.symbol not in independent and any(dim < 2 for _, dim in axis.dims)
        ]
    return Dimensions(
        frozenset({batch.symbol}) if batch else frozenset(), frozenset(axis.symbol for axis in positions)
    )


def _is_independent(
    program: Program, axis: _Axis, example: Mapping[str, torch.Tensor], beside: str = ""
) -> bool:
    """True if entries along a size have no influence on each other, in every output: tried on the example.

    A size without a symbol is looked for in dimension 0 of the outputs; with `beside`, in any that is as long
    and does not vary with that symbol.

    The first one and the last one are changed, since what is computed from right to left carries nothing of
    the first to the others; each a little and a lot, since of a maximum nothing small may show.
    """
    outputs = [out.name for out in program.outputs if isinstance(out, Ref)]
    interpreter, is_changed = Interpreter(program), False
    fixed = example[axis.dims[0][0]].shape[axis.dims[0][1]]
    try:
        before = interpreter.values(example)
        for entry in (0, -1):
            for change in (_a_little, _a_lot):
                changed = dict(example)
                for name, dim in axis.dims:
                    changed[name] = _changed_entry(example[name], dim, entry, change)
                if all(torch.equal(changed[name], example[name]) for name, _ in axis.dims):
                    continue
                after, is_changed = interpreter.values(changed), True
                for name in outputs:
                    if isinstance(before[name], torch.Tensor) and not _others_are_equal(
                        before[name],
                        after[name],
                        _dims_along(program.shapes.get(name), fixed, axis, beside),
                        entry,
                    ):
                        return False
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return is_changed


def _dims_along(shape: tuple[Size, ...] | None, fixed: int, axis: _Axis, beside: str) -> list[int] | None:
    """The dimensions of an output that may be an input's; None where one holds more than that."""
    own = list(enumerate(shape or ()))
    if beside:
        return [dim for dim, size in own if size == fixed]
    if not axis.symbol:
        return [0] if shape else []
    dims = [dim for dim, size in own if axis.symbol in symbols_in(size)]
    is_plain = len(dims) < 2 and all(isinstance(own[dim][1], sympy.Symbol) for dim in dims)
    return dims if is_plain else None


def _others_are_equal(
    before: torch.Tensor, after: torch.Tensor, dims: Sequence[int] | None, entry: int
) -> bool:
    """True if along one of the dimensions just one entry differs; without any, if nothing does."""
    if dims is None or before.shape != after.shape:
        return False
    if not dims:
        return torch.equal(before, after)
    same = (before == after) | ((before != before) & (after != after))
    return any(bool(same.narrow(dim, 0 if entry else 1, same.shape[dim] - 1).all()) for dim in dims)


def _changed_entry(
    value: torch.Tensor, dim: int, entry: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    changed = value.clone()
    own = changed.select(dim, entry % value.shape[dim])
    own.copy_(change(own, value))
    return changed


def _a_little(entry: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Another entry, made of numbers like those that are there."""
    if entry.dtype == torch.bool:
        return entry.logical_not()
    if entry.is_floating_point() or entry.is_complex():
        return entry * 0.5 + 0.25
    return torch.where(entry > 0, entry - 1, entry + 1)


def _a_lot(entry: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An entry of larger numbers of both signs; of integers, the largest that is there or the least."""
    if entry.dtype == torch.bool:
        return entry.logical_not()
    if entry.is_floating_point() or entry.is_complex():
        signs = torch.arange(entry.numel(), device=entry.device).remainder(2).mul(2).sub(1)
        return entry + (4 * value.abs().max() + 1) * signs.view(entry.shape).to(entry.dtype)
    most = value.max()
    return torch.where(entry == most, value.min(), most)
