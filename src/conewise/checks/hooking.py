"""The original module, run with forward hooks that read or replace values: no graph takes part.

A node of the graph can be hooked where it goes into or comes out of a call of a module, as long as the
hook changes it for all who read it.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from conewise.anatomy.wiring import ModulePaths
from conewise.program.calls import Signature
from conewise.program.export import called, eager
from conewise.program.records import ModuleCall, Program, Ref
from conewise.program.walk import bitwise_same
from conewise.threads import one_module

Change = Callable[[Tensor], Tensor]

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

    `way` leads to it from the output, or from (args, kwargs): at each step an index, a key or an attribute's
    name. It is the same in calls that hand over other things too; None in a container of which torch knows no
    ways. `shape` is the node's own in the run where the hook was found, where the module shows it in another
    shape.
    """

    boundary: Boundary
    leaf: int
    way: tuple[int | str, ...] | None
    shape: tuple[int, ...] | None = None

    def read(self, whole: Any) -> Any:
        """Return the value that stands there; None where there is none."""
        for step in self.way or ():
            try:
                whole = getattr(whole, str(step)) if _is_attribute(whole, step) else whole[step]
            except (IndexError, KeyError, AttributeError, TypeError):
                return None
        return whole

    def replaced(self, whole: Any, value: Tensor) -> Any:
        """The whole with another tensor there. Nothing is written to, and all else is the very same."""
        return _replaced(whole, self.way or (), value)


@contextmanager
def hooks_on(
    module: nn.Module,
    actions: Iterable[tuple[Boundary, Callable[[Any], Any]]],
    begin: Callable[[tuple[Any, ...], Mapping[str, Any]], None] = lambda *_: None,
) -> Iterator[None]:
    """Let functions act at boundaries of a module while the block lasts; then they are gone, however it ends.

    A function takes the output of the call, or (args, kwargs), and returns what goes on in its place, or
    None. Calls are counted in each forward of the whole module, whose arguments `begin` gets first.
    """
    # Hooks act while their thread is in it: not for other threads, nor if an interruption leaves one.
    live: list[int] = []
    handles: list[Any] = []
    calls: Counter[int] = Counter()

    def start(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if threading.get_ident() in live:
            calls.clear()
            begin(args, kwargs)

    def hook(number: int, boundary: Boundary, act: Callable[[Any], Any]) -> Callable[..., Any]:
        def acting(_: nn.Module, first: Any, second: Any) -> Any:
            if threading.get_ident() not in live:
                return None
            calls[number] += 1
            if calls[number] - 1 != boundary.call.call:
                return None
            return act(second if boundary.is_output else (first, second))

        return acting

    try:
        handles.append(module.register_forward_pre_hook(start, with_kwargs=True))
        for number, (boundary, act) in enumerate(actions):
            part = module.get_submodule(boundary.call.path)
            if boundary.is_output:
                handles.append(part.register_forward_hook(hook(number, boundary, act)))
            else:
                handles.append(part.register_forward_pre_hook(hook(number, boundary, act), with_kwargs=True))
            # A dictionary reads what is there once it was changed.
            for hooks in (part._forward_hooks, part._forward_pre_hooks):
                for key in [key for key, one in [*hooks.items()] if getattr(one, "acts_last", False)]:
                    hooks.move_to_end(key)  # type: ignore[attr-defined]
        live.append(threading.get_ident())
        yield
    finally:
        live.clear()
        try:
            _remove(handles)
        except BaseException:  # interrupted: once more, for nothing may stay on the user's module
            _remove(handles)
            raise


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


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
        *,
        is_exact: bool = False,
    ) -> dict[str, Hook]:
        """A hook for each node of `values` that has one.

        A change there reaches all who read the node; or at least its `readers`, where these are given; with
        `is_exact`, these alone.

        The graph says at which call of a module a node can be seen, its shape and dtype say which tensor of
        that call it is. Where several are alike, it is the one whose value in the run of `inputs` is by far
        the nearest to the node's own. Values need not be equal: a module may round otherwise than its graph.
        A node without a boundary of its own, or that resembles nothing there, has none; unless all that is
        read of it is its value in another shape, which has one.
        """
        candidates = {
            node: tuple(boundaries(self._program, node, (readers or {}).get(node), is_exact=is_exact))
            for node in values
        }
        twins = {node: reshaped(self._program, node) for node in values if not candidates[node]}
        for node, twin in twins.items():
            if twin is not None and node not in (readers or {}):
                candidates[node] = tuple(boundaries(self._program, twin))
        seen: dict[Boundary, tuple[Sequence[tuple[int | str, ...] | None], list[Any]]] = {}

        def keep(boundary: Boundary, whole: Any) -> None:
            leaves = tree_flatten(whole)[0]
            ways: Sequence[tuple[int | str, ...] | None]
            try:
                ways = [tuple(map(_step, path)) for path, _ in tree_flatten_with_path(whole)[0]]
            except ValueError:  # torch knows no ways into such a container
                ways = [None] * len(leaves)
            # Copies: the module may write to what it returned.
            seen[boundary] = ways, [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        wanted = dict.fromkeys(boundary for found in candidates.values() for boundary in found)
        self._forward(inputs, {boundary: partial(keep, boundary) for boundary in wanted})
        hooks: dict[str, Hook] = {}
        for node, found in candidates.items():
            for boundary in found:
                ways, leaves = seen.get(boundary, ([], []))
                shape = tuple(values[node].shape) if twins.get(node) else None
                leaf = _nearest(leaves, values[node], is_reshaped=shape is not None)
                if leaf is not None:
                    hooks[node] = Hook(boundary, leaf, ways[leaf], shape)
                    break
        return hooks

    def read(self, hooks: Iterable[Hook], inputs: Mapping[str, Tensor]) -> dict[Hook, Tensor]:
        """Return the values that pass through the hooks in the run of `inputs`."""
        seen: dict[Hook, Tensor] = {}

        def keep(hook: Hook, value: Tensor) -> Tensor:
            seen[hook] = value.clone()
            return value

        self.outputs(inputs, {hook: partial(keep, hook) for hook in hooks})
        return seen

    def outputs(self, inputs: Mapping[str, Tensor], changes: Mapping[Hook, Change]) -> Any:
        """Return the outputs of the module with the hooked values changed so."""
        by_boundary: dict[Boundary, list[Hook]] = {}
        for hook in changes:
            by_boundary.setdefault(hook.boundary, []).append(hook)

        def change(hooks: Sequence[Hook], whole: Any) -> Any:
            leaves, spec = tree_flatten(whole)
            for hook in hooks:
                value = leaves[hook.leaf]
                if hook.shape is None:
                    leaves[hook.leaf] = changes[hook](value)
                else:
                    leaves[hook.leaf] = changes[hook](value.reshape(hook.shape)).reshape(value.shape)
            return tree_unflatten(leaves, spec)

        return self._forward(inputs, {one: partial(change, own) for one, own in by_boundary.items()})

    def target(self, outputs: Any, node: str) -> Tensor:
        """The tensor of the module's outputs that the graph has at `node`."""
        leaves = tree_flatten(outputs)[0]
        found: Tensor = leaves[self._program.outputs.index(Ref(node))]
        return found

    @one_module()
    @torch.no_grad()
    def _forward(self, inputs: Mapping[str, Tensor], actions: Mapping[Boundary, Callable[[Any], Any]]) -> Any:
        call = self._signature.example.mapped(inputs.get)
        with hooks_on(self._module, actions.items()), eager(self._module):
            return called(self._module, self._program, call)


PUT_IN = frozenset({"Grafted", "Pruned", "Splice"})
"""The types of modules that act by hooks of their own: what splices and surgeries put in."""


def boundaries(
    program: Program, node: str, only: Collection[str] | None = None, *, is_exact: bool = False
) -> Iterator[Boundary]:
    """The boundaries at which a change of the node's value reaches all of its readers, and nothing else.

    With `only`, it has to reach these readers; whether others see it does not matter unless it `is_exact`.
    With none of them, calls may just show it among what they return, which nobody reads: attention weights.
    """
    readers = program.readers[node]
    made_under = program.record_of[node].modules if node in program.record_of else ()
    is_returned = Ref(node) in program.outputs
    # At a reader's input, what was put in acts behind all other hooks: there its result is not seen yet.
    ports = sorted(program.ports, key=lambda port: port.type_name not in PUT_IN or node not in port.outputs)
    for port in ports:
        inside = sum(port.call in reader.modules for reader in readers)
        if node in port.outputs and port.call in made_under and not inside and not is_exact:
            yield Boundary(port.call, is_output=True)
        is_whole = inside == len(readers) and not is_returned
        if only is not None:
            reached = {reader.name for reader in readers if port.call in reader.modules}
            is_whole = reached == set(only) if is_exact else set(only) <= reached
        if node in port.inputs and port.call not in made_under and is_whole:
            yield Boundary(port.call, is_output=False)
    if only is not None and not only:
        yield from (Boundary(call, is_output=True) for call in reversed(made_under) if call.path)


RESHAPING = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"})
"""Operations that give a value another shape, its numbers in the same order."""


def reshaped(program: Program, node: str) -> str | None:
    """The record that is the node's value in another shape, where nothing else reads it."""
    readers = program.readers[node]
    is_it = len(readers) == 1 and readers[0].op in RESHAPING and Ref(node) not in program.outputs
    return readers[0].name if is_it else None


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
