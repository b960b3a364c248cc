"""Transformers as real graphs, one node for each op and head: the theory's blueprints with values and rules.

The Llama-style one is the paper's, over torch; GPT-2-style and the post-norm encoder are over numpy, with
small random weights: cones do not depend on width. Below them is what a timing on a device needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from conewise.paper import ops
from conewise.paper.theory.transformers import Architecture, Component, blueprint
from conewise.reactive.graph import Graph, Site
from conewise.reactive.table import Rule


@dataclass(frozen=True, slots=True)
class PatchedSite:
    """A site that a sweep patches, its layer, counted from 1, and its kind."""

    site: Site
    layer: int
    kind: Component


@dataclass(frozen=True, slots=True)
class Transformer:
    """A graph, the sites that a sweep of all heads and MLPs patches, and the node that it reads."""

    graph: Graph
    patched: tuple[PatchedSite, ...]
    output: Site
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def computed(self) -> int:
        """The number of nodes that one full run computes."""
        return len(self.graph) - len(self.graph.sources)


def _built(
    architecture: Architecture,
    layers: int,
    heads: int,
    source: Callable[[str, str], Any],
    part: Callable[[int, str], Rule],
    rules: dict[str, Rule],
    device: str = "cpu",
) -> Transformer:
    """Build a blueprint; its sites are named `layer3.o` and `layer3.head0.out`.

    `source(of, kind)` is the value of a source, such as the "weight" of "fc"; `part(head, kind)` the rule
    that takes a head's "q", "k" or "v" out of all heads'; `rules` has the others by kind.
    """
    shape, graph = blueprint(architecture, layers, heads), Graph()

    def named(site: Site) -> Site:
        return site.replace("layers.", "layer").replace(".heads.", ".head")

    for site, reads in shape.nodes:
        *_, of, kind = ("", *site.split("."))
        if not reads:
            graph.source(named(site), source(of, kind), param=site in shape.params)
        else:
            rule = part(int(of), kind) if ".heads." in site and kind in "qkv" else rules[kind]
            graph.node(named(site), rule, list(map(named, reads)))
    patched = tuple(PatchedSite(named(site), layer, kind) for site, layer, kind in shape.sites)
    return Transformer(graph, patched, named(shape.readout), torch.device(device))


def _columns(first: int, last: int) -> Rule:
    """Return the rule that takes some columns of a tensor, or of an array."""
    return lambda x: x[:, first:last]


def _scores(q: Any, k: Any) -> Any:
    return q @ k.T


# -- Llama-style, over torch -----------------------------------------------------------------------


def llama(
    layers: int,
    heads: int,
    width: int,
    *,
    positions: int = 20,
    device: str = "cpu",
    seed: int = 0,
    drawn_on: str = "cpu",
) -> Transformer:
    """Build a random transformer of `layers` × `heads` and d_model = `width`, over `positions` random tokens.

    The MLP is `inner_width(width)` wide. Weights are drawn on the CPU, so that every device gets the same
    ones, or on another device, which is faster.
    """
    if width % (2 * heads):
        raise ValueError(
            f"width {width} does not split into {heads} heads of an even size (rope turns pairs). "
            f"Take a multiple of {2 * heads}."
        )
    size, inner = width // heads, inner_width(width)
    generator, target = torch.Generator(drawn_on).manual_seed(seed), torch.device(device)
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}

    def draw(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=drawn_on) * scale).to(target)

    def source(of: str, kind: str) -> Tensor:
        if kind == "x":
            return draw(positions, width, scale=1.0)
        if of.startswith("norm"):
            return 1 + draw(width, scale=0.1)
        rows, columns = shapes.get(of, (width, width))
        return draw(rows, columns, scale=columns**-0.5)

    mask, scale = torch.full((positions, positions), -math.inf).triu(1).to(target), size**-0.5
    directions = draw(2, width, scale=width**-0.5)

    def readout(stream: Tensor) -> Tensor:
        """Return the difference of two logits at the last position."""
        logits = functional.linear(stream[-1], directions)
        return logits[0] - logits[1]

    rotate = _rope(positions, heads, size, target)
    rules: dict[str, Rule] = {
        **dict.fromkeys(("norm1", "norm2"), lambda x, gain: functional.rms_norm(x, (width,), gain, 1e-6)),
        **dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), functional.linear),
        **dict.fromkeys(("rope_q", "rope_k"), rotate),
        **dict.fromkeys(("add1", "add2"), torch.add),
        "scores": _scores,
        "masked": lambda scores: torch.add(mask, scores, alpha=scale),
        "softmax": lambda scores: scores.softmax(-1),
        "out": torch.matmul,
        "concat": lambda *outputs: torch.cat(outputs, dim=-1),
        "swiglu": lambda gate, up: functional.silu(gate) * up,
        "readout": readout,
    }
    slices = [_columns(head * size, (head + 1) * size) for head in range(heads)]
    return _built("llama", layers, heads, source, lambda head, _: slices[head], rules, device)


def inner_width(width: int) -> int:
    """8/3 of a model's width, rounded up to a multiple of 64 (from 64 on)."""
    inner = math.ceil(8 * width / 3)
    return inner if inner < 64 else 64 * math.ceil(inner / 64)


def _rope(positions: int, heads: int, size: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Turn each pair of a head's coordinates by an angle that grows with the position."""
    rates = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(positions)[:, None] * torch.cat([rates, rates])[None, :]
    cos, sin = (turns.repeat(1, heads).to(device) for turns in (angles.cos(), angles.sin()))
    half = size // 2

    def rope(x: Tensor) -> Tensor:
        by_head = x.view(positions, heads, size)
        turned = torch.cat([-by_head[..., half:], by_head[..., :half]], dim=-1).view_as(x)
        return x * cos + turned * sin

    return rope


# -- GPT-2-style and encoder, over numpy -----------------------------------------------------------

POSITIONS, HEAD_WIDTH = 4, 2


def _over_numpy(architecture: Architecture, layers: int, heads: int, seed: int = 0) -> Transformer:
    """Build a blueprint with small random weights."""
    random, width, is_fused = np.random.default_rng(seed), heads * HEAD_WIDTH, architecture == "gpt2"
    wide = {"qkv": 3 * width, "fc": 4 * width}
    mask = np.triu(np.full((POSITIONS, POSITIONS), -1e9), 1) * is_fused

    def source(of: str, kind: str) -> Any:
        if kind == "x":
            return random.normal(size=(POSITIONS, width))
        is_matrix = kind == "weight" and not of.startswith("norm")
        sizes = [wide["fc"] if of == "proj" else width] * is_matrix + [wide.get(of, width)]
        return float(kind == "weight" and not is_matrix) + random.normal(size=sizes) * 0.3

    def part(head: int, kind: str) -> Rule:
        start = head * HEAD_WIDTH + is_fused * width * "qkv".index(kind)
        return _columns(start, start + HEAD_WIDTH)

    rules: dict[str, Rule] = {
        **dict.fromkeys(("norm1", "norm2"), ops.layernorm),
        **dict.fromkeys(("q", "k", "v", "qkv", "o", "fc", "proj"), ops.linear),
        **{f"{kind}_bias": ops.bias_add for kind in ("q", "k", "v", "qkv", "o", "fc", "proj")},
        **dict.fromkeys(("add1", "add2"), ops.add),
        "scores": _scores,
        "masked": lambda scores: scores * HEAD_WIDTH**-0.5 + mask,
        "softmax": ops.softmax,
        "out": ops.matmul,
        "concat": ops.concat,
        "gelu": ops.gelu,
        "readout": lambda stream: float(stream[-1].sum()),
    }
    return _built(architecture, layers, heads, source, part, rules)


gpt2_style = partial(_over_numpy, "gpt2")
"""LayerNorm before each half, q, k and v from one fused product, GELU; called with layers and heads."""
encoder_style = partial(_over_numpy, "encoder")
"""LayerNorm after each half, separate q, k and v; every position sees all."""


# -- Timings on a device ---------------------------------------------------------------------------


def best_device() -> str:
    """Return the accelerator, if there is one that torch can use, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one CPU thread inside the `with` block: for small ops more of them only wait."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def describe_device(device: str) -> dict[str, str]:
    """Return the device and the versions that a timing on it depends on."""
    target = torch.device(device)
    facts = {"torch": torch.__version__, "float32_matmul": torch.get_float32_matmul_precision()}
    if target.type == "cuda":
        return facts | {"device": torch.cuda.get_device_name(target), "cuda": str(torch.version.cuda)}
    threads = torch.get_num_threads()
    return facts | {"device": f"cpu, {threads} thread{'s' if threads > 1 else ''}"}
