"""What it must cost: closed forms over graphs, never reading the engine.

    from conewise import theory

`docs/theory.md` states each theorem, with its proof and the function here that computes it.
"""

from conewise.theory.backward import (
    dense_joint_ratio,
    joint_cost,
    joint_ratio,
    training_cone,
    training_cost,
    training_ratio,
)
from conewise.theory.changes import (
    ChangeAt,
    ChangedCost,
    best_change_order,
    change_extremes,
    changed_cost,
    disturbed,
)
from conewise.theory.compiled import compiled_ceiling, compiled_ratio
from conewise.theory.edges import EdgeCost, ReaderAt, edge_cost, edge_count, edge_limit, stack_edge_cost
from conewise.theory.grafts import (
    GraftAt,
    InterleavedCost,
    OrderExtremes,
    batched_cost,
    best_order,
    interleaved_cost,
    isolated_cost,
    order_extremes,
    overcount,
)
from conewise.theory.karamata import KaramataIndex, karamata_index
from conewise.theory.layers import layered_ratio, layered_training_ratio, sites_limit
from conewise.theory.patches import (
    PatchedCost,
    PatchExtremes,
    best_patch_order,
    patch_extremes,
    patched_cost,
)
from conewise.theory.regression import Estimate, Fit, least_squares
from conewise.theory.restoring import RestoredCost, restored_cost
from conewise.theory.skips import (
    comparable_pairs,
    incomparable_pairs,
    skip_layers,
    skip_limits,
    skip_ratio,
    skip_training_ratio,
    training_from_forward,
)
from conewise.theory.sweeps import (
    downstream_fractions,
    effective_index,
    full_cost,
    limit_ratio,
    mean_fraction,
    stale,
    sweep_cost,
    sweep_costs,
    sweep_ratio,
)
from conewise.theory.transformers import (
    Blueprint,
    blueprint,
    encoder_cone,
    encoder_nodes,
    encoder_ratio,
    gpt2_cone,
    gpt2_nodes,
    gpt2_ratio,
    transformer_cone,
    transformer_nodes,
    transformer_ratio,
)
from conewise.theory.wallclock import Calibration, calibrate, wallclock_ceiling, wallclock_ratio
from conewise.theory.waves import Touched, demand_size, wave_size

__all__ = [
    "Blueprint",
    "Calibration",
    "ChangeAt",
    "ChangedCost",
    "EdgeCost",
    "Estimate",
    "Fit",
    "GraftAt",
    "InterleavedCost",
    "KaramataIndex",
    "OrderExtremes",
    "PatchExtremes",
    "PatchedCost",
    "ReaderAt",
    "RestoredCost",
    "Touched",
    "batched_cost",
    "best_change_order",
    "best_order",
    "best_patch_order",
    "blueprint",
    "calibrate",
    "change_extremes",
    "changed_cost",
    "comparable_pairs",
    "compiled_ceiling",
    "compiled_ratio",
    "demand_size",
    "dense_joint_ratio",
    "disturbed",
    "downstream_fractions",
    "edge_cost",
    "edge_count",
    "edge_limit",
    "effective_index",
    "encoder_cone",
    "encoder_nodes",
    "encoder_ratio",
    "full_cost",
    "gpt2_cone",
    "gpt2_nodes",
    "gpt2_ratio",
    "incomparable_pairs",
    "interleaved_cost",
    "isolated_cost",
    "joint_cost",
    "joint_ratio",
    "karamata_index",
    "layered_ratio",
    "layered_training_ratio",
    "least_squares",
    "limit_ratio",
    "mean_fraction",
    "order_extremes",
    "overcount",
    "patch_extremes",
    "patched_cost",
    "restored_cost",
    "sites_limit",
    "skip_layers",
    "skip_limits",
    "skip_ratio",
    "skip_training_ratio",
    "stack_edge_cost",
    "stale",
    "sweep_cost",
    "sweep_costs",
    "sweep_ratio",
    "training_cone",
    "training_cost",
    "training_from_forward",
    "training_ratio",
    "transformer_cone",
    "transformer_nodes",
    "transformer_ratio",
    "wallclock_ceiling",
    "wallclock_ratio",
    "wave_size",
]
