"""`conewise demo` and `make demo`: a language model taken apart, and a page to look at."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from conewise.arguments import shown_bytes
from conewise.cli import options as opt
from conewise.cli.options import subcommand
from conewise.cli.output import (
    WAS_BUSY,
    Status,
    expect_verified,
    expect_writable,
    print_json,
    result_json,
    stdout,
    table,
)
from conewise.cli.questions import ModelName, captured, question_json
from conewise.errors import FormatError, LoadError, SweepError
from conewise.files import is_leftover
from conewise.status import shown_phases

if TYPE_CHECKING:
    from conewise.report.folded import Folded
    from conewise.report.story import Story
    from conewise.sweeps.planning.plan import SweepPlan
    from conewise.sweeps.result import Result
    from conewise.text.prompts import Pair
    from conewise.text.questions import Question

HELP = """Take a language model apart: who gets the drink? Every head and MLP patched, and a page written.

Uses SmolLM2-135M; with --tiny a small model that comes with conewise, in seconds and without any download.

\b
Examples:
  conewise demo --tiny
  conewise demo --out demo-report
"""


@subcommand("demo", HELP, "Take a language model apart, and look at it.")
def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="Use the small model.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the page goes.")] = Path(
        "demo-report"
    ),
    json: opt.Json = False,
) -> None:
    """Take a model apart, say what was found, and write the page and the run into the folder `out`.

    SmolLM2-135M, or with `tiny` the small model that comes with conewise. With `json` one object is printed,
    as `conewise sweep --json` prints it. Exits with 1 when the numbers do not stand up to the check.
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
        files = {"out": str(folder), "report": str(page)}
        print_json(
            "demo",
            {**question_json(question), **result_json(found.result, found.story), "files": files},
        )
    show_sites(console, found)
    show_cost(console, found)
    console.print(
        f"\n[bold]Open {escape(str(page))}[/bold] in a browser; the numbers are in {escape(str(folder))}. "
        f"({time.perf_counter() - started:.0f} s in all)"
    )
    expect_verified(found.result, status)


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


@dataclass(frozen=True)
class Demo:
    """All that the demo found out: what it prints and what it writes are made of it.

    `forwards` are the seconds of the full forwards that were timed; the story has their mean.
    """

    question: Question
    plan: SweepPlan
    result: Result
    story: Story
    folded: Folded
    forwards: tuple[float, ...]

    @property
    def full_seconds(self) -> float:
        """The seconds of a full forward for each world, from those that were timed."""
        assert self.story.forward_seconds is not None
        return self.story.forward_seconds * self.plan.worlds


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
    """The prompts: those that come with the tiny model, or scenes in which each of two people gives once."""
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
    return Demo(question, plan, result, story, question.folded(), forwards)


def timed(question: Question, when: str, status: Status) -> tuple[float, ...]:
    """The seconds of some full forwards, each of all prompts."""
    with status.doing(f"timing full forwards {when} the sweep"):
        return tuple(question.forward_seconds(1) for _ in range(FORWARDS // 2))


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
    """True if a folder holds a run that a demo wrote, or nothing yet."""
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


TOP = 10
BAR = 20
"""Characters of the longest bar beside an effect."""

UP, DOWN = "blue", "red"
"""Towards the source and away from it: told apart by colour-blind readers, and by the sign."""


def show_question(console: Console, question: Question, plan: SweepPlan) -> None:
    """The model, what it is asked, and what the answer will cost: before anything of it is run."""
    model, prompts = question.model, question.prompts
    heads = len({cell.at["head"] for cell in question.cells if "head" in cell.at})
    layers = len(model.sites.layers("z"))
    weights = sum(weight.numel() for weight in model.module.parameters())
    console.print(
        f"\n[bold]The model[/bold] has {layers} layers of {heads} heads and {weights:,} weights "
        f"({escape(model.origin)}). It is now a graph of {len(model.program.records):,} operations."
    )
    console.print(f"\n[bold]The question[/bold], the first of {len(prompts.pairs)} pairs of prompts:")
    pair = prompts.pairs[0]
    for name, other, (answer, *_) in (
        ("clean", pair.corrupted, pair.answers),
        ("corrupted", pair.clean, pair.wrong_answers),
    ):
        console.print(
            f"  {name:<10} {_marked(getattr(pair, name), other)} → [bold]{escape(answer.strip())}[/bold]"
        )
    console.print(
        f"In each of {plan.worlds} worlds, one head or one MLP of the corrupted run has the value that it "
        "has in the clean run. How far does that move the logits, from the wrong answer to the right one?"
    )
    console.print(
        f"\n[bold]The plan[/bold], before anything runs: {plan.node_evaluations:,} node evaluations instead "
        f"of {plan.full_evaluations:,}, {plan.flops:.3g} floating-point operations instead of "
        f"{plan.full_flops:.3g}, at most {shown_bytes(plan.peak_bytes)} of memory."
    )
    console.print()


def _marked(text: str, other: str) -> str:
    """A text with the words in bold that the other does not have there."""
    words, others = text.split(), other.split()
    return " ".join(
        escape(word) if place < len(others) and word == others[place] else f"[bold]{escape(word)}[/bold]"
        for place, word in enumerate(words)
    )


def show_sites(console: Console, found: Demo) -> None:
    """Print the finding, its certainty, and the strongest sites."""
    from conewise.sweeps.findings import certainty, finding

    result = found.result
    assert result.source is not None
    base, source = float(result.base[0]), float(result.source[0])
    console.print(f"\n[bold]{escape(finding(result))}[/bold]\n{escape(certainty(result))}")
    grid = table(
        f"\nThe strongest {TOP} of {len(result.cells)} sites: logit(answer) − logit(wrong), {base:+.2f} in "
        f"the corrupted runs and {source:+.2f} in the clean ones",
        ("site", "value", "effect", "of the way", ""),
        right=(1, 2, 3),
    )
    strongest = result.strongest(top=TOP)
    largest = max(abs(effect) for _, effect, _ in strongest) or 1.0
    for cell, effect, value in strongest:
        length = max(1, round(BAR * abs(effect) / largest))
        grid.add_row(
            escape(cell.name),
            f"{value:+.3f}",
            f"{effect:+.3f}",
            f"{effect / (source - base):+.1%}",
            Text("█" * length if console.is_terminal else "", style=UP if effect > 0 else DOWN),
        )
    console.print(grid)


def show_cost(console: Console, found: Demo) -> None:
    """Print what was predicted and measured, what full re-runs take, and how the numbers were checked."""
    plan, ledger, story, check = found.plan, found.result.ledger, found.story, found.result.verification
    grid = table("What it cost", ("", "predicted", "measured", "full re-runs", "saved"), right=(1, 2, 3, 4))
    grid.add_row(
        "node evaluations",
        f"{plan.node_evaluations:,}",
        f"{ledger.node_evaluations:,}",
        f"{plan.full_evaluations:,}",
        f"{plan.full_evaluations / ledger.node_evaluations:.2f}×",
    )
    flops = (f"{plan.flops:.3g}", "", f"{plan.full_flops:.3g}", f"{plan.full_flops / plan.flops:.2f}×")
    grid.add_row("FLOPs", *flops)
    taken = "" if ledger.peak_bytes is None else shown_bytes(ledger.peak_bytes)
    grid.add_row("peak memory", shown_bytes(plan.peak_bytes), taken, "", "")
    grid.add_row(
        "seconds",
        "" if plan.seconds is None else f"{plan.seconds:.3g}",
        f"{ledger.seconds:.3g}",
        f"{found.full_seconds:.3g}*",
        f"{found.full_seconds / ledger.seconds:.2f}×",
    )
    console.print(grid)
    console.print(f"Of the measured seconds: {shown_phases(ledger.phases)}.")
    least, most = min(found.forwards), max(found.forwards)
    console.print(
        f"* {plan.worlds} full forwards of all prompts, at {story.forward_seconds:.3g} s each: the mean of "
        f"{story.forwards_timed} that were timed, half before the sweep and half after it ({least:.3g} to "
        f"{most:.3g} s)."
    )
    if story.was_busy:
        console.print(f"[yellow]{WAS_BUSY}[/yellow]")
    first, last = found.result.cells[0].name, found.result.cells[-1].name
    early, late = (found.folded.cone(name).node_evaluations for name in (first, last))
    console.print(
        f"A patch recomputes what depends on it, and nothing else: of {found.folded.full_evaluations:,} "
        f"operations {early:,} at {escape(first)}, {late:,} at {escape(last)}."
    )
    mark = "[green]✓[/green]" if check is not None and check.ok else "[red]✗[/red]"
    console.print(f"{mark} Verification {escape(str(check))}.")
