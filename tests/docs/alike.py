"""Whether two texts are alike: equal but for white space, and the last digits of numbers."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def is_alike(stored: str, now: str) -> bool:
    """Whether two texts are alike: numbers with a decimal point may differ by one in the last place.

    Other machines round differently; counts are exact on all of them.
    """
    texts = [" ".join(_NUMBER.sub("#", text).split()) for text in (stored, now)]
    numbers = zip(_NUMBER.findall(stored), _NUMBER.findall(now), strict=False)
    return texts[0] == texts[1] and all(one == other or _is_near(one, other) for one, other in numbers)


def _is_near(one: str, other: str) -> bool:
    digits, _, power = one.replace(",", "").partition("e")
    _, point, decimals = digits.partition(".")
    unit = 10.0 ** (int(power or 0) - len(decimals))
    return bool(point) and abs(float(one.replace(",", "")) - float(other.replace(",", ""))) < 1.01 * unit
