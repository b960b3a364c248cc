"""Every architecture of transformers that can be captured: its named sites are what its source says."""

from __future__ import annotations

import pytest
import torch

from tests.anatomy.named import check
from tests.anatomy.named_architectures import NAMED

FAST = ("cohere", "falcon_h1", "lfm2", "xlm")
"""Those that others are not like. `make test-architectures` goes through all of them."""


def check_architecture(name: str) -> None:
    case = NAMED[name]
    module = case.make()
    torch.manual_seed(1)
    table = check(module, case.inputs(2, 12), case.layers, norms_values=name == "gemma3n")
    assert len(table.model_layers) == len(case.layers), "a layer that nothing is written about"


@pytest.mark.parametrize("name", FAST)
def test_the_names_of_an_architecture_are_what_its_source_says(name: str) -> None:
    check_architecture(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # recurrent states that a module keeps
@pytest.mark.parametrize("name", [name for name in NAMED if name not in FAST])
def test_the_names_of_any_architecture_are_what_its_source_says(name: str) -> None:
    check_architecture(name)
