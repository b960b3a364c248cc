"""`make bench-workers`: sweeps by workers beside the same sweeps in one process.

Workers are processes with one thread each, or, with `ray`, actors of Ray; a local run has one thread too. The
model is GPT-2 with random weights. Workers are set up before anything is timed, and what that took is said.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from benchmarks.harness import Line, print_table
from conewise.jobs.scheduling import Rates, shares_of, simulate
from conewise.sweeps.sweep import Sweep

LENGTH, BUDGET = 20, "64MiB"
METRIC = cw.logit_diff(answer=3, wrong=5)
CORES = len(os.sched_getaffinity(0))


def small_gpt2(layers: int = 12, width: int = 256) -> cw.Model:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_head=8, n_embd=width, vocab_size=1000, bos_token_id=0, eos_token_id=0
    )
    made: Any = GPT2LMHeadModel
    return cw.capture(made(config).eval(), input_ids=ids(0), logits_to_keep=1)


def ids(seed: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 1000, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    found = what()
    return time.perf_counter() - started, found


def main(kind: str = "processes") -> None:
    """Print overhead, balance, how near the simulation comes, and what a second worker brings."""
    torch.set_num_threads(1)
    model = small_gpt2()
    sites = cw.sites("z", layer=":", head=":", pos=":") + cw.sites("mlp_out", layer=":", pos=":")
    pairs = range(13)  # a minute in one process
    sweep = model.sweep(
        sites,
        base=[{"input_ids": ids(seed)} for seed in pairs],
        source=[{"input_ids": ids(100 + seed)} for seed in pairs],
        metric=METRIC,
    )
    prompts = 200
    question = model.sweep(
        cw.sites("z", layer=":", head=":"),
        base=[{"input_ids": ids(seed, 10)} for seed in range(prompts // 10)],
        source=[{"input_ids": ids(1000 + seed, 10)} for seed in range(prompts // 10)],
        metric=METRIC,
    )
    spans: dict[int, float] = {}
    asked: dict[int, float] = {}
    lines: list[Line] = []
    rates: Rates | None = None
    local, expected = timed(lambda: sweep.run(max_memory=BUDGET, progress=False))
    for count in (1, 2, 4):
        with fleet(kind, count) as workers:
            setup, _ = timed(lambda: small(model, workers))
            spans[count], found = timed(lambda: sweep.run(max_memory=BUDGET, workers=workers, progress=False))
            assert found.equals(expected), "a fleet has other numbers"
            ledger = workers.ledger
            if count == 1:
                flops = sum(one.cost for one in ledger.seats.values())
                seconds = sum(one.seconds for one in ledger.seats.values())
                rates = Rates(0.0, 0.0, seconds / flops, max(0.0, spans[1] - seconds) / shares(sweep, 1))
                lines.append(
                    line("overhead of one worker", spans[1] / local - 1, 0.10, below=True, percent=True)
                )
            assert rates is not None
            slower = max(1.0, count / CORES)
            each = Rates(0.0, 0.0, rates.flop * slower, rates.share * slower)
            paper = simulate(shares_of([plan_of(sweep)], count), count, each).makespan
            lines.append(
                line(
                    f"simulated, {count} workers",
                    abs(paper / spans[count] - 1),
                    0.15,
                    below=True,
                    percent=True,
                )
            )
            if count == 2:
                lines.append(line("balance of two workers", ledger.balance, 1.1, below=True))
            if count < 4:
                asked[count], _ = timed(lambda: question.run(workers=workers, progress=False))
            print(f"{count} workers: set up in {setup:.1f} s, swept in {spans[count]:.1f} s", flush=True)
    lines.append(line("200 prompts, two workers over one", asked[1] / asked[2], 1.7))
    print_table(f"Workers ({kind}): a sweep of {local:.0f} s in one process, {CORES} cores", lines)


def fleet(kind: str, count: int) -> Any:
    """So many workers of a kind."""
    return (
        cw.Ray(workers=count, cpus_per_worker=min(1, CORES / count)) if kind == "ray" else cw.Processes(count)
    )


def small(model: cw.Model, workers: Any) -> None:
    """A sweep that is over at once: what it takes is setting the workers up."""
    asked: dict[str, Any] = {"base": {"input_ids": ids(0)}, "source": {"input_ids": ids(1)}, "metric": METRIC}
    model.sweep(cw.sites("z", layer=0, head=":", pos=":"), **asked).run(workers=workers, progress=False)


def plan_of(sweep: Sweep) -> cw.SweepPlan:
    """The plan of the first batch, which stands for all."""
    return sweep.plan(BUDGET)


def shares(sweep: Sweep, workers: int) -> int:
    """How many shares there are."""
    return len(shares_of([plan_of(sweep)], workers))


def line(what: str, found: float, target: float, *, below: bool = False, percent: bool = False) -> Line:
    """A row of the table: at most or at least so much."""
    shown = f"{100 * found:.1f} %" if percent else f"{found:.2f}"
    wanted = f"{100 * target:.0f} %" if percent else f"{target:g}"
    return Line(
        what, f"{'<=' if below else '>='} {wanted}", shown, found <= target if below else found >= target
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
