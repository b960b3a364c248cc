"""What differs between two plain values, in short lines that people can read."""

from __future__ import annotations

import re
from typing import Any

LONGEST, MOST = 60, 8


def differences(old: Any, new: Any) -> list[str]:
    """A line `where: old → new` for each place at which two nested dicts and lists differ; at most eight.

    Lists of different length differ as a whole: shown are both, or where they first differ if they are long.
    """
    found = list(_differences(old, new, ""))
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more"]


def _differences(old: Any, new: Any, where: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        lines: list[str] = []
        for key in {**old, **new}:
            place = f"{where}.{key}" if where else str(key)
            if key not in old or key not in new:
                lines.append(f"{place}: {_short(old.get(key))} → {_short(new.get(key))}")
            else:
                lines += _differences(old[key], new[key], place)
        return lines
    if old == new:
        return []
    if isinstance(old, list) and isinstance(new, list):
        if len(old) == len(new):
            pairs = enumerate(zip(old, new, strict=True))
            return [line for place, (a, b) in pairs for line in _differences(a, b, f"{where}[{place}]")]
        if len(repr(old)) <= LONGEST and len(repr(new)) <= LONGEST:
            return [f"{where}: {old} → {new}"]
        first = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
        if first is None:
            first = min(len(old), len(new))
        a, b = (_short(side[first]) if first < len(side) else "nothing" for side in (old, new))
        return [f"{where}: {len(old)} of them → {len(new)}, from number {first} on: {a} → {b}"]
    return [f"{where}: {_short(old)} → {_short(new)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    if re.fullmatch("[0-9a-f]{64}", text):
        return f"{text[:12]}..."
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
