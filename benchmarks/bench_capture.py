"""Capture: what it takes, what running node by node costs, what a fork saves, what a run keeps.

GPT-2 small at full size with random weights (no download): 12 layers, 12 heads, 124 million weights, 20
tokens, on the CPU. `python -m benchmarks.capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from benchmarks.harness import Line, at_most, interleaved, seconds
from conewise.model import Model

TOKENS, LAYER, HEAD = 20, 10, 3


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).eval()


def prompt(seed: int) -> Tensor:
    return torch.randint(0, 50257, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def capture_time(module: GPT2LMHeadModel) -> tuple[Line, Model]:
    """The first capture of a process: imports and caches of `torch.export` included."""
    models: list[Model] = []
    spent = seconds(lambda: models.append(cw.capture(module, input_ids=prompt(0))))
    model = models[0]
    line = Line(
        "capture of GPT-2 small",
        "<= 15 s",
        f"{spent:.1f} s",
        spent <= 15,
        f"{len(model.program.records)} operations, {len(model.sites)} sites",
    )
    return line, model


def node_by_node(model: Model, rounds: int) -> Line:
    """A whole `model.run`, every value kept, against the module's own forward."""
    ids = prompt(1)

    def graph() -> Tensor:
        logits: Tensor = model.run(input_ids=ids).logits
        return logits

    @torch.no_grad()
    def module() -> Tensor:
        logits: Tensor = model.module(input_ids=ids, use_cache=False).logits
        return logits

    assert torch.equal(graph(), module())
    ours, theirs = interleaved(graph, module, rounds=rounds)
    return at_most(
        "run node by node against the module's forward",
        ours / theirs,
        1.15,
        f"{ours * 1e3:.1f} ms against {theirs * 1e3:.1f} ms",
    )


def patched_head(model: Model, rounds: int, **options: int) -> tuple[float, float]:
    """Seconds of one patched head by fork, and by a full forward with a hook. The same logits."""
    source = model.run(input_ids=prompt(2))
    ids = prompt(1)
    base = model.run(input_ids=ids)
    place = cw.site("z", layer=LAYER, head=HEAD)
    part = source[place]

    def fork() -> Tensor:
        with base.fork() as world:
            world.patch(place, source)
            logits: Tensor = world.logits
            return logits

    @torch.no_grad()
    def hook() -> Tensor:
        with hooked(model.module.transformer.h[LAYER].attn.c_proj, part):
            logits: Tensor = model.module(input_ids=ids, use_cache=False, **options).logits
            return logits

    assert torch.equal(fork(), hook())
    assert not torch.equal(fork(), base.logits)
    ours, theirs = interleaved(fork, hook, rounds=rounds)
    return ours, theirs


@contextmanager
def hooked(projection: torch.nn.Module, part: Tensor) -> Iterator[None]:
    def swap(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z = args[0].clone()
        z.view(*z.shape[:2], 12, 64)[:, :, HEAD] = part
        return (z, *args[1:])

    handle = projection.register_forward_pre_hook(swap)
    try:
        yield
    finally:
        handle.remove()


def fork_lines(module: GPT2LMHeadModel, model: Model, rounds: int) -> list[Line]:
    """The last position's logits, which is what a metric reads; and, reported, those of all positions.

    The unembedding is 31 % of the weights and lies behind every site, so with all logits no fork in
    layer 10 can cost less than 0.41 of a forward pass.
    """
    last = cw.capture(module, input_ids=prompt(0), logits_to_keep=1)
    ours, theirs = patched_head(last, rounds, logits_to_keep=1)
    every, full = patched_head(model, rounds)
    return [
        at_most(
            f"one patched head, layer {LAYER} of 12, by fork against a hooked forward",
            ours / theirs,
            0.35,
            f"{ours * 1e3:.1f} ms against {theirs * 1e3:.1f} ms, the last position's logits",
        ),
        Line(
            "the same, logits of all positions",
            "reported",
            f"{every / full:.2f}x",
            True,
            f"{every * 1e3:.1f} ms against {full * 1e3:.1f} ms; 0.41 by the count of products",
        ),
    ]


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most that was allocated at once while `action` ran and its result was alive, by torch's allocator.

    Every allocation and release that torch makes on the CPU is an event of its profiler; their
    running sum, from the start of `action`, has this maximum. Weights and inputs were there before.
    """
    action()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = action()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = peak = 0
    for _, size in memory:
        live += size
        peak = max(peak, live)
    assert memory, "the profiler recorded no allocation"
    del result
    return peak


def memory_line(model: Model) -> Line:
    ids, sites = prompt(1), ["z", "mlp_out"]
    whole = peak_bytes(lambda: model.run(input_ids=ids, keep="all"))
    sparse = peak_bytes(lambda: model.run(input_ids=ids, keep=sites))
    source, base = (model.run(input_ids=prompt(seed), keep=sites) for seed in (2, 1))
    full = model.run(input_ids=ids, keep="all")
    for layer in (0, LAYER):
        with base.fork() as one, full.fork() as other:
            one.patch(("mlp_out", layer), source)
            other.patch(("mlp_out", layer), source)
            assert torch.equal(one.logits, other.logits)
    assert base.ledger.recomputed == []
    return at_most(
        "peak memory of a run that keeps what head and MLP sites need",
        sparse / whole,
        0.5,
        f"{sparse / 2**20:.1f} MiB against {whole / 2**20:.1f} MiB, weights not counted",
    )


def lines(rounds: int = 15) -> list[Line]:
    module = gpt2()
    capture, model = capture_time(module)
    return [capture, node_by_node(model, rounds), *fork_lines(module, model, rounds), memory_line(model)]
