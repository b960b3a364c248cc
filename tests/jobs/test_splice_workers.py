"""Models with dictionaries by real workers: each splices in what it was sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from tests.runs.test_dictionary import written
from tests.sweeps import small

pytestmark = pytest.mark.ray

METRIC = cw.logit_diff(answer=7, wrong=9)


def test_dictionaries_travel_like_the_models_own_weights(fleet: Any, tmp_path: Path) -> None:
    first = cw.dictionary(written(tmp_path, "jumprelu", hook_name="blocks.0.hook_resid_post"))
    about = {"hook_name": "transformer.h.0.ln_2", "hook_name_out": "blocks.0.hook_mlp_out"}
    coder = cw.dictionary(written(tmp_path, "skip_transcoder", metadata=about))
    model = small.model()
    model = model.splice(first.place, first).splice(coder.place, coder, name="tc")
    base = model.run(input_ids=small.prompts(1, 2))
    latents = cw.sites("sae.latents", latent=model.active("sae", base, top=6))
    asked: dict[str, Any] = {"base": base, "source": "zero", "metric": METRIC}
    sweep = model.sweep(latents + "tc.latents" + "sae.error", **asked)
    local = sweep.run()
    found = sweep.run(workers=fleet, verify=3)
    assert float((local.table - local.base[:, None]).abs().max()) > 0
    assert torch.equal(found.per_prompt, local.per_prompt)
    assert found.verification is not None
    assert found.verification.ok
    approx = model.attribute(latents, **asked).run(workers=fleet)
    assert torch.equal(approx.per_prompt, model.attribute(latents, **asked).run().per_prompt)
    with torch.no_grad():
        first.W_enc.mul_(1.5)  # the model has this very tensor
    base = model.run(input_ids=small.prompts(1, 2))
    sweep = model.sweep("sae.latents", **{**asked, "base": base})
    assert torch.equal(sweep.run(workers=fleet).per_prompt, sweep.run().per_prompt)


def test_functions_travel_with_what_they_hold(fleet: Any) -> None:
    torch.manual_seed(0)
    up, down = torch.randn(16, 24), torch.randn(24, 16)

    def encode(value: Tensor) -> Tensor:
        return (value @ up).relu()

    model = small.model().splice(("mlp_out", 0), encode=encode, decode=lambda latents: latents @ down)
    sweep = model.sweep(
        cw.sites("sae.latents", latent=":"),
        base={"input_ids": small.prompts(1, 2)},
        source="zero",
        metric=METRIC,
    )
    assert torch.equal(sweep.run(workers=fleet).per_prompt, sweep.run().per_prompt)
