"""Amounts of memory, as people write and read them."""

from __future__ import annotations

from contextlib import suppress

from conewise.errors import SweepError

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def as_bytes(given: int | str | None) -> int | None:
    """A number of bytes, or text like "2GiB" or "500 MB"."""
    if given is None:
        return None
    amount = 0
    if isinstance(given, int) and not isinstance(given, bool):
        amount = given
    elif isinstance(given, str):
        text = given.strip().lower().replace(" ", "")
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        with suppress(ValueError, KeyError, OverflowError):
            amount = int(float(number) * UNITS[text[len(number) :] or "b"])
    if amount < 1:
        raise SweepError(f"{given!r} is no amount of memory; write a number of bytes, or '2GiB', '500MB'.")
    return amount


def shown_bytes(count: int | None) -> str:
    """Bytes as people read them."""
    if count is None:
        return "no limit"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
