"""The paper's Llama-style transformer as a graph of torch ops, one node for each op and head.

Per layer 9 parameters and M = 7H + 15 computed nodes: norm1; q, k, v; rope(q), rope(k); per head
slice q, slice k, slice v, scores, scale and mask, softmax, times v; concat, o; add; norm2; gate, up,
swiglu, down; add. One terminal readout ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from conewise.reactive.graph import Graph, Site


@dataclass(frozen=True, slots=True)
class Llama:
    """A transformer's graph, and the names of what a sweep patches and reads.

    `heads[i][h]` is the output of head h in layer i + 1, `mlps[i]` the MLP's output there.
    """

    graph: Graph
    heads: tuple[tuple[Site, ...], ...]
    mlps: tuple[Site, ...]
    output: Site
    device: torch.device

    @property
    def computed(self) -> int:
        """How many nodes one full run computes."""
        return len(self.graph) - len(self.graph.sources)

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def llama(
    layers: int,
    heads: int,
    width: int,
    *,
    positions: int = 20,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Llama:
    """A random transformer of `layers` × `heads` with d_model = `width`, over `positions` random tokens.

    The MLP is 8/3 as wide as the model, rounded up to a multiple of 64 (from 64 on). Weights are
    drawn on the CPU, so that every device gets the same ones.
    """
    if width % (2 * heads):
        raise ValueError(
            f"width {width} does not split into {heads} heads of an even size (rope turns pairs). "
            f"Take a multiple of {2 * heads}."
        )
    size = width // heads
    inner = math.ceil(8 * width / 3)
    inner = inner if inner < 64 else 64 * math.ceil(inner / 64)
    generator = torch.Generator().manual_seed(seed)
    target = torch.device(device)

    def draw(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(target, dtype)

    def weight(rows: int, columns: int) -> Tensor:
        return draw(rows, columns, scale=columns**-0.5)

    rotate = _rope(positions, heads, size, target, dtype)
    mask = torch.full((positions, positions), -math.inf).triu(1).to(target, dtype)
    scale = size**-0.5

    def scale_and_mask(scores: Tensor) -> Tensor:
        return torch.add(mask, scores, alpha=scale)

    graph = Graph()
    stream = graph.source("x", draw(positions, width, scale=1.0))
    norm = _rms_norm(width)
    slices = [_columns(head * size, (head + 1) * size) for head in range(heads)]
    head_sites, mlp_sites = [], []
    for layer in range(1, layers + 1):
        at = f"layer{layer}"
        shapes = {
            "q": (width, width),
            "k": (width, width),
            "v": (width, width),
            "o": (width, width),
            "gate": (inner, width),
            "up": (inner, width),
            "down": (width, inner),
        }
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
        head_sites.append(tuple(outputs))
        mlp_sites.append(down)
    direction = graph.source("w_readout", weight(2, width), param=True)
    output = graph.node("readout", _readout, [stream, direction])
    return Llama(graph, tuple(head_sites), tuple(mlp_sites), output, target)


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


def _rms_norm(width: int) -> Callable[[Tensor, Tensor], Tensor]:
    shape = (width,)

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return functional.rms_norm(x, shape, gain, 1e-6)

    return norm


def _columns(first: int, last: int) -> Callable[[Tensor], Tensor]:
    def columns(x: Tensor) -> Tensor:
        return x[:, first:last]

    return columns


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.T


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def _concat(*outputs: Tensor) -> Tensor:
    return torch.cat(outputs, dim=-1)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _readout(stream: Tensor, directions: Tensor) -> Tensor:
    """The difference of two logits at the last position."""
    logits = functional.linear(stream[-1], directions)
    return logits[0] - logits[1]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, a NaN in the same entry included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).contiguous().view(torch.uint8)


def best_device() -> str:
    """The accelerator, if there is one that torch can use, else the CPU."""
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
    """The device and the versions that a timing on it depends on."""
    target = torch.device(device)
    facts = {"torch": torch.__version__, "float32_matmul": torch.get_float32_matmul_precision()}
    if target.type == "cuda":
        return facts | {"device": torch.cuda.get_device_name(target), "cuda": str(torch.version.cuda)}
    threads = torch.get_num_threads()
    return facts | {"device": f"cpu, {threads} thread{'s' if threads > 1 else ''}"}
