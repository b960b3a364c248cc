"""What the library says of the edges of a `Stack`: the same questions as in `by_hand`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

import conewise as cw
from tests.ground_truth.stack import Stack


@functools.cache
def captured(stack: Stack) -> cw.Model:
    """The model of a stack, one for each."""
    return cw.capture(stack, next(stack.parameters()).new_zeros(2, 3).long())


def edges(stack: Stack) -> list[str]:
    """Every edge."""
    return list(captured(stack).edges())


def effects(stack: Stack, ids: Tensor, source: Tensor, metric: Any) -> dict[str, float]:
    """For each edge: what the metric becomes when it alone is patched, less what it is; by a sweep."""
    model = captured(stack)
    result = model.sweep(model.edges(), base={"ids": ids}, source={"ids": source}, metric=metric).run(
        progress=False
    )
    return dict(zip(model.edges(), (result.values - result.base).tolist(), strict=True))


def effects_of_sets(
    stack: Stack, ids: Tensor, source: Tensor, metric: Any, sets: Sequence[tuple[str, ...]]
) -> dict[tuple[str, ...], float]:
    """For each set of edges: what the metric becomes when they are patched together, less what it is."""
    result = (
        captured(stack)
        .sweep(list(map(list, sets)), base={"ids": ids}, source={"ids": source}, metric=metric)
        .run(progress=False)
    )
    return dict(zip(sets, (result.values - result.base).tolist(), strict=True))


def circuit(stack: Stack, ids: Tensor, source: Tensor, metric: Any, threshold: float) -> cw.Circuit:
    """What ACDC leaves, many edges at once; one at a time leaves the same."""
    model = captured(stack)
    found, again = (
        model.find_circuit(
            base={"ids": ids},
            source={"ids": source},
            metric=metric,
            threshold=threshold,
            speculative=speculative,
        ).run(progress=False)
        for speculative in (True, False)
    )
    assert found.edges == again.edges
    return found
