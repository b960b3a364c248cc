"""What conewise comes with is enough to sweep; what comes with an extra is named where it is missing."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import conewise
from conewise.cli import entry
from conewise.errors import ConewiseError, MissingPackageError
from conewise.extras import EXTRAS, expect, needs
from tests.plain_stack import captured, sweep_of

ROOT = Path(__file__).parents[1]
PACKAGE = Path(conewise.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Imported, and there with the other packages of their extra.
BROUGHT = {"huggingface_hub", "tokenizers"}


# -- the table -----------------------------------------------------------------------------------


def packages(requirements: list[str]) -> set[str]:
    """The names of requirements, but for extras of conewise itself."""
    return {name for one in requirements if (name := re.split(r"[<>=\[]", one)[0]) != "conewise"}


def test_the_extras_are_those_of_the_project() -> None:
    assert packages(PROJECT["dependencies"]) == set(EXTRAS[""].packages)
    for name, extra in EXTRAS.items():
        if name:
            assert packages(PROJECT["optional-dependencies"][name]) == set(extra.packages) - BROUGHT, name
            assert brought(name) == {name, *extra.brings}


def brought(extra: str) -> set[str]:
    """All extras that one brings."""
    found = {extra}
    for one in PROJECT["optional-dependencies"][extra]:
        if inside := re.fullmatch(r"conewise\[(.*)\]", one):
            found |= {more for name in inside[1].split(",") for more in brought(name)}
    return found


def test_all_is_all_and_what_is_developed_with_has_all_but_ray() -> None:
    assert brought("all") == {"all", *EXTRAS} - {""}
    assert brought("dev") == {"dev", *EXTRAS} - {"", "ray"}


def test_the_page_on_installing_says_what_each_brings() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for name, extra in EXTRAS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name or 'conewise'}`"))
        assert {one for one in (*extra.packages, name) if one and one not in row} <= BROUGHT, name
    assert "| `all`" in page


# -- the imports ---------------------------------------------------------------------------------


def unguarded(source: str) -> Iterator[str]:
    """The packages of extras that a module imports outside of `needs` with their extra, types apart."""
    homes = {package: name for name, extra in EXTRAS.items() if name for package in extra.packages}

    def look(node: ast.AST, inside: str | None) -> Iterator[str]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            tops = {name.partition(".")[0] for name in names}
            yield from (top for top in tops if homes.get(top, inside) != inside)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        elif isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr).startswith("needs("):
            inside = ast.unparse(node.items[0].context_expr)[len("needs(") : -1].strip("'")
        for child in ast.iter_child_nodes(node):
            yield from look(child, inside)

    return look(ast.parse(source), None)


def test_a_package_of_an_extra_is_imported_where_its_extra_is_named() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        # The command's way in, `cli/entry.py`, names the extra for all of its modules.
        allowed = {"typer"} if path.is_relative_to(PACKAGE / "cli") else set()
        packages = set(unguarded(path.read_text(encoding="utf-8"))) - allowed
        found |= {(path.relative_to(PACKAGE).as_posix(), package) for package in packages}
    assert found == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pandas as pd", ["pandas"]),
        ("def late():\n    from plotly.subplots import make_subplots", ["plotly"]),
        ("with needs('plots'):\n    import pandas", ["pandas"]),
        ("with needs('tables'):\n    import pandas, torch", []),
        ("if TYPE_CHECKING:\n    import pandas", []),
        ("import torch, json", []),
    ],
)
def test_an_import_without_its_extra_is_found(source: str, found: list[str]) -> None:
    assert list(unguarded(source)) == found


def test_importing_the_package_imports_no_other() -> None:
    code = "import sys; old = set(sys.modules); import conewise; print(*set(sys.modules) - old)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} == {"conewise"}


# -- what is said --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hidden(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """What was said where all packages of extras are hidden, and how the command ended there."""
    folder = tmp_path_factory.mktemp("hidden")
    saved = sweep_of(captured()).run().save(folder / "saved")
    done = subprocess.run(
        [sys.executable, "-m", "tests.without_extras", str(saved)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done


def test_a_sweep_runs_is_stored_and_checked_without_any_extra(hidden: tuple[dict[str, Any], object]) -> None:
    said, _ = hidden
    assert said["swept"] == 3
    assert all(said["printed"])


@pytest.mark.parametrize(
    ("use", "package", "extra"),
    [
        ("load a name", "transformers", "hf"),
        ("load the tiny model", "transformers", "hf"),
        ("a table", "pandas", "tables"),
        ("a table of sites", "pandas", "tables"),
        ("save", "pandas", "tables"),
        ("save, with pandas", "pyarrow", "tables"),
        ("open a result", "pandas", "tables"),
        ("a figure", "plotly", "plots"),
        ("an image", "plotly", "plots"),
        ("a page", "markupsafe", "plots"),
        ("a notebook", "jinja2", "plots"),
        ("processes", "cloudpickle", "workers"),
        ("Ray", "ray", "ray"),
    ],
)
def test_the_first_use_of_a_missing_package_names_its_extra(
    use: str, package: str, extra: str, hidden: tuple[dict[str, Any], object]
) -> None:
    found, named, message = hidden[0][use]
    assert (found, named) == (package, extra)
    assert message.startswith(f"{package} is not installed here. It comes with the extra {extra}, which ")
    assert message.endswith(f": pip install 'conewise[{extra}]'")


def test_the_command_without_its_parser_says_so_and_ends(
    hidden: tuple[object, subprocess.CompletedProcess[str]],
) -> None:
    _, done = hidden
    assert done.returncode == 2
    assert done.stderr == (
        "error: typer is not installed here. It comes with the extra cli, which is the command line and all "
        "that it needs: pip install 'conewise[cli]'\n"
    )


def test_the_command_says_what_it_lacks_before_it_computes_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Transformers brings the parser: what writes the page may be missing all the same."""
    whole = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else whole(name))
    assert entry._run(["demo", "--tiny", "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: pyarrow is not installed here. It comes with the extra cli, ")
    assert not (tmp_path / "out").exists()


def test_what_conewise_itself_comes_with_is_named_too() -> None:
    said = r"^torch is not installed here\..*: pip install 'conewise'$"
    with pytest.raises(MissingPackageError, match=said), needs():
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")


def test_other_modules_that_are_missing_are_left_as_they_are() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as found, needs("hf"):
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401, PLC0415
    assert not isinstance(found.value, ConewiseError)


def test_what_another_library_imports_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    expect("hf", "gguf", "accelerate")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="gguf is not installed here") as found:
        expect("hf", "gguf", "accelerate")
    assert isinstance(found.value, ImportError)
