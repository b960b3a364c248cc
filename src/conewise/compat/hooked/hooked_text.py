"""The methods by which a TransformerLens model turns text into tokens, and tokens into text."""

from __future__ import annotations

from typing import Any

import torch

from conewise.compat.hooked.hooked_config import HookedConfig
from conewise.compat.hooked.tokens import Tokens

Tensor = torch.Tensor


class HookedText:
    """A model that reads text: `cfg` says whether a token of the beginning is put in front by default."""

    cfg: HookedConfig
    _text: Tokens

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ValueError where there is none."""
        return self._text.tokenizer

    def to_tokens(
        self,
        input: str | list[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tensor:
        """Tokens [prompt, pos], the token of the beginning in front unless `prepend_bos` is False.

        Prompts of different lengths are padded on the right, where no earlier position sees it.
        """
        found = self._text.to_tokens(input, self._prepends(prepend_bos), padding_side, truncate)
        return found if move_to_device else found.cpu()

    def to_string(self, tokens: Any) -> Any:
        """The text of tokens [pos], or the texts of tokens [prompt, pos]."""
        return self._text.to_string(tokens)

    def to_str_tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> list[Any]:
        """The text of every token, of a text or of tokens [pos]; a list of such lists for several."""
        return self._text.to_str_tokens(input, self._prepends(prepend_bos), padding_side)

    def to_single_token(self, string: str) -> int:
        """The token of a text that is one. Raises AssertionError where it is none or several."""
        return self._text.to_single_token(string)

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token."""
        return str(self.to_str_tokens([int(int_token)])[0])

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tensor,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """The first, or the last, position of a token in a prompt."""
        if mode not in {"first", "last"}:
            raise ValueError(f"mode is 'first' or 'last', and {mode!r} is neither.")
        tokens = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input
        if tokens.ndim == 2 and len(tokens) != 1:
            raise AssertionError(f"expected one prompt, [pos] or [1, pos], and not {tuple(tokens.shape)}.")
        wanted = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        where = (tokens.reshape(-1) == wanted).nonzero().reshape(-1).tolist()
        if not where:
            raise AssertionError(f"the token {wanted} does not occur in the prompt.")
        return int(where[0 if mode == "first" else -1])

    def _prepends(self, prepend_bos: bool | None) -> bool:
        return self.cfg.default_prepend_bos if prepend_bos is None else prepend_bos
