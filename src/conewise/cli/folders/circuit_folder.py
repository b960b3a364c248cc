"""The folder of a search for a circuit: its decisions, the circuit, its evaluation, its curve, its story."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conewise.errors import CircuitError, SweepError
from conewise.reading import is_there, read_json
from conewise.sweeps.storage.decoding import decoded

if TYPE_CHECKING:
    from conewise.circuits.circuit.circuit import Circuit
    from conewise.circuits.circuit.evaluation import Evaluation
    from conewise.report.curve import Curve
    from conewise.report.story import Story

CIRCUIT, SEARCH, EDGES, MEASURED, STORY = (
    "circuit.json",
    "search.json",
    "edges",
    "evaluation.json",
    "story.json",
)
CIRCUIT_FILES = (CIRCUIT, SEARCH, EDGES, MEASURED)


@dataclass(frozen=True)
class FoundCircuit:
    """A circuit, and all that its page says."""

    circuit: Circuit
    evaluation: Evaluation
    curve: Curve
    story: Story

    def write(self, folder: Path) -> None:
        """Keep it in a folder; the circuit goes last, so that a folder with one has the rest too."""
        from conewise.files import write_whole

        measured = {"evaluation": asdict(self.evaluation), "curve": asdict(self.curve)}
        try:
            write_whole(folder / STORY, f"{self.story.to_json()}\n".encode())
            write_whole(folder / MEASURED, f"{json.dumps(measured, indent=2)}\n".encode())
        except OSError as error:
            raise CircuitError(
                f"the circuit cannot be kept in {folder}: {error.strerror or error}."
            ) from None
        self.circuit.save(folder / CIRCUIT)

    def report(self, path: Path) -> Path:
        """Write its page."""
        return self.circuit.report(path, curve=self.curve, evaluation=self.evaluation, story=self.story)


def is_circuit(folder: Path) -> bool:
    """Whether a folder holds a circuit that was found."""
    return is_there(folder / CIRCUIT, Path.is_file)


def read_circuit(folder: Path) -> FoundCircuit:
    """The circuit in a folder. Raises CircuitError where something of it is missing or damaged."""
    from conewise.circuits.circuit.circuit import Circuit
    from conewise.circuits.circuit.evaluation import Evaluation
    from conewise.report.curve import Curve
    from conewise.report.story import Story

    circuit = Circuit.load(folder / CIRCUIT)
    try:
        whole = read_json(folder / MEASURED)
        if not isinstance(whole, dict) or not {"evaluation", "curve"} <= set(whole):
            raise ValueError("it has no evaluation and curve")
        evaluation: Evaluation = decoded(whole["evaluation"], Evaluation, "evaluation")
        curve: Curve = decoded(whole["curve"], Curve, "curve")
        story = Story.from_json((folder / STORY).read_text(encoding="utf-8"))
    except (OSError, ValueError, SweepError) as error:
        why = getattr(error, "strerror", None) or error
        raise CircuitError(
            f"the search in {folder} is damaged: {MEASURED} or {STORY} cannot be read ({why}). Search again "
            f"in another folder; the circuit itself is in {CIRCUIT}."
        ) from None
    return FoundCircuit(circuit, evaluation, curve, story)
