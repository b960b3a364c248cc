"""The Karamata index of real networks: how their weight lies by depth, and the ratio of their sweeps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from conewise.anatomy.selectors import SelectorLike, sites
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.paper.expect import Weight
from conewise.paper.experiments.result import Number, Progress, Result, Row, experiment, silent, tracked
from conewise.paper.experiments.transformers import one_thread
from conewise.paper.theory.profiles import KaramataIndex, karamata_index, layered_ratio
from conewise.paper.theory.sweeps import effective_index, sweep_ratio
from conewise.program.foreign import quiet
from conewise.program.records import Program
from conewise.program.tensors import computing
from conewise.reactive.graph import Graph, Site
from conewise.report.folding import fold, group, node_flops
from conewise.runs.run import Run
from conewise.sweeps.sweep import Sweep

SEED = 0
LAYERS, POSITIONS, ROUNDS = 4, 12, 5
STACKS = {"t5": 2}
"""Architectures of two stacks have half as many layers in each."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The nodes of a network by layer, in the order of computation; and those before and after all layers."""

    before: tuple[Site, ...]
    inside: tuple[tuple[Site, ...], ...]
    after: tuple[Site, ...]

    def profile(self, weights: Mapping[Site, Weight]) -> list[Weight]:
        """Return the weight of each layer."""
        return [_sum(weights, layer) for layer in self.inside]


@dataclass(frozen=True, slots=True)
class Weighed:
    """A network in one unit: the index of its layers, the ratio of its sweep, and its predictions.

    `measured` is what the plan of the sweep counts, `predicted` the same from the graph alone, exactly;
    `by_index` what layers that vary with the index would have at this depth.
    """

    network: str
    unit: str
    sites: int
    profile: tuple[Weight, ...]
    index: KaramataIndex
    predicted: Number
    measured: Number
    by_index: Number

    def row(self) -> Row:
        """Return the index, the ratio that follows from it, and the ratio of the sweep."""
        q, effective = self.index.q, effective_index(self.measured)
        return Row(
            f"{self.network}, {self.unit}, index {q.value:.2f}: ρ by the index, ρ of its sweep",
            self.by_index,
            self.measured,
            exact=False,
            facts={
                "network": self.network,
                "weight": self.unit,
                "layers": len(self.profile),
                "sites": self.sites,
                "index": q.value,
                "index_low": q.low,
                "index_high": q.high,
                "orientation": self.index.orientation,
                "is_clear": self.index.is_clear,
                "limit": float(self.index.limit),
                "effective_index": float(effective[0]),
                "effective_orientation": effective[1],
            },
        )

    def exact_row(self) -> Row:
        """Return the ratio of the sweep from the graph alone, and as its plan counts it."""
        name, facts = f"{self.network}, {self.unit}", {"network": self.network, "weight": self.unit}
        return Row(f"{name}, ρ of its sweep", self.predicted, self.measured, detail=True, facts=facts)


@experiment("The index of real networks, and the ratio of their sweeps", "torch", "transformers")
def index(progress: Progress = silent, names: Sequence[str] = tuple(ARCHITECTURES)) -> Result:
    """Capture each architecture, weigh its layers in nodes, in FLOPs and in time, and plan its sweep.

    Beside the ratio of the sweep of heads and MLPs stands the one that follows from the index that fits the
    layers, at their depth.

    Claim (Theorem "aggregate sweep ratio"): The ratio of a sweep is a readout of where the weight of a
    network lies. Layers that are alike have index 0; what then moves the ratio away from 2 is depth, where in
    their layers the sites stand, and what stands before and after all layers.

    Compared: the ratio of each sweep in nodes, as its plan counts them, and in FLOPs, equals what the theory
    says of the graph, exactly. The index, what follows from it, and all times are reported.
    """
    with one_thread():
        found = [one for name in tracked(names, progress) for one in weigh(name)]
    exact = [one for one in found if one.unit != "time"]
    rows = [
        Row(
            f"of {len(names)} networks, those whose sweep has the ratio in {unit} that its graph says",
            len(names),
            sum(one.predicted == one.measured for one in exact if one.unit == unit),
        )
        for unit in ("nodes", "FLOPs")
    ]
    return Result(
        [*rows, *(one.row() for one in found), *(one.exact_row() for one in exact)],
        f"""
        Small models of the architectures of the coverage table, of {LAYERS} layers in all, with random
        weights, {POSITIONS} positions, one thread; and MobileNetV2, a convolutional one whose layers are not
        alike. Swept are all heads and MLP outputs, or the outputs of layers where there are no heads; all
        outputs are demanded.

        The index is fitted to the weights of the layers; its 95 % interval and its limit are in the JSON. The
        ratio by the index is that of layers which vary as the index says, at the network's depth, with what
        it has before and after its layers, and its sites where they stand. The two differ where a cone is not
        all that comes later: what a layer makes of positions (rotary embeddings, masks) or of parameters
        alone is in no cone of a site, which raises the ratio, in nodes more than in FLOPs; and a decoder
        reads its own input beside the encoder (T5).

        Time is the fastest of {ROUNDS} runs of each operation alone, summed over what is recomputed.
        """,
        SEED,
        series={
            "profiles": {
                name: {one.unit: one.profile for one in found if one.network == name} for name in names
            }
        },
    )


def weigh(name: str) -> list[Weighed]:
    """Weigh one architecture in nodes, FLOPs and seconds."""
    architecture = ARCHITECTURES[name]
    with quiet():
        module = architecture.make(STACKS.get(name, LAYERS), SEED)
        example = architecture.example(POSITIONS, SEED)
        model = Model(module, (), example)
        base = model.run(**example)
    graph, layers = model.graph, layers_of(model.program)
    sweep = model.sweep(_places(model, layers), base=base, source="zero", metric=_first)
    plan = sweep.plan(evaluator="serial")
    demand = sweep.targets()
    patched = [model.locate(place).node for cell in sweep.cells for place in cell.places]
    flops = node_flops(model, base)
    measured: dict[str, tuple[Mapping[Site, Weight], Number | None]] = {
        "nodes": (dict.fromkeys(graph.computed, 1), Fraction(plan.full_evaluations, plan.node_evaluations)),
        "FLOPs": (flops, _flops_ratio(sweep, base)),
        "time": (_seconds(graph, base), None),
    }
    found = []
    for unit, (weights, counted) in measured.items():
        ratio = sweep_ratio(graph, patched, demand=demand, weights=weights)
        profile = layers.profile(weights)
        index = karamata_index(profile)
        by_index = _by_index(graph, layers, weights, patched, index)
        own = ratio if counted is None else counted
        found.append(Weighed(name, unit, len(patched), tuple(profile), index, ratio, own, by_index))
    return found


def layers_of(program: Program) -> Layers:
    """Return the nodes of a program by layer: as it is drawn, or by its outermost numbered modules."""
    groups = group(program)
    keyed: list[tuple[object, Site]]
    if any(found.layer is not None for found in groups):
        keyed = [
            ((found.stack, found.layer) if found.layer is not None else None, name)
            for found in groups
            for name in found.nodes
        ]
    else:
        keyed = [(_numbered(record.modules), record.name) for record in program.records]
    computed = program.record_of.keys()
    keys = list(dict.fromkeys(key for key, _ in keyed if key is not None))
    before, after = [], []
    inside: list[list[Site]] = [[] for _ in keys]
    at = -1
    for key, name in keyed:
        if name not in computed:
            continue
        if key is not None:
            at = keys.index(key)
        if at < 0:
            before.append(name)
        elif key is None and at == len(keys) - 1:
            after.append(name)
        else:
            inside[at].append(name)
    return Layers(tuple(before), tuple(map(tuple, inside)), tuple(after))


def _numbered(modules: Sequence[Any]) -> object | None:
    """Return the outermost module whose name is a number."""
    return next((call for call in modules if call.path.rpartition(".")[2].isdigit()), None)


def _places(model: Model, layers: Layers) -> SelectorLike:
    """Return all heads and MLP outputs; where there are none, the last operation of each layer."""
    stacks = dict.fromkeys(site.stack for site in model.sites if site.kind == "z")
    if not stacks:
        return [layer[-1] for layer in layers.inside]
    total, *others = (
        sites("z", stack=stack, layer=":", head=":") + sites("mlp_out", stack=stack, layer=":")
        for stack in stacks
    )
    for more in others:
        total += more
    return total


def _first(outputs: Any) -> Any:
    """Read all outputs, as a metric; nothing is run, so it is never called."""
    raise NotImplementedError


def _flops_ratio(sweep: Sweep, base: Run) -> Fraction:
    """Return ρ in FLOPs: those of the nodes that the worlds of the plan compute."""
    folded = fold(sweep.model, sweep.cells, targets=sweep.targets(), base=base)
    spent = sum(often * sum(folded.cones[cone].flops) for cone, often in folded.runs)
    return Fraction(len(sweep.cells) * folded.full_flops, spent)


def _seconds(graph: Graph, base: Run) -> dict[Site, float]:
    """Return the fastest of some runs of each operation, on the values of the baseline."""
    spent: dict[Site, float] = {}
    with computing():
        for site in graph.computed:
            rule, values = graph.rule(site), base.demand(graph.inputs(site))
            times = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                rule(*values)
                times.append(time.perf_counter() - started)
            spent[site] = min(times)
    return spent


def _by_index(
    graph: Graph,
    layers: Layers,
    weights: Mapping[Site, Weight],
    patched: Sequence[Site],
    index: KaramataIndex,
) -> Number:
    """Return ρ of layers that vary as the index says, as heavy as these, with sites where they stand."""
    depth, heavy = len(layers.inside), layers.profile(weights)
    powers = [float(j) ** index.q.value for j in range(1, depth + 1)]
    if index.orientation == "input-heavy":
        powers.reverse()
    scale = float(sum(heavy)) / sum(powers)
    shares: list[list[float]] = [[] for _ in heavy]
    for site in patched:
        at = next(i for i, layer in enumerate(layers.inside) if site in layer)
        below = [node for node in graph.cone(site) if node in layers.inside[at]]
        shares[at].append(float(_sum(weights, below)) / float(heavy[at]))
    profile = [scale * power for power in powers]
    remainders = [
        [min(share, 1.0) * weight for share in here] for here, weight in zip(shares, profile, strict=True)
    ]
    first = float(_sum(weights, layers.before))
    if first > 0:
        # What stands before the layers is a layer without sites.
        profile, remainders = [first, *profile], [[], *remainders]
    return layered_ratio(profile, remainders, terminal=float(_sum(weights, layers.after)))


def _sum(weights: Mapping[Site, Weight], nodes: Sequence[Site]) -> Weight:
    return sum((weights[node] for node in nodes), start=0)
