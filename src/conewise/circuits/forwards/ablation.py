"""Ablations: what a removed edge carries instead of what its writer wrote."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conewise.edges.edge_facts import EdgeFacts
from conewise.edges.replaced_parts import wide
from conewise.errors import NAN_OF_PADDING, Argument, CircuitError
from conewise.program.tensors import computing, mean_of
from conewise.runs.interventions.interventions import PARTS
from conewise.runs.reader import reader
from conewise.runs.reading import Reading
from conewise.structure.axes.padding import shown_entries

Tensor = torch.Tensor

ABLATIONS = ("resample", "zero", "mean")


class Ablated:
    """The parts that removed edges carry, wherever the stream is read.

    `resample`: the parts of `source`, a run of the same shape as `base`. `zero`: nothing. `mean`: each
    writer's mean over the prompts and positions of `source`, or of `base` where there is none. Means are
    taken without padding.
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
        self._parts, self._entry = facts.parts, facts.components.readers[-1].entry
        self._run = base if source is None else source
        self._base, self._read = reader(base), reader(self._run)
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

    def stream(self, entry: str, constant: Tensor) -> Tensor:
        """[batch, pos, d_model]: what a reader sees that lost every edge: parts carried unchanged.

        `constant` is what no writer wrote; the source's own stream has it already.
        """
        if self.ablation == "resample":
            return self._parts.stream(self._read, entry)
        return self.at(entry).sum(0, dtype=wide(constant.dtype)) + constant

    def _made(self, parts: Callable[[Callable[[str], Tensor]], Tensor]) -> Tensor:
        with computing():
            if self.ablation == "zero":
                return torch.zeros_like(parts(self._base))
            found = parts(self._read)
            if torch.isnan(found).any():
                raise CircuitError(
                    "the source has NaN in what its components write; nothing can be removed. "
                    f"{NAN_OF_PADDING}"
                )
            if self.ablation == "resample":
                return found
            run = self._run
            shown = shown_entries(run.model.program, run.inputs, PARTS, found.shape, self._entry)
            return mean_of(found, PARTS, shown)[:, :1, :1].expand_as(parts(self._base))
