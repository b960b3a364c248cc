"""A model of two layers of attention that learned induction: after `A B ... A` comes `B`.

    python -m tests.ground_truth.induction      # trains it anew, in seconds, into induction.safetensors

A text is eight different tokens, then pairs of neighbours from among these; what is learned is the second of
each pair. A price on the size of what each head writes makes the model do it with few heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.ground_truth.stack import Stack, of_weights

FILE = Path(__file__).with_name("induction.safetensors")
TOKENS, LENGTH, DIFFERENT, PAIRS = 24, 16, 8, 4
WIDTH, HEADS, HEAD_WIDTH = 32, 4, 8
SEED, STEPS, BATCH, RATE, DECAY, PRICE = 1, 1500, 64, 3e-3, 0.1, 0.03


def induction() -> Stack:
    """The trained model."""
    return of_weights(load_file(FILE), heads=HEADS, is_causal=True)


@dataclass(frozen=True)
class Prompts:
    """`base` [prompt, 9] ends with the token at position `at`, and `answers` is what came after that.

    In `source` another token stands at `at`: the last one is new there, and nothing says what comes after it.
    """

    base: Tensor
    source: Tensor
    at: Tensor
    answers: Tensor


def prompts(number: int, seed: int = 0) -> Prompts:
    """Random prompts, no token twice but the one that is asked for; that is never the first one."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.rand(number, TOKENS, generator=drawn).argsort(1)[:, : DIFFERENT + 1]
    at = torch.randint(1, DIFFERENT - 1, (number, 1), generator=drawn)
    spare = tokens[:, -1:].clone()
    base = tokens.clone()
    base[:, -1:] = tokens.gather(1, at)
    return Prompts(base, base.scatter(1, at, spare), at[:, 0], base.gather(1, at + 1)[:, 0])


def _texts(drawn: torch.Generator) -> Tensor:
    tokens = torch.rand(BATCH, TOKENS, generator=drawn).argsort(1)[:, :DIFFERENT]
    at = torch.rand(BATCH, DIFFERENT - 1, generator=drawn).argsort(1)[:, :PAIRS]
    pairs = torch.stack([tokens.gather(1, at), tokens.gather(1, at + 1)], -1)
    return torch.cat([tokens, pairs.flatten(1)], 1)


def _size_of_heads(model: Stack) -> Tensor:
    """The sum, over heads, of the norm of what reads its values out into the stream."""
    by_head = [layer.attn.out.weight.view(WIDTH, HEADS, HEAD_WIDTH) for layer in model.blocks]
    return torch.stack([out.square().sum((0, 2)).add(1e-8).sqrt() for out in by_head]).sum()


def train() -> Stack:
    """The model, trained anew."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    drawn = torch.Generator().manual_seed(SEED)
    model = Stack(
        tokens=TOKENS,
        length=LENGTH,
        width=WIDTH,
        layers=2,
        heads=HEADS,
        head_width=HEAD_WIDTH,
        neurons=0,
        outputs=TOKENS,
        is_causal=True,
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=WIDTH**-0.5)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, betas=(0.9, 0.98))
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, step / 50) * max(0.05, 1.0 - step / STEPS)
        texts = _texts(drawn)
        outputs = model(texts).logits[:, DIFFERENT:-1:2]
        loss = functional.cross_entropy(outputs.flatten(0, 1), texts[:, DIFFERENT + 1 :: 2].flatten())
        optimiser.zero_grad()
        torch.autograd.backward(loss + PRICE * _size_of_heads(model))
        optimiser.step()
    return model


if __name__ == "__main__":
    save_file(train().state_dict(), FILE)
