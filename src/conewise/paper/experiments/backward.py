"""The reverse pass of real models: networks with long skips, of parallel towers, and transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor, nn

from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES, Architecture
from conewise.paper.experiments.result import (
    Number,
    Progress,
    Result,
    Row,
    experiment,
    rows_of,
    silent,
    tracked,
)
from conewise.paper.theory.backward import (
    ReverseCost,
    dense_joint_ratio,
    reverse_cost,
    sites_with_gradients,
    training_ratio,
)
from conewise.program.foreign import quiet
from conewise.program.tensors import computing
from conewise.reactive.gradients import gradients
from conewise.reactive.graph import Graph
from conewise.reactive.world import World
from conewise.runs.backward_cost import METRIC, reverse_graph
from conewise.runs.metric_words import as_metric

WIDTH: Final = 4


class UNet(nn.Module):
    """Down by three levels and up again; each level up reads the one down beside it."""

    def __init__(self, levels: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), nn.SiLU())
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, stride=2), nn.SiLU()) for _ in range(levels)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2) for _ in range(levels))
        self.join = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1), nn.SiLU()) for _ in range(levels)
        )
        self.last = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return an image of the same size."""
        found: Tensor = self.first(image)
        kept = []
        for down in self.down:
            kept.append(found)
            found = down(found)
        for up, join, beside in zip(self.up, self.join, reversed(kept), strict=True):
            found = join(torch.cat([up(found), beside], 1))
        return self.last(found)  # type: ignore[no-any-return]


class DenseNet(nn.Module):
    """Layers that read all layers before them."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(size), nn.SiLU(), nn.Conv2d(size, WIDTH, 3, padding=1))
            for size in range(WIDTH, WIDTH * (layers + 1), WIDTH)
        )
        self.last = nn.Linear(WIDTH * (layers + 1), 5)

    def forward(self, image: Tensor) -> Tensor:
        """Return five logits."""
        found: Tensor = self.first(image)
        for layer in self.layers:
            found = torch.cat([found, layer(found)], 1)
        return self.last(found.mean((2, 3)))  # type: ignore[no-any-return]


class Towers(nn.Module):
    """Towers side by side, whose outputs are added up: nothing in one reads another."""

    def __init__(self, towers: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())))
            for _ in range(towers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what the towers make of x."""
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


# -- How much of the reverse pass a patch makes stale, by architecture ----------------------------

SEED, POSITIONS, LAYERS, SITES = 0, 6, 3, 8
MEASURED = {"GPT-2 small": 2}
"""The number of sites whose passes are run, where that is not all of them."""

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Network:
    """A captured network under one loss: its graph, the swept sites, and those of the gradients."""

    name: str
    loss: str
    graph: Graph
    sites: tuple[str, ...]
    wrt: tuple[str, ...]

    @property
    def title(self) -> str:
        """The network's name and its loss."""
        return f"{self.name}, {self.loss}"


@dataclass(frozen=True, slots=True)
class Counted:
    """Nodes that the engine computed, by its ledger, and gradients that changed, of all sites that were run.

    `uncounted` changed although they were not computed again.
    """

    forward: int
    backward: int
    stale_forward: int
    stale_backward: int
    changed: int
    uncounted: int


@experiment("The reverse pass of real models", "torch", "transformers")
def backward(progress: Progress = silent, names: Sequence[str] | None = None) -> Result:
    """Capture each network, count its passes from the graph, and run them with each site patched.

    Every gradient is stale that reaches the loss through an operation which is not linear and reads something
    changed. σ is the share of a reverse pass that weighs b times the forward pass.

    Claim: A patch makes nearly every gradient of a real network stale, long skips or none; of branches that
    meet in a sum, its own. Full passes over the sweep are then (1 + b)/(1/ρ + b·σ).

    Compared: nodes of both passes and those that patches make stale, by the ledger of a graph that holds the
    gradients as torch computes them, equal the count from the forward graph exactly; no gradient changes that
    is not counted.
    """
    rows: list[Row] = []
    series: dict[str, list[Any]] = {}
    for name in tracked(tuple(MAKERS) if names is None else tuple(names), progress):
        for network in networks(name):
            cost = reverse_cost(network.graph, network.sites, METRIC, network.wrt)
            rows += _rows(network, cost)
            weight = Fraction(cost.backward, cost.forward)
            for key, value in {
                "network": network.title,
                "forward": float(cost.forward_ratio),
                "joint": float(cost.ratio),
                "paper": float(training_ratio(network.graph, network.sites, METRIC)),
                "share": float(cost.share),
                "dense": float(dense_joint_ratio(cost.forward_ratio, weight)),
            }.items():
                series.setdefault(key, []).append(value)
    return Result(
        rows,
        f"""
        A node of the reverse pass is what flows along one edge, or the sum where several meet. It reads what
        torch saves for it, and is computed from that, all else being NaN. Gradients are by every parameter,
        but for GPT-2 small, where they are by the swept sites.

        Squared: the mean square of all outputs. Linear: their mean. Swept are outputs of attention and of
        MLPs, or values after activations. The paper's ratio counts ancestors, the site and descendants.

        GPT-2 small has 12 layers and its own widths, random weights, {POSITIONS} positions; its passes are
        run for {MEASURED["GPT-2 small"]} of its sites.
        """,
        SEED,
        series=series,
    )


def networks(name: str) -> list[Network]:
    """Capture a network under each loss."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module, args, kwargs = MAKERS[name]()
        module.eval()
        model = Model(module, args, kwargs)
        base = model.run(*args, **kwargs)
    found = []
    for loss, metric in LOSSES.items():
        both = reverse_graph(base._tape(), as_metric(metric), base.inputs)
        behind = sites_with_gradients(both.graph, METRIC)
        sites = tuple(site for site in _swept(model) if site in behind)
        wrt = sites if name in MEASURED else tuple(one for one in both.parameters if one in behind)
        found.append(Network(name, loss, both.graph, sites, wrt))
    return found


def _swept(model: Model) -> list[str]:
    """Return outputs of attention and MLPs; of other networks, some of the values after activations."""
    found = [
        model.locate((site.kind, site.layer)).node
        for site in model.sites
        if site.kind in {"z", "mlp_out"} and site.layer is not None
    ]
    if found:
        return found
    active = [record.name for record in model.program.records if record.op in {"silu", "tanh"}]
    return active[:: max(1, len(active) // SITES)]


def counted(network: Network, sites: Sequence[str]) -> Counted:
    """Run both passes, then again with each site patched: by a fork, and by a world that computes all."""
    graph = network.graph
    forward = set(graph.sites)
    grads = gradients(graph, METRIC, network.wrt)
    demand = (METRIC, *grads.values())
    backward = [site for site in grads.sites if site != grads.seed]
    totals = [0, 0, 0, 0]

    def ahead(sites: Collection[str]) -> int:
        return sum(one in forward for one in sites)

    try:
        with computing(), World(graph) as base:
            base.demand(demand)
            full = base.ledger.recomputed
            before = dict(zip(backward, base.demand(backward), strict=True))
            for site in sites:
                value = base.demand(site).flip(-1) * 1.25 + 0.125
                with base.fork() as fork, World(graph) as fresh:
                    fork.patch(site, value)
                    with fork.ledger.interval() as ledger:
                        fork.demand(demand)
                    again = set(ledger.recomputed)
                    fresh.patch(site, value)
                    after = dict(zip(backward, fresh.demand(backward), strict=True))
                changed = {one for one in backward if not _equal(before[one], after[one])}
                found = (ahead(again), len(again) - ahead(again), len(changed), len(changed - again))
                totals = [total + count for total, count in zip(totals, found, strict=True)]
    finally:
        grads.remove()
    return Counted(ahead(full), len(full) - ahead(full), *totals)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_equal, one, other))
    return bool(one is other if one is None else torch.equal(one, other))


def _rows(network: Network, cost: ReverseCost) -> list[Row]:
    at, facts = network.title, {"network": network.name, "loss": network.loss, "sites": len(network.sites)}
    some = network.sites[:: max(1, len(network.sites) // MEASURED.get(network.name, len(network.sites)))]
    mine = cost if some == network.sites else reverse_cost(network.graph, some, METRIC, network.wrt)
    found = counted(network, some)
    spent = found.stale_forward + found.stale_backward
    weight = Fraction(cost.backward, cost.forward)
    passes = dense_joint_ratio(mine.forward_ratio, weight, stale=mine.share)
    full = Fraction(len(some) * (found.forward + found.backward), spent)
    shares = {"share": float(mine.share), "forward": float(mine.forward_ratio)}
    changing = 100 * found.changed / found.stale_backward if found.stale_backward else 0.0
    paper = training_ratio(network.graph, network.sites, METRIC)
    share = ("of the counted gradients, those that change, in per cent", None, changing)
    exact: list[tuple[str, Number | None, Number]] = [
        ("nodes of the forward pass", cost.forward, found.forward),
        ("nodes of the reverse pass", cost.backward, found.backward),
        (f"forward nodes that {len(some)} patches make stale", sum(mine.stale_forward), found.stale_forward),
        ("reverse nodes that they make stale", sum(mine.stale_backward), found.stale_backward),
    ]
    return [
        *rows_of(at, *exact, facts=facts),
        *rows_of(at, ("full passes over the sweep", passes, full), facts=facts | shares),
        *rows_of(at, ("gradients that change and are not counted", 0, found.uncounted), facts=facts),
        *rows_of(at, share, exact=False, facts=facts),
        *rows_of(at, ("the paper's ratio, by its count", paper, _walked(network)), facts=facts),
    ]


def _walked(network: Network) -> Fraction:
    """Return the paper's ratio by walks over the graph: ancestors, the site and descendants; no sources."""
    graph = network.graph
    wanted = {METRIC, *graph.upstream(METRIC)}
    computed = set(graph.computed) & wanted
    touched = sum(len(computed & {site, *graph.upstream(site), *graph.cone(site)}) for site in network.sites)
    return Fraction(len(network.sites) * len(computed), touched)


def _image(module: Callable[[], nn.Module]) -> Callable[[], Made]:
    return lambda: (module(), (torch.randn(1, 1, 16, 16),), {})


def _gpt2() -> Made:
    architecture = ARCHITECTURES["gpt2"]
    return architecture.make(LAYERS, SEED), (), architecture.example(POSITIONS, SEED)


def _gpt2_small() -> Made:
    module = Architecture("GPT2Config", "GPT2LMHeadModel", ("n_layer",)).make(12, SEED)
    return module, (), {"input_ids": torch.randint(0, 50257, (1, POSITIONS))}


MAKERS: Mapping[str, Callable[[], Made]] = {
    "U-Net": _image(UNet),
    "DenseNet": _image(DenseNet),
    "transformer": _gpt2,
    "GPT-2 small": _gpt2_small,
    "four towers": lambda: (Towers(), (torch.randn(1, 8),), {}),
}
LOSSES: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "squared": lambda outputs: getattr(outputs, "logits", outputs).square().mean(),
    "linear": lambda outputs: getattr(outputs, "logits", outputs).mean(),
}
