"""E5: under backpropagation the advantage of a sweep collapses, by the paper's count.

Claim (Corollary "training-mode locality collapse"): counting V⁻ ∪ {s} ∪ V⁺ for each site, ρ_train tends
to 1, at a rate that does not depend on the cost profile. Beside it stands the exact count, on a graph
that holds its gradients as nodes.
"""

from __future__ import annotations

import time
from fractions import Fraction

from conewise.experiments.layered import PROFILES, Layered, branched, profile_weights
from conewise.experiments.measure import patch_cost, warm
from conewise.experiments.result import Progress, Result, Row, silent, versions
from conewise.theory.backward import training_ratio

INDICES = (0.0, 0.5, 1.0, 2.0)
DEPTHS = (10, 20, 40, 80, 160)
TOTAL = 4000

PAPER = {10: "1.0526", 20: "1.0256", 40: "1.0126", 80: "1.0062", 160: "1.0031"}


def run(progress: Progress = silent, depths: tuple[int, ...] = DEPTHS) -> Result:
    """Every index, profile and depth: descendants from the ledger, ancestors by a walk of the graph."""
    started = time.perf_counter()
    cases = [(q, profile, L) for profile in PROFILES for q in INDICES for L in depths]
    work, done, rows = sum(L for *_, L in cases), 0, []
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
    return Result(
        name="e5",
        title="Training-mode collapse",
        claim=(
            "Counting ancestors, site and descendants, as the paper does for a sweep under "
            "backpropagation, ρ_train tends to 1 whatever the cost profile."
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
                "sources not counted."
            ),
            (
                "The paper's count is of nodes whose gradient depends on the Jacobian at the site. The "
                "gradients that change are others: the rows of the joint graph count those exactly."
            ),
        ),
        seconds=time.perf_counter() - started,
        versions=versions(),
    )


def _count(layered: Layered) -> tuple[int, int, int]:
    """The nodes of a full run; the sums over all sites of descendants and of computed ancestors."""
    graph, descendants, ancestors = layered.graph, 0, 0
    base = warm(graph, layered.output)
    sources = set(graph.sources)
    for site in layered.sites:
        cost = patch_cost(base, site, 2.0, layered.output)
        assert cost.invalidated == cost.recomputed, "an output that all depends on demands all"
        descendants += cost.recomputed
        ancestors += len(set(graph.upstream(site)) - sources)
    return base.ledger.count("recomputed"), descendants, ancestors
