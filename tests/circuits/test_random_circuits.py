"""216 random circuits of six architectures, two lengths, three ablations, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.circuits.circuit import Circuit
from conewise.text.prompts import Pair, TokenizedPrompts
from tests.circuits import small_models
from tests.circuits.removed_oracle import KINDS, Llama, Plain
from tests.circuits.small_models import Small, small

ARCHITECTURES = ("gpt2", "llama", "gpt_neox", "gemma2", "qwen2", "mistral")
CIRCUITS = 12
ANSWER, WRONG = 3, 5
LENGTHS = (6, 4)
ROUNDING = {"gpt2": 1e-9}
"""The others compute norms, or rotary tables, in float32 whatever the model's dtype is."""


@cache
def model_of(name: str) -> Small:
    kinds: dict[str, type[Plain]] = {**KINDS, "qwen2": Llama, "mistral": Llama}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_models, "KINDS", kinds)
        return small(name)


def prompts() -> TokenizedPrompts:
    """Two prompts of six tokens and two of four, in turn; the second half of each is the corrupted one."""
    generator = torch.Generator().manual_seed(7)
    clean, corrupted = (
        tuple(
            tuple(torch.randint(0, 11, (LENGTHS[number % 2],), generator=generator).tolist())
            for number in range(4)
        )
        for _ in range(2)
    )
    pairs = tuple(Pair("", "", ("",), (" ",)) for _ in clean)
    answers, wrong = ((ANSWER,),) * 4, ((WRONG,),) * 4
    return TokenizedPrompts(pairs, clean, corrupted, answers, wrong, ((1, 3), (0, 2)))


def removed_parts(given: Small, ablation: str, asked: TokenizedPrompts) -> list[Mapping[str, Tensor]]:
    """For each group what removed edges carry, by writer."""
    runs = [
        {
            run: given.plain.forward(asked.inputs_of(group, run)["input_ids"])[1]
            for run in ("clean", "corrupted")
        }
        for group in range(2)
    ]
    if ablation == "resample":
        return [one["corrupted"] for one in runs]
    names = runs[0]["clean"]
    if ablation == "zero":
        return [{name: torch.zeros_like(one["clean"][name]) for name in names} for one in runs]
    mean = {name: torch.cat([one["clean"][name].flatten(0, 1) for one in runs]).mean(0) for name in names}
    return [{name: mean[name].expand_as(one["clean"][name]) for name in names} for one in runs]


@pytest.mark.parametrize("ablation", ["resample", "zero", "mean"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_circuits_are_those_of_the_oracle(name: str, ablation: str) -> None:
    given, asked = model_of(name), prompts()
    edges = given.plain.edges()
    rng = np.random.default_rng(sum(map(ord, name + ablation)))
    circuits = [
        {edge for edge in edges if rng.random() < share} for share in rng.uniform(0.05, 0.95, CIRCUITS)
    ]
    source = None if ablation == "resample" else ablation
    found = cw.evaluate(
        [Circuit.made(given.model, [f"{writer}->{reader}" for writer, reader in kept]) for kept in circuits],
        prompts=asked,
        source=source,
    )
    apart = ROUNDING.get(name, 2e-6)
    ablated = removed_parts(given, ablation, asked)
    for kept, evaluation in zip(circuits, found, strict=True):
        for what, removed in (("circuit", set(edges) - kept), ("complement", kept)):
            wanted = np.zeros(4)
            for group, numbers in enumerate(asked.groups):
                ids = asked.inputs_of(group, "clean")["input_ids"]
                logits = given.plain.forward(ids, removed, ablated[group])[0][:, -1]
                wanted[list(numbers)] = (logits[:, ANSWER] - logits[:, WRONG]).numpy()
            assert evaluation.per_prompt[what] == pytest.approx(wanted, rel=apart, abs=apart)
