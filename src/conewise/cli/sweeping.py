"""`conewise sweep`, `plan` and `edges`: patch every site or edge, or report what that would cost."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import typer

from conewise.cli.failing import CommandError, command_of, interruptible, shell_command
from conewise.cli.options import EdgeOptions, PlanOptions, QuestionOptions, SweepOptions, command
from conewise.cli.output import (
    CellCounter,
    Status,
    expect_verified,
    expect_writable_file,
    files_json,
    plan_json,
    plan_sentence,
    print_json,
    result_json,
    show_finding,
    show_plan,
    show_result,
    stdout,
)
from conewise.cli.questions import (
    SIMULATED,
    ask,
    driver_model,
    expect_on_paper,
    fleet_of,
    question_json,
    show_question,
    simulated,
)

if TYPE_CHECKING:
    from conewise.cli.folders import StoredRun
    from conewise.jobs.pool import Pool
    from conewise.sweeps.result import Result
    from conewise.text.questions import Question

FORWARDS = 3
"""The number of full forwards that are timed, for the comparison with full re-runs."""


@command
def sweep(ctx: typer.Context, model: str, *, options: QuestionOptions, how: SweepOptions) -> None:
    r"""Activation patching: patch every site by itself and report its effect on the metric.

    Only what lies downstream of a patched site is recomputed. Shows the finding, the strongest sites and the
    cost. --report writes a page with heatmaps, --out stores the run. Without --pos, a site is patched at all
    positions at once.

    Examples:
      conewise sweep tiny
      conewise sweep smollm2-135m \
        --clean 'When Mary and John went to the store, John gave a drink to' \
        --corrupted 'When Mary and John went to the store, Mary gave a drink to' \
        --answer ' Mary' --wrong ' John' --report ioi.html
      conewise sweep ./my-model --prompts pairs.json --sites resid_pre --pos :
      conewise sweep tiny --source mean --metric prob --verify 16 --json
      conewise sweep openai-community/gpt2 --prompts pairs.csv --out run
    """
    run_question(ctx, "sweep", model, options, how)


@command
def edges(
    ctx: typer.Context, model: str, *, options: EdgeOptions, plan: bool = False, how: SweepOptions
) -> None:
    """Path patching: patch every edge between components by itself, and report each effect.

    An edge is what one component (the input, a head, an MLP) wrote and another one (the queries, keys or
    values of a head, an MLP, the logits) reads: a0.h1->a3.h2<q>, m5->logits. That reader alone sees the
    change.

    Examples:
      conewise edges tiny
      conewise edges tiny --plan
      conewise edges smollm2-135m --prompts pairs.json --edges '*->*<k>' --top 20
      conewise edges openai-community/gpt2 --prompts pairs.json --out run --report edges.html
    """
    if plan:
        if how.method is not None or how.steps is not None:
            raise CommandError("--plan is of worlds that are computed: leave out --method and --steps.")
        if how.out is not None or how.resume or how.report is not None:
            raise CommandError("--plan runs nothing, so there is nothing for --out, --resume or --report.")
        plan_question("edges", model, options, how)
    else:
        run_question(ctx, "edges", model, options, how)


@command
def plan(model: str, *, options: QuestionOptions, how: PlanOptions) -> None:
    """Report the exact cost of a sweep without running it.

    Takes the options of `conewise sweep`. The counts are exact: the run computes exactly that.

    Examples:
      conewise plan tiny
      conewise plan smollm2-135m --prompts pairs.json --pos : --max-memory 4GiB
    """
    plan_question("plan", model, options, how)


def plan_question(
    name: str, model: str, options: QuestionOptions | EdgeOptions, how: PlanOptions | SweepOptions
) -> None:
    """Ask, plan and print what it would cost."""
    expect_on_paper(how)
    status = Status(how.quiet)
    question = ask(driver_model(model, how), options, how.seed, status)
    with status.doing("planning"):
        found = question.plan(how.max_memory, how.evaluator, status.counter("prompts planned"))
        paper = simulated(question, how, how) if how.simulate else None
    if how.json:
        simulation = {} if paper is None else {"simulation": paper}
        print_json(name, {**question_json(question), "plan": plan_json(found), **simulation})
        return
    console = stdout()
    console.print(f"{plan_sentence(found)}\n", markup=False, style="bold")
    show_question(console, question, options.unit)
    show_plan(console, found)
    if paper is not None:
        console.print(SIMULATED.format(**paper).strip())


def run_question(
    ctx: typer.Context, name: str, model: str, options: QuestionOptions | EdgeOptions, how: SweepOptions
) -> None:
    """Ask, run, keep, draw and print."""
    from conewise.cli.folders import StoredRun

    if how.resume and how.out is None:
        raise CommandError("--resume without --out: say in which folder the run was stored.")
    _expect_estimable(how)
    expect_writable_file(how.report, "--report")
    stored = None if how.out is None else StoredRun(how.out, how.resume)
    status = Status(how.quiet)
    question = ask(driver_model(model, how), options, how.seed, status)
    typed = command_of(ctx)
    if stored is not None:
        if not stored.is_begun:
            # What cannot run leaves no folder that is taken.
            if how.method is not None:
                question.attribute(how.method, steps=how.steps).plan(how.max_memory)
            else:
                question.plan(how.max_memory, how.evaluator, status.counter("prompts planned"))
        asked = question.described()
        if how.method is not None:
            asked |= {"method": how.method, "steps": how.steps}
        stored.begin(asked, typed)
    counting = CellCounter(status, is_shown=how.progress is True and not sys.stderr.isatty())
    cells = len(question.cells) * len(question.prompts.groups)
    with (
        interruptible(how.out, typed, lambda: f"{counting.done} of {cells} cells"),
        status.warnings_as_notes(),
    ):
        with fleet_of(how, how) as workers:
            result = _run(question, how, cells, counting, workers)
        finish(question, result, shell_command(typed), how, stored, status, name=name, unit=options.unit)


def _expect_estimable(how: SweepOptions) -> None:
    """Refuse what only worlds have, where effects are estimated."""
    if how.method is None:
        if how.steps is not None:
            raise CommandError(
                "--steps is for --method ig, eap-ig and eap-ig-activations: without a method effects are "
                "exact."
            )
        return
    if how.out is not None and not how.resume and how.method == "hybrid":
        raise CommandError(
            "--method hybrid is not stored, since what it computes depends on what it found: leave out "
            "--out, or take another method and check it."
        )
    given = {
        "--evaluator": how.evaluator != "auto",
        "--verify": how.verify > 0,
        "--resume": how.resume and how.method == "hybrid",
    }
    for option, is_given in given.items():
        if is_given:
            raise CommandError(
                f"{option} is for worlds that are computed, and --method {how.method} estimates what they "
                "would be: leave one of them out."
            )


def _run(
    question: Question, how: SweepOptions, cells: int, counting: CellCounter, workers: Pool | None
) -> Result:
    """Run the question, or estimate its effects, with progress."""
    from conewise.jobs.progress import bar
    from conewise.sweeps.planning.planner import facts_of

    kept: dict[str, Any] = {"resume": how.resume, "max_memory": how.max_memory}
    kept |= {"workers": workers, "progress": counting}
    if how.method is not None:
        out = None if how.method == "hybrid" else how.out
        return question.attribute(how.method, steps=how.steps, seed=how.seed).run(out=out, **kept)
    is_drawn = sys.stderr.isatty() and (not how.quiet if how.progress is None else how.progress)
    with bar(None, cells, facts_of(question.model).device) if is_drawn else nullcontext() as advance:
        counting.advance = advance
        return question.run(evaluator=how.evaluator, verify=how.verify, out=how.out, **kept)


def finish(
    question: Question,
    result: Result,
    typed: str,
    how: SweepOptions,
    stored: StoredRun | None,
    status: Status,
    *,
    name: str,
    unit: str,
) -> None:
    """Keep, draw and print a result; fail when its check failed."""
    story = question.story(command=typed, forwards=FORWARDS)
    folded = inside = None
    if stored is not None or how.report is not None:
        folded, inside = question.folded(), question.inside(result, story)
    if stored is not None:
        stored.finish(result, story, folded, inside)
        status(f"kept the run in {stored.folder}")
    if how.report is not None:
        from conewise.report.page import write_page

        write_page(how.report, result, story, folded, inside)
        status(f"wrote {how.report}")
    if how.json:
        print_json(name, {**question_json(question), **result_json(result, story), "files": files_json(how)})
    else:
        console = stdout()
        show_finding(console, result)
        show_question(console, question, unit)
        show_result(console, result, story, how.top, unit)
    expect_verified(result, status)
