"""`conewise circuit`: find the circuit of a task, evaluate it, keep it and draw it."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from conewise.cli.failing import CommandError, command_of, interruptible, shell_command
from conewise.cli.options import (
    PairOptions,
    RunOptions,
    SearchOptions,
    command,
)
from conewise.cli.output import (
    Status,
    expect_writable_file,
    plan_json,
    print_json,
    progress_for,
    show_plan,
    show_table,
    stdout,
)
from conewise.cli.questions import (
    SIMULATED,
    SIMULATED_SEARCH,
    ModelName,
    driver_model,
    expect_on_paper,
    fleet_of,
    needed_options,
    pairs_of,
    patch_of,
    question_json,
    read_prompts,
    show_prompts,
    simulated,
    simulated_search,
)
from conewise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.circuits.acdc import SearchPlan
    from conewise.circuits.circuit import Circuit
    from conewise.cli.folders import FoundCircuit, StoredRun
    from conewise.jobs.pool import Pool
    from conewise.text.questions import Question

SHARE = 0.01
"""The usual threshold, of what removing all edges changes."""

SHOWN = 12
"""The number of edges that are shown to people."""

CARRY = {
    "run": "what they do on the corrupted prompt",
    "zero": "nothing",
    "mean": "their mean over prompts and positions",
}
"""The values that removed edges carry, in words."""


@command
def circuit(ctx: typer.Context, model: str, *, prompts: PairOptions, how: SearchOptions) -> None:
    """Find the circuit of a task: the edges between components that the model needs for it.

    The circuit has to do what the model does on the clean prompt; edges that are not in it carry what they do
    on the corrupted one (--source). It is evaluated: how much of the metric it keeps, what is left without
    it, which of its edges is needed least. --report writes a page with the layered picture, --out keeps the
    search and the circuit.

    Examples:
      conewise circuit tiny --report circuit.html
      conewise circuit tiny --method exact --top 40
      conewise circuit smollm2-135m --prompts pairs.json --threshold 0.05 --out run
      conewise circuit openai-community/gpt2 --prompts pairs.json --metric kl --threshold 0.01 --plan
      conewise circuit openai-community/gpt2 --prompts pairs.json --device cuda:0,cuda:1
    """
    from conewise.cli.folders import StoredRun

    _expect_sense(how)
    expect_writable_file(how.report, "--report")
    stored = None if how.out is None else StoredRun(how.out, how.resume)
    status = Status(how.quiet)
    question = _ask(driver_model(model, how), prompts, how, status)
    if how.plan:
        _print_plan(question, how, status)
        return
    typed = command_of(ctx)
    with (
        interruptible(how.out, typed),
        status.warnings_as_notes(),
        fleet_of(how, how) as workers,
    ):
        search = Search(question, how, progress_for(status, how.progress), workers)
        threshold = search.threshold()
        if stored is not None:
            stored.begin(search.described(threshold), typed)
        started = time.perf_counter()
        with status.doing("searching"):
            circuit = search.run(threshold, stored)
        seconds = time.perf_counter() - started
        if not circuit.edges:
            status.warn(_why_empty(circuit))
        with status.doing("evaluating"):
            found = search.evaluated(circuit, shell_command(typed))
    if stored is not None:
        found.write(stored.folder)
        status(f"kept the search in {stored.folder}")
    if how.report is not None:
        found.report(how.report)
        status(f"wrote {how.report}")
    if how.json:
        body = {**question_json(question), **circuit_json(found, search.ablation), "seconds": seconds}
        print_json("circuit", {**body, "files": {"out": how.out, "report": how.report}})
        return
    console = stdout()
    console.print(found.evaluation.finding, markup=False, style="bold")
    console.print(f"{found.evaluation.certainty}\n", markup=False)
    show_prompts(console, question)
    console.print(f"  removed edges carry {CARRY[how.source]}", markup=False)
    show_circuit(console, found, seconds)


def _expect_sense(how: SearchOptions) -> None:
    is_acdc, least = how.method == "acdc", how.threshold
    if how.resume and how.out is None:
        raise CommandError("--resume without --out: say in which folder the search was kept.")
    if how.plan and (how.out is not None or how.report is not None):
        raise CommandError("--plan runs nothing, so there is nothing for --out, --resume or --report.")
    if how.top is not None and is_acdc:
        raise CommandError("--top is for --method exact; ACDC keeps edges by --threshold.")
    if how.top is not None and least is not None:
        raise CommandError("--top and --threshold both say how much is kept; leave one of them out.")
    if not how.connected and is_acdc:
        raise CommandError("--no-connected is for --method exact; ACDC has no use for it.")
    if least is not None and not (0 <= least < math.inf and (least or not is_acdc)):
        known = "above 0" if is_acdc else "0 or more"
        raise CommandError(f"--threshold {least} is no threshold: it is a change of the metric, {known}.")
    if how.plan:
        expect_on_paper(how)


def _ask(model: ModelName, options: PairOptions, how: SearchOptions, status: Status) -> Question:
    """Load the model and read the prompts: the clean run is kept, the corrupted one is what edges lose to."""
    is_resampled = how.source == "run"
    pairs = pairs_of(model.name, options, needed_options(how.metric, reads_both=is_resampled), "circuit")
    prompts, graph = read_prompts(
        model, pairs, options, how.metric, status, reads_both=is_resampled, batch_size=len(pairs)
    )
    lengths = sorted(set(prompts.lengths))
    if len(lengths) > 1:
        raise CommandError(
            f"the prompts have {' or '.join(map(str, lengths))} tokens, and a circuit is found over one "
            "batch. Give prompts of one length."
        )
    from conewise.text.questions import Question

    edges = graph.edges()
    if how.top is not None and how.top > len(edges):
        raise CommandError(f"--top {how.top} is more than the {len(edges):,} edges that there are.")
    return Question(graph, prompts, edges, "noise", patch_of(how.source), how.metric.replace("-", "_"))


def _print_plan(question: Question, how: SearchOptions, status: Status) -> None:
    """Print what the search would cost."""
    from conewise.circuits.acdc import search_plan
    from conewise.circuits.question import circuit_question

    simulation: dict[str, Any] | None = None
    is_exact, console = how.method == "exact", stdout(quiet=how.json)
    with status.doing("planning"):
        if is_exact:
            swept = question.plan(how.max_memory)
            if how.simulate:
                simulation = simulated(question, how, RunOptions(max_memory=how.max_memory))
        else:
            found = search_plan(question.model, question.sweep(0).metrics[0])
            if how.simulate:
                runs = Search(question, how).runs
                asked = circuit_question(question.model, **runs, max_memory=how.max_memory)
                simulation = simulated_search(asked, how)
    if how.json:
        beside = {} if simulation is None else {"simulation": simulation}
        body = plan_json(swept) if is_exact else search_plan_json(found)
        print_json("circuit", {**question_json(question), "plan": body, **beside})
        return
    show_prompts(console, question)
    if is_exact:
        show_plan(console, swept)
    else:
        show_search_plan(console, found)
    if simulation is not None:
        console.print((SIMULATED if is_exact else SIMULATED_SEARCH).format(**simulation).strip())


@dataclass(frozen=True)
class Search:
    """A circuit that is asked for: what it is found by, and how."""

    question: Question
    how: SearchOptions
    progress: Any = None
    workers: Pool | None = None

    @property
    def ablation(self) -> str:
        """The ablation of removed edges, by its name in an evaluation."""
        return "resample" if self.how.source == "run" else self.how.source

    @property
    def runs(self) -> dict[str, Any]:
        """The arguments of a search and an evaluation."""
        sweep = self.question.sweep(0)
        batch = sweep.batch(0)
        source = batch.source if self.how.source == "run" else self.how.source
        return {"base": batch.base, "source": source, "metric": sweep.metrics[0]}

    def threshold(self) -> float | None:
        """Return the threshold that was given, or the usual one; None where edges are counted."""
        from conewise.circuits.evaluation import evaluate
        from conewise.circuits.question import circuit_question

        given = circuit_question(self.question.model, **self.runs, max_memory=self.how.max_memory)
        (known,) = evaluate(given, [()])
        span = abs(known.full - known.ablated)
        if not span > 0:
            raise CommandError(
                f"{known.metric} is {known.full:.4g} whether all edges are there or none, so there is "
                "nothing that a circuit could do. Give other prompts, another --metric or another --source."
            )
        if self.how.top is not None:
            return None
        return SHARE * span if self.how.threshold is None else self.how.threshold

    def described(self, threshold: float | None) -> dict[str, Any]:
        """Return all that is computed, as plain values: equal searches have equal ones.

        Single edges are swept the same however many of them are kept: that can be said anew.
        """
        return {
            "method": self.how.method,
            **({"threshold": threshold} if self.how.method == "acdc" else {}),
            "ablation": self.ablation,
            "metric": self.question.metric,
            "prompts": [
                [pair.clean, pair.corrupted, list(pair.answers), list(pair.wrong_answers)]
                for pair in self.question.prompts.pairs
            ],
        }

    def run(self, threshold: float | None, stored: StoredRun | None) -> Circuit:
        """Search; what is done goes to the folder as it is."""
        from conewise.circuits.acdc import find_circuit
        from conewise.cli.folders import EDGES, SEARCH

        is_acdc = self.how.method == "acdc"
        how: dict[str, Any] = {
            "out": None if stored is None else stored.folder / (SEARCH if is_acdc else EDGES),
            "resume": stored is not None and stored.resume,
            "max_memory": self.how.max_memory,
            "workers": self.workers,
            "progress": self.progress,
        }
        if is_acdc:
            assert threshold is not None
            return find_circuit(self.question.model, **self.runs, threshold=threshold).run(**how)
        result = self.question.run(**how)
        return result.circuit(
            top=self.how.top, threshold=threshold, connected=self.how.connected, model=self.question.model
        )

    def evaluated(self, circuit: Circuit, typed: str) -> FoundCircuit:
        """Return the circuit with its evaluation, its curve and its story."""
        from conewise.cli.folders import FoundCircuit

        how = {**self.runs, "max_memory": self.how.max_memory, "workers": self.workers}
        evaluation = circuit.evaluate(**how, minimality=self.how.minimality)
        return FoundCircuit(circuit, evaluation, circuit.curve(**how), self.question.story(command=typed))


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


def search_plan_json(plan: SearchPlan) -> dict[str, Any]:
    """Return the plan of a search as JSON has it."""
    names = ("stage", "edges", "node_evaluations")
    stages = [dict(zip(names, stage, strict=True)) for stage in plan.stages]
    return {"worlds": plan.worlds, "node_evaluations": plan.node_evaluations, "stages": stages}


def circuit_json(found: FoundCircuit, source: str) -> dict[str, Any]:
    """Return a circuit as JSON has it: every edge in graph order, what was measured, how it was found."""
    circuit, scores = found.circuit, found.circuit.scores or {}
    graph = circuit.graph
    return {
        "method": circuit.method,
        "threshold": circuit.threshold,
        "source": source,
        "edges": [{"edge": edge, "score": scores.get(edge)} for edge in circuit.edges],
        "nodes": circuit.nodes,
        "graph": {"writers": len(graph.writers), "readers": len(graph.readers), "edges": graph.count},
        "evaluation": asdict(found.evaluation),
        "curve": [asdict(point) for point in found.curve.points],
        "provenance": {"command": found.story.command, "conewise": __version__},
    }


def show_circuit(console: Console, found: FoundCircuit, seconds: float) -> None:
    """Print the search of a circuit, its evaluation, and its strongest edges."""
    circuit, scores = found.circuit, found.circuit.scores or {}
    at = "" if circuit.threshold is None else f", threshold {circuit.threshold:.4g}"
    console.print(f"  metric: {found.story.metric}, at the last position\n", markup=False)
    console.print(f"{found.evaluation}\n", markup=False)
    from conewise.report.circuit import strongest as strongest_of

    strongest = strongest_of(circuit.edges, scores, SHOWN)
    rows = [
        (rank, edge, f"{scores[edge]:+.4f}" if edge in scores else "")
        for rank, edge in enumerate(strongest, 1)
    ]
    title = f"The strongest {len(strongest)} of {len(circuit)} edges"
    show_table(console, title, ("", "edge", "score"), rows, right=(0, 2))
    console.print(f"found by {circuit.method}{at} in {seconds:.3g} s", markup=False)


def show_search_plan(console: Console, plan: SearchPlan) -> None:
    """Print the plan of a search as a table."""
    title = (
        f"At most {plan.worlds:,} worlds, one for each edge, and {plan.node_evaluations:,} node evaluations"
    )
    rows = [(name, f"{edges:,}", f"{cost:,}") for name, edges, cost in plan.stages]
    show_table(console, title, ("stage", "edges", "node evaluations"), rows, right=(1, 2))
    console.print("What nothing reads any more is not computed, so a search takes less.")
