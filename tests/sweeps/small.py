"""A small language model and sweeps over it, for the tests of what is done with sweeps."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from conewise.model import Model
from conewise.sweeps.sweep import Sweep

LAYERS, HEADS, LENGTH, VOCABULARY = 2, 2, 6, 50


def module(seed: int = 0, layers: int = LAYERS) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=layers,
        n_head=HEADS,
        n_embd=16,
        vocab_size=VOCABULARY,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()  # type: ignore[no-untyped-call]


def prompts(seed: int, count: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def model(seed: int = 0, layers: int = LAYERS) -> Model:
    return cw.capture(module(seed, layers), input_ids=prompts(0, 2))


def sweep_over(
    captured: Model,
    sites: Any = None,
    *,
    base: Any = None,
    source: Any = None,
    metric: Any = None,
) -> Sweep:
    """Heads and MLPs, one batch of two prompts, unless something else is said."""
    found: Sweep = captured.sweep(
        cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":") if sites is None else sites,
        base=captured.run(input_ids=prompts(1, 2)) if base is None else base,
        source=captured.run(input_ids=prompts(2, 2)) if source is None else source,
        metric=cw.logit_diff(answer=7, wrong=9) if metric is None else metric,
    )
    return found


def slow_metric(outputs: Any) -> torch.Tensor:
    """One number for each prompt, after a while: a run of it can be cut off."""
    time.sleep(0.02)
    found: torch.Tensor = outputs.logits[:, -1, 7] - outputs.logits[:, -1, 9]
    return found
