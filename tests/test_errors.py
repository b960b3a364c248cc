"""The errors are one tree: drawn as it is, and nothing that reaches a caller is defined elsewhere."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator
from pathlib import Path

from conewise import errors

PACKAGE = Path(errors.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "errors.py")

# Exceptions that are defined elsewhere, because none reaches a caller: each is caught in its room, and
# those of the command line end a command.
INSIDE = {
    "checks/verify.py": {"NoReferenceError"},
    "cli/streams.py": {"UnwrittenError"},
    "cli/failing.py": {"CommandError", "Interrupted"},
    "compat/patching_result.py": {"ReadsMoreError"},
    "program/kept.py": {"NotKeptError"},
    "reactive/demand.py": {"RuleFailedError"},
}
# Who raises Python's own errors.
PLAIN = {
    "__init__.py": "an attribute that is not there",
    "arguments.py": "what cannot happen",
    "circuits/circuit_files.py": "said by the caller, with the file's name",
    "circuits/acdc.py": "said by the caller, with the file's name",
    "compat/": "errors as the library has them that it stands in for",
    "report/folded.py": "said by the caller, with the file's name",
    "cli/folders.py": "said by the caller, with the folder's name; said by the caller, with the file's name",
    "paper/experiments/": "mistakes in the experiments themselves",
    "files.py": "said by the caller, with the file's name; an OSError as the system raises it",
    "jobs/progress.py": "what cannot happen",
    "jobs/store.py": "said by the caller, with the name of the file",
    "jobs/search_job.py": "a MemoryError, as where memory is out: the share is cut",
    "reactive/gradients.py": "a key that is not there",
    "anatomy/places.py": "of `as_number`, which says what is none; its callers say of what",
    "models/gguf.py": "an OSError, told by the caller as a LoadError",
    "loading.py": "told by the caller as a LoadError",
    "model.py": "an attribute that is not there",
    "paper/ops/": "rules; in a world an OpError",
    "program/tensors.py": "said by the caller, with the place's name",
    "runs/reading.py": "what is put in a place, which interventions say",
    "runs/values.py": "an attribute that is not there",
    "report/document.py": "mistakes in the pages' own scripts",
    "sweeps/": "said by the caller, with the file's name; what cannot happen",
}
PYTHONS = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


def drawn() -> Iterator[tuple[str, str]]:
    """(error, its parent) for each line of the tree in the docstring."""
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        before, mark, after = line.partition("── ")
        if mark:
            depth = (len(before) - 4) // 4
            del above[depth + 1 :]
            above.append(after.split()[0])
            yield above[-1], above[-2]
        elif line.strip() == "ConewiseError":
            above = ["ConewiseError"]


def named(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_tree_is_drawn_as_it_is() -> None:
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    found = {
        kind.__name__: kind.__bases__[0].__name__
        for kind in classes
        if issubclass(kind, errors.ConewiseError) and kind is not errors.ConewiseError
    }
    assert dict(drawn()) == found


def test_an_error_is_defined_in_the_tree_or_does_not_leave_its_room() -> None:
    known = PYTHONS | {name for name in vars(errors) if name.endswith(("Error", "Warning"))}
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(one, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id in known for base in one.bases
            ):
                found.setdefault(named(path), set()).add(one.name)
    assert found == INSIDE


def test_pythons_own_errors_are_raised_where_there_is_a_reason() -> None:
    found: dict[str, set[str]] = {}
    for path in MODULES:
        if any(named(path).startswith(where) for where in PLAIN):
            continue
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(one, ast.Raise) and one.exc is not None:
                name = one.exc.func if isinstance(one.exc, ast.Call) else one.exc
                if isinstance(name, ast.Name) and name.id in PYTHONS:
                    found.setdefault(named(path), set()).add(name.id)
    assert found == {}, "raise one of conewise.errors, or say in PLAIN why not"
