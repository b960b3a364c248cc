"""Text and JSON that someone else wrote, read within bounds."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

# Half of a surrogate pair; and one that is escaped, which is the only way into a JSON text.
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS = np.array([1 if byte in b"[{" else -1 for byte in range(256)])
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

DEEPEST = 100
"""How deep JSON may be nested: none that is read here is a tenth as deep."""


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, and nothing else, where it has none that can be used.

    That is a `json.JSONDecodeError` where it is not JSON. Otherwise the message says in a few words what is
    wrong: it is too deep, a number is too long, or half of a surrogate pair stands alone.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:  # what else there is: Python's limit, against numbers that take minutes to read
        digits = sys.get_int_max_str_digits()
        raise ValueError(f"it holds a whole number of more than {digits:,} digits") from None
    if _is_deep(text, found):
        raise ValueError("it is nested too deeply")
    if _ESCAPED_SURROGATE.search(text) and (half := _surrogate_in(found)) is not None:
        raise ValueError(f"it holds half of a surrogate pair, \\u{ord(half):04x}, which is no character")
    return found


def read_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8. Raises OSError where it cannot be read, else as `parse_json`."""
    return parse_json(path.read_text(encoding="utf-8"))


def read_bounded(path: Path, most: int) -> bytes | None:
    """The bytes of a file, or of what is no file (a pipe, a device); None where there are more than `most`.

    Raises OSError where it cannot be read, or is nothing that could be.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except ValueError as error:  # a name with a zero byte in it
        raise OSError(22, str(error)) from None
    return data if len(data) <= most else None


def as_path(given: str | Path) -> Path:
    """A path as people write it: `~` is their home; that of a person who is not known stays as it is."""
    path = Path(given)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def is_there(path: Path, kind: Callable[[Path], bool]) -> bool:
    """Whether `path` is of a kind, as `Path.is_dir`; it is not where it cannot be looked at, or cannot be."""
    try:
        return kind(path)
    except (OSError, ValueError):  # a name that is too long, a folder that is not ours, a zero byte
        return False


def lone_surrogate(text: str) -> str | None:
    """The first half of a surrogate pair that stands alone in `text`; None where all are characters.

    No file takes such a text. An argument of a command has them where its bytes are not UTF-8.
    """
    found = _SURROGATE.search(text)
    return None if found is None else found[0]


def _is_deep(text: str, value: Any) -> bool:
    """Whether a JSON value is nested deeper than `DEEPEST`, so that what walks down it may not come back."""
    brackets = np.frombuffer(text.encode("utf-8", "surrogatepass").translate(None, _NO_BRACKETS), np.uint8)
    # Brackets in texts count too, so this may be too much; the value itself is looked at where it is.
    if not brackets.size or int(np.cumsum(_STEPS[brackets]).max()) <= DEEPEST:
        return False
    level = [value]
    for _ in range(DEEPEST):
        level = [item for one in level for item in _inside(one)]
    return any(isinstance(one, dict | list) for one in level)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _surrogate_in(value: Any) -> str | None:
    """The first lone surrogate in any text of a JSON value, keys included."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if (found := lone_surrogate(item)) is not None:
                return found
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
    return None
