"""The outputs of a program: the nodes they are made of, and the structure the module returns them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from conewise.program.records import Program, Ref, SizeRef


def assembled(program: Program, values: Mapping[str, Any], sizes: Sequence[Any]) -> Any:
    """The module's output in its own structure, from the values of the program's outputs.

    `sizes` are those of the run: a module may return one of them as a number.
    """
    missing = [name for name in output_names(program) if name not in values]
    assert not missing, missing
    return partly_assembled(program, values, sizes)


def output_names(program: Program) -> tuple[str, ...]:
    """The sites that the module's outputs are made of."""
    return tuple(dict.fromkeys(out.name for out in program.outputs if isinstance(out, Ref)))


def field_names(program: Program, field: str) -> tuple[str, ...] | None:
    """The sites that one field of the outputs is made of; None where the outputs have no such field."""
    numbered = tree_unflatten(list(range(len(program.outputs))), program.output_spec)
    if field not in _fields(numbered):
        return None
    found = program.outputs
    leaves = [found[i] for i in tree_flatten(field_of(numbered, field))[0] if isinstance(i, int)]
    return tuple(dict.fromkeys(out.name for out in leaves if isinstance(out, Ref)))


def field_of(outputs: Any, field: str) -> Any:
    """One field of the outputs: an entry of a dictionary, an attribute of a dataclass or named tuple."""
    return outputs[field] if isinstance(outputs, Mapping) else getattr(outputs, field)


def partly_assembled(program: Program, values: Mapping[str, Any], sizes: Sequence[Any]) -> Any:
    """The module's output with None for what is not among `values`."""

    def leaf(out: Any) -> Any:
        match out:
            case Ref(name):
                return values.get(name)
            case SizeRef(index):
                return sizes[index]
            case _:
                return out

    return tree_unflatten([leaf(out) for out in program.outputs], program.output_spec)


def described_fields(program: Program) -> str:
    """The outputs' fields in words, for messages."""
    numbered = tree_unflatten(list(range(len(program.outputs))), program.output_spec)
    return (
        ", ".join(_fields(numbered))
        or f"one {'tensor' if isinstance(numbered, int) else type(numbered).__name__}"
    )


def _fields(outputs: Any) -> tuple[str, ...]:
    if isinstance(outputs, Mapping):
        return tuple(str(key) for key in outputs)
    names: Iterable[str] = getattr(outputs, "_fields", getattr(outputs, "__dataclass_fields__", ()))
    return tuple(names)
