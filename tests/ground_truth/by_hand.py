"""Edges of a `Stack`, cut by a forward pass that is written out for it: what the library is compared with.

Each reader is handed the sum of what the writers before it wrote; for an edge that is cut, what that writer
wrote in the source run stands in the sum. Nothing of conewise is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from tests.ground_truth.stack import Outputs, Stack

Metric = Callable[[Outputs], Tensor]


def edges(stack: Stack) -> list[str]:
    """Every edge: readers in order, and for each the writers before it."""
    found, before = [], ["input"]
    for number, layer in enumerate(stack.blocks):
        heads = [f"a{number}.h{head}" for head in range(layer.attn.heads)]
        found += [f"{writer}->{head}<{slot}>" for slot in "qkv" for head in heads for writer in before]
        before = before + heads
        if layer.mlp is not None:
            found += [f"{writer}->m{number}" for writer in before]
            before = [*before, f"m{number}"]
    return found + [f"{writer}->logits" for writer in before]


@torch.no_grad()
def outputs(stack: Stack, ids: Tensor, source: Tensor, cut: Collection[str] = ()) -> Outputs:
    """The outputs for `ids`, with the edges in `cut` carrying what their writers wrote for `source`."""
    _, ablated = _forward(stack, source, {}, frozenset())
    found, _ = _forward(stack, ids, ablated, frozenset(cut))
    return found


def _forward(
    stack: Stack, ids: Tensor, ablated: dict[str, Tensor], cut: frozenset[str]
) -> tuple[Outputs, dict[str, Tensor]]:
    wrote = {"input": stack.entry(ids)}

    def read(reader: str) -> Tensor:
        parts = [ablated[w] if f"{w}->{reader}" in cut else part for w, part in wrote.items()]
        return torch.stack(parts).sum(0)

    for number, layer in enumerate(stack.blocks):
        attn = layer.attn
        slices = [slice(head * attn.head_width, (head + 1) * attn.head_width) for head in range(attn.heads)]
        qkv = []
        for slot, project in (("q", attn.query), ("k", attn.key), ("v", attn.value)):
            by_head = [
                read(f"a{number}.h{head}<{slot}>") @ project.weight[rows].T
                for head, rows in enumerate(slices)
            ]
            qkv.append(torch.cat(by_head, -1))
        z = attn.mix(*qkv)
        for head, rows in enumerate(slices):
            wrote[f"a{number}.h{head}"] = z[..., rows] @ attn.out.weight[:, rows].T
        if layer.mlp is not None:
            wrote[f"m{number}"] = layer.mlp(read(f"m{number}"))
    return Outputs(stack.unembed(read("logits"))), wrote


def effects(stack: Stack, ids: Tensor, source: Tensor, metric: Metric) -> dict[str, float]:
    """For each edge: what the metric becomes when it alone is cut, less what it is."""
    whole = metric(outputs(stack, ids, source)).mean()
    return {edge: float(metric(outputs(stack, ids, source, [edge])).mean() - whole) for edge in edges(stack)}


def left_by_acdc(stack: Stack, ids: Tensor, source: Tensor, metric: Metric, threshold: float) -> list[str]:
    """The edges that are left when each is cut in turn, the last one first.

    An edge stays cut if the metric grew by less than the threshold.
    """
    cut: list[str] = []
    now = float(metric(outputs(stack, ids, source)).mean())
    for edge in reversed(edges(stack)):
        then = float(metric(outputs(stack, ids, source, [*cut, edge])).mean())
        if then - now < threshold:
            cut, now = [*cut, edge], then
    return [edge for edge in edges(stack) if edge not in cut]
