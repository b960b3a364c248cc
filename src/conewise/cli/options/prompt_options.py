"""The options of prompts, and what the model should say to each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from conewise.cli.options.options import Answer, Wrong
from conewise.cli.options.panels import PROMPTS


@dataclass(frozen=True)
class PairOptions:
    """The prompts, and what the model should say to each."""

    clean: Annotated[
        str | None,
        typer.Option(
            "--clean",
            metavar="TEXT",
            help="The prompt that the model gets right.",
            rich_help_panel=PROMPTS,
            show_default=False,
        ),
    ] = None
    corrupted: Annotated[
        str | None,
        typer.Option(
            "--corrupted",
            metavar="TEXT",
            help="Its twin, with equally many tokens, that changes the answer.",
            rich_help_panel=PROMPTS,
            show_default=False,
        ),
    ] = None
    answer: Answer = None
    wrong: Wrong = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Many pairs: JSON rows {clean, corrupted, answers, wrong_answers}, JSON lines, or CSV with "
            "these columns and | between answers.",
            rich_help_panel=PROMPTS,
            show_default=False,
        ),
    ] = None
    as_written: Annotated[
        bool,
        typer.Option(
            "--as-written",
            help="Take answers without a leading space even where one seems to be missing.",
            rich_help_panel=PROMPTS,
        ),
    ] = False


@dataclass(frozen=True)
class PromptOptions(PairOptions):
    """The prompts, and how many of them are run together."""

    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            min=1,
            help="Prompts of one length that are run together at most; 256 by default.",
            rich_help_panel=PROMPTS,
            show_default=False,
        ),
    ] = None
