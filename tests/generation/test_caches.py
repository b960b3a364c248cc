"""Caches of other kinds: windows and states of recurrent layers are told apart by rows, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import CaptureError, PatchError
from tests.generation.alone import (
    DEPTH,
    GROUPED,
    HEADS,
    TOKENS,
    WIDTH,
    captured,
    hugging_face,
    padded,
    prompts,
    written_alone,
)

N, LENGTHS, SCALES = 6, (4, 7), (-6.0, 6.0)
HYBRID = {**GROUPED, "num_hidden_layers": 4, "eos_token_id": None}
LINEAR = {f"linear_{part}": 2 for part in ("num_key_heads", "num_value_heads")}
LINEAR |= {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
RECURRENT: dict[str, dict[str, Any]] = {
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Qwen3Next": {"head_dim": 8, "moe_intermediate_size": 32, **EXPERTS, **LINEAR},
}
WINDOWS = {"GptOss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}}


def vector() -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))


def made(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(hugging_face, f"{name}Config")(**settings)
    module = getattr(hugging_face, f"{name}ForCausalLM")(config).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of states that a capture leaves as they were, and of rounding
        return cw.capture(module, input_ids=torch.tensor([[1, 5, 6, 7, 9, 11], [1, 4, 3, 9, 8, 8]]))


@pytest.mark.parametrize("name", [*RECURRENT, *WINDOWS])
def test_worlds_of_other_caches_write_what_they_write_alone(name: str) -> None:
    model, rows = made(name, {**HYBRID, **RECURRENT.get(name, {}), **WINDOWS.get(name, {})}), prompts(LENGTHS)
    layers = [0, 2] if name in WINDOWS else list(model.sites.layers("resid_post"))
    places = [f"model.layers.{layer}" for layer in layers]
    sites = places if name in WINDOWS else [cw.site("resid_post", layer=layer) for layer in layers]
    cells = [cw.cell(site, source=cw.add(vector(), scale)) for site in sites for scale in SCALES]
    texts = model.sweep(cells, base=padded(rows), generate=N).run(verify=2)
    assert texts.verification.ok
    for world in range(len(cells) + 1):
        place, scale = divmod(world - 1, len(SCALES))
        change = lambda value, at=scale: value + SCALES[at] * vector()  # noqa: E731
        hooks = [(places[place], "output", change)] if world else []
        own = [token for token in texts.ids[world, world % 2].tolist() if token >= 0]
        assert own == written_alone(model.module, rows[world % 2], N, hooks, 0)


def test_models_that_have_no_rows_to_share_are_refused_by_name() -> None:
    state = {**TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 2}
    small = {"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1, "expand": 2}
    mamba = made("Mamba2", {**state, **small})
    with pytest.raises((CaptureError, PatchError), match=r"Mamba2ForCausalLM writes with|has no positions"):
        mamba.sweep(["backbone.layers.0"], base=padded(prompts(LENGTHS)), source="zero", generate=N).run()
    own = {"lru_width": WIDTH, "head_dim": 8, "attention_window_size": 8}
    gemma = made("RecurrentGemma", {**HYBRID, **own})
    job = gemma.sweep(
        [cw.site("resid_post", layer=2)], base=padded(prompts(LENGTHS)), source="zero", generate=N
    )
    with pytest.raises(
        CaptureError, match="RecurrentGemmaForCausalLM keeps something of each text in its own"
    ):
        job.run()
    assert gemma.run(input_ids=prompts([6])[0][None]).logits.shape[-1] == 97  # nothing was left on the module
    torch.manual_seed(0)
    config = hugging_face.OpenAIGPTConfig(n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=64, **TOKENS)
    gpt = cw.capture(hugging_face.OpenAIGPTLMHeadModel(config).eval(), input_ids=torch.tensor([[1, 5, 6, 7]]))
    with pytest.raises(CaptureError, match="OpenAIGPTLMHeadModel writes without a cache"):
        gpt.sweep(["transformer.h.0"], base=padded(prompts(LENGTHS)), source="zero", generate=N)


def test_workers_write_the_same_and_a_run_goes_on_with_them(tmp_path: Any) -> None:
    job = captured("Llama").sweep(
        cw.sites("resid_post", layer=":"),
        base=padded(prompts(LENGTHS)),
        source=cw.add(vector(), scale=list(SCALES)),
        generate=N,
    )
    whole, memory = job.run(), job.plan().peak_bytes // 2
    assert len(job.plan(memory).chunks) > 1
    by_workers = job.run(workers=2, max_memory=memory, out=tmp_path / "run")
    assert by_workers.equals(whole)
    again = job.run(out=tmp_path / "run", resume=True)
    assert again.equals(whole)
    assert again.ledger.launches == 0
    assert again.ledger.resumed == DEPTH * len(SCALES) + 1
