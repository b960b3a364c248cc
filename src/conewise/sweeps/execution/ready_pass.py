"""A pass made ready: what each of its steps does, found out once; values have places in a list, not names.

A step follows an operation over a whole stack, which leaves nothing of Python in the processor's caches. So
what is looked at for a step is one short tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from conewise.program.rules import Rule
from conewise.sweeps.execution.fills import PassFills, Values
from conewise.sweeps.planning.passes.instructions import PassProgram

Held = list[Any]
"""The values that a run of a pass holds, by their places."""
Operand = Callable[[Held], Any]
"""Something that is read, of what is held."""
Operands = Callable[[Held], Sequence[Any]]
"""What a rule gets, of what is held."""
ReadyPut = Callable[[torch.Tensor | None, PassFills, Values], torch.Tensor]
"""A node's stack, None where there is none, with what worlds put into it."""
ReadyStep = tuple[int, int, Rule | None, int, Operands | None, ReadyPut | None, tuple[int, ...]]
"""The bytes it takes, its node's place, its rule and what that gets, what is put in, what is dropped.

A rule gets what stands at one place where there are no operands.
"""


@dataclass(frozen=True, slots=True)
class ReadyPass:
    """A pass, ready to run over any baseline. `narrowed` are the nodes of which some columns are computed.

    `stacks` and `weights` are the places of stacks and weights; `beginning` is what every run begins with:
    sizes, and None in all other places.
    """

    program: PassProgram
    narrowed: tuple[str, ...]
    steps: tuple[ReadyStep, ...]
    targets: tuple[tuple[str, Operand], ...]
    stacks: Mapping[str, int]
    weights: Mapping[str, int]
    beginning: Held

    def held(self, read: Callable[[str], Any], given: Mapping[str, Any]) -> Held:
        """What a run holds when it begins: sizes, weights, and the stacks that it is given."""
        held = self.beginning.copy()
        for name, place in self.weights.items():
            held[place] = read(name)
        for name, stack in given.items():
            if name in self.stacks:
                held[self.stacks[name]] = stack
        return held


class Places:
    """Places for the values of a pass, given out as they are asked for."""

    def __init__(self) -> None:
        self.stacks: dict[str, int] = {}
        self.weights: dict[str, int] = {}
        self.beginning: Held = []
        self._sizes: dict[tuple[int, ...], int] = {}

    def of_stack(self, node: str) -> int:
        """The place of a node's stack."""
        return self.stacks.setdefault(node, self._next(node in self.stacks))

    def of_weight(self, name: str) -> int:
        """The place of a weight."""
        return self.weights.setdefault(name, self._next(name in self.weights))

    def of_sizes(self, sizes: tuple[int, ...]) -> int:
        """The place of sizes, which stand there from the beginning."""
        place = self._sizes.setdefault(sizes, self._next(sizes in self._sizes))
        self.beginning[place] = sizes
        return place

    def _next(self, is_known: bool) -> int:
        if not is_known:
            self.beginning.append(None)
        return len(self.beginning) - 1


def all_of(places: Sequence[int]) -> Operands:
    """What stands at these places, none or several, as it is."""
    if not places:
        return _nothing
    return itemgetter(*places)


def each_of(operands: Sequence[Operand]) -> Operands:
    """What each of these reads."""
    if len(operands) == 2:
        first, second = operands
        return lambda held: (first(held), second(held))
    if len(operands) == 3:
        first, second, third = operands
        return lambda held: (first(held), second(held), third(held))
    return lambda held: [operand(held) for operand in operands]


def _nothing(held: Held) -> Sequence[Any]:
    del held
    return ()
