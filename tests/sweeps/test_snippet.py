"""The first thing that people write with a model, as it stands in the documentation."""

from __future__ import annotations

import pytest

SNIPPET = """
import torch, conewise as cw
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
hf = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=64, vocab_size=500, n_positions=64)).eval()
clean, corrupted = torch.randint(0, 500, (2, 1, 12)).unbind(0)

model = cw.capture(hf, input_ids=clean)
run = model.run(input_ids=corrupted)
assert torch.equal(run.logits, hf(input_ids=corrupted, use_cache=False).logits)

source = model.run(input_ids=clean)
assert source["z", 2].shape == (1, 12, 4, 16)
assert torch.equal(source["z", 2], source["blocks.2.attn.hook_z"])

with run.fork() as world:
    world.patch(cw.site("z", layer=2, head=1), source)
    patched = world.logits
assert not torch.equal(patched, run.logits)
print(model.sites)          # a table

mlp = cw.capture(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), torch.randn(3, 8))
"""  # noqa: E501


def test_the_snippet_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SNIPPET, "snippet", "exec"), {})
    printed = capsys.readouterr().out
    assert "z           0-3     4      [batch, pos, head=4, d_head=16]" in printed
