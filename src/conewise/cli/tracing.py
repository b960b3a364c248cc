"""`conewise trace`: causal tracing of one prompt."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from conewise.arguments import Positive
from conewise.cli.failing import CommandError, command_of, shell_command
from conewise.cli.options import LoadOptions, OutputOptions, ResultOptions, RunOptions, command
from conewise.cli.output import (
    Status,
    check_json,
    expect_verified,
    expect_writable_file,
    plan_json,
    print_json,
    progress_for,
    show_cost,
    show_finding,
    show_table,
    stdout,
)
from conewise.cli.questions import ModelName, captured, model_json

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.circuits.tracing import Trace
    from conewise.model import Model
    from conewise.report.story import Story
    from conewise.text.prompts import TokenizedPrompts


@command
def trace(
    ctx: typer.Context,
    model: str,
    *,
    prompt: str,
    subject: str,
    answer: list[str],
    wrong: list[str] | None = None,
    kind: str = "resid_post",
    window: Positive = 1,
    noise: float | None = None,
    n: Positive = 10,
    layer: str = ":",
    pos: str = ":",
    running: RunOptions,
    results: ResultOptions,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    r"""Causal tracing: find the states that carry what the model knows of a subject (Meng et al., 2022).

    Noise is added to the subject's embeddings; then the clean state of one layer and position at a time is
    put back, and the probability of the answer is read; with --wrong, its logit less that of the wrong
    answer.

    Examples:
      conewise trace smollm2-135m --prompt 'The Eiffel Tower is in the city of' \
        --subject 'The Eiffel Tower' --answer ' Paris' --report trace.html
      conewise trace tiny --subject John --answer ' Mary' --kind mlp_out \
        --prompt 'When Mary and John went to the store, John gave a drink to'

    Options:
        --prompt TEXT: The prompt.
        --subject TEXT: The words of it that noise is put on.
        --kind KIND: The states: resid_post, mlp_out, attn_out.
        --window N: Put back so many layers around each.
        --noise S: Its standard deviation. [three times that of the embeddings]
        --n N: Number of noise samples.
        --layer CHOICE: ':', '4:8' or '6'.
    """
    if noise is not None and noise <= 0:
        raise CommandError(f"--noise {noise:g}: a standard deviation is above 0.")
    expect_writable_file(results.report, "--report")
    status = Status(output.quiet)
    loaded = ModelName(model, loading).load(status)
    from conewise.text.ask import as_choice
    from conewise.text.prompts import Pair, tokenize
    from conewise.text.tokens import subject_positions

    pair = Pair(prompt, prompt, tuple(answer or ()), tuple(wrong or ()), "the options")
    prompts = tokenize([pair], loaded.tokenizer)
    for note in prompts.notes:
        status.warn(note)
    metric = "logit_diff" if wrong else "prob"
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
        pos=as_choice(pos),
    )
    traced = job.run(
        evaluator=running.evaluator,
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
        print_json("trace", {**body, "report": results.report})
    else:
        _show(stdout(), loaded, story, traced, results.top)
    expect_verified(traced.result, status)


def _story(
    loaded: Model, prompts: TokenizedPrompts, traced: Trace, metric: str, typed: str, seed: int
) -> Story:
    from conewise.text.prompts import METRICS

    own: Story = traced.result.story
    (pair,), (answers,) = own.prompts, prompts.tokenized_pairs()
    pair = replace(pair, answers=answers.answers, wrong_answers=answers.wrong_answers)
    words = METRICS[metric]
    return replace(own, model=loaded.label, prompts=(pair,), metric=words, command=typed, seed=seed)


def _as_json(story: Story, traced: Trace) -> dict[str, Any]:
    (pair,) = story.prompts
    return {
        "prompt": pair.clean,
        "tokens": pair.clean_tokens,
        "subject": traced.subject,
        "answers": pair.answers,
        "wrong_answers": pair.wrong_answers,
        "metric": traced.result.metrics[0],
        "clean": traced.clean,
        "corrupted": traced.corrupted,
        "noise": traced.noise,
        "n": traced.n,
        "window": traced.window,
        "seed": story.seed,
        "kind": traced.result.spreads[0].name,
        "layers": traced.layers,
        "positions": traced.positions,
        "values": traced.values.tolist(),
        "plan": plan_json(traced.plan),
        "measured": asdict(traced.ledger),
        "verification": check_json(traced.result),
    }


def _show(console: Console, loaded: Model, story: Story, traced: Trace, top: int) -> None:
    """Print the question, the finding, the states that restore most, and the cost."""
    (pair,) = story.prompts
    tokens = pair.clean_tokens
    words = " ".join(
        f"*{text.strip()}*" if at in pair.noised else text.strip() for at, text in enumerate(tokens)
    )
    answers = ", ".join(map(repr, pair.answers))
    show_finding(console, traced.result)
    console.print(f"{loaded.label}: {words} →{answers}  (noise on *these*)\n", markup=False)
    rows = [
        (rank, cell.at["layer"], cell.at["pos"], tokens[cell.at["pos"]], f"{effect:+.4f}", f"{value:.4f}")
        for rank, (cell, effect, value) in enumerate(traced.result.strongest(top=top), 1)
    ]
    kind, cells = traced.result.spreads[0].name, len(traced.result.cells)
    ends = f"clean {traced.clean:.4g}, with noise {traced.corrupted:.4g}"
    title = f"The strongest {len(rows)} of {cells} states, {kind} ({traced.result.metrics[0]}: {ends})"
    columns = ("", "layer", "pos", "token", "effect", "value")
    show_table(console, title, columns, rows, right=(0, 1, 2, 4, 5))
    console.print(
        f"{traced.n} samples of noise, standard deviation {traced.noise:.3g}, seed {story.seed}", markup=False
    )
    show_cost(console, traced.result, None)
