"""`conewise demo` and `make demo`: a language model taken apart, and a page to look at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from conewise.cli import options as opt
from conewise.cli.options import help_text
from conewise.cli.output import Status, expect_writable, print_json
from conewise.cli.questions import question_json
from conewise.cli.showing import result_json
from conewise.cli.streams import CHECK_FAILED

HELP = """Take a language model apart: who gets the drink? Every head and MLP patched, and a page written.

Uses SmolLM2-135M; with --tiny a small model that comes with conewise, in seconds and without any download.

\b
Examples:
  conewise demo --tiny
  conewise demo --out demo-report
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", help=help_text(HELP), short_help="Take a language model apart, and look at it.")(demo)


def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="Use the small model.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the page goes.")] = Path(
        "demo-report"
    ),
    json: opt.Json = False,
) -> None:
    """Take a model apart, say what was found, and write the page and the run into the folder `out`.

    SmolLM2-135M, or with `tiny` the small model that comes with conewise. With `json` one object is printed,
    as `conewise sweep --json` prints it. Exits with 1 when the numbers do not stand up to the check.
    """
    expect_writable(out, "--out")
    from conewise.cli.demo import (
        MODEL,
        TINY,
        TITLE,
        ask,
        budget,
        command,
        expect_ours,
        run,
        show_cost,
        show_files,
        show_question,
        show_sites,
        stdout,
        write,
    )

    expect_ours(out)
    started = time.perf_counter()
    name = TINY if tiny else MODEL
    status = Status()
    console = stdout(quiet=json)
    console.rule(f"{TITLE} {name} taken apart", align="left")
    question = ask(name, status)
    with status.doing("planning"):
        plan = question.plan(budget(question))
    show_question(console, question, plan)
    found = run(question, plan, command(tiny, out), status)
    page, folder = write(found, out, status)
    if json:
        files = {"out": str(folder), "report": str(page)}
        print_json(
            "demo",
            {**question_json(question), **result_json(found.result, found.story), "files": files},
        )
    show_sites(console, found)
    show_cost(console, found)
    show_files(console, page, folder, time.perf_counter() - started)
    check = found.result.verification
    if check is not None and not check.ok:
        status.warn(f"verification {check}")
        raise typer.Exit(CHECK_FAILED)
