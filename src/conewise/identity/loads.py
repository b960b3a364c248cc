"""Loads: which globals, cells and modules a function's code reads, and which attributes of them."""

from __future__ import annotations

import dis
from dataclasses import dataclass, field
from types import CodeType

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
    """What code reads, with the code of functions and classes that are made inside of it.

    `maybe` are names that may be variables of a class body; `attributes` are all that is read of anything.
    """

    globals: dict[str, set[Chain]] = field(default_factory=dict)
    cells: dict[str, set[Chain]] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)
    maybe: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


def loads_of(code: CodeType) -> Loads:
    """All that the code of a function reads from outside of it."""
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
