"""The code and the settings of a module: what a trace folds into a program, and what may change after it.

Weights are looked at elsewhere. Here it is hooks, `forward` and other methods, submodules, modules that are
kept in lists, the training flag, and plain values: attributes, what a config holds, what functions read
(globals, also those of other modules, closures, defaults), functions that are looked up by name in such a
global (transformers' attention functions), torch's default dtype.
"""

from __future__ import annotations

import argparse
import hashlib
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from conewise.errors import CaptureError, ModuleChangedError
from conewise.program.walk import bitwise_same
from conewise.threads import one_module

MOST_VALUES = 50_000
"""So many plain values are looked at; what a module holds beyond them is not."""

DEEPEST = 4
"""So many containers and functions deep."""

_PLUMBING = (
    "accelerate.",
    "transformers.configuration_utils",
    "transformers.core_model_loading",
    "transformers.distributed",
    "transformers.dynamic_module_utils",
    "transformers.generation",
    "transformers.integrations.",
    "transformers.loss",
    "transformers.modeling_utils",
    "transformers.utils",
)
"""Functions of these load, train and write text. What they read themselves is looked at, and no function that
they call."""

_PLAIN = type, list, tuple, dict, set, frozenset, types.CellType, types.MethodType, partial, np.ndarray

_RECORDING = ("conewise.", "transformers.utils.output_capturing", "torch.utils.module_tracker")
"""The modules whose hooks change no value: transformers leaves its own on a module that was asked for hidden
states, and torch's counters have theirs while they count."""

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_WEIGHTS = frozenset({"_parameters", "_buffers"})
_TABLES = frozenset({*_WEIGHTS, *_HOOKS, "_modules"})
_MISSING: Any = object()

Key = tuple[str, str]
"""A fact's kind ("hook", "forward", "submodule", "setting") and its place in words."""

Changes = dict[Key, tuple[Any, Any]]
"""The value that was there, and the one that is there now."""


class ModuleState:
    """The state of a module when it was captured, its weights apart.

    `is_same_program` traces the module again, and says whether that gives the captured program: of values
    that differ, most have no effect. It is told where they are, and asked once for each change that is found.
    """

    def __init__(
        self, module: nn.Module, name: str, is_same_program: Callable[[Collection[str]], bool]
    ) -> None:
        self._module, self._name, self._is_same_program = module, name, is_same_program
        self._refused: Changes = {}
        self._take()

    def expect_captured(self) -> None:
        """Raise ModuleChangedError, and name what changed, where the module now computes something else."""
        if not self.is_untouched():
            self._expect_same_program()

    @one_module()  # another thread may run the module with hooks, or trace it
    def _expect_same_program(self) -> None:
        if self.is_untouched():
            return
        changes = self._changes()
        # Tracing takes long, and it calls hooks, which may keep what they are given.
        is_refused = any(what == "hook" for what, _ in changes) or (
            changes.keys() == self._refused.keys()
            and all(new is self._refused[key][1] for key, (_, new) in changes.items())
        )
        if changes and (is_refused or not self._is_same(changes)):
            self._refused = changes
            raise ModuleChangedError(self._name, _told(changes))
        self._take()

    def expect_stateless(self) -> None:
        """Raise CaptureError where a forward of the module has changed what the next one computes."""
        changes = {} if self.is_untouched() else self._changes()
        if changes and not self._is_same(changes):
            raise CaptureError(
                f"{self._name} computes something else each time that it runs, since its forward changes "
                f"what it reads: {'; '.join(_told(changes)[:4])}. A graph computes the same each time: "
                "keep the count outside of the module, or give it as an input. What is computed once, and "
                "then kept, is there from the start where the module ran once before the capture."
            )
        if changes:
            self._take()

    def _is_same(self, changes: Changes) -> bool:
        return self._is_same_program([where for _, where in changes])

    def _changes(self) -> Changes:
        """The differences from the last time that the module was found to be what was captured."""
        now = _Look(self._module).found
        keys = sorted(self._found.keys() | now.keys(), key=_by_rank)
        pairs = {key: (self._found.get(key, _MISSING), now.get(key, _MISSING)) for key in keys}
        return {key: (old, new) for key, (old, new) in pairs.items() if not _is_equal(old, new)}

    def _take(self) -> None:
        self._refused = {}
        look = _Look(self._module)
        self._found, self._parts, self._views, self._empty = look.found, look.parts, look.views, look.empty
        # By column: a look is taken at every job and at each reading, and in C.
        globals_ = [(known, name) for known, names in look.globals.values() for name in names]
        self._globals = [known for known, _ in globals_], [name for _, name in globals_]
        self._reads = [one.get for one in look.reads], [one.holder for one in look.reads]
        self._lengths, self._objects = list(map(len, self._views)), list(self._held())

    def _held(self) -> Iterator[Any]:
        read = chain.from_iterable(map(operator.call, *self._reads))
        every = chain.from_iterable(self._views)
        known = map(dict.get, *self._globals)
        return chain((torch.get_default_dtype(),), map(type, self._parts), known, read, every)

    def is_untouched(self) -> bool:
        """True if every object is the very same: a quick look, before each job and at each reading."""
        if any(self._empty) or list(map(len, self._views)) != self._lengths:
            return False
        try:
            return all(map(operator.is_, self._held(), self._objects))
        except (AttributeError, ValueError):  # an attribute is gone, or a cell of a closure empty
            return False


class Unbuilt:
    """The state of a module that is not built yet: nothing of it can have changed, but what holds for all."""

    def __init__(self, build: Callable[[], object]) -> None:
        self._build, self._dtype = build, torch.get_default_dtype()

    def is_untouched(self) -> bool:
        """True if no setting changed that the module may follow."""
        return torch.get_default_dtype() == self._dtype and not is_hooked_everywhere()

    def expect_captured(self) -> None:
        """Build the module where a setting changed that it may follow; then it is looked at itself."""
        if not self.is_untouched():
            self._build()

    def expect_stateless(self) -> None:
        """Do nothing: no forward has run."""


def is_hooked_everywhere() -> bool:
    """True if hooks on all modules are in force."""
    return any(getattr(torch_module, f"_global{table}", None) for table in _HOOKS)


_ORIGINS = "_object_hash", "name_or_path", "_commit_hash"
"""Settings of transformers that say where a configuration came from."""


def digest_of_state(module: nn.Module) -> str:
    """A digest of all that is looked at in a module: code, settings, types; of other objects their types.

    It is the same in every process where the same code makes the same module.
    """
    found = _Look(module).found
    own = [key for key in found if not key[1].endswith(_ORIGINS)]
    lines = sorted(f"{key[0]} {key[1]} {_described(found[key])}" for key in own)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _described(value: Any) -> str:
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            return f"{type(value).__name__} {value!r}"
        case torch.dtype() | torch.device() | torch.Size() | _Bits():
            return str(value) + (value.data.hex() if isinstance(value, _Bits) else "")
        case types.CodeType():
            inner = [_described(one) for one in value.co_consts]
            return f"{value.co_name} {value.co_code.hex()} {value.co_names} {value.co_varnames} {inner}"
        case types.FunctionType():
            return f"{value.__module__}.{value.__qualname__} {_described(value.__code__)}"
        case type():
            return f"type {value.__module__}.{value.__qualname__}"
        case types.ModuleType():
            return f"module {value.__name__}"
        case tuple() | list():
            return f"{type(value).__name__} {[_described(one) for one in value]}"
        case set() | frozenset():
            return f"{type(value).__name__} {sorted(map(_described, value))}"
        case Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1) if not value.is_meta else torch.empty(0)
            bits = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
            return f"{value.dtype} {tuple(value.shape)} {bits}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def changed_beside(module: nn.Module, parts: Iterable[str], changed: Iterable[str]) -> bool:
    """True if a change is one of the module itself, beside these parts; globals are none of it."""
    own = {"the module", *vars(module), *module._modules} - set(parts)
    return any(where.strip("'").partition(".")[0].partition("[")[0] in own for where in changed)


class _Look:
    """A walk over a module. `found` has every leaf, by what it is and where.

    `parts` are the modules, `views` live views of all that holds leaves, `reads` those of attributes,
    `globals` the globals that functions read, and `empty` the tables of hooks without any.
    """

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[Key, Any] = {}
        self.parts: list[nn.Module] = []
        self.views: list[Any] = []
        self.reads: list[_Read] = []
        self.globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self.empty: list[Any] = []
        self._seen: set[int] = set()
        self._read: set[tuple[int, tuple[str, ...]]] = set()
        self.found["setting", "torch.get_default_dtype()"] = torch.get_default_dtype()
        for table, kind in _HOOKS.items():
            self._hooks(getattr(torch_module, f"_global{table}", {}), f"global {kind}")
        self._modules("", module)

    def _modules(self, path: str, module: nn.Module, *, is_hidden: bool = False) -> None:
        """A module and its submodules; one that is hidden is in no table, but in a list, for one."""
        named = module.named_modules(prefix=path)
        fresh = [(name, part) for name, part in named if id(part) not in self._seen]
        self._seen.update(id(part) for _, part in fresh)
        for name, part in fresh:
            self._part(name, part)
            if is_hidden:
                for weight, value in chain(part._parameters.items(), part._buffers.items()):
                    self.found["setting", f"{name}.{weight}"] = value

    def _part(self, path: str, part: nn.Module) -> None:
        held, where = vars(part), repr(path) if path else "the module"
        self.parts.append(part)
        self.views.append(held.values())
        self.found["submodule", where] = type(part)
        for table, kind in _HOOKS.items():
            self._hooks(held.get(table, {}), f"{kind} on {where}")
        for table in ("_parameters", "_buffers"):
            self.views.append(held[table].values())
            for name, value in held[table].items():
                self.found["setting", repr(f"{path}.{name}".lstrip("."))] = value is None
        self.views.append(held["_modules"].values())
        for name, child in held["_modules"].items():
            if child is None:
                self.found["submodule", repr(f"{path}.{name}".lstrip("."))] = None
        prefix = f"{path}." if path else ""
        for name, value in list(held.items()):
            if name == "forward":
                self.found["forward", where] = value
            elif name not in _TABLES and not (name.startswith("_") and "_hook" in name):
                self._value(f"{prefix}{name}", value, 0)
        self._class(type(part))

    def _hooks(self, table: Mapping[int, Any], where: str) -> None:
        """Note every hook that may change a value."""
        if not table:
            self.empty.append(table)
            return
        self.views.append(table.values())
        for number, hook in enumerate(hook for hook in table.values() if not _only_records(hook)):
            self.found["hook", f"{where}{f' ({number + 1})' if number else ''}"] = hook

    def _value(self, where: str, value: Any, depth: int) -> None:
        """A plain value, or what it holds: containers, configs, functions and what they read, modules."""
        if len(self.found) > MOST_VALUES:
            return
        if isinstance(value, nn.Module):
            if id(value) not in self._seen:
                self._modules(where, value, is_hidden=True)
            return
        if isinstance(value, type):
            self._class(value)
        inner = None if depth > DEEPEST else _inside(value)
        if inner is None:
            self.found["setting", where] = value
        if inner is None or id(value) in self._seen:
            return
        self._seen.add(id(value))
        view, names = inner
        if isinstance(view, _Read) and view.is_full:
            self.reads.append(view)
        elif not isinstance(value, tuple | frozenset):  # what these hold stays
            self.views.append(view)
        deeper = depth if isinstance(value, types.CellType | types.MethodType | partial) else depth + 1
        for name, held in zip(names, view, strict=True):
            self._value(f"{where}{name}", held, deeper)
        if isinstance(value, types.FunctionType):
            self.found["setting", where] = value
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self._value(f"{where}: {name}", cell, depth)
            is_last = value.__module__.startswith(_PLUMBING)
            self._globals(value.__globals__, _names(value.__code__), DEEPEST + 1 if is_last else depth + 1)
        elif not isinstance(value, _PLAIN):
            self._class(type(value))

    def _class(self, kind: type) -> None:
        """The methods and values that a class has, and the globals that its methods read."""
        for one in kind.__mro__:
            if id(one) in self._seen or _is_foreign(one):
                continue
            self._seen.add(id(one))
            self.views.append(vars(one).values())
            for name, value in list(vars(one).items()):
                where = f"{one.__module__}.{one.__qualname__}"
                if name.startswith("__") and name != "__call__":
                    continue  # Python keeps things there, as copying does
                if name == "forward":
                    self.found["forward", where] = value
                else:
                    self.found["setting", f"{where}.{name}"] = value
                inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(inner, types.FunctionType | dict | list | tuple):
                    self._value(f"{where}.{name}", inner, 1)

    def _globals(self, known: dict[str, Any], names: Iterable[str], depth: int) -> None:
        names = tuple(names)
        read = {name: None for name in names if name in known}
        self.globals.setdefault(id(known), (known, {}))[1].update(read)
        for name in read:
            where, value = f"{known.get('__name__')}.{name}", known[name]
            if isinstance(value, types.ModuleType) and not _is_foreign_name(value.__name__):
                if depth <= DEEPEST and (id(value), names) not in self._read:
                    self._read.add((id(value), names))
                    self._globals(vars(value), names, depth + 1)
            elif isinstance(value, types.ModuleType | type):
                self.found["setting", where] = value
                if isinstance(value, type) and depth <= DEEPEST and not _is_foreign(value):
                    self.views.append(vars(value).values())
                    held = (one for one in vars(value) if not one.startswith("__"))
                    self.found |= {("setting", f"{where}.{one}"): vars(value)[one] for one in held}
            else:
                self._registry(name, value, depth)
                self._value(where, value, depth)

    def _registry(self, name: str, value: Any, depth: int) -> None:
        """The functions of a registry, as transformers has one of attention functions by name."""
        if isinstance(value, dict) or not isinstance(value, MutableMapping):
            return
        for table in (*vars(type(value)).values(), *vars(value).values()):
            if isinstance(table, dict):
                self._value(name, table, depth)


class _Read:
    """A live view of attributes: those that are there, and `_MISSING` for the others.

    `get(holder)` reads them and the class; it fails where not all are there, as they are if `is_full`.
    """

    __slots__ = ("_names", "get", "holder", "is_full")

    def __init__(self, holder: Any, names: tuple[str, ...]) -> None:
        self.holder, self._names, self.get = holder, names, operator.attrgetter(*names, "__class__")
        # A slot, or a cell of a closure, may hold nothing yet.
        self.is_full = all(one is not _MISSING for one in self)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return (_attribute(self.holder, name) for name in self._names)


@dataclass(frozen=True, slots=True)
class _Bits:
    """The bits of an array, as a text of them for a message."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes

    def __repr__(self) -> str:
        return f"an array {self.shape}"


class _ArrayView:
    """A live view of the bits of an array: the same object for as long as no bit of it changes."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self._bits = array, _bits_of(array)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[_Bits]:
        now = _bits_of(self._array)
        return iter([self._bits if now == self._bits else now])


def _bits_of(array: np.ndarray[Any, Any]) -> _Bits:
    return _Bits(array.shape, str(array.dtype), array.tobytes())


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, _MISSING)
    except ValueError:  # a cell of a closure that holds nothing yet
        return _MISSING


def _names(code: types.CodeType) -> dict[str, None]:
    """The names of globals and attributes that a function reads, and the functions inside of it."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return dict.fromkeys(chain(code.co_names, *map(_names, inner)))


def _by_rank(key: Key) -> tuple[int, int, str]:
    """The order in a message: hooks first, then the outermost parts."""
    return ("hook", "forward", "submodule", "setting").index(key[0]), key[1].count("."), key[1]


def _inside(value: Any) -> tuple[Any, list[str]] | None:
    """A view of what is inside of a container, a config or a function, and the names; None for a leaf."""
    if isinstance(value, dict):
        return value.values(), [f"[{key!r}]" for key in value]
    if isinstance(value, list | tuple):
        return value, [f"[{at}]" for at in range(len(value))]
    if isinstance(value, set | frozenset):
        return value, [f"[{one!r}]" for one in value]
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else (_ArrayView(value), [""])
    if isinstance(value, types.CellType):
        return _Read(value, ("cell_contents",)), [""]
    if isinstance(value, partial):
        names: tuple[str, ...] = ("func", "args", "keywords")
    elif isinstance(value, types.MethodType):
        names = "__func__", "__self__"
    elif isinstance(value, types.FunctionType):
        names = () if _is_foreign_name(value.__module__) else ("__code__", "__defaults__", "__kwdefaults__")
    elif _is_config(value):
        if hasattr(value, "__dict__"):
            return vars(value).values(), [f".{name}" for name in vars(value)]
        names = tuple(name for kind in type(value).__mro__ for name in _slots(kind))
    else:
        names = ()
    return (_Read(value, names), [f".{name}" for name in names]) if names else None


def _is_config(value: Any) -> bool:
    """True for an object with attributes that is no class, module or tensor, and none of Python's own."""
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    return not isinstance(value, Tensor | type | types.ModuleType) and not _is_foreign(type(value))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_foreign(kind: type) -> bool:
    """True for a class of Python, torch or ours: these are not changed between two jobs."""
    return _is_foreign_name(kind.__module__)


def _is_foreign_name(module: str | None) -> bool:
    """True for a module of Python, torch, NumPy or ours, by its name."""
    package = (module or "").partition(".")[0]
    return package in {"torch", "conewise", "numpy"} or (
        package != "__main__" and package in sys.stdlib_module_names
    )


def _only_records(hook: Any) -> bool:
    """True for hooks that change no value: ours act for a moment, others record outputs or count."""
    return str(getattr(hook, "__module__", "")).startswith(_RECORDING)


def _is_equal(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, Tensor):
        return bitwise_same(old, new)
    try:
        return bool(old == new)
    except Exception:  # noqa: BLE001  # an object compares itself as it likes
        return False


def _told(changes: Changes) -> list[str]:
    """Changes in words."""
    told: list[str] = []
    inside: tuple[str, ...] = ()
    for (what, where), (old, new) in changes.items():  # the outer ones come first
        if where.startswith(inside):
            continue  # a function that was replaced reads other values
        inside = (*inside, f"{where}.", f"{where}:", f"{where}[")
        if what == "hook":
            how = "removed" if new is _MISSING else "added" if old is _MISSING else "replaced"
            told.append(f"a {where} was {how} ({_shown(old if new is _MISSING else new)})")
        elif what == "forward":
            told.append(f"`forward` of {where} was replaced")
        else:
            told.append(f"{where}: {_shown(old)} → {_shown(new)}")
    return told


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    named = getattr(value, "__qualname__", None)
    text = (
        str(named)
        if named
        else f"a tensor {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
