"""The command line: parses, calls, prints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from conewise import __version__
from conewise.errors import UnknownExperimentError

app = typer.Typer(
    name="conewise",
    help="Take a trained network apart, and pay only for what each change touches.",
    no_args_is_help=True,
    add_completion=False,
)
USAGE = 2


def _show_version(asked: bool) -> None:
    if asked:
        print(f"conewise {__version__}")
        raise typer.Exit


@app.callback()
def conewise(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take a trained network apart, and pay only for what each change touches."""
    del version


@app.command()
def reproduce(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(help="e4, e5, e7, drift, e9, skips, or all.", show_default="all"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write a page, figures and tables there.", show_default=False
        ),
    ] = None,
) -> None:
    """Run the paper's experiments on real graphs, and compare with its printed figures.

    Exits with 1 when something that is exact does not match.
    """
    from conewise.experiments import registry
    from conewise.interfaces import report, tables

    errors = Console(stderr=True)
    try:
        names = registry.choose(experiments or [])
    except UnknownExperimentError as unknown:
        errors.print(f"[red]error:[/red] {escape(str(unknown))}", highlight=False)
        raise typer.Exit(USAGE) from None
    if out is not None:
        _expect_writable(out, errors)

    results = []
    with Progress(
        TextColumn("{task.description:>6}"), BarColumn(), TimeElapsedColumn(), console=errors
    ) as progress:
        for name in names:
            bar = progress.add_task(name)
            results.append(registry.run(name, partial(_advance, progress, bar)))

    if json:
        print(report.as_json(results))
    else:
        console = Console()
        for result in results:
            console.print(tables.table(result))
            console.print(
                f"[dim]Compared: {result.compared}. {result.seconds:.1f} s[/dim]\n", highlight=False
            )
    if out is not None:
        written = report.write_report(results, out)
        errors.print(f"wrote {len(written)} files; open {escape(str(written[0]))}", highlight=False)
    if not all(result.all_match for result in results):
        failed = ", ".join(result.name for result in results if not result.all_match)
        errors.print(f"[red]does not match:[/red] {failed}", highlight=False)
        raise typer.Exit(1)


def _advance(progress: Progress, bar: TaskID, done: int, total: int) -> None:
    progress.update(bar, completed=done, total=total)


def _expect_writable(folder: Path, errors: Console) -> None:
    """Find out before the run, not after it, that the report cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".conewise"
        probe.touch()
        probe.unlink()
    except OSError as cause:
        errors.print(
            f"[red]error:[/red] cannot write into --out {escape(str(folder))}: {cause.strerror}. Name a "
            "folder that exists and is yours, or one that can be made.",
            highlight=False,
        )
        raise typer.Exit(USAGE) from None


if __name__ == "__main__":
    app(prog_name="conewise")
