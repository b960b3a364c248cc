"""`conewise report` and `reproduce`: the page of a run that was kept, and of the paper's experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from conewise.cli import FAILURE
from conewise.cli.failing import CommandError, shell_command
from conewise.cli.options import command
from conewise.cli.output import (
    expect_writable,
    plan_json,
    print_as_json,
    print_json,
    show_cost,
    show_finding,
    stdout,
)
from conewise.files import is_there


@command
def report(run_dir: Path, *, output: Path | None = None, json: bool = False) -> None:
    """Make an HTML report of a run that was stored with --out or `result.save`, in one file.

    Examples:
      conewise report run
      conewise report run -o ioi.html

    Options:
        RUN_DIR: The folder of the run.
        --output, -o FILE: Where the page goes. [RUN_DIR/report.html]
    """
    if not is_there(run_dir, Path.is_dir):
        raise CommandError(
            f"there is no folder {run_dir}. A run is kept with `conewise sweep ... --out DIR`."
        )
    from conewise.cli.folders import is_circuit, read_circuit, read_inside, read_question, read_run
    from conewise.report.page import write_page
    from conewise.sweeps.storage.archive import is_result

    path, console = output or run_dir / "report.html", stdout(quiet=json)
    if is_circuit(run_dir):
        found = read_circuit(run_dir)
        found.report(path)
        console.print(f"wrote {path}: {found.circuit!r}", markup=False)
        console.print(found.evaluation.finding, markup=False)
        body: dict[str, Any] = {"edges": len(found.circuit), "metrics": [found.evaluation.metric]}
        body["has_story"] = True
    else:
        question = read_question(run_dir)
        if question is not None and not is_result(run_dir):
            raise CommandError(
                f"the run in {run_dir} is not finished. Go on with it:\n"
                f"  {shell_command([*question.command, '--resume'])}"
            )
        result, story, folded = read_run(run_dir)
        write_page(path, result, story, folded, read_inside(run_dir))
        metrics = ", ".join(result.metrics)
        console.print(f"wrote {path}: {len(result.cells):,} cells of {metrics}\n", markup=False)
        show_finding(console, result)
        show_cost(console, result, story)
        body = {
            "cells": len(result.cells),
            "metrics": result.metrics,
            "has_story": story is not None,
            "has_cones": folded is not None,
            "plan": plan_json(result.plan),
        }
    if json:
        print_json("report", {"run": run_dir, "report": path, "bytes": path.stat().st_size, **body})


@command
def reproduce(experiments: list[str] | None = None, *, json: bool = False, out: Path | None = None) -> None:
    """Run the paper's experiments on real graphs and compare with the published figures.

    Exit code 1 if a quantity that should be exact does not match.

    Examples:
      conewise reproduce all
      conewise reproduce e4 e7 --json
      conewise reproduce e9 --out paper-report

    Options:
        EXPERIMENTS: locality, e4, e5, e7, drift, compiled, e9, skips, growth, index, edges, greedy,
            positions, wavefront, backward, or all. [all]
        --out DIR: Write a page, figures and tables there.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from conewise.paper.experiments import choose, page, run

    errors = Console(stderr=True)
    names = choose(experiments or [])
    if out is not None:
        expect_writable(out, "--out")
        _expect_ours(out)

    results = []
    columns = (TextColumn("{task.description:>6}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors) as progress:
        for name in names:
            bar = progress.add_task(name)

            def advance(done: int, total: int, bar: Any = bar) -> None:
                progress.update(bar, completed=done, total=total)

            results.append(run(name, advance))

    if json:
        print_as_json(page.as_dict(results))
    else:
        console = Console()
        for result in results:
            console.print(page.table(result))
            console.print(
                f"[dim]Compared: {result.compared}. {result.seconds:.1f} s[/dim]\n", highlight=False
            )
    if out is not None:
        try:
            written = page.write_report(results, out)
        except OSError as error:
            raise CommandError(f"the report cannot be written: {error.filename}: {error.strerror}.") from None
        errors.print(f"wrote {len(written)} files; open {escape(str(written[0]))}", highlight=False)
    failed = ", ".join(result.name for result in results if not result.all_match)
    if failed:
        errors.print(f"[red]does not match:[/red] {failed}", highlight=False)
        raise typer.Exit(FAILURE)


def _expect_ours(folder: Path) -> None:
    """Refuse to put one of our files in the place of one that is not ours."""
    from conewise.paper.experiments.page import PAGE, taken

    try:
        found = taken(folder)
    except OSError as error:
        raise CommandError(f"cannot read {folder / PAGE}: {error.strerror}. Name another folder.") from None
    if found is not None:
        raise CommandError(
            f"--out {folder} holds {found}, which `conewise reproduce` did not write; it was left as it "
            "is. Name another folder."
        )
