"""The folder of `--out`: the question, what is done of it, and the result in the end."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conewise.cli.terminal.failing import CommandError, shell_command
from conewise.cli.terminal.output import expect_writable
from conewise.errors import SweepError
from conewise.files import is_leftover
from conewise.formats import Format
from conewise.reading import is_there, read_json

if TYPE_CHECKING:
    from conewise.report.folded import Folded
    from conewise.report.inside import Inside
    from conewise.report.story import Story
    from conewise.sweeps.result import Result

QUESTION = "question.json"
FORMAT = Format("conewise question", 1)


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
        from conewise.cli.folders.circuit_folder import CIRCUIT_FILES
        from conewise.cli.folders.run_folder import FILES

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
        """Whether the folder holds a run that goes on."""
        return self._known is not None

    def begin(self, described: dict[str, Any], command: list[str]) -> None:
        """Write down what is asked, as plain values; where a run goes on, refuse another question."""
        body = {**FORMAT.header(), **asdict(StoredQuestion(tuple(_begun(command)), described))}
        if self._known is None:
            from conewise.files import write_whole

            text = json.dumps(body, indent=2, ensure_ascii=False)
            try:
                write_whole(self.folder / QUESTION, f"{text}\n".encode())
            except OSError as error:
                raise CommandError(f"{self.folder / QUESTION} cannot be written: {error.strerror}.") from None
            return
        from conewise.sweeps.storage.differences import differences

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
        from conewise.cli.folders.run_folder import write_run
        from conewise.sweeps.saved import load_result
        from conewise.sweeps.storage.archive import is_result

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
    from conewise.sweeps.storage.decoding import decoded

    try:
        found: StoredQuestion = decoded(FORMAT.expect(read_json(path), str(path)), StoredQuestion, "it")
    except (OSError, ValueError) as error:
        raise SweepError(f"{path} cannot be understood: {error}. Give another folder.") from None
    return found


def _begun(command: list[str]) -> list[str]:
    return [word for word in command if word != "--resume"]
