"""Workers of a command: `--ray`, `--workers`, several devices; and what they would take, on paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conewise.cli.options.load_options import LoadOptions
from conewise.cli.options.run_options import FleetOptions, RunOptions
from conewise.cli.terminal.failing import CommandError

if TYPE_CHECKING:
    from conewise.circuits.forwards.forwards import Asked
    from conewise.fleets.jobs import Fleet
    from conewise.prompts.questions import Question

LOCAL = "local"
"""What `--ray` stands for where no address follows: a cluster on this machine, for this command."""


def without_workers(loading: LoadOptions) -> LoadOptions:
    """How the driver itself loads the model: on the first of several devices."""
    return replace(loading, device=next(iter(devices_of(loading)), None))


def devices_of(loading: LoadOptions) -> list[str]:
    """The devices of `--device`; none where it was not given."""
    if loading.device is None:
        return []
    devices = [one.strip() for one in loading.device.split(",")]
    if not all(devices):
        raise CommandError(
            f"--device {loading.device!r} names no device, or one that is empty: write cpu, cuda:0."
        )
    return devices


def expect_on_paper(options: FleetOptions) -> None:
    """Refuse workers of a plan, which runs nothing, unless they are simulated."""
    if options.ray is not None or (options.workers is not None and not options.simulate):
        raise CommandError("a plan runs nothing, so there are no workers: say --workers N --simulate.")


@contextmanager
def fleet_of(options: FleetOptions, loading: LoadOptions) -> Iterator[Fleet | None]:
    """The workers that were asked for, ended with the command; None where there are none."""
    if options.simulate:
        raise CommandError("--simulate runs nothing: it goes with `conewise plan`, and with --plan.")
    devices = devices_of(loading)
    if options.ray is not None:
        if len(devices) > 1:
            raise CommandError("--ray gives each worker a device: name one kind with --device, as cuda.")
        from conewise.fleets.ray_fleet import Ray

        gpus = 1 if devices and devices[0].startswith("cuda") else 0
        with Ray(
            None if options.ray == LOCAL else options.ray, workers=options.workers, gpus_per_worker=gpus
        ) as ray:
            yield ray
        return
    if len(devices) > 1 or options.workers is not None:
        from conewise.fleets.processes import Processes

        chosen = devices if len(devices) > 1 else None
        with Processes(options.workers, devices=chosen) as processes:
            yield processes
        return
    yield None


def simulated_search(asked: Asked, options: FleetOptions) -> dict[str, Any]:
    """What workers would gain of a search: how long a batch takes, whole and in parts."""
    from conewise.circuits.search.sharing import batch_rates

    if options.workers is None:
        raise CommandError("--simulate of how many workers? Say so with --workers N.")
    rates = batch_rates(asked)
    return {
        "workers": options.workers,
        "batch_worlds": rates.worlds,
        "batch_seconds": rates.seconds(options.workers),
        "one_worker_batch_seconds": rates.seconds(1),
        "gain": rates.gain(options.workers),
        "worth_having": rates.worth_having(options.workers),
    }


def simulated(question: Question, options: FleetOptions, running: RunOptions) -> dict[str, Any]:
    """What workers would take, from the plan of each group of prompts and the rates of this machine."""
    from conewise.fleets.running import shares_of
    from conewise.fleets.simulation import Rates, simulate, worth_having

    if options.workers is None:
        raise CommandError("--simulate of how many workers? Say so with --workers N.")
    groups = range(len(question.prompts.groups))
    plans = [question.sweep(group).plan(running.max_memory, running.evaluator.value) for group in groups]
    flops, seconds = sum(plan.flops for plan in plans), [plan.seconds for plan in plans]
    known = [one for one in seconds if one is not None]
    if len(known) < len(seconds) or not flops:
        raise CommandError("nothing was timed on this device, so that there are no seconds to simulate.")
    capture = sum(question.model.phases.values())
    baseline = 2 * question.forward_seconds(1) / len(plans)
    rates = Rates(setup=capture, baseline=baseline, flop=sum(known) / flops)
    shares = shares_of(plans, options.workers)
    found = simulate(shares, options.workers, rates)
    return {
        "workers": options.workers,
        "shares": len(shares),
        "makespan_seconds": found.makespan,
        "one_worker_seconds": simulate(shares_of(plans, 1), 1, rates).makespan,
        "balance": found.balance,
        "worth_having": worth_having(shares, options.workers, rates),
        "setup_seconds": capture,
        "baseline_seconds": found.baselines,
    }


def search_shown(found: dict[str, Any]) -> str:
    """A simulation of a search as lines."""
    whole, part = (f"{1000 * found[name]:.3g} ms" for name in ("one_worker_batch_seconds", "batch_seconds"))
    lines = [
        f"a narrow batch, of {found['batch_worlds']} worlds: {whole}; in {found['workers']} parts: {part}",
        f"by {found['workers']} workers it is {found['gain']:.2f} times as fast, without the way there",
        "batches wait for each other: how many there are depends on what is decided",
        f"more than {found['worth_having']} workers would hardly help, as long as batches are narrow",
    ]
    return "\n".join(lines)


def shown(found: dict[str, Any]) -> str:
    """A simulation as lines."""
    span, one, setup = (found[f"{name}_seconds"] for name in ("makespan", "one_worker", "setup"))
    lines = [
        f"{found['workers']} workers, {found['shares']} shares: {span:.3g} s; one worker: {one:.3g} s",
        f"capturing the model, on each worker: {setup:.3g} s",
        f"baselines, on all workers together: {found['baseline_seconds']:.3g} s",
        f"balance, the busiest worker over the mean: {found['balance']:.2f}",
        f"more than {found['worth_having']} workers would hardly help",
    ]
    return "\n".join(lines)
