"""Transformers of other families as real graphs over numpy: GPT-2-style, and a post-norm encoder.

One node for each op and head, the biases nodes of their own. Small random weights: cones do not depend
on width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from conewise.paper import ops
from conewise.reactive.graph import Graph, Site

Array = npt.NDArray[np.float64]
Kind = Literal["head", "mlp"]


@dataclass(frozen=True, slots=True)
class PatchedSite:
    """A site that a sweep patches: in which layer, counted from 1, and what it is."""

    site: Site
    layer: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Transformer:
    """A graph, the sites that a sweep of all heads and MLPs patches, and the node that it reads."""

    graph: Graph
    patched: tuple[PatchedSite, ...]
    output: Site


class _Builder:
    """A graph in the making, whose parameters are drawn as they are named."""

    def __init__(self, heads: int, seed: int, positions: int = 4, head_width: int = 2) -> None:
        self.heads, self.head_width, self.width = heads, head_width, heads * head_width
        self.graph = Graph()
        self.patched: list[PatchedSite] = []
        self._random = np.random.default_rng(seed)
        self._mask: Array = np.zeros((positions, positions))
        self.stream = self.graph.source("x", self._random.normal(size=(positions, self.width)))

    def param(self, name: Site, *shape: int, around: float = 0.0) -> Site:
        return self.graph.source(name, around + self._random.normal(size=shape) * 0.3, param=True)

    def linear(self, name: Site, site: Site, reads: int, makes: int) -> Site:
        """A product with a weight, and the bias as a node of its own; returns the biased site."""
        product = self.graph.node(name, ops.linear, [site, self.param(f"{name}.weight", reads, makes)])
        return self.graph.node(f"{name}_bias", ops.bias_add, [product, self.param(f"{name}.bias", makes)])

    def norm(self, name: Site, site: Site) -> Site:
        gain = self.param(f"{name}.weight", self.width, around=1.0)
        return self.graph.node(name, ops.layernorm, [site, gain, self.param(f"{name}.bias", self.width)])

    def attention(self, layer: int, q: Site, k: Site, v: Site, offsets: tuple[int, int, int]) -> Site:
        """Each head's slices, scores, scale and mask, softmax and product with v; then the concatenation.

        `offsets` say where in the width of its site each of q, k and v begins.
        """
        node, outputs = self.graph.node, []
        for head in range(self.heads):
            of, start = f"layer{layer}.head{head}", head * self.head_width
            parts = [
                node(f"{of}.{name}", _columns(offset + start, offset + start + self.head_width), [site])
                for name, site, offset in zip("qkv", (q, k, v), offsets, strict=True)
            ]
            scores = node(f"{of}.scores", _scores, parts[:2])
            masked = node(f"{of}.masked", _scaled_and_masked(self.head_width**-0.5, self._mask), [scores])
            weights = node(f"{of}.softmax", ops.softmax, [masked])
            outputs.append(node(f"{of}.out", ops.matmul, [weights, parts[2]]))
            self.patched.append(PatchedSite(outputs[-1], layer, "head"))
        return node(f"layer{layer}.concat", ops.concat, outputs)

    def mlp(self, layer: int, site: Site) -> Site:
        inner = self.linear(f"layer{layer}.fc", site, self.width, 4 * self.width)
        acted = self.graph.node(f"layer{layer}.gelu", ops.gelu, [inner])
        out = self.linear(f"layer{layer}.proj", acted, 4 * self.width, self.width)
        self.patched.append(PatchedSite(out, layer, "mlp"))
        return out

    def add(self, name: Site, site: Site) -> Site:
        return self.graph.node(name, ops.add, [self.stream, site])

    def causal(self) -> None:
        """From here on no position sees a later one."""
        self._mask = np.triu(np.full_like(self._mask, -1e9), 1)

    def finish(self) -> Transformer:
        output = self.graph.node("readout", _readout, [self.stream, self.param("readout.weight", self.width)])
        return Transformer(self.graph, tuple(self.patched), output)


def gpt2_style(layers: int, heads: int, seed: int = 0) -> Transformer:
    """LayerNorm before each half, q, k and v from one fused product, GELU."""
    build = _Builder(heads, seed)
    build.causal()
    for layer in range(1, layers + 1):
        at, width = f"layer{layer}", build.width
        qkv = build.linear(f"{at}.qkv", build.norm(f"{at}.norm1", build.stream), width, 3 * width)
        joined = build.attention(layer, qkv, qkv, qkv, (0, width, 2 * width))
        build.stream = build.add(f"{at}.add1", build.linear(f"{at}.o", joined, width, width))
        out = build.mlp(layer, build.norm(f"{at}.norm2", build.stream))
        build.stream = build.add(f"{at}.add2", out)
    return build.finish()


def encoder_style(layers: int, heads: int, seed: int = 0) -> Transformer:
    """LayerNorm after each half, three products for q, k and v, every position sees all."""
    build = _Builder(heads, seed)
    for layer in range(1, layers + 1):
        at, width = f"layer{layer}", build.width
        q, k, v = (build.linear(f"{at}.{name}", build.stream, width, width) for name in "qkv")
        joined = build.attention(layer, q, k, v, (0, 0, 0))
        added = build.add(f"{at}.add1", build.linear(f"{at}.o", joined, width, width))
        build.stream = build.norm(f"{at}.norm1", added)
        added = build.add(f"{at}.add2", build.mlp(layer, build.stream))
        build.stream = build.norm(f"{at}.norm2", added)
    return build.finish()


def _columns(first: int, last: int) -> Callable[[Any], Any]:
    def columns(x: Array) -> Array:
        return x[:, first:last]

    return columns


def _scores(q: Array, k: Array) -> Array:
    return q @ k.T


def _scaled_and_masked(scale: float, mask: Array) -> Callable[[Any], Any]:
    def masked(scores: Array) -> Array:
        return scores * scale + mask

    return masked


def _readout(stream: Array, direction: Array) -> float:
    return float(stream[-1] @ direction)
