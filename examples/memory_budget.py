"""A model that is big for its budget: plan first, then run in chunks that fit."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw

torch.manual_seed(0)
config = GPT2Config(
    n_layer=8, n_head=8, n_embd=128, vocab_size=4000, n_positions=128, bos_token_id=0, eos_token_id=0
)
module = GPT2LMHeadModel(config).eval()
clean, corrupted = torch.randint(0, 4000, (2, 2, 64)).unbind(0)

# Only the last position's logits exist in this capture.
model = cw.capture(module, input_ids=clean, logits_to_keep=1)
sweep = model.sweep(
    cw.sites("z", layer=":", head=":"),
    # Keep of each run only what patches of heads read.
    base=model.run(input_ids=corrupted, keep=["z"]),
    source=model.run(input_ids=clean, keep=["z"]),
    metric=cw.logit_diff(answer=7, wrong=9),
)

free = sweep.plan()
print(free)
for budget in ("64MiB", "16MiB", "8MiB"):
    plan = sweep.plan(max_memory=budget)
    worlds, peak = max(plan.chunks), plan.peak_bytes / 2**20
    print(f"within {budget:>6}: {len(plan.chunks):2} chunks of up to {worlds:2} worlds, {peak:.1f} MiB")

result = sweep.run(max_memory="16MiB")
assert result.plan.peak_bytes <= 16 << 20
assert result.ledger.node_evaluations == free.node_evaluations  # the same work, in smaller pieces
assert result.verify(n=4).ok
