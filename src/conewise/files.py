"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

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
"""What pages and pictures of conewise hold; the second is that of pages without the first."""


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
    """Whether a file is what a killed process left of its writing."""
    return path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)


_PREFIX, _SUFFIX = ".conewise-", ".partial"


def _fresh_name(folder: Path) -> Path:
    # Short, whatever the name of the file: a name has 255 bytes.
    return folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"


def _target(path: Path) -> tuple[Path, int | None]:
    """Where a file of this name is written, links followed, and the permissions of the one that is there."""
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
