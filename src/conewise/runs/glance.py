"""The view of a run in a notebook: the next tokens, and how much each head and MLP writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conewise.anatomy.padding import shown_positions
from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import Place
from conewise.errors import ConewiseError
from conewise.program.tensors import computing
from conewise.runs.decomposition import logits_name
from conewise.runs.values import Values
from conewise.templates import Heatmap, bars, beside, heading, table, visible
from conewise.text.tokens import token_text

PROMPTS, TOP = 3, 5
"""So many prompts are shown, and so many of the likeliest tokens of each."""

Likely = list[tuple[str, float]]
"""The likeliest next tokens of a prompt, and their probabilities."""


def next_tokens(run: Values, top: int = TOP) -> list[Likely]:
    """The likeliest tokens behind the last position of the first prompts; none where there are no tokens."""
    try:
        return _next_tokens(run, top)
    except ConewiseError:  # values of another run, or outputs that are laid out otherwise
        return []


def _next_tokens(run: Values, top: int) -> list[Likely]:
    name = logits_name(run)
    if name is None or all(value.is_floating_point() for value in run.inputs.values()):
        return []
    program = run.model.program
    outputs = Outputs(program)
    prompts = outputs.prompts(run.inputs)
    with computing():
        logits = outputs.arranged(name, run.value_at(name), 1, prompts)[0]
        if logits.ndim == 3:
            mask = shown_positions(program, run.inputs, name)
            ends = [-1] * prompts if mask is None else [int(row.nonzero()[-1]) for row in mask]
            logits = torch.stack([logits[number, end] for number, end in enumerate(ends[:PROMPTS])])
        found = logits[:PROMPTS].float().softmax(-1).topk(min(top, logits.shape[-1]), -1)
    tokenizer = run.model.tokenizer

    def text(token: int) -> str:
        return str(token) if tokenizer is None else visible(token_text(tokenizer, token))

    return [
        [(text(token), prob) for token, prob in zip(tokens, probs, strict=True)]
        for tokens, probs in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def shown_next(found: Sequence[Likely]) -> str:
    """The next tokens of each prompt as bars."""
    drawn = [
        heading(f"next token of prompt {number}" if len(found) > 1 else "next token")
        + bars([(text, prob, f"{prob:.1%}") for text, prob in likely])
        for number, likely in enumerate(found, 1)
    ]
    return beside(*drawn) if drawn else ""


def shown_change(before: Sequence[Likely], after: Sequence[Likely]) -> str:
    """The next tokens of each prompt before patches and under them, side by side."""
    drawn = []
    for old, new in zip(before, after, strict=True):
        rows = [
            (text, f"{prob:.1%}", other, f"{now:.1%}")
            for (text, prob), (other, now) in zip(old, new, strict=True)
        ]
        drawn.append(table(rows, ("next token before", "", "next token patched", ""), numbers=(1, 3)))
    return beside(*drawn) if drawn else ""


def shown_map(run: Values) -> str:
    """A row for each layer, with the size of what each head and MLP writes at the last position."""
    try:
        drawn = [_sizes(run, kind) for kind in ("z", "mlp_out")]
    except ConewiseError:  # no heads, or values that were not kept
        return ""
    return beside(*(one for one in drawn if one))


def _sizes(run: Values, kind: str) -> str:
    layers = run.model.site_table.layers(kind)
    with computing():
        values = [run.read(Place(kind, layer)) for layer in layers]
        sizes = [value[0, -1].float().norm(dim=-1) for value in values]
    rows = [one.reshape(-1).tolist() for one in sizes]
    if not rows or len({len(row) for row in rows}) > 1:
        return ""
    is_head = kind == "z"
    told = [
        [
            f"{'head' if is_head else 'MLP'} {layer}{f'.{at}' if is_head else ''}: {size:.3g}"
            for at, size in enumerate(row)
        ]
        for layer, row in zip(layers, rows, strict=True)
    ]
    columns = [str(at) for at in range(len(rows[0]))] if is_head else [""]
    title = "size of what heads write (z)" if is_head else "MLPs"
    return Heatmap(
        rows,
        [str(one) for one in layers],
        columns,
        told,
        "layer" if is_head else "",
        "head" if is_head else "",
        title,
        size=(380, 220),
    ).html()
