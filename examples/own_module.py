"""Any PyTorch module: here a small mixer without attention, swept by module and by neuron."""

import torch
from torch import Tensor, nn

import conewise as cw


class Mixer(nn.Module):
    """Layers that mix features, and positions, in turns."""

    def __init__(self, positions: int = 6, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.across = nn.ModuleList(nn.Linear(positions, positions) for _ in range(layers))
        self.within = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for across, within in zip(self.across, self.within, strict=True):
            x = x + across(x.transpose(1, 2)).transpose(1, 2)
            x = x + within(x)
        return self.head(x.mean(1))


torch.manual_seed(0)
module = Mixer().eval()
clean, corrupted = torch.randn(2, 5, 6, 4).unbind(0)

model = cw.capture(module, clean)
print(model)
print(model.verify())  # bit for bit what the module computes
assert model.verify()


def margin(out: Tensor) -> Tensor:
    return out[:, 0] - out[:, 1]


base, source = model.run(corrupted), model.run(clean)
modules = [f"{kind}.{layer}" for layer in range(3) for kind in ("across", "within")]
result = model.sweep(modules, base=base, source=source, metric=margin).run()
for name, share in zip(modules, result.normalised.tolist(), strict=True):
    print(f"{name:9} carries {share:+.2f} of the difference")
assert result.verify(n=6)

neurons = model.sweep(
    [cw.site("within.1.2", dim2=neuron) for neuron in range(32)], base=base, source="zero", metric=margin
).run()
cell, effect, _ = neurons.strongest(top=1)[0]
print(f"of {len(neurons.cells)} neurons, {cell.name} matters most: {effect:+.3f} without it")
