"""Ablations: what a removed edge carries instead of what its writer wrote."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conewise.edges.edge_facts import EdgeFacts
from conewise.errors import Argument, CircuitError
from conewise.program.tensors import computing
from conewise.runs.reader import reader
from conewise.runs.reading import Reading

Tensor = torch.Tensor

ABLATIONS = ("resample", "zero", "mean")


class Ablated:
    """The parts that removed edges carry, wherever the stream is read.

    `resample`: the parts of `source`, a run of the same shape as `base`. `zero`: nothing. `mean`: each
    writer's mean over the prompts and positions of `source`, or of `base` where there is none.
    """

    def __init__(self, facts: EdgeFacts, ablation: str, base: Reading, source: Reading | None) -> None:
        if ablation not in ABLATIONS:
            raise CircuitError(
                Argument("ablation", ablation), f" is none of {', '.join(map(repr, ABLATIONS))}."
            )
        if ablation == "resample" and source is None:
            raise CircuitError(
                "an edge that is removed carries what the source has there, and there is no `source`. Give a "
                "run on other prompts, or ",
                Argument("ablation", "zero"),
                " or ",
                Argument("ablation", "mean"),
                ".",
            )
        self.ablation = ablation
        self._parts = facts.parts
        self._base, self._read = reader(base), reader(base if source is None else source)
        self._known: dict[str, Tensor] = {}

    def at(self, entry: str) -> Tensor:
        """[writer, batch, pos, d_model]: what removed edges carry at a value of the stream."""
        if self._parts.is_carried_unchanged:
            count = self._parts.components.entries[entry][0].writers
            return self.whole[:count]
        if entry not in self._known:
            self._known[entry] = self._made(lambda read: self._parts.parts(read, entry))
        return self._known[entry]

    @property
    def whole(self) -> Tensor:
        """The parts of all writers, where they do not depend on where the stream is read."""
        if "" not in self._known:
            self._known[""] = self._made(self._parts.parts)
        return self._known[""]

    def _made(self, parts: Callable[[Callable[[str], Tensor]], Tensor]) -> Tensor:
        with computing():
            if self.ablation == "zero":
                return torch.zeros_like(parts(self._base))
            found = parts(self._read)
            if torch.isnan(found).any():
                raise CircuitError("the source has NaN in what its components write; nothing can be removed.")
            if self.ablation == "resample":
                return found
            return found.mean((1, 2), keepdim=True).expand_as(parts(self._base))
