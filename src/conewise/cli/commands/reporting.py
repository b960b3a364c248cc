"""`conewise report`: the page of a run that was kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conewise.cli import options as opt
from conewise.cli.failing import CommandError, shell_command
from conewise.cli.options import help_text
from conewise.cli.output import plan_json, print_json, show_cost, stdout
from conewise.files import is_there

HELP = """Make a page of a run that was kept with --out (or with `result.save`): one file, without a network.

\b
Examples:
  conewise report run
  conewise report run -o ioi.html
"""

PAGE = "report.html"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", help=help_text(HELP), short_help="Make a page of a run that was kept.")(report)


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The folder of the run.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where the page goes.", show_default=f"RUN_DIR/{PAGE}"
        ),
    ] = None,
    json: opt.Json = False,
) -> None:
    """Make a page of a run; see `HELP`."""
    if not is_there(run_dir, Path.is_dir):
        raise CommandError(
            f"there is no folder {run_dir}. A run is kept with `conewise sweep ... --out DIR`."
        )
    from conewise.cli.folders import is_circuit, read_circuit, read_inside, read_question, read_run

    path = output or run_dir / PAGE
    if is_circuit(run_dir):
        found = read_circuit(run_dir)
        found.report(path)
        if json:
            print_json(
                "report",
                {
                    "run": str(run_dir),
                    "report": str(path),
                    "bytes": path.stat().st_size,
                    "edges": len(found.circuit),
                    "metrics": [found.evaluation.metric],
                    "has_story": True,
                },
            )
            return
        stdout().print(f"wrote {path}: {found.circuit!r}", markup=False)
        return
    from conewise.report.page import write_page
    from conewise.sweeps.storage.archive import is_result

    question = read_question(run_dir)
    if question is not None and not is_result(run_dir):
        raise CommandError(
            f"the run in {run_dir} is not finished. Go on with it:\n"
            f"  {shell_command([*question.command, '--resume'])}"
        )
    result, story, folded = read_run(run_dir)
    write_page(path, result, story, folded, read_inside(run_dir))
    if json:
        print_json(
            "report",
            {
                "run": str(run_dir),
                "report": str(path),
                "bytes": path.stat().st_size,
                "cells": len(result.cells),
                "metrics": list(result.metrics),
                "has_story": story is not None,
                "has_cones": folded is not None,
                "plan": plan_json(result.plan),
            },
        )
        return
    console = stdout()
    console.print(f"wrote {path}: {len(result.cells):,} cells of {', '.join(result.metrics)}", markup=False)
    show_cost(console, result, story)
