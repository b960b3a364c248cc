"""The prompts of a base with their tokens, where nothing was asked in text but the model has a tokenizer."""

from __future__ import annotations

from conewise.errors import PromptError
from conewise.report.story import Story, TokenizedPair
from conewise.runs.reading import Reading
from conewise.runs.text_inputs import text_input
from conewise.texts.tokenizing import token_texts


def base_story(base: Reading) -> Story:
    """The prompts of a base with their tokens; none where the model has no tokenizer, or reads no tokens."""
    model = base.model
    try:
        name = text_input(model.program)
    except PromptError:
        return Story(model.label)
    ids = base.inputs[name]
    if model.tokenizer is None or ids.ndim != 2:
        return Story(model.label)
    rows = [token_texts(model.tokenizer, row) for row in ids.tolist()]
    return Story(model.label, tuple(TokenizedPair("".join(row), "", row) for row in rows))
