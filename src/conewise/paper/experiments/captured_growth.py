"""Growth of a captured network: blocks grafted by surgery into a language model while it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conewise.anatomy.selectors import sites as sites_of
from conewise.loading import load
from conewise.model import Model, capture
from conewise.paper.experiments.result import Row, rows_of
from conewise.paper.theory.grafts import GraftAt, interleaved_cost
from conewise.surgery.plan import measured
from conewise.surgery.surgery import Surgery

PLACES = (("resid_post", 2), ("resid_post", 0), ("mlp_out", 1))
"""Where blocks are grafted, one after each round: the first one behind the second."""
STEPS, BATCH, HALF = 40, 16, 6
SWEPT_EVERY = 20
"""Steps of training between two sweeps."""
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
    """Of each sweep over all heads and an MLP: as planned, and as the ledger counts them."""
    swept_at: list[int] = field(default_factory=list)
    effects: list[float] = field(default_factory=list)
    """The largest effect that each sweep found, beside the steps that went before it."""


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
        for step in range(steps):
            if step % SWEPT_EVERY == 0:
                optimizer.zero_grad(set_to_none=True)
                _sweep(found, model, inputs)
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


def _sweep(grown: Grown, model: Model, inputs: Any) -> None:
    """Put each head and each MLP of a layer to zero in the model as it is by now."""

    def loss(outputs: Any) -> Tensor:
        lines = inputs["input_ids"]
        logits = outputs.logits[:, HALF - 1 : -1].transpose(1, 2)
        found: Tensor = nn.functional.cross_entropy(logits, lines[:, HALF:], reduction="none").mean(1)
        return found

    sites: list[Any] = [sites_of("z", layer=":", head=":"), sites_of("mlp_out", layer=":")]
    result = model.sweep(sites, base=model.run(**inputs), source="zero", metric=loss).run()
    grown.evaluations.append((result.plan.node_evaluations, result.ledger.node_evaluations))
    grown.swept_at.append(len(grown.losses))
    grown.effects.append(float((result.table[0] - result.base[0]).abs().max()))


def rows(steps: int = STEPS) -> tuple[list[Row], dict[str, list[Any]]]:
    """Compare the costs of grafts into the captured model with the theory; and what its figure shows."""
    grown = grow(steps)
    found: list[Row] = []
    for number, (graft, (kind, layer)) in enumerate(zip(grown.grafts, PLACES, strict=True), start=1):
        at = f"captured, graft {number} of {len(PLACES)}, after {kind} of layer {layer}"
        found += rows_of(at, ("records recomputed for the logits", *graft), unit="nodes")
    planned, counted = (sum(counts) for counts in zip(*grown.evaluations, strict=True))
    other = sum(one != other for one, other in grown.evaluations)
    sweeps = f"captured, records evaluated by {len(grown.evaluations)} sweeps between the steps"
    found += [
        Row(sweeps, planned, counted, unit="nodes"),
        Row("captured, sweeps that evaluated another number", 0, other),
        Row("captured, grafts that changed the logits in a bit", 0, grown.changed),
        Row("captured, loss at the beginning", None, grown.losses[0], exact=False),
        Row("captured, loss in the end", None, grown.losses[-1], exact=False),
    ]
    grafted = [steps * number for number in range(1, len(PLACES) + 1)]
    return found, {
        "captured": grown.losses,
        "captured_at": grafted,
        "swept_at": grown.swept_at,
        "effects": grown.effects,
    }
