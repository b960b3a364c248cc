"""`cw.open`: a saved result, from the folder that its `save` wrote."""

from __future__ import annotations

from pathlib import Path

from conewise.arguments import checked
from conewise.sweeps.result import Result, load_result


@checked
def open(folder: str | Path) -> Result:  # noqa: A001 - as people say it
    """Open what `result.save(folder)` wrote: equal to it, bit for bit.

    It holds no model. Raises SweepError where the folder holds no result, or a damaged one; FormatError for
    one of a newer version.
    """
    return load_result(folder)
