"""Train the tiny model: `python -m training.tiny --out DIR`.

Everything is drawn from one seed and computed by one thread, so that the same versions on the same kind of
machine give the same weights, bit for bit. The split into training and held-out prompts never changes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from training.language import BOS, EOS, PAD, UNK, Prompt, Teller, training_split
from training.words import NUMBERS, encode, tokenizer

MAX_LENGTH = 64


@dataclass(frozen=True)
class Settings:
    """What a training run depends on, beside the language and the versions of its libraries."""

    steps: int = 3000
    seed: int = 0
    batch: int = 64
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    # The answer is one word of twenty: it counts for more than the others.
    answer_weight: float = 4.0
    # So often a word is read as unknown, so that one stands for "some word" and not for noise.
    unknown: float = 0.01


def new_module() -> Any:
    """The model before training: four layers of four heads, its weights drawn from torch's generator."""
    config = transformers.LlamaConfig(
        vocab_size=len(NUMBERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=NUMBERS[PAD],
        bos_token_id=NUMBERS[BOS],
        eos_token_id=NUMBERS[EOS],
        use_cache=False,
    )
    # Not typed.
    make: Any = transformers.LlamaForCausalLM
    return make(config)


@dataclass(frozen=True)
class Batch:
    """Whole prompts with their answers: what is read, what is to be predicted there, and how much it counts."""

    read: Tensor
    predicted: Tensor
    weights: Tensor


def batch_of(prompts: Sequence[Prompt], settings: Settings, drawn: Teller) -> Batch:
    """Prompts as one batch, padded on the right. Padding and unknown words are not to be predicted."""
    rows = []
    weights = []
    for prompt in prompts:
        asked = encode(prompt.text)
        rows.append([*asked, NUMBERS[prompt.answer], NUMBERS["."], NUMBERS[EOS]])
        weights.append([1.0] * (len(asked) - 1) + [settings.answer_weight, 1.0, 1.0])
    length = max(map(len, rows))
    read = torch.tensor([row + [NUMBERS[PAD]] * (length - len(row)) for row in rows])
    counted = torch.tensor([row + [0.0] * (length - 1 - len(row)) for row in weights])
    generator = torch.Generator().manual_seed(drawn.rng.getrandbits(62))
    hidden = torch.rand(read.shape, generator=generator) < settings.unknown
    hidden[:, 0] = False
    return Batch(read.masked_fill(hidden, NUMBERS[UNK])[:, :-1], read[:, 1:], counted)


def train(module: Any, settings: Settings, *, say: Any = print) -> None:
    """Train `module` in place, on prompts of the training split alone."""
    teller = Teller(training_split(), settings.seed)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, settings))
    module.train()
    for step in range(1, settings.steps + 1):
        batch = batch_of([teller.any() for _ in range(settings.batch)], settings, teller)
        logits = module(input_ids=batch.read).logits
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.predicted.flatten(), reduction="none"
        )
        loss = (losses * batch.weights.flatten()).sum() / batch.weights.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == settings.steps:
            say(f"step {step} of {settings.steps}: loss {loss.item():.4f}")
    module.eval()


def rate(step: int, settings: Settings) -> float:
    """The learning rate at a step, as a share of the largest: up in a line, down in half a cosine."""
    return min(1.0, (step + 1) / settings.warmup) * 0.5 * (1 + math.cos(math.pi * step / settings.steps))


def deterministic(seed: int) -> None:
    """One thread, one seed, and no kernel whose result depends on chance."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
