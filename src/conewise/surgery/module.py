"""A program as a module: what an operated model is outside of this library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from conewise.program.calls import Signature
from conewise.program.lowering import WriteThrough
from conewise.program.records import SIZES, Program
from conewise.program.walk import Walk, assembled, compile_rule, output_names, plan_walk


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
    """A captured program as a module: what it computes is what the model computed, bit for bit.

    Its weights are parameters and buffers of the names that they have in the model; they are shared with it
    until one of the two is moved, copied or trained. It has nothing that the program does not need.
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
