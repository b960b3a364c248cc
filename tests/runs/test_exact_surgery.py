"""Exact surgery on a captured model: every value of every operation stays, bit for bit, graft after graft."""

from __future__ import annotations

from typing import Any

import torch

import conewise as cw
from conewise.model import Model
from conewise.paper import theory
from conewise.paper.theory import GraftAt
from conewise.program.walk import run_sources
from tests.sweeps.small import model, prompts


def residual(width: int, inner: int = 4) -> cw.Block:
    """A block x + f(x) over torch, with f's last weights zero."""
    inside = cw.Graph()
    inside.source("in")
    inside.source("up", torch.randn(width, inner, generator=torch.Generator().manual_seed(0)), param=True)
    inside.source("down", torch.zeros(inner, width), param=True)
    inside.node("hidden", torch.tanh, [inside.node("first", torch.matmul, ["in", "up"])])
    inside.node("sum", torch.add, ["in", inside.node("f", torch.matmul, ["hidden", "down"])])
    return cw.block(inside, entry="in")


def bits(value: Any) -> Any:
    """What two values must share to be the same, bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist()
    return [bits(part) for part in value] if isinstance(value, tuple | list) else value


def warm_world(captured: Model) -> cw.World:
    inputs = captured.signature.bind((), {"input_ids": prompts(1, 2)})
    world = cw.World(captured.graph)
    for name, value in run_sources(captured.program, inputs).items():
        world.set(name, value)
    with torch.no_grad():
        world.demand(captured.graph.sites)
    return world


def test_grafts_of_identities_leave_every_value_of_a_captured_model_bit_for_bit() -> None:
    captured = model()
    graph, world = captured.graph, warm_world(captured)
    sites = graph.sites
    before = [bits(value) for value in world.demand(sites)]
    places = [
        captured.locate(cw.site(kind, layer=layer)).node
        for layer in (1, 0)
        for kind in ("mlp_out", "resid_mid")
    ]
    blocks = [residual(16), cw.chain(torch.clone), residual(16, inner=2), cw.chain(lambda value: value)]
    grafts = [GraftAt(at, block) for at, block in zip(places, blocks, strict=True)]
    predicted = theory.interleaved_cost(graph, grafts)

    costs = []
    for at, block in zip(places, blocks, strict=True):
        graph.graft_after(at, block)
        with world.ledger.interval() as ledger, torch.no_grad():
            after = [bits(value) for value in world.demand(sites)]
            world.demand(graph.sites)
        costs.append(ledger.count("recomputed"))
        assert after == before
    assert tuple(costs) == predicted.costs

    # And one that is no identity is noticed.
    graph.graft_after(places[0], cw.chain(lambda value: value * (1 + 1e-6)))
    with torch.no_grad():
        assert [bits(value) for value in world.demand(sites)] != before
