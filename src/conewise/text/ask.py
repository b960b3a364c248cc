"""`ask`: a question about a model in text, from prompts as people have them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from conewise.anatomy.components import Edges
from conewise.anatomy.places import Place, read_name
from conewise.anatomy.selectors import (
    AXES,
    Choice,
    SelectorLike,
    Selectors,
    as_selectors,
    chosen,
    sites,
)
from conewise.arguments import checked
from conewise.circuits.replaced_parts import model_edges
from conewise.errors import Argument, PromptError, PromptWarning, SiteError, SweepError, describe, warn
from conewise.program.calls import forward_parameters
from conewise.runs.captured import Captured
from conewise.runs.interventions import Intervention
from conewise.runs.spreading import selector_of, with_named
from conewise.text.prompts import Pair, TokenizedPrompts, as_pairs, tokenize
from conewise.text.questions import Question, default_direction, expect_asked

PATTERN = "a0.*->*<k>"
"""Edges as people write them: from the heads of layer 0 into keys."""

_NAME = re.compile(r"\s*(?P<name>[^\[\],]+?)\s*(?:\[(?P<part>[^\[\]]*)\])?\s*(?:,|$)")
_CHOICE = re.compile(r"-?\d+|-?\d*:-?\d*(?::-?\d*)?")


def selected(text: str, pos: str | None, model: Captured) -> Selectors:
    """Sites by their names, every layer and head of a kind unless its part says otherwise.

    `pos` chooses positions of all of them.
    """
    found: Selectors | None = None
    for written_name, part in written(text):
        name, own = read_name(written_name)
        choices = _usual(model, name, pos) | own | part
        selector = as_selectors(sites(name, stack="", **choices))
        found = selector if found is None else found + selector
    if found is None:
        raise SiteError(
            Argument("sites"), " names none; write, for one, ", Argument("sites", "z,mlp_out"), "."
        )
    return found


def chosen_edges(text: str, pos: str | None, model: Captured, lengths: Collection[int]) -> Edges:
    """The edges that a pattern stands for, at the positions `pos` of prompts of these lengths."""
    writer, arrow, reader = (word.strip() for word in text.partition("->"))
    if not arrow or not (writer or reader):
        raise SiteError(
            f"{text!r} {'names no component' if arrow else 'has no arrow'}; write WRITER->READER with * for "
            f"anything, as {PATTERN!r}.",
        )
    if pos is None:
        return model_edges(model).select(writer=writer or "*", reader=reader or "*")
    choice = as_choice(pos)
    picked = {length: chosen(choice, length, "pos", "the edges") for length in sorted(set(lengths))}
    positions = next(iter(picked.values()))
    if len(picked) > 1:
        from_end = {tuple(one - length for one in along) for length, along in picked.items()}
        if len(from_end) > 1:
            raise SiteError(
                Argument("pos", pos),
                f": the prompts have {' or '.join(map(str, picked))} tokens, so that a position does not "
                "mean the same in all of them. Count from the end (-1 is the last), give prompts of one "
                "length, or leave ",
                Argument("pos"),
                " out.",
            )
        positions = list(next(iter(from_end)))
    return model_edges(model, positions).select(writer=writer or "*", reader=reader or "*")


def written(text: str) -> list[tuple[str, dict[str, Choice]]]:
    """Names, each with what is chosen of its parts."""
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _NAME.match(text, at)
        if match is None:
            raise SiteError(
                f"cannot read the sites {text!r} from {text[at:]!r} on. Write kinds or names separated by "
                "commas, each with a part if you like: z,mlp_out or 'z[layer=2:5, head=0],mlp_out'."
            )
        found.append((match["name"], _part(match["part"], match[0].strip(" ,"))))
        at = match.end()
    return found


def _part(text: str | None, where: str) -> dict[str, Choice]:
    choices: dict[str, Choice] = {}
    for item in (text or "").split(",") if text and text.strip() else ():
        axis, _, choice = (word.strip() for word in item.partition("="))
        if axis not in AXES or not _CHOICE.fullmatch(choice):
            raise SiteError(
                f"cannot read {item.strip()!r} in {where!r}. A part is AXIS=CHOICE: the axis one of "
                f"{', '.join(AXES)}, the choice a number or a slice like ':' or '2:5'."
            )
        choices[axis] = as_choice(choice)
    return choices


def as_choice(text: str) -> Choice:
    """A number where it is one, so that results do not have an axis for it; else a slice as written."""
    bare = text.strip()
    return int(bare) if re.fullmatch(r"-?\d{1,18}", bare) else bare  # more digits are out of any range


def _usual(model: Captured, name: str, pos: str | None) -> dict[str, Choice]:
    """Return the usual choice along each axis: every layer, every head."""
    choices = dict(selector_of(name, model).choices)
    if pos is not None:
        layers = model.sites.layers(name) if name in model.sites.kinds else ()
        first = model.each_call([Place(name, layers[0] if layers else None)])[0]
        axes = model.locate(first).view.axes
        if "pos" not in axes:
            raise SiteError(
                Argument("pos", pos), f": {name} has no positions; its axes are {', '.join(axes)}."
            )
        choices["pos"] = as_choice(pos)
    return choices


HEADS = "z"
"""The sites that are asked about where none are named: every head of every layer."""

Prompts = str | Path | Mapping[str, Any] | Pair | Iterable[Mapping[str, Any] | Pair | str]


@checked
def ask(
    model: Captured,
    prompts: Prompts | Any,
    *,
    sites: SelectorLike = HEADS,
    metric: Any = "logit_diff",
    source: Any = None,
    direction: str | None = None,
    precision: str | None = None,
    batch_size: int | None = None,
    as_written: bool = False,
) -> Question:
    """Measure the effect of every site on the model's answers, over prompts of any lengths: a `Question`.

    `prompts` are a file (JSON, JSON lines or CSV), a DataFrame, a row or a list of rows `{clean, corrupted,
    answers, wrong_answers}`; `corrupted` can be omitted if no run of it is read, and a list of texts is then
    sufficient. The model needs a tokenizer: `cw.load` provides one, and so does `cw.capture(module,
    tokenizer=...)`.

    `sites` are those of `model.sweep`, or a text as on the command line: "z,mlp_out", "z[layer=2:5, head=0]",
    "resid_pre[pos=:]", "a0.*->*<k>" for edges; by default every head. `metric` is "logit_diff", "prob" or
    "kl", all at the last position, or a metric or function as for `model.sweep`. `source` provides the
    patched values: by default those of the other prompt of each pair; otherwise "zero", "mean" (over all
    prompts and positions) or `cw.noise(...)`. `direction` is "denoise" (clean values into the corrupted run;
    the default if they come from the other prompt) or "noise" (the opposite; the default for the others).

    The prompts are grouped by length, at most `batch_size` in a group. All arguments are validated here:
    invalid ones raise PromptError, SiteError, SweepError or MetricError, and nothing is run. A PromptWarning
    reports words that the tokenizer does not know, and answers that were read with a different leading space.
    """
    patch, scale, seed = put_of(source)
    direction = default_direction(patch) if direction is None else direction
    if model.tokenizer is None:
        raise PromptError(
            "texts are asked of a model with its tokenizer, and there is none. Load it with `cw.load(...)`, "
            "or capture it with `cw.capture(module, tokenizer=...)`."
        )
    # Else the corrupted prompts are not run at all.
    pairs = as_pairs(prompts, needs_both=patch == "source" or direction == "denoise")
    read = tokenize(pairs, model.tokenizer, batch_size=batch_size, as_written=as_written)
    for note in read.notes:
        warn(f"{note}.", PromptWarning)
    expect_asked(model, read, direction, patch, metric, scale, seed)
    capture_with(model, read)
    return Question(
        model, read, sites_of(model, sites, read), direction, patch, metric, scale, seed, precision
    )


def put_of(source: Any) -> tuple[str, float, int]:
    """Return what a question puts at its sites: "source", "zero", "mean" or "noise", with scale and seed."""
    if source is None or (isinstance(source, str) and source in {"zero", "mean"}):
        return source or "source", 1.0, 0
    if isinstance(source, Intervention) and source.described[:1] == ("noise",):
        _, scale, seed = source.described
        return "noise", scale, seed
    raise SweepError(
        f"the source of a question is the other prompt of each pair, 'zero', 'mean' or `cw.noise(...)`, "
        f"and {describe(source)} is none of them. Leave `source` out for the other prompt, or "
        "give any source to `model.sweep`."
    )


def sites_of(model: Captured, sites: SelectorLike, prompts: TokenizedPrompts) -> Selectors | Edges:
    """Sites as people give them: selectors, places, edges, names, or a text as on the command line."""
    if isinstance(sites, str):
        return (
            chosen_edges(sites, None, model, prompts.lengths)
            if "->" in sites
            else selected(sites, None, model)
        )
    found = with_named(sites, model)
    return found if isinstance(found, Edges) else as_selectors(found)


def capture_with(model: Captured, prompts: TokenizedPrompts) -> None:
    """Capture a model that was loaded, with the first of these prompts; see `expect_reads_text`."""
    if not model.is_captured:
        expect_reads_text(model.module, model.label)
    # Two prompts show what many would: a capture computes its example.
    model._capture_for([prompts.pairs[number].clean for number in prompts.groups[0][:2]])


def expect_reads_text(module: Any, name: str) -> None:
    """Raise PromptError for a module that does not read one text."""
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise PromptError(
            f"{name} is an encoder-decoder model, which has two inputs; questions in text are asked of those "
            "that have one. Capture it from Python: `cw.capture(module, input_ids=..., "
            "decoder_input_ids=...)`."
        )
    if "input_ids" not in forward_parameters(module):
        raise PromptError(
            f"{name} ({type(module).__name__}) reads no tokens: its forward has no `input_ids`. Questions in "
            "text are asked of language models; capture it from Python with `cw.capture(module, ...)`."
        )
