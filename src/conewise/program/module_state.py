"""The code and the settings of a module: what a trace folds into a program, and what may change after it.

Weights are looked at elsewhere. Here it is hooks, `forward` and other methods, submodules, the training flag,
and plain values: attributes, what a config holds, globals that methods read, functions that are looked up by
name in such a global (transformers' attention functions).
"""

from __future__ import annotations

import argparse
import operator
import sys
import types
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from conewise.errors import CaptureError, ModuleChangedError
from conewise.program.walk import bitwise_same
from conewise.threads import one_module

MOST_VALUES = 50_000
"""So many plain values are looked at; what a module holds beyond them is not."""

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
"""What it is ("hook", "forward", "submodule", "setting"), and where, in words."""

Changes = dict[Key, tuple[Any, Any]]
"""What was there, and what is there now."""


class ModuleState:
    """What a module was when it was captured, its weights apart.

    `is_same_program()` traces the module again, and says whether that gives the captured program: of values
    that differ, most have no effect. It is asked once for each change that is found.
    """

    def __init__(self, module: nn.Module, name: str, is_same_program: Callable[[], bool]) -> None:
        self._module, self._name, self._is_same_program = module, name, is_same_program
        self._refused: Changes = {}
        self._take()

    def expect_captured(self) -> None:
        """Raise ModuleChangedError, and name what changed, where the module now computes something else."""
        if not self._is_untouched():
            self._expect_same_program()

    @one_module()  # another thread may run the module with hooks, or trace it
    def _expect_same_program(self) -> None:
        if self._is_untouched():
            return
        changes = self._changes()
        # Tracing takes long, and it calls hooks, which may keep what they are given.
        is_refused = any(what == "hook" for what, _ in changes) or (
            changes.keys() == self._refused.keys()
            and all(new is self._refused[key][1] for key, (_, new) in changes.items())
        )
        if changes and (is_refused or not self._is_same_program()):
            self._refused = changes
            raise ModuleChangedError(self._name, _told(changes))
        self._take()

    def expect_stateless(self) -> None:
        """Raise CaptureError where a forward of the module has changed what the next one computes."""
        changes = {} if self._is_untouched() else self._changes()
        if changes and not self._is_same_program():
            raise CaptureError(
                f"{self._name} computes something else each time that it runs, since its forward changes "
                f"what it reads: {'; '.join(_told(changes)[:4])}. A graph computes the same each time: "
                "keep the count outside of the module, or give it as an input."
            )
        if changes:
            self._take()

    def _changes(self) -> Changes:
        """What differs from the last time that the module was found to be what was captured."""
        now = _Look(self._module).found
        keys = sorted(self._found.keys() | now.keys(), key=_by_rank)
        pairs = {key: (self._found.get(key, _MISSING), now.get(key, _MISSING)) for key in keys}
        return {key: (old, new) for key, (old, new) in pairs.items() if not _is_equal(old, new)}

    def _take(self) -> None:
        self._refused = {}
        look = _Look(self._module)
        self._found, self._parts, self._views, self._empty = look.found, look.parts, look.views, look.empty
        self._globals = [(known, tuple(names)) for known, names in look.globals.values()]
        self._lengths, self._objects = list(map(len, self._views)), self._held()

    def _held(self) -> list[Any]:
        read = [known.get(name) for known, names in self._globals for name in names]
        return [*map(type, self._parts), *read, *chain.from_iterable(self._views)]

    def _is_untouched(self) -> bool:
        """True if every object is the very same: a quick look, before each job and at each reading."""
        if any(self._empty) or list(map(len, self._views)) != self._lengths:
            return False
        return all(map(operator.is_, self._held(), self._objects))


class _Look:
    """A walk over a module. `found` has every leaf, by what it is and where.

    `parts` are the modules, `views` live views of all that holds leaves, `globals` the globals that methods
    read, and `empty` the tables of hooks without any.
    """

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[Key, Any] = {}
        self.parts: list[nn.Module] = []
        self.views: list[Any] = []
        self.globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self.empty: list[Any] = []
        self._seen: set[int] = set()
        for table, kind in _HOOKS.items():
            self._hooks(getattr(torch_module, f"_global{table}", {}), f"global {kind}")
        for path, part in module.named_modules():
            self._part(path, part)

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
        for name, value in held.items():
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
        if len(self.found) > MOST_VALUES or isinstance(value, nn.Module):
            return
        if isinstance(value, type):
            self._class(value)
        inner = _inside(value)
        if inner is None or depth > 4:
            self.found["setting", where] = value
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            view, names = inner
            self.views.append(view)
            for name, held in zip(names, view, strict=True):
                self._value(f"{where}{name}", held, depth + 1)
            if not isinstance(value, type | list | tuple | dict | set | frozenset):
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
                code = getattr(value, "__code__", None)
                if code is not None:
                    self._globals(value.__globals__, code.co_names)

    def _globals(self, known: dict[str, Any], names: Sequence[str]) -> None:
        read = {name: None for name in names if name in known}
        self.globals.setdefault(id(known), (known, {}))[1].update(read)
        self.found |= {("setting", f"{known.get('__name__')}.{name}"): known[name] for name in read}
        for name in read:
            self._registry(name, known[name])

    def _registry(self, name: str, value: Any) -> None:
        """The functions of a registry, as transformers has one of attention functions by name."""
        if isinstance(value, dict) or not isinstance(value, MutableMapping) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        for table in (*vars(type(value)).values(), *vars(value).values()):
            if isinstance(table, dict):
                self.views.append(table.values())
                self.found |= {("setting", f"{name}[{key!r}]"): held for key, held in table.items()}


def _by_rank(key: Key) -> tuple[int, int, str]:
    """What stands first in a message: hooks, then the outermost parts."""
    return ("hook", "forward", "submodule", "setting").index(key[0]), key[1].count("."), key[1]


def _inside(value: Any) -> tuple[Any, list[str]] | None:
    """A view of the values inside of a plain container or a config, and their names; None for a leaf."""
    if isinstance(value, dict):
        return value.values(), [f"[{key!r}]" for key in value]
    if isinstance(value, list | tuple):
        return value, [f"[{at}]" for at in range(len(value))]
    if isinstance(value, set | frozenset):
        return value, [f"[{one!r}]" for one in value]
    is_config = isinstance(value, types.SimpleNamespace | argparse.Namespace) or not (
        isinstance(value, type) or callable(value) or _is_foreign(type(value))
    )
    if is_config and hasattr(value, "__dict__"):
        return vars(value).values(), [f".{name}" for name in vars(value)]
    return None


def _is_foreign(kind: type) -> bool:
    """Whether a class belongs to Python or torch, or to us: these are not changed between two jobs."""
    package = kind.__module__.partition(".")[0]
    return package in {"torch", "conewise"} or (package != "__main__" and package in sys.stdlib_module_names)


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
    told = []
    for (what, where), (old, new) in changes.items():
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
