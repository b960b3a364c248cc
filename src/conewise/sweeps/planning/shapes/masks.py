"""What attention masks hide, as values: found once for a model and a shape. Planning reads no tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conewise.program.operations import ATTENTION
from conewise.program.records import Program, Record, Ref
from conewise.structure.attention.sizes import attention_argument
from conewise.sweeps.planning.shapes.attention_rules import is_causal_mask
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
