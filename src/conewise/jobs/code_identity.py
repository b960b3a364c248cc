"""Facts about Python code and objects that identity rests on.

Which library a piece of code belongs to, which globals, cells and modules a function's code reads, what an
instance holds, and which functions read something that is no part of the program.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import importlib.metadata
import json
import os
import pickle
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OWN = Path(__file__).resolve().parents[1]


@cache
def library_of_file(file: str) -> str:
    """Return the library and version that a file of code belongs to; empty for a user's own code.

    Python's own modules are of Python's version. An installed package is its version and the checksums that
    it was installed with, so that another build of one version is another library. A package that is
    installed "editable" is the user's own.
    """
    if file.startswith("<frozen "):
        return _python()
    if not file or file.startswith("<"):
        return ""
    path = Path(file).resolve()
    if path.is_relative_to(_OWN):
        return "conewise"
    for index, part in enumerate(path.parts[:-1]):
        if part in _INSTALLED:
            return _package(path.parts[index + 1])
    return _python() if any(path.is_relative_to(root) for root in _standard()) else ""


def library_of_module(module: ModuleType) -> str:
    """Return the library and version of a module; empty for a user's own."""
    if module.__name__ == "__main__":
        return ""
    if module.__name__ in sys.builtin_module_names:
        return _python()
    file = getattr(module, "__file__", None)
    if file:
        return library_of_file(file)
    roots = [str(root) for root in getattr(module, "__path__", ())]
    return library_of_file(str(PurePath(roots[0], "__init__.py"))) if roots else ""


def library_of_name(module: str) -> str:
    """Return the library and version of a module by its name; empty for a user's own or an unknown one."""
    found = sys.modules.get(module)
    return library_of_module(found) if isinstance(found, ModuleType) else ""


def _python() -> str:
    return f"python {sys.version_info.major}.{sys.version_info.minor}"


@cache
def _standard() -> tuple[Path, ...]:
    found = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib"))
    return tuple(Path(path).resolve() for path in found if path)


@cache
def _package(entry: str) -> str:
    """Return the package that an entry of the folder of installed packages belongs to; empty if unknown."""
    name = entry.partition(".")[0]
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        named = _distributions().get(name)
        if not named:
            return ""
        found = importlib.metadata.distribution(named[0])
    return f"{name} {found.version}{_checksum(found)}"


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _checksum(distribution: importlib.metadata.Distribution) -> str:
    """Return a digest of the checksums of the installed code, as the installer noted them."""
    lines = (distribution.read_text("RECORD") or "").splitlines()
    code = sorted(line for line in lines if line.partition(",")[0].endswith(_CODE) and ",sha" in line)
    return f" {hashlib.sha256(chr(10).join(code).encode()).hexdigest()[:8]}" if code else ""


_CODE = (".py", ".so", ".pyd", ".dylib", ".dll")


_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CELL = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SILENT = frozenset({"CACHE", "NOP", "EXTENDED_ARG", "NOT_TAKEN"})

Chain = tuple[str, ...]
"""Attributes, one of the other: `a.b.c` is read off `a` as ("b", "c"). An empty one is the value itself."""


@dataclass(frozen=True, slots=True)
class Import:
    """A module that code imports while it runs, and the names that it takes from it; none for all of it.

    `level` is the number of dots before the name of a relative import.
    """

    module: str
    level: int
    names: tuple[str, ...]


@dataclass(slots=True)
class Loads:
    """Names that code reads, with the code of functions and classes that are made inside of it.

    `maybe` are names that may be variables of a class body; `attributes` are all that is read of anything.
    """

    globals: dict[str, set[Chain]] = field(default_factory=dict)
    cells: dict[str, set[Chain]] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)
    maybe: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


def loads_of(code: CodeType) -> Loads:
    """Return all that the code of a function reads from outside of it."""
    found = Loads()
    _read(code, frozenset(code.co_freevars), found)
    return found


def _read(code: CodeType, cells: frozenset[str], found: Loads) -> None:
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
    for index, step in enumerate(steps):
        if step.opname in _GLOBAL:
            found.globals.setdefault(step.argval, set()).add(_chain(steps, index))
            if step.opname != "LOAD_GLOBAL":
                found.maybe.add(step.argval)
        elif step.opname in _CELL and step.argval in cells:
            found.cells.setdefault(step.argval, set()).add(_chain(steps, index))
        elif step.opname in _ATTRIBUTE:
            found.attributes.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            level, names = (one.argval for one in steps[index - 2 : index])
            # Without names, what is bound is the outermost package.
            module = step.argval if names else step.argval.partition(".")[0]
            found.attributes.update(names or ())
            found.imports.append(Import(module, level, tuple(names or ())))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # A variable of this code that the inner one closes over is none of ours.
            _read(constant, cells & frozenset(constant.co_freevars) - frozenset(code.co_cellvars), found)


def _chain(steps: list[dis.Instruction], index: int) -> Chain:
    names: list[str] = []
    for step in steps[index + 1 :]:
        if step.opname not in _ATTRIBUTE:
            break
        names.append(step.argval)
    return tuple(names)


BUILT_IN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
"""Types whose contents are known without asking the object."""

NOT_COMPUTED = frozenset(
    {
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__slots__",
        "__static_attributes__",
        "__type_params__",
        "__weakref__",
        "_abc_impl",
    }
)
"""Attributes of a class that do not change what it computes."""

_PYTHON_CLASS = 1 << 4
"""The flag of classes that were made by a `class` statement, and whose instances have a `__dict__`."""


def contents_of(value: Any) -> object:
    """Return the contents of an instance of a subclass of a built-in type, as that type."""
    base: Any = next(kind for kind in BUILT_IN if isinstance(value, kind))
    if base is dict:
        return dict(dict.items(value))
    if base in (list, tuple, set, frozenset):
        return base(base.__iter__(value))
    if base is bytearray:
        return bytes(value)
    if base in (str, bytes):
        return base.__getitem__(value, slice(None))
    return base.__pos__(value)


def attributes_of(value: Any) -> dict[str, object]:
    """Return the attributes of an instance, slots included, except its hash: it differs between processes."""
    held = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    remembered = [name for name, item in held.items() if name.endswith("hash") and type(item) is int]
    return {name: item for name, item in held.items() if name not in remembered or not _is_hash(item, value)}


def _is_hash(number: object, value: object) -> bool:
    try:
        return number == hash(value)
    except TypeError:
        return False


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name in {"__dict__", "__weakref__"}:
                continue
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{one.__name__.lstrip('_')}{name}" if is_private else name


def is_python(kind: type) -> bool:
    """True if a class was made in Python, so that slots and `__dict__` are all that its instances hold."""
    return "__slots__" in vars(kind) or bool(kind.__flags__ & _PYTHON_CLASS)


LITERAL = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
"""Types whose values are their text."""


def home_of(kind: type) -> str:
    """Return the name of the module that a class says it is of; empty for the few that say something else."""
    name: object = kind.__module__
    return name if isinstance(name, str) else ""


def reached(module: object, path: str) -> object:
    """Return what the name of a module and a path in it lead to; None if nothing."""
    found: object = sys.modules.get(str(module))
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def is_data(value: object) -> bool:
    """True if an attribute of a library may be a value that the user put there."""
    return type(value) in (*LITERAL, *BUILT_IN) or isinstance(value, torch.Tensor | np.ndarray)


def is_foreign(value: object) -> bool:
    """True if an attribute of a library is a function that the user put there."""
    if not isinstance(value, types.FunctionType):
        return False
    # A method that a library generated has no file, and the names of its module.
    made_in = str(value.__globals__.get("__name__"))
    return not library_of_file(value.__code__.co_filename) and not library_of_name(made_in)


_NAMED: dict[str, object] = {
    "open": builtins.open,
    "eval": builtins.eval,
    "exec": builtins.exec,
    "compile": builtins.compile,
    "globals": builtins.globals,
    "input": builtins.input,
    "__import__": builtins.__import__,
    "os.environ": os.environ,
    "sys.argv": sys.argv,
    "sys.modules": sys.modules,
    "json.load": json.load,
    "pickle.load": pickle.load,
    "torch.load": torch.load,
    "numpy.load": np.load,
    "numpy.memmap": np.memmap,
}

OUTSIDE = {id(value): name for name, value in _NAMED.items()}
"""By object: whatever name a function has for it."""

NAMES_OUTSIDE = frozenset(
    {
        "environ",
        "from_pretrained",
        "fromfile",
        "genfromtxt",
        "getenv",
        "import_module",
        "imread",
        "load_dataset",
        "load_file",
        "load_library",
        "loadtxt",
        "read_bytes",
        "read_csv",
        "read_json",
        "read_parquet",
        "read_text",
        "safe_open",
        "urlopen",
    }
)
"""By the name of an attribute, of whatever object."""
