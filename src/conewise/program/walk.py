"""The walk: compute records of a program in order, and drop each value after its last use.

A walk is planned once, from what it starts with to what it is asked for, and run over the values of any run.
Baselines, checks, the lens, readers of edges, forwards with removed edges and gradients are walks. The
wavefront (`sweeps/execution/wavefront.py`) follows a pass instead, which is a walk with stacks of worlds that
grow from step to step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from conewise.program.records import SIZES, Program, Record, Ref, SizeRef
from conewise.program.untraced import as_run
from conewise.reactive.graph import Graph

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
    _aten.linear.default: torch.nn.functional.linear,
}
"""The same operations, where torch has a shorter way to them: for views the way is most of their cost.

Quantised weights know `linear` by the name that modules call it by.
"""


def form_of(record: Record) -> tuple[Callable[..., Any], str, tuple[Any, ...]]:
    """Return what a record computes, whatever its inputs are called: target, source text, constants."""
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


def build_graph(program: Program) -> Graph:
    """The graph of `program`, under the program's own names.

    Parameters, buffers and constants are sources with their values; inputs and `SIZES` are
    sources without one, which each run sets. Demand under `torch.no_grad()`: the sources are the
    module's own tensors.
    """
    graph = Graph()
    for source in program.sources:
        graph.source(source.name, source.value, param=source.is_parameter)
    for leaf in program.inputs:
        graph.source(leaf.name)
    graph.source(SIZES)
    for record in program.records:
        graph.node(record.name, compile_rule(record), record.inputs)
    return graph


def run_sources(program: Program, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the values that a run sets: its inputs and its sizes, by source name.

    Raises InputMismatchError when the shapes do not fit what was captured.
    """
    given = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    return {**inputs, SIZES: program.sizes.of(program.symbols_of(given))}


def bitwise_same(old: object, new: object) -> bool:
    """True if two values are equal bit for bit: dtype, shape and every element, NaN equal to NaN."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.dtype != new.dtype or old.shape != new.shape or old.device != new.device:
            return False
        return torch.equal(_bits(old), _bits(new))
    if isinstance(old, tuple | list) and isinstance(new, tuple | list):
        return len(old) == len(new) and all(map(bitwise_same, old, new))
    return type(old) is type(new) and bool(old == new)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:
        # One element of a larger tensor counts as contiguous, whatever its stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


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
    numbered = program.numbered_outputs
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

    return program.returned([leaf(out) for out in program.outputs])


def described_fields(program: Program) -> str:
    """The outputs' fields in words, for messages."""
    numbered = program.numbered_outputs
    return (
        ", ".join(_fields(numbered))
        or f"one {'tensor' if isinstance(numbered, int) else type(numbered).__name__}"
    )


def _fields(outputs: Any) -> tuple[str, ...]:
    if isinstance(outputs, Mapping):
        return tuple(str(key) for key in outputs)
    names: Iterable[str] = getattr(outputs, "_fields", getattr(outputs, "__dataclass_fields__", ()))
    return tuple(names)


Read = Callable[[str], Any]
"""The value of a name that a walk does not compute: a weight, an input, a value of the run it starts from."""


@dataclass(frozen=True, slots=True)
class WalkStep:
    """One value: what it reads and by which rule. After it, the values of `drop` are read no more."""

    node: str
    inputs: tuple[str, ...]
    rule: Rule
    drop: tuple[str, ...] = ()


Compute = Callable[[WalkStep, list[Any], dict[str, Any]], Any]
"""The value of a step, given its operands and the values that are held: for edits, gradients, relevance."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Steps in order. `records` counts the records that they compute; a fused step computes several."""

    steps: tuple[WalkStep, ...]
    records: int

    def run(self, values: dict[str, Any], read: Read, compute: Compute | None = None) -> dict[str, Any]:
        """Add the value of each step to `values`, which holds what the walk starts with, and return them.

        Names that are not among the values are read with `read`. `compute` replaces the call of a step's
        rule.
        """
        for step in self.steps:
            operands = [values[name] if name in values else read(name) for name in step.inputs]
            values[step.node] = step.rule(*operands) if compute is None else compute(step, operands, values)
            for name in step.drop:
                del values[name]
        return values


def between(
    program: Program,
    starts: Collection[str],
    targets: Iterable[str],
    members: Collection[str] | None = None,
    *,
    cut: bool = True,
) -> list[Record]:
    """Return the records that depend on `starts` and that `targets` depend on, in order.

    The starts are not among them, nor what lies before them; without `cut`, those are that depend on others.
    With `members`, only paths through these count.
    """
    found, moved = [], set(starts)
    for record in support(program, targets, starts if cut else ()):
        if (members is None or record.name in members) and not moved.isdisjoint(record.inputs):
            moved.add(record.name)
            found.append(record)
    return found


def support(program: Program, targets: Iterable[str], cut: Collection[str] = ()) -> list[Record]:
    """Return the records that `targets` depend on, themselves included, in order; not past those of `cut`."""
    records, found, queue = program.record_of, set(cut), list(targets)
    while queue:
        name = queue.pop()
        if name in records and name not in found:
            found.add(name)
            queue += records[name].inputs
    return [records[name] for name in sorted(found.difference(cut), key=program.order.__getitem__)]


def plan_walk(
    steps: Iterable[tuple[str, tuple[str, ...], Rule]],
    keep: Collection[str],
    starts: Collection[str] = (),
    *,
    also_reads: Mapping[str, str] | None = None,
    records: int | None = None,
) -> Walk:
    """Plan the walk over `steps`, which are (node, inputs, rule) in order.

    What it computes and its `starts` are dropped after their last use, except for the names of `keep`.
    `also_reads` are values that steps read beside their inputs.
    """
    listed, also = list(steps), also_reads or {}
    held = {node for node, _, _ in listed}.union(starts).difference(keep)
    reads = ((node, (*inputs, also[node]) if node in also else inputs) for node, inputs, _ in listed)
    drops = dropped_after(reads, held.__contains__)
    made = (WalkStep(node, inputs, rule, tuple(drops.get(node, ()))) for node, inputs, rule in listed)
    return Walk(tuple(made), len(listed) if records is None else records)


def dropped_after(
    reads: Iterable[tuple[str, Sequence[str]]], is_held: Callable[[str], bool]
) -> dict[str, list[str]]:
    """For each step, given in order with what it reads: what is held, and read by no later step."""
    last: dict[str, str] = {}
    for node, read in reads:
        for name in read:
            last[name] = node
    found: dict[str, list[str]] = {}
    for name, node in last.items():
        if is_held(name):
            found.setdefault(node, []).append(name)
    return found


def stream(graph: Graph, sources: Mapping[str, Any], keep: Collection[str]) -> dict[str, Any]:
    """Return the values of `keep` in a run of `graph` with these sources, holding no others for long."""
    table = graph.table
    order = table.sorted(
        node for node in table.support(graph.numbers(keep), ()) if table.rules[node] is not None
    )
    steps = ((graph.name(node), graph.names(table.inputs[node]), table.rules[node]) for node in order)
    walk = plan_walk(((name, inputs, rule) for name, inputs, rule in steps if rule is not None), keep)
    values = walk.run(dict(sources), lambda name: graph.default(graph.number(name)))
    return {name: values[name] for name in keep if name in values}


class Interpreter:
    """Runs a program record by record, without an engine: the reference that a world must equal."""

    def __init__(self, program: Program) -> None:
        self.program = program
        steps = ((record.name, record.inputs, compile_rule(record)) for record in program.records)
        self._walk = plan_walk(steps, program.record_of)

    @torch.no_grad()
    def values(
        self,
        inputs: Mapping[str, torch.Tensor],
        patches: Mapping[str, Any] | None = None,
        edits: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> dict[str, Any]:
        """Return every value of a run by name: sources, inputs, sizes and records.

        A name in `patches` has that value in place of its own; one in `edits` has what the function makes
        of the value that it would have had.
        """
        given, changed = patches or {}, edits or {}
        values: dict[str, Any] = {**self.program.source_values, **run_sources(self.program, dict(inputs))}
        for name in changed.keys() & values.keys():
            values[name] = changed[name](values[name])

        def compute(step: WalkStep, operands: list[Any], _: dict[str, Any]) -> Any:
            value = given[step.node] if step.node in given else step.rule(*operands)
            return changed[step.node](value) if step.node in changed else value

        return self._walk.run(values, values.__getitem__, compute if given or changed else None)

    def output(self, values: Mapping[str, Any]) -> Any:
        """Return the module's output in its own structure."""
        return assembled(self.program, values, values[SIZES])
