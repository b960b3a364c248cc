"""Base and source computed by a pass: as one batch where they can be, replayed where that pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from conewise.runs.input_run import InputRun, PassRun
from conewise.sweeps.execution.cuda_graph import Record, Replayed
from conewise.sweeps.execution.wavefront import Wavefront
from conewise.sweeps.planning.passes.instructions import PassProgram
from conewise.sweeps.planning.shapes.shape_facts import ShapeFacts

Tensor = torch.Tensor


class BaselineRunner:
    """Runs of one shape, as many as the pass has worlds; what the pass keeps of each is read of them.

    `constants` gives what depends on no input. The first time is eager; with `record`, the second records a
    graph, and every further one is a replay: values then lie where they lay before, and hold until the next.
    """

    def __init__(
        self,
        wavefront: Wavefront,
        program: PassProgram,
        facts: ShapeFacts,
        constants: Callable[[str], Any],
        record: Record | None = None,
    ) -> None:
        self._wavefront, self._program, self._constants = wavefront, program, constants
        self._batch_dim = facts.layout.batch_dim
        self._inputs = [leaf.name for leaf in facts.program.inputs]
        self._record = record
        self._replayed: Replayed | None = None
        self._parts: list[dict[str, Any]] | None = None
        self._runs = 0

    @property
    def stays(self) -> bool:
        """Whether values lie in the memory of a graph, where those of the next runs will lie."""
        return self._replayed is not None

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def run(self, runs: Sequence[InputRun]) -> list[PassRun]:
        """These runs, computed together."""
        self._runs += 1
        if self._record is not None and self._runs > 1:
            parts = self._replay([run.inputs for run in runs])
        else:
            parts = self._split(self._computed(self._stacked([run.inputs for run in runs])))
        return [PassRun(run, {**part, **run.inputs}) for run, part in zip(runs, parts, strict=True)]

    def _replay(self, given: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Any]]:
        slots = {_slot(name, w): one[name] for w, one in enumerate(given) for name in self._inputs}
        if self._replayed is None:
            assert self._record is not None

            def action(slot: Mapping[str, Tensor]) -> dict[str, Tensor]:
                inputs = [{name: slot[_slot(name, w)] for name in self._inputs} for w in range(len(given))]
                return self._computed(self._stacked(inputs))

            own = {name: value.clone() for name, value in slots.items()}
            self._replayed = Replayed(action, own, self._record)
            self._parts = self._split(self._replayed.outputs)
        self._replayed.run(slots)
        assert self._parts is not None
        return self._parts

    def _stacked(self, given: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        if len(given) == 1:
            return {name: given[0][name] for name in self._inputs}
        found = {}
        for name in self._inputs:
            dim = self._batch_dim[name]
            assert dim is not None
            found[name] = torch.cat([one[name] for one in given], dim)
        return found

    def _computed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._wavefront.run(self._program, self._constants, given=inputs)

    def _split(self, values: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """The values of each run: views of what was computed together."""
        worlds = self._program.worlds
        if worlds == 1:
            return [dict(values)]
        found: list[dict[str, Any]] = [{} for _ in range(worlds)]
        for name, value in values.items():
            dim = self._batch_dim[name]
            assert dim is not None
            for part, own in zip(found, value.chunk(worlds, dim), strict=True):
                part[name] = own
        return found


def _slot(name: str, world: int) -> str:
    return f"{world} {name}"
