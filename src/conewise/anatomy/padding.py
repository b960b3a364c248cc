"""Padding: the positions that the attention mask of a run shows, and outputs that read ahead of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conewise.anatomy.placements import Outputs
from conewise.errors import ConewiseError
from conewise.program.records import Input, Program
from conewise.program.sizes import symbols_in
from conewise.program.tensors import is_half, row_tolerance
from conewise.program.walk import run_sources, stream
from conewise.reactive.graph import Graph

Inputs = Mapping[str, Tensor]

MASK, TOKENS = "attention_mask", ("input_ids", "inputs_embeds")
POSITION_AXES = ("pos", "query_pos", "key_pos")


def shown_positions(program: Program, inputs: Inputs, node: str = "", stack: str = "") -> Tensor | None:
    """[prompt, position], True where the attention mask shows a position; None where it hides none.

    Masks are those named as Hugging Face names them. An encoder and a decoder have one each: the one is meant
    whose positions `node` has, or else that of `stack`, and the decoder's where neither says it. A mask
    [prompt, ..., query, key] shows the keys that some query sees.
    """
    mask = _input(program, inputs, _side(program, node, stack), (MASK,))
    if mask is None or mask.ndim < 2:
        return None
    if mask.is_floating_point() and mask.ndim > 2:
        mask = mask > torch.finfo(mask.dtype).min / 2  # what is added to scores
    seen = mask != 0
    if seen.ndim > 2:
        seen = seen.flatten(1, -2).any(1)
    return None if bool(seen.all()) else seen


def has_mask(program: Program) -> bool:
    """True if one of the inputs is an attention mask."""
    return any(_leaf(program, side, (MASK,)) is not None for side in ("", "decoder_"))


def hides_some(program: Program, inputs: Inputs) -> bool:
    """True if an attention mask of a run hides a position, the encoder's or the decoder's."""
    stacks = ("", "encoder") if has_mask(program) else ()
    return any(shown_positions(program, inputs, stack=stack) is not None for stack in stacks)


def shown_rows(program: Program, inputs: Inputs, node: str = "", stack: str = "") -> Tensor:
    """[prompt, position] as `shown_positions` has it, with all shown where there is no mask."""
    shown = shown_positions(program, inputs, node, stack)
    if shown is not None:
        return shown
    tokens = _input(program, inputs, _side(program, node, stack), (*TOKENS, MASK))
    assert tokens is not None  # somebody's mask hides something, so there are positions
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def shown_entries(
    program: Program,
    inputs: Inputs,
    axes: Sequence[str],
    shape: Sequence[int],
    node: str = "",
    stack: str = "",
    *,
    is_cross: bool = False,
) -> Tensor | None:
    """Mask of the entries of a value of a run at shown positions, to be broadcast against it; None for all.

    `axes` and `shape` are those of the value at `node`. `is_cross`: its keys are the encoder's.
    """
    along = [dim for dim, axis in enumerate(axes) if axis in POSITION_AXES]
    if "batch" not in axes or not along:
        return None
    own, batch = shown_positions(program, inputs, node, stack), axes.index("batch")
    keys = shown_positions(program, inputs, "", "encoder") if is_cross else own
    found: Tensor | None = None
    for dim in along:
        shown = keys if axes[dim] == "key_pos" else own
        if shown is not None:
            sizes = [shape[at] if at in {batch, dim} else 1 for at in range(len(axes))]
            rows = aligned(shown, shape[dim]).expand(shape[batch], -1)
            rows = (rows if batch < dim else rows.T).reshape(sizes)
            found = rows if found is None else found & rows
    return found


def aligned(shown: Tensor, length: int) -> Tensor:
    """The mask of the last `length` positions; what stands in front of the mask's own is shown."""
    more = length - shown.shape[1]
    return torch.nn.functional.pad(shown, (more, 0), value=True) if more > 0 else shown[:, -length:]


def length_of(program: Program, inputs: Inputs, node: str) -> int | None:
    """Return the number of positions of a run, as an output counts them; None where that is not known."""
    tokens = _input(program, inputs, _side(program, node), TOKENS)
    if tokens is not None and tokens.ndim > 1:
        return int(tokens.shape[1])
    found = _positions(program)
    return None if found is None else int(inputs[found[0].name].shape[found[1]])


def reads_ahead(graph: Graph, program: Program, inputs: Inputs, output: str) -> bool:
    """True if an output at some position depends on the tokens behind it, as without causal attention.

    The last token of one prompt is replaced, and what stands in front of it in the output is compared: first
    of a prompt that is cut to two tokens, both variants as one batch, which costs little; where that shows a
    difference, or cannot be computed, of the whole prompt. False where that cannot be tried either.
    """
    tokens = _leaf(program, _side(program, output), TOKENS)
    found = (tokens, 1) if tokens is not None else _positions(program)
    if found is None or inputs[found[0].name].shape[found[1]] < 2:
        return False
    one: dict[str, Tensor] = {}
    for leaf, value in inputs.items():
        batch = program.batch_dims.get(leaf)
        row = value if batch is None else value.narrow(batch, 0, 1)
        is_mask = leaf.rpartition(".")[2].endswith(MASK) and row.ndim == 2
        one[leaf] = torch.ones_like(row) if is_mask else row
    name, dim = found[0].name, found[1]
    if program.dimensions.batch and program.dimensions.positions:
        short = {
            leaf: value if (pos := program.pos_dims.get(leaf)) is None else value.narrow(pos, 0, 2)
            for leaf, value in one.items()
        }
        other = _with_other_end(short, name, dim)
        both = {
            leaf: value
            if (at := program.batch_dims.get(leaf)) is None
            else torch.cat([value, other[leaf]], at)
            for leaf, value in short.items()
        }
        rows = _logits(graph, program, both, output)
        if rows is not None and not _differ(rows[:, :1], rows[:, 1:]):
            return False
    first, second = (
        _logits(graph, program, given, output) for given in (one, _with_other_end(one, name, dim))
    )
    return first is not None and second is not None and _differ(first, second)


def _with_other_end(inputs: Inputs, name: str, dim: int) -> dict[str, Tensor]:
    """Inputs with another last token."""
    changed = inputs[name].clone()
    last = changed.narrow(dim, changed.shape[dim] - 1, 1)
    last.copy_(last.flip(-1) + 1 if last.is_floating_point() else torch.where(last > 0, last - 1, last + 1))
    return {**inputs, name: changed}


def _logits(graph: Graph, program: Program, inputs: dict[str, Tensor], output: str) -> Tensor | None:
    """An output of a run as [world, prompt, position, ...].

    None where it has one position or none, and where the model does not take such inputs.
    """
    read = Outputs(program)
    try:
        with torch.no_grad():
            (value,) = stream(graph, run_sources(program, inputs), [output]).values()
            found = read.arranged(output, value, 1, read.prompts(inputs))
    except (ConewiseError, RuntimeError, ValueError, IndexError):
        return None
    return found if found.ndim > 3 and found.shape[2] > 1 else None


def _differ(first: Tensor, second: Tensor) -> bool:
    """True if two outputs differ in front of their last position by more than rounding."""
    before, after = (value[:, :, :-1].double() for value in (first, second))
    allowed = 4 * torch.finfo(first.dtype).eps if is_half(first) else row_tolerance(first)
    return bool((before - after).abs().max() > allowed * before.abs().max())


def _side(program: Program, node: str, stack: str = "") -> str:
    """The start of the names of inputs that have the positions of a node: "decoder_", or none."""
    own = _leaf(program, "decoder_", (*TOKENS, MASK))
    if own is None:
        return ""
    other = _leaf(program, "", (*TOKENS, MASK))
    shape = program.shapes.get(node) or ()
    symbols: set[Any] = set().union(*(symbols_in(size) for size in shape))
    one, two = ((symbols_in(leaf.shape[1]) if leaf else frozenset()) for leaf in (own, other))
    if one and two and one != two and not symbols.isdisjoint(one | two):
        return "decoder_" if not symbols.isdisjoint(one) else ""
    return "" if "encoder" in (stack or node) else "decoder_"


def _leaf(program: Program, side: str, names: Sequence[str]) -> Input | None:
    wanted = [f"{side}{name}" for name in names]
    return next((leaf for leaf in program.inputs if leaf.name.rpartition(".")[2] in wanted), None)


def _input(program: Program, inputs: Inputs, side: str, names: Sequence[str]) -> Tensor | None:
    leaf = _leaf(program, side, names)
    return None if leaf is None else inputs.get(leaf.name)


def _positions(program: Program) -> tuple[Input, int] | None:
    """An input that has positions, and along which dimension."""
    known = program.dimensions.positions
    for leaf in program.inputs:
        if leaf.name.rpartition(".")[2].endswith(("mask", "position_ids", "token_type_ids")):
            continue
        for dim, size in enumerate(leaf.shape):
            is_fixed = dim == 1 and isinstance(size, int)
            if str(size) in known or (not known and is_fixed and leaf.has_positions):
                return leaf, dim
    return None
