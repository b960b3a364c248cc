"""What the dimensions of a program's inputs mean: along which its prompts lie, along which its positions.

The place of a dimension does not tell. The program does: attention computes each prompt by itself and mixes
positions, and so do recurrent layers. Sites, layouts, regions and metrics all ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from conewise.errors import CaptureError
from conewise.frontends.torch.attention import AttentionSizes, attention_sizes
from conewise.frontends.torch.interpret import Interpreter
from conewise.frontends.torch.records import Dimensions, Program, Record, Ref
from conewise.frontends.torch.sizes import Size, symbols_in
from conewise.frontends.torch.wiring import Wiring

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

RECURRENT = frozenset({"gru", "lstm", "rnn_tanh", "rnn_relu"})


FLAT = 99
"""The depth of a size that is a dimension of no input but those of one dimension."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """A size of the inputs that may vary: its symbol, and every place where it is one; no symbol if fixed."""

    symbol: str
    places: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The outermost dimension that it is, among inputs of two dimensions or more."""
        return min(
            (dim for (_, dim), rank in zip(self.places, self.ranks, strict=True) if rank > 1), default=FLAT
        )


def find_dimensions(
    program: Program,
    example: Mapping[str, torch.Tensor],
    module: Any,
    batch_dim: Any = None,
) -> Dimensions:
    """Which sizes are the batch's, and which are positions'.

    `batch_dim` says which dimension of the inputs is the batch; None leaves it to the program. There,
    dimension 0 is the batch unless the program shows that it is not: then another one is, if that is
    certain, and otherwise none is known, with the reason as `doubt`. Inputs of one dimension are a batch
    where each entry is computed by itself, and else the positions of one prompt.
    """
    axes = _axes(program)
    if batch_dim is not None:
        batch = _given(program, axes, batch_dim)
        return _with_positions(axes, batch, _votes(program))
    votes = _votes(program)
    conventional = _conventional(program, axes)
    if conventional is None:
        return _without_leading_size(program, axes, votes, example, module)
    others = _beside(axes, conventional)
    if not others or any(name.rpartition(".")[2] in BATCH_FIRST for name, _ in conventional.places):
        return _with_positions(axes, conventional, votes)
    ordered = _ordered(program, votes)
    if not ordered.isdisjoint(axis.symbol for axis in (conventional, *others)):
        first = next((axis for axis in (conventional, *others) if axis.symbol not in ordered), None)
        return _with_positions(axes, first or conventional, votes)
    rival = _rival(program, others, votes, conventional, example)
    if rival is None:
        return _with_positions(axes, conventional, votes)
    if _says_sequence_first(program, module):
        return _with_positions(axes, rival, votes)
    name, dim = conventional.places[0]
    other = dict(rival.places).get(name, rival.places[0][1])
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
        _Axis(symbol, tuple((name, dim) for name, dim, _ in places), tuple(rank for *_, rank in places))
        for symbol, places in found.items()
    ]


def _given(program: Program, axes: Sequence[_Axis], batch_dim: Any) -> _Axis | None:
    """The size at dimension `batch_dim` of the inputs, where one varies there."""
    ranks = [len(leaf.shape) for leaf in program.inputs]
    if (
        isinstance(batch_dim, bool)
        or not isinstance(batch_dim, int)
        or not 0 <= batch_dim < max(ranks, default=0)
    ):
        raise CaptureError(
            f"batch_dim is {batch_dim!r}; the inputs have dimensions 0 to {max(ranks, default=0) - 1}."
        )
    here = [axis for axis in axes if any(dim == batch_dim for _, dim in axis.places)]
    # An input of fewer dimensions, such as positions [pos], has its only one elsewhere.
    return min(here, key=lambda axis: (axis.depth != batch_dim, axes.index(axis)), default=None)


def _conventional(program: Program, axes: Sequence[_Axis]) -> _Axis | None:
    """The size that is dimension 0 of the first input that has more dimensions than one."""
    leading = {str(leaf.shape[0]) for leaf in program.inputs if len(leaf.shape) > 1}
    return next((axis for axis in axes if axis.depth == 0 and axis.symbol in leading), None)


def _votes(program: Program) -> list[AttentionSizes]:
    return list(attention_sizes(Wiring(program)))


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
    apart = {symbol for vote in votes for symbol in vote.apart - vote.across}
    batch = next((axis for axis in inner if axis.symbol in apart), None)
    if batch is None and not votes and _says_sequence_first(program, module):
        batch = next((axis for axis in inner if _is_apart(program, axis, example)), None)
    if batch is not None or any(len(leaf.shape) != 1 for leaf in program.inputs):
        return _with_positions(axes, batch, votes)
    flat = axes or [_Axis("", tuple((leaf.name, 0) for leaf in program.inputs), (1,) * len(program.inputs))]
    mixed = {symbol for vote in votes for symbol in vote.across}
    alone = [axis for axis in flat if axis.symbol not in mixed and _is_apart(program, axis, example)]
    if alone:
        return _with_positions(axes, alone[0] if axes else None, votes)
    found = _with_positions(axes, None, votes)
    positions = found.positions or frozenset(axis.symbol for axis in axes)
    return Dimensions(positions=positions, is_unbatched=True)


def _beside(axes: Sequence[_Axis], one: _Axis) -> list[_Axis]:
    """The other sizes of the same inputs."""
    shared = {name for name, _ in one.places}
    return [axis for axis in axes if axis is not one and shared & {name for name, _ in axis.places}]


def _ordered(program: Program, votes: Sequence[AttentionSizes]) -> set[str]:
    """The sizes along which places are told apart: by a causal mask, or by embeddings of the places."""
    found = {symbol for vote in votes if vote.is_causal for symbol in vote.across - vote.apart}
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
    """Another size of the same inputs that is computed apart, where the conventional one is mixed."""
    if votes:
        score = Counter[str]()
        for vote in votes:
            score.update(dict.fromkeys(vote.apart - vote.across, 1))
            score.subtract(dict.fromkeys(vote.across, 1))
        best = max(others, key=lambda axis: score[axis.symbol])
        return best if score[conventional.symbol] < 0 < score[best.symbol] else None
    if _is_apart(program, conventional, example):
        return None
    return next((axis for axis in others if _is_apart(program, axis, example)), None)


def _says_sequence_first(program: Program, module: Any) -> bool:
    """Whether the module itself says so: torch's layers that take a batch know whether it comes first."""
    attentions = [one for one in module.modules() if isinstance(one, torch.nn.MultiheadAttention)]
    if attentions and not any(one.batch_first for one in attentions):
        return True
    recurrent = [record for record in program.records if record.op in RECURRENT]
    return bool(recurrent) and not any(_recurrent_batch_first(record) for record in recurrent)


def _recurrent_batch_first(record: Record) -> bool:
    """`batch_first` is the last of the nine arguments; a packed sequence has no layout of its own."""
    return len(record.args) != 9 or bool(record.args[-1])


def _with_positions(
    axes: Sequence[_Axis], batch: _Axis | None, votes: Sequence[AttentionSizes]
) -> Dimensions:
    """Positions are what attention mixes; without attention, the other leading sizes of the inputs."""
    others = [axis for axis in axes if axis is not batch]
    across = {symbol for vote in votes for symbol in vote.across}
    apart = {symbol for vote in votes for symbol in vote.apart}
    positions = [axis for axis in others if axis.symbol in across]
    if not positions:
        positions = [
            axis for axis in others if axis.symbol not in apart and any(dim < 2 for _, dim in axis.places)
        ]
    return Dimensions(
        frozenset({batch.symbol}) if batch else frozenset(), frozenset(axis.symbol for axis in positions)
    )


def _is_apart(program: Program, axis: _Axis, example: Mapping[str, torch.Tensor]) -> bool:
    """Whether entry 0 along a size has no influence on the others, in every output: tried on the example."""
    interpreter = Interpreter(program)
    changed = dict(example)
    for name, dim in axis.places:
        changed[name] = _changed_entry(example[name], dim)
    if all(torch.equal(changed[name], example[name]) for name, _ in axis.places):
        return False
    shapes: dict[str, tuple[Size, ...] | None] = {record.name: record.shape for record in program.records}
    shapes |= {leaf.name: leaf.shape for leaf in program.inputs}
    try:
        before, after = interpreter.values(example), interpreter.values(changed)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return all(
        _others_are_equal(before[out.name], after[out.name], shapes.get(out.name), axis.symbol)
        for out in program.outputs
        if isinstance(out, Ref) and isinstance(before[out.name], torch.Tensor)
    )


def _others_are_equal(
    before: torch.Tensor, after: torch.Tensor, shape: tuple[Size, ...] | None, symbol: str
) -> bool:
    dims = [dim for dim, size in enumerate(shape or ()) if symbol in symbols_in(size)]
    if not symbol and shape:
        dims = [0]
    if not dims:
        return torch.equal(before, after)
    if len(dims) > 1 or before.shape != after.shape:
        return False
    if symbol and not isinstance((shape or ())[dims[0]], sympy.Symbol):
        return False
    rest = before.shape[dims[0]] - 1
    one, other = (value.narrow(dims[0], 1, rest) for value in (before, after))
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _changed_entry(value: torch.Tensor, dim: int) -> torch.Tensor:
    """The value with another entry 0 along `dim`, made of numbers like those that are there."""
    changed = value.clone()
    entry = changed.select(dim, 0)
    if value.is_floating_point() or value.is_complex():
        entry.mul_(0.5).add_(0.25)
    elif value.dtype == torch.bool:
        entry.logical_not_()
    else:
        entry.copy_(torch.where(entry > 0, entry - 1, entry + 1))
    return changed
