"""Files that are written whole or not at all, read within bounds, and marked with their format."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conewise.errors import FormatError, LoadError
from conewise.version import __version__

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there with all its bytes, or not at all, whenever the process dies.

    The bytes go to a fresh file beside it, under a name that nobody can know before, which then takes its
    place. A link is followed: what it leads to is replaced, and the link stays. Raises OSError, and leaves
    nothing behind, where that cannot be, or where something stands that is no regular file.
    """
    target, mode = _target(path)
    partial = _fresh_name(target.parent)
    try:
        with partial.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except FileExistsError:
        raise  # then it is somebody else's
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def expect_file(path: Path) -> None:
    """`write_whole` can write there, as far as can be known before; raises OSError if not."""
    target, _ = _target(path)
    expect_room(target.parent)


MARKS = (b'<meta name="generator" content="conewise">', b'<span class="mark">conewise<', b'class="cw-svg"')
"""Marks of pages and pictures of conewise; the second is that of pages without the first."""


def expect_replaceable(path: Path) -> None:
    """Raise FileExistsError where a page would replace a file with something in it that is none of ours."""
    _target(path)
    if path.exists() and (data := path.read_bytes()) and not any(mark in data for mark in MARKS):
        raise FileExistsError(errno.EEXIST, "it holds something else than a page of conewise", str(path))


def expect_room(folder: Path) -> None:
    """Files can be made in a folder; raises OSError if not."""
    probe = _fresh_name(folder)
    try:
        probe.open("xb").close()
    except FileExistsError:
        raise
    except BaseException:
        probe.unlink(missing_ok=True)
        raise
    probe.unlink()


def is_leftover(path: Path) -> bool:
    """True if a file is what a killed process left of its writing."""
    return path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)


_PREFIX, _SUFFIX = ".conewise-", ".partial"


def _fresh_name(folder: Path) -> Path:
    # Short, whatever the name of the file: a name has 255 bytes.
    return folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"


def _target(path: Path) -> tuple[Path, int | None]:
    """Return where a file of this name is written, links followed, and the permissions of the present one."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "it is a link that leads nowhere", str(path)) from None
        return path, None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and only a regular file is replaced", str(path))
    return Path(os.path.realpath(path)), stat.S_IMODE(mode) & 0o777


# Half of a surrogate pair; and one that is escaped, which is the only way into a JSON text.
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS = np.array([1 if byte in b"[{" else -1 for byte in range(256)])
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

DEEPEST = 100
"""The greatest depth of nested JSON: none that is read here is a tenth as deep."""


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


def cache_folder() -> Path:
    """`$CONEWISE_CACHE`, or `$XDG_CACHE_HOME/conewise`, or `~/.cache/conewise`."""
    if own := os.environ.get("CONEWISE_CACHE"):
        return as_path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return as_path(shared) / "conewise"
    try:
        return Path.home() / ".cache" / "conewise"
    except RuntimeError:
        raise LoadError(
            "this user has no home folder, so there is none for the cache. Name one in the environment "
            "variable CONEWISE_CACHE."
        ) from None


def is_there(path: Path, kind: Callable[[Path], bool]) -> bool:
    """True if `path` is of a kind, as `Path.is_dir`; False where it cannot be looked at, or cannot be."""
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
    """True if a JSON value is nested deeper than `DEEPEST`, so that a walk down it may not come back."""
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


KIND, VERSION, WRITER = "kind", "format", "conewise"
"""The keys of a file that say what it is, of which version, and which conewise wrote it."""

MOST = 1_000
"""No format ever gets as far: a larger number was not written by any conewise."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file. `version` is the one that is written; all from `oldest` to it are read.

    A version goes up where a reader of the one before would misread the file, or could not read it. What is
    added, and may be ignored, leaves it as it is: names that are not known are not looked at.
    """

    kind: str
    version: int
    oldest: int = 1

    def header(self, *, writer: bool = True) -> dict[str, Any]:
        """Return the header of a file of this kind; without `writer`, equal values have equal files."""
        own = {KIND: self.kind, VERSION: self.version}
        return {**own, WRITER: __version__} if writer else own

    def expect(self, found: Any, name: str) -> Mapping[str, Any]:
        """Return what was read from the file `name`, which is of this kind, and of a version that is read.

        Raises as `expect_version`, and ValueError for what is no such file at all.
        """
        if not isinstance(found, Mapping):
            raise ValueError("it is not an object")
        if found.get(KIND) != self.kind:
            known = found.get(KIND)
            said = f"says that it is {known!r:.40}" if isinstance(known, str) else "does not say what it is"
            raise ValueError(f"it {said}, where {KIND}: {self.kind!r} is expected")
        version = found.get(VERSION)
        self.expect_version(version, name, found.get(WRITER))
        return found

    def expect_version(self, version: object, name: str, writer: object = None) -> None:
        """Raise FormatError for a version that is not read; `writer` is the conewise that wrote it, if known.

        What cannot be a version raises ValueError, which says so in a few words: the file is damaged.
        """
        if type(version) is not int or not 1 <= version <= MOST:
            raise ValueError(f"its {VERSION} is {version!r:.40}, where a whole number from 1 is expected")
        if self.oldest <= version <= self.version:
            return
        known = f" {writer:.20}" if isinstance(writer, str) else ""
        read = f"{self.oldest} to {self.version}" if self.oldest < self.version else f"{self.version}"
        if version > self.version:
            remedy = f"A newer conewise{known} wrote it: `pip install -U conewise`, then it can be read"
        else:
            remedy = f"An older conewise{known} wrote it, which can still read it"
        raise FormatError(
            f"{name} is a {self.kind!r} of format {version}, and conewise {__version__} reads format "
            f"{read}. It was left as it is. {remedy}."
        )
