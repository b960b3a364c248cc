"""What a plan depends on besides what is asked and the shape of the runs: plain values, read off the runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from conewise.program.tensors import Tensor, computing
from conewise.runs.reading import Reading
from conewise.sweeps.planning.first_change import first_difference
from conewise.sweeps.planning.shapes.shape_facts import ShapeFacts


@dataclass(frozen=True, slots=True)
class StandingEdit:
    """An edit that stands in the base: its number, its node, whether it replaces the node's whole value."""

    number: int
    node: str
    covers: bool
    is_function: bool
    site: tuple[str, int | None, str] = ("", None, "")


@dataclass(frozen=True, slots=True)
class StoredCut:
    """How a stored run was cut up: another cut would round differently."""

    evaluator: str
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a plan depends on besides what is asked and the shape of the runs.

    `first_change` is the first position at which base and source can differ, `differing` the inputs that do.
    `masks` says what attention masks hide, `edits` what stands in the base. `tail` is how many of the last
    positions the metrics read, where each reads one: more than 1 where prompts are padded behind. `obstacle`
    says why worlds cannot be stacked. `cut` is how a run that is resumed was cut.
    """

    first_change: int = 0
    differing: frozenset[str] = frozenset()
    masks: tuple[tuple[str, Any], ...] = ()
    edits: tuple[StandingEdit, ...] = ()
    tail: int = 1
    obstacle: str = ""
    max_memory: int | None = None
    evaluator: str = "auto"
    cut: StoredCut | None = None

    def of_runs(self) -> Conditions:
        """Those that the runs make, without what was asked of the plan."""
        return replace(self, max_memory=None, evaluator="auto", cut=None)


def read_conditions(
    base: Reading, source: Reading | None, shape: ShapeFacts, read: Callable[[str], Any]
) -> Conditions:
    """The conditions of two runs of one shape, without what is asked of the plan; `read` reads the base.

    Whether anything keeps worlds from being stacked is not known yet.
    """
    first, differing = 0, frozenset[str]()
    if source is not None:
        first, differing = first_difference(base, source, shape.finder, shape.layout)
    with computing():
        masks = tuple(sorted(shape.masks(read).items(), key=lambda item: item[0]))
    return Conditions(first, differing, masks, standing_edits(base))


def standing_edits(base: Reading) -> tuple[StandingEdit, ...]:
    """What stands in a base, in the order in which it was patched."""
    edits = []
    for number, edit in enumerate(base.edits):
        site = edit.place.name, edit.place.layer, edit.place.stack
        is_function = not isinstance(edit.part, Tensor)
        edits.append(StandingEdit(number, edit.node, edit.covers, is_function, site))
    return tuple(edits)
