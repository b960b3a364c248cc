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
    rows: list[Row] = []
    exact: list[Row] = []
    profiles: dict[str, dict[str, Any]] = {name: {} for name in names}
    with one_thread():
        for name in tracked(names, progress):
            for row, ratio, profile in weigh(name):
                rows.append(row)
                exact += [ratio] if ratio is not None else []
                profiles[name][row.facts["weight"]] = profile
    agreeing = [
        Row(
            f"of {len(names)} networks, those whose sweep has the ratio in {unit} that its graph says",
            len(names),
            sum(row.predicted == row.measured for row in exact if row.facts["weight"] == unit),
        )
        for unit in ("nodes", "FLOPs")
    ]
    return Result(
        [*agreeing, *rows, *exact],
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
        series={"profiles": profiles},
    )


def weigh(name: str) -> list[tuple[Row, Row | None, list[Weight]]]:
    """Weigh one architecture in nodes, FLOPs and seconds.

    For each: the index, the ratio that follows from it and that of the sweep; the latter from the graph alone
    and as its plan counts it, but for seconds; and the weights of the layers.
    """
    architecture = ARCHITECTURES[name]
    with quiet():
        module = architecture.make(STACKS.get(name, LAYERS), SEED)
        example = architecture.example(POSITIONS, SEED)
        model = Model(module, (), example)
        base = model.run(**example)
    graph, layers = model.graph, layers_of(model.program)
    sweep = model.sweep(_places(model, layers), base=base, source="zero", metric=_first)
    plan, demand = sweep.plan(evaluator="serial"), sweep.targets()
    patched = [model.locate(place).node for cell in sweep.cells for place in cell.places]
    folded = fold(model, sweep.cells, targets=demand, base=base)
    flops = sum(often * sum(folded.cones[cone].flops) for cone, often in folded.runs)
    measured: dict[str, tuple[Mapping[Site, Weight], Number | None]] = {
        "nodes": (dict.fromkeys(graph.computed, 1), Fraction(plan.full_evaluations, plan.node_evaluations)),
        "FLOPs": (node_flops(model, base), Fraction(len(sweep.cells) * folded.full_flops, flops)),
        "time": (_seconds(graph, base), None),
    }
    found: list[tuple[Row, Row | None, list[Weight]]] = []
    for unit, (weights, counted) in measured.items():
        predicted = sweep_ratio(graph, patched, demand=demand, weights=weights)
        profile = [_sum(weights, layer) for layer in layers.inside]
        fitted, ratio = karamata_index(profile), predicted if counted is None else counted
        effective = effective_index(ratio)
        facts: dict[str, Any] = {"network": name, "weight": unit}
        row = Row(
            f"{name}, {unit}, index {fitted.q.value:.2f}: ρ by the index, ρ of its sweep",
            _by_index(graph, layers, weights, profile, patched, fitted),
            ratio,
            exact=False,
            facts={
                **facts,
                "layers": len(profile),
                "sites": len(patched),
                "index": fitted.q.value,
                "index_low": fitted.q.low,
                "index_high": fitted.q.high,
                "orientation": fitted.orientation,
                "is_clear": fitted.is_clear,
                "limit": float(fitted.limit),
                "effective_index": float(effective[0]),
                "effective_orientation": effective[1],
            },
        )
        exact = Row(f"{name}, {unit}, ρ of its sweep", predicted, ratio, detail=True, facts=facts)
        found.append((row, None if counted is None else exact, profile))
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
        keyed = [
            (
                next((call for call in record.modules if call.path.rpartition(".")[2].isdigit()), None),
                record.name,
            )
            for record in program.records
        ]
    keys = list(dict.fromkeys(key for key, _ in keyed if key is not None))
    before, after = [], []
    inside: list[list[Site]] = [[] for _ in keys]
    at = -1
    for key, name in keyed:
        if name not in program.record_of:
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
    heavy: Sequence[Weight],
    patched: Sequence[Site],
    index: KaramataIndex,
) -> Number:
    """Return ρ of layers that vary as the index says, as heavy as these, with sites where they stand."""
    powers = [float(j) ** index.q.value for j in range(1, len(heavy) + 1)]
    if index.orientation == "input-heavy":
        powers.reverse()
    scale = float(sum(heavy)) / sum(powers)
    profile = [scale * power for power in powers]
    remainders: list[list[float]] = [[] for _ in heavy]
    for site in patched:
        at = next(i for i, layer in enumerate(layers.inside) if site in layer)
        below = [node for node in graph.cone(site) if node in layers.inside[at]]
        share = float(_sum(weights, below)) / float(heavy[at])
        remainders[at].append(min(share, 1.0) * profile[at])
    first = float(_sum(weights, layers.before))
    if first > 0:
        # What stands before the layers is a layer without sites.
        profile, remainders = [first, *profile], [[], *remainders]
    return layered_ratio(profile, remainders, terminal=float(_sum(weights, layers.after)))


def _sum(weights: Mapping[Site, Weight], nodes: Sequence[Site]) -> Weight:
    return sum((weights[node] for node in nodes), start=0)
