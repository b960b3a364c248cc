"""What pages send to their scripts, as TypeScript: `python -m tests.javascript.sent_types` writes it.

Types of JSON alone: what has no counterpart there is refused.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from conewise.report import sent

WRITTEN = Path(__file__).parents[2] / "src" / "conewise" / "javascript" / "sent.d.ts"
HEAD = (
    "// What pages send to their scripts; `python -m tests.javascript.sent_types` writes it, from Python's."
)
UNIONS = (Union, types.UnionType)
PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", types.NoneType: "null"}


def declarations() -> str:
    """Every dictionary that is sent, as an interface."""
    found = [one for one in vars(sent).values() if is_typeddict(one) and one.__module__ == sent.__name__]
    return "\n\n".join([HEAD, *map(interface, found)]) + "\n"


def interface(sent_type: Any) -> str:
    """One dictionary."""
    hints = get_type_hints(sent_type, include_extras=True)
    lines = [_property(name, hint) for name, hint in hints.items()]
    return "\n".join([f"export interface {sent_type.__name__} {{", *lines, "}"])


def _property(name: str, hint: Any) -> str:
    if get_origin(hint) is NotRequired:
        return f"  {name}?: {typescript(get_args(hint)[0])};"
    return f"  {name}: {typescript(hint)};"


def typescript(hint: Any) -> str:
    """A type of Python as TypeScript writes it. Raises TypeError for one that JSON does not have."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if is_typeddict(hint):
        return str(hint.__name__)
    if origin is Literal:
        return " | ".join(f'"{one}"' for one in inner)
    if origin in UNIONS:
        return " | ".join(map(typescript, inner))
    if origin is Sequence:
        element = typescript(inner[0])
        return f"({element})[]" if get_origin(inner[0]) in UNIONS else f"{element}[]"
    if origin is tuple and Ellipsis not in inner:
        return f"[{', '.join(map(typescript, inner))}]"
    if origin is Mapping and inner[0] in (str, int):  # numbers as keys are texts in JSON
        return f"Record<{PLAIN[inner[0]]}, {typescript(inner[1])}>"
    raise TypeError(f"{hint} cannot be sent as JSON, or not as that alone.")


if __name__ == "__main__":
    WRITTEN.write_text(declarations(), encoding="utf-8")
