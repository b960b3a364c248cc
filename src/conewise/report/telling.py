"""What a sweep's page says in words, escaped: the question, the accounting, the check, the origin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from html import escape
from typing import Any

from conewise.amounts import shown_bytes
from conewise.checks.cell_check import CellCheck
from conewise.prompts.story import Story, ToldPair
from conewise.sweeps.result import Result

FIRST = 2
"""How many prompts are shown at once; the others are a click away."""

MOST = 200
"""How many prompts a page writes out at all."""


def question(result: Result, story: Story | None) -> str:
    """The prompts with their tokens, the metric, and which run is changed."""
    if story is None:
        told = "<p>The prompts of this sweep are not known: it was saved without its story.</p>"
        return _section("question", "The question", told + _runs(result, None))
    pairs = [_pair(pair, number, story, result) for number, pair in enumerate(story.prompts[:MOST])]
    more = len(story.prompts) - MOST
    left = f'<p class="note">{more:,} prompts more are not written here.</p>' if more > 0 else ""
    rest = (
        f"<details><summary>{len(pairs) - FIRST:,} more prompts</summary>"
        f'<div class="pairs">{"".join(pairs[FIRST:])}</div>{left}</details>'
        if len(pairs) > FIRST
        else ""
    )
    noise = (
        "<p>In the corrupted run, noise is added to the marked tokens.</p>" if story.unit == "sample" else ""
    )
    metric = f"<p><b>Measured:</b> {escape(story.metric)}.</p>" if story.metric else ""
    return _section(
        "question",
        "The question",
        f'<p class="lead">{escape(story.direction)}</p>{noise}{metric}'
        f'<div class="pairs">{"".join(pairs[:FIRST])}</div>{rest}' + _runs(result, story),
    )


def _pair(pair: ToldPair, number: int, story: Story, result: Result) -> str:
    lines = []
    for name in ("clean", "corrupted"):
        is_clean = name == "clean"
        text, own = (pair.clean, pair.clean_tokens) if is_clean else (pair.corrupted, pair.corrupted_tokens)
        marked = pair.differing
        if pair.noised and not is_clean:
            text, own, marked = text or pair.clean, own or pair.clean_tokens, marked | set(pair.noised)
        if not text and not own:
            continue
        role = "changed" if name == story.base else "gives the values" if name == story.source else ""
        role = f"<small>{role}</small>" if role else ""
        lines.append(
            f'<div class="run"><div class="who">{name}{role}</div>'
            f'<div class="tokens">{_tokens(text, own, marked)}</div></div>'
        )
    answers = _answers("right", pair.answers) + _answers("wrong", pair.wrong_answers)
    numbered = f'<span class="number">{number + 1}</span>' if len(story.prompts) > 1 else ""
    values = _values(result, number) if len(story.prompts) == result.per_prompt.shape[-1] > 1 else ""
    return (
        f'<div class="pair">{numbered}{"".join(lines)}<div class="run"><div class="who"></div>'
        f'<div class="answers">{answers}{values}</div></div></div>'
    )


def _tokens(text: str, tokens: Iterable[str], marked: frozenset[int]) -> str:
    """Each token in a box, its place on hover; the text as it is where tokens are not known."""
    shown = [
        f'<span class="token{" differs" if place in marked else ""}" title="position {place}">'
        f"{_visible(token)}</span>"
        for place, token in enumerate(tokens)
    ]
    return "".join(shown) or escape(text)


def _visible(token: str) -> str:
    """A token with its spaces and line ends to be seen."""
    shown = escape(token).replace("\n", "⏎").replace("\t", "⇥")
    if shown.startswith(" "):
        shown = f'<i class="space">·</i>{shown[1:]}'
    return shown or '<i class="space">∅</i>'


def _answers(kind: str, words: Iterable[str]) -> str:
    shown = "".join(f'<span class="answer {kind}">{_visible(word)}</span>' for word in words)
    return f'<span><span class="label">{kind}</span>{shown}</span>' if shown else ""


def _values(result: Result, prompt: int) -> str:
    found = []
    for name, numbers in (("base", result.base_per_prompt), ("source", result.source_per_prompt)):
        if numbers is not None:
            value = number(float(numbers[0, prompt]))
            found.append(f'<span><span class="label">{name}</span>{value}</span>')
    return "".join(found)


def _runs(result: Result, story: Story | None) -> str:
    """The metrics of the two runs themselves: where an effect of nothing and of everything would be."""
    rows = []
    base, source = ("", "") if story is None else (f" ({story.base})", f" ({story.source})")
    for row, name in enumerate(result.metrics):
        cells = [escape(name), number(float(result.base[row]))]
        cells += [] if result.source is None else [number(float(result.source[row]))]
        rows.append(cells)
    heads = ["metric", f"base{escape(base)}"] + ([] if result.source is None else [f"source{escape(source)}"])
    return _grid(heads, rows)


def speeds(result: Result, story: Story | None) -> dict[str, Any]:
    """What the sweep took as a share of full re-runs: for the figure beside the accounting."""
    plan, ledger = result.plan, result.ledger
    shares: dict[str, tuple[float, float]] = {
        "node evaluations": (ledger.node_evaluations, plan.full_evaluations),
        "FLOPs": (plan.flops, plan.full_flops),
    }
    if full := full_seconds(result, story):
        shares["seconds"] = (ledger.seconds, full)
    return {name: done / full for name, (done, full) in shares.items() if full}


def full_seconds(result: Result, story: Story | None) -> float | None:
    """How long a full forward for each world would take, from the ones that were timed."""
    if story is None or not story.forwards_timed or story.forward_seconds is None or result.ledger.resumed:
        return None
    return story.forward_seconds * result.plan.worlds


def _taken(amount: int | None) -> str:
    return "–" if amount is None else shown_bytes(amount)


def _of_memory(result: Result) -> str:
    """What was measured of memory."""
    beside, ledger = "Peak memory is what the run takes beside the model and the baseline", result.ledger
    if ledger.peak_bytes is None:
        return f"{beside}; it was not measured."
    if ledger.reserved_bytes is None:
        return f"{beside}; measured is what the process grew by meanwhile, some of it for reasons of its own."
    reserved = f"torch's allocator then had {shown_bytes(ledger.reserved_bytes)} more of the GPU than before"
    return f"{beside}; measured is what tensors took on the GPU; {reserved}."


def accounting(result: Result, story: Story | None) -> str:
    """What was predicted, what was measured, and what a full re-run for each site would have taken."""
    plan, ledger = result.plan, result.ledger
    full = full_seconds(result, story)
    rows = [
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
    told = "".join(f"<li>{escape(note[:1].upper() + note[1:])}</li>" for note in notes)
    return _section(
        "accounting",
        "What it cost",
        '<div class="beside">'
        + _grid(["", "predicted", "measured", "full re-runs", "saved"], rows)
        + f'<div id="speeds" class="figure"></div></div><ul class="notes">{told}</ul>',
    )


def _counted(name: str, predicted: int, measured: int, full: int) -> list[str]:
    agrees = predicted == measured
    mark = (
        '<span class="good" title="as predicted">✓</span>'
        if agrees
        else '<span class="bad" title="not as predicted">✗</span>'
    )
    return [name, f"{predicted:,}", f"{measured:,} {mark}", f"{full:,}", _times(full, measured)]


def _times(full: float, done: float) -> str:
    return f"{full / done:.2f}×" if done else "–"


def checked(result: Result) -> str:
    """How the numbers were verified, or that they were not."""
    check = result.verification
    if check is None:
        told = (
            '<p class="verdict none">These numbers were not verified.</p><p>A sweep that is run with '
            "<code>verify=n</code> has random cells run again as full forwards of the original module, with "
            "hooks.</p>"
        )
        return _section("verification", "How the numbers were checked", told)
    agree = f"{check.cells:,} random cells agree with"
    if not check.ok:
        word = "were run again, and some differ" if check.excess > 1 else "could not be checked"
        verdict = f'<p class="verdict bad">✗ {check.cells:,} random cells {word}.</p>'
    elif check.hooked:
        verdict = f'<p class="verdict good">✓ {agree} full forwards.</p>'
    else:
        verdict = f'<p class="verdict none">{agree} the captured program; the module does not show them.</p>'
    ways = [f"{check.hooked:,} by the original module itself, with hooks"] if check.hooked else []
    if check.interpreted:
        ways.append(
            f"{check.interpreted:,} by the captured program alone, operation by operation, because no module "
            "shows the site"
        )
    return _section(
        "verification",
        "How the numbers were checked",
        f"{verdict}<p>Run again: {' and '.join(ways)}. The largest deviation is "
        f"{check.largest_deviation:.3g}{escape(_allowed(check), quote=False)}.</p>",
    )


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


def origin(result: Result, story: Story | None, made_at: datetime) -> str:
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
    rows += [(label, str(given[key])) for key, label in named if given.get(key) is not None]
    if story is not None and story.seed is not None:
        rows.append(("seed", str(story.seed)))
    rows += [(f"inputs of the {run}", digest) for run, digest in _inputs(given)]
    versions = given.get("versions")
    if isinstance(versions, Mapping):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    rows.append(("page made", made_at.strftime("%d %B %Y, %H:%M UTC")))
    listed = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in rows)
    command = story.command if story is not None else None
    again = (
        f'<div class="command"><pre><code id="command">{escape(command)}</code></pre>'
        '<button type="button" id="copy">Copy</button></div>'
        if command
        else '<p class="note">No command was recorded that makes this again.</p>'
    )
    return _section("provenance", "Where it comes from", f'{again}<dl class="origin">{listed}</dl>')


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


def _section(name: str, title: str, inside: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>'
        f"{inside}</section>"
    )


def _grid(heads: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    lines = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="table"><table class="grid"><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
