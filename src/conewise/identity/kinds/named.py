"""Values that stand for something by a name, a text or what they refer to."""

from __future__ import annotations

import logging
import re
from typing import Any

from conewise.identity.keyed import Keyed
from conewise.identity.short_text import short
from conewise.identity.walk import Walk


def named_text(_: Walk, value: Any) -> str:
    """Values that are nothing but their name, or their text."""
    return f"{type(value).__name__} {value!s}"


def keyed_text(_: Walk, value: Keyed) -> str:
    """A function with a key, by the key alone."""
    return f"key {value.key!r}"


def reference_text(walk: Walk, value: Any) -> str:
    """A weak reference, by what it refers to."""
    return short("weakly", walk.at("value", value()))


def pattern_text(_: Walk, value: re.Pattern[Any]) -> str:
    """A regular expression."""
    return f"pattern {value.pattern!r} {value.flags}"


def logger_text(_: Walk, value: logging.Logger) -> str:
    """A logger, by its name: what it writes is no part of what is computed."""
    return f"logger {value.name!r}"


def lock_text(_: Walk, value: object) -> str:
    """A lock, which holds nothing."""
    return f"lock {type(value).__name__}"
