"""What goes into and comes out of each call of a module, read off the exported graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import fx

from conewise.program.records import ModuleCall, ModulePort, Ref

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""What `torch.export` writes where it has lost the module of a node that it made itself: no module."""


def module_stack(node: fx.Node) -> Iterator[tuple[str, ModuleCall, str]]:
    """The calls of modules that the node was made under, outermost first, the root left out.

    Each with torch's own key, which distinguishes calls, and with the type of the module.
    """
    for key, (path, type_name) in (node.meta.get("nn_module_stack") or {}).items():
        if path and path != _NO_MODULE:
            suffix = key.rpartition("@")[2]
            number = int(suffix) if "@" in key and suffix.isdigit() else 0
            yield key, ModuleCall(path.partition("@")[0], number), str(type_name)


def find_ports(
    graph: fx.Graph, value_of: Callable[[fx.Node], Any]
) -> Callable[[Collection[str]], tuple[ModulePort, ...]]:
    """A function that gives the ports, given which names the program computes.

    A call's outputs are the values made under it and used outside of it; its inputs are the
    values made outside and used under it. `value_of` says what became of a node.
    """
    inside: dict[tuple[str, str], set[fx.Node]] = {}
    calls: dict[str, ModuleCall] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            for key, call, type_name in module_stack(node):
                inside.setdefault((key, type_name), set()).add(node)
                calls.setdefault(key, call)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: list[tuple[ModuleCall, str, list[Any], list[Any]]] = []
    for (key, type_name), members in inside.items():
        ordered = sorted(members, key=order.__getitem__)
        outputs = [n for n in ordered if any(user not in members for user in n.users)]
        inputs = [arg for n in ordered for arg in n.all_input_nodes if arg not in members]
        found.append((calls[key], type_name, [value_of(n) for n in inputs], [value_of(n) for n in outputs]))

    def ports(known: Collection[str]) -> tuple[ModulePort, ...]:
        def names(values: list[Any]) -> tuple[str, ...]:
            kept = (v.name for v in values if isinstance(v, Ref) and v.name in known)
            return tuple(dict.fromkeys(kept))

        found_ports: list[ModulePort] = []
        for call, type_name, inputs, outputs in found:
            read, made = names(inputs), names(outputs)
            # A value that is handed through on the way (`x.to(x.dtype)`) is the module's output
            # only where nothing else comes out: dropout, not a norm.
            made = tuple(name for name in made if name not in read) or made
            found_ports.append(ModulePort(call, type_name.rpartition(".")[2], read, made))
        return tuple(found_ports)

    return ports
