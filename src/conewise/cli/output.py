"""The output of commands: JSON for machines, tables for people, and progress on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from conewise import errors
from conewise.cli import FAILURE
from conewise.cli.failing import CommandError
from conewise.cli.options import SweepOptions
from conewise.files import expect_file, expect_replaceable, expect_room
from conewise.status import status_to
from conewise.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.generation.result import WrittenTexts
    from conewise.jobs.progress import ProgressCallback
    from conewise.jobs.scheduling import FleetLedger
    from conewise.report.story import Story
    from conewise.status import Phases
    from conewise.sweeps.planning.plan import SweepPlan
    from conewise.sweeps.result import Result

PLENTY = 10_000
"""Columns of a line that goes to a file or a pipe: nothing is wrapped there."""

EVERY = 1.0
"""Seconds between two lines of progress, where no bar can be drawn."""


def print_json(command: str, body: Mapping[str, Any]) -> None:
    """Print one JSON object; numbers that JSON cannot say (NaN, infinity) are null."""
    print_as_json({"command": command, **body})


def print_as_json(value: Any) -> None:
    """Print a value as JSON, in the characters that stdout can say: escapes where it cannot."""
    value = plain(value)
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False)
    print(text)


def plain(value: Any) -> Any:
    """Return nested values as JSON has them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def stdout(*, quiet: bool = False) -> Console:
    """Return where people read results. Without a terminal: plain text, lines as long as they are."""
    from rich.console import Console

    is_watched = sys.stdout.isatty()
    width = None if is_watched else PLENTY
    return Console(highlight=False, soft_wrap=not is_watched, width=width, quiet=quiet)


def show_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Iterable[int] = (),
) -> None:
    """Print a table of texts, in which brackets are brackets; the columns `right` are numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    is_watched, numbers = sys.stdout.isatty(), set(right)
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if is_watched else None,
        pad_edge=is_watched,
        show_header=any(columns),
    )
    for place, name in enumerate(columns):
        made.add_column(name, justify="right" if place in numbers else "left", no_wrap=place in numbers)
    for row in rows:
        made.add_row(*(one if isinstance(one, Text) else Text(str(one)) for one in row))
    console.print(made)


class Status:
    """Says on stderr what is being done; nothing when `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._doing = ""

    def __call__(self, words: str) -> None:
        """Say a line, unless it is what is said to be done already."""
        if not self.quiet and words != self._doing:
            print(words, file=sys.stderr, flush=True)

    def warn(self, words: str) -> None:
        """Say something that a careful person wants to know, even when quiet."""
        print(f"note: {words}", file=sys.stderr, flush=True)

    def counter(self, words: str) -> Callable[[int, int], None]:
        """Return what says how many are done, of how many, once a second where it takes longer than one."""
        told_at = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal told_at
            if time.monotonic() - told_at >= EVERY:
                told_at = time.monotonic()
                self(f"{done:,} of {total:,} {words}")

        return progress

    @contextmanager
    def warnings_as_notes(self) -> Iterator[None]:
        """Say our own warnings as notes, without the line of code that they come from."""
        with warnings.catch_warnings():
            usual = warnings.showwarning

            def say(message: Warning | str, category: type[Warning], *where: Any, **named: Any) -> None:
                if category.__module__ == errors.__name__:
                    self.warn(str(message))
                else:
                    usual(message, category, *where, **named)

            warnings.showwarning = say
            yield

    @contextmanager
    def doing(self, words: str) -> Iterator[None]:
        """Say what is being done now: a moving line in a terminal, a plain one elsewhere."""
        if self.quiet or not sys.stderr.isatty():
            self(words)
            self._doing = words
            with status_to(lambda _: None):
                yield
        else:
            from rich.console import Console

            self._doing = words
            with Console(stderr=True).status(words) as spinner, status_to(spinner.update):
                yield
        self._doing = ""


class CellCounter:
    """Progress of a sweep: passed on to the bar `advance`, or printed as lines; remembers how far it got."""

    def __init__(self, status: Status, is_shown: bool) -> None:
        self._status, self._is_shown = status, is_shown
        self._told_at = -math.inf
        self._workers: FleetLedger | None = None
        self.advance: ProgressCallback | None = None
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        """Note the cells that are done, of so many."""
        if self.advance is not None:
            self.advance(done - self.done)
        self.done = done
        now = time.monotonic()
        if self._is_shown and (done == total or now - self._told_at >= EVERY):
            self._told_at = now
            by = "" if self._workers is None else f"; {self._workers.line()}"
            self._status(f"{done} of {total} cells done{by}")

    def follow(self, phases: Phases) -> None:
        """Show the phase that is under way in the bar."""
        if self.advance is not None:
            self.advance.follow(phases)

    def follow_workers(self, workers: FleetLedger) -> None:
        """Show what workers do in the bar, or in the lines."""
        self._workers = workers
        if self.advance is not None:
            self.advance.follow_workers(workers)


def progress_for(status: Status, wanted: bool | None) -> bool | Callable[[int, int], None] | None:
    """Return the progress of a run: a bar in a terminal, lines elsewhere if they are wanted, or nothing."""
    if wanted is False or (wanted is None and status.quiet):
        return False
    if sys.stderr.isatty():
        return wanted
    return CellCounter(status, is_shown=True) if wanted else False


def expect_writable(folder: Path, option: str) -> None:
    """Find out before the run, not after it, that nothing can be written into a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expect_room(folder)
    except OSError as cause:
        raise CommandError(
            f"cannot write into {option} {folder}: {cause.strerror}. Name a folder that exists and is yours, "
            "or one that can be made."
        ) from None


def expect_writable_file(path: Path | None, option: str) -> None:
    """Find out before the run, not after it, that a page or a picture cannot be written there."""
    if path is None:
        return
    expect_writable(path.parent, option)
    try:
        expect_replaceable(path)
        expect_file(path)
    except OSError as cause:
        raise CommandError(f"cannot write {option} {path}: {cause.strerror}. Name another file.") from None


# -- plans and results ----------------------------------------------------------------------


def plan_json(plan: SweepPlan) -> dict[str, Any]:
    """Return a plan as JSON has it."""
    return {**plan.costs(), "moved_bytes": plan.moved_bytes, "chunks": list(plan.chunks), "ratio": plan.ratio}


def check_json(result: Result) -> dict[str, Any] | None:
    """Return the verification of a result as JSON has it."""
    check = result.verification
    return None if check is None else {**asdict(check), "ok": check.ok, "passed": check.passed}


def result_json(result: Result, story: Story) -> dict[str, Any]:
    """Return a result as JSON has it: every cell, strongest first, and what it cost."""
    source = None if result.source is None else float(result.source[0])
    base = float(result.base[0])
    span = None if source is None else source - base
    cells = [
        {
            "site": cell.name,
            "kind": cell.kind,
            "layer": cell.at.get("layer"),
            "head": cell.at.get("head", cell.at.get("kv_head")),
            "pos": cell.at.get("pos"),
            "value": value,
            "effect": effect,
            "normalised": effect / span if span else None,
        }
        for cell, effect, value in result.strongest(top=len(result.cells))
    ]
    return {
        "base": base,
        "source": source,
        "method": result.method or None,
        "cells": cells,
        "plan": plan_json(result.plan),
        "measured": asdict(result.ledger),
        "full_forwards": {"timed": story.forwards_timed, "seconds": story.forward_seconds},
        "verification": check_json(result),
        "provenance": {
            "command": story.command,
            "conewise": __version__,
            "versions": dict(result.provenance["versions"]),
        },
    }


def files_json(how: SweepOptions) -> dict[str, Path | None]:
    """Return the files of a run as JSON has them."""
    return {"out": how.out, "report": how.report}


def expect_verified(result: Result | WrittenTexts, status: Status) -> None:
    """End the command with exit code 1 where the result was checked and failed."""
    check = result.verification
    if check is not None and not check.ok:
        status.warn(f"verification {check}")
        raise typer.Exit(FAILURE)


def plan_sentence(plan: SweepPlan) -> str:
    """Return a plan in a sentence: worlds, computations, memory, and seconds where they are known."""
    from conewise.arguments import shown_bytes

    seconds = "" if plan.seconds is None else f", in about {plan.seconds:.2g} s"
    return (
        f"{plan.worlds:,} worlds take {plan.node_evaluations:,} node evaluations, {plan.ratio:.2f} times "
        f"fewer than full re-runs, and at most {shown_bytes(plan.peak_bytes)}{seconds}."
    )


def show_plan(console: Console, plan: SweepPlan) -> None:
    """Print a plan as a table."""
    show_table(console, "What it would cost", ("", ""), plan.rows())


def show_finding(console: Console, result: Result) -> None:
    """Print what was found, how sure that is, and what it cost, each in a sentence."""
    from conewise.sweeps.findings import certainty, cost, finding

    console.print(finding(result), markup=False, style="bold")
    console.print(certainty(result), markup=False)
    console.print(f"{cost(result)}\n", markup=False)


def show_result(console: Console, result: Result, story: Story, top: int, unit: str = "site") -> None:
    """Print the strongest sites, or what else one `unit` is, and what they cost."""
    base = float(result.base[0])
    source = None if result.source is None else float(result.source[0])
    ends = "" if source is None else f", in the source {source:.4g}"
    console.print(f"{result.metrics[0]} in the base {base:.4g}{ends}\n", markup=False)
    if result.method:
        console.print(f"Approximate: {result.method}.\n", markup=False)
    show_strongest(console, result, top, unit)
    show_cost(console, result, story)


BAR = 20
"""Characters of the longest bar beside an effect."""


def show_strongest(console: Console, result: Result, top: int, unit: str) -> None:
    """Print the strongest sites, or what else one `unit` is; in a terminal with a bar beside each."""
    from rich.text import Text

    span = 0.0 if result.source is None else float(result.source[0] - result.base[0])
    columns = ["", unit, "effect", *(["of base → source"] if span else []), "value"]
    strongest = result.strongest(top=top)
    largest = max((abs(effect) for _, effect, _ in strongest), default=0.0) or 1.0
    rows = []
    for rank, (cell, effect, value) in enumerate(strongest, 1):
        share = [f"{effect / span:+.1%}"] if span else []
        bar = []
        if console.is_terminal and math.isfinite(effect) and math.isfinite(largest):
            # Told apart by colour-blind readers, and by the sign.
            length = max(1, round(BAR * abs(effect) / largest))
            bar = [Text("█" * length, style="blue" if effect > 0 else "red")]
        rows.append([rank, cell.name, f"{effect:+.4f}", *share, f"{value:.4f}", *bar])
    cells = len(result.cells)
    columns += [""] * (max(map(len, rows), default=len(columns)) - len(columns))
    title = f"The strongest {min(top, cells)} of {cells} {unit}s"
    show_table(console, title, columns, rows, right=(0, 2, 3, *([4] if span else [])))


def show_cost(console: Console, result: Result, story: Story | None) -> None:
    """Print what was predicted, what was counted, how long full re-runs take, and how it was checked."""
    from conewise.report.accounting import WAS_BUSY, accounting

    found = accounting(result, story)
    console.print()
    show_table(console, "What it cost", found["heads"], found["rows"], right=(1, 2, 3, 4))
    for note in found["notes"]:
        console.print(note, markup=False, style="yellow" if note == WAS_BUSY else "dim")
    if result.verification is not None:
        console.print(f"verification {result.verification}", markup=False)
