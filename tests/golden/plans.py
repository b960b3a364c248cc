"""The plans of six sweeps, as they are kept: `python -m tests.golden.plans` writes them anew.

A change of one shows in a diff, step by step: it is a change of what sweeps do, and is meant or is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import conewise as cw
from conewise.sweeps.sweep import Sweep
from tests.sweeps.mixers import ids, module
from tests.sweeps.small import model, prompts, sweep_over

FOLDER = Path(__file__).parent


def heads_and_mlps() -> Sweep:
    return sweep_over(model())


def positions() -> Sweep:
    """A change at a late position: the rows before it are the baseline's."""
    captured, one = model(), prompts(1)
    other = one.clone()
    other[0, 3:] = (other[0, 3:] + 1) % 7
    return sweep_over(
        captured,
        cw.sites("resid_pre", layer=":", pos=":"),
        base={"input_ids": one},
        source={"input_ids": other},
    )


def sets_of_sites() -> Sweep:
    cells = [
        (cw.site("z", layer=0, head=1), cw.site("mlp_out", layer=1, pos=[2, 5])),
        (cw.site("resid_pre", layer=1), cw.site("z", layer=1, head=0, pos=slice(2, 4))),
        ("mlp_out", 0),
    ]
    return sweep_over(model(), cells, source="zero", metric=[cw.prob(2), cw.logit(1)])


def several_chunks() -> Sweep:
    return sweep_over(model(), cw.sites("z", layer=":", head=":", pos=":"))


def rows_that_mix() -> Sweep:
    """Serial: the batch is averaged over on the way."""
    captured = cw.capture(module(lambda x: x - x.mean(0, keepdim=True)), input_ids=ids(2, 6, 0))
    base, source = (captured.run(input_ids=ids(2, 6, seed)) for seed in (1, 2))
    return captured.sweep(["embed", "mlp"], base=base, source=source, metric=cw.logit(3))


def patched_base() -> Sweep:
    """An edit that stands in the base is made again in worlds that patch before it."""
    captured = model()
    base = captured.run(input_ids=prompts(1, 2)).fork()
    base.patch(("mlp_out", 1), "zero")
    return sweep_over(captured, base=base)


SWEEPS: dict[str, tuple[Callable[[], Sweep], int | None]] = {
    "heads_and_mlps": (heads_and_mlps, None),
    "positions": (positions, None),
    "sets_of_sites": (sets_of_sites, None),
    "several_chunks": (several_chunks, 16_000),
    "rows_that_mix": (rows_that_mix, None),
    "patched_base": (patched_base, None),
}
"""Each sweep, and its budget of memory."""


def plan_of(name: str) -> str:
    """The plan as JSON, made with one thread: kernels take memory for each."""
    make, budget = SWEEPS[name]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return make().plan(max_memory=budget).to_json()
    finally:
        torch.set_num_threads(threads)


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


if __name__ == "__main__":
    for each in SWEEPS:
        path_of(each).write_text(plan_of(each), encoding="utf-8")
