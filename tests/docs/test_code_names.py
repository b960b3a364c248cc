"""Pages about the code name what is there: classes, their members, functions of modules, files."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "conewise"
PAGES = [
    ROOT / "ARCHITECTURE.md",
    PACKAGE / "reactive" / "README.md",
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
PLAIN = {"with"}  # words of Python


@cache
def defined() -> tuple[dict[str, set[str]], dict[str, set[str]], set[str]]:
    """The members of every class, the names that every module defines, and every name that is used at all."""
    classes: dict[str, set[str]] = {}
    modules: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        own = modules.setdefault(path.parent.name if path.stem == "__init__" else path.stem, set())
        own.update(one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef))
        for one in ast.walk(tree):
            if isinstance(one, ast.ClassDef):
                classes.setdefault(one.name, set()).update(_members(one))
                bases.setdefault(one.name, set()).update(
                    base.id for base in one.bases if isinstance(base, ast.Name)
                )
            used.update(_names(one))
    for name, above in bases.items():
        classes[name].update(*(classes.get(base, set()) for base in above))
    return classes, modules, used


def _members(kind: ast.ClassDef) -> set[str]:
    found = {one.name for one in kind.body if isinstance(one, ast.FunctionDef)}
    found |= {
        one.target.id
        for one in kind.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return found | {
        one.attr
        for one in ast.walk(kind)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
    }


def _names(node: ast.AST) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.Name(id=name):
            return {name}
    return set()


def unknown(written: str) -> bool:
    """Whether a name that is written as code is nowhere in the package; what is no name is not looked at."""
    if re.fullmatch(r"[\w/.]+\.(py|md|yml)", written):
        return not any(
            base.joinpath(written).exists() for base in (ROOT, ROOT / "docs", PACKAGE)
        ) and not any(PACKAGE.rglob(Path(written).name))
    called = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", written)
    if called is None or called[1] in PLAIN:
        return False
    classes, modules, used = defined()
    first, *rest = called[1].removeprefix("conewise.").split(".")
    if rest and first in classes:
        return rest[0] not in classes[first]
    if rest and first in modules:
        return rest[0] not in modules[first] | used | modules.keys()
    return not used.union(modules, classes).issuperset([first, *rest])


def test_pages_about_the_code_name_what_is_there() -> None:
    found = set()
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        found |= {(page.name, written) for written in re.findall(r"`([^`]+)`", text) if unknown(written)}
    assert found == set()


@pytest.mark.parametrize(
    "written", ["Standing", "State.put", "standing.py", "world.patch_all", "demand.twirl"]
)
def test_a_name_that_is_not_there_is_found(written: str) -> None:
    assert unknown(written)


@pytest.mark.parametrize(
    "written", ["State.patch", "reactive/demand.py", "demand.compute", "world.patch", "x + 1"]
)
def test_a_name_that_is_there_is_not_found(written: str) -> None:
    assert not unknown(written)


def dotted(folder: Path) -> Iterator[tuple[str, str]]:
    """The names that begin with the package's and are written as code, each with the file that has it."""
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.md")]):
        for name in re.findall(r"`(conewise(?:\.\w+)+)", path.read_text("utf-8")):
            yield name, path.name


def leads_somewhere(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            return False
    return True


@pytest.mark.parametrize("folder", ["src", "docs"])
def test_dotted_names_of_the_package_lead_somewhere(folder: str) -> None:
    found = set(dotted(ROOT / folder))
    assert len(found) > 5
    assert sorted((name, where) for name, where in found if not leads_somewhere(name)) == []


def test_a_dotted_name_that_is_not_there_is_found() -> None:
    assert leads_somewhere("conewise.runs.metric_words.prob")
    assert not leads_somewhere("conewise.runs.metric_words.gone")
    assert not leads_somewhere("conewise.gone.prob")
