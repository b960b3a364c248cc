"""Edge pruning as a search for a circuit: a gate is learned for every edge, and the most open ones stay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from conewise.arguments import as_bytes
from conewise.circuits.circuit import Circuit
from conewise.circuits.circuit_data import is_whole, pruned
from conewise.circuits.circuit_files import CIRCUIT
from conewise.circuits.curve import best
from conewise.circuits.forwards import Asked
from conewise.circuits.gated_forward import Training, learned_gates
from conewise.errors import Argument, CircuitError
from conewise.files import as_path, is_there
from conewise.jobs.progress import bar
from conewise.jobs.runnable import How, Runnable
from conewise.sweeps.planning.planner import facts_of
from conewise.templates import heading
from conewise.threads import Turn


@dataclass(frozen=True, slots=True)
class PruningPlan:
    """What a training of gates takes: in each of its steps a forward and a backward pass over the prompts."""

    edges: int
    steps: int
    forwards: int

    def __str__(self) -> str:
        return (
            f"edge pruning of {self.edges:,} edges: {self.steps:,} steps, {self.forwards:,} forward and "
            "backward passes with a stream for every reader"
        )

    def _repr_html_(self) -> str:
        return heading(str(self))


class EdgePruning(Runnable[Circuit]):
    """A circuit by learned gates: see `Model.find_circuit`. `losses` has the distance at each step."""

    def __init__(self, given: Asked, top: int | None, training: Training) -> None:
        count = given.graph.count
        if not is_whole(top) or top is None or not 1 <= top < count:
            raise CircuitError(
                "edge pruning learns which edges stay: say how many with ",
                Argument("top"),
                f", 1 to {count - 1:,}; it is {top!r}.",
            )
        self.asked, self.top, self.training = given, int(top), training
        self.losses: tuple[float, ...] = ()

    @property
    def _turn(self) -> Turn:
        return self.asked.model._turn

    def plan(self, max_memory: int | str | None = None) -> PruningPlan:
        """Return what the training takes; nothing is computed."""
        as_bytes(max_memory)
        each = 1 if self.training.in_turn else len(self.asked.groups)
        return PruningPlan(self.asked.graph.count, self.training.steps, self.training.steps * each)

    def _run(self, how: How) -> Circuit:
        for option in (Argument("workers"), Argument("resume"), Argument("max_memory")):
            if getattr(how, option.name):
                raise CircuitError(
                    "a training is one sequence of steps in this process, each of which holds all of its "
                    "prompts; `batch_size` makes it less. Leave out ",
                    option,
                    ".",
                )
        if how.out is not None and is_there(as_path(how.out) / CIRCUIT, Path.is_file):
            raise CircuitError(
                f"{how.out} holds a circuit already; give another folder with ", Argument("out"), "."
            )
        given, graph = self.asked, self.asked.graph
        with bar(how.progress, self.training.steps, facts_of(given.model).device) as tell:
            numbers, losses = learned_gates(given, self.training, self.top, tell)
        self.losses = tuple(losses)
        scores = torch.sigmoid(numbers.double()).cpu().numpy()
        kept = pruned(graph, np.sort(best(numbers.double().cpu().numpy(), self.top)))
        found = Circuit.made(
            graph,
            graph.names(kept),
            of=given.model.name,
            method="edge-pruning",
            scores=dict(zip(graph.edges, scores.tolist(), strict=True)),
            helps=1.0,
            model=given.model,
        )
        if how.out is not None:
            found.save(as_path(how.out) / CIRCUIT)
        return found
