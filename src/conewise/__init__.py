"""Conewise: take a trained network apart, and pay only for what each change touches.

    import conewise as cw

The public face of the library; importing it does no work and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from conewise.engine.ledger import Event, Ledger
from conewise.engine.plan import Plan
from conewise.engine.world import World
from conewise.errors import ConewiseError
from conewise.frontends import ops
from conewise.graph.block import Block, Graft, block, chain
from conewise.graph.gradients import gradients
from conewise.graph.graph import Graph, Node
from conewise.workloads.places import Place, site
from conewise.workloads.selectors import sites

if TYPE_CHECKING:
    from conewise.frontends.torch.metrics import cross_entropy, kl_to, logit, logit_diff, metric, prob
    from conewise.workloads.interventions import add, intervention, mean, noise, resample
    from conewise.workloads.loading import load
    from conewise.workloads.model import Model, capture
    from conewise.workloads.result import Result
    from conewise.workloads.run import Run
    from conewise.workloads.sweep import Sweep
    from conewise.workloads.tracing import causal_trace

__version__ = "0.1.0"

__all__ = [
    "Block",
    "ConewiseError",
    "Event",
    "Graft",
    "Graph",
    "Ledger",
    "Model",
    "Node",
    "Place",
    "Plan",
    "Result",
    "Run",
    "Sweep",
    "World",
    "add",
    "block",
    "capture",
    "causal_trace",
    "chain",
    "cross_entropy",
    "gradients",
    "intervention",
    "kl_to",
    "load",
    "logit",
    "logit_diff",
    "mean",
    "metric",
    "noise",
    "ops",
    "prob",
    "resample",
    "site",
    "sites",
]

# What needs torch is imported when it is first used.
_LAZY = {
    "Model": "conewise.workloads.model",
    "Result": "conewise.workloads.result",
    "Run": "conewise.workloads.run",
    "Sweep": "conewise.workloads.sweep",
    "add": "conewise.workloads.interventions",
    "capture": "conewise.workloads.model",
    "causal_trace": "conewise.workloads.tracing",
    "cross_entropy": "conewise.frontends.torch.metrics",
    "intervention": "conewise.workloads.interventions",
    "kl_to": "conewise.frontends.torch.metrics",
    "load": "conewise.workloads.loading",
    "logit": "conewise.frontends.torch.metrics",
    "logit_diff": "conewise.frontends.torch.metrics",
    "mean": "conewise.workloads.interventions",
    "metric": "conewise.frontends.torch.metrics",
    "noise": "conewise.workloads.interventions",
    "prob": "conewise.frontends.torch.metrics",
    "resample": "conewise.workloads.interventions",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'conewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
