"""Run scripts one after another in one process, and print what became of each as JSON lines.

python -m tests.examples.every_script SCRIPT ...

Loading torch takes longer than any of them. Each starts in a folder of its own, with names of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from pathlib import Path


def outcome(script: Path) -> dict[str, str]:
    """What a script prints, and the traceback of the error that it ends with."""
    printed, failure = io.StringIO(), ""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        os.chdir(folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                runpy.run_path(str(script), run_name="__main__")
        except Exception:  # noqa: BLE001 - whatever it is, it is told
            failure = traceback.format_exc()
        finally:
            os.chdir("/")
    return {"script": script.name, "printed": printed.getvalue(), "failure": failure}


if __name__ == "__main__":
    for given in sys.argv[1:]:
        sys.stdout.write(json.dumps(outcome(Path(given).resolve())) + "\n")
