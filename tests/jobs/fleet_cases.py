"""A small model with a sweep of several chunks, and functions that workers are sent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from conewise.model import Model
from conewise.sweeps.sweep import Sweep

LENGTH = 7


def small_model() -> Model:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_head=4, n_embd=32, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    kind: Any = GPT2LMHeadModel
    return cw.capture(kind(config).eval(), input_ids=ids(1))


def ids(seed: int, length: int = LENGTH, batch: int = 2) -> Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


METRIC = cw.logit_diff(answer=3, wrong=5)
HEADS = cw.sites("z", layer=":", head=":", pos=":")
BUDGET = 400_000
"""So little that a sweep has several chunks."""


def heads(model: Model, **other: Any) -> Sweep:
    asked: dict[str, Any] = {"base": model.run(input_ids=ids(1)), "source": model.run(input_ids=ids(2))}
    found: Sweep = model.sweep(HEADS, **{**asked, "metric": METRIC, **other})
    return found


def _taken(flag: Path) -> bool:
    """Remove the flag. True for the one process that did; workers may try at the same time."""
    try:
        flag.unlink()
    except FileNotFoundError:
        return False
    return True


def killing(flag: Path) -> Any:
    """A metric whose first reading by a worker kills that worker; the driver reads it unharmed."""
    driver = os.getpid()

    def metric(outputs: Any) -> Tensor:
        if os.getpid() != driver and _taken(flag):
            os.kill(os.getpid(), signal.SIGKILL)
        value: Tensor = outputs.logits[:, -1, 3]
        return value

    return cw.metric(metric, name="third", key="third")


def raising(where: Tensor) -> Any:
    """What is put in: half of what is there, but where that is `where`, an operation raises."""

    def half(present: Tensor) -> Tensor:
        if present.shape == where.shape and torch.equal(present, where):
            raise RuntimeError("no such kernel")
        return present / 2

    return half


def slow(outputs: Any) -> Tensor:
    """What `quick` reads, so slowly that a driver can be killed meanwhile."""
    time.sleep(0.3)
    return quick(outputs)


def quick(outputs: Any) -> Tensor:
    value: Tensor = outputs.logits[:, -1, 3]
    return value


def raising_while(flag: Path) -> Any:
    """A metric that raises on one batch, whose first prompt has the number in `flag`, while that exists."""

    def metric(outputs: Any) -> Tensor:
        value: Tensor = outputs.logits[:, -1, 3]
        if flag.exists() and abs(float(value.detach()[0]) - float(flag.read_text())) < 1e-4:
            raise RuntimeError("no such kernel")
        return value

    return cw.metric(metric, name="third", key="third")
