"""The loss of the next token, as TransformerLens computes it."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


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
    """Whether the likeliest next token is the next one, [prompt, pos - 1] if `per_token`, else how often."""
    is_right = logits[..., :-1, :].argmax(-1) == tokens[..., 1:]
    return is_right if per_token else is_right.float().mean()
