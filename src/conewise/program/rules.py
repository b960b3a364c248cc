"""Rules: a record compiled to a plain function of its inputs' values, in their order.

The argument template is turned into source text once, so that a call costs one Python frame
and no walk over the template.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from conewise.program.records import SIZES, Record, Ref, SizeRef
from conewise.program.untraced import as_run

Rule = Callable[..., Any]


def compile_rule(record: Record) -> Rule:
    """A function that takes the values at `record.inputs`, in order, and returns the record's.

    It writes to none of them, and it may return a view of one. Records of one form share it.
    """
    target, code, constants = form_of(record)
    if isinstance(target, torch._ops.OpOverload):
        target = (None if record.kwargs else DIRECT.get(target)) or as_run(target)
    if all(isinstance(constant, PLAIN) for constant in constants):
        return _compiled(target, code, tuple(map(_Exact, constants)))
    return _evaluated(target, code, constants)


_aten = torch.ops.aten
DIRECT: Mapping[Callable[..., Any], Callable[..., Any]] = {
    _aten.view.default: torch.Tensor.view,
    _aten.reshape.default: torch.reshape,
    _aten.transpose.int: torch.transpose,
    _aten.permute.default: torch.permute,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.layer_norm.default: torch.layer_norm,
}
"""The same operations, where torch has a shorter way to them: for views the way is most of their cost."""


def form_of(record: Record) -> tuple[Callable[..., Any], str, tuple[Any, ...]]:
    """What a record computes from its inputs, whatever their names: target, source text, its constants."""
    names = {name: f"v{i}" for i, name in enumerate(record.inputs)}
    constants: list[Any] = []
    arguments = [_text(arg, names, constants) for arg in record.args]
    arguments += [f"{key}={_text(arg, names, constants)}" for key, arg in record.kwargs.items()]
    code = f"lambda {', '.join(names.values())}: op({', '.join(arguments)})"
    return record.target, code, tuple(constants)


PLAIN = (float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Constants that say all of themselves when they are shown, and hold no memory."""


class _Exact:
    """A plain constant, equal to those alone that are shown alike: 0.0 is not -0.0."""

    __slots__ = ("shown", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.shown = value, repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Exact) and self.shown == other.shown

    def __hash__(self) -> int:
        return hash(self.shown)


@functools.lru_cache(maxsize=4096)
def _compiled(target: Callable[..., Any], code: str, constants: tuple[_Exact, ...]) -> Rule:
    return _evaluated(target, code, [constant.value for constant in constants])


def _evaluated(target: Callable[..., Any], code: str, constants: Sequence[Any]) -> Rule:
    namespace = {"op": target} | {f"c{place}": constant for place, constant in enumerate(constants)}
    rule: Rule = eval(code, namespace)
    return rule


def _text(template: Any, names: dict[str, str], constants: list[Any]) -> str:
    """`template` as source text; what has no exact literal is put into `constants`."""
    match template:
        case Ref(name):
            return names[name]
        case SizeRef(index):
            return f"{names[SIZES]}[{index}]"
        case None | bool() | int() | str():
            return repr(template)
        case list():
            return f"[{', '.join(_text(item, names, constants) for item in template)}]"
        case tuple():
            return f"({''.join(_text(item, names, constants) + ', ' for item in template)})"
        case dict():
            items = (f"{key!r}: {_text(item, names, constants)}" for key, item in template.items())
            return f"{{{', '.join(items)}}}"
        case slice():
            parts = (template.start, template.stop, template.step)
            return f"slice({', '.join(_text(part, names, constants) for part in parts)})"
        case _:
            constants.append(template)
            return f"c{len(constants) - 1}"
