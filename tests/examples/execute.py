"""Execute the notebooks and store their outputs: `make notebooks`.

What goes to stderr is not stored: it tells of the machine, and not of the example.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def read(path: Path) -> Any:
    """A notebook as it is stored."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def executed(path: Path, folder: str) -> Any:
    """A notebook, run from top to bottom in a kernel of its own, with its new outputs."""
    notebook = read(path)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for notebook_path in sorted(ROOT.glob("examples/notebooks/*.ipynb")):
        with tempfile.TemporaryDirectory() as empty:
            nbformat.write(executed(notebook_path, empty), notebook_path)  # type: ignore[no-untyped-call]
        sys.stdout.write(f"executed {notebook_path.relative_to(ROOT)}\n")
