"""Corruption: noise on the embeddings of some tokens, in several samples that are stacked as a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from conewise.errors import MissingSiteError
from conewise.program.operations import TOKEN_KEEPING
from conewise.program.records import Program, Ref
from conewise.runs.interventions.filling import noise_of
from conewise.runs.metrics import Metric, expect_prompts

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Embedding:
    """The node that holds the embeddings of an input's tokens, and the table that they come from."""

    node: str
    input: str
    table: Tensor

    @property
    def deviation(self) -> float:
        """The standard deviation of the table's numbers."""
        return float(self.table.detach().float().std())


def find_embedding(program: Program) -> Embedding:
    """The first look-up of the token ids in a table of embeddings.

    Token ids are the input named `input_ids`, or else the first input of integers. Raises
    MissingSiteError where they are not looked up in a table.
    """
    integers = [leaf.name for leaf in program.inputs if not leaf.dtype.is_floating_point]
    named = [name for name in integers if name.rpartition(".")[2] == "input_ids"]
    tables = program.source_values
    for tokens in (named or integers)[:1]:
        ids = {tokens}
        for record in program.records:
            first, second = (*record.args, None, None)[:2]
            if record.op == "embedding" and isinstance(first, Ref) and first.name in tables:
                if isinstance(second, Ref) and second.name in ids:
                    return Embedding(record.name, tokens, tables[first.name])
            elif record.op in TOKEN_KEEPING and isinstance(first, Ref) and first.name in ids:
                ids.add(record.name)
    raise MissingSiteError(
        f"no embedding of tokens in {program.module_name}: its inputs are "
        f"{', '.join(leaf.name for leaf in program.inputs)}, and no token ids among them are looked up in a "
        "table. Make the corrupted run yourself: patch a fork of the clean one, and sweep with that as base."
    )


def repeated_inputs(program: Program, inputs: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """The inputs `times` times along the batch; what has no batch stays as it is."""
    if times == 1:
        return dict(inputs)
    found = {}
    for name, value in inputs.items():
        times_along = [
            times if str(size) in program.dimensions.batch else 1 for size in program.shapes[name] or ()
        ]
        found[name] = value.repeat(times_along) if times in times_along else value
    return found


def noisy(present: Tensor, scale: float, seed: int, samples: Sequence[int]) -> Tensor:
    """`present` [sample·prompt, ...] with noise; a sample's depends on the seed and its own number alone."""
    rows = present.shape[0] // len(samples)
    drawn = [noise_of((rows, *present.shape[1:]), f"{seed}/{sample}") for sample in samples]
    return present + (scale * torch.cat(drawn)).to(present.device, present.dtype)


def repeated_part(part: Tensor, times: int) -> Tensor:
    """A clean value [prompt, ...], once for each sample."""
    return part.repeat(times, *[1] * (part.ndim - 1))


def repeated_rows(rows: Tensor, times: int) -> Tensor:
    """The metrics [metric, prompt] of the clean run, once for each sample."""
    return rows.repeat(1, times)


def sampled(metric: Metric, prompts: int) -> Metric:
    """A metric of `prompts` prompts, as one of a batch in which each sample has all of these prompts."""
    expect_prompts(metric, prompts, "the clean run")
    compute: Callable[..., Tensor] = metric.compute

    def of_stack(stack: Tensor) -> Tensor:
        """Samples are worlds to the metric: [world, sample·prompt, ...] as [world·sample, prompt, ...]."""
        worlds, rows = stack.shape[:2]
        found = compute(stack.reshape(worlds * (rows // prompts), prompts, *stack.shape[2:]))
        return found.reshape(worlds, rows) if found.numel() == worlds * rows else found

    def of_outputs(outputs: Any) -> Tensor:
        rows = _rows(outputs)
        found = []
        for start in range(0, rows, prompts):
            own = tree_map(lambda leaf, s=start: _cut(leaf, rows, s, s + prompts), outputs)
            one = torch.as_tensor(compute(own))
            found.append(one.expand(prompts) if one.ndim == 0 else one)
        return torch.cat(found)

    shown, among = metric.shown, metric.among
    return replace(
        metric,
        compute=of_outputs if metric.whole else of_stack,
        prompts=None,
        of_prompts=None,
        among=None if among is None else lambda columns: sampled(among(columns), prompts),
        shown=None if shown is None else lambda mask: sampled(shown(mask[:prompts]), prompts),
    )


def _rows(outputs: Any) -> int:
    rows: list[int] = []
    tree_map(lambda leaf: rows.append(leaf.shape[0]) if isinstance(leaf, torch.Tensor) else None, outputs)
    return max(rows, default=1)


def _cut(leaf: Any, rows: int, start: int, stop: int) -> Any:
    is_batch = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
    return leaf[start:stop] if is_batch else leaf


def groups(samples: int, together: int) -> list[list[int]]:
    """The numbers of the samples, cut into groups of at most `together`."""
    count = math.ceil(samples / together)
    return [list(range(n * together, min(samples, (n + 1) * together))) for n in range(count)]
