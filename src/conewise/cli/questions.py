"""From command-line options to a question that can be planned and run, here or by workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from conewise.cli.failing import CommandError
from conewise.cli.options import (
    EdgeOptions,
    FleetOptions,
    LoadOptions,
    PairOptions,
    QuestionOptions,
    RunOptions,
)
from conewise.cli.output import Status

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.anatomy.places import Place
    from conewise.anatomy.selectors import SelectorLike
    from conewise.circuits.question import CircuitQuestion
    from conewise.jobs.pool import Pool
    from conewise.model import Model
    from conewise.runs.captured import Captured
    from conewise.text.prompts import Pair, TokenizedPrompts
    from conewise.text.questions import Question


def placed(text: str, model: Model) -> Place:
    """Return one site as `conewise cone` takes it: 'z[layer=1, head=2]', or a name."""
    from conewise.anatomy.places import site
    from conewise.text.ask import written

    found = written(text)
    if len(found) != 1:
        raise CommandError(f"{text!r} is not one site; write, for one, 'z[layer=1, head=2]'.")
    ((name, part),) = found
    numbers = {axis: choice for axis, choice in part.items() if isinstance(choice, int)}
    for axis, choice in part.items():
        if axis not in numbers:
            raise CommandError(f"{text!r}: {axis}={choice} is no single number, and a site has one cone.")
    layer = numbers.pop("layer", None)
    if layer is None and name in model.sites.kinds:
        layers = model.sites.layers(name)
        raise CommandError(
            f"{name!r} is a kind of site, in layers {layers[0]} to {layers[-1]}; say which, for one "
            f"'{name}[layer={layers[0]}]'."
        )
    place = site(name, layer=layer, stack="", **numbers)
    for one in model.each_call([place]):
        model.locate(one)  # says what is wrong with it
    return place


@dataclass(frozen=True)
class ModelName:
    """A model as it is named on the command line."""

    name: str
    how: LoadOptions = field(default_factory=LoadOptions)

    def load(self, status: Status) -> Model:
        """The module and its tokenizer."""
        with status.doing(f"loading {self.name}"), status.warnings_as_notes(), _stdout_kept_free():
            from conewise.loading import load

            return load(
                self.name,
                revision=self.how.revision,
                dtype=self.how.dtype,
                device=self.how.device,
                attn_implementation=self.how.attention,
                trust_remote_code=self.how.trust_remote_code,
                progress=status if self.name != "tiny" else None,
            )

    def capture(self, status: Status) -> Model:
        """The model, captured without a prompt."""
        model = self.load(status)
        captured(model, status)
        return model


@contextmanager
def _stdout_kept_free() -> Iterator[None]:
    """Send what libraries print in the block to stderr: some of them print to stdout themselves."""
    try:
        kept = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def model_json(model: Captured) -> dict[str, str]:
    """A model as JSON tells of it."""
    from conewise.sweeps.planning.planner import facts_of
    from conewise.sweeps.storage.provenance import model_digest

    facts = facts_of(model)
    return {
        "name": model.label,
        "source": model.origin,
        "fingerprint": model_digest(model).weights,
        "device": str(facts.device),
        "dtype": str(facts.dtype).removeprefix("torch."),
    }


def captured(model: Model, status: Status, prompts: TokenizedPrompts | None = None) -> None:
    """Capture a model that was loaded, with the first of these prompts where there are some."""
    with status.doing(f"capturing {model.label} as a graph"), status.warnings_as_notes():
        from conewise.text.ask import capture_with, expect_reads_text

        if prompts is None:
            expect_reads_text(model.module, model.label)
            model._capture_for(None)
        else:
            capture_with(model, prompts)


LOCAL = "local"
"""The value of `--ray` where no address follows: a cluster on this machine, for this command."""


def driver_model(name: str, loading: LoadOptions) -> ModelName:
    """Return the driver's own model: on the first of several devices."""
    return ModelName(name, replace(loading, device=next(iter(devices_of(loading)), None)))


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
def fleet_of(options: FleetOptions, loading: LoadOptions) -> Iterator[Pool | None]:
    """Have the workers that were asked for, ended with the command; None where there are none."""
    if options.simulate:
        raise CommandError("--simulate runs nothing: it goes with `conewise plan`, and with --plan.")
    devices = devices_of(loading)
    if options.ray is not None:
        if len(devices) > 1:
            raise CommandError("--ray gives each worker a device: name one kind with --device, as cuda.")
        from conewise.jobs.ray_workers import Ray

        address = None if options.ray == LOCAL else options.ray
        gpus = 1 if devices and devices[0].startswith("cuda") else 0
        with Ray(address, workers=options.workers, gpus_per_worker=gpus) as ray:
            yield ray
    elif len(devices) > 1 or options.workers is not None:
        from conewise.jobs.pool import Processes

        with Processes(options.workers, devices=devices if len(devices) > 1 else None) as processes:
            yield processes
    else:
        yield None


def simulated_search(question: CircuitQuestion, options: FleetOptions) -> dict[str, Any]:
    """Return what workers would gain of a search: how long a batch takes, whole and in parts."""
    from conewise.jobs.search_job import batch_rates

    workers, rates = _simulated_workers(options), batch_rates(question)
    return {
        "workers": workers,
        "batch_worlds": rates.worlds,
        "batch_seconds": rates.seconds(workers),
        "one_worker_batch_seconds": rates.seconds(1),
        "gain": rates.gain(workers),
        "worth_having": rates.worth_having(workers),
    }


def simulated(question: Question, options: FleetOptions, running: RunOptions) -> dict[str, Any]:
    """Return what workers would take, from the plan of each group of prompts and this machine's rates."""
    from conewise.jobs.scheduling import Rates, shares_of, simulate, worth_having

    workers = _simulated_workers(options)
    groups = range(len(question.prompts.groups))
    plans = [question.sweep(group).plan(running.max_memory, running.evaluator) for group in groups]
    flops, seconds = sum(plan.flops for plan in plans), [plan.seconds for plan in plans]
    known = [one for one in seconds if one is not None]
    if len(known) < len(seconds) or not flops:
        raise CommandError("nothing was timed on this device, so that there are no seconds to simulate.")
    capture = sum(question.model.phases.values())
    baseline = 2 * question.forward_seconds(1) / len(plans)
    rates = Rates(setup=capture, baseline=baseline, flop=sum(known) / flops)
    shares = shares_of(plans, workers)
    found = simulate(shares, workers, rates)
    return {
        "workers": workers,
        "shares": len(shares),
        "makespan_seconds": found.makespan,
        "one_worker_seconds": simulate(shares_of(plans, 1), 1, rates).makespan,
        "balance": found.balance,
        "worth_having": worth_having(shares, workers, rates),
        "setup_seconds": capture,
        "baseline_seconds": found.baselines,
    }


def _simulated_workers(options: FleetOptions) -> int:
    if options.workers is None:
        raise CommandError("--simulate of how many workers? Say so with --workers N.")
    return options.workers


SIMULATED = """
{workers} workers, {shares} shares: {makespan_seconds:.3g} s; one worker: {one_worker_seconds:.3g} s
capturing the model, on each worker: {setup_seconds:.3g} s
baselines, on all workers together: {baseline_seconds:.3g} s
balance, the busiest worker over the mean: {balance:.2f}
more than {worth_having} workers would hardly help"""

SIMULATED_SEARCH = """
a narrow batch, of {batch_worlds} worlds: {one_worker_batch_seconds:.3g} s
in {workers} parts: {batch_seconds:.3g} s
by {workers} workers it is {gain:.2f} times as fast, without the way there
batches wait for each other: how many there are depends on what is decided
more than {worth_having} workers would hardly help, as long as batches are narrow"""


QUESTION_EXAMPLE = (
    "conewise {command} smollm2-135m --clean 'When Mary and John went to the store, John gave a drink to' "
    "--corrupted 'When Mary and John went to the store, Mary gave a drink to' "
    "--answer ' Mary' --wrong ' John'"
)


def pairs_of(name: str, options: PairOptions, needed: Sequence[str], command: str = "sweep") -> list[Pair]:
    """The pairs of prompts: those of the options, of the file, or those that come with the model.

    `needed` are the options that one pair takes; `command` is what an example is of.
    """
    from conewise.text.prompts import Pair, read_pairs

    answers, wrong = tuple(options.answer or ()), tuple(options.wrong or ())
    written = {
        "--clean": options.clean,
        "--corrupted": options.corrupted,
        "--answer": answers,
        "--wrong": wrong,
    }
    for option, value in written.items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise CommandError(f"{option} is an empty text. Give one with something in it, or leave it out.")
    given = [option for option, value in written.items() if value]
    if options.prompts is not None:
        if given:
            raise CommandError(f"--prompts and {given[0]} both say what is asked; leave one of them out.")
        return read_pairs(options.prompts, needs_both="--corrupted" in needed)
    if not given and name == "tiny":
        from conewise.models.tiny import PROMPTS

        return read_pairs(PROMPTS)
    missing = [option for option in needed if not written[option]]
    if missing:
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise CommandError(
            f"{what if given else 'no prompts'}. Give a pair of prompts with its answers, or a file of "
            f"them with --prompts FILE. For one:\n  {QUESTION_EXAMPLE.format(command=command)}"
        )
    assert options.clean is not None
    return [Pair(options.clean, options.corrupted or options.clean, answers, wrong, "the options")]


def needed_options(metric: str, *, reads_both: bool) -> list[str]:
    """Return the options that a pair of prompts needs, by the metric and the runs that are read."""
    needed = ["--clean", "--corrupted"] if reads_both else ["--clean"]
    needed += ["--answer"] if metric != "kl" else []
    return needed + (["--wrong"] if metric == "logit-diff" else [])


def patch_of(source: str) -> str:
    """Return the name that a choice of --source has in a question."""
    return "source" if source == "run" else source


def ask(model: ModelName, options: QuestionOptions | EdgeOptions, seed: int, status: Status) -> Question:
    """Load the model, read the prompts in its tokens, and make the question."""
    reads_other = options.source == "run"
    command = "edges" if isinstance(options, EdgeOptions) else "sweep"
    needed = needed_options(options.metric, reads_both=reads_other or options.direction == "denoise")
    pairs = pairs_of(model.name, options, needed, command)
    if options.tf32 and options.split:
        raise CommandError("--tf32 and --split both say how float32 is multiplied; leave one of them out.")
    from conewise.text.ask import chosen_edges, selected
    from conewise.text.questions import Question, default_direction, noise_scale

    scale, patch = noise_scale(options.source, options.noise_scale), patch_of(options.source)
    prompts, graph = read_prompts(
        model, pairs, options, options.metric, status, reads_both=reads_other, batch_size=options.batch_size
    )
    if isinstance(options, EdgeOptions):
        sites: SelectorLike = chosen_edges(options.edges, options.pos, graph, prompts.lengths)
    else:
        sites = selected(options.sites, options.pos, graph)
    return Question(
        graph,
        prompts,
        sites,
        options.direction or default_direction(patch),
        patch,
        options.metric.replace("-", "_"),
        scale,
        seed,
        "tf32" if options.tf32 else "split" if options.split else None,
    )


def read_prompts(
    model: ModelName,
    pairs: Sequence[Pair],
    options: PairOptions,
    metric: str,
    status: Status,
    *,
    reads_both: bool,
    batch_size: int | None = None,
) -> tuple[TokenizedPrompts, Model]:
    """Load the model, read the prompts in its tokens, and capture it with one of them.

    `reads_both`: what one run has is put into the other, so they have to differ.
    """
    loaded = model.load(status)
    from conewise.text.prompts import tokenize
    from conewise.text.questions import expect_two_runs

    prompts = tokenize(
        pairs,
        loaded.tokenizer,
        batch_size=batch_size,
        as_written=options.as_written,
        progress=status.counter("prompts read"),
    )
    for note in prompts.notes:
        status.warn(note)
    prompts.expect_answers(metric.replace("-", "_"))
    if reads_both:
        expect_two_runs(prompts)
    captured(loaded, status, prompts)
    return prompts, loaded


def question_json(question: Question) -> dict[str, Any]:
    """The question as the JSON of `plan` and `sweep` has it."""
    from conewise.text.prompts import METRICS

    return {
        "model": model_json(question.model),
        "question": {
            "direction": question.direction,
            "base": question.base,
            "source": question.source or question.patch,
            "metric": question.metric,
            "metric_in_words": METRICS[question.metric],
            "prompts": len(question.prompts.pairs),
            "lengths": sorted(set(question.prompts.lengths)),
            "batches": len(question.prompts.groups),
            "seed": question.seed,
        },
        "notes": list(question.prompts.notes),
    }


def show_question(console: Console, question: Question, unit: str = "site") -> None:
    """The question, for people: the first pair, what is changed (`unit`s, one by one), what is read."""
    from conewise.text.prompts import METRICS

    show_prompts(console, question)
    ways = {"denoise": "denoising", "noise": "noising"}
    way = ways[question.direction] if question.source else f"ablation in the {question.base} run"
    put = {
        "source": f"the {question.source} run's values are put into the {question.base} run",
        "zero": f"{unit}s are set to zero",
        "mean": f"{unit}s are set to their mean over prompts and positions",
        "noise": f"Gaussian noise of standard deviation {question.scale:g} is added to {unit}s",
    }[question.patch]
    console.print(f"  {way}: {put}, one {unit} at a time")
    console.print(f"  metric: {METRICS[question.metric]}, at the last position\n")


def show_prompts(console: Console, question: Question) -> None:
    """The first pair, and what of it is the base and the source."""
    from rich.markup import escape

    from conewise.text.tokens import token_texts

    pair, count = question.prompts.pairs[0], len(question.prompts.pairs)
    lengths = sorted(set(question.prompts.lengths))
    many = f"{count} pairs of prompts" if count > 1 else "1 pair of prompts"
    console.print(
        f"[bold]{escape(question.model.label)}[/bold], {many} of {' or '.join(map(str, lengths))} tokens"
        + (", the first:" if count > 1 else ":")
    )
    for name in ("clean", "corrupted"):
        if name == question.base or question.source is not None:
            role = "base" if name == question.base else "source"
            console.print(f"  {f'{name} ({role})':<18} {escape(getattr(pair, name))}")
    answers = {
        name: ", ".join(
            map(repr, token_texts(question.prompts.tokenizer, getattr(question.prompts, name)[0]))
        )
        for name in ("answers", "wrong_answers")
    }
    if answers["answers"]:
        wrong = f", not {answers['wrong_answers']}" if answers["wrong_answers"] else ""
        console.print(f"  {'answer':<18} {escape(answers['answers'] + wrong)}")
