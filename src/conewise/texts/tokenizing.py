"""A model's tokenizer, called so that what it raises is an error of ours.

A tokenizer is made from files, and damage in them may show when it is first used: as any error of Python, or
as a panic of the library that is written in Rust.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from conewise.capturing.foreign import brief, translating
from conewise.errors import PromptError, describe
from conewise.reading import lone_surrogate


def expect_decodes(tokenizer: Any) -> None:
    """Raise PromptError for what is no tokenizer; None stands for none."""
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not hasattr(tokenizer, "decode")):
        raise PromptError(
            f"a tokenizer makes tokens of texts, and decodes them; {describe(tokenizer)} is none."
        )


def token_ids(tokenizer: Any, text: str, **how: Any) -> tuple[int, ...]:
    """The tokens of a text; `how` as the tokenizer is called with. Raises PromptError where it fails."""
    if (half := lone_surrogate(text)) is not None:
        raise PromptError(
            f"the text {text!r} holds half of a surrogate pair, \\u{ord(half):04x}, which is no character "
            "and has no tokens. Write the whole character, in UTF-8."
        )
    with _raising(f"makes no tokens of {_short(text)!r}"):
        return tuple(int(number) for number in tokenizer(text, **how)["input_ids"])


def token_spans(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Where each token of a text begins and ends in it. Raises PromptError where it fails."""
    with _raising(f"does not say where the tokens of {_short(text)!r} are"):
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        return [(int(begin), int(end)) for begin, end in offsets]


def token_texts(tokenizer: Any, ids: Iterable[int]) -> tuple[str, ...]:
    """Each token as text. What is no whole character by itself is shown as the tokenizer writes it."""
    texts = []
    for number in ids:
        with _raising(f"has no text for the token {number}"):
            text = tokenizer.decode([number])
            is_whole = text and "\ufffd" not in text
            texts.append(text if is_whole else str(tokenizer.convert_ids_to_tokens(number)))
    return tuple(texts)


def unknown_token(tokenizer: Any) -> int | None:
    """The token that stands for all that is not in the vocabulary; None where there is none."""
    with _raising("does not say which token is the unknown one"):
        number: int | None = getattr(tokenizer, "unk_token_id", None)
        return number


def _raising(failure: str) -> AbstractContextManager[None]:
    return translating(
        lambda error: PromptError(
            f"the tokenizer of this model {failure} ({brief(error)}). Its files are damaged, or do not "
            "belong together: fetch them again, or save the tokenizer again beside its model."
        )
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
