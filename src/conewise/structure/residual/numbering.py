"""Layers by number: which of the numbers in the path of a module says which layer it is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conewise.program.records import ModuleCall


@dataclass(frozen=True, slots=True)
class LayerNumber:
    """Where a layer is numbered: the path of the list, and the number there; '' and None for none.

    `is_ambiguous` where the path holds other numbers too, and nothing says which is the layer's.
    """

    path: str = ""
    number: int | None = None
    is_ambiguous: bool = False

    def is_of(self, call: ModuleCall) -> bool:
        """Whether the call is that of the numbered module itself."""
        return self.number is not None and call.path == f"{self.path}.{self.number}".removeprefix(".")

    def holds(self, call: ModuleCall) -> bool | None:
        """Whether a module belongs to the layer, by the numbers in its path; None where there are none."""
        if self.number is None:
            return None
        front = f"{self.path}." if self.path else ""
        if call.path.startswith(front) and call.path[len(front) :].split(".")[0].isdigit():
            return int(call.path[len(front) :].split(".")[0]) == self.number
        numbers = [int(part) for part in call.path.split(".") if part.isdigit()]
        return self.number in numbers if numbers else None


def numbers_of(calls: Sequence[ModuleCall]) -> list[LayerNumber]:
    """Where each layer is numbered: by the number that differs from layer to layer, else by the last."""
    paths = [call.path.split(".") for call in calls]
    found: list[LayerNumber] = []
    for path in paths:
        alike = [other for other in paths if _template(other) == _template(path)]
        numbers = [at for at, part in enumerate(path) if part.isdigit()]
        differing = [at for at in numbers if len({other[at] for other in alike}) > 1]
        chosen = differing if len(differing) == 1 else numbers[-1:]
        if not chosen:
            found.append(LayerNumber())
            continue
        at = chosen[0]
        ambiguous = len(numbers) > 1 and not differing
        found.append(LayerNumber(".".join(path[:at]), int(path[at]), ambiguous))
    return found


def _template(path: Sequence[str]) -> tuple[str, ...]:
    return tuple("#" if part.isdigit() else part for part in path)


def stack_of(call: ModuleCall, numbered: LayerNumber) -> str:
    """The path of the stack of layers that a layer is in."""
    return numbered.path if numbered.number is not None else call.path.rpartition(".")[0]


def short_names(stacks: Sequence[str]) -> dict[str, str]:
    """A name for each of several stacks: the first part of its path that no other has at the same depth."""
    if len(set(stacks)) < 2:
        return dict.fromkeys(stacks, "")
    return {stack: _short(stack, stacks) for stack in stacks}


def _short(stack: str, stacks: Sequence[str]) -> str:
    """The first part of a stack's path that no other stack has at the same depth."""
    parts = stack.split(".")
    for i, part in enumerate(parts):
        if all(other == stack or other.split(".")[i : i + 1] != [part] for other in stacks):
            return part
    return stack
