"""What is computed: every method on every task, and the exact effects beside, in pieces that are kept."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import conewise as cw
from benchmarks.exact_or_approximate.pieces import Effects, Pieces, joined, say, united
from benchmarks.exact_or_approximate.tasks import TASKS
from conewise.attributing.approximation import largest

NODE_METHODS = {"atp": None, "atp*": None, "ig": 3}
EDGE_METHODS = {"eap": None, "eap-ig": 5}
"""The methods, with their steps."""

EDGES_AT_ONCE = 250
"""So many edges are a piece."""

SHARES = (0.25, 0.5, 0.75, 1.0)
"""How far a node goes to the source's value, for its curve."""

NODES = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
"""Every head and every MLP."""


@dataclass(frozen=True)
class Sizes:
    """How much is computed: `top` edges by each method, `sample` of all at random, `at_once` pairs at a time.

    `integrated` is on how many pairs IG is computed, which takes more than all exact effects.
    """

    pairs: Mapping[str, int] = field(default_factory=lambda: {"ioi": 24, "greater-than": 12})
    integrated: Mapping[str, int] = field(default_factory=lambda: {"ioi": 20, "greater-than": 4})
    at_once: int = 6
    at_once_of_edges: int = 24
    top: int = 125
    sample: int = 500
    seed: int = 0
    verified: int = 8
    node_ranks: tuple[int, ...] = (10, 30)
    edge_ranks: tuple[int, ...] = (10, 100)


class Experiment:
    """All pieces on one task; each method computes what is missing, and gives what is there."""

    def __init__(self, model: str, task: str, folder: Path, sizes: Sizes) -> None:
        loaded: Any = cw.load(model)
        self.sizes = sizes
        self.task = TASKS[task](loaded.tokenizer, sizes.pairs[task])
        self.model = cw.capture(loaded.module, input_ids=self.task.clean[:1], logits_to_keep=1)
        self.pieces = Pieces(folder / task)
        # Samples and lists of edges are named by what is in them: those may grow.
        fixed = {"model": model, "pairs": len(self.task), "texts": self.task.texts}
        self.pieces.expect(fixed)
        self._asked: dict[tuple[int, int], dict[str, Any]] = {}

    def asked(self, some: slice) -> dict[str, Any]:
        """Base, source and metric of some pairs."""
        key = some.start, some.stop
        if key not in self._asked:
            self._asked[key] = {
                "base": self.model.run(input_ids=self.task.clean[some]),
                "source": self.model.run(input_ids=self.task.corrupted[some]),
                "metric": self.task.metric(some),
            }
        return self._asked[key]

    def slices(self, step: int, count: int | None = None) -> list[slice]:
        """The pairs, or so many of them, `step` at a time."""
        count = len(self.task) if count is None else min(count, len(self.task))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    # -- stages, in an order in which an early stop leaves most ----------------------------------

    def methods(self) -> None:
        """Nodes exactly, then the methods of gradients that take less."""
        self.pieces.facts("behaviour", self.behaviour)
        for method in ("exact", "atp", "atp*"):
            self.nodes(method)
        self.by_gradients()

    def integrated(self) -> None:
        """The method of nodes that takes most."""
        self.nodes("ig")

    def largest(self) -> None:
        """The edges that are largest by a method."""
        self.some_edges(self.picked())

    def sample(self) -> None:
        """The sample of edges."""
        self.some_edges(self.drawn())

    # -- what is computed --------------------------------------------------------------------------

    def behaviour(self) -> dict[str, Any]:
        """How well the model does the task, and what the corrupted prompts make of it."""
        base, source = [], []
        for some in self.slices(self.sizes.at_once):
            asked = self.asked(some)
            sweep = self.model.sweep(cw.sites("mlp_out", layer=0), **asked)
            base += sweep.read_metrics(asked["base"])[0].tolist()
            source += sweep.read_metrics(asked["source"])[0].tolist()
        with torch.no_grad():
            module: Any = self.model.module
            done = self.task.is_done(module(input_ids=self.task.clean, logits_to_keep=1).logits[:, -1])
        return {
            "pairs": len(self.task),
            "example": list(self.task.texts[0]),
            "positions": int(self.task.clean.shape[1]),
            "right": float(done.float().mean()),
            "clean": float(np.mean(base)),
            "clean_least": float(np.min(base)),
            "corrupted": float(np.mean(source)),
        }

    def nodes(self, method: str) -> Effects:
        """The effects of all heads and MLPs; `method` is "exact" or one of gradients."""
        steps, step = NODE_METHODS.get(method), self.sizes.at_once
        slices = self.slices(step, self.sizes.integrated[self.task.name] if method == "ig" else None)
        return self._by_slices("nodes", NODES, method, steps, slices)

    def every_edge(self, method: str) -> Effects:
        """The effects of every edge by gradients, over all pairs."""
        slices = self.slices(self.sizes.at_once_of_edges)
        return self._by_slices("edges", self.model.edges(), method, EDGE_METHODS[method], slices)

    def by_gradients(self) -> dict[str, Effects]:
        """The effects of every edge by all methods."""
        return {method: self.every_edge(method) for method in EDGE_METHODS}

    def picked(self) -> tuple[str, ...]:
        """The edges that are among the largest by a method."""
        found: dict[str, None] = {}
        for effects in self.by_gradients().values():
            found |= dict.fromkeys(effects.names[number] for number in largest(effects.mean, self.sizes.top))
        return tuple(found)

    def some_exact(self) -> Effects:
        """The exact effects, over all pairs, of the edges that were drawn or picked."""
        return united([self.some_edges(names) for names in (self.drawn(), self.picked())])

    def drawn(self) -> tuple[str, ...]:
        """Edges at random, each as likely as any other; a larger sample goes on from a smaller one."""
        names = list(self.model.edges().names)
        random.Random(self.sizes.seed).shuffle(names)
        return tuple(names[: self.sizes.sample])

    def some_edges(self, edges: Sequence[str]) -> Effects:
        """The exact effects of some edges over all pairs."""
        parts = []
        for start in range(0, len(edges), EDGES_AT_ONCE):
            some = list(edges[start : start + EDGES_AT_ONCE])
            digest = hashlib.sha256(" ".join(some).encode()).hexdigest()[:8]
            chosen, slices = self.model.edges()[some], self.slices(self.sizes.at_once_of_edges // 2)
            parts.append(self._by_slices(f"edges-{digest}", chosen, "exact", None, slices))
        return united(parts)

    def _by_slices(
        self, what: str, sites: Any, method: str, steps: int | None, slices: Sequence[slice]
    ) -> Effects:
        parts = []
        for some in slices:
            name = f"{what}-{method.replace('*', '-star')}-{some.start}-{some.stop}"
            if method == "exact":
                parts.append(self.pieces.sweep(name, partial(self._sweep, sites, some)))
            else:
                parts.append(
                    self.pieces.attribution(name, partial(self._attribution, sites, some, method, steps))
                )
        return joined(parts)

    def _sweep(self, sites: Any, some: slice) -> Any:
        return self.model.sweep(sites, **self.asked(some))

    def _attribution(self, sites: Any, some: slice, method: str, steps: int | None) -> Any:
        return self.model.attribute(sites, **self.asked(some), method=method, steps=steps).run()

    def verified(self) -> dict[str, Any]:
        """Some exact cells again, by hooks on the module itself: nodes of several pairs, edges of the first.

        Raises AssertionError where one is not what the module says.
        """
        count, names = self.sizes.verified, self.model.edges().names
        edges = self.model.edges()[random.Random(1).sample(names, min(count, len(names)))]
        found = {}
        for what, sites, some in (
            ("nodes", NODES, slice(0, self.sizes.at_once)),
            ("edges", edges, slice(0, 1)),
        ):
            check = self.model.sweep(sites, **self.asked(some)).run(progress=False).verify(n=count)
            say(f"{self.task.name}, {what}: {check}")
            assert check.ok, f"{what} of {self.task.name} are not those of hooks: {check}"
            found[what] = {"cells": check.cells, "relative": check.relative}
        return found

    def curves(self, nodes: Sequence[str]) -> dict[str, list[float]]:
        """What parts of a patch do: the mean effect when a node goes this share of the way to the source."""
        found: dict[str, list[float]] = {name: [0.0] * len(SHARES) for name in nodes}
        for some in self.slices(self.sizes.at_once):
            asked = self.asked(some)
            base, source = asked["base"], asked["source"]
            sweep = self.model.sweep(NODES, **asked)
            places, read = {cell.name: cell.places[0] for cell in sweep.cells}, sweep.read_metrics
            before = read(base)[0]
            for name in nodes:
                own, other = base.read(places[name]), source.read(places[name])
                for at, share in enumerate(SHARES):
                    with base.fork() as world:
                        world.patch(places[name], own + share * (other - own))
                        found[name][at] += float((read(world)[0] - before).sum()) / len(self.task)
        return found

    def hybrid(self) -> dict[str, Any]:
        """Which of the largest nodes `method="hybrid"` finds on some pairs, and how many it computes."""
        some, top = slice(0, self.sizes.at_once), self.sizes.node_ranks[0]
        mixed = self.model.attribute(NODES, **self.asked(some), method="hybrid", top=top).run()
        exact = self.nodes("exact").of_prompts(some)
        found = {mixed.cells[number].name for number in largest(mixed.effect.tolist(), top)}
        first = [exact.names[number] for number in largest(exact.mean, top)]
        return {
            "top": top,
            "computed": len(mixed.exact),
            "missed": [name for name in first if name not in found],
        }
