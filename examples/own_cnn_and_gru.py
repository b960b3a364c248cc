"""Networks without attention: the channels of a CNN and the steps of a GRU, knocked out one by one."""

import torch
from torch import Tensor, nn

import conewise as cw


class Cnn(nn.Module):
    """Two convolutions over images of 8 × 8, and a linear layer on the means of their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.head = nn.Linear(12, 4)

    def forward(self, images: Tensor) -> Tensor:
        channels: Tensor = self.second(self.first(images).relu()).relu()
        scores: Tensor = self.head(channels.mean((2, 3)))
        return scores


class Reader(nn.Module):
    """A GRU over six tokens, written out step by step, so that every state is a site."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(20, 10), nn.GRUCell(10, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        state = torch.zeros(tokens.shape[0], 16)
        for step in range(6):
            state = self.cell(self.embed(tokens[:, step]), state)
        scores: Tensor = self.head(state)
        return scores


def margin(out: Tensor) -> Tensor:
    return out[:, 0] - out[:, 1]


torch.manual_seed(0)
images, tokens = torch.randn(5, 3, 8, 8), torch.randint(0, 20, (5, 6))

cnn = cw.capture(Cnn().eval(), images)
kernels = cw.sites("first", dim1=":")
channels = cnn.sweep(kernels, base={"images": images}, source="zero", metric=margin).run()
cell, effect, _ = channels.strongest(top=1)[0]
print(f"of {len(channels.cells)} channels, {cell.name} matters most: {effect:+.3f} without it")
assert channels.verify(n=8)

gru = cw.capture(Reader().eval(), tokens)
others = tokens.clone()
others[:, 2] = (tokens[:, 2] + 7) % 20  # the third token is another one
states = [f"cell#{step}" for step in range(6)]  # one module, called six times
base, source = gru.run(tokens), gru.run(others)
carried = gru.sweep(states, base=base, source=source, metric=margin).run()
units = gru.sweep(cw.sites("cell#3", dim1=":"), base=base, source=source, metric=margin).run()
for name, share in zip(states, carried.normalised.tolist(), strict=True):
    print(f"{name:7} carries {abs(share):.2f} of the difference")
print(f"the unit of cell#3 that carries most: {units.strongest(top=1)[0][0].name}")
assert carried.verify(n=6)
assert units.verify(n=16)

figure = units.plot()  # figure.show() opens it in a browser
