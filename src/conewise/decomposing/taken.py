"""A run, as far as it is taken apart here; and values of it, each read once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from conewise.edges.edge_facts import Structured
from conewise.locations.located import Located
from conewise.locations.places import PlaceLike
from conewise.program.streaming import field_names, output_names
from conewise.program.tensors import Tensor


class Taken(Structured, Protocol):
    """A captured model: its structure, and where its places are."""

    def locate(self, place: PlaceLike) -> Located:
        """Find a place."""


class Patched(Protocol):
    """A patch that is in force."""

    @property
    def place(self) -> Any:
        """Where it is."""


class TakenRun(Protocol):
    """A run or a world of it. What is read is not watched: nothing here writes to it."""

    @property
    def model(self) -> Taken:
        """What was run."""

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """What it was given."""

    @property
    def edits(self) -> Sequence[Patched]:
        """The patches in force."""

    def value_at(self, node: str) -> Any:
        """The value at a node of the graph."""

    def read(self, place: PlaceLike) -> Tensor:
        """The value at a place, in natural axes."""


def reading(run: TakenRun) -> Callable[[str], Any]:
    """Reads values of a run by the graph's own names, each once."""
    return functools.cache(run.value_at)


def logits_name(run: TakenRun) -> str | None:
    """The node of the logits: the output of that name, or the only one there is. None where neither is."""
    program = run.model.program
    names = field_names(program, "logits") or output_names(program)
    return names[0] if len(names) == 1 else None


def difference(found: Tensor, whole: Tensor) -> Tensor:
    """How far two values are apart; what is not finite in the second, or alike in both, is 0 apart."""
    apart = (found.double() - whole.double()).abs()
    return torch.where(whole.isfinite(), apart, torch.zeros_like(apart))


def largest(whole: Tensor) -> float:
    """The largest finite number of a value, 1 where there is none but 0."""
    return float(torch.where(whole.isfinite(), whole.double().abs(), 0.0).max()) or 1.0


def patches_in_the_way(run: TakenRun) -> str:
    """What to say of patches, where parts do not add up."""
    if not run.edits:
        return ""
    places = ", ".join(dict.fromkeys(str(edit.place) for edit in run.edits))
    return (
        f" This world is patched at {places}: what a patch puts into the stream, or into what heads add to "
        "it, no component wrote. Patch what components read or make (z, mlp_out), or take the run apart."
    )
