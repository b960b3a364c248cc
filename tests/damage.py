"""Damaged files, for the tests of every door that files come in by: sound ones, changed at random.

The same seed gives the same damage. `CONEWISE_DAMAGE=10000` makes so many of each instead of a few hundred,
and `CONEWISE_DAMAGE_SEED=1` others.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5_000
_MARKS = {"<deep>": DEEP, "<long>": LONG, "<half>": '"\\ud800"', "<nan>": "NaN", "<infinity>": "Infinity"}
"""What JSON has no value for: put in as text, in place of these."""

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e308, 10**9, 10**18, 2**63, -(2**63), 10**30),
    *("", "x", " ", "-1", "1e9", "\x00", "../x", "nan", "é" * 40, "a" * 3_000),
    *([], {}, [[]], [0], [None], {"x": 1}, {"": []}, [[[[[[1]]]]]]),
    *_MARKS,
)


def count(usual: int) -> int:
    """How many to make of a kind: the usual number, or that of the environment."""
    return int(os.environ.get("CONEWISE_DAMAGE", usual))


def drawn_from(seed: str) -> random.Random:
    """Random numbers for a seed, and for that of the environment."""
    return random.Random(f"{os.environ.get('CONEWISE_DAMAGE_SEED', '0')} {seed}")


def damaged_bytes(sound: bytes, number: int, seed: int = 0) -> Iterator[bytes]:
    """So many damaged copies: cut short, bits flipped, parts taken out, doubled, or overwritten."""
    for one in range(number):
        drawn = drawn_from(f"{seed} {one}")
        data = bytearray(sound)
        for _ in range(drawn.choice((1, 1, 1, 2, 5))):
            _damage(data, drawn)
        yield bytes(data)


def damaged_json(sound: Any, number: int, seed: int = 0) -> Iterator[str]:
    """So many texts of a JSON value in which something is missing, of another type, or out of range.

    One in ten is damaged as text instead, so that most are not JSON any more.
    """
    for one in range(number):
        drawn = drawn_from(f"{seed} {one}")
        value = copy.deepcopy(sound)
        for _ in range(drawn.choice((1, 1, 1, 2, 4))):
            value = _changed(value, drawn)
        text = json.dumps(value)
        for mark, instead in _MARKS.items():
            text = text.replace(json.dumps(mark), instead)
        if drawn.random() < 0.1:
            data = bytearray(text[:20_000].encode())
            _damage(data, drawn)
            text = data.decode("utf-8", errors="replace")
        yield text


def _damage(data: bytearray, drawn: random.Random) -> None:
    at = drawn.randrange(len(data) + 1)
    length = drawn.choice((1, 4, 16, 200))
    ways: tuple[Callable[[], None], ...] = (
        lambda: data.__delitem__(slice(at, None)),
        lambda: data.__delitem__(slice(at, at + length)),
        lambda: data.__setitem__(slice(at, at), data[at : at + length]),
        lambda: data.__setitem__(slice(at, at), drawn.randbytes(length)),
        lambda: data.__setitem__(slice(at, at + length), drawn.randbytes(length)),
        lambda: data.__setitem__(slice(at, at + 1), _flipped(data[at : at + 1], 1 << drawn.randrange(8))),
        lambda: data.__setitem__(slice(at, at + 8), b"\xff" * 8),
        lambda: data.__setitem__(slice(at, at + 8), b"\x00" * 8),
    )  # fmt: skip
    drawn.choice(ways)()


def _flipped(data: bytearray, bits: int) -> bytes:
    return bytes(byte ^ bits for byte in data)


def _changed(value: Any, drawn: random.Random) -> Any:
    """The value with one place of it changed, wherever in it that is."""
    holder: Any = None
    key: Any = None
    here = value
    while isinstance(here, dict | list) and here and (holder is None or drawn.random() < 0.8):
        holder, key = here, drawn.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = holder[key]
    if holder is None or drawn.random() < 0.02:
        return copy.deepcopy(drawn.choice(ODD))
    way = drawn.random()
    if way < 0.7:
        holder[key] = copy.deepcopy(drawn.choice(ODD))
    elif way < 0.85:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(drawn.randrange(len(holder) + 1), copy.deepcopy(drawn.choice((here, *ODD))))
    else:
        holder[drawn.choice(("x", "", *holder))] = copy.deepcopy(drawn.choice((here, *ODD)))
    return value
