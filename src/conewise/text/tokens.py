"""Tokenizers, answers as tokens, and where a piece of text stands among the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, suppress
from typing import Any

from conewise.errors import Argument, DecompositionError, PromptError, describe
from conewise.files import lone_surrogate
from conewise.program.foreign import brief, translating
from conewise.program.tensors import Tensor
from conewise.templates import visible


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
    """Return where each token of a text begins and ends. Raises PromptError where the tokenizer fails."""
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
    """True if an answer would be glued to the last word of its prompt; a digit goes on with a number."""
    is_number = text[:1].isdigit() and prompt[-1:].isdigit()
    return text[:1].isalnum() and prompt[-1:].isalnum() and not is_number


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
    """Return where each token begins and ends in the prompt; one that was added has no length."""
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


def position_labels(
    inputs: Mapping[str, Tensor], tokenizer: Any, prompts: int, positions: int
) -> tuple[tuple[str, ...], ...]:
    """A label for each position of each prompt: its token, or its number where that cannot be written."""
    numbers = tuple(tuple(map(str, range(positions))) for _ in range(prompts))
    ids = _token_ids(inputs, prompts, positions)
    if tokenizer is None or ids is None:
        return numbers
    return tuple(tuple(visible(token_text(tokenizer, token)) for token in row) for row in ids)


def _token_ids(inputs: Mapping[str, Tensor], prompts: int, positions: int) -> list[list[int]] | None:
    """The tokens [prompt, position] among the inputs, the last ones where there are more than positions."""
    named = sorted(inputs.items(), key=lambda item: item[0] not in {"input_ids", "tokens", "ids"})
    for name, value in named:
        is_mask = "mask" in name or "type" in name or "position" in name
        is_tokens = value.ndim == 2 and not value.is_floating_point() and not is_mask
        if is_tokens and value.shape[0] == prompts and value.shape[1] >= positions:
            rows: list[list[int]] = value[:, value.shape[1] - positions :].tolist()
            return rows
    return None


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token."""
    return str(tokenizer.decode([token]))


def token_numbers(tokens: Any, tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """Tokens as their numbers: numbers as they are, texts by the tokenizer, each of one token."""
    with suppress(RuntimeError):  # a tensor without numbers, or without dense ones: refused below
        tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    is_endless = isinstance(tokens, range) and bool(tokens) and tokens[-1] >= vocabulary
    if hasattr(tokens, "tolist") or isinstance(tokens, bytes | bytearray | Set | Mapping) or is_endless:
        raise DecompositionError(
            f"tokens are a number, a text, or a list of them in order, not {describe(tokens)}."
        )
    is_one = isinstance(tokens, str) or not isinstance(tokens, Iterable)
    given: Sequence[Any] = [tokens] if is_one else list(tokens)
    found: list[int] = []
    for one in given:
        if isinstance(one, str):
            found.append(_number_of(one, tokenizer))
        elif isinstance(one, bool | type) or not hasattr(one, "__index__"):
            raise DecompositionError(
                f"a token is its number in the vocabulary, or its text; {one!r} is neither."
            )
        else:
            found.append(one.__index__())
    outside = [token for token in found if not 0 <= token < vocabulary]
    if outside:
        raise DecompositionError(f"token {outside[0]} is not in the vocabulary of {vocabulary}.")
    return tuple(found)


def _number_of(text: str, tokenizer: Any) -> int:
    if tokenizer is None:
        raise DecompositionError(
            f"the token {text!r} is a text, and no tokenizer is known that turns it into a number. Give "
            "`tokenizer=`, or the token's number."
        )
    ids = token_ids(tokenizer, text, add_special_tokens=False)
    if len(ids) != 1:
        raise DecompositionError(
            f"{text!r} is {len(ids)} tokens for this tokenizer, and one is needed. Words within a text are "
            f"tokens with the space before them: try {' ' + text.strip()!r}."
        )
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and ids[0] == unknown and text.strip() != tokenizer.unk_token:
        raise DecompositionError(f"{text!r} is not in the vocabulary of this tokenizer.")
    return ids[0]
