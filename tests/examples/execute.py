"""Execute the notebooks and store their outputs: `make notebooks`.

What goes to stderr is not stored: it tells of the machine, and not of the example.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
CLEAR = "%reset -f"
"""A new namespace, in the same kernel: what is imported stays loaded."""


def read(path: Path) -> Any:
    """A notebook as it is stored."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def executed(paths: Sequence[Path], folder: str) -> list[Any]:
    """Notebooks with new outputs, run one after the other in one kernel, each in a namespace of its own."""
    notebooks = [read(path) for path in paths]
    joined = read(paths[0])
    clear = nbformat.v4.new_code_cell(CLEAR)  # type: ignore[no-untyped-call]
    joined.cells = [cell for one in notebooks for cell in (deepcopy(clear), *one.cells)]
    NotebookClient(joined, timeout=120, resources={"metadata": {"path": folder}}).execute()
    for notebook in notebooks:
        count = 0
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                count += 1
                cell.execution_count = count
                cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
                for output in cell.outputs:
                    if "execution_count" in output:
                        output["execution_count"] = count
    return notebooks


if __name__ == "__main__":
    asked = [Path(name).resolve() for name in sys.argv[1:]]
    every = asked or sorted(ROOT.glob("examples/notebooks/*.ipynb"))
    with tempfile.TemporaryDirectory() as empty:
        for notebook_path, made in zip(every, executed(every, empty), strict=True):
            nbformat.write(made, notebook_path)  # type: ignore[no-untyped-call]
            sys.stdout.write(f"executed {notebook_path.relative_to(ROOT)}\n")
