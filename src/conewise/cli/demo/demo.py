"""The demo: a language model taken apart.

Who gets the drink? Every head and every MLP of the run that answers wrongly gets, in a world of its own, the
value that it has in the run that answers rightly; what brings the answer back takes part in finding it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from conewise.cli.questions.loading import ModelName
from conewise.cli.terminal.output import Status
from conewise.errors import FormatError, LoadError, SweepError
from conewise.files import is_leftover

if TYPE_CHECKING:
    from conewise.models.loaded import Loaded
    from conewise.prompts.pairs import Pair
    from conewise.prompts.questions import Question
    from conewise.report.folded import Folded
    from conewise.report.story import Story
    from conewise.sweeps.planning.plan import SweepPlan
    from conewise.sweeps.result import Result

MODEL, TINY = "smollm2-135m", "tiny"
OUT = Path("demo-report")
PAGE, RUN = "index.html", "run"
TITLE = "Who gets the drink?"

TEMPLATE = "When {first} and {second} went to the {place}, {giver} gave a {thing} to"
SCENES = (
    ("Mary", "John", "store", "drink"),
    ("Anna", "Paul", "school", "book"),
    ("Sarah", "Mark", "house", "key"),
)

FORWARDS = 6
"""How many full forwards are timed, for the speed against full re-runs."""

CHECKED = 8
"""How many random cells are run again by the module itself."""

STEPS, LEAST = 10, 16 << 20
"""The run is cut into about so many chunks, for a bar that moves; but not below so many bytes."""


@dataclass(frozen=True)
class Demo:
    """All that the demo found out: what it prints and what it writes are made of it.

    `forwards` are the seconds of the full forwards that were timed; the story has their mean.
    """

    loaded: Loaded
    question: Question
    plan: SweepPlan
    result: Result
    story: Story
    folded: Folded
    forwards: tuple[float, ...]

    @property
    def full_seconds(self) -> float:
        """What a full forward for each world would take, from those that were timed."""
        assert self.story.forward_seconds is not None
        return self.story.forward_seconds * self.plan.worlds


def ask(name: str, status: Status) -> tuple[Loaded, Question]:
    """Load a model, and ask it about all of its heads and MLPs."""
    try:
        loaded = ModelName(name).load(status)
    except LoadError as error:
        if name != TINY:
            error.add_note("`conewise demo --tiny` takes a small model apart that needs no download.")
        raise
    with status.doing(f"capturing {name} as a graph"):
        from conewise.locations.selectors import sites
        from conewise.model import capture
        from conewise.prompts.questions import Question
        from conewise.prompts.tokenized import tokenize

        prompts = tokenize(pairs(name), loaded.tokenizer)
        # Full forwards are compared with this: they should not pay for logits that nobody reads.
        model = capture(loaded.module, logits_to_keep=1, **prompts.inputs_of(0, "clean"))
    chosen = sites("z", layer=":", head=":") + sites("mlp_out", layer=":")
    return loaded, Question(model, prompts, chosen)


def pairs(name: str) -> list[Pair]:
    """The prompts: those that come with the tiny model, or scenes in which each of two people gives once."""
    from conewise.prompts.pairs import Pair, read_pairs

    if name == TINY:
        from conewise.models.tiny import PROMPTS

        return read_pairs(PROMPTS)
    found = []
    for first, second, place, thing in SCENES:
        for giver, other in ((second, first), (first, second)):
            clean, corrupted = (
                TEMPLATE.format(first=first, second=second, place=place, thing=thing, giver=who)
                for who in (giver, other)
            )
            found.append(Pair(clean, corrupted, (f" {other}",), (f" {giver}",)))
    return found


def budget(question: Question) -> int:
    """An amount of memory with which the run is cut into some chunks: a bar moves after each."""
    return max(question.plan().peak_bytes // STEPS, LEAST)


def run(loaded: Loaded, question: Question, plan: SweepPlan, typed: str, status: Status) -> Demo:
    """Run the sweep, and samples of full forwards: some for their time, some for their numbers.

    Half of those that are timed run before the sweep and half after it, so that a machine that is busier
    for a while slows down both.
    """
    forwards = timed(question, "before", status)
    result = question.run(max_memory=plan.max_memory, progress=True)
    forwards += timed(question, "after", status)
    with status.doing(f"checking {CHECKED} random cells by the module itself, with hooks"):
        result = replace(result, verification=result.verify(n=CHECKED))
    story = replace(
        question.story(loaded.name, typed),
        title=f"{TITLE} {loaded.name} taken apart",
        forwards_timed=len(forwards),
        forward_seconds=sum(forwards) / len(forwards),
    )
    return Demo(loaded, question, plan, result, story, question.folded(), forwards)


def timed(question: Question, when: str, status: Status) -> tuple[float, ...]:
    """The seconds of some full forwards, each of all prompts."""
    with status.doing(f"timing full forwards {when} the sweep"):
        return tuple(question.forward_seconds(1) for _ in range(FORWARDS // 2))


def command(tiny: bool, out: Path) -> str:
    """What makes this again."""
    given = ["conewise", "demo"] + (["--tiny"] if tiny else [])
    return shlex.join(given if out == OUT else [*given, "--out", str(out)])


# -- the folder ----------------------------------------------------------------------------------


def expect_ours(out: Path) -> None:
    """Refuse, before the run, to write over what no demo wrote."""
    page = out / PAGE
    try:
        is_other = page.exists() and b"conewise" not in page.read_bytes().lower()
    except OSError as error:
        raise SweepError(f"cannot read {page}: {error.strerror}. Name another folder with --out.") from None
    if is_other or ((out / RUN).exists() and not _is_demo(out / RUN)):
        raise SweepError(
            f"{out} holds {PAGE if is_other else RUN}, which no demo wrote; it was left as it is. Name "
            "another folder with --out."
        )


def _is_demo(folder: Path) -> bool:
    """Whether a folder holds a run that a demo wrote, or nothing yet."""
    from conewise.report.story import STORY, Story

    if folder.is_dir() and all(map(is_leftover, folder.iterdir())):
        return True
    try:
        made_by = Story.from_json((folder / STORY).read_text(encoding="utf-8")).command
    except (OSError, ValueError, SweepError, FormatError):
        return False
    return made_by is not None and made_by.startswith("conewise demo")


def write(found: Demo, out: Path, status: Status) -> tuple[Path, Path]:
    """Write the run, in place of that of an earlier demo, and its page."""
    from conewise.cli.folders.run_folder import write_run
    from conewise.report.page import write_page
    from conewise.sweeps.storage.archive import MANIFEST

    page, folder = out / PAGE, out / RUN
    with status.doing(f"writing {page}"):
        # Without its manifest the old run is none, and is replaced. The story stays there all the time: it
        # says that this is a demo's folder.
        (folder / MANIFEST).unlink(missing_ok=True)
        inside = found.question.inside(found.result, found.story)
        write_run(folder, found.result, found.story, found.folded, inside, unfinished=True)
        write_page(page, found.result, found.story, found.folded, inside)
    return page, folder
