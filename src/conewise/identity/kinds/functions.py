"""Functions: by their code, by what they carry with them, and by all that their code reads."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from collections.abc import Iterator

from conewise.identity.kinds.classes import module_text
from conewise.identity.libraries import library_of_file, library_of_module, library_of_name
from conewise.identity.loads import Chain, loads_of
from conewise.identity.names import is_data, is_foreign, reached
from conewise.identity.outside import NAMES_OUTSIDE, OUTSIDE
from conewise.identity.short_text import sha, short
from conewise.identity.walk import Walk


def function_text(walk: Walk, value: types.FunctionType) -> str:
    """A function of a library, by its name; of the user's, by its code and all that it reads."""
    library = library_of_file(value.__code__.co_filename)
    is_named = (
        library_of_name(str(value.__module__)) and reached(value.__module__, value.__qualname__) is value
    )
    if library and is_named:
        return f"{value.__module__}.{value.__qualname__} of {library}"
    if library:
        # Made by the library of what it was given: a decorated function, for one.
        held = [walk.at("code", value.__code__), *(text for _, text in _held(walk, value, modules=True))]
        return short(f"{value.__code__.co_qualname} of {library}", ", ".join(held))
    held = [f"{name}={text}" for name, text in _read(walk, value)]
    return f"{value.__name__} {sha(', '.join([walk.at('code', value.__code__), *held]))}"


def function_parts(walk: Walk, function: types.FunctionType) -> dict[str, str]:
    """A function of the user's: its code, and what it reads, by name."""
    walk.enter(function, "function")
    found = {f"def {function.__name__}": walk.at("code", function.__code__)}
    for name, text in _read(walk, function):
        while name in found:  # a global of the same name
            name += "'"  # noqa: PLW2901
        found[name] = text
    return found


def _held(walk: Walk, function: types.FunctionType, *, modules: bool) -> Iterator[tuple[str, str]]:
    """What a function carries with it; `modules`: those that it closes over too, each as a whole."""
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    for name, item in zip(arguments, defaults, strict=True):
        yield f"{name}=", walk.at(f"default {name}", item)
    for name, item in sorted((function.__kwdefaults__ or {}).items()):
        yield f"{name}=", walk.at(f"default {name}", item)
    for name, item in sorted(vars(function).items()):
        yield f".{name}", walk.at(f"attribute {name}", item)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if not _is_filled(cell):
            yield name, "nothing yet"
        elif modules or not isinstance(cell.cell_contents, types.ModuleType):
            yield name, walk.at(name, cell.cell_contents)


def _read(walk: Walk, function: types.FunctionType) -> Iterator[tuple[str, str]]:
    """What a function of the user's carries with it, and what its code reads elsewhere."""
    yield from _held(walk, function, modules=False)
    loads = loads_of(function.__code__)
    for name in sorted(loads.attributes & NAMES_OUTSIDE):
        raise walk.refused(f"{name}, which reads what is no part of the program")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, chains in sorted(loads.cells.items()):
        if _is_filled(cells[name]) and isinstance(cells[name].cell_contents, types.ModuleType):
            yield from _loaded(walk, name, cells[name].cell_contents, chains)
    for name, chains in sorted(loads.globals.items()):
        if name in function.__globals__:
            yield from _loaded(walk, name, function.__globals__[name], chains)
        elif hasattr(builtins, name):
            yield from _loaded(walk, name, getattr(builtins, name), chains)
        elif name not in loads.maybe:
            yield name, "not defined"
    for wanted in loads.imports:
        package = str(function.__globals__.get("__package__") or "")
        name = importlib.util.resolve_name("." * wanted.level + wanted.module, package)
        module = sys.modules.get(name)
        if module is None:
            yield f"import {name}", _not_imported(walk, name)
            continue
        library = library_of_name(name.partition(".")[0])
        if library:
            yield f"import {name}", f"{name} of {library}"  # whether or not it was imported before
        for read, text in _loaded(walk, name, module, {(one,) for one in wanted.names} or {()}):
            if read != name or not library:
                yield read, text


def _not_imported(walk: Walk, name: str) -> str:
    """A module that is imported when the function is called; a library's is known without that."""
    found = importlib.util.find_spec(name.partition(".")[0])
    if found is None:
        return "not there"
    library = library_of_file(found.origin or "")
    if not library:
        raise walk.refused(f"{name}, which it imports when it is called; import it before")
    return f"{name} of {library}"


def _loaded(walk: Walk, name: str, value: object, chains: set[Chain]) -> Iterator[tuple[str, str]]:
    """A value that code reads by name; of a module, the attributes that it reads of it."""
    if not isinstance(value, types.ModuleType):
        if getattr(builtins, name, walk) is not value or id(value) in OUTSIDE:
            yield name, walk.at(name, value)
        return
    if library_of_module(value):
        yield name, module_text(walk, value)
    for chain in sorted(chains):
        whole, rest = name, list(chain)
        read: object = value
        # Not by getattr: a library may import half of itself then.
        while rest and isinstance(read, types.ModuleType) and rest[0] in vars(read):
            read, whole = vars(read)[rest[0]], f"{whole}.{rest.pop(0)}"
        if isinstance(read, types.ModuleType):
            is_library = bool(library_of_module(read))
            if rest and not is_library:
                raise walk.refused(f"{whole}.{rest[0]}, which is not there")
            if not is_library:
                yield whole, walk.at(whole, read)
        elif not library_of_module(value) or id(read) in OUTSIDE or is_foreign(read) or is_data(read):
            yield whole, walk.at(whole, read)


def code_text(_: Walk, value: types.CodeType) -> str:
    """Code, by what it does: where it was written is no part of it."""
    return _code(value)


def _code(value: types.CodeType) -> str:
    parts = (
        *(value.co_code, value.co_consts, value.co_exceptiontable, value.co_flags),
        *(value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars),
        *(value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount),
    )
    return f"code {sha(_constant(parts))}"


def _constant(value: object) -> str:
    """A constant of code; equal ones may or may not be one object."""
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"set({', '.join(sorted(map(_constant, value)))})"
    return repr(value)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
