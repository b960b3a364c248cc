"""Transformers as real graphs, one node for each op and head: Llama-style, GPT-2-style, a post-norm encoder.

The Llama-style one is the paper's, over torch; the others are the theory's blueprints over numpy, with their
biases nodes of their own and small random weights: cones do not depend on width. Below them is what a timing
on a device needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


# -- Llama-style, over torch -----------------------------------------------------------------------


def llama(
    layers: int,
    heads: int,
    width: int,
    *,
    positions: int = 20,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    drawn_on: str = "cpu",
) -> Transformer:
    """Build a random transformer of `layers` × `heads` and d_model = `width`, over `positions` random tokens.

    The MLP is `inner_width(width)` wide. Weights are drawn on the CPU, so that every device gets the same
    ones, or on another device, which is faster.

    Per layer 9 parameters and M = 7H + 15 computed nodes: norm1; q, k, v; rope(q), rope(k); per head
    slice q, slice k, slice v, scores, scale and mask, softmax, times v; concat, o; add; norm2; gate, up,
    swiglu, down; add. One terminal readout ends it.
    """
    if width % (2 * heads):
        raise ValueError(
            f"width {width} does not split into {heads} heads of an even size (rope turns pairs). "
            f"Take a multiple of {2 * heads}."
        )
    size = width // heads
    inner = inner_width(width)
    generator = torch.Generator(drawn_on).manual_seed(seed)
    target = torch.device(device)

    def draw(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=drawn_on) * scale).to(target, dtype)

    def weight(rows: int, columns: int) -> Tensor:
        return draw(rows, columns, scale=columns**-0.5)

    rotate = _rope(positions, heads, size, target, dtype)
    mask = torch.full((positions, positions), -math.inf).triu(1).to(target, dtype)
    scale = size**-0.5

    def scale_and_mask(scores: Tensor) -> Tensor:
        return torch.add(mask, scores, alpha=scale)

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return functional.rms_norm(x, (width,), gain, 1e-6)

    graph = Graph()
    stream = graph.source("x", draw(positions, width, scale=1.0))
    slices = [_columns(head * size, (head + 1) * size) for head in range(heads)]
    patched: list[PatchedSite] = []
    for layer in range(1, layers + 1):
        at = f"layer{layer}"
        square, wide = (width, width), (inner, width)
        shapes = {"q": square, "k": square, "v": square, "o": square, "gate": wide, "up": wide}
        shapes["down"] = (width, inner)
        params = {
            name: graph.source(f"{at}.w_{name}", weight(*shape), param=True) for name, shape in shapes.items()
        }
        for name in ("norm1", "norm2"):
            gain = (1 + draw(width, scale=0.1).float()).to(target, dtype)
            params[name] = graph.source(f"{at}.w_{name}", gain, param=True)
        normed = graph.node(f"{at}.norm1", norm, [stream, params["norm1"]])
        q, k, v = (graph.node(f"{at}.{name}", functional.linear, [normed, params[name]]) for name in "qkv")
        q, k = graph.node(f"{at}.rope_q", rotate, [q]), graph.node(f"{at}.rope_k", rotate, [k])
        outputs = []
        for head, part in enumerate(slices):
            of = f"{at}.head{head}"
            mine = [graph.node(f"{of}.{name}", part, [site]) for name, site in (("q", q), ("k", k), ("v", v))]
            scores = graph.node(f"{of}.scores", _scores, mine[:2])
            masked = graph.node(f"{of}.masked", scale_and_mask, [scores])
            weights = graph.node(f"{of}.softmax", _softmax, [masked])
            outputs.append(graph.node(f"{of}.out", torch.matmul, [weights, mine[2]]))
        joined = graph.node(f"{at}.concat", _concat, outputs)
        attended = graph.node(f"{at}.o", functional.linear, [joined, params["o"]])
        stream = graph.node(f"{at}.add1", torch.add, [stream, attended])
        normed = graph.node(f"{at}.norm2", norm, [stream, params["norm2"]])
        gate, up = (
            graph.node(f"{at}.{name}", functional.linear, [normed, params[name]]) for name in ("gate", "up")
        )
        acted = graph.node(f"{at}.swiglu", _swiglu, [gate, up])
        down = graph.node(f"{at}.down", functional.linear, [acted, params["down"]])
        stream = graph.node(f"{at}.add2", torch.add, [stream, down])
        patched += [PatchedSite(output, layer, "head") for output in outputs]
        patched.append(PatchedSite(down, layer, "mlp"))
    direction = graph.source("w_logit_difference", weight(2, width), param=True)
    output = graph.node("readout", _logit_difference, [stream, direction])
    return Transformer(graph, tuple(patched), output, target)


def inner_width(width: int) -> int:
    """8/3 of a model's width, rounded up to a multiple of 64 (from 64 on)."""
    inner = math.ceil(8 * width / 3)
    return inner if inner < 64 else 64 * math.ceil(inner / 64)


def _rope(
    positions: int, heads: int, size: int, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Turn each pair of a head's coordinates by an angle that grows with the position."""
    rates = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(positions)[:, None] * torch.cat([rates, rates])[None, :]
    cos = angles.cos().repeat(1, heads).to(device, dtype)
    sin = angles.sin().repeat(1, heads).to(device, dtype)
    half = size // 2

    def rope(x: Tensor) -> Tensor:
        by_head = x.view(positions, heads, size)
        turned = torch.cat([-by_head[..., half:], by_head[..., :half]], dim=-1).view_as(x)
        return x * cos + turned * sin

    return rope


def _columns(first: int, last: int) -> Callable[[Any], Any]:
    """Return the rule that takes some columns of a tensor, or of an array."""

    def columns(x: Any) -> Any:
        return x[:, first:last]

    return columns


def _scores(q: Any, k: Any) -> Any:
    return q @ k.T


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def _concat(*outputs: Tensor) -> Tensor:
    return torch.cat(outputs, dim=-1)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _logit_difference(stream: Tensor, directions: Tensor) -> Tensor:
    """The difference of two logits at the last position."""
    logits = functional.linear(stream[-1], directions)
    return logits[0] - logits[1]


# -- GPT-2-style and encoder, over numpy -----------------------------------------------------------


def gpt2_style(layers: int, heads: int, seed: int = 0) -> Transformer:
    """Build a model with LayerNorm before each half, q, k and v from one fused product, GELU."""
    return _over_numpy("gpt2", layers, heads, seed)


def encoder_style(layers: int, heads: int, seed: int = 0) -> Transformer:
    """Build a model with LayerNorm after each half, separate q, k and v; every position sees all."""
    return _over_numpy("encoder", layers, heads, seed)


POSITIONS, HEAD_WIDTH = 4, 2


def _over_numpy(architecture: Architecture, layers: int, heads: int, seed: int) -> Transformer:
    """Build a blueprint with small random weights; its sites are named `layer3.o` and `layer3.head0.out`."""
    shape, graph, random = blueprint(architecture, layers, heads), Graph(), np.random.default_rng(seed)
    width, is_causal = heads * HEAD_WIDTH, architecture == "gpt2"
    wide = {"qkv": 3 * width, "fc": 4 * width}
    mask = np.triu(np.full((POSITIONS, POSITIONS), -1e9), 1) * is_causal
    rules: dict[str, Rule] = {
        **dict.fromkeys(("norm1", "norm2"), ops.layernorm),
        **dict.fromkeys(("add1", "add2"), ops.add),
        "scores": _scores,
        "masked": lambda scores: scores * HEAD_WIDTH**-0.5 + mask,
        "softmax": ops.softmax,
        "out": ops.matmul,
        "concat": ops.concat,
        "gelu": ops.gelu,
        "readout": lambda stream: float(stream[-1].sum()),
    }
    for site, reads in shape.nodes:
        *_, of, kind = ("", *site.split("."))
        name, inputs = _named(site), [_named(read) for read in reads]
        if site == "x":
            graph.source(name, random.normal(size=(POSITIONS, width)))
        elif site in shape.params:
            sizes = [width if of.startswith("norm") else wide.get(of, width)]
            if kind == "weight" and not of.startswith("norm"):
                sizes.insert(0, wide["fc"] if of == "proj" else width)
            around = 1.0 if kind == "weight" and of.startswith("norm") else 0.0
            graph.source(name, around + random.normal(size=sizes) * 0.3, param=True)
        elif ".heads." in site and kind in "qkv":
            start = int(of) * HEAD_WIDTH + is_causal * width * "qkv".index(kind)
            graph.node(name, _columns(start, start + HEAD_WIDTH), inputs)
        else:
            usual = ops.bias_add if kind.endswith("_bias") else ops.linear
            graph.node(name, rules.get(kind, usual), inputs)
    patched = (PatchedSite(_named(site), layer, kind) for site, layer, kind in shape.sites)
    return Transformer(graph, tuple(patched), _named(shape.readout))


def _named(site: Site) -> Site:
    return site.replace("layers.", "layer").replace(".heads.", ".head")


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
