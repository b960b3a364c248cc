"""What goes into and comes out of each call of a module, read off the exported graph."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import fx, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from conewise.program.records import ModuleCall, ModulePort, Ref

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""What `torch.export` writes where it has lost the module of a node that it made itself: no module."""
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
        """Whether a value is read by others than those who read it as the nodes that hand it through."""
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
