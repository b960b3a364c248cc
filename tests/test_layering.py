"""The folders are the architecture: who may import whom, read from the sources with `ast`.

Two rules. No two files import each other, directly or through others. And each folder imports only folders
that it may: the reactive core and the theory know no torch, and the program knows nothing of sweeps.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import conewise
from conewise.paper import experiments

PACKAGE = Path(__file__).parents[1] / "src" / "conewise"
MODULES = sorted(PACKAGE.rglob("*.py"))

# The modules at the root that everything may import. The root itself, `""`, is the public face.
COMMON = {"errors", "arguments", "status", "threads", "files", "templates", "extras", "version"}
# The modules of the core that compute values. The graph does not import them, and neither does the theory, so
# that prediction and measurement stay independent.
ENGINE = {f"reactive.{module}" for module in ("changes", "demand", "ledger", "state", "world")}
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "arguments": {"errors"},
    "threads": {"errors"},
    "status": set(),
    "extras": {"errors"},
    "files": {"errors", "version"},
    "templates": {"extras"},
    "reactive": {"errors", "arguments"},
    **{module: {"errors", "arguments", "reactive", *ENGINE} for module in ENGINE},
    "paper": {"errors", "reactive"},
    "paper.theory": {"errors", "reactive", "paper"},
    "paper.ops": {"errors", "reactive"},
    "models.tiny": set(),
    "graph_sweep": {"errors", "arguments", "reactive", *ENGINE, "paper.theory"},
}
# From here on torch may be imported. Of these folders, a file may import any but those named as forbidden.
WITH_TORCH = {
    "program": {"runs", "checks", "sweeps", "circuits", "attributing", "jobs", "text", "models", "report"},
    "anatomy": {"runs", "checks", "sweeps", "circuits", "attributing", "jobs", "text", "models", "report"},
    "runs": {"models"},
    "checks": {"sweeps", "sweeps.result", "circuits", "attributing", "text", "models", "report"},
    "sweeps": {"attributing", "models"},
    "circuits": {"models"},
    "generation": {"models", "attributing", "circuits"},
    "attributing": {"models", "text"},
    "jobs": {"text"},
    "models": {"runs", "checks", "sweeps", "circuits", "attributing", "text", "report"},
    "report": {"circuits", "attributing", "jobs", "text", "models", "sweeps.result"},
    "model": {"report"},
    "loading": {"report"},
    "opening": {"report"},
    "surgery": {"report"},
    "text": set(),
    "compat": {"paper"},
    "paper.experiments": {"text", "attributing"},
    "cli": set(),
}
BELOW = {*COMMON, "reactive", *ENGINE, "paper", "paper.theory", "paper.ops", "models.tiny"}
HIGH = {"model", "loading", "opening", "surgery", "text", "compat", "paper.experiments", "cli"}
"""Only these import each other: `text` imports the model, and not the other way round."""
for _folder, _forbidden in WITH_TORCH.items():
    may = BELOW | (WITH_TORCH.keys() - {"cli", "compat", "paper.experiments"}) | {"sweeps.result"}
    MAY_IMPORT[_folder] = may - _forbidden - (set() if _folder in HIGH else HIGH - {"text"})
MAY_IMPORT["sweeps.result"] = MAY_IMPORT["sweeps"]
MAY_IMPORT["cli"] |= {"", "paper.experiments"}
MAY_IMPORT["compat"] |= {""}
MAY_IMPORT[""] = set(MAY_IMPORT) - {"cli", "report", "compat"}

# Packages that only some folders may import. All others are free.
ONLY_IN: dict[str, set[str]] = {
    package: {*WITH_TORCH, "sweeps.result"} for package in ("torch", "pandas", "transformers")
}


def name_of(path: Path) -> str:
    """The dotted name of the module at `path`, without the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


NAMES = frozenset(name_of(path) for path in MODULES)
PACKAGES = frozenset(name_of(path) for path in MODULES if path.name == "__init__.py") - {""}
"""`from conewise.paper.experiments import page` imports the package too, and with it what that imports."""


def folder_of(module: str) -> str:
    """The row of the table that a module belongs to: the innermost one."""
    while module and module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
    return module


def imported(source: str) -> Iterator[str]:
    """The dotted name of everything `source` imports, at the top or inside a function, for types or not.

    Imports are absolute: ruff forbids the relative ones (TID252).
    """
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"line {statement.lineno}: write the import in full"
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def breaches(folder: str, source: str) -> list[str]:
    """The imports of `source`, a module of `folder`, that the tables forbid."""
    found = []
    for name in imported(source):
        top, _, inside = name.partition(".")
        if top == "conewise":
            if folder_of(inside) not in MAY_IMPORT[folder] | {folder}:
                found.append(name)
        elif folder not in ONLY_IN.get(top, {folder}):
            found.append(name)
    return found


def own_imports(source: str) -> set[str]:
    """The modules of the package that `source` imports."""
    found = set()
    for name in imported(source):
        top, _, inside = name.partition(".")
        if top == "conewise":
            found |= {inside.rpartition(".")[0]} & PACKAGES
            while inside not in NAMES:
                inside = inside.rpartition(".")[0]
            found.add(inside)
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of nodes that reach each other, smallest names first; none in a graph without a cycle."""
    rest = {node: reads & graph.keys() for node, reads in graph.items()}
    while ready := {node for node, reads in rest.items() if not reads - {node}}:
        rest = {node: reads - ready for node, reads in rest.items() if node not in ready}
    found = []
    while rest:
        first = min(rest)
        forward, backward = _reached(first, rest), _reached(first, _turned(rest))
        if together := forward & backward:
            found.append(sorted(together))
        rest = {
            node: reads - together - {first} for node, reads in rest.items() if node not in together | {first}
        }
    return found


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for node in graph[waiting.pop()] - found:
            found.add(node)
            waiting.append(node)
    return found


def _turned(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    return {node: {other for other, reads in graph.items() if node in reads} for node in graph}


def test_every_module_imports_only_what_its_folder_may() -> None:
    folders = {path: folder_of(name_of(path)) for path in MODULES}
    assert [path for path, folder in folders.items() if not folder and path.parent != PACKAGE] == []
    found = {name_of(path): breaches(folder, path.read_text("utf-8")) for path, folder in folders.items()}
    assert {name: forbidden for name, forbidden in found.items() if forbidden} == {}


def test_no_modules_import_each_other() -> None:
    assert cycles({name_of(path): own_imports(path.read_text("utf-8")) for path in MODULES}) == []


def test_every_module_is_used() -> None:
    """By another one, or by those who use the package: commands, drop-ins, experiments by name."""
    used = {name for path in MODULES for name in own_imports(path.read_text("utf-8")) - {name_of(path)}}
    used |= {home.removeprefix("conewise.") for home in conewise._HOMES.values()}
    used |= {f"paper.experiments.{home}" for home in experiments.HOMES.values()}
    used |= {"cli.__main__", "compat.transformer_lens"}
    folders = {name for name in NAMES if (PACKAGE / name.replace(".", "/")).is_dir()}
    assert NAMES - used - folders == set()


def test_a_module_taken_from_a_package_imports_the_package() -> None:
    assert own_imports("from conewise.paper.experiments import page") == {
        "paper.experiments",
        "paper.experiments.page",
    }
    assert own_imports("from conewise.paper.theory.sweeps import sweep_cost") == {"paper.theory.sweeps"}


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


FORBIDDEN = [
    ("errors", "from conewise.reactive.graph import Graph"),
    ("status", "from conewise.errors import ConewiseError"),
    ("models.tiny", "import torch"),
    ("models.tiny", "from conewise.loading import load"),
    ("reactive", "from conewise.reactive.world import World"),
    ("reactive", "from conewise.reactive import demand"),
    ("reactive", "import conewise"),
    ("reactive", "from conewise import Graph"),
    ("reactive.world", "import torch"),
    ("reactive.world", "import pandas as pd"),
    ("reactive.state", "def late():\n    from torch.nn import Module"),
    ("reactive.world", "import conewise.paper.theory.cost"),
    ("paper.theory", "from conewise.reactive.ledger import Ledger"),
    ("paper.theory", "if TYPE_CHECKING:\n    from conewise.reactive.world import World"),
    ("paper.ops", "import torch"),
    ("program", "from conewise.sweeps.sweep import Sweep"),
    ("anatomy", "from conewise.runs.run import Run"),
    ("runs", "from conewise.model import Model"),
    ("checks", "from conewise.sweeps.result import Result"),
    ("sweeps.planning", "from conewise.model import Model"),
    ("circuits", "if TYPE_CHECKING:\n    from conewise.model import Model"),
    ("paper.experiments", "from conewise.cli import app"),
    ("", "from conewise.cli import app"),
    ("", "from conewise.compat import transformer_lens"),
    ("sweeps", "from conewise.compat import transformer_lens"),
    ("compat", "from conewise.paper.experiments import page"),
    ("report", "from conewise.sweeps.result import Result"),
    ("report", "from conewise.circuits.circuit import Circuit"),
]
ALLOWED = [
    ("reactive", "import numpy as np\nfrom conewise.errors import ConewiseError"),
    ("reactive", "from conewise.reactive.graph import Node"),
    ("reactive.world", "from conewise import errors, reactive"),
    ("program", "import torch.export"),
    ("sweeps", "from conewise.sweeps.planning.schedule import Schedule"),
    ("compat", "import torch\nfrom conewise.sweeps.sweep import Sweep"),
    ("cli", "import conewise as cw\nfrom conewise.paper.experiments import e4"),
]


def test_forbidden_imports_are_found_and_allowed_ones_are_not() -> None:
    rows = [(folder_of(folder), folder, source) for folder, source in FORBIDDEN]
    assert [(folder, source) for row, folder, source in rows if len(breaches(row, source)) != 1] == []
    allowed = [(folder_of(folder), source) for folder, source in ALLOWED]
    assert [(row, source) for row, source in allowed if breaches(row, source)] == []


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(AssertionError, match="write the import in full"):
        breaches("reactive", "from ..reactive.world import World")


def test_what_needs_no_torch_loads_neither_torch_nor_pandas() -> None:
    """What the tables cannot see: an import of an import."""
    modules = ("conewise", "conewise.reactive.world", "conewise.models.tiny", "conewise.paper.theory")
    script = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'pandas'}} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, text=True).strip() == "[]"
