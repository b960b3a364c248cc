"""The folders of `--out`: what was asked, what is done of it, and the result."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conewise.cli.failing import CommandError, shell_command
from conewise.cli.output import expect_writable, plain
from conewise.errors import CircuitError, SweepError
from conewise.files import Format, is_leftover, is_there, read_json, write_whole
from conewise.report.story import STORY, Story
from conewise.sweeps.result import Result, load_result
from conewise.sweeps.storage.archive import MANIFEST, VALUES, is_result, save
from conewise.sweeps.storage.codec import decoded
from conewise.sweeps.storage.provenance import differences

if TYPE_CHECKING:
    from conewise.circuits.circuit import Circuit
    from conewise.circuits.evaluation import Evaluation
    from conewise.report.circuit import Curve
    from conewise.report.folded import Folded
    from conewise.report.inside import Inside

FOLDED, INSIDE = "folded.json", "inside.json"
FILES = [STORY, FOLDED, INSIDE, VALUES, MANIFEST]
"""The files of a run, in the order in which they are written."""


def write_run(
    folder: str | Path,
    result: Result,
    story: Story | None = None,
    folded: Folded | None = None,
    inside: Inside | None = None,
    *,
    unfinished: bool = False,
) -> Path:
    """Write all of a run to a folder that holds none yet; returns the folder.

    The result goes last, and its manifest last of all: a folder that has one has the rest too. `unfinished`:
    what is there without a manifest was left by a process that died while it wrote, and is replaced.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [MANIFEST] if unfinished else FILES
        taken = [name for name in taken if (folder / name).exists()]
        if taken:
            raise SweepError(
                f"{folder} holds {taken[0]} already; it was left as it is. Write to another folder, or "
                "delete the old run first."
            )
        for name, part in ((STORY, story), (FOLDED, folded), (INSIDE, inside)):
            if part is not None:
                write_whole(folder / name, f"{part.to_json()}\n".encode())
    except OSError as error:
        raise SweepError(f"the run cannot be written to {folder}: {error.strerror or error}.") from None
    return save(result, folder, unfinished=unfinished)


def read_run(folder: str | Path) -> tuple[Result, Story | None, Folded | None]:
    """Return the result in a folder, and its story and folded graph where they are known.

    Raises SweepError when there is no result, or when something in the folder is damaged.
    """
    from conewise.report.folded import Folded

    result = load_result(folder)
    return result, result.story, Folded.read(Path(folder) / FOLDED)


def read_inside(folder: str | Path) -> Inside | None:
    """Return the inside of the base run in a folder, where it was kept. Raises SweepError where damaged."""
    from conewise.report.inside import Inside

    return Inside.read(Path(folder) / INSIDE)


CIRCUIT, SEARCH, EDGES, MEASURED = "circuit.json", "search", "edges", "evaluation.json"
FORMAT = Format("conewise evaluation", 1)
RATIOS = ("faithfulness", "completeness")
"""Numbers of an evaluation that are NaN where they are ratios over nothing; files have null for NaN."""

CIRCUIT_FILES = (CIRCUIT, SEARCH, f"{SEARCH}.json", EDGES, MEASURED)
"""With the file that 0.1.0 kept a search in."""


@dataclass(frozen=True)
class FoundCircuit:
    """A circuit, and all that its page says."""

    circuit: Circuit
    evaluation: Evaluation
    curve: Curve
    story: Story

    def write(self, folder: Path) -> None:
        """Keep it in a folder; the circuit goes last, so that a folder with one has the rest too."""
        measured = {"evaluation": asdict(self.evaluation), "curve": asdict(self.curve)}
        text = json.dumps(plain({**FORMAT.header(), **measured}), indent=2)
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
    """True if a folder holds a circuit that was found."""
    return is_there(folder / CIRCUIT, Path.is_file)


def read_circuit(folder: Path) -> FoundCircuit:
    """The circuit in a folder. Raises CircuitError where something of it is missing or damaged."""
    from conewise.circuits.circuit import Circuit
    from conewise.circuits.evaluation import Evaluation
    from conewise.report.circuit import Curve
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
            f"the search in {folder} is damaged: {MEASURED} or {STORY} cannot be read ({why}). "
            f"Search again in another folder; the circuit itself is in {CIRCUIT}."
        ) from None
    return FoundCircuit(circuit, evaluation, curve, story)


def _evaluation(found: Any, kind: type[Evaluation]) -> Evaluation:
    """The evaluation as it was written. Raises ValueError for what is none."""
    undefined = [name for name in RATIOS if isinstance(found, Mapping) and found.get(name, 0) is None]
    known = {**found, **dict.fromkeys(undefined, 0.0)} if undefined else found
    if isinstance(known, Mapping) and "ablation" in known:  # of 0.1.0
        known = {"source": known["ablation"], **{key: one for key, one in known.items() if key != "ablation"}}
    read: Evaluation = decoded(known, kind, "evaluation")
    for name in undefined:
        read = replace(read, **{name: math.nan})  # type: ignore[arg-type]
    return read


QUESTION = "question.json"
QUESTION_FORMAT = Format("conewise question", 1)


@dataclass(frozen=True)
class StoredQuestion:
    """The question of a run in a folder: the command that asked it, and all that it says."""

    command: tuple[str, ...]
    question: dict[str, Any]


class StoredRun:
    """The run in a folder; made before a model is loaded, so that a taken folder is refused at once."""

    def __init__(self, folder: Path, resume: bool) -> None:
        self.folder, self.resume = folder, resume
        self._known = read_question(folder)
        if self._known is not None and not resume:
            raise CommandError(
                f"--out {folder} holds a run already, which was left as it is. Go on with it, or see its "
                f"result again, with --resume, or give another folder. It was made by:\n"
                f"  {shell_command([*self._known.command])}"
            )
        if self._known is None:
            self._expect_free()
        expect_writable(folder, "--out")

    def _expect_free(self) -> None:
        """Nothing stands where the run will be kept: what is there later, and is not whole, is its own."""
        # Not `Path.exists`, which raises for a name that is too long: that is said further on.
        taken = [name for name in (*FILES, *CIRCUIT_FILES) if os.path.lexists(self.folder / name)]
        if taken:
            raise CommandError(
                f"--out {self.folder} holds {taken[0]} already, and no run of a command; it was left as it "
                "is. Give another folder."
            )
        if other := self._other_file():
            raise CommandError(
                f"--out {self.folder} is a folder with other files in it, such as {other}, and a run has one "
                "of its own. Give another, or one in it that is new."
            )

    def _other_file(self) -> str:
        """A file in the folder that no run of a command leaves there; empty where there is none."""
        with suppress(OSError):  # said further on
            return next((path.name for path in self.folder.iterdir() if not is_leftover(path)), "")
        return ""

    @property
    def is_begun(self) -> bool:
        """True if the folder holds a run that goes on."""
        return self._known is not None

    def begin(self, described: dict[str, Any], command: list[str]) -> None:
        """Write down what is asked, as plain values; where a run goes on, refuse another question."""
        begun = [word for word in command if word != "--resume"]
        body = {**QUESTION_FORMAT.header(), "command": begun, "question": described}
        if self._known is None:
            text = json.dumps(body, indent=2, ensure_ascii=False)
            try:
                write_whole(self.folder / QUESTION, f"{text}\n".encode())
            except OSError as error:
                raise CommandError(f"{self.folder / QUESTION} cannot be written: {error.strerror}.") from None
            return

        found = differences(self._known.question, json.loads(json.dumps(body["question"])))
        if found:
            lines = "\n".join(f"  {line}" for line in found)
            raise SweepError(
                f"the run in {self.folder} asks something else, so it cannot go on as this one. What "
                f"differs, there and now:\n{lines}\nThe folder was left as it is; its own run goes on with:\n"
                f"  {shell_command([*self._known.command, '--resume'])}"
            )

    def finish(
        self, result: Result, story: Story, folded: Folded | None, inside: Inside | None = None
    ) -> None:
        """Keep the result; one that is there already must be the same."""
        if not is_result(self.folder):
            # What is there of it was left by a process that died while it wrote.
            write_run(self.folder, result, story, folded, inside, unfinished=True)
        elif not load_result(self.folder).equals(result):
            raise SweepError(
                f"the result in {self.folder} has other numbers than its store gives now. It was left as it "
                "is; run the question again in another folder."
            )


def read_question(folder: Path) -> StoredQuestion | None:
    """The question in a folder; None where there is none. Raises FormatError for a newer one."""
    path = folder / QUESTION
    if not is_there(path, Path.exists):
        return None
    try:
        found: StoredQuestion = decoded(
            QUESTION_FORMAT.expect(read_json(path), str(path)), StoredQuestion, "it"
        )
    except (OSError, ValueError) as error:
        raise SweepError(f"{path} cannot be understood: {error}. Give another folder.") from None
    return found
