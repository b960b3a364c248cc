"""Conewise: take a trained network apart, and pay only for what each change touches.

    import conewise as cw

The public face of the library. What stands here is imported when it is first used: the command line is there
at once, and torch only where it is wanted.
"""

# Nothing is imported, not even `typing`: whoever presses Ctrl-C at once meets the command, and no traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from conewise.engine.ledger import Event, Ledger
    from conewise.engine.plan import Plan
    from conewise.engine.world import World
    from conewise.errors import ConewiseError
    from conewise.frontends import ops
    from conewise.frontends.torch.metrics import cross_entropy, kl_to, logit, logit_diff, metric, prob
    from conewise.graph.block import Block, Graft, block, chain
    from conewise.graph.gradients import gradients
    from conewise.graph.graph import Graph, Node
    from conewise.workloads.interventions import add, intervention, mean, noise, resample
    from conewise.workloads.loading import load
    from conewise.workloads.model import Model, capture
    from conewise.workloads.places import Place, site
    from conewise.workloads.result import Result
    from conewise.workloads.run import Run
    from conewise.workloads.selectors import sites
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

_HOMES = {
    "Block": "conewise.graph.block",
    "ConewiseError": "conewise.errors",
    "Event": "conewise.engine.ledger",
    "Graft": "conewise.graph.block",
    "Graph": "conewise.graph.graph",
    "Ledger": "conewise.engine.ledger",
    "Model": "conewise.workloads.model",
    "Node": "conewise.graph.graph",
    "Place": "conewise.workloads.places",
    "Plan": "conewise.engine.plan",
    "Result": "conewise.workloads.result",
    "Run": "conewise.workloads.run",
    "Sweep": "conewise.workloads.sweep",
    "World": "conewise.engine.world",
    "add": "conewise.workloads.interventions",
    "block": "conewise.graph.block",
    "capture": "conewise.workloads.model",
    "causal_trace": "conewise.workloads.tracing",
    "chain": "conewise.graph.block",
    "cross_entropy": "conewise.frontends.torch.metrics",
    "gradients": "conewise.graph.gradients",
    "intervention": "conewise.workloads.interventions",
    "kl_to": "conewise.frontends.torch.metrics",
    "load": "conewise.workloads.loading",
    "logit": "conewise.frontends.torch.metrics",
    "logit_diff": "conewise.frontends.torch.metrics",
    "mean": "conewise.workloads.interventions",
    "metric": "conewise.frontends.torch.metrics",
    "noise": "conewise.workloads.interventions",
    "ops": "conewise.frontends.ops",
    "prob": "conewise.frontends.torch.metrics",
    "resample": "conewise.workloads.interventions",
    "site": "conewise.workloads.places",
    "sites": "conewise.workloads.selectors",
}


def __getattr__(name: str) -> "Any":
    import importlib  # noqa: PLC0415

    if name in _HOMES:
        home = importlib.import_module(_HOMES[name])
        found = globals()[name] = home if name == "ops" else getattr(home, name)
        return found
    if name == "errors":
        return importlib.import_module("conewise.errors")
    raise AttributeError(f"module 'conewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
