"""`ask`: a question about a model in text, from prompts as people have them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from conewise.arguments import checked
from conewise.asking.written_sites import chosen_edges, selected
from conewise.capturing.export import unwrapped
from conewise.errors import PromptError, PromptWarning, SweepError, describe
from conewise.locations.edge_sets import with_named
from conewise.locations.edges import Edges
from conewise.locations.selectors import SelectorLike, Selectors, as_selectors
from conewise.model import Model, capture
from conewise.models.loaded import Loaded
from conewise.program.calls import forward_parameters
from conewise.prompts.expectations import default_direction, expect_asked, noise_scale
from conewise.prompts.pairs import Pair, as_pairs
from conewise.prompts.questions import Question
from conewise.prompts.tokenized import TokenizedPrompts, tokenize
from conewise.runs.answers import token_rows

HEADS = "z"
"""The sites that are asked about where none are named: every head of every layer."""

Prompts = str | Path | Mapping[str, Any] | Pair | Iterable[Mapping[str, Any] | Pair | str]


@checked
def ask(
    model: Loaded | Model | nn.Module,
    prompts: Prompts | Any,
    *,
    sites: SelectorLike = HEADS,
    metric: Any = "logit_diff",
    patch: str = "source",
    direction: str | None = None,
    scale: float | None = None,
    precision: str | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    batch_size: int | None = None,
    as_written: bool = False,
) -> Question:
    """What every site does to a model's answers, over prompts of any lengths: a `Question` to plan and run.

    `model` is what `cw.load` gives, or a model that was captured with its tokenizer, or a module with its
    `tokenizer`. `prompts` are a file (JSON, JSON lines or CSV), a DataFrame, a row or a list of rows
    `{clean, corrupted, answers, wrong_answers}`; `corrupted` may be left out where no run of it is read, and
    then a list of texts will do.

    `sites` are those of `model.sweep`, or a text as on the command line: "z,mlp_out", "z[layer=2:5, head=0]",
    "resid_pre[pos=:]", "a0.*->*<k>" for edges; by default every head. `metric` is "logit_diff", "prob" or
    "kl", all at the last position, or a metric or function as for `model.sweep`. `patch` is what is put
    there: "source" (the other prompt's values), "zero", "mean" (over all prompts and positions) or "noise"
    (of standard deviation `scale`, 1 unless given). `direction` is "denoise" (clean values into the corrupted
    run; the default for "source") or "noise" (the other way round; the default for the others).

    The prompts are grouped by length, at most `batch_size` in a group. All that is asked is looked at here:
    what cannot be asked raises PromptError, SiteError, SweepError or MetricError, and nothing is run. Words
    that the tokenizer does not know, and answers that were read with another space, are told by a
    PromptWarning.
    """
    direction = default_direction(patch) if direction is None else direction
    scale = noise_scale(patch, scale)
    if seed and patch != "noise":
        raise SweepError(f"seed={seed} is that of noise, and patch={patch!r} draws none: leave it out.")
    own = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    if not isinstance(model, Loaded | Model | nn.Module):
        raise PromptError(
            "a question is asked of a model: what `cw.load` gives, what `cw.capture` gives, or a module, and "
            f"this is {describe(model)}."
        )
    if own is None:
        raise PromptError(
            "texts are asked of a model with its tokenizer, and there is none. Give what `cw.load` gives, or "
            "`tokenizer=`."
        )
    pairs = as_pairs(prompts, needs_both=reads_corrupted(patch, direction))
    read = tokenize(pairs, own, batch_size=batch_size, as_written=as_written)
    for note in read.notes:
        warnings.warn(f"{note}.", PromptWarning, stacklevel=3)
    expect_asked(read, direction, patch, metric, scale, seed)
    if not isinstance(model, Model):
        reads_last = isinstance(metric, str) and not (isinstance(sites, str) and "->" in sites)
        model = captured_for(model, read, tokenizer=own, reads_last=reads_last)
    return Question(
        model,
        read,
        sites_of(model, sites, read),
        direction,
        patch,
        metric,
        scale,
        seed,
        precision,
    )


def reads_corrupted(patch: str, direction: str | None) -> bool:
    """Whether the corrupted prompts are run at all."""
    return patch == "source" or direction == "denoise"


def sites_of(model: Model, sites: SelectorLike, prompts: TokenizedPrompts) -> Selectors | Edges:
    """Sites as people give them: selectors, places, edges, names, or a text as on the command line."""
    if isinstance(sites, str):
        return (
            chosen_edges(sites, None, model, prompts.lengths)
            if "->" in sites
            else selected(sites, None, model)
        )
    found = with_named(sites, model.components, model.locate, model.each_call)
    return found if isinstance(found, Edges) else as_selectors(found)


def captured_for(
    loaded: Loaded | nn.Module, prompts: TokenizedPrompts, *, tokenizer: Any = None, reads_last: bool = True
) -> Model:
    """A model captured with prompts of its own; `reads_last` as in `captured_with`."""
    # Two prompts show what many would: a capture computes its example.
    example = [prompts.clean[number] for number in prompts.groups[0][:2]]
    return captured_with(loaded, example, tokenizer=tokenizer, reads_last=reads_last)


def captured_with(
    loaded: Loaded | nn.Module,
    rows: Sequence[Sequence[int]],
    *,
    tokenizer: Any = None,
    reads_last: bool = False,
) -> Model:
    """A language model as a graph, captured with these tokens.

    With `reads_last` it computes the logits of the last position alone, where it can: nobody reads the
    others, and the full forwards that a sweep is compared with should not pay for them. Raises PromptError
    for a module that does not read one text.
    """
    module: Any = unwrapped(loaded.module if isinstance(loaded, Loaded) else loaded)
    name = loaded.name if isinstance(loaded, Loaded) else type(module).__name__
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise PromptError(
            f"{name} is an encoder-decoder model, which has two inputs; questions in text are asked of those "
            "that have one. Capture it from Python: `cw.capture(module, input_ids=..., "
            "decoder_input_ids=...)`."
        )
    parameters = forward_parameters(module)
    if "input_ids" not in parameters:
        raise PromptError(
            f"{name} ({type(module).__name__}) reads no tokens: its forward has no `input_ids`. Questions in "
            "text are asked of language models; capture it from Python with `cw.capture(module, ...)`."
        )
    last = {"logits_to_keep": 1} if reads_last and "logits_to_keep" in parameters else {}
    first = next(iter(module.parameters()), None)
    tokens = token_rows(rows, None if first is None else first.device)
    return capture(loaded, input_ids=tokens, tokenizer=tokenizer, **last)
