"""Text to tokens and back, and the loss of the next token, as TransformerLens has them."""

from __future__ import annotations

from typing import Any

import torch

from conewise.compat.hooked_weights import HookedWeights

Tensor = torch.Tensor


class HookedText(HookedWeights):
    """A model that reads text: `cfg` selects if a BOS token is prepended by default."""

    _tokenizer: Any

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ValueError if there is none."""
        if self._tokenizer is None:
            raise ValueError(
                "this model has no tokenizer, so it reads no text: give tokens, or the tokenizer, "
                "`HookedModel(module, tokenizer)`."
            )
        return self._tokenizer

    def to_tokens(
        self,
        input: str | list[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tensor:
        """Return tokens [prompt, pos], with the BOS token prepended unless `prepend_bos` is False.

        Prompts of different lengths are padded on the right, so that no earlier position attends to padding.
        """
        texts = [input] if isinstance(input, str) else list(input)
        if not texts or not all(isinstance(one, str) for one in texts):
            raise ValueError(f"text is a string or a list of strings, and {input!r} is neither.")
        has_bos = self.cfg.default_prepend_bos if prepend_bos is None else prepend_bos
        rows = [self._row(one, has_bos) for one in texts]
        if truncate and self.cfg.n_ctx is not None:
            rows = [row[: self.cfg.n_ctx] for row in rows]
        longest = max(map(len, rows))
        if not longest:
            raise ValueError(f"there are no tokens in {input!r}; give some text, or prepend_bos=True.")
        side = padding_side or "right"
        if side not in {"left", "right"}:
            raise ValueError(f"padding_side is 'left' or 'right', and {side!r} is neither.")
        if side == "left" and any(len(row) < longest for row in rows):
            raise ValueError(
                "prompts of different lengths are padded on the right here, where no earlier position sees "
                "it: padding on the left needs a mask, which is not taken. Leave out padding_side, or give "
                "prompts of one length."
            )
        fillers = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, self._beginning())
        pad = next((int(one) for one in fillers if one is not None), 0)
        device = self.cfg.device if move_to_device else None
        return torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)

    def to_string(self, tokens: Any) -> Any:
        """Return the text of tokens [pos], or the texts of tokens [prompt, pos]."""
        numbers = torch.as_tensor(tokens)
        if numbers.ndim > 2:
            raise ValueError(f"tokens are [pos] or [prompt, pos], and these are {tuple(numbers.shape)}.")
        if numbers.ndim == 2:
            return [self._decoded(row) for row in numbers.tolist()]
        return self._decoded(numbers.reshape(-1).tolist())

    def to_str_tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> list[Any]:
        """Return the text of every token, of a text or of tokens [pos]; a list of such lists for several."""
        if isinstance(input, list) and not all(isinstance(one, int) for one in input):
            return [self.to_str_tokens(one, prepend_bos, padding_side) for one in input]
        if isinstance(input, str):
            numbers = self.to_tokens(input, prepend_bos, padding_side)[0]
        else:
            numbers = torch.as_tensor(input).squeeze()
            numbers = numbers.reshape(1) if numbers.ndim == 0 else numbers
        if numbers.ndim != 1:
            raise ValueError(
                f"tokens are one prompt here, and these are {tuple(numbers.shape)}: go through the prompts."
            )
        return [self._decoded([number]) for number in numbers.tolist()]

    def to_single_token(self, string: str) -> int:
        """Return the token of a single-token text. Raises AssertionError for no token or several."""
        numbers = self._row(string, prepend_bos=False)
        if len(numbers) != 1:
            parts = ", ".join(repr(self._decoded([number])) for number in numbers)
            raise AssertionError(
                f"{string!r} is {len(numbers)} tokens ({parts or 'none'}); expected one. Words inside of a "
                "sentence usually begin with a space."
            )
        return numbers[0]

    def to_single_str_token(self, int_token: int) -> str:
        """Return the text of one token."""
        return str(self.to_str_tokens([int(int_token)])[0])

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tensor,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Return the first, or the last, position of a token in a prompt."""
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

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """Return the columns of W_U for tokens, [..., d_model], which multiply the final norm's output."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        numbers = torch.as_tensor(tokens, device=self.cfg.device)
        if numbers.numel() == 1:
            numbers = numbers.reshape(())
        return self.W_U.T[numbers]

    def _tokenizer_prepends_bos(self) -> bool:
        bos = self._beginning()
        return bos is not None and self.tokenizer("a").input_ids[:1] == [bos]

    def _row(self, text: str, prepend_bos: bool) -> list[int]:
        bos, eos = self._beginning(), self.tokenizer.eos_token_id
        numbers: list[int] = list(self.tokenizer(text).input_ids)
        while len(numbers) > 1 and eos is not None and numbers[-1] == eos and self._appends_eos():
            numbers.pop()
        is_there = self._tokenizer_prepends_bos() and numbers[:1] == [bos]
        if is_there and not prepend_bos:
            return numbers[1:]
        return [bos, *numbers] if prepend_bos and not is_there and bos is not None else numbers

    def _appends_eos(self) -> bool:
        eos = self.tokenizer.eos_token_id
        return eos is not None and self.tokenizer("a").input_ids[-1:] == [eos]

    def _beginning(self) -> int | None:
        """The token of the beginning; that of the end where there is no other."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        found: int | None = bos if bos is not None else eos
        return found

    def _decoded(self, numbers: list[int]) -> str:
        return str(self.tokenizer.decode(numbers, clean_up_tokenization_spaces=False))


def lm_cross_entropy_loss(
    logits: Tensor, tokens: Tensor, attention_mask: Tensor | None = None, per_token: bool = False
) -> Tensor:
    """Minus the log-probability of each next token, [prompt, pos - 1] with `per_token`, else their mean.

    With an attention mask [prompt, pos], pairs of positions of which one is padding count nothing.
    """
    found = -logits[..., :-1, :].log_softmax(-1).gather(-1, tokens[..., 1:, None])[..., 0]
    if attention_mask is None:
        return found if per_token else found.mean()
    counts = attention_mask.bool()[..., :-1] & attention_mask.bool()[..., 1:]
    found = found * counts
    return found if per_token else found.sum() / counts.sum()


def lm_accuracy(logits: Tensor, tokens: Tensor, per_token: bool = False) -> Tensor:
    """Return which next tokens are the likeliest, [prompt, pos - 1], with `per_token`; else their share."""
    is_right = logits[..., :-1, :].argmax(-1) == tokens[..., 1:]
    return is_right if per_token else is_right.float().mean()
