"""Rules: a record compiled to a plain function of its inputs' values, in their order.

The argument template is turned into source text once, so that a call costs one Python frame
and no walk over the template.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conewise.program.records import SIZES, Record, Ref, SizeRef
from conewise.program.untraced import as_run

Rule = Callable[..., Any]


def compile_rule(record: Record) -> Rule:
    """A function that takes the values at `record.inputs`, in order, and returns the record's.

    It writes to none of them, and it may return a view of one.
    """
    names = {name: f"v{i}" for i, name in enumerate(record.inputs)}
    target = record.target
    if isinstance(target, torch._ops.OpOverload):
        target = as_run(target)
    namespace: dict[str, Any] = {"op": target}
    arguments = [_text(arg, names, namespace) for arg in record.args]
    arguments += [f"{key}={_text(arg, names, namespace)}" for key, arg in record.kwargs.items()]
    code = f"lambda {', '.join(names.values())}: op({', '.join(arguments)})"
    rule: Rule = eval(code, namespace)
    return rule


def _text(template: Any, names: dict[str, str], namespace: dict[str, Any]) -> str:
    """`template` as source text; what has no exact literal is put into `namespace`."""
    match template:
        case Ref(name):
            return names[name]
        case SizeRef(index):
            return f"{names[SIZES]}[{index}]"
        case None | bool() | int() | str():
            return repr(template)
        case list():
            return f"[{', '.join(_text(item, names, namespace) for item in template)}]"
        case tuple():
            return f"({''.join(_text(item, names, namespace) + ', ' for item in template)})"
        case dict():
            items = (f"{key!r}: {_text(item, names, namespace)}" for key, item in template.items())
            return f"{{{', '.join(items)}}}"
        case slice():
            parts = (template.start, template.stop, template.step)
            return f"slice({', '.join(_text(part, names, namespace) for part in parts)})"
        case _:
            constant = f"c{len(namespace)}"
            namespace[constant] = template
            return constant
