"""What a surgery puts into modules, and a program as a module: what an operated model is elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from conewise.errors import ConewiseError, SurgeryError, describe
from conewise.program.calls import Signature
from conewise.program.export import Exported, export
from conewise.program.foreign import brief
from conewise.program.lowering import WriteThrough
from conewise.program.records import SIZES, Program
from conewise.program.sizes import Size
from conewise.program.walk import Walk, assembled, compile_rule, output_names, plan_walk
from conewise.runs.splicing import Held


class Records:
    """The records of a program, run over weights that are looked up by their names at each call."""

    def __init__(self, program: Program, signature: Signature) -> None:
        self.program, self.signature = program, signature

    def __deepcopy__(self, memo: dict[int, Any]) -> Records:
        return self

    @cached_property
    def _walk(self) -> Walk:
        steps = ((one.name, one.inputs, compile_rule(one)) for one in self.program.records)
        return plan_walk(steps, output_names(self.program))

    def __call__(
        self, weight: Callable[[str], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What the program returns for these arguments."""
        inputs = self.signature.bind(args, kwargs)
        # As they are: under a trace a size is no plain number.
        symbols: dict[str, Any] = {
            symbol: inputs[name].shape[dim] for symbol, (name, dim) in self.program.sizes.symbols.items()
        }
        sizes = self.program.sizes.of(symbols)
        values = self._walk.run({**inputs, SIZES: sizes}, weight)
        return assembled(self.program, values, sizes)

    def __getstate__(self) -> dict[str, Any]:
        targets = [_name_of(record.target) for record in self.program.records]
        records = tuple(replace(record, target=_nothing) for record in self.program.records)
        sources = tuple(replace(source, value=_NOTHING) for source in self.program.sources)
        numbered = self.program.returned(list(range(len(self.program.outputs))))
        bare = replace(self.program, records=records, sources=sources, output_spec=_NO_SPEC)
        return {
            "program": bare,
            "targets": targets,
            "returned": numbered,
            "signature": _plain(self.signature),
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        bare: Program = state["program"]
        records = (
            replace(record, target=_operation(target))
            for record, target in zip(bare.records, state["targets"], strict=True)
        )
        spec = tree_flatten(state["returned"])[1]
        self.program = replace(bare, records=tuple(records), output_spec=spec)
        self.signature = state["signature"]


_NOTHING = torch.empty(0)
_NO_SPEC: Any = None
"""How outputs are nested is stored as an example: what torch has for it is not meant to be kept."""


def _nothing() -> None:
    """Stand for an operation while a program is stored; the operation goes by its name."""


def _plain(signature: Signature) -> Signature:
    """The signature, without the functions and classes that annotations name."""
    parameters = [one.replace(annotation=one.empty) for one in signature.forward.parameters.values()]
    forward = signature.forward.replace(parameters=parameters, return_annotation=signature.forward.empty)
    return Signature(forward, signature.example)


def _name_of(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        return "op", target.namespace, target._schema.name.partition("::")[2], target._overloadname
    if isinstance(target, WriteThrough):
        return "write", _name_of(target.target), target.position, target.__name__
    return "function", target


def _operation(name: Sequence[Any]) -> Callable[..., Any]:
    kind, *rest = name
    if kind == "op":
        namespace, packet, overload = rest
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        return found
    if kind == "write":
        made = WriteThrough(_operation(rest[0]), rest[1], has_views=True)
        made.__name__ = rest[2]
        return made
    function: Callable[..., Any] = rest[0]
    return function


def _with_arguments(module: ProgramModule, signature: inspect.Signature) -> MethodType:
    """The forward of a module that runs records, with the arguments that the captured one takes."""

    def forward(self: ProgramModule, *args: Any, **kwargs: Any) -> Any:
        return self._records(self._weight, args, kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return MethodType(forward, module)


class ProgramModule(nn.Module):
    """A captured program as a module: it computes the outputs of the model, bit for bit.

    Its weights are parameters and buffers under the names that they have in the model. They are shared with
    the model until one of the two is moved, copied or trained. It holds only weights that the program needs.
    """

    def __init__(self, program: Program, signature: Signature) -> None:
        super().__init__()
        self._paths: dict[str, str] = {}
        for source in program.sources:
            path = source.name
            *steps, last = path.split(".")
            owner: nn.Module = self
            for step in steps:
                if step not in owner._modules:
                    owner.add_module(step, nn.Module())
                owner = owner.get_submodule(step)
            if isinstance(source.value, nn.Parameter):
                owner.register_parameter(last, source.value)
            else:
                owner.register_buffer(last, source.value)
            self._paths[source.name] = path
        self._records = Records(program, signature)
        self.forward = _with_arguments(self, signature.forward)
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.forward = _with_arguments(self, self._records.signature.forward)

    def _weight(self, name: str) -> Tensor:
        owner, _, last = self._paths[name].rpartition(".")
        found: Tensor = getattr(self.get_submodule(owner), last)
        return found


def run_as_records(module: nn.Module, program: Program, signature: Signature) -> nn.Module:
    """Let a module compute the records of a program with its own weights; it is written to."""
    kind = type(module)
    own = {"forward": _forward, "_records": Records(program, signature)}
    module.__class__ = type(kind.__name__, (kind,), own)
    return module


def runs_records(module: nn.Module) -> bool:
    """True if a module computes records instead of what it is made of."""
    return isinstance(getattr(type(module), "_records", None), Records)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the records."""

    def weight(name: str) -> Tensor:
        found: Any = self
        for step in name.split("."):
            found = getattr(found, step, None)
        return found if isinstance(found, Tensor) else self._records.program.source_values[name]

    return self._records(weight, args, kwargs)


_SIZES = (3, 5, 7, 11, 13, 17, 19, 23)
"""Sizes of the examples that stand for those which vary: no two are equal, and none is 1."""


class Operated(Held):
    """A function, or a module, that a surgery put in: in place of another one, or at a hook."""

    acts_by_hook = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function makes of what it is given."""
        return self.function(*args, **kwargs)


class Grafted(Operated):
    """A block that acts by a hook, on the value that it finds there."""

    acts_by_hook = True


class Pruned(nn.Module):
    """A value with a part of it pruned: what `mask` chooses is `value`; without a mask, all of it."""

    acts_by_hook = True
    mask: Tensor | None
    value: Tensor

    def __init__(self, mask: Tensor | None, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.register_buffer("value", value)

    def forward(self, given: Tensor) -> Tensor:
        """What is given, pruned."""
        if self.mask is None:
            return self.value.repeat(
                [
                    1 if here == there else there
                    for here, there in zip(self.value.shape, given.shape, strict=True)
                ]
            )
        return torch.where(self.mask, self.value, given)


class Flat(nn.Module):
    """A module that is given tensors alone, and returns those of its results: what is captured of it."""

    def __init__(self, held: Operated, call: Sequence[Any], spec: TreeSpec, tensors: Sequence[int]) -> None:
        super().__init__()
        self.held = held
        self._call, self._spec, self._at = list(call), spec, list(tensors)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors that the module returns."""
        leaves = list(self._call)
        for at, tensor in zip(self._at, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return [leaf for leaf in tree_flatten(self.held(*args, **kwargs))[0] if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Example:
    """Values like those of a program, of sizes that tell dimensions apart."""

    program: Program

    @cached_property
    def symbols(self) -> Mapping[str, int]:
        """A size for each symbol."""
        return {name: _SIZES[min(at, len(_SIZES) - 1)] for at, name in enumerate(self.program.sizes.symbols)}

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The program's sizes."""
        return self.program.sizes.of(self.symbols)

    def size(self, size: Size) -> int:
        """One size."""
        return self.program.sizes.value(size, self.symbols)

    def like(self, node: str) -> Tensor:
        """A value like a node's."""
        shape, dtype = self.program.shapes[node], self.program.dtypes[node]
        if shape is None or dtype is None:
            raise SurgeryError(
                f"the value of {node!r} is several tensors, not one. Name the site that takes the part you "
                "mean from it."
            )
        return torch.zeros(
            [self.size(size) for size in shape], dtype=dtype, device=device_of(self.program, node)
        )


def device_of(program: Program, node: str) -> torch.device:
    """The device of a node's value."""
    record = program.record_of.get(node)
    if record is not None:
        assert record.device is not None
        return record.device
    return next(leaf.device for leaf in program.inputs if leaf.name == node)


def captured(
    what: str,
    function: Operated,
    program: Program,
    nodes: Sequence[str],
    call: tuple[Sequence[Any], TreeSpec, Sequence[int]] | None = None,
) -> Exported:
    """A block as records, as it is applied to values of the program.

    `call` holds the leaves of the whole call, how they are nested, and where the tensors are among them.
    Raises SurgeryError where the block fails there, returns no tensor, or writes to what it is given.
    """
    example = [Example(program).like(node) for node in nodes]
    if call is None:
        leaves, spec = tree_flatten((tuple(example), {}))
        call = leaves, spec, range(len(example))
    module = Flat(function, *call)
    module.train(function.training)
    shown = f"{what}, given {', '.join(f'shape {tuple(one.shape)}, {one.dtype}' for one in example)},"
    try:
        with torch.no_grad():
            given = [one.clone() for one in example]
            buffers = {name: one.clone() for name, one in module.named_buffers()}  # it may write to them
            found = functional_call(module, buffers, tuple(given))
    except Exception as error:  # it raises whatever it likes
        raise SurgeryError(f"{shown} raises {brief(error)}.") from error
    if not found:
        raise SurgeryError(f"{shown} returns no tensor; it has to return what is read in its place.")
    if any(one._version for one in given):  # counted by torch, whatever is written
        raise SurgeryError(
            f"{what} writes to what it is given, which others read too. Let it make a new tensor: `x + 1`, "
            "not `x.add_(1)`."
        )
    shapes = tuple(
        {dim: Dim.AUTO for dim, size in enumerate(program.shapes[node] or ()) if not isinstance(size, int)}
        for node in nodes
    )
    try:
        return export(module, tuple(example), varying={"tensors": shapes})
    except ConewiseError as error:
        raise SurgeryError(f"{what} cannot be captured: {error}") from error


def as_block(what: str, given: Any, kind: type[Operated]) -> Operated:
    """A block that was given, as a module. Raises SurgeryError where it is no function."""
    if not callable(given) or isinstance(given, type):
        raise SurgeryError(f"{what} is a function of tensors, or an nn.Module, not {describe(given)}.")
    made = kind(given)
    return made.train(given.training) if isinstance(given, nn.Module) else made.eval()
