"""`conewise demo`: a language model taken apart, and a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conewise.cli import options as opt
from conewise.cli.helping import shown
from conewise.cli.showing import expect_writable

HELP = """Take a language model apart: who gets the drink? Every head and MLP patched, and a page written.

Uses SmolLM2-135M; with --tiny a small model that comes with conewise, in seconds and without any download.

\b
Examples:
  conewise demo --tiny
  conewise demo --out demo-report
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", help=shown(HELP), short_help="Take a language model apart, and look at it.")(demo)


def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="Use the small model.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the page goes.")] = Path(
        "demo-report"
    ),
    json: opt.Json = False,
) -> None:
    """Take a language model apart; see `HELP`."""
    expect_writable(out, "--out")
    from conewise.cli.demo import main

    main(tiny=tiny, out=out, json=json)
