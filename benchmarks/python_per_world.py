"""`make bench-python`: what a sweep spends in Python, for each of its worlds.

The worlds are all neurons of a small GPT-2 of twelve layers, and all heads and MLPs at each position of
another: some 32,000, each cheap. Where positions are told apart, there are more passes for as many worlds.
Python's time is what a profiler of calls finds in Python's own functions, by the clock of the thread, less
what the profiler takes. That is measured with calls of an empty function, as many behind each large
operation as the sweep makes: behind one of these, the caches hold neither Python nor the profiler, and a call
takes several times as long. The target lets freed memory stay with the process, since giving it back is the
system's time. What cannot be told apart stays in: freeing of tensors, and Python's own cold caches.
"""

from __future__ import annotations

import cProfile
import sys
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from benchmarks.harness import Line, print_table
from conewise.sweeps.execution import growth

BUDGET = "4GiB"
ROUNDS = 3
HEADS = cw.sites("z", layer=":", head=":", pos=":")
MLPS = cw.sites("mlp_out", layer=":", pos=":")
TOKENS = {"vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0}
LARGE = 16_000_000
"""Numbers in a tensor that no cache holds."""


def of_python(profile: cProfile.Profile) -> tuple[float, int]:
    """The seconds in Python's own functions, and the number of all calls."""
    # Not by `pstats`: it keeps one of several functions of one name and line, such as rules.
    found = profile.getstats()
    own = sum(entry.inlinetime for entry in found if not isinstance(entry.code, str))
    return own, sum(entry.callcount for entry in found)


def seconds_of_a_call(calls: int) -> float:
    """What the profiler makes a call of an empty function take, with so many behind each large operation."""

    def empty() -> None:
        return

    large, operations, least = torch.zeros(LARGE), 200, float("inf")
    for _ in range(5):
        profile = cProfile.Profile(time.thread_time)
        with profile:
            for _ in range(operations):
                large.add_(1)
                for _ in range(calls):
                    empty()
        own, counted = of_python(profile)
        least = min(least, own / counted)
    return least


def measured(model: cw.Model, sites: Any, positions: int) -> tuple[float, float, float, str]:
    """Seconds of a sweep's constructor, of its plan, and Python's for each world of a run; what was swept."""
    base, source = ({"input_ids": torch.randint(0, 500, (1, positions))} for _ in range(2))
    metric = cw.logit_diff(answer=3, wrong=5)
    start = time.process_time()
    sweep = model.sweep(sites, base=base, source=source, metric=metric)
    made = time.process_time()
    plan = sweep.plan(max_memory=BUDGET)
    planned = time.process_time()
    sweep.run(max_memory=BUDGET)
    worlds, least = len(sweep.cells), float("inf")
    for _ in range(ROUNDS):
        sweep = model.sweep(sites, base=base, source=source, metric=metric)
        profile = cProfile.Profile(time.thread_time)
        with profile:
            sweep.run(max_memory=BUDGET)
        own, calls = of_python(profile)
        least = min(least, own - calls * seconds_of_a_call(calls // plan.launches))
    passes = f"{worlds:,} worlds in {len(plan.chunks)} passes, {plan.launches:,} operations"
    return made - start, planned - made, least / worlds, passes


def main(layers: int = 12) -> None:
    """Print seconds of constructors and plans, and Python's microseconds for each world."""
    torch.set_num_threads(1)
    growth._give_back = lambda: None  # type: ignore[assignment]
    for what, neurons, positions, sites in (
        ("neurons", 2704, 20, cw.sites("post", layer=":", neuron=":")),
        ("heads and MLPs at each position", 48, 208, HEADS + MLPS),
    ):
        torch.manual_seed(0)
        config = GPT2Config(n_layer=layers, n_head=12, n_embd=12, n_inner=neurons, **TOKENS)
        example = {"input_ids": torch.randint(0, 500, (1, positions))}
        model = cw.capture(GPT2LMHeadModel(config).eval(), logits_to_keep=1, **example)
        made, planned, each, passes = measured(model, sites, positions)
        print_table(
            f"Python in a sweep of {what}: {passes}",
            [
                line("the sweep's constructor", made, 2, "s"),
                line("its plan", planned, 2, "s"),
                line("Python for each world of a run", each * 1e6, 5, "µs"),
            ],
        )


def line(what: str, found: float, target: float, unit: str) -> Line:
    """A row of the table: at most so much."""
    return Line(what, f"<= {target:g} {unit}", f"{found:.2f} {unit}", found <= target)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
