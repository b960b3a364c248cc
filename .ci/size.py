"""How much code there is, and how much of it the README's first example runs; informative, never a gate.

The example is executed as it stands, on the tiny model. A file or a function counts once, when it is first
called; the depth is the largest number of calls of the package on the stack. Comprehensions and the bodies of
modules and classes are no functions.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import warnings
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
PACKAGE = f"{SRC / 'conewise'}{os.sep}"


class Trace:
    """The functions of the package that were entered, and how deep their calls were nested."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.depth = 0

    @property
    def files(self) -> set[str]:
        """The files that hold these functions."""
        return {code.co_filename for code in self.functions}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take note of a call, as `sys.setprofile` reports it."""
        if event == "call" and _is_function(frame.f_code):
            self.functions.add(frame.f_code)
            depth, at = 0, frame.f_back
            while at is not None:
                depth += _is_function(at.f_code)
                at = at.f_back
            self.depth = max(self.depth, depth + 1)


def _is_function(code: CodeType) -> bool:
    is_named = code.co_name == "<lambda>" or not code.co_name.startswith("<")
    return is_named and code.co_filename.startswith(PACKAGE) and bool(code.co_flags & CO_OPTIMIZED)


def first_example(page: str) -> str:
    """Return the first Python block of a page."""
    found = re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)
    if found is None:
        raise ValueError("the page has no Python block")
    return found[1]


def traced(code: str) -> Trace:
    """Execute `code`, silently, and return what it entered."""
    trace = Trace()
    silence = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    # The example saves its result in the current folder.
    with (
        silence[0],
        silence[1],
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
    ):
        warnings.simplefilter("ignore")
        sys.setprofile(trace)
        try:
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
        finally:
            sys.setprofile(None)
    return trace


def main() -> None:
    """Print the two counts."""
    files = sorted(SRC.rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    print(f"src: {lines:,} lines of Python in {len(files)} files")
    found = traced(first_example((ROOT / "README.md").read_text(encoding="utf-8")))
    print(
        f"README's first example: enters {len(found.files)} files and {len(found.functions)} functions, "
        f"up to {found.depth} calls deep"
    )


if __name__ == "__main__":
    main()
