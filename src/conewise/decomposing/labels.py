"""Positions of a run as people read them: by their tokens, where it is known how these are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from conewise.errors import DecompositionError, describe
from conewise.program.tensors import Tensor
from conewise.texts.tokenizing import token_ids


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


def visible(text: str) -> str:
    """A token with its spaces and line ends to be seen."""
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return ("·" + text[1:] if text.startswith(" ") else text) or "∅"


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
