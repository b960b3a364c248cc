"""What the dimensions of a program's inputs mean: along which sizes its prompts lie, along which its positions.

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


@dataclass(frozen=True, slots=True)
class _Axis:
    """A size of the inputs that may vary: its symbol, and every place where it is one."""

    symbol: str
    places: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The outermost dimension that it is, among inputs of two dimensions or more."""
        return min(
            (dim for (_, dim), rank in zip(self.places, self.ranks, strict=True) if rank > 1), default=9
        )


def find_dimensions(
    program: Program,
    example: Mapping[str, torch.Tensor],
    module: Any,
    batch_dim: int | None = None,
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
        return _with_positions(program, axes, batch, _votes(program))
    votes = _votes(program)
    conventional = _conventional(program, axes)
    if conventional is None:
        return _of_flat_inputs(program, axes, votes, example)
    rival = _rival(program, axes, votes, conventional, example)
    if rival is None:
        return _with_positions(program, axes, conventional, votes)
    if _is_sequence_first(program, module, conventional, votes):
        return _with_positions(program, axes, rival, votes)
    name, dim = conventional.places[0]
    other = dict(rival.places).get(name, rival.places[0][1])
    return Dimensions(
        doubt=f"dimension {dim} of {name!r} is mixed and dimension {other} is not, so that either may be the "
        f"batch. Say which with `capture(..., batch_dim={dim})` or `batch_dim={other}`"
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


def _given(program: Program, axes: Sequence[_Axis], batch_dim: int) -> _Axis | None:
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


def _of_flat_inputs(
    program: Program,
    axes: Sequence[_Axis],
    votes: Sequence[AttentionSizes],
    example: Mapping[str, torch.Tensor],
) -> Dimensions:
    """No input has a leading size that varies but those of one dimension: a batch, or one prompt."""
    flat = [axis for axis in axes if axis.depth == 9]
    wide = any(len(leaf.shape) > 1 for leaf in program.inputs)
    if not flat:
        return _with_positions(program, axes, None, votes)
    mixed = {symbol for vote in votes for symbol in vote.across}
    apart = [axis for axis in flat if axis.symbol not in mixed and _is_apart(program, axis, example)]
    if apart and not wide:
        return _with_positions(program, axes, apart[0], votes)
    found = _with_positions(program, axes, None, votes)
    positions = found.positions or frozenset(axis.symbol for axis in flat)
    return Dimensions(positions=positions, is_unbatched=not wide)


def _rival(
    program: Program,
    axes: Sequence[_Axis],
    votes: Sequence[AttentionSizes],
    conventional: _Axis,
    example: Mapping[str, torch.Tensor],
) -> _Axis | None:
    """Another size of the same inputs that is computed apart, where the conventional one is mixed."""
    if any(name.rpartition(".")[2] in BATCH_FIRST for name, _ in conventional.places):
        return None
    shared = {name for name, _ in conventional.places}
    others = [
        axis for axis in axes if axis is not conventional and shared & {name for name, _ in axis.places}
    ]
    if not others:
        return None
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


def _is_sequence_first(
    program: Program, module: Any, leading: _Axis, votes: Sequence[AttentionSizes]
) -> bool:
    """Whether it is certain that the leading size is positions': a causal mask, or the module says so."""
    if any(vote.is_causal and leading.symbol in vote.across for vote in votes):
        return True
    attentions = [one for one in module.modules() if isinstance(one, torch.nn.MultiheadAttention)]
    if attentions and not any(one.batch_first for one in attentions):
        return True
    recurrent = [record for record in program.records if record.op in RECURRENT]
    return bool(recurrent) and not any(_recurrent_batch_first(record) for record in recurrent)


def _recurrent_batch_first(record: Record) -> bool:
    """`batch_first` is the last of the nine arguments; a packed sequence has no layout of its own."""
    return len(record.args) != 9 or bool(record.args[-1])


def _with_positions(
    program: Program, axes: Sequence[_Axis], batch: _Axis | None, votes: Sequence[AttentionSizes]
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
    if not dims:
        return torch.equal(before, after)
    if len(dims) > 1 or before.shape != after.shape:
        return False
    size = (shape or ())[dims[0]]
    if not isinstance(size, sympy.Symbol):
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
