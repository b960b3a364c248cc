"""The folders are the architecture: who may import whom, read from the sources with `ast`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "conewise"
MODULES = sorted(PACKAGE.rglob("*.py"))

# What stands directly in `conewise/`, and what it may import of the rest. A new module or
# folder there is a decision, and is made here. `__init__` is the public face: nothing inside
# the package imports it, for it imports the package.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "reading": set(),
    "models": set(),
    "graph": {"errors"},
    "engine": {"errors", "graph"},
    "theory": {"errors", "graph"},
    "frontends": {"errors", "reading", "graph", "models"},
    "workloads": {"errors", "reading", "graph", "engine", "theory", "frontends", "models"},
    "experiments": {"errors", "reading", "graph", "engine", "theory", "frontends", "models", "workloads"},
}
INSIDE = set(MAY_IMPORT)
# `compat` answers in other libraries' manner: beside the interfaces, and nothing else imports it.
MAY_IMPORT["compat"] = {*INSIDE}
MAY_IMPORT["interfaces"] = {*INSIDE, "__init__"}
MAY_IMPORT["__main__"] = {"interfaces"}
MAY_IMPORT["__init__"] = INSIDE

# Packages that only some layers may import. All others are free.
ONLY_IN: dict[str, set[str]] = {
    "torch": {"compat", "frontends"},
    "pandas": {"compat", "frontends", "workloads", "experiments", "interfaces"},
}


def imported(source: str) -> Iterator[str]:
    """The dotted name of everything `source` imports, at the top or inside a function.

    Imports are absolute: ruff forbids the relative ones (TID252).
    """
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"line {statement.lineno}: write the import in full"
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def breaches(layer: str, source: str) -> list[str]:
    """The imports of `source`, a module of `layer`, that the tables forbid."""
    found = []
    for name in imported(source):
        top, _, inside = name.partition(".")
        if top == "conewise":
            part = inside.partition(".")[0]
            # `import conewise`, `from conewise import Graph`: the public face.
            target = part if part in MAY_IMPORT else "__init__"
            if target not in MAY_IMPORT[layer] | {layer}:
                found.append(name)
        elif layer not in ONLY_IN.get(top, {layer}):
            found.append(name)
    return found


def layer_of(path: Path) -> str:
    """The part of the package that the module at `path` belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    layer = layer_of(path)
    assert layer in MAY_IMPORT, f"'{layer}' is not in MAY_IMPORT: say what it may import"
    assert breaches(layer, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("errors", "from conewise.graph import Graph"),
        ("reading", "from conewise.errors import ConewiseError"),
        ("models", "import torch"),
        ("models", "from conewise.frontends.torch.load import load"),
        ("graph", "from conewise.engine.world import World"),
        ("graph", "from conewise import engine"),
        ("graph", "import conewise"),
        ("graph", "from conewise import Graph"),
        ("engine", "import torch"),
        ("engine", "import pandas as pd"),
        ("engine", "def late():\n    from torch.nn import Module"),
        ("engine", "import conewise.theory.cost"),
        ("theory", "from conewise.engine.ledger import Ledger"),
        ("theory", "if TYPE_CHECKING:\n    from conewise.engine import World"),
        ("frontends", "from conewise.engine import World"),
        ("workloads", "from conewise.interfaces import report"),
        ("workloads", "import torch"),
        ("experiments", "from conewise.interfaces.cli import app"),
        ("__init__", "from conewise.interfaces.cli import app"),
        ("__init__", "from conewise.compat import transformer_lens"),
        ("workloads", "from conewise.compat import transformer_lens"),
        ("compat", "from conewise.interfaces import report"),
    ],
)
def test_a_forbidden_import_is_found(layer: str, source: str) -> None:
    assert len(breaches(layer, source)) == 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("graph", "import numpy as np\nfrom conewise.errors import ConewiseError"),
        ("graph", "from conewise.graph.node import Node"),
        ("engine", "from conewise import errors, graph"),
        ("frontends", "import torch.export"),
        ("compat", "import torch\nfrom conewise.workloads.sweep import Sweep"),
        ("interfaces", "import conewise as cw\nfrom conewise.experiments import e4"),
    ],
)
def test_an_allowed_import_is_not_found(layer: str, source: str) -> None:
    assert breaches(layer, source) == []


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(AssertionError, match="write the import in full"):
        breaches("graph", "from ..engine import World")


@pytest.mark.parametrize("module", ["conewise", "conewise.engine", "conewise.models.tiny", "conewise.theory"])
def test_importing_it_does_not_load_torch_or_pandas(module: str) -> None:
    """What the tables cannot see: an import of an import."""
    script = f"import sys, {module}; print(sorted({{'torch', 'pandas'}} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, text=True).strip() == "[]"
