"""`conewise trace`: causal tracing of one prompt."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conewise.cli import CHECK_FAILED
from conewise.cli import options as opt
from conewise.cli.failing import CommandError, command_of, shell_command
from conewise.cli.options import LoadOptions, OutputOptions, ResultOptions, RunOptions, subcommand
from conewise.cli.output import (
    Status,
    add_row,
    expect_writable_file,
    plan_json,
    print_json,
    progress_for,
    show_cost,
    stdout,
    table,
)
from conewise.cli.questions import ModelName, captured, model_json

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.circuits.tracing import Trace
    from conewise.model import Model
    from conewise.report.story import Story
    from conewise.text.prompts import TokenizedPrompts

HELP = """Trace which states carry what the model knows of a subject (Meng et al., 2022).

Noise is added to the subject's embeddings; then the clean state of one layer and position at a time is put
back, and the probability of the answer is read; with --wrong, its logit less that of the wrong answer.

\b
Examples:
  conewise trace smollm2-135m --prompt 'The Eiffel Tower is in the city of' \\
    --subject 'The Eiffel Tower' --answer ' Paris' --report trace.html
  conewise trace tiny --subject John --answer ' Mary' --kind mlp_out \\
    --prompt 'When Mary and John went to the store, John gave a drink to'
"""


@subcommand("trace", HELP, "Trace which states carry what is known of a subject.")
def trace(
    ctx: typer.Context,
    model: opt.Model,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The prompt.", show_default=False)],
    subject: Annotated[
        str,
        typer.Option(
            "--subject", metavar="TEXT", help="The words of it that noise is put on.", show_default=False
        ),
    ],
    answer: opt.Answer,
    wrong: opt.Wrong = None,
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="The states: resid_post, mlp_out, attn_out.")
    ] = "resid_post",
    window: Annotated[
        int, typer.Option("--window", metavar="N", min=1, help="Put back so many layers around each.")
    ] = 1,
    noise: Annotated[
        float | None,
        typer.Option(
            "--noise",
            metavar="S",
            help="Its standard deviation.",
            show_default="three times that of the embeddings",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", metavar="N", min=1, help="Number of noise samples.")] = 10,
    layer: Annotated[str, typer.Option("--layer", metavar="CHOICE", help="':', '4:8' or '6'.")] = ":",
    pos: opt.Pos = ":",
    *,
    running: RunOptions,
    results: ResultOptions,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Trace which states carry what is known of a subject; see `HELP`."""
    if noise is not None and noise <= 0:
        raise CommandError(f"--noise {noise:g}: a standard deviation is above 0.")
    if results.report is not None:
        expect_writable_file(results.report, "--report")
    status = Status(output.quiet)
    loaded = ModelName(model, loading).load(status)
    from conewise.text.ask import as_choice
    from conewise.text.prompts import Pair, tokenize
    from conewise.text.tokens import subject_positions

    answers, wrong_answers = tuple(answer or ()), tuple(wrong or ())
    prompts = tokenize([Pair(prompt, prompt, answers, wrong_answers, "the options")], loaded.tokenizer)
    for note in prompts.notes:
        status.warn(note)
    metric = "logit_diff" if wrong_answers else "prob"
    noised = subject_positions(prompt, subject, loaded.tokenizer)  # before the model is captured
    captured(loaded, status, prompts)
    job = loaded.causal_trace(
        prompt,
        subject=noised,
        metric=prompts.metric(0, metric),
        kind=kind,
        window=window,
        noise="auto" if noise is None else noise,
        n=n,
        seed=running.seed,
        layer=as_choice(layer),
        pos=as_choice(":" if pos is None else pos),
    )
    traced = job.run(
        evaluator=running.evaluator.value,
        max_memory=running.max_memory,
        progress=progress_for(status, results.progress),
    )
    if results.verify:
        with status.warnings_as_notes():
            check = traced.verify(n=results.verify, seed=running.seed)
        traced = replace(traced, result=replace(traced.result, verification=check))
    story = _story(loaded, prompts, traced, metric, shell_command(command_of(ctx)), running.seed)
    if results.report is not None:
        traced.report(results.report, story=story)
        status(f"wrote {results.report}")
    if output.json:
        body = {"model": model_json(loaded), "notes": list(prompts.notes), **_as_json(story, traced)}
        print_json("trace", {**body, "report": results.report and str(results.report)})
    else:
        _show(stdout(), loaded, story, traced, results.top)
    if traced.result.verification is not None and not traced.result.verification.ok:
        raise typer.Exit(CHECK_FAILED)


def _story(
    loaded: Model, prompts: TokenizedPrompts, traced: Trace, metric: str, command: str, seed: int
) -> Story:
    from conewise.text.prompts import METRICS

    traced_story: Story = traced.result.story
    (pair,), (answers,) = traced_story.prompts, prompts.tokenized_pairs()
    pair = replace(pair, answers=answers.answers, wrong_answers=answers.wrong_answers)
    return replace(
        traced_story, model=loaded.label, prompts=(pair,), metric=METRICS[metric], command=command, seed=seed
    )


def _as_json(story: Story, traced: Trace) -> dict[str, Any]:
    (pair,) = story.prompts
    check = traced.result.verification
    return {
        "prompt": pair.clean,
        "tokens": list(pair.clean_tokens),
        "subject": list(traced.subject),
        "answers": list(pair.answers),
        "wrong_answers": list(pair.wrong_answers),
        "metric": traced.result.metrics[0],
        "clean": traced.clean,
        "corrupted": traced.corrupted,
        "noise": traced.noise,
        "n": traced.n,
        "window": traced.window,
        "seed": story.seed,
        "kind": traced.result.spreads[0].name,
        "layers": list(traced.layers),
        "positions": list(traced.positions),
        "values": traced.values.tolist(),
        "plan": plan_json(traced.plan),
        "measured": asdict(traced.ledger),
        "verification": None if check is None else {**asdict(check), "ok": check.ok, "passed": check.passed},
    }


def _show(console: Console, loaded: Model, story: Story, traced: Trace, top: int) -> None:
    """The question, the states that restore most, and the cost."""
    from conewise.sweeps.findings import certainty, finding

    (pair,) = story.prompts
    tokens = pair.clean_tokens
    words = " ".join(
        f"*{text.strip()}*" if at in pair.noised else text.strip() for at, text in enumerate(tokens)
    )
    answers = ", ".join(map(repr, pair.answers))
    console.print(f"{loaded.label}: {words} →{answers}  (noise on *these*)", markup=False)
    ends = f"clean {traced.clean:.4g}, with noise {traced.corrupted:.4g}"
    kind = traced.result.spreads[0].name
    cells = len(traced.result.cells)
    console.print(f"{finding(traced.result)}\n{certainty(traced.result)}\n", markup=False)
    lines = table(
        f"The strongest {min(top, cells)} of {cells} states, {kind} ({traced.result.metrics[0]}: {ends})",
        ("", "layer", "pos", "token", "effect", "value"),
        right=(0, 1, 2, 4, 5),
    )
    for rank, (cell, effect, value) in enumerate(traced.result.strongest(top=top), 1):
        layer, pos = cell.at["layer"], cell.at["pos"]
        add_row(lines, str(rank), str(layer), str(pos), tokens[pos], f"{effect:+.4f}", f"{value:.4f}")
    console.print(lines)
    console.print(
        f"{traced.n} samples of noise, standard deviation {traced.noise:.3g}, seed {story.seed}",
        markup=False,
    )
    show_cost(console, traced.result, None)
