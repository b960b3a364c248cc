"""Operated models as modules of their own: equal bit for bit, stored, trained and exported."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import conewise as cw
from tests.surgery.networks import NETWORKS
from tests.surgery.sequences import drawn, plain
from tests.sweeps import small


def operated() -> Any:
    torch.manual_seed(1)
    return (
        cw.Surgery()
        .prune("transformer.h.1")
        .graft(("resid_post", 0), nn.Linear(16, 16))
        .graft(("resid_mid", 0), torch.tanh)
        .apply(small.model())
    )


def logits(module: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=ids).logits
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_a_module_is_the_operated_model_bit_for_bit(network: str) -> None:
    made, _ = drawn(network, 3).applied(plain(network))
    given = NETWORKS[network].example(5)
    with torch.no_grad():
        assert torch.equal(made.to_module()(**given).logits, made.run(**given).logits)


def test_it_is_stored_and_read_again() -> None:
    model, ids, file = operated(), small.prompts(1, 3), io.BytesIO()
    module = model.to_module()
    torch.save(module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(logits(again, ids), model.run(input_ids=ids).logits)
    assert again.state_dict().keys() == module.state_dict().keys()


def test_it_has_what_is_needed_alone() -> None:
    model = operated()
    paths = set(model.to_module().state_dict())
    assert not any(path.startswith("transformer.h.1.") for path in paths)
    assert {"graft.function.weight", "graft.function.bias", "transformer.h.0.mlp.c_fc.weight"} <= paths
    count = sum(one.numel() for one in model.to_module().parameters())
    assert count < sum(one.numel() for one in small.module().parameters())


def test_it_is_trained() -> None:
    ids = small.prompts(1, 4)
    module = operated().to_module()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        found = module(input_ids=ids).logits
        loss = nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


def test_it_is_exported_and_captured_again() -> None:
    model, ids = operated(), small.prompts(1, 3)
    module = model.to_module()
    exported = torch.export.export(module, (), {"input_ids": small.prompts(2, 2)})
    two = small.prompts(3, 2)
    assert torch.equal(logits(exported.module(), two), model.run(input_ids=two).logits)
    again = cw.capture(module, input_ids=small.prompts(0, 2))
    assert torch.equal(again.run(input_ids=ids).logits, model.run(input_ids=ids).logits)
