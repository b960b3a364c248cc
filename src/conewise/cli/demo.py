"""`conewise demo` and `make demo`: a language model taken apart, and a page to look at."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from conewise.arguments import shown_bytes
from conewise.cli.failing import CommandError
from conewise.cli.options import command
from conewise.cli.output import (
    Status,
    expect_verified,
    expect_writable,
    print_json,
    result_json,
    show_cost,
    show_finding,
    show_strongest,
    stdout,
)
from conewise.cli.questions import ModelName, captured, question_json, show_prompts
from conewise.errors import FormatError, LoadError, SweepError
from conewise.files import is_leftover

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.report.folded import Folded
    from conewise.report.story import Story
    from conewise.sweeps.planning.plan import SweepPlan
    from conewise.sweeps.result import Result
    from conewise.text.prompts import Pair
    from conewise.text.questions import Question

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
"""The number of full forwards that are timed, for the speed against full re-runs."""

CHECKED = 8
"""The number of random cells that are run again by the module itself."""

STEPS, LEAST = 10, 16 << 20
"""The run is cut into about so many chunks, for a bar that moves; but not below so many bytes."""

TOP = 10


@command
def demo(*, tiny: bool = False, out: Path = OUT, json: bool = False) -> None:
    """Take a language model apart: who gets the drink? Every head and MLP patched, and a page written.

    Uses SmolLM2-135M; with --tiny a small model that comes with conewise, in seconds and without any
    download.

    Examples:
      conewise demo --tiny
      conewise demo --out demo-report

    Options:
        --tiny: Use the small model.
        --out DIR: Where the page goes.
    """
    expect_writable(out, "--out")
    expect_ours(out)
    started = time.perf_counter()
    name = TINY if tiny else MODEL
    status = Status()
    console = stdout(quiet=json)
    console.rule(f"{TITLE} {name} taken apart", align="left")
    question = ask(name, status)
    with status.doing("planning"):  # in some chunks: a bar moves after each
        plan = question.plan(max(question.plan().peak_bytes // STEPS, LEAST))
    show_question(console, question, plan)
    typed = ["conewise", "demo", *(["--tiny"] if tiny else []), *([] if out == OUT else ["--out", str(out)])]
    found = run(question, plan, shlex.join(typed), status)
    page, folder = write(found, out, status)
    if json:
        body = {**question_json(question), **result_json(found.result, found.story)}
        print_json("demo", {**body, "files": {"out": folder, "report": page}})
    show_found(console, found)
    taken = time.perf_counter() - started
    console.print(
        f"\nOpen {page} in a browser; the numbers are in {folder}. ({taken:.0f} s in all)", markup=False
    )
    expect_verified(found.result, status)


@dataclass(frozen=True)
class Demo:
    """All that the demo found out: what it prints and what it writes are made of it."""

    question: Question
    result: Result
    story: Story
    folded: Folded


def ask(name: str, status: Status) -> Question:
    """Load a model, and ask it about all of its heads and MLPs."""
    try:
        model = ModelName(name).load(status)
    except LoadError as error:
        if name != TINY:
            error.add_note("`conewise demo --tiny` takes a small model apart that needs no download.")
        raise
    from conewise.anatomy.selectors import sites
    from conewise.text.prompts import tokenize
    from conewise.text.questions import Question

    prompts = tokenize(pairs(name), model.tokenizer)
    captured(model, status, prompts)
    return Question(model, prompts, sites("z", layer=":", head=":") + sites("mlp_out", layer=":"))


def pairs(name: str) -> list[Pair]:
    """Return the prompts: those of the tiny model, or scenes in which each of two people gives once."""
    from conewise.text.prompts import Pair, read_pairs

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


def run(question: Question, plan: SweepPlan, typed: str, status: Status) -> Demo:
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
        question.story(command=typed),
        title=f"{TITLE} {question.model.label} taken apart",
        forwards_timed=len(forwards),
        forward_seconds=sum(forwards) / len(forwards),
        forward_range=(min(forwards), max(forwards)),
    )
    return Demo(question, result, story, question.folded())


def timed(question: Question, when: str, status: Status) -> tuple[float, ...]:
    """Return the seconds of some full forwards, each of all prompts."""
    with status.doing(f"timing full forwards {when} the sweep"):
        return tuple(question.forward_seconds(1) for _ in range(FORWARDS // 2))


# -- the folder ----------------------------------------------------------------------------------


def expect_ours(out: Path) -> None:
    """Refuse, before the run, to write over what no demo wrote."""
    page = out / PAGE
    try:
        is_other = page.exists() and b"conewise" not in page.read_bytes().lower()
    except OSError as error:
        raise CommandError(f"cannot read {page}: {error.strerror}. Name another folder with --out.") from None
    if is_other or ((out / RUN).exists() and not _is_demo(out / RUN)):
        raise CommandError(
            f"{out} holds {PAGE if is_other else RUN}, which no demo wrote; it was left as it is. Name "
            "another folder with --out."
        )


def _is_demo(folder: Path) -> bool:
    """True if a folder holds a run that a demo wrote, or nothing yet."""
    from conewise.report.story import read_story

    if folder.is_dir() and all(map(is_leftover, folder.iterdir())):
        return True
    try:
        story = read_story(folder)
    except (SweepError, FormatError):
        return False
    return story is not None and (story.command or "").startswith("conewise demo")


def write(found: Demo, out: Path, status: Status) -> tuple[Path, Path]:
    """Write the run, in place of that of an earlier demo, and its page."""
    from conewise.cli.folders import write_run
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


# -- what is printed -----------------------------------------------------------------------------


def show_question(console: Console, question: Question, plan: SweepPlan) -> None:
    """Print the model, what it is asked, and what the answer will cost: before anything of it is run."""
    model = question.model
    heads = len({cell.at["head"] for cell in question.cells if "head" in cell.at})
    layers = len(model.sites.layers("z"))
    weights = sum(weight.numel() for weight in model.module.parameters())
    console.print(
        f"\n{layers} layers of {heads} heads, {weights:,} weights ({model.origin}), "
        f"now a graph of {len(model.program.records):,} operations\n",
        markup=False,
    )
    show_prompts(console, question)
    console.print(
        f"\nIn each of {plan.worlds} worlds, one head or one MLP of the corrupted run has the value that it "
        "has in the clean run. How far does that move the logits, from the wrong answer to the right one?\n"
    )
    console.print(
        f"The plan, before anything runs: {plan.node_evaluations:,} node evaluations instead of "
        f"{plan.full_evaluations:,}, {plan.flops:.3g} floating-point operations instead of "
        f"{plan.full_flops:.3g}, at most {shown_bytes(plan.peak_bytes)} of memory.\n"
    )


def show_found(console: Console, found: Demo) -> None:
    """Print the finding, the strongest sites, and what they cost."""
    result = found.result
    assert result.source is not None
    show_finding(console, result)
    console.print(
        f"logit(answer) − logit(wrong) is {float(result.base[0]):+.2f} in the corrupted runs and "
        f"{float(result.source[0]):+.2f} in the clean ones.\n"
    )
    show_strongest(console, result, TOP, "site")
    show_cost(console, result, found.story)
    first, last = result.cells[0].name, result.cells[-1].name
    early, late = (found.folded.cone(name).node_evaluations for name in (first, last))
    console.print(
        f"A patch recomputes what depends on it, and nothing else: of {found.folded.full_evaluations:,} "
        f"operations {early:,} at {first}, {late:,} at {last}.",
        markup=False,
    )
