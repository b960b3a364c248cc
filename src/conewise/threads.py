"""Threads: one at a time uses a model or runs its module with hooks; garbage collection can be paused."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, Final, TypeVar

from conewise.errors import BusyError


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector of cycles: it would look at all objects of the process again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


C = TypeVar("C")

_MODULES: Final = threading.RLock()
_DEVICES: Final = ("cpu", "cuda")


class Turn:
    """The turn of the thread that uses a model, which holds `lock`, and may take it again."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()  # a copy of a model is another model


def _autocasting() -> list[str]:
    """The kinds of devices for which the caller has switched autocast on."""
    torch = sys.modules.get("torch")  # nothing casts before it is imported
    return [] if torch is None else [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)]


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as off:
        for kind in _autocasting():
            off.enter_context(sys.modules["torch"].autocast(kind, enabled=False))
        yield


@contextmanager
def one_module() -> Iterator[None]:
    """Trace a module, or run one with hooks, while no other thread does; threads wait for each other.

    Tracing replaces functions of torch and of transformers for all threads, and several models may be
    captures of one module.
    """
    with _MODULES, _without_autocast():
        yield


def one_thread(target: C) -> C:
    """Let a function run only while no other thread uses its model; of a class, every public method.

    The model is that of the first argument, by its `_turn`; where that is None, there is no model. A job
    has the turn from its start to its end, so that no other thread can break it.
    """
    if isinstance(target, type):
        for name, member in list(vars(target).items()):
            if name.startswith("_") and name not in {"__getitem__", "__getattr__", "__enter__", "__exit__"}:
                continue
            if isinstance(member, FunctionType):
                setattr(target, name, one_thread(member))
        return target
    function: Any = target
    action = function.__qualname__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        turn = (args[0] if args else kwargs["model"])._turn
        if turn is None:
            return function(*args, **kwargs)
        lock = turn.lock
        if not lock.acquire(blocking=False):
            raise BusyError(action, "use")
        try:
            if not _autocasting():
                return function(*args, **kwargs)
            with _without_autocast():
                return function(*args, **kwargs)
        finally:
            lock.release()

    return call  # type: ignore[return-value]
