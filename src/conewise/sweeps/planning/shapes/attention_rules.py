"""Other ways to compute a fused attention: for its last positions, without a mask, with keys repeated."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from conewise.program.records import Record, Ref
from conewise.program.rules import Rule, compile_rule
from conewise.structure.attention.sizes import PLACES, attention_argument

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


_MASKS: weakref.WeakValueDictionary[tuple[int, int, torch.device], torch.Tensor]
_MASKS = weakref.WeakValueDictionary()


def _causal_mask(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """The mask of the last `rows` positions: one for all layers, for as long as a rule has it."""
    key = rows, length, device
    mask = _MASKS.get(key)
    if mask is None:
        mask = _MASKS[key] = torch.ones(rows, length, dtype=torch.bool, device=device).tril(length - rows)
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
        return rule(*[_repeated(v, times) if i in places else v for i, v in enumerate(values)])

    return repeating


def _repeated(value: torch.Tensor, times: int) -> torch.Tensor:
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
