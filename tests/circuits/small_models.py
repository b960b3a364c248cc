"""Small models of four architectures, captured once for all tests of a process, each with its oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

import conewise as cw
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES, VOCABULARY
from conewise.runs.run import Run
from tests.circuits.removed_oracle import KINDS, Plain

LENGTH = 6


@dataclass(frozen=True)
class Small:
    """A captured model in float64, the oracle of its module, two prompts, two others to take parts from."""

    model: Model
    plain: Plain
    ids: Tensor
    other: Tensor

    @property
    def base(self) -> Run:
        return self.model.run(input_ids=self.ids)

    @property
    def source(self) -> Run:
        return self.model.run(input_ids=self.other)


@cache
def small(name: str, layers: int = 2, heads: int = 2, width: int = 16) -> Small:
    found = ARCHITECTURES[name]
    settings = dict(found.settings)
    sizes = {"n_head": heads, "num_attention_heads": heads, "n_embd": width, "hidden_size": width}
    settings |= {key: value for key, value in sizes.items() if key in settings}
    settings |= {key: 64 for key in ("sliding_window",) if key in settings}
    if "num_key_value_heads" in settings:
        settings |= {"num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 8}
    module = replace(found, settings=settings).make(layers).double()
    with torch.no_grad():
        for parameter in module.parameters():  # larger than initial weights are: edges do something
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    generator = torch.Generator().manual_seed(0)
    ids, other = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator)
    return Small(cw.capture(module, input_ids=ids), KINDS[name](module), ids, other)
