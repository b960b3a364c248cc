"""Answers as tokens: the text of one token, with or without the space in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conewise.errors import Argument, PromptError
from conewise.texts.tokenizing import token_ids, token_texts, unknown_token

Tokens = tuple[int, ...]


class AnswerReader:
    """Reads answers as tokens, and notes what is worth a word.

    An answer is taken as written where that is one token, else with a leading space added or removed where
    that is. A word without a leading space after a prompt that ends in a letter is refused where it is a
    token with the space as well, unless `as_written`: a model that has both would be measured on the wrong
    one.
    """

    def __init__(self, tokenizer: Any, *, as_written: bool = False) -> None:
        self._tokenizer, self._as_written = tokenizer, as_written
        self._unknown = unknown_token(tokenizer)
        self._known: dict[str, Tokens] = {}
        self.notes: list[str] = []

    def token(self, text: str, prompt: str, where: str) -> int:
        """The token of an answer to a prompt; `where` is what a message is about. Raises PromptError."""
        other = text[1:] if text.startswith(" ") else f" {text}"
        written, toggled = self._bare(text), self._bare(other)
        if self._is_one(written):
            is_ambiguous = self._is_one(toggled) and toggled != written and _lacks_space(text, prompt)
            if is_ambiguous and not self._as_written:
                raise PromptError(
                    f"{where}: {text!r} and {other!r} are both a token, and after a prompt that ends in "
                    f"{prompt.rsplit(maxsplit=1)[-1]!r} the one with the space comes next. Write {other!r}; "
                    f"if you do mean {text!r}, glued to the word before it, say ",
                    Argument("as_written", True),
                    ".",
                )
            return written[0]
        if self._is_one(toggled):
            self.notes.append(f"{where}: {text!r} was read as {other!r}, which is one token")
            return toggled[0]
        if self._unknown in written:
            raise PromptError(f"{where}: {text!r} is not in the vocabulary of this model.")
        raise PromptError(
            f"{where}: {text!r} is not one token: it splits into {self.shown(written)}, and {other!r} into "
            f"{self.shown(toggled)}. Choose answers of one token; most words are one with a leading space."
        )

    def is_unknown(self, tokens: Tokens) -> bool:
        """Whether a part of a text is not in the vocabulary."""
        return self._unknown in tokens

    def shown(self, tokens: Sequence[int]) -> str:
        """Tokens as people see them: [When] [ Mary]."""
        return " ".join(f"[{text}]" for text in token_texts(self._tokenizer, tokens))

    def _bare(self, text: str) -> Tokens:
        """The tokens of an answer; the same few are given again and again."""
        if text not in self._known:
            self._known[text] = token_ids(self._tokenizer, text, add_special_tokens=False) if text else ()
        return self._known[text]

    def _is_one(self, tokens: Tokens) -> bool:
        return len(tokens) == 1 and tokens[0] != self._unknown


def _lacks_space(text: str, prompt: str) -> bool:
    """Whether an answer would be glued to the last word of its prompt."""
    return text[:1].isalnum() and prompt[-1:].isalnum()
