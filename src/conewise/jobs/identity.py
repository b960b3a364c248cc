"""Identity: a short text for any value or function, so that a change between two runs is noticed.

Equal texts mean equal values: a value is identified by its contents, a function by its code and by all that
its code reads, wherever that lies. What cannot be identified for certain (what is read from a file, an
iterator that is used up, the inside of a foreign object) is refused, and needs a key.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.util
import logging
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import fx

from conewise.errors import ConewiseError, IdentityError
from conewise.jobs.code_identity import (
    BUILT_IN,
    LITERAL,
    NAMES_OUTSIDE,
    NOT_COMPUTED,
    OUTSIDE,
    Chain,
    attributes_of,
    contents_of,
    home_of,
    is_data,
    is_foreign,
    is_python,
    library_of_file,
    library_of_module,
    library_of_name,
    loads_of,
    reached,
)
from conewise.jobs.digests import inputs_digest
from conewise.program.weights import bits_of

LONGEST = 60
"""The number of characters above which a text is shown as its digest."""

_PANDAS = {("pandas.core.frame", "DataFrame"), ("pandas", "DataFrame"), ("pandas", "Series")}
_PANDAS |= {("pandas.core.series", "Series")}

_TENSOR_DIGESTS: dict[tuple[object, ...], str] = {}


class Keyed:
    """A function that goes by a key: its identity is the key alone, whatever its code and its data are."""

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        self.function, self.key = function, key
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.__name__} (key {self.key!r})"


def expect_key(key: object, error: type[ConewiseError]) -> str:
    """Return `key` if it is a text with something in it; else raise `error`."""
    if not isinstance(key, str) or not key.strip():
        raise error(
            f"a key is a text that names a function, such as 'halve the norm, version 2', not {key!r}."
        )
    return key


def identity(value: object) -> str:
    """Return a text that is equal for equal values and functions in every process, and differs for others.

    Raises IdentityError where that cannot be promised.
    """
    with _identity_errors(value):
        return Walk().text(value)


def identified(value: object) -> str | dict[str, str]:
    """Return the identity of a value; for a user's function, of its code and of what it reads, by name."""
    if not isinstance(value, types.FunctionType) or library_of_file(value.__code__.co_filename):
        return identity(value)
    with _identity_errors(value):
        walk = Walk()
        walk.enter(value, "function")
        found = {f"def {value.__name__}": walk.at("code", value.__code__)}
        for name, text in _read(walk, value):
            while name in found:  # a global of the same name
                name += "'"  # noqa: PLW2901
            found[name] = text
        return found


@contextmanager
def _identity_errors(value: object) -> Iterator[None]:
    """Turn whatever an object raises when its attributes are read into an IdentityError."""
    try:
        yield
    except IdentityError:
        raise
    except RecursionError:
        raise IdentityError("", f"a {type(value).__name__} that holds values in values, too deep") from None
    except Exception as error:
        what = f"a {type(value).__name__} that cannot be looked at ({type(error).__name__}: {error})"
        raise IdentityError("", what) from error


def short(kind: str, text: str) -> str:
    """Return a text after its kind; a long one as its digest."""
    text = text if len(text) <= LONGEST else f"~{sha(text)}"
    return f"{kind} {text}".strip()


def sha(text: str) -> str:
    """Return a digest of a text."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


class Walk:
    """One walk over all that a value is made of. A value met again is named by where it was met first."""

    def __init__(self, above: Mapping[int, str] | None = None, where: tuple[str, ...] = ()) -> None:
        self._seen = dict(above or {})
        self.kept: list[object] = []  # a freed object would leave its id to the next one
        self._stack: dict[int, str] = dict(above or {})
        self._where = list(where)

    def text(self, value: object) -> str:
        """Return the identity of a value."""
        if type(value) in LITERAL:
            return short("", repr(value))
        if id(value) in OUTSIDE:
            raise self.refused(f"{OUTSIDE[id(value)]}, which reads or runs what is no part of the program")
        if id(value) in self._seen:
            return f"the {self._seen[id(value)]}"
        self.enter(value, " ".join(self._where) or "value")
        try:
            return _described(self, value)
        finally:
            del self._stack[id(value)]
            if type(value) is tuple:
                # Equal constants may be one object or several: the compiler decides that.
                del self._seen[id(value)]

    def enter(self, value: object, here: str) -> None:
        """Note where a value is met: it may contain itself."""
        self._seen[id(value)] = self._stack[id(value)] = here
        self.kept.append(value)

    def at(self, name: str, value: object) -> str:
        """Return the identity of a value that the current one has under a name."""
        self._where.append(name)
        try:
            return self.text(value)
        finally:
            self._where.pop()

    def items(self, values: Iterable[object]) -> str:
        """Return the identities of values in their order."""
        return ", ".join(self.at(str(index), item) for index, item in enumerate(values))

    def pairs(self, values: Mapping[Any, Any]) -> str:
        """Return the identities of keys and values in their order."""

        def label(key: object, index: int) -> str:
            return repr(key) if type(key) in (str, int) else f"value {index}"

        return ", ".join(
            f"{self.at(f'key {index}', key)}: {self.at(label(key, index), item)}"
            for index, (key, item) in enumerate(values.items())
        )

    def unordered(self, values: Iterable[object]) -> str:
        """Return the identities of values that have no order."""
        # Each in a walk of its own: in another process they come in another order.
        where = tuple(self._where)
        return ", ".join(sorted(Walk(self._stack, where).text(item) for item in values))

    def attributes(self, named: Mapping[str, object]) -> str:
        """Return identities by name: the order in which attributes were set means nothing."""
        return ", ".join(f"{name}={self.at(f'.{name}', item)}" for name, item in sorted(named.items()))

    def refused(self, what: str) -> IdentityError:
        """Return the error that says what cannot be identified, and where it is."""
        return IdentityError(" → ".join(self._where), what)


# -- tensors and arrays ----------------------------------------------------------------------------


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's numbers; a large tensor that has not changed is read once."""
    if tensor.nbytes < 1 << 20:
        return inputs_digest({"": tensor})[:16]
    known = (bits_of([tensor]), tensor.shape, tensor.stride(), tensor.dtype)
    if known not in _TENSOR_DIGESTS:
        _TENSOR_DIGESTS[known] = inputs_digest({"": tensor})[:16]
    return _TENSOR_DIGESTS[known]


# -- functions -------------------------------------------------------------------------------------


def function_text(walk: Walk, value: types.FunctionType) -> str:
    """Identify a function of a library by its name, one of the user's by its code and all that it reads."""
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


def _held(walk: Walk, function: types.FunctionType, *, modules: bool) -> Iterator[tuple[str, str]]:
    """Identify what a function carries with it; with `modules`, also the modules in its closure."""
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
    """Identify what a user's function carries with it, and what its code reads elsewhere."""
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
    """Identify a module that is imported only when the function is called."""
    found = importlib.util.find_spec(name.partition(".")[0])
    if found is None:
        return "not there"
    library = library_of_file(found.origin or "")
    if not library:
        raise walk.refused(f"{name}, which it imports when it is called; import it before")
    return f"{name} of {library}"


def _loaded(walk: Walk, name: str, value: object, chains: set[Chain]) -> Iterator[tuple[str, str]]:
    """Identify a value that code reads by name; of a module, the attributes that the code reads."""
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


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _code(value: types.CodeType) -> str:
    """Identify code by what it does, not by where it was written."""
    parts = (
        *(value.co_code, value.co_consts, value.co_exceptiontable, value.co_flags),
        *(value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars),
        *(value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount),
    )
    return f"code {sha(_constant(parts))}"


def _constant(value: object) -> str:
    """Identify a constant of code; equal ones may or may not be one object."""
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"set({', '.join(sorted(map(_constant, value)))})"
    return repr(value)


def compiled(value: object) -> object:
    """Return what `torch.compile` was given, if `value` is what it returned; else None."""
    held = getattr(value, "__dict__", {})
    if home_of(type(value)).startswith("torch._dynamo"):
        return held.get("_modules", {}).get("_orig_mod")
    return held.get("_torchdynamo_orig_callable") if isinstance(value, types.FunctionType) else None


# -- modules, classes and instances ----------------------------------------------------------------


def module_text(walk: Walk, value: types.ModuleType) -> str:
    """Identify a module of a library by its name, one of the user's by all that it has."""
    library = library_of_module(value)
    if library:
        return f"{value.__name__} of {library}"
    own = {name: item for name, item in vars(value).items() if not name.startswith("__")}
    return short(f"module {value.__name__}", walk.attributes(own))


def object_text(walk: Walk, value: Any) -> str:
    """Identify an instance by its class and all that it holds."""
    kind = type(value)
    if home_of(kind).startswith("conewise.") and hasattr(kind, "identity_parts"):
        return short(kind.__name__, walk.items(value.identity_parts()))
    if (home_of(kind), kind.__name__) in _PANDAS:
        return short(kind.__name__, walk.items(_columns(value)))
    library = library_of_name(home_of(kind))
    if library and hasattr(kind, "__next__"):
        raise _used_up(walk, value)
    parts = [walk.at("class", kind)]
    if isinstance(value, BUILT_IN):
        parts.append(walk.at("contents", contents_of(value)))
    parts.append(walk.attributes(attributes_of(value)))
    if any(not is_python(one) for one in kind.__mro__ if one is not object and one not in BUILT_IN):
        parts.append(_reduced(walk, value))
    return short(kind.__name__, ", ".join(parts))


def _reduced(walk: Walk, value: Any) -> str:
    """Identify an object that is not made in Python by what pickling would keep of it."""
    try:
        found = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - pickling raises whatever the object does
        found = None
    if found is None:
        kind = f"{home_of(type(value))}.{type(value).__qualname__}"
        raise walk.refused(f"a {kind}, of which the inside cannot be seen")
    if isinstance(found, str):
        return found
    function, arguments, *rest = found
    state, items, pairs = [*rest, None, None, None][:3]
    listed = (function, arguments, state, list(items or ()), [list(pair) for pair in pairs or ()])
    walk.kept.append(listed)
    return walk.at("state", listed)


def _columns(table: Any) -> Iterator[object]:
    """Yield a DataFrame or a Series as lists, without what pandas keeps beside them."""
    yield table.index.tolist()
    for index, name in enumerate(table.columns if hasattr(table, "columns") else [table.name]):
        column = table.iloc[:, index] if hasattr(table, "columns") else table
        yield [name, str(column.dtype), column.tolist()]


def _used_up(walk: Walk, value: object) -> IdentityError:
    """Return the error of what can be read only once."""
    return walk.refused(f"a {type(value).__name__}, which is used up as it is read")


# -- the identity of a value, by its type ------------------------------------------------------------

_CACHED = type(functools.lru_cache(len))
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _described(walk: Walk, value: Any) -> str:
    kind = type(value).__name__
    original = compiled(value)
    if original is not None:
        return short("compiled", walk.at("function", original))
    match value:
        case Keyed():
            return f"key {value.key!r}"
        case torch.Tensor():
            if value.is_meta or value.layout is not torch.strided or value.is_quantized:
                where = f"{value.layout}, on {value.device}"
                raise walk.refused(f"a tensor whose numbers cannot be read ({where})")
            digest = f"tensor {_digest(value.resolve_conj().resolve_neg())}"
            if type(value) in (torch.Tensor, torch.nn.Parameter):
                return digest
            return short(f"{walk.at('class', type(value))} {digest}", walk.attributes(vars(value)))
        case np.ndarray() if type(value) in (np.ndarray, np.memmap):
            if value.dtype.hasobject:
                return short(f"array {value.shape}", walk.items(value.ravel().tolist()))
            data = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"array {value.shape} {sha(f'{value.dtype.descr}{data}')}"
        case np.generic() if not value.dtype.hasobject:
            return f"{value.dtype} {value.item()!r}"
        case types.ModuleType():
            return module_text(walk, value)
        case types.FunctionType():
            return function_text(walk, value)
        case types.MethodType():
            return short("method", f"{walk.at('method', value.__func__)}, {walk.at('self', value.__self__)}")
        case types.CodeType():
            return _code(value)
        case functools.partial():
            parts = {"function": value.func, "keywords": value.keywords, **vars(value)}
            parts |= {f"argument {index}": item for index, item in enumerate(value.args)}
            return short("partial", walk.attributes(parts))
        case _ if isinstance(value, _CACHED):
            return short(kind, walk.at("function", value.__wrapped__))
        case torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
            if str(value).partition(".")[0] not in {"aten", "prim", "prims"}:
                raise walk.refused(f"the operation {value}, of which the code cannot be seen")
            return f"operation {value}"
        case fx.GraphModule():
            own = {**value._parameters, **value._buffers, **value._modules}
            return short(f"graph {sha(value.code)}", walk.attributes(own))
        case np.ufunc():
            name = value.__name__
            if getattr(np, name, None) is not value:
                raise walk.refused(f"the ufunc {name}, of which the code cannot be seen")
            return f"numpy.{name} of {library_of_module(np)}"
        case (
            torch.dtype() | torch.device() | torch.layout() | torch.memory_format() | np.dtype() | PurePath()
        ):
            return f"{kind} {value!s}"
        case _ if isinstance(value, _LOCKS):
            return f"lock {kind}"
        case type():
            return _class_text(walk, value)
        case types.BuiltinFunctionType() | types.MethodWrapperType():
            return _builtin_text(walk, value)
        case (
            types.MemberDescriptorType()
            | types.GetSetDescriptorType()
            | types.MethodDescriptorType()
            | types.WrapperDescriptorType()
            | types.ClassMethodDescriptorType()
        ):
            return f"{value.__name__} of {walk.at('class', value.__objclass__)}"
        case property():
            return short("property", walk.items((value.fget, value.fset, value.fdel)))
        case staticmethod() | classmethod():
            return short(kind, walk.at("function", value.__func__))
        case functools.cached_property():
            return short(kind, walk.at("function", value.func))
        case weakref.ReferenceType():
            return short("weakly", walk.at("value", value()))
        case re.Pattern():
            return f"pattern {value.pattern!r} {value.flags}"
        case logging.Logger():
            return f"logger {value.name!r}"  # what it writes is not computed with
        case types.GeneratorType() | types.CoroutineType() | types.AsyncGeneratorType():
            raise _used_up(walk, value)
    if type(value) in (list, tuple):
        return short("", f"[{walk.items(value)}]" if type(value) is list else f"({walk.items(value)})")
    if type(value) in (set, frozenset):
        return short("set", walk.unordered(value))
    if type(value) in (dict, types.MappingProxyType):
        return short("", f"{{{walk.pairs(value)}}}")
    return object_text(walk, value)


def _class_text(walk: Walk, value: type) -> str:
    """Identify a library's class by its name and what was put into it, a user's by all that it has."""
    library = library_of_name(home_of(value))
    if library and reached(value.__module__, value.__qualname__) is value:
        changed = {name: item for name, item in vars(value).items() if is_foreign(item)}
        return short(f"{value.__module__}.{value.__qualname__} of {library}", walk.attributes(changed))
    own = {name: item for name, item in vars(value).items() if name not in NOT_COMPUTED}
    above = (type(value), *value.__bases__)
    parts = [walk.at(f"class {index}", one) for index, one in enumerate(above)]
    return short(f"class {value.__name__}", f"{', '.join(parts)}: {walk.attributes(own)}")


def _builtin_text(walk: Walk, value: Any) -> str:
    """Identify a built-in function by its name and what it is bound to."""
    owner = getattr(value, "__self__", None)
    name = f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    if owner is None or isinstance(owner, types.ModuleType):
        library = library_of_name(str(value.__module__))
        if not library or reached(value.__module__, value.__name__) is not value:
            raise walk.refused(f"the built-in function {name}, of which the code cannot be seen")
        return f"{name} of {library}"
    return short(name, walk.at("self", owner))
