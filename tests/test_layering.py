"""The folders are the architecture: who may import whom, read from the sources with `ast`."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import conewise
from conewise.paper.experiments import registry

PACKAGE = Path(__file__).parents[1] / "src" / "conewise"
MODULES = sorted(PACKAGE.rglob("*.py"))

# What each room may import of the rest, besides itself. A new room is a decision, and is made here. The root,
# `""`, is the public face: only the command line imports it, for it imports the package.
FOUNDATION = {
    *("errors", "arguments", "amounts", "phases", "garbage", "threads", "status_line", "reading", "files"),
    *("templates", "markup"),
    *("colours", "extras", "formats", "version"),
    *("reactive", "paper.theory", "paper.ops"),
}
# The modules of the core that compute values. The graph does not import them, and neither does the theory, so
# that prediction and measurement stay independent.
ENGINE = {
    f"reactive.{module}" for module in ("changes", "demand", "ledger", "plan", "state", "store", "world")
}
FOUNDATION |= ENGINE
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"errors"},
    "amounts": {"errors"},
    "phases": set(),
    "status_line": {"phases"},
    "reading": set(),
    "files": {"errors"},
    "version": set(),
    "formats": {"errors", "version"},
    "garbage": set(),
    "threads": {"errors"},
    "colours": set(),
    "extras": {"errors"},
    "templates": {"extras"},
    "markup": {"templates"},
    "reactive": {"errors", "arguments"},
    **{room: {"errors", "arguments", "reactive", *ENGINE} for room in ENGINE},
    "paper": set(),
    "paper.theory": {"errors", "reactive"},
    "paper.ops": {"errors", "reactive"},
    "models.tiny": set(),
}
# From here on torch may be imported, and a room may import all those before it.
WITH_TORCH = (
    "program",
    "structure",
    "capturing",
    "locations",
    "identity",
    "texts",
    "sweeps.planning.shapes",
    "edges",
    "decomposing",
    "runs",
    "checks",
    "splicing",
    "generating",
    "models",
    "sweeps.planning",
    "sweeps.execution",
    "sweeps.storage",
    "report",
    "circuits",
    "sweeps.batches",
    "sweeps.calibration",
    "sweeps.running",
    "fleets",
    "sweeps",
    "circuits.search",
    "circuits.tracing",
    "attributing",
    "prompts",
    "model",
    "loading",
    "asking",
    "compat",
    "paper.experiments",
    "cli",
)
for place, room in enumerate(WITH_TORCH):
    MAY_IMPORT[room] = {*FOUNDATION, "models.tiny", *WITH_TORCH[:place]} - {"compat"}
MAY_IMPORT["cli"] |= {""}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT[""] = set(MAY_IMPORT) - {"cli", "report", "compat"}

# Packages that only some rooms may import. All others are free.
ONLY_IN: dict[str, set[str]] = {
    "torch": {*WITH_TORCH},
    "pandas": {*WITH_TORCH},
}


def name_of(path: Path) -> str:
    """The dotted name of the module at `path`, without the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


NAMES = frozenset(name_of(path) for path in MODULES)
PACKAGES = frozenset(name_of(path) for path in MODULES if path.name == "__init__.py") - {""}
"""`from conewise.cli.commands import cones` imports the package too, and with it what that imports."""


def room_of(module: str) -> str:
    """The room of a module: the innermost folder that the table has."""
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


def breaches(room: str, source: str) -> list[str]:
    """The imports of `source`, a module of `room`, that the tables forbid."""
    found = []
    for name in imported(source):
        top, _, inside = name.partition(".")
        if top == "conewise":
            if room_of(inside) not in MAY_IMPORT[room] | {room}:
                found.append(name)
        elif room not in ONLY_IN.get(top, {room}):
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


def subfolders(imports: Mapping[str, set[str]]) -> dict[str, dict[str, set[str]]]:
    """By folder, which of its sub-folders imports which. What lies in the folder itself is in none."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for module, reads in imports.items():
        for read in reads:
            one, other = module.split("."), read.split(".")
            shared = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            if shared and shared < min(len(one), len(other)) - 1:
                graph = graphs.setdefault(".".join(one[:shared]), {})
                graph.setdefault(one[shared], set()).add(other[shared])
                graph.setdefault(other[shared], set())
    return graphs


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


def test_every_module_imports_only_what_its_room_may() -> None:
    rooms = {path: room_of(name_of(path)) for path in MODULES}
    assert [path for path, room in rooms.items() if not room and path.parent != PACKAGE] == []
    found = {path.name: breaches(room, path.read_text("utf-8")) for path, room in rooms.items()}
    assert {name: forbidden for name, forbidden in found.items() if forbidden} == {}


def test_no_modules_import_each_other() -> None:
    assert cycles({name_of(path): own_imports(path.read_text("utf-8")) for path in MODULES}) == []


def test_no_subfolders_import_each_other() -> None:
    graphs = subfolders({name_of(path): own_imports(path.read_text("utf-8")) for path in MODULES})
    assert {"circuits", "cli", "structure", "sweeps", "paper"} <= graphs.keys()
    assert {folder: cycles(graph) for folder, graph in graphs.items() if cycles(graph)} == {}


def test_every_module_is_used() -> None:
    """By another one, or by those who use the package: commands, drop-ins, experiments by name."""
    used = {name for path in MODULES for name in own_imports(path.read_text("utf-8")) - {name_of(path)}}
    used |= {home.removeprefix("conewise.") for home in conewise._HOMES.values()}
    used |= {home.removeprefix("conewise.") for home in registry.HOMES.values()}
    used |= {"cli.__main__", "compat.transformer_lens", "fleets.process_worker"}
    rooms = {name for name in NAMES if (PACKAGE / name.replace(".", "/")).is_dir()}
    assert NAMES - used - rooms == set()


def test_a_module_taken_from_a_package_imports_the_package() -> None:
    assert own_imports("from conewise.cli.commands import cones") == {"cli.commands", "cli.commands.cones"}
    assert own_imports("from conewise.paper.theory.sweeps import sweep_cost") == {"paper.theory.sweeps"}


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_subfolders_that_import_each_other_are_found() -> None:
    imports = {"r.a.x": {"r.b.y", "r.a.w", "r.z"}, "r.b.v": {"r.a.w", "s.c.u"}, "r.z": {"r.a.x"}}
    assert subfolders(imports) == {"r": {"a": {"b"}, "b": {"a"}}}


FORBIDDEN = [
    ("errors", "from conewise.reactive.graph import Graph"),
    ("reading", "from conewise.errors import ConewiseError"),
    ("models.tiny", "import torch"),
    ("models.tiny", "from conewise.models.load import load"),
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
    ("program", "from conewise.structure.attention import find"),
    ("runs", "from conewise.sweeps.sweep import Sweep"),
    ("sweeps.planning", "from conewise.sweeps.sweep import Sweep"),
    ("sweeps.planning.shapes", "from conewise.sweeps.planning.plan import Compiled"),
    ("sweeps.planning", "if TYPE_CHECKING:\n    from conewise.sweeps.execution.replay import Wave"),
    ("paper.experiments", "from conewise.cli import app"),
    ("", "from conewise.cli import app"),
    ("", "from conewise.compat import transformer_lens"),
    ("sweeps", "from conewise.compat import transformer_lens"),
    ("compat", "from conewise.paper.experiments import page"),
    ("report", "from conewise.sweeps.result import Result"),
    ("report", "from conewise.circuits.circuit.circuit import Circuit"),
]
ALLOWED = [
    ("reactive", "import numpy as np\nfrom conewise.errors import ConewiseError"),
    ("reactive", "from conewise.reactive.graph import Node"),
    ("reactive.world", "from conewise import errors, reactive"),
    ("capturing", "import torch.export"),
    ("sweeps", "from conewise.sweeps.planning.schedule import Schedule"),
    ("compat", "import torch\nfrom conewise.sweeps.sweep import Sweep"),
    ("cli", "import conewise as cw\nfrom conewise.paper.experiments import e4"),
]


def test_forbidden_imports_are_found_and_allowed_ones_are_not() -> None:
    assert [(room, source) for room, source in FORBIDDEN if len(breaches(room, source)) != 1] == []
    assert [(room, source) for room, source in ALLOWED if breaches(room, source)] == []


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(AssertionError, match="write the import in full"):
        breaches("reactive", "from ..reactive.world import World")


def test_what_needs_no_torch_loads_neither_torch_nor_pandas() -> None:
    """What the tables cannot see: an import of an import."""
    modules = ("conewise", "conewise.reactive.world", "conewise.models.tiny", "conewise.paper.theory")
    script = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'pandas'}} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, text=True).strip() == "[]"
