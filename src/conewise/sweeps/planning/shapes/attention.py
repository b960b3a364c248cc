"""What attention masks hide, as values: found once for a model and a shape. Planning reads no tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from conewise.program.operations import ATTENTION
from conewise.program.records import Program, Record, Ref
from conewise.program.rules import Rule, compile_rule
from conewise.structure.attention.sizes import PLACES, attention_argument
from conewise.sweeps.planning.shapes.layout import Layout


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask. `is_causal`: it says that every position sees itself and all before it, and nothing else.

    Bit s of `hides` says that no position before s sees one from s on.
    """

    is_causal: bool
    hides: int

    def hides_from(self, start: int) -> bool:
        """Whether no position before `start` sees one from there on."""
        return bool(self.hides >> start & 1)


Masks = Mapping[str, Mask]
"""By the name of the value that is the mask."""


def masks_of(program: Program) -> tuple[str, ...]:
    """The values that attention takes for its masks."""
    given = (attention_argument(r, "attn_mask") for r in program.records if r.op == ATTENTION)
    return tuple(dict.fromkeys(mask.name for mask in given if isinstance(mask, Ref)))


def attention_kernel(record: Record, rows: int | None, layout: Layout, masks: Masks) -> str:
    """Which way to compute an operation is meant, with so many positions; empty for what has one way only."""
    if record.op != ATTENTION:
        return ""
    mask = attention_argument(record, "attn_mask")
    if rows is None and isinstance(mask, Ref) and mask.name not in layout.varying:
        return "causal" if mask.name in masks and masks[mask.name].is_causal else ""
    return "last rows" if rows is not None and attention_argument(record, "is_causal") else ""


@torch.no_grad()
def read_masks(names: tuple[str, ...], read: Callable[[str], Any]) -> dict[str, Mask]:
    """What these masks hide in a run, whose values `read` gives."""
    return {name: mask_of(read(name)) for name in names}


def mask_of(value: Any) -> Mask:
    """What a mask hides: booleans where a position sees, or numbers that are added to scores."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return Mask(is_causal=False, hides=0)
    rows, columns = value.shape[-2:]
    if value.dtype == torch.bool:
        sees = value
    else:
        # A row that sees nothing sees everything alike: what is added to a score is low, not minus infinity.
        sees = value > torch.finfo(value.dtype).min / 2
        sees = sees | ~sees.any(-1, keepdim=True)
    flat = sees.reshape(-1, rows, columns).any(0)
    numbers = torch.arange(1, columns + 1, device=flat.device)
    furthest = (flat * numbers).amax(-1).cummax(0).values.tolist()
    hides = 0
    for start in range(1, min(rows, columns)):
        if furthest[start - 1] <= start:
            hides |= 1 << start
    return Mask(is_causal_mask(value), hides)


# ------------------------------------------------------------------------------------------
# Other ways to compute a fused attention: for its last positions, without a mask, with keys repeated.

MASK = "$mask"
"""The name under which a rule is given its mask."""


def causal_rule(record: Record, rows: int, length: int, device: torch.device) -> Rule:
    """The rule of a causal attention without a mask, for the last `rows` of its queries."""
    mask = _causal_mask(rows, length, device)
    given = [*record.args[:3], Ref(MASK), attention_argument(record, "dropout_p") or 0.0, False]
    named = {key: value for key, value in record.kwargs.items() if key not in PLACES}
    masked = replace(record, args=tuple(given), kwargs=named)
    rule, at = compile_rule(masked), masked.inputs.index(MASK)
    return lambda *values: rule(*values[:at], mask, *values[at:])


_CAUSAL_MASKS: weakref.WeakValueDictionary[tuple[int, int, torch.device], torch.Tensor]
_CAUSAL_MASKS = weakref.WeakValueDictionary()


def _causal_mask(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """The mask of the last `rows` positions: one for all layers, for as long as a rule has it."""
    key = rows, length, device
    mask = _CAUSAL_MASKS.get(key)
    if mask is None:
        mask = _CAUSAL_MASKS[key] = torch.ones(rows, length, dtype=torch.bool, device=device).tril(
            length - rows
        )
    return mask


def unmasked_rule(record: Record) -> Rule:
    """The rule of an attention whose mask says no more than "causal": kernels know that by themselves."""
    given = [*record.args[:3], None, attention_argument(record, "dropout_p") or 0.0, True]
    named = {key: value for key, value in record.kwargs.items() if key not in PLACES}
    plain = replace(record, args=tuple(given), kwargs=named)
    rule, places = compile_rule(plain), [record.inputs.index(name) for name in plain.inputs]
    return lambda *values: rule(*[values[place] for place in places])


def repeated_rule(record: Record, rule_of: Callable[[Record], Rule]) -> Rule:
    """The rule of an attention whose heads share keys and values, which it repeats, one for each head.

    The kernels that share them hold all scores in float32, or wherever there is a mask.
    """
    query, *shared = (one.name for one in record.args[:3])
    if query in shared:
        return rule_of(record)
    named = {key: value for key, value in record.kwargs.items() if key != "enable_gqa"}
    rule, heads = rule_of(replace(record, kwargs=named)), record.inputs.index(query)
    places = {record.inputs.index(name) for name in shared}

    def repeating(*values: Any) -> Any:
        times = values[heads].shape[-3] // values[min(places)].shape[-3]
        return rule(*[_repeated_heads(v, times) if i in places else v for i, v in enumerate(values)])

    return repeating


def _repeated_heads(value: torch.Tensor, times: int) -> torch.Tensor:
    """Each head `times` times, one behind the other."""
    shape = value.shape
    apart = value.unsqueeze(-3).expand(*shape[:-2], times, *shape[-2:])
    return apart.reshape(*shape[:-3], shape[-3] * times, *shape[-2:])


def is_causal_mask(mask: Any) -> bool:
    """Whether every position sees itself and all before it, and nothing else."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() < 2:
        return False
    rows, columns = mask.shape[-2:]
    return rows == columns and torch.equal(mask, torch.ones_like(mask).tril())
