"""Arguments and options that several commands or groups have, each declared once with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conewise.cli.options.choices import Metric
from conewise.cli.options.panels import CHANGE, OUTPUT, PROMPTS, RUNNING

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder, a hub name, a GGUF file, smollm2-135m or tiny.",
        show_default=False,
    ),
]
Answer = Annotated[
    list[str] | None,
    typer.Option(
        "--answer",
        metavar="TOK",
        help="What should come next in the (clean) prompt: one token, often with a leading space. "
        "Several: repeat it.",
        rich_help_panel=PROMPTS,
        show_default=False,
    ),
]
Wrong = Annotated[
    list[str] | None,
    typer.Option(
        "--wrong",
        metavar="TOK",
        help="What should not come next. Several: repeat it.",
        rich_help_panel=PROMPTS,
        show_default=False,
    ),
]
Pos = Annotated[
    str | None,
    typer.Option(
        "--pos",
        metavar="CHOICE",
        help="Positions that are patched one by one: ':' all, '-1' the last, '2:5' some.",
        rich_help_panel=CHANGE,
    ),
]
ReadMetric = Annotated[
    Metric,
    typer.Option(
        "--metric",
        help="logit-diff: answer less wrong. prob: of the answer. kl: to the clean prediction.",
        rich_help_panel=CHANGE,
    ),
]
Plan = Annotated[
    bool,
    typer.Option("--plan", help="Say what it would cost, and run nothing of it.", rich_help_panel=RUNNING),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="AMOUNT",
        help="What the run may hold beside the model and the baseline, as '4GiB' or '500MB'.",
        rich_help_panel=RUNNING,
        show_default="2GiB",
    ),
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Show progress on stderr.",
        rich_help_panel=OUTPUT,
        show_default="in a terminal",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a page that opens without a network (.html), with --json too. It replaces a page of "
        "conewise, and no other file.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", help="For all that is drawn at random.", rich_help_panel=RUNNING),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
]
