"""Threads: one at a time uses a model or runs its module with hooks; garbage collection can be paused.

What the caller has switched on in torch changes no number: `autocast` is off meanwhile, and the default
device is the CPU, but where the module itself runs.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
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


class _Caller(threading.local):
    """The settings of the caller of a job: the default device, None outside of jobs.

    A thread that `is_helping` works for one that holds the turn and the module, and waits for neither.
    """

    device: Any = None
    is_helping = False


_CALLER: Final = _Caller()


def _autocasting(torch: Any) -> list[str]:
    """The kinds of devices for which the caller has switched autocast on."""
    return [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)]


def _has_settings() -> bool:
    """True where the caller has switched on autocast or a default device."""
    torch = sys.modules.get("torch")  # nothing is switched on before it is imported
    if torch is None or not (torch._C._is_any_autocast_enabled() or torch._C._len_torch_function_stack()):
        return False  # every public call looks: a default device is a mode on the stack of functions
    return bool(_autocasting(torch)) or torch.get_default_device().type != "cpu"


@contextmanager
def own_settings() -> Iterator[None]:
    """Neither autocast nor a default device: a tensor lies on the CPU where nothing is said."""
    if not _has_settings():
        yield
        return
    torch, before = sys.modules["torch"], _CALLER.device
    outside = torch.get_default_device()
    with ExitStack() as settings:
        for kind in _autocasting(torch):
            settings.enter_context(torch.autocast(kind, enabled=False))
        if outside.type != "cpu":
            _CALLER.device = outside
            settings.enter_context(torch.device("cpu"))
        try:
            yield
        finally:
            _CALLER.device = before


@contextmanager
def one_module() -> Iterator[None]:
    """Trace a module, or run one with hooks, while no other thread does; threads wait for each other.

    Tracing replaces functions of torch and of transformers for all threads, and several models may be
    captures of one module. What the module makes without saying where lies where the caller has it.
    """
    with ExitStack() as settings:
        if not _CALLER.is_helping:
            settings.enter_context(_MODULES)
        if (torch := sys.modules.get("torch")) is not None:
            for kind in _autocasting(torch):
                settings.enter_context(torch.autocast(kind, enabled=False))
            if _CALLER.device is not None:
                settings.enter_context(_CALLER.device)
        yield


def helping(target: Callable[[], None]) -> threading.Thread:
    """A thread that works for this one, which holds the turn of a model, and waits for its end."""
    device = _CALLER.device

    def run() -> None:
        _CALLER.device, _CALLER.is_helping = device, True
        target()

    return threading.Thread(target=run, daemon=True)


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
    is_method = "." in function.__qualname__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        turn = None if _CALLER.is_helping else (args[0] if args else kwargs["model"])._turn
        if turn is not None and not turn.lock.acquire(blocking=False):
            of = f"{type(args[0]).__name__}." if is_method else ""
            raise BusyError(f"{of}{function.__name__}", "use")
        try:
            if not _has_settings():
                return function(*args, **kwargs)
            with own_settings():
                return function(*args, **kwargs)
        finally:
            if turn is not None:
                turn.lock.release()

    return call  # type: ignore[return-value]
