"""Stages: the readers of a model in groups that are computed together, in the order of computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conewise.structure.components.components import Reader


@dataclass(frozen=True, slots=True)
class Stage:
    """The attention of a layer, its MLP, or the logits. None of its readers reads what another one leads to.

    `first` is the number of its first reader; `kind` is "attention", "mlp" or "logits".
    """

    number: int
    kind: str
    first: int
    readers: tuple[Reader, ...]

    @property
    def rows(self) -> slice:
        """The numbers of its readers."""
        return slice(self.first, self.first + len(self.readers))

    @property
    def name(self) -> str:
        """The stage in words."""
        if self.kind == "logits":
            return "the logits"
        what = "attention" if self.kind == "attention" else "the MLP"
        return f"{what} of layer {self.readers[0].layer}"


def stages_of(readers: Sequence[Reader]) -> tuple[Stage, ...]:
    """The stages of all readers, which stand in the order of computation."""
    groups: list[tuple[tuple[str, int | None], list[Reader]]] = []
    for reader in readers:
        kind = "attention" if reader.slot in ("q", "k", "v") else reader.slot
        if not groups or groups[-1][0] != (kind, reader.layer):
            groups.append(((kind, reader.layer), []))
        groups[-1][1].append(reader)
    found: list[Stage] = []
    first = 0
    for (kind, _), group in groups:
        found.append(Stage(len(found), kind, first, tuple(group)))
        first += len(group)
    return tuple(found)
