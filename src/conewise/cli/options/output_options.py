"""The options of what comes out: what is printed, checked, drawn and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from conewise.cli.options.options import Json, Progress, Report
from conewise.cli.options.panels import OUTPUT, RUNNING


@dataclass(frozen=True)
class ResultOptions:
    """What is done with the numbers of a run, and how much of them is shown."""

    verify: Annotated[
        int,
        typer.Option(
            "--verify",
            metavar="N",
            min=0,
            help="Check so many random cells by full forwards with hooks; exit with 1 if they differ.",
            rich_help_panel=RUNNING,
        ),
    ] = 0
    report: Report = None
    top: Annotated[
        int,
        typer.Option(
            "--top", metavar="N", min=1, help="Show so many of the strongest sites.", rich_help_panel=OUTPUT
        ),
    ] = 10
    progress: Progress = None


def folder_of(text: str) -> Path:
    """The folder that a text names: an empty one would be the current folder."""
    if not text.strip() or "\0" in text:
        raise typer.BadParameter("it names no folder.")
    return Path(text)


@dataclass(frozen=True)
class StoreOptions:
    """Where a run is kept."""

    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Keep the run there: what is done while it runs, and the result. `conewise report DIR` "
            "makes a page of it.",
            rich_help_panel=OUTPUT,
            show_default=False,
            parser=folder_of,
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run in --out where it was cut off.", rich_help_panel=OUTPUT
        ),
    ] = False


@dataclass(frozen=True)
class OutputOptions:
    """What a command prints while it runs and in the end."""

    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Say nothing while it runs, but for notes.", rich_help_panel=OUTPUT
        ),
    ] = False
    json: Json = False
