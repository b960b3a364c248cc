"""From an exported program to records: functional, named by module and operation, sizes apart."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from conewise.anatomy.wiring import CallNumbers, ModulePaths, find_ports
from conewise.errors import CaptureError, RandomnessError
from conewise.program.calls import Call
from conewise.program.records import (
    Input,
    ModuleCall,
    Program,
    Record,
    Ref,
    SizeRef,
    Source,
    filled,
)
from conewise.program.sizes import (
    Size,
    SizeTable,
    folded,
    has_unbacked,
    is_symbolic,
    relations_of,
    size_of,
)

_aten = torch.ops.aten

HANDED_THROUGH = frozenset(
    {
        _aten.dropout.default,
        _aten.dropout_.default,
        _aten.feature_dropout.default,
        _aten.feature_dropout_.default,
        _aten.alpha_dropout.default,
        _aten.feature_alpha_dropout.default,
        _aten.detach.default,
        _aten.detach_.default,
        _aten.alias.default,
    }
)
"""Operations that return their own input: dropouts when they are not training, and detaching."""


def written_argument(node: fx.Node) -> int | None:
    """The position of the argument that `node` writes to in place, or None."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or node.target in HANDED_THROUGH:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return position if position < len(node.args) else None
    return None


def viewed_argument(node: fx.Node) -> fx.Node | None:
    """The first argument, when the node's value shares its memory; else None.

    Export's own tensors show it: they carry no data, but they share storage as the real ones do.
    """
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    first = node.args[0]
    if node.target in HANDED_THROUGH:
        return first
    return first if _storages(first.meta.get("val")) & _storages(node.meta.get("val")) else None


def is_identity(node: fx.Node) -> bool:
    """True if the node hands its first argument through: same memory, same shape and strides."""
    if node.target in HANDED_THROUGH:
        return True
    source = viewed_argument(node)
    if source is None:
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return False
    return _geometry(before) == _geometry(after)


def functional_twin(node: fx.Node, position: int) -> Callable[..., Any] | None:
    """The operation that returns what `node` writes, with its dtype and layout, or None.

    Only where both are certain: the written tensor is contiguous and floating, and no other
    floating argument has another dtype. Everywhere else a copy is written to instead.
    """
    target = node.target
    if position != 0 or not isinstance(target, torch._ops.OpOverload):
        return None
    packet = target._schema.name.removeprefix("aten::")
    if packet not in _TWINS:
        return None
    written: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    others = [arg.meta.get("val") for arg in node.all_input_nodes]
    dtypes = {
        other.dtype
        for other in others
        if isinstance(other, torch.Tensor) and (other.is_floating_point() or other.is_complex())
    }
    if not written.is_floating_point() or dtypes != {written.dtype} or not written.is_contiguous():
        return None
    twin = getattr(getattr(_aten, packet.removesuffix("_")), target._overloadname, None)
    return twin if isinstance(twin, torch._ops.OpOverload) else None


_TWINS = frozenset(
    {
        "add_", "sub_", "mul_", "div_", "relu_", "gelu_", "silu_", "sigmoid_", "tanh_", "exp_", "neg_",
        "clamp_", "clamp_min_", "clamp_max_", "masked_fill_", "index_put_", "index_add_", "index_copy_",
        "index_fill_", "scatter_", "scatter_add_", "leaky_relu_", "elu_", "hardtanh_", "hardswish_", "sqrt_",
        "rsqrt_", "pow_",
    }
)  # fmt: skip


class WriteThrough:
    """A new root: a copy of the old one, written to through views of it by `target`.

    With views it writes to a part of the root, so its name is that of the operation in place, `add_`: it is
    not the `add` that treats all positions, and all rows of a batch, alike.
    """

    def __init__(self, target: Callable[..., Any], position: int, *, has_views: bool) -> None:
        packet = getattr(target, "overloadpacket", target)
        self.target, self.position = target, position
        name = str(packet.__name__)
        self.__name__ = name if has_views else name.removesuffix("_")

    def __call__(
        self,
        root: torch.Tensor,
        views: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Copy `root`, take `views` of the copy one after another, write to the last of them."""
        fresh = root.clone()
        value: Any = fresh
        for target, step_args, step_kwargs in views:
            value = target(value, *step_args, **step_kwargs)
        self.target(*args[: self.position], value, *args[self.position :], **kwargs)
        return fresh


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        tuple(map(str, tensor.shape)),
        tuple(map(str, tensor.stride())),
        str(tensor.storage_offset()),
    )


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, list | tuple):
        return set().union(*(_storages(item) for item in value))
    return set()


_ASSERTIONS = frozenset(
    {
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten.sym_constrain_range.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
    }
)
_DETACHING = frozenset(
    {torch.ops.aten.detach.default, torch.ops.aten.detach_.default, torch.ops.aten.alias.default}
)


@dataclass(slots=True)
class _Memory:
    """A tensor that owns memory: its current value, and how often it has been written to.

    `writes` has the place in the graph of each write, `values` the value before the first and behind each.
    """

    value: Ref
    writes: list[int] = field(default_factory=list)
    values: list[Ref] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values.append(self.value)

    @property
    def version(self) -> int:
        return len(self.writes)

    def write(self, value: Ref, place: int) -> None:
        self.value = value
        self.writes.append(place)
        self.values.append(value)


@dataclass(frozen=True, slots=True)
class _Alias:
    """A value that aliases some memory: the views that lead to it, one after another; none for all of it.

    `views` are the nodes that took them: each has its own shape.
    """

    memory: _Memory
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = ()
    views: tuple[fx.Node, ...] = ()


def lower(exported: ExportedProgram, example: Call, module_name: str, paths: ModulePaths) -> Program:
    """The records of `exported`, which was made with `example`; `paths` are those of the module.

    Operations that hand their input through become no record, and so do sizes, which go to the
    program's table. Raises RandomnessError when a run would draw random numbers.
    """
    lowering = _Lowering(exported, module_name, paths)
    lowering.bind_leaves(example)
    for lowering.now, node in enumerate(exported.graph.nodes):
        if node.op == "call_function":
            lowering.add(node)
        elif node.op not in {"placeholder", "output", "get_attr"}:
            raise CaptureError(f"torch.export left a {node.op} node, {node.format_node()}.")
    return lowering.finish()


class _Lowering:
    """The state of one pass over an exported graph."""

    def __init__(self, exported: ExportedProgram, module_name: str, paths: ModulePaths) -> None:
        self.exported, self.module_name = exported, module_name
        self.call_numbers = CallNumbers(exported.graph, paths)
        self.sizes = SizeTable()
        self.records: list[Record] = []
        self.sources: dict[str, Source] = {}
        self.inputs: list[Input] = []
        self.taken: dict[str, int] = {}
        self.values: dict[fx.Node, Any] = {}
        self.aliases: dict[fx.Node, _Alias] = {}
        self.seen_version: dict[fx.Node, int] = {}
        self.by_version: dict[fx.Node, dict[int, Any]] = {}
        self.now = 0
        self.written: dict[str, None] = {}
        self.writes = any(written_argument(n) is not None for n in exported.graph.nodes)

    def bind_leaves(self, example: Call) -> None:
        """Give every placeholder its source, its input or its constant."""
        placeholders = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        leaves = iter(example.leaves()[0])
        by_tensor: dict[int, str] = {}
        for spec in self.exported.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                name, value = next(leaves)
                self._bind_input(node, name, value)
            else:
                assert spec.target is not None
                tensor = self._stored(spec.target)
                if not isinstance(tensor, torch.Tensor):
                    self.values[node] = tensor
                    continue
                known = by_tensor.setdefault(id(tensor), spec.target)
                self._bind_source(node, known, spec.target, tensor, spec.kind is InputKind.PARAMETER)
        for node in self.exported.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = getattr(self.exported.graph_module, str(node.target))
        fakes = [node.meta.get("val") for node in placeholders.values()]
        for relation in relations_of(fake for fake in fakes if isinstance(fake, torch.Tensor)):
            self.sizes.guard(relation)

    def _bind_input(self, node: fx.Node, name: str, value: Any) -> None:
        fake = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self.values[node] = value
            return
        assert isinstance(fake, torch.Tensor)
        name = self._unique(name)
        shape = tuple(size_of(size) for size in fake.shape)
        self.inputs.append(Input(name, shape, value.dtype, value.device))
        self.sizes.bind(name, shape)
        self._own(node, Ref(name))

    def _bind_source(
        self, node: fx.Node, known: str, target: str, tensor: torch.Tensor, is_parameter: bool
    ) -> None:
        if known == target:
            name = self._unique(target)
            self.sources[known] = Source(name, tensor, is_parameter)
        else:
            old = self.sources[known]
            self.sources[known] = Source(old.name, old.value, old.is_parameter, (*old.aliases, target))
        self._own(node, Ref(self.sources[known].name))

    def _stored(self, target: str) -> Any:
        if target in self.exported.state_dict:
            return self.exported.state_dict[target]
        return self.exported.constants[target]

    def add(self, node: fx.Node) -> None:
        """Lower one operation."""
        value = node.meta.get("val")
        if node.target in _ASSERTIONS:
            return
        if is_symbolic(value):
            self._add_size(node, value)
        elif isinstance(value, int | float | bool):
            self.values[node] = value
        elif node.target is not operator.getitem and self._is_random(node):
            raise RandomnessError(self.module_name, (self._name(node),))
        elif (position := written_argument(node)) is not None:
            self._add_write(node, position)
        elif is_identity(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            self._share(node, source, ())
        else:
            self._add_operation(node)

    def _add_size(self, node: fx.Node, value: object) -> None:
        """A size: a constant, an entry of the table, or (where it depends on values) a node."""
        expr = folded(value)
        if isinstance(expr, bool | int | float):
            self.values[node] = expr
        elif has_unbacked(expr):
            self._add_operation(node)
        else:
            self.values[node] = SizeRef(self.sizes.index(expr))

    def _add_operation(self, node: fx.Node) -> None:
        args, kwargs = self._template(node.args), self._template(dict(node.kwargs))
        reference = self._emit(node, node.target, args, kwargs)  # type: ignore[arg-type]
        source = viewed_argument(node) if self.writes else None
        if source is None or source not in self.aliases or self._is_fresh_tuple(source):
            self._own(node, reference)
        else:
            self._share(node, source, ((node.target, args[1:], kwargs),))
            self._note(node, reference)

    def _is_fresh_tuple(self, node: fx.Node) -> bool:
        """True if the node made several tensors, each of which then owns its memory."""
        return not isinstance(node.meta.get("val"), torch.Tensor) and not self.aliases[node].steps

    def _add_write(self, node: fx.Node, position: int) -> None:
        written = node.args[position]
        assert isinstance(written, fx.Node)
        alias = self.aliases[written]
        args, kwargs = self._template(node.args), self._template(dict(node.kwargs))
        twin = functional_twin(node, position) if not alias.steps else None
        if twin is not None:
            fresh = self._emit(node, twin, args, kwargs)
        else:
            rest = (*args[:position], *args[position + 1 :])
            target: Any = node.target
            write = WriteThrough(target, position, has_views=bool(alias.steps))
            fresh = self._emit(node, write, (alias.memory.value, alias.steps, rest, kwargs), {})
        if any(source.name == alias.memory.value.name for source in self.sources.values()):
            self.written[alias.memory.value.name] = None
        alias.memory.write(fresh, self.now)
        self._share(node, written, ())

    def _own(self, node: fx.Node, reference: Ref) -> None:
        self.aliases[node] = _Alias(_Memory(reference))
        self._note(node, reference)

    def _share(self, node: fx.Node, source: fx.Node, steps: tuple[Any, ...]) -> None:
        """Let `node` alias the memory of `source`, `steps` further on."""
        alias = self.aliases[source]
        views = (*alias.views, node) if steps else alias.views
        self.aliases[node] = _Alias(alias.memory, (*alias.steps, *steps), views)
        if not steps:
            self._note(node, self._current(source))

    def _note(self, node: fx.Node, value: Any) -> None:
        """The value of a node, as its memory is now."""
        version = self.aliases[node].memory.version
        self.values[node], self.seen_version[node] = value, version
        self.by_version.setdefault(node, {})[version] = value

    def _value_at(self, node: fx.Node, place: int) -> Any:
        """The node's value before the operation at a place of the graph; None where nothing reads that."""
        alias = self.aliases.get(node)
        if alias is None:
            return self.values[node]
        version = bisect.bisect_left(alias.memory.writes, place)
        if not alias.steps:
            return alias.memory.values[version]
        return self.by_version[node].get(version)

    def _current(self, node: fx.Node) -> Any:
        """The node's value as of now: views taken before a write are taken again."""
        alias = self.aliases.get(node)
        if alias is None or self.seen_version[node] == alias.memory.version:
            return self.values[node]
        reference = alias.memory.value
        for (target, args, kwargs), view in zip(alias.steps, alias.views, strict=True):
            reference = self._emit(node, target, (reference, *args), kwargs, view)
        self._note(node, reference)
        return reference

    def _template(self, argument: Any) -> Any:
        return filled(argument, lambda one: self._current(one) if isinstance(one, fx.Node) else one)

    def _emit(
        self,
        node: fx.Node,
        target: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        view: fx.Node | None = None,
    ) -> Ref:
        """A record of what `node` does; with `view`, of a view that was taken there, taken again."""
        fake = (node if view is None else view).meta.get("val")
        shape = dtype = device = None
        if isinstance(fake, torch.Tensor):
            shape, dtype, device = tuple(size_of(size) for size in fake.shape), fake.dtype, fake.device
        if view is None and (isinstance(target, WriteThrough) or target is not node.target):
            shape, dtype = self._shape_of(args[0]) if isinstance(args[0], Ref) else (shape, dtype)
        record = Record(
            self._unique(self._name(node)), target, args, kwargs, self._modules(node), shape, dtype, device
        )
        self.records.append(record)
        return Ref(record.name)

    def _shape_of(self, reference: Ref) -> tuple[tuple[Size, ...] | None, torch.dtype | None]:
        record = next((r for r in reversed(self.records) if r.name == reference.name), None)
        if record is not None:
            return record.shape, record.dtype
        leaf = next((i for i in self.inputs if i.name == reference.name), None)
        if leaf is not None:
            return leaf.shape, leaf.dtype
        value = next(s.value for s in self.sources.values() if s.name == reference.name)
        return tuple(value.shape), value.dtype

    def _is_random(self, node: fx.Node) -> bool:
        """True if the operation draws random numbers, or updates statistics that it then uses."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return False
        arguments = {
            argument.name: node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for i, argument in enumerate(target._schema.arguments)
        }
        if "running_mean" in arguments:
            updates = arguments.get("training", arguments.get("use_input_stats"))
            return bool(updates) and isinstance(arguments.get("running_mean"), fx.Node)
        if target not in HANDED_THROUGH and torch.Tag.nondeterministic_seeded not in target.tags:
            return False
        rates = [arguments[name] for name in ("p", "dropout", "dropout_p") if name in arguments]
        trains = arguments.get("train", arguments.get("training", True))
        return bool(trains) and (any(rates) or not rates) and target not in _DETACHING

    def _name(self, node: fx.Node) -> str:
        calls = self._modules(node)
        packet = getattr(node.target, "overloadpacket", node.target)
        op = str(getattr(packet, "__name__", node.name)).rstrip("_")
        path = str(calls[-1]) if calls else ""
        return f"{path}/{op}" if path else op

    def _modules(self, node: fx.Node) -> tuple[ModuleCall, ...]:
        """The calls of modules that the node was made under, outermost first, the root left out."""
        return tuple(call for _, call, _ in self.call_numbers.stack(node))

    def _unique(self, name: str) -> str:
        count = self.taken.get(name, 0)
        self.taken[name] = count + 1
        return self._unique(f"{name}_{count}") if count else name

    def finish(self) -> Program:
        """The program, without the records that no output depends on."""
        output = next(n for n in self.exported.graph.nodes if n.op == "output")
        outputs = tuple(self._template(tuple(output.args[0])))
        ports = find_ports(self.exported.graph, self.call_numbers, self._value_at, self.values)
        records = live(self.records, outputs)
        known = {record.name for record in records} | {leaf.name for leaf in self.inputs}
        spec = self.exported.call_spec.out_spec
        assert spec is not None
        used = {name for record in records for name in record.inputs}
        used |= {out.name for out in outputs if isinstance(out, Ref)}
        if read := [name for name in self.written if name in used]:
            raise CaptureError(
                f"{self.module_name} writes to {', '.join(map(repr, read))} whenever it runs, and what it "
                "returns depends on that: it computes something else each time. A graph computes the same "
                "each time: take the write out of `forward`, or give the value as an input."
            )
        program = Program(
            records,
            tuple(source for source in self.sources.values() if source.name in used),
            tuple(self.inputs),
            outputs,
            spec,
            self.sizes,
            ports(known, {source.name for source in self.sources.values()}),
            self.module_name,
            tuple(self.written),
        )
        program.check()
        return program


def live(records: Iterable[Record], outputs: Iterable[Any]) -> tuple[Record, ...]:
    """The records that the outputs depend on, in their order."""
    wanted = {out.name for out in outputs if isinstance(out, Ref)}
    found: list[Record] = []
    for record in reversed(tuple(records)):
        if record.name in wanted:
            wanted.update(record.inputs)
            found.append(record)
    return tuple(reversed(found))
