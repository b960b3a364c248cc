"""Models on a CUDA device, pairs of prompts, and sweeps over all heads and MLPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import conewise as cw
from conewise.model import Model
from conewise.sweeps.result import Result
from conewise.sweeps.sweep import Sweep

hugging_face: Any = transformers
DEVICE = torch.device("cuda")
VOCABULARY = 500

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@dataclass(frozen=True)
class Pair:
    """Base and source, [prompt, position], and two tokens."""

    base: Tensor
    source: Tensor
    answer: int
    wrong: int

    @property
    def metric(self) -> Any:
        return cw.logit_diff(answer=self.answer, wrong=self.wrong)


def pair(seed: int, *, length: int = 12, prompts: int = 1) -> Pair:
    """Prompts and tokens that no other seed has."""
    random = torch.Generator().manual_seed(seed)
    base, source = torch.randint(0, VOCABULARY, (2, prompts, length), generator=random).to(DEVICE)
    answer, wrong = torch.randperm(VOCABULARY, generator=random)[:2].tolist()
    return Pair(base, source, answer, wrong)


def gpt2(*, layers: int = 3, heads: int = 4, width: int = 64) -> Any:
    config = hugging_face.GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        vocab_size=VOCABULARY,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return hugging_face.GPT2LMHeadModel(config).to(DEVICE).eval()


def llama(
    *, layers: int = 3, heads: int = 4, kv: int = 2, width: int = 64, dtype: torch.dtype = torch.float32
) -> Any:
    config = hugging_face.LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        hidden_size=width,
        intermediate_size=2 * width,
        vocab_size=VOCABULARY,
    )
    torch.manual_seed(0)
    return hugging_face.LlamaForCausalLM(config).to(device=DEVICE, dtype=dtype).eval()


class Scene:
    """A captured module, swept over all heads and MLPs."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.sites = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")

    @cached_property
    def model(self) -> Model:
        return cw.capture(self.module, input_ids=pair(0).base, logits_to_keep=1)

    def sweep(self, pair: Pair, *, metric: Any = None, precision: str | None = None) -> Sweep:
        """A sweep of a new pair, from its token ids."""
        return self.model.sweep(
            self.sites,
            base={"input_ids": pair.base},
            source={"input_ids": pair.source},
            metric=metric or pair.metric,
            precision=precision,
        )

    def values(self, pair: Pair, *, precision: str | None = None, **options: Any) -> Tensor:
        """The metric in every world, [cell, prompt]."""
        return numbers(self.sweep(pair, precision=precision).run(progress=False, **options))


def numbers(result: Result) -> Tensor:
    return result.per_prompt[0].double().cpu()


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest, as a share of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one word for each CUDA graph that is replayed from now on."""
    replays: list[str] = []
    replay: Callable[[Any], None] = torch.cuda.CUDAGraph.replay

    def noting(graph: Any) -> None:
        replays.append("replay")
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noting)
    return replays
