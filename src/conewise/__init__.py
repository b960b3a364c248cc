"""Conewise: take a trained network apart, and pay only for what each change touches.

    import conewise as cw

The public face of the library; importing it does no work and does not import torch.
"""

from conewise.engine.ledger import Event, Ledger
from conewise.engine.plan import Plan
from conewise.engine.world import World
from conewise.errors import ConewiseError
from conewise.frontends import ops
from conewise.graph.block import Block, Graft, block, chain
from conewise.graph.gradients import gradients
from conewise.graph.graph import Graph, Node

__version__ = "0.1.0"

__all__ = [
    "Block",
    "ConewiseError",
    "Event",
    "Graft",
    "Graph",
    "Ledger",
    "Node",
    "Plan",
    "World",
    "block",
    "chain",
    "gradients",
    "ops",
]
