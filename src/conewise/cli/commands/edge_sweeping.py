"""`conewise edges`: what every edge between components does to the metric."""

from __future__ import annotations

import typer

from conewise.cli import options as opt
from conewise.cli.commands.sweeping import plan_question, run_question
from conewise.cli.failing import CommandError
from conewise.cli.option_groups import (
    EdgeOptions,
    FleetOptions,
    LoadOptions,
    MethodOptions,
    OutputOptions,
    ResultOptions,
    RunOptions,
    StoreOptions,
)
from conewise.cli.options import flat, help_text

HELP = """Patch every edge between components, each in a world of its own, and say what it does to the metric.

An edge is what one component (the input, a head, an MLP) wrote and another one (the queries, keys or values
of a head, an MLP, the logits) reads: a0.h1->a3.h2<q>, m5->logits. That reader alone sees the change.

\b
Examples:
  conewise edges tiny
  conewise edges tiny --plan
  conewise edges smollm2-135m --prompts pairs.json --edges '*->*<k>' --top 20
  conewise edges openai-community/gpt2 --prompts pairs.json --out run --report edges.html
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "edges",
        help=help_text(HELP),
        short_help="Patch every edge between heads and MLPs, and say what each does.",
    )(flat(edges))


def edges(
    ctx: typer.Context,
    model: opt.Model,
    *,
    options: EdgeOptions,
    plan: opt.Plan = False,
    running: RunOptions,
    fleet: FleetOptions,
    estimating: MethodOptions,
    results: ResultOptions,
    storing: StoreOptions,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Patch every edge in a world of its own; see `HELP`."""
    if plan:
        if estimating.method is not None or estimating.steps is not None:
            raise CommandError("--plan is of worlds that are computed: leave out --method and --steps.")
        if storing.out is not None or storing.resume or results.report is not None:
            raise CommandError("--plan runs nothing, so there is nothing for --out, --resume or --report.")
        plan_question(
            "edges", model, options,
            running=running, fleet=fleet, output=output, loading=loading, unit="edge",
        )  # fmt: skip
        return
    run_question(
        ctx, "edges", model, options,
        running=running, fleet=fleet, estimating=estimating, results=results, storing=storing, output=output,
        loading=loading, unit="edge",
    )  # fmt: skip
