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
from conewise.theory.clocks.compiled import compiled_ceiling, compiled_ratio
from conewise.theory.clocks.regression import Estimate, Fit, least_squares
from conewise.theory.clocks.stacks import StackClock, calibrate_stacks
from conewise.theory.clocks.wallclock import Calibration, calibrate, wallclock_ceiling, wallclock_ratio
from conewise.theory.parts.edges import EdgeCost, ReaderAt, edge_cost, edge_count, edge_limit, stack_edge_cost
from conewise.theory.parts.positions import RowStack, position_limit
from conewise.theory.parts.rows import row_costs
from conewise.theory.profiles.karamata import KaramataIndex, karamata_index
from conewise.theory.profiles.layers import layered_ratio, layered_training_ratio, sites_limit
from conewise.theory.profiles.skips import (
    comparable_pairs,
    incomparable_pairs,
    skip_layers,
    skip_limits,
    skip_ratio,
    skip_training_ratio,
    training_from_forward,
)
from conewise.theory.profiles.transformers import (
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
from conewise.theory.reverse import ReverseCost, reverse_cost
from conewise.theory.sequences.changes import (
    ChangeAt,
    ChangedCost,
    best_change_order,
    change_extremes,
    changed_cost,
    disturbed,
)
from conewise.theory.sequences.grafts import (
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
from conewise.theory.sequences.greedy import (
    GreedyCost,
    Speculation,
    best_width,
    greedy_cost,
    speculation,
    speculation_bound,
    speculation_gain,
)
from conewise.theory.sequences.patches import (
    PatchedCost,
    PatchExtremes,
    best_patch_order,
    patch_extremes,
    patched_cost,
)
from conewise.theory.sequences.restoring import RestoredCost, restored_cost
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
from conewise.theory.wavefront import (
    StackPeak,
    branch_order,
    saturating_worlds,
    stack_launches,
    stack_peak,
)
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
    "GreedyCost",
    "InterleavedCost",
    "KaramataIndex",
    "OrderExtremes",
    "PatchExtremes",
    "PatchedCost",
    "ReaderAt",
    "RestoredCost",
    "ReverseCost",
    "RowStack",
    "Speculation",
    "StackClock",
    "StackPeak",
    "Touched",
    "batched_cost",
    "best_change_order",
    "best_order",
    "best_patch_order",
    "best_width",
    "blueprint",
    "branch_order",
    "calibrate",
    "calibrate_stacks",
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
    "greedy_cost",
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
    "position_limit",
    "restored_cost",
    "reverse_cost",
    "row_costs",
    "saturating_worlds",
    "sites_limit",
    "skip_layers",
    "skip_limits",
    "skip_ratio",
    "skip_training_ratio",
    "speculation",
    "speculation_bound",
    "speculation_gain",
    "stack_edge_cost",
    "stack_launches",
    "stack_peak",
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
