"""Identity: a short text for any value or function, so that a change of it between two runs is seen.

Equal texts mean the same: a value is identified by its contents, a function by its code and by all that its
code reads, wherever that lies. What cannot be identified for certain (what is read from a file, an iterator
that is used up, the inside of a foreign object) is refused, and has to be given a name.
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
from conewise.identity.digests import inputs_digest
from conewise.identity.instances import BESIDE, BUILT_IN, attributes_of, contents_of, is_python
from conewise.identity.libraries import library_of_file, library_of_module, library_of_name
from conewise.identity.loads import Chain, loads_of
from conewise.identity.outside import NAMES_OUTSIDE, OUTSIDE
from conewise.program.weights import bits_of

LONGEST = 60
"""A longer text is shown as its digest."""


class Keyed:
    """A function that goes by a key: its identity is the key alone, whatever its code and its data are."""

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        self.function, self.key = function, key
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.__name__} (key {self.key!r})"


def expect_key(key: object, error: type[ConewiseError]) -> str:
    """The key, a text that says something; raises `error` for what is none."""
    if not isinstance(key, str) or not key.strip():
        raise error(
            f"a key is a text that names a function, such as 'halve the norm, version 2', not {key!r}."
        )
    return key


def identity(value: object) -> str:
    """Equal values and functions have equal text, in every process, and different ones have different texts.

    Raises IdentityError where that cannot be promised.
    """
    with _looking_at(value):
        return _Walk().text(value)


def identified(value: object) -> str | dict[str, str]:
    """The identity of a value; of a function of the user's, those of its code and of all that it reads."""
    if isinstance(value, types.FunctionType) and not library_of_file(value.__code__.co_filename):
        with _looking_at(value):
            return _Walk().parts(value)
    return identity(value)


@contextmanager
def _looking_at(value: object) -> Iterator[None]:
    """Whatever objects raise when they are looked at: that is no reason to fail, but to refuse."""
    try:
        yield
    except IdentityError:
        raise
    except RecursionError:
        raise IdentityError("", f"a {type(value).__name__} that holds values in values, too deep") from None
    except Exception as error:
        what = f"a {type(value).__name__} that cannot be looked at ({type(error).__name__}: {error})"
        raise IdentityError("", what) from error


_LITERAL = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))


class _Walk:
    """One walk over all that a value is made of. What is met again is named by where it was met first."""

    def __init__(self, above: Mapping[int, str] | None = None, where: tuple[str, ...] = ()) -> None:
        self._seen = dict(above or {})
        self._kept: list[object] = []  # an object that goes would leave its number to the next one
        self._stack: dict[int, str] = dict(above or {})
        self._where = list(where)

    def text(self, value: object) -> str:
        """The identity of a value."""
        if type(value) in _LITERAL:
            return _short("", repr(value))
        if id(value) in OUTSIDE:
            raise self._refused(f"{OUTSIDE[id(value)]}, which reads or runs what is no part of the program")
        if id(value) in self._seen:
            return f"the {self._seen[id(value)]}"
        here = " ".join(self._where) or "value"
        self._seen[id(value)] = self._stack[id(value)] = here
        self._kept.append(value)
        try:
            return self._described(value)
        finally:
            del self._stack[id(value)]
            if type(value) is tuple:
                # Equal constants may be one object or several: that is the compiler's matter.
                del self._seen[id(value)]

    def parts(self, function: types.FunctionType) -> dict[str, str]:
        """A function of the user's: its code, and what it reads, by name."""
        self._seen[id(function)] = self._stack[id(function)] = "function"
        found = {f"def {function.__name__}": self._at("code", function.__code__)}
        for name, text in self._read(function):
            while name in found:  # a global of the same name
                name += "'"  # noqa: PLW2901
            found[name] = text
        return found

    # -- by type -----------------------------------------------------------------------------

    def _described(self, value: Any) -> str:
        compiled = _compiled(value)
        if compiled is not None:
            return _short("compiled", self._at("function", compiled))
        for kinds, describe in _DESCRIBED:
            if isinstance(value, kinds):
                found: str = describe(self, value)
                return found
        if type(value) in (list, tuple):
            return _short("", f"[{self._items(value)}]" if type(value) is list else f"({self._items(value)})")
        if type(value) in (set, frozenset):
            return _short("set", self._unordered(value))
        if type(value) in (dict, types.MappingProxyType):
            return _short("", f"{{{self._pairs(value)}}}")
        return self._object(value)

    def _items(self, values: Iterable[object]) -> str:
        return ", ".join(self._at(str(index), item) for index, item in enumerate(values))

    def _pairs(self, values: Mapping[Any, Any]) -> str:
        return ", ".join(
            f"{self._at(f'key {index}', key)}: {self._at(_label(key, index), item)}"
            for index, (key, item) in enumerate(values.items())
        )

    def _unordered(self, values: Iterable[object]) -> str:
        # Each by itself: in another process they come in another order.
        return ", ".join(sorted(_Walk(self._stack, tuple(self._where)).text(item) for item in values))

    def _tensor(self, value: torch.Tensor) -> str:
        if value.is_meta or value.layout is not torch.strided or value.is_quantized:
            raise self._refused(f"a tensor whose numbers cannot be read ({value.layout}, on {value.device})")
        digest = f"tensor {_digest(value.resolve_conj().resolve_neg())}"
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return digest
        return _short(f"{self._at('class', type(value))} {digest}", self._attributes(vars(value)))

    def _array(self, value: np.ndarray[Any, Any]) -> str:
        if type(value) not in (np.ndarray, np.memmap):
            return self._object(value)
        if value.dtype.hasobject:
            return _short(f"array {value.shape}", self._items(value.ravel().tolist()))
        data = np.ascontiguousarray(value).tobytes()
        return f"array {value.shape} {_sha(f'{value.dtype.descr}{hashlib.sha256(data).hexdigest()}')}"

    def _number(self, value: np.generic) -> str:
        return f"{value.dtype} {value.item()!r}" if not value.dtype.hasobject else self._object(value)

    def _module(self, value: types.ModuleType) -> str:
        library = library_of_module(value)
        if library:
            return f"{value.__name__} of {library}"
        own = {name: item for name, item in vars(value).items() if not name.startswith("__")}
        return _short(f"module {value.__name__}", self._attributes(own))

    def _class(self, value: type) -> str:
        library = library_of_name(_home(value))
        if library and _reached(value.__module__, value.__qualname__) is value:
            changed = {name: item for name, item in vars(value).items() if _is_foreign(item)}
            return _short(f"{value.__module__}.{value.__qualname__} of {library}", self._attributes(changed))
        own = {name: item for name, item in vars(value).items() if name not in BESIDE}
        above = (type(value), *value.__bases__)
        parts = [self._at(f"class {index}", one) for index, one in enumerate(above)]
        return _short(f"class {value.__name__}", f"{', '.join(parts)}: {self._attributes(own)}")

    def _attributes(self, named: Mapping[str, object]) -> str:
        """By name: the order in which attributes were set means nothing."""
        return ", ".join(f"{name}={self._at(f'.{name}', item)}" for name, item in sorted(named.items()))

    def _function(self, value: types.FunctionType) -> str:
        library = library_of_file(value.__code__.co_filename)
        is_named = (
            library_of_name(str(value.__module__)) and _reached(value.__module__, value.__qualname__) is value
        )
        if library and is_named:
            return f"{value.__module__}.{value.__qualname__} of {library}"
        if library:
            # Made by the library of what it was given: a decorated function, for one.
            held = [self._at("code", value.__code__), *(text for _, text in self._held(value, modules=True))]
            return _short(f"{value.__code__.co_qualname} of {library}", ", ".join(held))
        held = [f"{name}={text}" for name, text in self._read(value)]
        return f"{value.__name__} {_sha(', '.join([self._at('code', value.__code__), *held]))}"

    def _held(self, function: types.FunctionType, *, modules: bool) -> Iterator[tuple[str, str]]:
        """What a function carries with it; `modules`: those that it closes over too, each as a whole."""
        code, defaults = function.__code__, function.__defaults__ or ()
        arguments = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
        for name, item in zip(arguments, defaults, strict=True):
            yield f"{name}=", self._at(f"default {name}", item)
        for name, item in sorted((function.__kwdefaults__ or {}).items()):
            yield f"{name}=", self._at(f"default {name}", item)
        for name, item in sorted(vars(function).items()):
            yield f".{name}", self._at(f"attribute {name}", item)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if not _is_filled(cell):
                yield name, "nothing yet"
            elif modules or not isinstance(cell.cell_contents, types.ModuleType):
                yield name, self._at(name, cell.cell_contents)

    def _read(self, function: types.FunctionType) -> Iterator[tuple[str, str]]:
        """What a function of the user's carries with it, and what its code reads elsewhere."""
        yield from self._held(function, modules=False)
        loads = loads_of(function.__code__)
        for name in sorted(loads.attributes & NAMES_OUTSIDE):
            raise self._refused(f"{name}, which reads what is no part of the program")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, chains in sorted(loads.cells.items()):
            if _is_filled(cells[name]) and isinstance(cells[name].cell_contents, types.ModuleType):
                yield from self._loaded(name, cells[name].cell_contents, chains)
        for name, chains in sorted(loads.globals.items()):
            if name in function.__globals__:
                yield from self._loaded(name, function.__globals__[name], chains)
            elif hasattr(builtins, name):
                yield from self._loaded(name, getattr(builtins, name), chains)
            elif name not in loads.maybe:
                yield name, "not defined"
        for wanted in loads.imports:
            package = str(function.__globals__.get("__package__") or "")
            name = importlib.util.resolve_name("." * wanted.level + wanted.module, package)
            module = sys.modules.get(name)
            if module is None:
                yield f"import {name}", self._not_imported(name)
                continue
            library = library_of_name(name.partition(".")[0])
            if library:
                yield f"import {name}", f"{name} of {library}"  # whether or not it was imported before
            for read, text in self._loaded(name, module, {(one,) for one in wanted.names} or {()}):
                if read != name or not library:
                    yield read, text

    def _not_imported(self, name: str) -> str:
        """A module that is imported when the function is called; a library's is known without that."""
        found = importlib.util.find_spec(name.partition(".")[0])
        if found is None:
            return "not there"
        library = library_of_file(found.origin or "")
        if not library:
            raise self._refused(f"{name}, which it imports when it is called; import it before")
        return f"{name} of {library}"

    def _loaded(self, name: str, value: object, chains: set[Chain]) -> Iterator[tuple[str, str]]:
        """A value that code reads by name; of a module, the attributes that it reads of it."""
        if not isinstance(value, types.ModuleType):
            if getattr(builtins, name, self) is not value or id(value) in OUTSIDE:
                yield name, self._at(name, value)
            return
        if library_of_module(value):
            yield name, self._module(value)
        for chain in sorted(chains):
            whole, rest = name, list(chain)
            read: object = value
            # Not by getattr: a library may import half of itself then.
            while rest and isinstance(read, types.ModuleType) and rest[0] in vars(read):
                read, whole = vars(read)[rest[0]], f"{whole}.{rest.pop(0)}"
            if isinstance(read, types.ModuleType):
                is_library = bool(library_of_module(read))
                if rest and not is_library:
                    raise self._refused(f"{whole}.{rest[0]}, which is not there")
                if not is_library:
                    yield whole, self._at(whole, read)
            elif not library_of_module(value) or id(read) in OUTSIDE or _is_foreign(read) or _is_data(read):
                yield whole, self._at(whole, read)

    def _code(self, value: types.CodeType) -> str:
        parts = (
            *(value.co_code, value.co_consts, value.co_exceptiontable, value.co_flags),
            *(value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars),
            *(value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount),
        )
        return f"code {_sha(self._constant(parts))}"

    def _constant(self, value: object) -> str:
        """A constant of code; equal ones may or may not be one object."""
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, tuple):
            return f"({', '.join(map(self._constant, value))})"
        if isinstance(value, frozenset):
            return f"set({', '.join(sorted(map(self._constant, value)))})"
        return repr(value)

    def _method(self, value: types.MethodType) -> str:
        return _short("method", f"{self._at('method', value.__func__)}, {self._at('self', value.__self__)}")

    def _builtin(self, value: Any) -> str:
        owner = getattr(value, "__self__", None)
        name = f"{getattr(value, '__module__', None)}.{value.__qualname__}"
        if owner is None or isinstance(owner, types.ModuleType):
            library = library_of_name(str(value.__module__))
            if not library or _reached(value.__module__, value.__name__) is not value:
                raise self._refused(f"the built-in function {name}, of which the code cannot be seen")
            return f"{name} of {library}"
        return _short(name, self._at("self", owner))

    def _descriptor(self, value: Any) -> str:
        return f"{value.__name__} of {self._at('class', value.__objclass__)}"

    def _partial(self, value: functools.partial[Any]) -> str:
        parts = {"function": value.func, "keywords": value.keywords, **vars(value)}
        parts |= {f"argument {index}": item for index, item in enumerate(value.args)}
        return _short("partial", self._attributes(parts))

    def _wrapped(self, value: Any) -> str:
        return _short(type(value).__name__, self._at("function", value.__wrapped__))

    def _named(self, value: Any) -> str:
        """Values that are nothing but their name, or their text."""
        return f"{type(value).__name__} {value!s}"

    def _operation(self, value: Any) -> str:
        name = str(value)
        if name.partition(".")[0] not in {"aten", "prim", "prims"}:
            raise self._refused(f"the operation {name}, of which the code cannot be seen")
        return f"operation {name}"

    def _ufunc(self, value: np.ufunc) -> str:
        if getattr(np, value.__name__, None) is not value:
            raise self._refused(f"the ufunc {value.__name__}, of which the code cannot be seen")
        return f"numpy.{value.__name__} of {library_of_module(np)}"

    def _graph(self, value: fx.GraphModule) -> str:
        own = {**value._parameters, **value._buffers, **value._modules}
        return _short(f"graph {_sha(value.code)}", self._attributes(own))

    def _keyed(self, value: Keyed) -> str:
        return f"key {value.key!r}"

    def _property(self, value: property) -> str:
        return _short("property", self._items((value.fget, value.fset, value.fdel)))

    def _held_function(self, value: Any) -> str:
        """`staticmethod`, `classmethod` and `cached_property` around a function."""
        function = value.func if isinstance(value, functools.cached_property) else value.__func__
        return _short(type(value).__name__, self._at("function", function))

    def _reference(self, value: Any) -> str:
        return _short("weakly", self._at("value", value()))

    def _pattern(self, value: re.Pattern[Any]) -> str:
        return f"pattern {value.pattern!r} {value.flags}"

    def _logger(self, value: logging.Logger) -> str:
        return f"logger {value.name!r}"  # what it writes is no part of what is computed

    def _lock(self, value: object) -> str:
        return f"lock {type(value).__name__}"

    def _used_up(self, value: object) -> str:
        raise self._refused(f"a {type(value).__name__}, which is used up as it is read")

    # -- any object --------------------------------------------------------------------------

    def _object(self, value: Any) -> str:
        """An instance: its class, and all that it holds."""
        kind = type(value)
        if _home(kind).startswith("conewise.") and hasattr(kind, "identity_parts"):
            return _short(kind.__name__, self._items(value.identity_parts()))
        if (_home(kind), kind.__name__) in _TABLES:
            return _short(kind.__name__, self._items(_columns(value)))
        library = library_of_name(_home(kind))
        if library and hasattr(kind, "__next__"):
            return self._used_up(value)
        parts = [self._at("class", kind)]
        if isinstance(value, BUILT_IN):
            parts.append(self._at("contents", contents_of(value)))
        parts.append(self._attributes(attributes_of(value)))
        if any(not is_python(one) for one in kind.__mro__ if one is not object and one not in BUILT_IN):
            parts.append(self._reduced(value))
        return _short(kind.__name__, ", ".join(parts))

    def _reduced(self, value: Any) -> str:
        """What pickling would keep of an object that is not made in Python."""
        try:
            found = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - pickling raises whatever the object does
            found = None
        if found is None:
            kind = f"{_home(type(value))}.{type(value).__qualname__}"
            raise self._refused(f"a {kind}, of which the inside cannot be seen")
        if isinstance(found, str):
            return found
        function, arguments, *rest = found
        state, items, pairs = [*rest, None, None, None][:3]
        listed = (function, arguments, state, list(items or ()), [list(pair) for pair in pairs or ()])
        self._kept.append(listed)
        return self._at("state", listed)

    # -- where it is -------------------------------------------------------------------------

    def _at(self, name: str, value: object) -> str:
        with self._inside(name):
            return self.text(value)

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        self._where.append(name)
        try:
            yield
        finally:
            self._where.pop()

    def _refused(self, what: str) -> IdentityError:
        return IdentityError(" → ".join(self._where), what)


_LOADED = tuple(
    kind
    for kind in (getattr(torch._ops, name, None) for name in ("OpOverload", "OpOverloadPacket"))
    if kind is not None
)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))

_DESCRIBED: list[tuple[Any, Callable[..., str]]] = [
    (Keyed, _Walk._keyed),
    (torch.Tensor, _Walk._tensor),
    (np.ndarray, _Walk._array),
    (np.generic, _Walk._number),
    (types.ModuleType, _Walk._module),
    (types.FunctionType, _Walk._function),
    (types.MethodType, _Walk._method),
    (types.CodeType, _Walk._code),
    (functools.partial, _Walk._partial),
    (type(functools.lru_cache(len)), _Walk._wrapped),
    (_LOADED, _Walk._operation),
    (fx.GraphModule, _Walk._graph),
    (np.ufunc, _Walk._ufunc),
    ((torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, PurePath), _Walk._named),
    (_LOCKS, _Walk._lock),
    (type, _Walk._class),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _Walk._builtin),
    (
        (
            types.MemberDescriptorType,
            types.GetSetDescriptorType,
            types.MethodDescriptorType,
            types.WrapperDescriptorType,
            types.ClassMethodDescriptorType,
        ),
        _Walk._descriptor,
    ),
    (property, _Walk._property),
    ((staticmethod, classmethod, functools.cached_property), _Walk._held_function),
    (weakref.ref, _Walk._reference),
    (re.Pattern, _Walk._pattern),
    (logging.Logger, _Walk._logger),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _Walk._used_up),
]


_TABLES = {("pandas.core.frame", "DataFrame"), ("pandas", "DataFrame"), ("pandas", "Series")}
_TABLES |= {("pandas.core.series", "Series")}


def _columns(table: Any) -> Iterator[object]:
    """A table or a column of pandas as lists: what it keeps beside them is its own matter."""
    yield table.index.tolist()
    for index, name in enumerate(table.columns if hasattr(table, "columns") else [table.name]):
        column = table.iloc[:, index] if hasattr(table, "columns") else table
        yield [name, str(column.dtype), column.tolist()]


def _home(kind: type) -> str:
    """The name of the module that a class says it is of; a few classes say something else."""
    name: object = kind.__module__
    return name if isinstance(name, str) else ""


_DIGESTS: dict[tuple[object, ...], str] = {}


def _digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's numbers. A large one that was digested before is known by its bits."""
    if tensor.nbytes < 1 << 20:
        return inputs_digest({"": tensor})[:16]
    known = (bits_of([tensor]), tensor.shape, tensor.stride(), tensor.dtype)
    if known not in _DIGESTS:
        _DIGESTS[known] = inputs_digest({"": tensor})[:16]
    return _DIGESTS[known]


def _compiled(value: object) -> object:
    """What was given to `torch.compile`, of what it returned; else None."""
    held = getattr(value, "__dict__", {})
    if _home(type(value)).startswith("torch._dynamo"):
        return held.get("_modules", {}).get("_orig_mod")
    return held.get("_torchdynamo_orig_callable") if isinstance(value, types.FunctionType) else None


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _reached(module: object, path: str) -> object:
    """What is found by the name of a module and a path in it; None where nothing is."""
    found: object = sys.modules.get(str(module))
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _is_data(value: object) -> bool:
    """Whether something that a library has may be a number of the user's, put there."""
    return type(value) in (*_LITERAL, *BUILT_IN) or isinstance(value, torch.Tensor | np.ndarray)


def _is_foreign(value: object) -> bool:
    """Whether something that a library has is a function of the user's own: one that was put there."""
    if not isinstance(value, types.FunctionType):
        return False
    # A method that a library generated has no file, and the names of its module.
    made_in = str(value.__globals__.get("__name__"))
    return not library_of_file(value.__code__.co_filename) and not library_of_name(made_in)


def _label(key: object, index: int) -> str:
    return repr(key) if type(key) in (str, int) else f"value {index}"


def _short(kind: str, text: str) -> str:
    text = text if len(text) <= LONGEST else f"~{_sha(text)}"
    return f"{kind} {text}".strip()


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
