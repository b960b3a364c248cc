"""The folder of a run: its result, story, folded graph and inside, of which a page can be made later."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from conewise.errors import SweepError
from conewise.files import write_whole
from conewise.report.story import STORY, Story, damaged
from conewise.sweeps.result import Result
from conewise.sweeps.saved import load_result
from conewise.sweeps.storage.archive import MANIFEST, VALUES, save

if TYPE_CHECKING:
    from conewise.report.folded import Folded
    from conewise.report.inside import Inside

FOLDED, INSIDE = "folded.json", "inside.json"
FILES = [STORY, FOLDED, INSIDE, VALUES, MANIFEST]
"""The files of a run, in the order in which they are written."""


def write_run(
    folder: str | Path,
    result: Result,
    story: Story | None = None,
    folded: Folded | None = None,
    inside: Inside | None = None,
    *,
    unfinished: bool = False,
) -> Path:
    """Write all of a run to a folder that holds none yet; returns the folder.

    The result goes last, and its manifest last of all: a folder that has one has the rest too. `unfinished`:
    what is there without a manifest was left by a process that died while it wrote, and is replaced.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [MANIFEST] if unfinished else FILES
        taken = [name for name in taken if (folder / name).exists()]
        if taken:
            raise SweepError(
                f"{folder} holds {taken[0]} already; it was left as it is. Write to another folder, or "
                "delete the old run first."
            )
        for name, part in ((STORY, story), (FOLDED, folded), (INSIDE, inside)):
            if part is not None:
                write_whole(folder / name, f"{part.to_json()}\n".encode())
    except OSError as error:
        raise SweepError(f"the run cannot be written to {folder}: {error.strerror or error}.") from None
    return save(result, folder, unfinished=unfinished)


def read_run(folder: str | Path) -> tuple[Result, Story | None, Folded | None]:
    """The result in a folder, and its story and folded graph where they are known.

    Raises SweepError when there is no result, or when something in the folder is damaged.
    """
    folder = Path(folder)
    result = load_result(folder)
    return result, result.story, _folded(folder / FOLDED)


def read_inside(folder: str | Path) -> Inside | None:
    """The inside of the base run in a folder, where it was kept. Raises SweepError when it is damaged."""
    path = Path(folder) / INSIDE
    if not path.exists():
        return None
    from conewise.report.inside import Inside

    try:
        return Inside.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, SweepError) as error:
        raise damaged(path, error) from None


def _folded(path: Path) -> Folded | None:
    if not path.exists():
        return None
    from conewise.report.folded import Folded

    try:
        return Folded.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SweepError) as error:
        raise damaged(path, error) from None
