"""Results that were saved to a folder, read back."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from conewise.report.story import read_story
from conewise.sweeps.result import Result
from conewise.sweeps.storage.archive import read_result


def load_result(folder: str | Path) -> Result:
    """The result that was saved in a folder, equal to it bit for bit, with its story where it has one.

    It has no model at hand. Raises SweepError when there is none, or when it is damaged; FormatError for one
    of a newer version.
    """
    found = read_result(folder)
    held = {one.name: getattr(found, one.name) for one in fields(found)}
    return Result(**{**held, "story": read_story(Path(folder))})
