"""Conewise: take a trained network apart, and pay only for what each change touches.

    import conewise as cw

The public face of the library. What stands here is imported when it is first used: the command line is there
at once, and torch only where it is wanted.
"""

from conewise.version import __version__ as __version__

# No more is imported, not even `typing`: whoever presses Ctrl-C at once meets the command, and no traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from conewise.anatomy.places import Place, site
    from conewise.anatomy.selectors import cell, cells, pairs, sites
    from conewise.attributing.approximation import compare
    from conewise.circuits.circuit import Circuit
    from conewise.circuits.circuit import evaluate_together as evaluate
    from conewise.errors import CaptureError, ConewiseError
    from conewise.generation.sweep import writing
    from conewise.graph_sweep import sweep
    from conewise.jobs.pool import Processes
    from conewise.jobs.ray_workers import Ray
    from conewise.loading import load
    from conewise.model import Model, capture
    from conewise.opening import open  # noqa: A004
    from conewise.paper import ops
    from conewise.reactive.demand import Plan
    from conewise.reactive.gradients import gradients
    from conewise.reactive.graph import Block, Graft, Graph, Node, block, chain
    from conewise.reactive.ledger import Ledger
    from conewise.reactive.world import Event, World
    from conewise.runs.dictionaries import dictionary
    from conewise.runs.interventions import add, intervention, masked, mean, noise, resample
    from conewise.runs.learned import (
        boundless,
        learned_mask,
        low_rank,
        multiply,
        project_out,
        rotation,
        subspace,
    )
    from conewise.runs.metric_words import (
        cross_entropy,
        kl_to,
        log_prob,
        logit,
        logit_diff,
        metric,
        prob,
        prob_diff,
        read,
    )
    from conewise.runs.run import Run
    from conewise.surgery.surgery import Surgery
    from conewise.sweeps.planning.plan import SweepPlan
    from conewise.sweeps.result import Result
    from conewise.sweeps.sweep import Sweep
    from conewise.text import tasks

__all__ = [
    "Block",
    "CaptureError",
    "Circuit",
    "ConewiseError",
    "Event",
    "Graft",
    "Graph",
    "Ledger",
    "Model",
    "Node",
    "Place",
    "Plan",
    "Processes",
    "Ray",
    "Result",
    "Run",
    "Surgery",
    "Sweep",
    "SweepPlan",
    "World",
    "add",
    "block",
    "boundless",
    "capture",
    "cell",
    "cells",
    "chain",
    "compare",
    "cross_entropy",
    "dictionary",
    "evaluate",
    "gradients",
    "intervention",
    "kl_to",
    "learned_mask",
    "load",
    "log_prob",
    "logit",
    "logit_diff",
    "low_rank",
    "masked",
    "mean",
    "metric",
    "multiply",
    "noise",
    "open",
    "ops",
    "pairs",
    "prob",
    "prob_diff",
    "project_out",
    "read",
    "resample",
    "rotation",
    "site",
    "sites",
    "subspace",
    "sweep",
    "tasks",
    "writing",
]

_NAMES_BY_HOME = {
    "anatomy.places": "Place site",
    "anatomy.selectors": "cell cells pairs sites",
    "attributing.approximation": "compare",
    "circuits.circuit": "Circuit evaluate",
    "errors": "CaptureError ConewiseError",
    "generation.sweep": "writing",
    "graph_sweep": "sweep",
    "jobs.pool": "Processes",
    "jobs.ray_workers": "Ray",
    "loading": "load",
    "model": "Model capture",
    "opening": "open",
    "paper.ops": "ops",
    "reactive.demand": "Plan",
    "reactive.gradients": "gradients",
    "reactive.graph": "Block Graft Graph Node block chain",
    "reactive.ledger": "Ledger",
    "reactive.world": "Event World",
    "runs.dictionaries": "dictionary",
    "runs.interventions": "add intervention masked mean noise resample",
    "runs.learned": "boundless learned_mask low_rank multiply project_out rotation subspace",
    "runs.metric_words": "cross_entropy kl_to log_prob logit logit_diff metric prob prob_diff read",
    "runs.run": "Run",
    "surgery.surgery": "Surgery",
    "sweeps.planning.plan": "SweepPlan",
    "sweeps.result": "Result",
    "sweeps.sweep": "Sweep",
    "text.tasks": "tasks",
}
_HOMES = {name: f"conewise.{home}" for home, names in _NAMES_BY_HOME.items() for name in names.split()}

_MODULES = frozenset({"ops", "tasks"})
_NAMES = {"evaluate": "evaluate_together"}


def __getattr__(name: str) -> "Any":
    import importlib  # noqa: PLC0415

    if name in _HOMES:
        from conewise.extras import needs  # noqa: PLC0415

        with needs():
            home = importlib.import_module(_HOMES[name])
        found = globals()[name] = home if name in _MODULES else getattr(home, _NAMES.get(name, name))
        return found
    if name == "errors":
        return importlib.import_module("conewise.errors")
    raise AttributeError(f"module 'conewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
