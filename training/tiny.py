"""Train the tiny model: `python -m training.tiny --out DIR`.

Everything is drawn from one seed and computed by one thread, so that the same versions on the same kind of
machine give the same weights, bit for bit. The split into training and held-out prompts never changes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from conewise.program.foreign import quiet
from training.card import write_card
from training.held_out import default_prompts, rows
from training.language import BOS, EOS, PAD, UNK, Prompt, Teller, training_split
from training.words import NUMBERS, encode, tokenizer

MAX_LENGTH = 64


@dataclass(frozen=True)
class Settings:
    """What a training run depends on, beside the language and the versions of its libraries."""

    steps: int = 1600
    seed: int = 0
    batch: int = 64
    # Muon, which finds the heads that work together several times sooner than AdamW, trains the matrices;
    # AdamW the embeddings and norms.
    matrix_rate: float = 6e-3
    other_rate: float = 6e-3
    warmup: int = 100
    weight_decay: float = 0.1
    # Names that can be told are few among the words: they count for more.
    answer_weight: float = 10.0
    # So often a word is read as unknown, so that `<unk>` stands for "some word" and not for noise.
    unknown: float = 0.01


def new_module() -> Any:
    """The model before training: four layers of four heads, its weights drawn from torch's generator."""
    config = transformers.LlamaConfig(
        vocab_size=len(NUMBERS),
        hidden_size=64,
        intermediate_size=16,
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
    """Whole texts: what is read, what is to be predicted at each place, and how much that counts."""

    read: Tensor
    predicted: Tensor
    weights: Tensor


def batch_of(prompts: Sequence[Prompt], settings: Settings, seed: int) -> Batch:
    """Prompts with their answers, padded on the right. `seed` draws the words that are read as unknown."""
    rows, weights = [], []
    for prompt in prompts:
        asked = encode(prompt.text)
        row = [*asked, NUMBERS[prompt.answer], NUMBERS["."], NUMBERS[EOS]]
        counted = [1.0] * (len(row) - 1)
        # What stands at place n of the words is predicted from place n of the row, which begins with <bos>.
        for place in (*prompt.earlier, len(asked) - 1):
            counted[place] = settings.answer_weight
        rows.append(row)
        weights.append(counted)
    length = max(map(len, rows))
    whole = torch.tensor([row + [NUMBERS[PAD]] * (length - len(row)) for row in rows])
    unknown = torch.rand(whole.shape, generator=torch.Generator().manual_seed(seed)) < settings.unknown
    unknown[:, 0] = False
    return Batch(
        whole.masked_fill(unknown, NUMBERS[UNK])[:, :-1],
        whole[:, 1:],
        torch.tensor([row + [0.0] * (length - 1 - len(row)) for row in weights]),
    )


def train(module: Any, settings: Settings, say: Callable[[str], None] = print) -> None:
    """Train `module` in place, on prompts of the training split alone."""
    teller = Teller(training_split(), settings.seed)
    optimizers = optimizers_of(module, settings)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, settings))
        for optimizer in optimizers
    ]
    module.train()
    for step in range(1, settings.steps + 1):
        prompts = [teller.any() for _ in range(settings.batch)]
        loss = loss_of(module, batch_of(prompts, settings, seed=settings.seed * settings.steps + step))
        module.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 250 == 0 or step == settings.steps:
            say(f"step {step} of {settings.steps}: loss {loss.item():.4f}")
    module.eval()


def loss_of(module: Any, batch: Batch) -> Tensor:
    """The weighted mean of the cross-entropies of all words."""
    logits = module(input_ids=batch.read).logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch.predicted.flatten(), reduction="none")
    return (losses * batch.weights.flatten()).sum() / batch.weights.sum()


def optimizers_of(module: Any, settings: Settings) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else."""
    matrices = [p for p in module.model.layers.parameters() if p.ndim == 2]
    of_layers = {id(p) for p in matrices}
    others = [p for p in module.parameters() if id(p) not in of_layers]
    decay = settings.weight_decay
    return (
        torch.optim.Muon(
            matrices, lr=settings.matrix_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.98), weight_decay=decay),
    )


def rate(step: int, settings: Settings) -> float:
    """The learning rate at a step, as a share of the largest: up in a line, down in half a cosine."""
    return min(1.0, (step + 1) / settings.warmup) * 0.5 * (1 + math.cos(math.pi * step / settings.steps))


def trained(settings: Settings, say: Callable[[str], None] = print) -> Any:
    """A new model, trained: one thread, one seed, no kernel whose result depends on chance."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            module = new_module()
        train(module, settings, say)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
    return module


def write(module: Any, folder: Path) -> None:
    """Write the model, its tokenizer and its prompts as a Hugging Face folder."""
    with quiet():
        module.save_pretrained(folder)
        tokenizer(MAX_LENGTH).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    text = json.dumps(rows(default_prompts()), indent=2)
    (folder / "prompts.json").write_text(f"{text}\n", encoding="utf-8")


def main() -> None:
    """Train, write the model, measure it, and write its card."""
    parser = argparse.ArgumentParser(prog="python -m training.tiny", description="Train the tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    given = parser.parse_args()
    settings = Settings(steps=given.steps, seed=given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    begun = time.process_time()
    module = trained(settings)
    seconds = time.process_time() - begun
    write(module, given.out)
    write_card(given.out, settings, seconds)


if __name__ == "__main__":
    main()
