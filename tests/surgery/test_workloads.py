"""Every workload of the library on an operated model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import conewise as cw
from conewise.errors import EdgeError, UnhookedWarning
from conewise.model import Model
from tests.sweeps import small

METRIC = cw.logit_diff(answer=7, wrong=9)


@cache
def operated() -> Model:
    torch.manual_seed(3)
    return (
        cw.Surgery()
        .prune(cw.site("z", layer=1, head=1))
        .graft(("mlp_out", 0), nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)), name="adapter")
        .redefine("transformer.h.1.mlp.act", torch.relu)
        .apply(small.model())
    )


@cache
def runs() -> tuple[Any, Any]:
    base, source = (operated().run(input_ids=small.prompts(seed, 2)) for seed in (1, 2))
    return base, source


def test_edges_are_patched_and_checked() -> None:
    base, source = runs()
    result = operated().sweep(operated().edges(), base=base, source=source, metric=METRIC).run()
    assert result.ledger.node_evaluations == result.plan.node_evaluations
    with pytest.warns(
        UnhookedWarning, match="no module shows their sites"
    ):  # queries, keys and values are one
        checked = result.verify(n=10)
    assert checked.ok


def test_a_circuit_is_found_and_evaluated() -> None:
    base, source = runs()
    circuit = operated().find_circuit(base=base, source=source, metric=METRIC, threshold=1e-4).run()
    assert 0 < len(circuit.edges) < len(operated().edges())


def test_effects_are_estimated_with_gradients() -> None:
    base, source = runs()
    sites: list[Any] = [cw.sites("z", layer=":", head=":"), "adapter.output"]
    estimate = operated().attribute(sites, base=base, source=source, metric=METRIC).run()
    exact = operated().sweep(sites, base=base, source=source, metric=METRIC).run()
    assert torch.corrcoef(torch.stack([estimate.table[0], exact.table[0] - exact.base[0]]))[0, 1] > 0.8


def test_the_stream_is_read_and_taken_apart() -> None:
    base, _ = runs()
    lens = base.lens()
    norm, head = operated().module.transformer.ln_f, operated().module.lm_head
    with torch.no_grad():
        expected = head(norm(base["resid_post", 0]))
    assert lens.rows == ("input", "0", "1")
    assert torch.equal(lens.top[1, :, :, 0], expected.argmax(-1))
    assert base.decompose("layer")  # it checks that the parts add up


def test_it_writes_as_the_operated_module_does() -> None:
    prompt = small.prompts(1)
    written = operated().generate(prompt, 4)
    module: Any = operated().module
    expected = module.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(written.ids, expected)


def test_a_dictionary_is_spliced_into_it() -> None:
    wide = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    made = operated().splice(
        ("resid_post", 0), encode=lambda x: (x @ wide).relu(), decode=lambda z: z @ wide.T / 20
    )
    base, source = (made.run(input_ids=small.prompts(seed, 2)) for seed in (1, 2))
    assert torch.equal(base.logits, runs()[0].logits)
    assert (
        made.sweep(cw.sites("sae.latents", latent=[1, 2, 3]), base=base, source=source, metric=METRIC)
        .run()
        .verify(3)
        .ok
    )


def test_it_is_stored_resumed_and_reported(tmp_path: Path) -> None:
    base, source = runs()
    job = operated().sweep(cw.sites("z", layer=":", head=":"), base=base, source=source, metric=METRIC)
    first = job.run(out=tmp_path / "stored")
    again = job.run(out=tmp_path / "stored", resume=True)
    assert again.equals(first)
    first.save(tmp_path / "saved")
    assert cw.open(tmp_path / "saved").equals(first)
    first.report(tmp_path / "page.html")
    assert "with pruned, adapter, act" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_workers_make_the_same_surgery() -> None:
    base, source = runs()
    job = operated().sweep(cw.sites("z", layer=":", head=":"), base=base, source=source, metric=METRIC)
    assert torch.equal(job.run(workers=2).values, job.run().values)


def test_a_graft_in_the_stream_has_no_edges_and_says_so() -> None:
    made = cw.Surgery().graft(("resid_post", 0), torch.tanh).apply(small.model())
    with pytest.raises(EdgeError):
        made.edges()
