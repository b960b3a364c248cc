"""E5: under backpropagation the advantage of a sweep collapses, by the paper's count.

Claim (Corollary "training-mode locality collapse"): counting V⁻ ∪ {s} ∪ V⁺ for each site, ρ_train tends
to 1, at a rate that does not depend on the cost profile; where, as here, each site is comparable with every
other layer. Beside it stands the exact count, on a graph
that holds its gradients as nodes.
"""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np

from conewise.paper import ops
from conewise.paper.experiments.e4 import PROFILES, Layered, branched, profile_weights
from conewise.paper.experiments.result import (
    Progress,
    Result,
    Row,
    patch_cost,
    patch_wave,
    silent,
    versions,
    warm,
)
from conewise.paper.theory.backward import joint_ratio, training_ratio
from conewise.reactive.gradients import gradients

INDICES = (0.0, 0.5, 1.0, 2.0)
DEPTHS = (10, 20, 40, 80, 160)
TOTAL = 4000

JOINT_DEPTHS = (5, 10, 20, 40, 80)
JOINT_TOTAL = 400

PAPER = {10: "1.0526", 20: "1.0256", 40: "1.0126", 80: "1.0062", 160: "1.0031"}


def run(progress: Progress = silent, depths: tuple[int, ...] = DEPTHS) -> Result:
    """Every index, profile and depth: descendants from the ledger, ancestors by a walk of the graph."""
    started = time.perf_counter()
    cases = [(q, profile, L) for profile in PROFILES for q in INDICES for L in depths]
    work, done, rows = sum(L for *_, L in cases) + sum(JOINT_DEPTHS), 0, []
    for q, profile, L in cases:
        weights = profile_weights(L, q, profile, TOTAL)
        layered = branched(weights)
        full, descendants, ancestors = _count(layered)
        rows.append(
            Row(
                name=f"ρ_train, {profile}, q = {q:g}, L = {L}",
                paper=PAPER[L],
                predicted=training_ratio([2 * w - 1 for w in weights], local=weights, terminal=1),
                measured=Fraction(L * full, descendants + ancestors + L),
                facts={
                    "count": "paper",
                    "q": q,
                    "profile": profile,
                    "L": L,
                    "nodes": full,
                    "forward_ratio": L * full / descendants,
                },
            )
        )
        done += L
        progress(done, work)
    for L in JOINT_DEPTHS:
        rows.append(joint_row(L))
        done += L
        progress(done, work)
    return Result(
        name="e5",
        title="Training-mode collapse",
        claim=(
            "Counting ancestors, site and descendants, as the paper does for a sweep under "
            "backpropagation, ρ_train tends to 1 whatever the cost profile, where each site is comparable "
            "with every other layer."
        ),
        rows=rows,
        compared=(
            "ρ_train counted on the graph equals the closed form, as fractions, and the paper in every "
            "printed digit; the exact ratios on joint graphs equal the theory's"
        ),
        notes=(
            (
                "Descendants are the nodes that the engine invalidated and recomputed after a patch of the "
                "site; ancestors are found by a reverse walk over the graph's inputs (graph.upstream), "
                "sources not counted. In graphs deeper than 40 layers every fourth patch was demanded, and "
                "of the others the invalidated nodes were counted."
            ),
            (
                "The paper's count is of ancestors, the site and descendants. The ancestors are where the "
                "gradient depends on the Jacobian at the site. The gradients that change are others: the "
                "rows of the joint graph count those exactly."
            ),
        ),
        seconds=time.perf_counter() - started,
        versions=versions(),
    )


def _count(layered: Layered) -> tuple[int, int, int]:
    """The nodes of a full run; the sums over all sites of descendants and of computed ancestors.

    Every site is patched. Up to 40 layers each patch is demanded too, in deeper graphs every fourth.
    """
    graph, descendants, ancestors = layered.graph, 0, 0
    base = warm(graph, layered.output)
    step = 1 if len(layered.sites) <= 40 else 4
    for number, site in enumerate(layered.sites):
        if number % step == 0:
            cost = patch_cost(base, site, 2.0, layered.output)
            assert cost.invalidated == cost.recomputed, "an output that all leads to demands all"
            descendants += cost.recomputed
        else:
            descendants += patch_wave(base, site, 2.0)
        ancestors += sum(not graph.is_source(above) for above in graph.upstream(site))
    return base.ledger.count("recomputed"), descendants, ancestors


def joint_row(layers: int) -> Row:
    """A sweep that reads the loss and the gradient at the input, on a graph that holds both passes.

    Gradients are nodes like any other, so the engine's ledger counts what really has to be
    computed again: what is below a site in the forward pass, and every gradient that reads a changed value.
    """
    weights = profile_weights(layers, 0.0, "output-heavy", JOINT_TOTAL)
    layered = branched(weights, unary=ops.tanh, fold=ops.add, x=np.float64(0.5))
    graph = layered.graph
    graph.source("target", np.float64(1.0))
    loss = graph.node("loss", ops.mse, [layered.output, "target"])
    forward = len(graph.computed)
    demand = (loss, gradients(graph, loss, "x")["x"])
    base = warm(graph, demand)
    costs = [patch_cost(base, site, np.float64(0.25), demand) for site in layered.sites]
    full = base.ledger.count("recomputed")
    return Row(
        name=f"exact ρ of forward and backward pass, L = {layers}",
        paper=None,
        predicted=joint_ratio(graph, layered.sites, demand),
        measured=Fraction(layers * full, sum(cost.recomputed for cost in costs)),
        facts={
            "count": "exact",
            "q": 0.0,
            "profile": "uniform",
            "L": layers,
            "nodes": full,
            "forward_nodes": forward,
        },
    )
