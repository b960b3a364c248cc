"""Run a program once and keep only some of its values: each other value goes after its last use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.utils._pytree import tree_unflatten

from conewise.frontends.torch.records import Program, Ref
from conewise.frontends.torch.rules import compile_rule


def stream(program: Program, sources: Mapping[str, Any], keep: Collection[str]) -> dict[str, Any]:
    """The values of `keep`, of a run with these inputs and sizes; computes only what they need."""
    readers: dict[str, list[str]] = {}
    needed = set(keep)
    for record in reversed(program.records):
        if record.name in needed:
            needed.update(record.inputs)
    last_use: dict[str, str] = {}
    for record in program.records:
        if record.name in needed:
            last_use.update(dict.fromkeys(record.inputs, record.name))
    for name, reader in last_use.items():
        readers.setdefault(reader, []).append(name)
    values: dict[str, Any] = {source.name: source.value for source in program.sources}
    values.update(sources)
    kept: dict[str, Any] = {}
    for record in program.records:
        if record.name not in needed:
            continue
        value = compile_rule(record)(*[values[name] for name in record.inputs])
        values[record.name] = value
        if record.name in keep:
            kept[record.name] = value
        del value
        for name in readers.get(record.name, ()):
            del values[name]
    return kept


def assembled(program: Program, values: Mapping[str, Any]) -> Any:
    """The module's output in its own structure, from the values of the program's outputs."""
    leaves = [values[out.name] if isinstance(out, Ref) else out for out in program.outputs]
    return tree_unflatten(leaves, program.output_spec)
