"""Keys: the names that functions go by, whatever their code is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conewise.errors import ConewiseError


class Keyed:
    """A function that goes by a key: its identity is the key alone, whatever its code and its data are."""

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        self.function, self.key = function, key
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.__name__} (key {self.key!r})"


def expect_key(key: object, error: type[ConewiseError]) -> str:
    """The key, a text that says something; raises `error` for what is none."""
    if not isinstance(key, str) or not key.strip():
        raise error(
            f"a key is a text that names a function, such as 'halve the norm, version 2', not {key!r}."
        )
    return key
