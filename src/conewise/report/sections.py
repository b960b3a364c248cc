"""What the sections of a sweep's page say: the question, the accounting, the check, the origin.

Plain values; `sweep.html` makes a page of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from conewise.arguments import shown_bytes
from conewise.checks.recheck import CellCheck
from conewise.report.inside import Inside, Likely, Pattern
from conewise.report.sent import SentInside, SentPattern
from conewise.report.story import ResultLike, Story, TokenizedPair
from conewise.status import shown_phases

FIRST = 2
"""How many prompts are shown at once; the others are a click away."""

MOST = 200
"""How many prompts a page writes out at all."""


@dataclass(frozen=True, slots=True)
class Visible:
    """A text of one token, with its spaces and line ends to be seen: a sign in front, then the text."""

    sign: str
    text: str
    differs: bool = False

    @classmethod
    def of(cls, token: str, *, differs: bool = False) -> Visible:
        """How a token is shown."""
        text = token.replace("\n", "⏎").replace("\t", "⇥")
        sign = "·" if text.startswith(" ") else "" if text else "∅"
        return cls(sign, text.removeprefix(" "), differs)


@dataclass(frozen=True, slots=True)
class RunText:
    """One of the two prompts of a pair: which it is, what it is for, its text and its tokens."""

    name: str
    role: str
    text: str
    tokens: tuple[Visible, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """A number that was predicted and counted: whether both agree."""

    text: str
    agrees: bool


Row = list[str | Counted]
"""A row of a table; its first text is what the row is about."""


def question(result: ResultLike, story: Story | None) -> dict[str, Any]:
    """The prompts with their tokens, the metric, and which run is changed."""
    if story is None:
        return {"story": None, "runs": _runs(result, None)}
    return {"story": story, "runs": _runs(result, story), **prompt_pairs(story, result)}


def prompt_pairs(story: Story, result: ResultLike | None = None) -> dict[str, Any]:
    """The prompts of a story: the first, the rest, how many are not written; with a result, its values."""
    pairs = [_pair(pair, number, story, result) for number, pair in enumerate(story.prompts[:MOST])]
    return {
        "first": pairs[:FIRST],
        "rest": pairs[FIRST:],
        "unwritten": max(len(story.prompts) - MOST, 0),
    }


def _pair(pair: TokenizedPair, number: int, story: Story, result: ResultLike | None) -> dict[str, Any]:
    runs = []
    for name in ("clean", "corrupted"):
        is_clean = name == "clean"
        text, own = (pair.clean, pair.clean_tokens) if is_clean else (pair.corrupted, pair.corrupted_tokens)
        marked = pair.differing
        if pair.noised and not is_clean:
            text, own, marked = text or pair.clean, own or pair.clean_tokens, marked | set(pair.noised)
        if text or own:
            role = "changed" if name == story.base else "gives the values" if name == story.source else ""
            tokens = tuple(Visible.of(token, differs=place in marked) for place, token in enumerate(own))
            runs.append(RunText(name, role, text, tokens))
    answers = (("right", pair.answers), ("wrong", pair.wrong_answers))
    is_measured = result is not None and len(story.prompts) == result.per_prompt.shape[-1] > 1
    return {
        "number": number + 1 if len(story.prompts) > 1 else None,
        "runs": runs,
        "answers": [(kind, list(map(Visible.of, words))) for kind, words in answers if words],
        "values": _values(result, number) if result is not None and is_measured else [],
    }


def _values(result: ResultLike, prompt: int) -> list[tuple[str, str]]:
    """The metric of one prompt in the two runs."""
    both = (("base", result.base_per_prompt), ("source", result.source_per_prompt))
    return [(name, number(float(values[0, prompt]))) for name, values in both if values is not None]


def _runs(result: ResultLike, story: Story | None) -> dict[str, Any]:
    """The metrics of the two runs themselves: where an effect of nothing and of everything would be."""
    base, source = ("", "") if story is None else (f" ({story.base})", f" ({story.source})")
    heads = ["metric", f"base{base}"]
    rows: list[Row] = [[name, number(float(result.base[row]))] for row, name in enumerate(result.metrics)]
    if result.source is not None:
        heads.append(f"source{source}")
        for row, cells in enumerate(rows):
            cells.append(number(float(result.source[row])))
    return {"heads": heads, "rows": rows}


def inside_tables(inside: Inside) -> dict[str, Any]:
    """What is written of the base run's inside: the lens, row by row, the last on top."""
    tables = [
        {
            "prompt": table.prompt,
            "number": inside.numbers[table.prompt] + 1,
            "tokens": inside.tokens[table.prompt][-len(table.cells[0]) :] if table.cells else (),
            "rows": [
                ("input" if name == "input" else f"after {name}", [_likely(cell) for cell in row])
                for name, row in reversed(list(zip(table.rows, table.cells, strict=True)))
            ],
        }
        for table in inside.lenses
    ]
    prompts = sorted({one.prompt for one in inside.patterns} | {one.prompt for one in inside.lenses})
    numbered = [(prompt, inside.numbers[prompt] + 1) for prompt in prompts]
    return {"tables": tables, "prompts": numbered, "data": inside}


def _likely(cell: Sequence[Likely]) -> dict[str, Any]:
    """One cell of the lens: the likeliest token, its probability in tenths, and the others in words."""
    told = ", ".join(f"{one.text} {one.prob:.3f}" for one in cell)
    return {"text": cell[0].text, "tenths": round(cell[0].prob * 10), "told": told}


def shown_inside(inside: Inside) -> SentInside:
    """What scripts draw of the base run's inside: tokens, and where heads look."""
    return {"tokens": inside.tokens, "patterns": [_pattern(one) for one in inside.patterns]}


def _pattern(pattern: Pattern) -> SentPattern:
    return {
        "layer": pattern.layer,
        "head": pattern.head,
        "effect": pattern.effect,
        "prompt": pattern.prompt,
        "weights": pattern.weights,
    }


def speeds(result: ResultLike, story: Story | None) -> dict[str, float]:
    """What the sweep took as a share of full re-runs: for the figure beside the accounting."""
    plan, ledger = result.plan, result.ledger
    shares: dict[str, tuple[float, float]] = {
        "node evaluations": (ledger.node_evaluations, plan.full_evaluations),
        "FLOPs": (plan.flops, plan.full_flops),
    }
    if full := full_seconds(result, story):
        shares["seconds"] = (ledger.seconds, full)
    return {name: done / full for name, (done, full) in shares.items() if full}


def full_seconds(result: ResultLike, story: Story | None) -> float | None:
    """How long a full forward for each world would take, from the ones that were timed."""
    if story is None or not story.forwards_timed or story.forward_seconds is None or result.ledger.resumed:
        return None
    return story.forward_seconds * result.plan.worlds


def _taken(amount: int | None) -> str:
    return "–" if amount is None else shown_bytes(amount)


def _of_memory(result: ResultLike) -> str:
    """What was measured of memory."""
    beside, ledger = "Peak memory is what the run takes beside the model and the baseline", result.ledger
    if ledger.peak_bytes is None:
        return f"{beside}; it was not measured."
    if ledger.reserved_bytes is None:
        return f"{beside}; measured is what the process grew by meanwhile, some of it for reasons of its own."
    reserved = f"torch's allocator then had {shown_bytes(ledger.reserved_bytes)} more of the GPU than before"
    return f"{beside}; measured is what tensors took on the GPU; {reserved}."


def accounting(result: ResultLike, story: Story | None) -> dict[str, Any]:
    """What was predicted, what was measured, and what a full re-run for each site would have taken."""
    plan, ledger = result.plan, result.ledger
    full = full_seconds(result, story)
    rows: list[Row] = [
        _counted("node evaluations", plan.node_evaluations, ledger.node_evaluations, plan.full_evaluations),
        _counted("kernel launches", plan.launches, ledger.launches, plan.full_evaluations),
        ["FLOPs", f"{plan.flops:.4g}", "–", f"{plan.full_flops:.4g}", _times(plan.full_flops, plan.flops)],
        ["peak memory", shown_bytes(plan.peak_bytes), _taken(ledger.peak_bytes), "–", ""],
        [
            "seconds",
            "–" if plan.seconds is None else f"{plan.seconds:.3g}",
            f"{ledger.seconds:.3g}",
            "–" if full is None else f"{full:.3g}",
            "" if full is None else _times(full, ledger.seconds),
        ],
    ]
    notes = [f"{plan.evaluator}: {plan.why}." if plan.why else f"{plan.evaluator}."]
    notes.append(
        f"{plan.worlds:,} worlds in {len(plan.chunks):,} {'pass' if len(plan.chunks) == 1 else 'passes'}."
    )
    if ledger.phases:
        notes.append(f"Of the measured seconds: {shown_phases(ledger.phases)}.")
    if story is not None and full is not None:
        notes.append(
            f"The time of full re-runs is that of {plan.worlds:,} forwards at "
            f"{story.forward_seconds or 0:.3g} s each, the mean of {story.forwards_timed} that were timed."
        )
    else:
        notes.append("No full forward was timed, so there is no measured speed to compare with.")
    if ledger.resumed:
        notes.append(
            f"{ledger.resumed:,} cells were resumed from an earlier run: the seconds are not all of it."
        )
    notes.append("FLOPs are computed from the plan, and were not measured.")
    notes.append(_of_memory(result))
    heads = ["", "predicted", "measured", "full re-runs", "saved"]
    return {"heads": heads, "rows": rows, "notes": [note[:1].upper() + note[1:] for note in notes]}


def _counted(name: str, predicted: int, measured: int, full: int) -> Row:
    counted = Counted(f"{measured:,}", predicted == measured)
    return [name, f"{predicted:,}", counted, f"{full:,}", _times(full, measured)]


def _times(full: float, done: float) -> str:
    return f"{full / done:.2f}×" if done else "–"


def checked(result: ResultLike) -> dict[str, Any]:
    """How the numbers were verified, or that they were not."""
    check = result.verification
    if check is None:
        return {"verdict": "none", "words": "These numbers were not verified.", "check": None}
    agree = f"{check.cells:,} random cells agree with"
    if not check.ok:
        word = "were run again, and some differ" if check.excess > 1 else "could not be checked"
        verdict, words = "bad", f"✗ {check.cells:,} random cells {word}."
    elif check.hooked:
        verdict, words = "good", f"✓ {agree} full forwards."
    else:
        verdict, words = "none", f"{agree} the captured program; the module does not show them."
    ways = [f"{check.hooked:,} by the original module itself, with hooks"] if check.hooked else []
    if check.interpreted:
        ways.append(
            f"{check.interpreted:,} by the captured program alone, operation by operation, because no module "
            "shows the site"
        )
    deviation = f"The largest deviation is {check.largest_deviation:.3g}{_allowed(check)}."
    return {
        "verdict": verdict,
        "words": words,
        "check": f"Run again: {' and '.join(ways)}. {deviation}",
    }


def _allowed(check: CellCheck) -> str:
    """What a check compares, and what is allowed of it."""
    if check.unchecked:
        return f", which says nothing here: {check.unchecked}"
    if check.reference:
        return (
            f". From the module in {check.reference} the result is {check.relative:.2g} of the metric's "
            f"largest value away, and the module's own forwards are {check.own_error:.2g}; it has to be at "
            f"most {check.tolerance:.2g}"
        )
    allowed = "0, equal in every bit" if check.tolerance == 0 else f"at most {check.tolerance:.1g}"
    return f", which is {check.relative:.2g} of the metric's largest value; it has to be {allowed}"


def origin(result: ResultLike, story: Story | None, made_at: datetime) -> dict[str, Any]:
    """All that the numbers depend on, and the command that makes them again."""
    given = result.provenance
    rows: list[tuple[str, str]] = []
    if story is not None:
        rows.append(("model", story.model))
    named = (
        ("model", "captured as"),
        ("weights", "fingerprint"),
        ("dtype", "dtype"),
        ("precision", "products in"),
        ("device", "device"),
    )
    known = {key: str(given[key]) for key, _ in named if given.get(key) is not None}
    if known.get("precision") == "split":
        known["precision"] = "three bfloat16 parts"
    rows += [(label, known[key]) for key, label in named if key in known]
    if story is not None and story.seed is not None:
        rows.append(("seed", str(story.seed)))
    rows += [(f"inputs of the {run}", digest) for run, digest in _inputs(given)]
    versions = given.get("versions")
    if isinstance(versions, Mapping):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    rows.append(("page made", made_at.strftime("%d %B %Y, %H:%M UTC")))
    return {"command": story.command if story is not None else None, "rows": rows}


def _inputs(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    batches = given.get("batches")
    if not isinstance(batches, list) or len(batches) != 1 or not isinstance(batches[0], Mapping):
        return []
    return [(run, str(batches[0][run])) for run in ("base", "source") if batches[0].get(run) is not None]


def number(value: float) -> str:
    """A number as people read it; what is none is said so."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.5g}".replace("-", "−")
