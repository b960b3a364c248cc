"""The calls of a module: its arguments by name, flattened to leaves that have names.

The same normal form is made of the captured example and of every run, so a run may give
arguments by position or by keyword, and may leave out what was constant in the example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten

from conewise.errors import InputMismatchError


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call: what stays positional (`*args` of the signature), and the rest."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def leaves(self) -> tuple[list[tuple[str, Any]], TreeSpec]:
        """The leaves with their names, in the order in which `torch.export` flattens them."""
        named, spec = tree_flatten_with_path((self.args, dict(self.kwargs)))
        return [(_leaf_name(path), value) for path, value in named], spec

    def mapped(self, change: Callable[[str, Any], Any]) -> Call:
        """The call with `change(name, value)` in place of each leaf."""
        named, spec = self.leaves()
        args, kwargs = tree_unflatten([change(name, value) for name, value in named], spec)
        return Call(args, kwargs)


@dataclass(frozen=True)
class Signature:
    """The arguments that every run of a captured module must give, and those that it may leave out."""

    forward: inspect.Signature
    example: Call

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a run by leaf name. Raises InputMismatchError where they do not fit.

        Constants of the captured example (numbers, flags, None) may be left out; given, they
        must be equal to the captured ones, for they are part of the graph.
        """
        plain = self._plain
        if plain is not None and not args and kwargs.keys() == plain.keys():
            found = {name: kwargs[name] for name in plain}
            if all(map(_is_of_the_kind, found.values(), plain.values())):
                return found
        given = normal_call(self.forward, args, kwargs)
        unknown = [key for key in given.kwargs if key not in self.example.kwargs]
        if unknown:
            raise InputMismatchError(
                f"{', '.join(map(repr, unknown))} was not part of the captured call, which had "
                f"{', '.join(map(repr, self.example.kwargs)) or 'no keyword'}. An argument is part "
                "of the graph: capture again with it."
            )
        complete = Call(given.args, {**_constants(self.example.kwargs), **given.kwargs})
        missing = [key for key in self.example.kwargs if key not in complete.kwargs]
        if missing or len(given.args) != len(self.example.args):
            raise InputMismatchError(
                f"this run lacks {', '.join(map(repr, missing)) or 'positional arguments'}; the "
                "captured call had them."
            )
        ordered = Call(complete.args, {key: complete.kwargs[key] for key in self.example.kwargs})
        return self._tensors(ordered)

    @cached_property
    def _leaves(self) -> tuple[list[tuple[str, Any]], TreeSpec]:
        return self.example.leaves()

    @cached_property
    def _plain(self) -> dict[str, torch.Tensor] | None:
        """The tensors of the captured call, where they are all that has to be given, each by its own name."""
        tensors = {name: leaf for name, leaf in self._leaves[0] if isinstance(leaf, torch.Tensor)}
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [
            name
            for name, one in self.forward.parameters.items()
            if one.default is inspect.Parameter.empty and one.kind not in optional
        ]
        own = self.example.kwargs
        are_alone = not self.example.args and all(own.get(name) is leaf for name, leaf in tensors.items())
        return tensors if are_alone and tensors.keys() >= set(needed) else None

    def _tensors(self, given: Call) -> dict[str, torch.Tensor]:
        found, spec = given.leaves()
        captured, captured_spec = self._leaves
        if spec != captured_spec:
            raise InputMismatchError(
                f"the arguments are nested otherwise than in the captured call: found {spec}, "
                f"expected {captured_spec}."
            )
        tensors: dict[str, torch.Tensor] = {}
        for (name, value), (_, example) in zip(found, captured, strict=True):
            if isinstance(example, torch.Tensor):
                if not isinstance(value, torch.Tensor):
                    raise InputMismatchError(
                        f"{name!r} is a {type(value).__name__}; a tensor was captured there."
                    )
                if value.layout is not torch.strided or value.is_nested:
                    kind = "nested" if value.is_nested else str(value.layout)
                    raise InputMismatchError(f"{name!r} is {kind}; give a dense tensor, `.to_dense()`.")
                if value.dtype != example.dtype or value.device != example.device:
                    raise InputMismatchError(
                        f"{name!r} is {value.dtype} on {value.device}, but {example.dtype} on "
                        f"{example.device} was captured. Nothing is cast or moved silently: convert "
                        "it, or capture again."
                    )
                tensors[name] = value
            elif not _equal_constants(value, example):
                raise InputMismatchError(
                    f"{name!r} is {value!r}, but the graph was captured with {example!r}. Constants "
                    "are part of the graph: capture again with the other value."
                )
        return tensors


def normal_call(forward: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The call with every argument by name where the signature allows it, in its order."""
    try:
        bound = forward.bind(*args, **kwargs)
    except TypeError as error:
        raise InputMismatchError(f"the arguments do not fit forward{forward}: {error}.") from error
    positional: list[Any] = []
    named: dict[str, Any] = {}
    kinds = {name: parameter.kind for name, parameter in forward.parameters.items()}
    by_position = any(kind is inspect.Parameter.VAR_POSITIONAL for kind in kinds.values())
    for name, value in bound.arguments.items():
        match kinds[name]:
            case inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
            case inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            case inspect.Parameter.POSITIONAL_ONLY:
                positional.append(value)
            case inspect.Parameter.POSITIONAL_OR_KEYWORD if by_position:
                positional.append(value)
            case _:
                named[name] = value
    return Call(tuple(positional), named)


def forward_parameters(module: Any) -> dict[str, inspect.Parameter]:
    """The arguments that a module's `forward` takes by name; those of its base model for an adapter."""
    found = dict(inspect.signature(module.forward).parameters)
    if callable(getattr(module, "get_base_model", None)) and any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values()
    ):
        found = {**inspect.signature(module.get_base_model().forward).parameters, **found}
    return found


def hugging_face_defaults(
    module: nn.Module, forward: inspect.Signature, *, last_position_only: bool
) -> dict[str, Any]:
    """The keyword arguments that a Hugging Face model is captured with, unless given.

    Recognised by a `config` and by what `forward` takes, not by its class: no cache of keys and
    values, and on request the logits of the last position alone.
    """
    if not hasattr(module, "config"):
        return {}
    defaults: dict[str, Any] = {}
    parameters = {**forward_parameters(module), **forward.parameters}
    if "use_cache" in parameters:
        defaults["use_cache"] = False
    if last_position_only:
        if "logits_to_keep" not in parameters:
            raise InputMismatchError(
                f"{type(module).__name__}.forward takes no `logits_to_keep`, so it always computes "
                "every position. Capture it without asking for the last position only."
            )
        defaults["logits_to_keep"] = 1
    return defaults


def _constants(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in kwargs.items()
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])
    }


def _is_of_the_kind(value: Any, example: torch.Tensor) -> bool:
    """True if a value is a tensor as one was captured."""
    is_tensor = isinstance(value, torch.Tensor)
    return (
        is_tensor
        and value.dtype == example.dtype
        and value.device == example.device
        and value.layout is torch.strided
        and not value.is_nested
    )


def _equal_constants(value: Any, example: Any) -> bool:
    return type(value) is type(example) and bool(value == example)


def _leaf_name(path: Sequence[Any]) -> str:
    """`(args, kwargs)` paths as names: `input_ids`, `batch.x`, `args.0`."""
    root, *rest = path
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in rest]
    return ".".join(parts if root.idx == 1 else ["args", *parts])
