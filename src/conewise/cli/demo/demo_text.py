"""What the demo says in a terminal: the question, the strongest sites, what they cost, where to look."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from conewise.amounts import shown_bytes
from conewise.cli.terminal.output import table
from conewise.phases import shown_phases

if TYPE_CHECKING:
    from conewise.cli.demo.demo import Demo
    from conewise.models.loaded import Loaded
    from conewise.prompts.questions import Question
    from conewise.sweeps.planning.plan import SweepPlan

TOP = 10
BAR = 20
"""Characters of the longest bar beside an effect."""

BUSY = 2.0
"""Forwards of one kind that differ by more than this factor were not timed on a quiet machine."""

UP, DOWN = "blue", "red"
"""Towards the source and away from it: told apart by colour-blind readers, and by the sign."""


def stdout(*, quiet: bool) -> Console:
    """Where the demo speaks; without a terminal in plain text, lines as long as they are."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty(), quiet=quiet)


def show_question(console: Console, loaded: Loaded, question: Question, plan: SweepPlan) -> None:
    """The model, what it is asked, and what the answer will cost: before anything of it is run."""
    model, prompts = question.model, question.prompts
    heads = len({cell.at["head"] for cell in question.cells if "head" in cell.at})
    layers = len(model.sites.layers("z"))
    weights = sum(weight.numel() for weight in loaded.module.parameters())
    console.print(
        f"\n[bold]The model[/bold] has {layers} layers of {heads} heads and {weights:,} weights "
        f"({escape(loaded.source)}). It is now a graph of {len(model.program.records):,} operations."
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
    """The strongest sites."""
    result = found.result
    assert result.source is not None
    base, source = float(result.base[0]), float(result.source[0])
    grid = table(
        f"\nThe strongest {TOP} of {len(result.cells)} sites: logit(answer) − logit(wrong), {base:+.2f} in "
        f"the corrupted runs and {source:+.2f} in the clean ones",
        ("site", "value", "effect", "of the way", ""),
        right=(1, 2, 3),
    )
    strongest = result.strongest(count=TOP)
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
    """What was predicted, what was measured, what full re-runs take; and how the numbers were checked."""
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
    if most > BUSY * least:
        console.print(
            "[yellow]These times vary a lot: the machine was busy with other things, so do not trust the "
            "speed. The counts are exact.[/yellow]"
        )
    first, last = found.result.cells[0].name, found.result.cells[-1].name
    early, late = (found.folded.cone(name).node_evaluations for name in (first, last))
    console.print(
        f"A patch recomputes what depends on it, and nothing else: of {found.folded.full_evaluations:,} "
        f"operations {early:,} at {escape(first)}, {late:,} at {escape(last)}."
    )
    mark = "[green]✓[/green]" if check is not None and check.ok else "[red]✗[/red]"
    console.print(f"{mark} Verification {escape(str(check))}.")


def show_files(console: Console, page: Path, folder: Path, seconds: float) -> None:
    """Where to look."""
    console.print(
        f"\n[bold]Open {escape(str(page))}[/bold] in a browser; the numbers are in {escape(str(folder))}. "
        f"({seconds:.0f} s in all)"
    )
