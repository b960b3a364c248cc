"""The scripts and Python agree on what pages send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

import pytest

from tests.javascript.sent_types import WRITTEN, declarations, interface, typescript


class Inner(TypedDict):
    """A dictionary in another one."""

    text: str


class Sent(TypedDict):
    """One of everything."""

    numbers: Sequence[int | None]
    pair: tuple[str, bool]
    maybe: NotRequired[float]
    inner: Mapping[str, Inner]


def test_the_scripts_types_are_those_of_python() -> None:
    """If this fails, run `python -m tests.javascript.sent_types`, then `make lint-js`."""
    assert WRITTEN.read_text(encoding="utf-8") == declarations()


def test_types_are_those_of_json() -> None:
    assert interface(Sent).splitlines()[1:-1] == [
        "  numbers: (number | null)[];",
        "  pair: [string, boolean];",
        "  maybe?: number;",
        "  inner: Record<string, Inner>;",
    ]


@pytest.mark.parametrize("hint", [bytes, complex, set[int], Mapping[bool, int], object])
def test_what_json_does_not_have_is_refused(hint: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent as JSON"):
        typescript(hint)
