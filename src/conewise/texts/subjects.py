"""Subjects: where a piece of text stands among the tokens of a prompt."""

from __future__ import annotations

from typing import Any

from conewise.errors import PromptError
from conewise.texts.tokenizing import token_ids, token_spans, token_texts


def subject_positions(prompt: str, subject: str, tokenizer: Any) -> tuple[int, ...]:
    """The positions of the tokens that hold a part of `subject`, wherever it stands in `prompt`.

    Every occurrence counts: noise on one of two would leave the other for the model to read. Raises
    PromptError when the prompt does not hold it.
    """
    bare = subject.strip()
    if not bare:
        raise PromptError("the subject is empty; give the words of the prompt that noise is put on.")
    starts = [at for at in range(len(prompt)) if prompt.startswith(bare, at)]
    if not starts:
        raise PromptError(
            f"the subject {subject!r} does not stand in the prompt {prompt!r}, letter for letter."
        )
    found = []
    for position, (begin, end) in enumerate(_spans(prompt, tokenizer)):
        if any(begin < at + len(bare) and end > at for at in starts):
            found.append(position)
    return tuple(found)


def _spans(prompt: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Where each token begins and ends in the prompt; one that was added has no length."""
    if getattr(tokenizer, "is_fast", False):
        return [_shrunk(prompt, begin, end) for begin, end in token_spans(tokenizer, prompt)]
    spans, at = [], 0
    for text in token_texts(tokenizer, token_ids(tokenizer, prompt)):
        begin = prompt.find(text.strip(), at) if text.strip() else -1
        at = begin + len(text.strip()) if begin >= 0 else at
        spans.append((begin, at) if begin >= 0 else (at, at))
    return spans


def _shrunk(prompt: str, begin: int, end: int) -> tuple[int, int]:
    """A span without the spaces in front of it: they belong to the token, not to the word before."""
    while begin < end and prompt[begin].isspace():
        begin += 1
    return begin, end
