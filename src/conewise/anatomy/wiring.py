"""A program as a graph: what depends on what, affine stretches, and the calls of modules."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx, int8, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from conewise.anatomy.placements import Placements, placements_of
from conewise.program.records import (
    ADDITIONS,
    CONCATENATIONS,
    CONTRACTIONS,
    CONVOLUTIONS,
    LOOKUPS,
    NORMS,
    NUMBER_KEEPING,
    REARRANGEMENTS,
    RECURRENT,
    SCALINGS,
    SELECTIONS,
    SIZES,
    ModuleCall,
    ModulePort,
    Program,
    Record,
    Ref,
)
from conewise.program.sizes import Size


def reached(starts: Iterable[str], onward: Callable[[str], Iterable[str]]) -> dict[str, None]:
    """The names that are reached from `starts`, which are among them, by steps that `onward` gives."""
    found = dict.fromkeys(starts)
    left = list(found)
    while left:
        fresh = [name for name in onward(left.pop()) if name not in found]
        found.update(dict.fromkeys(fresh))
        left += fresh
    return found


class Wiring:
    """Answers questions about a program's graph; made once per program, changes nothing."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.records, self.order = program.record_of, program.order
        self.readers, self.varying = program.readers, program.varying
        # A buffer that holds a weight as integers is multiplied with scales where it is read.
        parametric = {
            one.name
            for one in program.sources
            if one.is_parameter or (one.value.dtype == int8 and one.value.ndim > 1)
        }
        for record in program.records:
            if record.name not in self.varying and not parametric.isdisjoint(record.inputs):
                parametric.add(record.name)
        self.parametric = frozenset(parametric)
        """The names whose values depend on weights and on no input."""

    def operands(self, record: Record) -> list[str]:
        """The varying inputs of a record, in order."""
        return [name for name in record.inputs if name in self.varying]

    def is_linear(self, record: Record) -> bool:
        """True if the record multiplies one varying value with a weight."""
        return (
            record.op in CONTRACTIONS
            and len(self.operands(record)) == 1
            and any(name in self.parametric for name in record.inputs)
        )

    def is_weighted(self, record: Record) -> bool:
        """True if the record multiplies a varying value with weights, of whatever form."""
        if self.is_linear(record) or "grouped_mm" in record.op:
            return True
        if record.op in CONTRACTIONS:
            return any(self._is_chosen_weight(name) for name in self._factors(record))
        return record.op in CONVOLUTIONS | RECURRENT

    def _is_chosen_weight(self, name: str) -> bool:
        """True if the value is some rows of a weight: that of an expert, for each position its own."""
        record = self.records.get(name)
        while record is not None and record.op in REARRANGEMENTS:
            record = self.records.get(record.inputs[0])
        return record is not None and record.op in LOOKUPS and record.inputs[0] in self.parametric

    def is_product(self, record: Record) -> bool:
        """True if the record is a matrix product of two varying values."""
        return record.op in CONTRACTIONS and len(self._factors(record)) == 2

    def _factors(self, record: Record) -> list[str]:
        positional = record.args[1:] if record.op == "baddbmm" else record.args
        flat = [leaf for arg in positional for leaf in (arg if isinstance(arg, list) else [arg])]
        return [leaf.name for leaf in flat if isinstance(leaf, Ref) and leaf.name in self.varying]

    def factors(self, record: Record) -> tuple[str, str]:
        """The two varying factors of a product."""
        left, right = self._factors(record)
        return left, right

    def shape(self, name: str) -> tuple[Size, ...] | None:
        """The shape of a record or of an input."""
        return self.program.shapes.get(name)

    def upward(self, start: str, stop: Callable[[Record], bool]) -> Iterator[Record]:
        """Varying records that `start` depends on, nearest first; nothing above a `stop` record.

        The stop records themselves are given, `start` too.
        """
        queue, seen = [start], {start}
        while queue:
            name = max(queue, key=lambda n: self.order.get(n, -1))
            queue.remove(name)
            record = self.records.get(name)
            if record is None:
                continue
            yield record
            if not stop(record):
                for other in self.operands(record):
                    if other not in seen:
                        seen.add(other)
                        queue.append(other)

    def cone(self, start: str, members: frozenset[str] | None = None) -> frozenset[str]:
        """The names that depend on `start`, itself not included; within `members` if given."""

        def onward(name: str) -> Iterator[str]:
            for reader in self.readers.get(name, ()):
                if members is None or reader.name in members:
                    yield reader.name

        return frozenset(reached(onward(start), onward))

    def above(
        self,
        name: str,
        members: frozenset[str] | None = None,
        until: Collection[str] = frozenset(),
    ) -> frozenset[str]:
        """`name` and the varying records that it depends on: within `members`, not of `until` nor past it."""
        inside: Collection[str] = self.records if members is None else members

        def kept(names: Iterable[str]) -> Iterator[str]:
            return (one for one in names if one in inside and one not in until)

        return frozenset(reached(kept([name]), lambda one: kept(self.operands(self.records[one]))))

    def members(self, call: ModuleCall) -> frozenset[str]:
        """The records that were made under one call of a module; all of them for the root."""
        return frozenset(self.records) if not call.path else self._by_call.get(call, frozenset())

    @property
    def batch(self) -> Placements:
        """The dimension of the batch in each value."""
        return placements_of(self.program, self.program.dimensions.batch)

    @cached_property
    def _by_call(self) -> dict[ModuleCall, frozenset[str]]:
        found: dict[ModuleCall, set[str]] = {}
        for record in self.program.records:
            for call in record.modules:
                found.setdefault(call, set()).add(record.name)
        return {call: frozenset(names) for call, names in found.items()}


SAME = NUMBER_KEEPING | {"alias", "detach", "lift_fresh_copy", "copy"}
"""Operations that return the numbers they are given."""

_OF_ONE = SAME | SELECTIONS | {"neg", "sum", "mean", "repeat", "cumsum", "flip", "roll"}
"""Operations that are linear in their first argument."""


@dataclass(frozen=True, slots=True)
class Step:
    """One record of a path. `carried` are its inputs that the path computes; all others are a run's.

    `linear` is the record without what it adds of itself: numbers are 0, and for the inputs of `added` zeros
    are to be put in. `is_norm` says that it is a fused norm, whose scale is to be taken from the run.
    """

    record: Record
    linear: Record
    carried: tuple[str, ...]
    added: tuple[str, ...] = ()
    is_norm: bool = False

    @property
    def keeps_numbers(self) -> bool:
        """True if the values are the same numbers behind it, in another form at most."""
        return self.record.op in SAME

    @property
    def is_sum(self) -> bool:
        """True if it adds values up as they are."""
        return self.record.op == "add" and self.record.kwargs.get("alpha", 1) == 1


@dataclass(frozen=True, slots=True)
class AffinePath:
    """The steps from the starts to `end`, in order. `bent` is a record on the way that is not affine."""

    end: str
    steps: tuple[Step, ...]
    bent: Record | None = None

    @property
    def is_unchanged(self) -> bool:
        """True if each start's numbers are in the end as they are: only sums and other forms lie between."""
        return all(step.keeps_numbers or step.is_sum for step in self.steps)


def affine_path(wiring: Wiring, starts: Collection[str], end: str) -> AffinePath:
    """Return the records from `starts` to `end`, as steps that are affine in the values of the starts."""
    begun = frozenset(starts)
    if end in begun:
        return AffinePath(end, ())
    above = wiring.above(end, until=begun)
    steps: dict[str, Step] = {}
    bent: dict[str, Record] = {}
    for name in sorted(above, key=wiring.order.__getitem__):
        record = wiring.records[name]
        # Of what type_as reads, the second says a dtype, and no number.
        reads = record.inputs[:1] if record.op == "type_as" else record.inputs
        carried = tuple(read for read in reads if read in begun or read in steps)
        curved = tuple(read for read in reads if read in bent)
        if not carried and not curved:
            continue
        # What is curved may be a scale: one number for all features.
        are_scales = all((wiring.shape(name) or (0,))[-1] == 1 for name in curved)
        step = _step(record, carried, curved) if carried and are_scales else None
        if step is not None:
            steps[name] = step
        else:
            bent[name] = bent[curved[0]] if curved else record
    if end not in steps:
        return AffinePath(end, (), bent.get(end))
    needed = reached([end], lambda name: [one for one in steps[name].carried if one in steps])
    return AffinePath(end, tuple(step for name, step in steps.items() if name in needed))


def _step(record: Record, carried: tuple[str, ...], curved: tuple[str, ...]) -> Step | None:
    """The record as a step, or None where it is not affine in what is carried."""
    op, args = record.op, record.args
    if op in SCALINGS:
        is_one = len(carried) == 1 and _occurrences(args, carried[0]) == 1
        is_over = op == "div" and args[0] != Ref(carried[0])
        rounds = record.kwargs.get("rounding_mode") is not None
        return Step(record, record, carried) if is_one and not is_over and not rounds else None
    if curved:
        return None
    if op in _OF_ONE:
        return Step(record, record, carried) if args[0] == Ref(carried[0]) and len(carried) == 1 else None
    if op in ADDITIONS:
        return _with_zeros(record, carried)
    if op in CONCATENATIONS | {"stack"}:
        return Step(record, record, carried, _others(carried, args[0]))
    if op == "where" and len(args) == 3 and args[0] not in map(Ref, carried):
        return _with_zeros(record, carried, (args[0],))
    if op == "masked_fill" and args[0] == Ref(carried[0]) and len(carried) == 1:
        return _with_zeros(record, carried, (args[1],))
    if op in CONTRACTIONS:
        return _product(record, carried)
    if op in NORMS:
        only = len(carried) == 1 and args[0] == Ref(carried[0]) and _occurrences(args, carried[0]) == 1
        return Step(record, record, carried, is_norm=True) if only else None
    return None


def _product(record: Record, carried: tuple[str, ...]) -> Step | None:
    """A product with one carried factor; what it adds to the product is set to zero."""
    at = {"linear": 2, "addmm": 0, "baddbmm": 0}.get(record.op)
    bias = record.args[at] if at is not None and len(record.args) > at else record.kwargs.get("bias")
    if len(carried) != 1 or bias == Ref(carried[0]) or _occurrences(record.leaves(), carried[0]) != 1:
        return None
    return Step(record, record, carried, (bias.name,) if isinstance(bias, Ref) else ())


def _with_zeros(record: Record, carried: tuple[str, ...], kept: tuple[Any, ...] = ()) -> Step:
    """A record of which the arguments that are neither carried nor kept are zero."""
    added = tuple(n for n in _others(carried, record.args) if Ref(n) not in kept)
    args = tuple(
        0 if isinstance(arg, int | float) and not isinstance(arg, bool) else arg for arg in record.args
    )
    return Step(record, replace(record, args=args), carried, added)


def _others(carried: tuple[str, ...], template: Any) -> tuple[str, ...]:
    leaves = [leaf.name for leaf in template if isinstance(leaf, Ref)]
    return tuple(name for name in dict.fromkeys(leaves) if name not in carried and name != SIZES)


def _occurrences(leaves: Any, name: str) -> int:
    return sum(leaf == Ref(name) for leaf in leaves)


_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""The name that `torch.export` writes where it has lost the module of a node that it made itself."""
_SLICE = re.compile(r"slice\((-?\d+|None), (-?\d+|None), (-?\d+|None)\)")

COMPUTES_NOTHING = "it computes nothing there"
READ_BESIDE = "it hands a value through there that others read as well"
NO_VALUE = "what comes out there depends on no input"


class ModulePaths:
    """The paths of a module's parts, several for one that is registered several times, and their calls.

    Calls are counted while `counting` lasts, whether or not the graph shows anything of them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths: dict[int, list[str]] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(vars(part)), []).append(path)
        self._known = {path: tuple(paths) for paths in self._paths.values() for path in paths}
        self._called: Counter[int] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count this thread's calls of modules anew. Torch's tracer calls stand-ins, which share `vars`."""
        self._called.clear()
        thread = threading.get_ident()

        def count(part: nn.Module, _: object) -> None:
            if threading.get_ident() == thread:
                self._called[id(vars(part))] += 1

        handle = register_module_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()

    def of(self, path: str) -> tuple[str, ...]:
        """All paths of the module at `path`."""
        return self._known.get(path, (path,))

    def calls(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """The paths of each module that was called, and how often, in one forward of the whole."""
        forwards = max(self._called[id(vars(self._module))], 1)
        for key, paths in self._paths.items():
            if self._called[key] and paths != [""]:
                yield tuple(paths), self._called[key] // forwards

    def unlike(self, ports: Sequence[ModulePort], only: Set[str] | None = None) -> Iterator[str]:
        """The modules that were called more or less often than the graph shows, in words.

        `only` are the paths that are looked at. A module of which the graph shows nothing is left out.
        """
        for paths, count in self.calls():
            shown = sum(port.paths == paths for port in ports)
            if shown not in {0, count} and (only is None or not only.isdisjoint(paths)):
                yield f"{paths[0]!r} is called {count} times, and {shown} times in the captured graph"

    def real(self, path: str) -> str:
        """The path without slices, which torch writes for `layers[1:]`: `layers.slice(1, None, None).0`."""
        if "slice(" not in path:
            return path
        done, parts = "", path.split(".")
        while parts:
            part = parts.pop(0)
            match = _SLICE.fullmatch(part)
            if match and parts:
                names = list(self._module.get_submodule(done)._modules)
                names = names[slice(*(None if one == "None" else int(one) for one in match.groups()))]
                inner = parts.pop(0)
                is_list = isinstance(self._module.get_submodule(done), nn.ModuleList)
                part = names[int(inner)] if is_list else inner
            done = f"{done}.{part}".removeprefix(".")
        return done


class CallNumbers:
    """The calls of modules that an exported graph was made under, each numbered as a hook would count it."""

    def __init__(self, graph: fx.Graph, paths: ModulePaths) -> None:
        self.paths = paths
        self._calls: dict[str, ModuleCall] = {}
        begun: dict[tuple[str, ...], dict[str, int]] = {}
        for node in graph.nodes:
            for key, path, number, _ in _stack(node):
                if key not in self._calls:
                    # Torch counts the calls by each path of a module apart.
                    real = paths.real(path)
                    by_path = begun.setdefault(paths.of(real), {})
                    by_path[path] = number + 1
                    self._calls[key] = ModuleCall(real, sum(by_path.values()) - 1)

    def stack(self, node: fx.Node) -> Iterator[tuple[str, ModuleCall, str]]:
        """The calls of modules that the node was made under, outermost first, the root left out.

        Each with torch's own key, which distinguishes calls, and with the type of the module.
        """
        for key, _, _, type_name in _stack(node):
            yield key, self._calls[key], type_name


def _stack(node: fx.Node) -> Iterator[tuple[str, str, int, str]]:
    for key, (path, type_name) in (node.meta.get("nn_module_stack") or {}).items():
        if path and path != _NO_MODULE:
            front, _, suffix = key.rpartition("@")
            number = int(suffix) if front and suffix.isdigit() else 0
            yield key, path.removesuffix(f"@{suffix}") if number else path, number, str(type_name)


def find_ports(
    graph: fx.Graph,
    numbers: CallNumbers,
    value_at: Callable[[fx.Node, int], Any],
    values: Mapping[fx.Node, Any],
) -> Callable[[Collection[str], Collection[str]], tuple[ModulePort, ...]]:
    """A function that gives the ports, given which names the program computes, and its constants.

    A call's outputs are the values made under it and used outside of it; its inputs are the
    values made outside and used under it. `value_at` says what a node is before the operation at a place of
    the graph, for it may be written to: an output is what it is when the call returns, as a hook sees it.
    `values` says what became of each node.
    """
    inside: dict[tuple[str, str], set[fx.Node]] = {}
    calls: dict[str, ModuleCall] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            for key, call, type_name in numbers.stack(node):
                inside.setdefault((key, type_name), set()).add(node)
                calls.setdefault(key, call)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: list[tuple[ModuleCall, str, list[Any], list[Any], list[fx.Node]]] = []
    for (key, type_name), members in inside.items():
        ordered = sorted(members, key=order.__getitem__)
        outputs = [n for n in ordered if any(user not in members for user in n.users)]
        read = [value_at(arg, order[n]) for n in ordered for arg in n.all_input_nodes if arg not in members]
        made = [value_at(n, order[ordered[-1]] + 1) for n in outputs]
        found.append((calls[key], type_name, read, made, outputs))
    values_of: dict[str, list[fx.Node]] = {}
    for node, value in values.items():
        if isinstance(value, Ref):
            values_of.setdefault(value.name, []).append(node)

    def is_read_beside(name: str, handed: list[fx.Node], known: Collection[str]) -> bool:
        """True if a value is read by others than those who read it as the nodes that hand it through."""
        same, behind, left = set(values_of.get(name, ())), set[fx.Node](), list(handed)
        while left:
            node = left.pop()
            if node in same and node not in behind:
                behind.add(node)
                left += node.users
        for user in (user for node in same - behind for user in node.users if user not in same):
            value = values.get(user)
            if user.op == "output" or (isinstance(value, Ref) and value.name in known):
                return True
        return False

    def ports(known: Collection[str], constants: Collection[str]) -> tuple[ModulePort, ...]:
        def names(values: list[Any]) -> tuple[str, ...]:
            kept = (v.name for v in values if isinstance(v, Ref) and v.name in known)
            return tuple(dict.fromkeys(kept))

        found_ports: list[ModulePort] = []
        shown: Counter[tuple[str, ...]] = Counter()
        for call, type_name, inputs, outputs, nodes in found:
            read, made = names(inputs), names(outputs)
            # A value that is handed through on the way (`x.to(x.dtype)`) is the module's output
            # only where nothing else comes out: dropout, not a norm.
            own = tuple(name for name in made if name not in read)
            hidden = ""
            if not made and any(isinstance(value, Ref) and value.name in constants for value in outputs):
                hidden = NO_VALUE
            elif not own and any(is_read_beside(name, nodes, known) for name in made):
                hidden = READ_BESIDE
            paths = numbers.paths.of(call.path)
            shown[paths] += 1
            kind = type_name.rpartition(".")[2]
            found_ports.append(ModulePort(call, kind, read, own or made, paths, hidden))
        for paths, count in numbers.paths.calls():
            numbered = {port.call.call for port in found_ports if port.paths == paths}
            for number in range(count) if 0 < len(numbered) < count else ():
                if number not in numbered:
                    call = ModuleCall(paths[0], number)
                    found_ports.append(ModulePort(call, "", (), (), paths, COMPUTES_NOTHING))
        return tuple(found_ports)

    return ports
