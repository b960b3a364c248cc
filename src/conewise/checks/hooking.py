"""The original module, run with forward hooks that read or replace values: no graph takes part.

A node of the graph can be hooked where it goes into or comes out of a call of a module, as long as the
hook changes it for all who read it.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from conewise.anatomy.wiring import ModulePaths
from conewise.program.calls import Signature
from conewise.program.export import eager
from conewise.program.records import ModuleCall, Program, Ref
from conewise.program.walk import bitwise_same
from conewise.threads import one_module

Tensor = torch.Tensor
Replacement = Callable[[Tensor], Tensor]
Leaves = Callable[[list[Any]], list[Any]]

RESEMBLES, BY_FAR = 0.5, 4
"""Tensors that are equal up to rounding are no further apart than this share of their length; a tensor is
the nearest by far when every other is more than so many times as far off."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The values that go into a call of a module, or come out of it."""

    call: ModuleCall
    is_output: bool


@dataclass(frozen=True, slots=True)
class Hook:
    """One tensor at a boundary: the leaf of that number, in the order of the flattened arguments.

    `shape` is the node's own in the run where the hook was found, where the module shows it in another shape.
    """

    boundary: Boundary
    leaf: int
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """One tensor at a boundary by the way to it, which is the same in calls that hand over other things too.

    `way` leads from the output, or from (args, kwargs): at each step an index, a key or an attribute's name.
    `is_reshaped`: the module shows the node's value in another shape.
    """

    boundary: Boundary
    way: tuple[int | str, ...]
    is_reshaped: bool = False

    def read(self, whole: Any) -> Any:
        """Return the value that stands there; None where there is none."""
        for step in self.way:
            try:
                whole = getattr(whole, str(step)) if _is_attribute(whole, step) else whole[step]
            except (IndexError, KeyError, AttributeError, TypeError):
                return None
        return whole

    def replaced(self, whole: Any, value: Tensor) -> Any:
        """The whole with another tensor there. Nothing is written to, and all else is the very same."""
        return _replaced(whole, self.way, value)


class HookedModule:
    """A captured module by itself: its forward on a run's inputs, with hooks that are gone afterwards."""

    def __init__(self, module: nn.Module, program: Program, signature: Signature) -> None:
        self._module = module
        self.paths = ModulePaths(module)
        self._program = program
        self._signature = signature

    def find(
        self,
        values: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        readers: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, Hook]:
        """A hook for each node of `values` that has one.

        A change there reaches all who read the node; or at least its `readers`, where these are given.

        The graph says at which call of a module a node can be seen, its shape and dtype say which tensor of
        that call it is. Where several are alike, it is the one whose value in the run of `inputs` is by far
        the nearest to the node's own. Values need not be equal: a module may round otherwise than its graph.
        A node without a boundary of its own, or that resembles nothing there, has none; unless all that is
        read of it is its value in another shape, which has one.
        """
        candidates = {
            node: tuple(boundaries(self._program, node, (readers or {}).get(node))) for node in values
        }
        twins = {node: reshaped(self._program, node) for node in values if not candidates[node]}
        for node, twin in twins.items():
            if twin is not None and node not in (readers or {}):
                candidates[node] = tuple(boundaries(self._program, twin))
        seen: dict[Boundary, list[Any]] = {}

        def record(boundary: Boundary) -> Leaves:
            def keep(leaves: list[Any]) -> list[Any]:
                # Copies: the module may write to what it returned.
                seen[boundary] = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                return leaves

            return keep

        wanted = {boundary for found in candidates.values() for boundary in found}
        self._forward(inputs, {boundary: record(boundary) for boundary in wanted})
        hooks: dict[str, Hook] = {}
        for node, found in candidates.items():
            for boundary in found:
                shape = tuple(values[node].shape) if twins.get(node) else None
                leaf = _nearest(seen.get(boundary, []), values[node], is_reshaped=shape is not None)
                if leaf is not None:
                    hooks[node] = Hook(boundary, leaf, shape)
                    break
        return hooks

    def spots(self, hooks: Mapping[str, Hook], inputs: Mapping[str, Tensor]) -> dict[str, Spot]:
        """The ways to hooks, as they are in the run of `inputs`."""
        ways: dict[Boundary, list[tuple[int | str, ...]]] = {}

        def record(boundary: Boundary) -> Callable[[Any], None]:
            def keep(whole: Any) -> None:
                ways[boundary] = [tuple(map(_step, path)) for path, _ in tree_flatten_with_path(whole)[0]]

            return keep

        boundaries = {hook.boundary for hook in hooks.values()}
        self._forward(inputs, {boundary: record(boundary) for boundary in boundaries}, is_whole=True)
        return {
            node: Spot(hook.boundary, ways[hook.boundary][hook.leaf], hook.shape is not None)
            for node, hook in hooks.items()
        }

    def read(self, hooks: Iterable[Hook], inputs: Mapping[str, Tensor]) -> dict[Hook, Tensor]:
        """Return the values that pass through the hooks in the run of `inputs`."""
        seen: dict[Hook, Tensor] = {}

        def keep(hook: Hook) -> Replacement:
            def change(value: Tensor) -> Tensor:
                seen[hook] = value.clone()
                return value

            return change

        self.outputs(inputs, {hook: keep(hook) for hook in hooks})
        return seen

    def outputs(self, inputs: Mapping[str, Tensor], changes: Mapping[Hook, Replacement]) -> Any:
        """Return the outputs of the module with the hooked values changed so."""
        by_boundary: dict[Boundary, dict[int, Replacement]] = {}
        for hook, change in changes.items():
            by_boundary.setdefault(hook.boundary, {})[hook.leaf] = _in_shape(hook.shape, change)
        return self._forward(inputs, {boundary: _changing(own) for boundary, own in by_boundary.items()})

    def target(self, outputs: Any, node: str) -> Tensor:
        """The tensor of the module's outputs that the graph has at `node`."""
        leaves = tree_flatten(outputs)[0]
        found: Tensor = leaves[self._program.outputs.index(Ref(node))]
        return found

    @one_module()
    @torch.no_grad()
    def _forward(
        self, inputs: Mapping[str, Tensor], actions: Mapping[Boundary, Any], *, is_whole: bool = False
    ) -> Any:
        named, spec = self._signature.example.leaves()
        args, kwargs = tree_unflatten([inputs.get(name, value) for name, value in named], spec)
        # Hooks act while their thread is in it: not for other threads, nor if an interruption leaves one.
        live: list[int] = []
        handles: list[Any] = []
        make = _looking if is_whole else _hook
        try:
            for boundary, action in actions.items():
                part = self._module.get_submodule(boundary.call.path)
                if boundary.is_output:
                    hook = make(boundary.call.call, action, live, lambda _, output: output)
                    handles.append(part.register_forward_hook(hook))
                else:
                    hook = make(boundary.call.call, action, live, lambda args, kwargs: (args, kwargs))
                    handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
                let_dictionaries_act_last(part)
            live.append(threading.get_ident())
            with eager(self._module):
                return self._module(*args, **kwargs)
        finally:
            live.clear()
            try:
                _remove(handles)
            except BaseException:  # interrupted: once more, for nothing may stay on the user's module
                _remove(handles)
                raise


def let_dictionaries_act_last(part: nn.Module) -> None:
    """Put the hooks of a dictionary behind all others: it reads what is there once it was changed."""
    for hooks in (part._forward_hooks, part._forward_pre_hooks):
        for number in [number for number, hook in [*hooks.items()] if getattr(hook, "acts_last", False)]:
            hooks.move_to_end(number)  # type: ignore[attr-defined]


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def boundaries(program: Program, node: str, only: Collection[str] | None = None) -> Iterator[Boundary]:
    """The boundaries at which a change of the node's value reaches all of its readers, and nothing else.

    With `only`, it has to reach these readers; whether others see it does not matter.
    """
    readers = program.readers[node]
    made_under = program.record_of[node].modules if node in program.record_of else ()
    is_returned = Ref(node) in program.outputs
    for port in program.ports:
        inside = sum(port.call in reader.modules for reader in readers)
        if node in port.outputs and port.call in made_under and not inside:
            yield Boundary(port.call, is_output=True)
        is_whole = inside == len(readers) and not is_returned
        if only is not None:
            is_whole = set(only) <= {reader.name for reader in readers if port.call in reader.modules}
        if node in port.inputs and port.call not in made_under and is_whole:
            yield Boundary(port.call, is_output=False)


RESHAPING = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"})
"""Operations that give a value another shape, its numbers in the same order."""


def reshaped(program: Program, node: str) -> str | None:
    """The record that is the node's value in another shape, where nothing else reads it."""
    readers = program.readers[node]
    is_it = len(readers) == 1 and readers[0].op in RESHAPING and Ref(node) not in program.outputs
    return readers[0].name if is_it else None


def _in_shape(shape: tuple[int, ...] | None, change: Replacement) -> Replacement:
    """The change of a value that is shown in another shape."""
    return change if shape is None else lambda value: change(value.reshape(shape)).reshape(value.shape)


def _changing(changes: Mapping[int, Replacement]) -> Leaves:
    def change(leaves: list[Any]) -> list[Any]:
        return [changes[i](leaf) if i in changes else leaf for i, leaf in enumerate(leaves)]

    return change


def _hook(
    call: int, action: Leaves, live: Sequence[int], changed: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """A hook that acts at one call of a module; `changed` says what of that it acts on."""
    calls = 0

    def hook(_: nn.Module, first: Any, second: Any) -> Any:
        nonlocal calls
        if threading.get_ident() not in live:
            return None
        calls += 1
        if calls - 1 != call:
            return None
        leaves, spec = tree_flatten(changed(first, second))
        return tree_unflatten(action(leaves), spec)

    return hook


def _looking(
    call: int, action: Callable[[Any], None], live: Sequence[int], seen: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """A hook that looks at one call of a module, and changes nothing."""
    calls = 0

    def hook(_: nn.Module, first: Any, second: Any) -> None:
        nonlocal calls
        if threading.get_ident() not in live:
            return
        calls += 1
        if calls - 1 == call:
            action(seen(first, second))

    return hook


def _step(key: Any) -> int | str:
    """A step of a way, as torch writes it."""
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            found: int | str = getattr(key, name)
            return found
    return str(key)


def _is_attribute(whole: Any, step: int | str) -> bool:
    return isinstance(step, str) and not isinstance(whole, Mapping)


def _replaced(whole: Any, way: tuple[int | str, ...], value: Tensor) -> Any:
    if not way:
        return value
    step, *rest = way
    inner = getattr(whole, str(step)) if _is_attribute(whole, step) else whole[step]
    new = _replaced(inner, tuple(rest), value)
    if isinstance(whole, tuple) and not hasattr(whole, "_fields"):
        return tuple(new if place == step else item for place, item in enumerate(whole))
    if isinstance(whole, tuple):  # one with names
        return type(whole)(*(new if item is inner else item for item in whole))
    made = copy.copy(whole)
    if _is_attribute(whole, step):
        setattr(made, str(step), new)
    else:
        made[step] = new
    return made


def _nearest(leaves: list[Any], value: Any, *, is_reshaped: bool = False) -> int | None:
    """The leaf that is `value` up to rounding, if there is one and no other comes near."""
    if not isinstance(value, Tensor):
        return None
    if is_reshaped:
        leaves = [
            leaf.reshape(value.shape) if isinstance(leaf, Tensor) and leaf.numel() == value.numel() else leaf
            for leaf in leaves
        ]
    alike = [
        (_distance(leaf, value), number)
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (leaf.shape, leaf.dtype) == (value.shape, value.dtype)
    ]
    if not alike:
        return None
    (nearest, number), *others = sorted(alike)
    is_it = nearest <= RESEMBLES and all(nearest * BY_FAR < other for other, _ in others)
    return number if is_it else None


def _distance(leaf: Tensor, value: Tensor) -> float:
    """The distance of two tensors, as a share of the second one's length."""
    one, other = leaf.detach().double(), value.detach().double()
    far, length = float((one - other).norm()), float(other.norm())
    if math.isnan(far):
        return 0.0 if bitwise_same(leaf, value) else math.inf
    return far / length if length else far
