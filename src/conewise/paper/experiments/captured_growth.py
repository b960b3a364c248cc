"""Growth of a captured network: blocks grafted by surgery into a language model while it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conewise.loading import load
from conewise.model import Model, capture
from conewise.paper.experiments.result import Row, rows_of
from conewise.paper.theory.grafts import GraftAt, interleaved_cost
from conewise.surgery.plan import measured
from conewise.surgery.surgery import Surgery

PLACES = (("resid_post", 2), ("resid_post", 0), ("mlp_out", 1))
"""Where blocks are grafted, one after each round: the first one behind the second."""
STEPS, BATCH, HALF = 40, 16, 6
SEED = 7


class Bottleneck(nn.Module):
    """A block x + f(x), whose last weights are zero."""

    def __init__(self, width: int, inner: int = 16) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x and what is added to it."""
        added: Tensor = self.up(torch.tanh(self.down(x)))
        return x + added


@dataclass
class Grown:
    """A training with grafts: losses of every step, and for each graft the costs, predicted and measured."""

    losses: list[float] = field(default_factory=list)
    grafts: list[tuple[int, int]] = field(default_factory=list)
    changed: int = 0
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    """Of the sweep over all heads after each graft: as planned, and as the ledger counts them."""


def grow(steps: int = STEPS) -> Grown:
    """Train the tiny model's shape, from random weights, to write the first half of a line once more."""
    found, drawn = Grown(), torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    module = load("tiny").module
    width, vocabulary = module.config.hidden_size, min(40, module.config.vocab_size)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
    model = capture(module, input_ids=_lines(drawn, vocabulary, 2))
    start, programs = model, [model.program]
    inputs = model.signature.bind((), {"input_ids": _lines(drawn, vocabulary, 2)})
    blocks = [Bottleneck(width) for _ in PLACES]
    for place, block in zip((*PLACES, None), (*blocks, None), strict=True):
        trained = model.to_module()
        optimizer = torch.optim.Adam(trained.parameters(), lr=3e-3)
        for _ in range(steps):
            lines = _lines(drawn, vocabulary, BATCH)
            logits = trained(input_ids=lines).logits
            loss = nn.functional.cross_entropy(
                logits[:, HALF - 1 : -1].flatten(0, 1), lines[:, HALF:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.losses.append(float(loss.detach()))
        optimizer.zero_grad(set_to_none=True)
        if place is None or block is None:
            return found
        before = model.run(**inputs).logits
        model = Surgery().graft(place, block).apply(model)
        programs.append(model.program)
        found.changed += not torch.equal(model.run(**inputs).logits, before)
        found.evaluations.append(_swept(model, inputs))
        grafts = [
            GraftAt(start.locate(one).node, len(after.record_of.keys() - earlier.record_of.keys()))
            for one, earlier, after in zip(PLACES, programs, programs[1:], strict=False)
        ]
        predicted = interleaved_cost(start.graph, grafts).costs[-1]
        found.grafts.append((int(predicted), measured(programs, inputs)[0][-1]))
    return found


def _lines(drawn: torch.Generator, vocabulary: int, count: int) -> Tensor:
    half = torch.randint(4, vocabulary, (count, HALF), generator=drawn)
    return torch.cat([half, half], dim=1)


def _swept(model: Model, inputs: Any) -> tuple[int, int]:
    def loss(outputs: Any) -> Tensor:
        found: Tensor = outputs.logits[:, -1].logsumexp(-1)
        return found

    base = model.run(**inputs)
    result = model.sweep(
        [(kind, 1) for kind in ("z", "mlp_out")], base=base, source="zero", metric=loss
    ).run()
    return result.plan.node_evaluations, result.ledger.node_evaluations


def rows(steps: int = STEPS) -> list[Row]:
    """Compare the costs of grafts into the captured model with the theory."""
    grown = grow(steps)
    found: list[Row] = []
    for number, (graft, swept) in enumerate(zip(grown.grafts, grown.evaluations, strict=True), start=1):
        kind, layer = PLACES[number - 1]
        found += rows_of(
            f"captured, graft {number} of {len(PLACES)}, after {kind} of layer {layer}",
            ("records recomputed for the logits", *graft),
            ("records evaluated by a sweep behind it", *swept),
            unit="nodes",
        )
    found += [
        Row("captured, grafts that changed the logits in a bit", 0, grown.changed),
        Row("captured, loss at the beginning", None, grown.losses[0], exact=False),
        Row("captured, loss in the end", None, grown.losses[-1], exact=False),
    ]
    return found
