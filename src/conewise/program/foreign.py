"""Failures of the libraries that read models: whatever they raise becomes one error of ours."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

from conewise.errors import ConewiseError, OutOfMemoryError, is_out_of_memory
from conewise.extras import needs

_HUB = logging.getLogger("huggingface_hub")


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Keep log lines and all else from stderr inside the block; progress bars are shown only with `bars`."""
    with needs("hf"):
        import transformers.utils  # noqa: PLC0415

    library: Any = transformers.utils.logging  # it is not typed
    before = (library.get_verbosity(), _HUB.level, library.is_progress_bar_enabled())

    def put_back() -> None:
        verbosity, level, has_bars = before
        library.set_verbosity(verbosity)
        _HUB.setLevel(level)
        if has_bars:
            library.enable_progress_bar()

    with ExitStack() as stack:
        try:
            library.set_verbosity_error()
            _HUB.setLevel(logging.ERROR)
            if not bars:
                library.disable_progress_bar()
                # The reader of GGUF files draws a bar that no setting turns off.
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
        finally:
            try:
                put_back()
            except BaseException:  # interrupted: once more, for the user's own logs would be gone
                put_back()
                raise


@contextmanager
def translating(
    translate: Callable[[BaseException], ConewiseError], *, doing: str | None = None
) -> Iterator[None]:
    """Raise `translate(error)` for what fails in the block; OutOfMemoryError where `doing` it lacks memory.

    transformers, tokenizers, safetensors and torch raise over bad files what comes up: errors of two dozen
    classes, bare `Exception`s, and the panics of Rust, which are not even `Exception`s. Our own errors, and
    what stops a program, pass as they are.
    """
    try:
        yield
    except ConewiseError:
        raise
    except Exception as error:
        if doing is not None and is_out_of_memory(error):
            raise OutOfMemoryError(doing, error) from error
        raise translate(error) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise translate(error) from error


@contextmanager
def within_memory(doing: str) -> Iterator[None]:
    """Raise OutOfMemoryError where memory runs out in the block, with the notes that were left on the way."""
    try:
        yield
    except ConewiseError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        short = OutOfMemoryError(doing, error)
        for note in getattr(error, "__notes__", ()):
            short.add_note(note)
        raise short from error


def is_panic(error: BaseException) -> bool:
    """True if this is a panic of a library that is written in Rust; its class cannot be imported."""
    return type(error).__name__ == "PanicException"


def brief(error: BaseException) -> str:
    """An error in one line: its class, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    shown = lines[0] if lines else ""
    if len(lines) > 1 and shown.endswith(":"):
        shown = f"{shown} {lines[1].strip()}"
    shown = shown if len(shown) <= 400 else f"{shown[:397]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
