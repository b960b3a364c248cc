"""The folder of a search for a circuit: its decisions, the circuit, its evaluation, its curve, its story."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conewise.errors import CircuitError, SweepError
from conewise.formats import Format
from conewise.reading import is_there, read_json
from conewise.sweeps.storage.decoding import decoded

if TYPE_CHECKING:
    from conewise.circuits.circuit.circuit import Circuit
    from conewise.circuits.circuit.evaluation import Evaluation
    from conewise.report.circuit_page import Curve
    from conewise.report.story import Story

CIRCUIT, SEARCH, EDGES, MEASURED, STORY = (
    "circuit.json",
    "search.json",
    "edges",
    "evaluation.json",
    "story.json",
)
FORMAT = Format("conewise evaluation", 1)
RATIOS = ("faithfulness", "completeness")
"""What of an evaluation is NaN where it is a ratio over nothing; JSON has no NaN, and files have null."""

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

        measured = {"evaluation": _plain(asdict(self.evaluation)), "curve": _plain(asdict(self.curve))}
        text = json.dumps({**FORMAT.header(), **measured}, indent=2)
        try:
            write_whole(folder / STORY, f"{self.story.to_json()}\n".encode())
            write_whole(folder / MEASURED, f"{text}\n".encode())
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
    from conewise.report.circuit_page import Curve
    from conewise.report.story import Story

    circuit = Circuit.load(folder / CIRCUIT)
    try:
        whole = FORMAT.expect(read_json(folder / MEASURED), str(folder / MEASURED))
        if not {"evaluation", "curve"} <= set(whole):
            raise ValueError("it has no evaluation and curve")
        evaluation = _evaluation(whole["evaluation"], Evaluation)
        curve: Curve = decoded(whole["curve"], Curve, "curve")
        story = Story.from_json((folder / STORY).read_text(encoding="utf-8"), str(folder / STORY))
    except (OSError, ValueError, SweepError) as error:
        why = getattr(error, "strerror", None) or error
        raise CircuitError(
            f"the search in {folder} is damaged: {MEASURED} or {STORY} cannot be read ({why}). Search again "
            f"in another folder; the circuit itself is in {CIRCUIT}."
        ) from None
    return FoundCircuit(circuit, evaluation, curve, story)


def _plain(value: Any) -> Any:
    """The value with null for NaN."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _evaluation(found: Any, kind: type[Evaluation]) -> Evaluation:
    """The evaluation as it was written. Raises ValueError for what is none."""
    undefined = [name for name in RATIOS if isinstance(found, Mapping) and found.get(name, 0) is None]
    known = {**found, **dict.fromkeys(undefined, 0.0)} if undefined else found
    read: Evaluation = decoded(known, kind, "evaluation")
    for name in undefined:
        read = replace(read, **{name: math.nan})  # type: ignore[arg-type]
    return read
