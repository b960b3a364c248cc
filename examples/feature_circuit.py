"""Top-k SAEs trained on the residual stream, then the circuit of their features on a prompt, exactly.

With NAME = "smollm2", LAYERS = (5, 12, 20), LATENTS, TOP, STEPS = 2048, 32, 600 it is the same study.
"""

import torch

import conewise as cw

NAME, LAYERS, LATENTS, TOP, STEPS = "tiny", (0, 1, 2), 256, 8, 300
torch.manual_seed(0)
model = cw.load(NAME)
texts = [pair["clean"] for pair in cw.tasks.ioi(model, n=48)]


class SAE(torch.nn.Module):
    """A sparse autoencoder that keeps the `TOP` strongest features of a value."""

    def __init__(self, width, mean):
        super().__init__()
        self.into = torch.nn.Parameter(torch.randn(width, LATENTS) / width**0.5)
        self.out = torch.nn.Parameter(self.into.detach().T / self.into.detach().norm(dim=0)[:, None])
        self.mean = torch.nn.Parameter(mean.clone())

    def encode(self, value):
        strength = (value - self.mean) @ self.into
        kept, at = strength.topk(TOP, dim=-1)
        return torch.zeros_like(strength).scatter(-1, at, kept.relu())

    def decode(self, features):
        return features @ self.out + self.mean


def trained(values):
    """An SAE of values [token, d]."""
    sae = SAE(values.shape[-1], values.mean(0))
    adam, scale = torch.optim.Adam(sae.parameters(), lr=2e-3), values.var()
    for _ in range(STEPS):
        some = values[torch.randint(len(values), (256,))]
        loss = (sae.decode(sae.encode(some)) - some).square().mean() / scale
        adam.zero_grad()
        loss.backward()
        adam.step()
    print(f"trained: {1 - float(loss.detach()):.0%} of the variance explained")
    return sae.requires_grad_(False)


runs = [model.run(text) for text in texts]
spliced = model
for layer in LAYERS:
    values = torch.cat([run["resid_post", layer][0, 1:] for run in runs])
    spliced = spliced.splice(("resid_post", layer), trained(values), name=f"layer{layer}")

pair = cw.tasks.ioi(model, n=1)[0]
metric = cw.logit_diff(pair["answers"][0], pair["wrong_answers"][0])
graph = spliced.feature_graph(pair["clean"], metric=metric, top=60).run()
print(graph)
for top in (len(graph.nodes), 60, 20):
    print(graph.prune(top=top).evaluate(ablation="mean"))
graph.prune(top=40).to_circuit_tracer("feature-circuit.json")
