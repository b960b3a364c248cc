"""`python -m benchmarks.learned`: distributed alignment at every layer and position, against hooks.

A step of training of a rotation of two directions, at each of 30 layers × 14 positions of SmolLM2's shape
with random weights. Ours is one fit over all 420 places; a step's time is that of a run with more steps
less that of one with fewer. The other is a loop: for each place a forward with a hook, which reads the
source's value (kept from one forward for all places), a backward, a step of Adam. The module's weights
require no gradients there, so that nothing in front of the hook is differentiated. Some places are timed,
spread over the layers, and scaled to all. Their losses in the first step are compared. On a CPU the seconds
are those of the process, so that what else runs on the machine counts less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import conewise as cw
from benchmarks.edges import smollm2

LENGTH, DIRECTIONS, RATE = 14, 2, 5e-3


def timed(device: str, action: Callable[[], Any]) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def layers_of(module: Any) -> list[nn.Module]:
    return list(module.model.layers)


class HookedLoop:
    """One training for each place, by hooks; `starts` are its first directions."""

    def __init__(self, module: Any, starts: torch.Tensor, places: list[tuple[int, int]]) -> None:
        self.module, self.places = module, places
        self.weights = [
            start.clone().to(next(module.parameters()).device).requires_grad_() for start in starts
        ]
        self.optimizers = [torch.optim.Adam([one], lr=RATE) for one in self.weights]

    def step(self, base: torch.Tensor, source: torch.Tensor, labels: torch.Tensor) -> list[float]:
        kept: dict[int, torch.Tensor] = {}
        handles = [
            layer.register_forward_hook(lambda _, __, out, n=n: kept.__setitem__(n, first(out).detach()))
            for n, layer in enumerate(layers_of(self.module))
        ]
        with torch.no_grad():
            self.module.model(input_ids=source, use_cache=False)
        for handle in handles:
            handle.remove()
        losses = []
        for (layer, pos), weight, optimizer in zip(self.places, self.weights, self.optimizers, strict=True):

            def put(
                _: Any, __: Any, out: Any, weight: Any = weight, layer: int = layer, pos: int = pos
            ) -> Any:
                whole = first(out).clone()
                basis = torch.linalg.qr(weight).Q
                whole[:, pos] = whole[:, pos] + (kept[layer][:, pos] - whole[:, pos]) @ basis @ basis.T
                return (whole, *out[1:]) if isinstance(out, tuple) else whole

            handle = layers_of(self.module)[layer].register_forward_hook(put)
            logits = self.module(input_ids=base, use_cache=False, logits_to_keep=1).logits[:, -1]
            loss = nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            handle.remove()
            losses.append(loss.detach())
        return [float(one) for one in losses]


def first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def measure(module: Any, device: str, batch: int, steps: int, memory: str | None) -> None:
    for weight in module.parameters():
        weight.requires_grad_(False)
    ids = torch.randint(0, 49152, (2, batch, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    labels = torch.randint(0, 49152, (batch,), generator=torch.Generator().manual_seed(2)).to(device)
    layers = len(layers_of(module))
    places = [(layer, pos) for layer in range(layers) for pos in range(LENGTH)]
    width = module.config.hidden_size
    starts = (
        torch.randn(len(places), width, DIRECTIONS, generator=torch.Generator().manual_seed(0)) / width**0.5
    )
    sample = [
        n
        for n, (layer, pos) in enumerate(places)
        if layer % 7 == layers // 2 % 7 and pos in {0, 5, LENGTH - 1}
    ]
    loop = HookedLoop(module, starts[sample], [places[n] for n in sample])
    example = [(ids[0, n], ids[1, n], int(labels[n])) for n in range(batch)]
    model = cw.capture(module, input_ids=ids[0, :1].clone(), logits_to_keep=1)
    sites = cw.sites("resid_post", layer=":", pos=":")

    def fit(count: int) -> Any:
        options = {"steps": count, "batch": batch, "learning_rate": RATE, "held_out": 0.0}
        return model.fit(cw.rotation(DIRECTIONS), sites, example, **options)

    few, more = fit(1), fit(1 + steps)
    found = few.run(max_memory=memory)  # plans, and compiles
    plan = few.plan(max_memory=memory)
    print(f"plan: {plan}", flush=True)
    losses = loop.step(ids[0], ids[1], labels)
    off = max(abs(a - float(found.losses[0, n])) for a, n in zip(losses, sample, strict=True))
    ours, theirs = [], []
    for _ in range(2):
        ours.append(
            (
                timed(device, lambda: more.run(max_memory=memory))
                - timed(device, lambda: few.run(max_memory=memory))
            )
            / steps
        )
        theirs.append(timed(device, lambda: loop.step(ids[0], ids[1], labels)) * len(places) / len(sample))
        print(
            f"  a step: ours {ours[-1]:.3f} s, hooks {theirs[-1]:.3f} s (scaled from {len(sample)} places)",
            flush=True,
        )
    ratio = min(theirs) / min(ours)
    peak = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most" if device == "cuda" else ""
    print(
        f"{device}, {batch} examples a step: {len(places)} places in {min(ours):.3f} s, "
        f"by hooks {min(theirs):.2f} s: {ratio:.1f}x; losses differ by at most {off:.1e}{peak}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--layers", type=int, default=30)
    asked = parser.parse_args(sys.argv[1:])
    torch.manual_seed(0)
    module = smollm2(asked.device)
    module.model.layers = module.model.layers[: asked.layers]
    for batch in map(int, asked.batches.split(",")):
        try:
            measure(module, asked.device, batch, asked.steps, asked.memory)
        except Exception as error:  # noqa: BLE001 - the other rows are measured
            print(f"batch {batch} failed: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
