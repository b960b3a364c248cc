"""Failures of the libraries that read models: whatever they raise becomes one error of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from conewise.errors import ConewiseError, OutOfMemoryError, is_out_of_memory


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
    """Whether this is a panic of a library that is written in Rust; its class cannot be imported."""
    return type(error).__name__ == "PanicException"


def brief(error: BaseException) -> str:
    """An error in one line: its class, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    shown = lines[0] if lines else ""
    if len(lines) > 1 and shown.endswith(":"):
        shown = f"{shown} {lines[1].strip()}"
    shown = shown if len(shown) <= 400 else f"{shown[:397]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
