"""Planning computes nothing: no operation of the model runs on numbers, and nothing is demanded of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import conewise as cw
from tests.sweeps.tiny import prompts, tiny

PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "attention",
    "softmax",
    "layer_norm",
    "gelu",
    "silu",
    "embedding",
)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of a model that run on numbers; on the meta device there are shapes alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [found] if isinstance(found, torch.Tensor) else []
        if any(name in func.name() for name in PRODUCTS) and any(not one.is_meta for one in tensors):
            self.seen.append(func.name())
        return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_plan_runs_no_operation_of_the_model(name: str) -> None:
    model = tiny(name)
    base, source = (model.run(input_ids=prompts(2, seed=seed)) for seed in (0, 1))
    sweep = model.sweep(
        cw.sites("z", layer=":", head=":"), base=base, source=source, metric=cw.logit_diff(3, 4)
    )
    computed = [run.ledger.count("recomputed") for run in (base, source)]
    seen: dict[str, list[str]] = {}
    steps: dict[str, Callable[[], object]] = {"plan": sweep.plan, "run": sweep.run}
    for step, do in steps.items():
        with Watch() as watch:
            do()
        seen[step] = watch.seen
        if step == "plan":
            assert [run.ledger.count("recomputed") for run in (base, source)] == computed
    assert seen["plan"] == []
    assert seen["run"], "the watch sees what a sweep computes"
