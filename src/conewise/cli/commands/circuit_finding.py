"""`conewise circuit`: find the circuit of a task, evaluate it, keep it and draw it."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from conewise.cli import options as opt
from conewise.cli.failing import CommandError, command_of, interruptible, shell_command
from conewise.cli.options import (
    Ablation,
    FindOptions,
    FleetOptions,
    LoadOptions,
    Method,
    OutputOptions,
    PairOptions,
    RunOptions,
    StoreOptions,
    subcommand,
)
from conewise.cli.output import (
    Status,
    add_row,
    expect_writable_file,
    plan_json,
    print_json,
    progress_for,
    show_plan,
    stdout,
    table,
)
from conewise.cli.questions import (
    ModelName,
    expect_on_paper,
    fleet_of,
    needed_options,
    pairs_of,
    question_json,
    read_prompts,
    search_shown,
    show_prompts,
    shown,
    simulated,
    simulated_search,
    without_workers,
)
from conewise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.circuits.acdc import SearchPlan
    from conewise.circuits.circuit import Circuit
    from conewise.cli.folders import FoundCircuit, StoredRun
    from conewise.jobs.pool import Pool
    from conewise.text.questions import Question

HELP = """Find the circuit of a task: the edges between components that the model needs for it.

The circuit has to do what the model does on the clean prompt; edges that are not in it carry what they do on
the corrupted one (--source). It is evaluated: how much of the metric it keeps, what is left without it,
which of its edges is needed least. --report writes a page with the layered picture, --out keeps the search
and the circuit.

\b
Examples:
  conewise circuit tiny --report circuit.html
  conewise circuit tiny --method exact --top 40
  conewise circuit smollm2-135m --prompts pairs.json --threshold 0.05 --out run
  conewise circuit openai-community/gpt2 --prompts pairs.json --metric kl --threshold 0.01 --plan
  conewise circuit openai-community/gpt2 --prompts pairs.json --device cuda:0,cuda:1
"""

SHARE = 0.01
"""The usual threshold, of what removing all edges changes."""


@subcommand("circuit", HELP, "Find the circuit of a task, evaluate and draw it.")
def circuit(
    ctx: typer.Context,
    model: opt.Model,
    *,
    prompts: PairOptions,
    finding: FindOptions,
    plan: opt.Plan = False,
    max_memory: opt.MaxMemory = None,
    fleet: FleetOptions,
    report: opt.Report = None,
    progress: opt.Progress = None,
    storing: StoreOptions,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Find a circuit; see `HELP`."""
    from conewise.cli.folders import StoredRun

    _expect_sense(finding, plan, storing, report)
    if plan:
        expect_on_paper(fleet)
    if report is not None:
        expect_writable_file(report, "--report")
    stored = None if storing.out is None else StoredRun(storing.out, storing.resume)
    status = Status(output.quiet)
    question = _ask(ModelName(model, without_workers(loading)), prompts, finding, status)
    if plan:
        _print_plan(question, finding, max_memory, fleet, status, as_json=output.json)
        return
    command = command_of(ctx)
    with (
        interruptible(storing.out, command),
        status.warnings_as_notes(),
        fleet_of(fleet, loading) as workers,
    ):
        search = _Search(question, finding, max_memory, progress_for(status, progress), workers)
        threshold = search.threshold()
        if stored is not None:
            stored.begin(search.described(threshold), command)
        started = time.perf_counter()
        with status.doing("searching"):
            circuit = search.run(threshold, stored)
        seconds = time.perf_counter() - started
        if not circuit.edges:
            status.warn(_why_empty(circuit))
        with status.doing("evaluating"):
            found = search.evaluated(circuit, shell_command(command))
    if stored is not None:
        found.write(stored.folder)
        status(f"kept the search in {stored.folder}")
    if report is not None:
        found.report(report)
        status(f"wrote {report}")
    files = {"out": None if stored is None else str(stored.folder), "report": report and str(report)}
    if output.json:
        body = {**question_json(question), **circuit_json(found, finding.ablation.ablation)}
        print_json("circuit", {**body, "seconds": seconds, "files": files})
        return
    console = stdout()
    show_prompts(console, question)
    show_circuit(console, found, finding.ablation.ablation, seconds)


def _expect_sense(finding: FindOptions, plan: bool, storing: StoreOptions, report: Path | None) -> None:
    if storing.resume and storing.out is None:
        raise CommandError("--resume without --out: say in which folder the search was kept.")
    if plan and (storing.out is not None or report is not None):
        raise CommandError("--plan runs nothing, so there is nothing for --out, --resume or --report.")
    if finding.top is not None and finding.method is Method.ACDC:
        raise CommandError("--top is for --method exact; ACDC keeps edges by --threshold.")
    if finding.top is not None and finding.threshold is not None:
        raise CommandError("--top and --threshold both say how much is kept; leave one of them out.")
    if not finding.connected and finding.method is Method.ACDC:
        raise CommandError("--no-connected is for --method exact; ACDC has no use for it.")
    least, is_acdc = finding.threshold, finding.method is Method.ACDC
    if least is not None and not (0 <= least < math.inf and (least or not is_acdc)):
        known = "above 0" if is_acdc else "0 or more"
        raise CommandError(f"--threshold {least} is no threshold: it is a change of the metric, {known}.")


def _ask(model: ModelName, options: PairOptions, finding: FindOptions, status: Status) -> Question:
    """Load the model and read the prompts: the clean run is kept, the corrupted one is what edges lose to."""
    is_resampled = finding.ablation is Ablation.RUN
    needed = needed_options(finding.metric, reads_both=is_resampled)
    pairs = pairs_of(model.name, options, needed, "circuit")
    prompts, graph = read_prompts(
        model, pairs, options, finding.metric, status, reads_both=is_resampled, batch_size=len(pairs)
    )
    lengths = sorted(set(prompts.lengths))
    if len(lengths) > 1:
        raise CommandError(
            f"the prompts have {' or '.join(map(str, lengths))} tokens, and a circuit is found over one "
            "batch. Give prompts of one length."
        )
    from conewise.text.questions import Question

    edges = graph.edges()
    if finding.top is not None and finding.top > len(edges):
        raise CommandError(f"--top {finding.top} is more than the {len(edges):,} edges that there are.")
    return Question(graph, prompts, edges, "noise", finding.ablation.patch, finding.metric.word)


def _print_plan(
    question: Question,
    finding: FindOptions,
    max_memory: str | None,
    fleet: FleetOptions,
    status: Status,
    *,
    as_json: bool,
) -> None:
    """Print what the search would cost."""
    simulation: dict[str, Any] | None = None
    with status.doing("planning"):
        if finding.method is Method.EXACT:
            swept = question.plan(max_memory)
            body, show = plan_json(swept), partial(show_plan, plan=swept)
            if fleet.simulate:
                simulation = simulated(question, fleet, RunOptions(max_memory=max_memory))
            lines = shown
        else:
            from conewise.circuits.acdc import search_plan
            from conewise.circuits.question import circuit_question

            found = search_plan(question.model, question.sweep(0).metrics[0])
            body, show = plan_of_search_json(found), partial(show_search_plan, plan=found)
            if fleet.simulate:
                runs = _Search(question, finding, max_memory).runs
                simulation = simulated_search(
                    circuit_question(question.model, **runs, max_memory=max_memory), fleet
                )
            lines = search_shown
    if as_json:
        beside = {} if simulation is None else {"simulation": simulation}
        print_json("circuit", {**question_json(question), "plan": body, **beside})
        return
    console = stdout()
    show_prompts(console, question)
    show(console)
    if simulation is not None:
        console.print(lines(simulation))


@dataclass(frozen=True)
class _Search:
    """A circuit that is asked for: what it is found by, and how."""

    question: Question
    finding: FindOptions
    max_memory: str | None
    progress: Any = None
    workers: Pool | None = None

    @property
    def runs(self) -> dict[str, Any]:
        """The arguments of a search and an evaluation."""
        sweep = self.question.sweep(0)
        batch = sweep.batch(0)
        is_resampled = self.finding.ablation is Ablation.RUN
        return {
            "base": batch.base,
            "source": batch.source if is_resampled else self.finding.ablation.value,
            "metric": sweep.metrics[0],
        }

    def threshold(self) -> float | None:
        """The threshold that was given, or the usual one; None where edges are counted."""
        from conewise.circuits.evaluation import evaluate
        from conewise.circuits.question import circuit_question

        given = circuit_question(self.question.model, **self.runs, max_memory=self.max_memory)
        (known,) = evaluate(given, [()])
        span = abs(known.full - known.ablated)
        if not span > 0:
            raise CommandError(
                f"{known.metric} is {known.full:.4g} whether all edges are there or none, so there is "
                "nothing that a circuit could do. Give other prompts, another --metric or another --source."
            )
        if self.finding.top is not None:
            return None
        return SHARE * span if self.finding.threshold is None else self.finding.threshold

    def described(self, threshold: float | None) -> dict[str, Any]:
        """All that is computed, as plain values: equal searches have equal ones.

        Single edges are swept the same however many of them are kept: that can be said anew.
        """
        prompts = self.question.prompts
        is_acdc = self.finding.method is Method.ACDC
        return {
            "method": self.finding.method.value,
            **({"threshold": threshold} if is_acdc else {}),
            "ablation": self.finding.ablation.ablation,
            "metric": self.question.metric,
            "prompts": [
                [pair.clean, pair.corrupted, list(pair.answers), list(pair.wrong_answers)]
                for pair in prompts.pairs
            ],
        }

    def run(self, threshold: float | None, stored: StoredRun | None) -> Circuit:
        """Search; what is done goes to the folder as it is."""
        from conewise.circuits.acdc import find_circuit
        from conewise.cli.folders import EDGES, SEARCH

        is_acdc = self.finding.method is Method.ACDC
        out = None if stored is None else stored.folder / (SEARCH if is_acdc else EDGES)
        how: dict[str, Any] = {
            "out": out,
            "resume": stored is not None and stored.resume,
            "max_memory": self.max_memory,
            "workers": self.workers,
            "progress": self.progress,
        }
        if is_acdc:
            assert threshold is not None
            return find_circuit(self.question.model, **self.runs, threshold=threshold).run(**how)
        result = self.question.run(**how)
        return result.circuit(
            top=self.finding.top,
            threshold=threshold,
            connected=self.finding.connected,
            model=self.question.model,
        )

    def evaluated(self, circuit: Circuit, command: str) -> FoundCircuit:
        """The circuit with its evaluation, its curve and its story."""
        from conewise.cli.folders import FoundCircuit

        how = {**self.runs, "max_memory": self.max_memory, "workers": self.workers}
        evaluation = circuit.evaluate(**how, minimality=self.finding.minimality)
        curve = circuit.curve(**how)
        story = self.question.story(command=command)
        return FoundCircuit(circuit, evaluation, curve, story)


def _why_empty(circuit: Circuit) -> str:
    """Return why a circuit has no edge, and what to do."""
    sizes = [abs(score) for score in (circuit.scores or {}).values()]
    if not circuit.threshold or max(sizes, default=0.0) < circuit.threshold:
        return "no edge changes the metric by as much as --threshold; give a smaller one."
    from conewise.circuits.circuit_data import levels

    best = float(levels(circuit.graph, circuit.score_array()).max(initial=0.0))
    return (
        "no edges of such scores lie on a path from the input to the logits. Some do from --threshold "
        f"{best:.4g} on; or leave paths aside with --no-connected."
    )


# -- what is printed ------------------------------------------------------------

SHOWN = 12
"""The number of edges that are shown to people."""

CARRY = {
    "resample": "what they do on the corrupted prompt",
    "zero": "nothing",
    "mean": "their mean over prompts and positions",
}
"""The values that removed edges carry, in words."""


def plan_of_search_json(plan: SearchPlan) -> dict[str, Any]:
    """The plan of a search as JSON has it."""
    return {
        "worlds": plan.worlds,
        "node_evaluations": plan.node_evaluations,
        "stages": [
            {"stage": name, "edges": edges, "node_evaluations": cost} for name, edges, cost in plan.stages
        ],
    }


def circuit_json(found: FoundCircuit, source: str) -> dict[str, Any]:
    """A circuit as JSON has it: every edge in graph order, what was measured, how it was found."""
    circuit, scores = found.circuit, found.circuit.scores or {}
    return {
        "method": circuit.method,
        "threshold": circuit.threshold,
        "source": source,
        "edges": [{"edge": edge, "score": scores.get(edge)} for edge in circuit.edges],
        "nodes": list(circuit.nodes),
        "graph": {
            "writers": len(circuit.graph.writers),
            "readers": len(circuit.graph.readers),
            "edges": circuit.graph.count,
        },
        "evaluation": asdict(found.evaluation),
        "curve": [asdict(point) for point in found.curve.points],
        "provenance": {"command": found.story.command, "conewise": __version__},
    }


def show_circuit(console: Console, found: FoundCircuit, ablation: str, seconds: float) -> None:
    """Print the search of a circuit, its evaluation, and its strongest edges."""
    circuit, scores = found.circuit, found.circuit.scores or {}
    at = "" if circuit.threshold is None else f", threshold {circuit.threshold:.4g}"
    console.print(f"  removed edges carry {CARRY[ablation]}", markup=False)
    console.print(f"  metric: {found.story.metric}, at the last position\n", markup=False)
    console.print(found.evaluation.finding, markup=False, style="bold")
    console.print(f"{found.evaluation}\n", markup=False)
    strongest = sorted(circuit.edges, key=lambda edge: -abs(scores.get(edge, 0.0)))[:SHOWN]
    grid = table(
        f"The strongest {len(strongest)} of {len(circuit)} edges", ("", "edge", "score"), right=(0, 2)
    )
    for rank, edge in enumerate(strongest, 1):
        score = scores.get(edge)
        add_row(grid, str(rank), edge, "" if score is None else f"{score:+.4f}")
    console.print(grid)
    console.print(f"found by {circuit.method}{at} in {seconds:.3g} s", markup=False)


def show_search_plan(console: Console, plan: SearchPlan) -> None:
    """The plan of a search as a table."""
    grid = table(
        f"At most {plan.worlds:,} worlds, one for each edge, and {plan.node_evaluations:,} node evaluations",
        ("stage", "edges", "node evaluations"),
        right=(1, 2),
    )
    for name, edges, cost in plan.stages:
        add_row(grid, name, f"{edges:,}", f"{cost:,}")
    console.print(grid)
    console.print("What nothing reads any more is not computed, so a search takes less.")
