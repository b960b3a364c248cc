"""`conewise sweep` and `conewise plan`: patch every site, or say what that would cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from conewise.cli import options as opt
from conewise.cli.failing import CommandError, Interrupted, command_of, shell_command
from conewise.cli.folders import StoredRun
from conewise.cli.option_groups import (
    EdgeOptions,
    FleetOptions,
    LoadOptions,
    MethodOptions,
    OutputOptions,
    QuestionOptions,
    ResultOptions,
    RunOptions,
    StoreOptions,
)
from conewise.cli.options import Evaluator, flat, help_text
from conewise.cli.output import CellCounter, Status, expect_writable_file, print_json, stdout
from conewise.cli.questions import (
    ModelName,
    ask,
    expect_on_paper,
    fleet_of,
    question_json,
    show_question,
    shown,
    simulated,
    without_workers,
)
from conewise.cli.showing import plan_json, result_json, show_plan, show_result
from conewise.cli.streams import CHECK_FAILED

if TYPE_CHECKING:
    from conewise.sweeps.result import Result
    from conewise.text.questions import Question

FORWARDS = 3
"""How many full forwards are timed, for the comparison with full re-runs."""

SWEEP_HELP = """Patch every site in a world of its own, and say what each does to the metric.

Only what depends on a patched site is computed again. The strongest sites are shown, with what the run cost;
--report writes a page with heatmaps, --out keeps the run. Without --pos a site is patched at all positions
together.

\b
Examples:
  conewise sweep tiny
  conewise sweep smollm2-135m \\
    --clean 'When Mary and John went to the store, John gave a drink to' \\
    --corrupted 'When Mary and John went to the store, Mary gave a drink to' \\
    --answer ' Mary' --wrong ' John' --report ioi.html
  conewise sweep ./my-model --prompts pairs.json --sites resid_pre --pos :
  conewise sweep tiny --patch mean --metric prob --verify 16 --json
  conewise sweep openai-community/gpt2 --prompts pairs.csv --out run
"""

PLAN_HELP = """Say what a sweep would cost, and run nothing of it.

Takes what `conewise sweep` takes. The counts are exact: a run computes just that.

\b
Examples:
  conewise plan tiny
  conewise plan smollm2-135m --prompts pairs.json --pos : --max-memory 4GiB
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        "sweep",
        help=help_text(SWEEP_HELP),
        short_help="Patch every site, and say what each does to the metric.",
    )(flat(sweep))
    app.command("plan", help=help_text(PLAN_HELP), short_help="Say what a sweep would cost; run nothing.")(
        flat(plan)
    )


def sweep(
    ctx: typer.Context,
    model: opt.Model,
    *,
    options: QuestionOptions,
    running: RunOptions,
    fleet: FleetOptions,
    estimating: MethodOptions,
    results: ResultOptions,
    storing: StoreOptions,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Patch every site in a world of its own; see `SWEEP_HELP`."""
    run_question(
        ctx, "sweep", model, options,
        running=running, fleet=fleet, estimating=estimating, results=results, storing=storing, output=output,
        loading=loading,
    )  # fmt: skip


def run_question(
    ctx: typer.Context,
    name: str,
    model: str,
    options: QuestionOptions | EdgeOptions,
    *,
    running: RunOptions,
    fleet: FleetOptions,
    estimating: MethodOptions,
    results: ResultOptions,
    storing: StoreOptions,
    output: OutputOptions,
    loading: LoadOptions,
    unit: str = "site",
) -> None:
    """Ask, run, keep, draw and print: what the commands that sweep do. `unit` is what a world changes."""
    if storing.resume and storing.out is None:
        raise CommandError("--resume without --out: say in which folder the run was stored.")
    _expect_estimable(estimating, running, results, storing)
    if results.report is not None:
        expect_writable_file(results.report, "--report")
    stored = None if storing.out is None else StoredRun(storing.out, storing.resume)
    status = Status(output.quiet)
    question = ask(ModelName(model, without_workers(loading)), options, running.seed, status)
    command = command_of(ctx)
    evaluator, max_memory = running.evaluator.value, running.max_memory
    if stored is not None:
        if not stored.is_begun:
            # What cannot run leaves no folder that is taken.
            if estimating.method is not None:
                question.attribution_plan(estimating.method, estimating.steps, max_memory)
            else:
                question.plan(max_memory, evaluator, status.counter("prompts planned"))
        asked = question.described()
        if estimating.method is not None:
            asked |= {"method": estimating.method, "steps": estimating.steps}
        stored.begin(asked, command)
    how: dict[str, Any] = {"evaluator": evaluator, "max_memory": max_memory, "verify": results.verify}
    progress = results.progress
    counting = CellCounter(status, is_shown=progress is True and not sys.stderr.isatty())
    is_drawn = sys.stderr.isatty() and (not output.quiet if progress is None else progress)
    with _interruptible(question, stored, counting, command), status.warnings_as_notes():
        with fleet_of(fleet, loading) as executor:
            if estimating.method is not None:
                result = question.attribute(
                    estimating.method,
                    estimating.steps,
                    running.seed,
                    max_memory=max_memory,
                    out=None if stored is None or estimating.method == "hybrid" else stored.folder,
                    resume=stored is not None and stored.resume,
                    progress=counting,
                    executor=executor,
                )
            else:
                result = _run(question, how | {"executor": executor}, stored, counting, is_drawn=is_drawn)
        finish(
            question, result, shell_command(command),
            stored=stored, report=results.report, status=status, as_json=output.json, top=results.top,
            name=name, unit=unit,
        )  # fmt: skip


def _expect_estimable(
    estimating: MethodOptions,
    running: RunOptions,
    results: ResultOptions,
    storing: StoreOptions,
) -> None:
    """Refuse what only worlds have, where effects are estimated."""
    if estimating.method is None:
        if estimating.steps is not None:
            raise CommandError(
                "--steps is for --method ig, eap-ig and eap-ig-activations: without a method effects are "
                "exact."
            )
        return
    given = {
        "--evaluator": running.evaluator is not Evaluator.AUTO,
        "--verify": results.verify > 0,
        "--resume": storing.resume and estimating.method == "hybrid",
    }
    if storing.out is not None and not storing.resume and estimating.method == "hybrid":
        raise CommandError(
            "--method hybrid is not stored, since what it computes depends on what it found: leave out "
            "--out, or take another method and check it."
        )
    for option, is_given in given.items():
        if is_given:
            raise CommandError(
                f"{option} is for worlds that are computed, and --method {estimating.method} estimates what "
                "they would be: leave one of them out."
            )


def plan(
    model: opt.Model,
    *,
    options: QuestionOptions,
    running: RunOptions,
    fleet: FleetOptions,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Say what a sweep would cost; see `PLAN_HELP`."""
    plan_question("plan", model, options, running=running, fleet=fleet, output=output, loading=loading)


def plan_question(
    name: str,
    model: str,
    options: QuestionOptions | EdgeOptions,
    *,
    running: RunOptions,
    fleet: FleetOptions,
    output: OutputOptions,
    loading: LoadOptions,
    unit: str = "site",
) -> None:
    """Ask, plan and print what it would cost."""
    expect_on_paper(fleet)
    status = Status(output.quiet)
    question = ask(ModelName(model, without_workers(loading)), options, running.seed, status)
    with status.doing("planning"):
        progress = status.counter("prompts planned")
        found = question.plan(running.max_memory, running.evaluator.value, progress)
        paper = simulated(question, fleet, running) if fleet.simulate else None
    if output.json:
        simulation = {} if paper is None else {"simulation": paper}
        print_json(name, {**question_json(question), "plan": plan_json(found), **simulation})
        return
    console = stdout()
    show_question(console, question, unit)
    show_plan(console, found)
    if paper is not None:
        console.print(shown(paper))


def _run(
    question: Question,
    how: dict[str, Any],
    stored: StoredRun | None,
    counting: CellCounter,
    *,
    is_drawn: bool,
) -> Result:
    """Run the question with progress."""
    from conewise.jobs.progress import bar
    from conewise.sweeps.planning.planner import facts_of

    drawn = bar(None, _cells(question), facts_of(question.model).device) if is_drawn else nullcontext()
    with drawn as advance:
        counting.advance = advance
        return question.run(
            **how,
            out=None if stored is None else stored.folder,
            resume=stored is not None and stored.resume,
            progress=counting,
        )


@contextmanager
def _interruptible(
    question: Question, stored: StoredRun | None, counting: CellCounter, command: list[str]
) -> Iterator[None]:
    """Ctrl-C says what was kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        done = f"{counting.done} of {_cells(question)} cells"
        if stored is None:
            raise Interrupted(
                f"interrupted after {done}; nothing was kept. With --out DIR what is done is kept, and "
                "--resume goes on from there."
            ) from None
        again = command if "--resume" in command else [*command, "--resume"]
        raise Interrupted(
            f"interrupted: {done} are kept in {stored.folder}. Go on with:\n  {shell_command(again)}"
        ) from None


def _cells(question: Question) -> int:
    """How many cells there are, over all groups of prompts."""
    return len(question.cells) * len(question.prompts.groups)


def finish(
    question: Question,
    result: Result,
    command: str,
    *,
    stored: StoredRun | None,
    report: Path | None,
    status: Status,
    as_json: bool,
    top: int,
    name: str = "sweep",
    unit: str = "site",
) -> None:
    """Keep, draw and print a result; fail when its check failed."""
    story = question.story(command=command, forwards=FORWARDS)
    folded = inside = None
    if stored is not None or report is not None:
        folded, inside = question.folded(), question.inside(result, story)
    if stored is not None:
        stored.finish(result, story, folded, inside)
        status(f"kept the run in {stored.folder}")
    if report is not None:
        from conewise.report.page import write_page

        write_page(report, result, story, folded, inside)
        status(f"wrote {report}")
    files = {"out": None if stored is None else str(stored.folder), "report": report and str(report)}
    if as_json:
        print_json(
            name,
            {**question_json(question), **result_json(result, story), "files": files},
        )
    else:
        console = stdout()
        show_question(console, question, unit)
        show_result(console, result, story, top, unit)
    check = result.verification
    if check is not None and not check.ok:
        status.warn(f"verification {check}")
        raise typer.Exit(CHECK_FAILED)
