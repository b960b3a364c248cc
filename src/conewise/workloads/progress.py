"""Progress: cells done, time left, memory held; in a terminal, in a notebook, or to a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(progress: bool | Callable[[int, int], None], total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of cells that were just done."""
    if callable(progress):
        tell, done = progress, 0

        def count(cells: int) -> None:
            nonlocal done
            done += cells
            tell(done, total)

        yield count
        return
    if not progress:
        yield lambda cells: None
        return
    from rich.progress import (  # noqa: PLC0415  # needed where a bar is shown only
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as shown:
        task = shown.add_task("sweeping", total=total)
        yield lambda cells: shown.advance(task, cells)
