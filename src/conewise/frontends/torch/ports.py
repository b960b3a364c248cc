"""What goes into and comes out of each call of a module, read off the exported graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from conewise.frontends.torch.records import ModuleCall, ModulePort, Ref


def find_ports(
    graph: fx.Graph, value_of: Callable[[fx.Node], Any]
) -> Callable[[Collection[str]], tuple[ModulePort, ...]]:
    """A function that gives the ports, once it is told which names the program computes.

    A call's outputs are the values made under it and used outside of it; its inputs are the
    values made outside and used under it. `value_of` says what became of a node.
    """
    inside: dict[tuple[str, str], set[fx.Node]] = {}
    for node in graph.nodes:
        for key, (path, type_name) in (node.meta.get("nn_module_stack") or {}).items():
            if path and node.op == "call_function":
                inside.setdefault((key, str(type_name)), set()).add(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: list[tuple[ModuleCall, str, list[Any], list[Any]]] = []
    for (key, type_name), members in inside.items():
        ordered = sorted(members, key=order.__getitem__)
        path = next(p for k, (p, _) in ordered[0].meta["nn_module_stack"].items() if k == key).partition("@")[
            0
        ]
        suffix = key.rpartition("@")[2]
        call = ModuleCall(path, int(suffix) if "@" in key and suffix.isdigit() else 0)
        outputs = [n for n in ordered if any(user not in members for user in n.users)]
        inputs = [arg for n in ordered for arg in n.all_input_nodes if arg not in members]
        found.append((call, type_name, [value_of(n) for n in inputs], [value_of(n) for n in outputs]))

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
