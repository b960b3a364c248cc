"""A small language model that grows while it is trained, and is swept between the steps.

It learns to write the first half of a line once more. After each round a block that changes nothing yet is
grafted in by surgery: the logits stay as they are, bit for bit, and the operated model is trained on.
"""

import plotly.graph_objects as go
import torch
from torch import nn

import conewise as cw

STEPS, HALF, TOKENS = 25, 6, range(4, 40)
PLACES = [("resid_post", 2), ("resid_post", 0), ("mlp_out", 1)]


class Block(nn.Module):
    """x + f(x), where f begins as zero."""

    def __init__(self, width, inner=16):
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(torch.tanh(self.down(x)))


def lines(count):
    half = torch.randint(TOKENS.start, TOKENS.stop, (count, HALF))
    return torch.cat([half, half], dim=1)


def losses(outputs, ids):
    logits = outputs.logits[:, HALF - 1 : -1].transpose(1, 2)
    return nn.functional.cross_entropy(logits, ids[:, HALF:], reduction="none").mean(1)


torch.manual_seed(0)
module = cw.load("tiny").module  # its shape; the weights are drawn anew
for parameter in module.parameters():
    if parameter.ndim > 1:
        nn.init.normal_(parameter, std=0.05)
model, held_out = cw.capture(module, input_ids=lines(2)), lines(8)
curve, grafts, sweeps = [], [], []

for place in (*PLACES, None):
    trained = model.to_module()
    optimizer = torch.optim.Adam(trained.parameters(), lr=3e-3)
    for _ in range(STEPS):
        ids = lines(16)
        loss = losses(trained(input_ids=ids), ids).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(float(loss.detach()))
    optimizer.zero_grad(set_to_none=True)

    # What the model has learned to use: every head and MLP put to zero, one world each.
    base = model.run(input_ids=held_out)
    result = model.sweep(
        [cw.sites("z", layer=":", head=":"), cw.sites("mlp_out", layer=":")],
        base=base,
        source="zero",
        metric=lambda outputs: losses(outputs, held_out),
    ).run()
    assert result.ledger.node_evaluations == result.plan.node_evaluations
    effect = float((result.table[0] - result.base[0]).abs().max())
    sweeps.append((len(curve), effect))
    count = result.plan.node_evaluations
    print(f"step {len(curve):3}: loss {curve[-1]:.3f}; largest effect {effect:.3f}, by {count} evaluations")

    if place is not None:
        surgery = cw.Surgery().graft(place, Block(module.config.hidden_size))
        (cost,) = surgery.plan(model).steps
        grown = surgery.apply(model)
        assert torch.equal(grown.run(input_ids=held_out).logits, base.logits)
        print(f"  graft after {place}: {cost.fresh} new operations, {cost.recomputed} to compute")
        grafts.append(len(curve))
        model = grown

assert curve[-1] < curve[0] / 4
assert model.verify(n=2).ok

figure = go.Figure(go.Scatter(y=curve, name="loss"))  # figure.show() opens it in a browser
figure.add_scatter(
    x=[at for at, _ in sweeps], y=[size for _, size in sweeps], mode="markers", name="largest effect"
)
for at in grafts:
    figure.add_vline(x=at - 0.5, line_dash="dot", annotation_text="graft")
