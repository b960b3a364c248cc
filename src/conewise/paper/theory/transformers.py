"""Transformers: the closed-form cones and ratios of three architectures, and the graphs they are of.

A layer is counted from 1. A head's site is its `·v` node, an MLP's the node whose output joins the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Literal

from conewise.errors import TheoryError
from conewise.paper import expect
from conewise.paper.expect import shown
from conewise.reactive.graph import Site

Architecture = Literal["llama", "gpt2", "encoder"]
Component = Literal["head", "mlp"]
COMPONENTS: Final[tuple[Component, ...]] = ("head", "mlp")

# One line per node of a layer: its name, then what it reads. `x` is the layer's input; a name with *
# stands once per head, and a node that stands once reads it from every head; `.weight` and `.bias`
# are parameters; the last node is the layer's output. `!head` and `!mlp` mark the two kinds of site.
_LAYERS: Final[Mapping[Architecture, str]] = MappingProxyType(
    {
        "llama": """
            norm1       x norm1.weight
            q           norm1 q.weight
            k           norm1 k.weight
            v           norm1 v.weight
            rope_q      q
            rope_k      k
            *q          rope_q
            *k          rope_k
            *v          v
            *scores     *q *k
            *masked     *scores
            *softmax    *masked
            *out!head   *softmax *v
            concat      *out
            o           concat o.weight
            add1        x o
            norm2       add1 norm2.weight
            gate        norm2 gate.weight
            up          norm2 up.weight
            swiglu      gate up
            down!mlp    swiglu down.weight
            add2        add1 down
        """,
        "gpt2": """
            norm1       x norm1.weight norm1.bias
            qkv         norm1 qkv.weight
            qkv_bias    qkv qkv.bias
            *q          qkv_bias
            *k          qkv_bias
            *v          qkv_bias
            *scores     *q *k
            *masked     *scores
            *softmax    *masked
            *out!head   *softmax *v
            concat      *out
            o           concat o.weight
            o_bias      o o.bias
            add1        x o_bias
            norm2       add1 norm2.weight norm2.bias
            fc          norm2 fc.weight
            fc_bias     fc fc.bias
            gelu        fc_bias
            proj        gelu proj.weight
            proj_bias!mlp  proj proj.bias
            add2        add1 proj_bias
        """,
        "encoder": """
            q           x q.weight
            q_bias      q q.bias
            k           x k.weight
            k_bias      k k.bias
            v           x v.weight
            v_bias      v v.bias
            *q          q_bias
            *k          k_bias
            *v          v_bias
            *scores     *q *k
            *masked     *scores
            *softmax    *masked
            *out!head   *softmax *v
            concat      *out
            o           concat o.weight
            o_bias      o o.bias
            add1        x o_bias
            norm1       add1 norm1.weight norm1.bias
            fc          norm1 fc.weight
            fc_bias     fc fc.bias
            gelu        fc_bias
            proj        gelu proj.weight
            proj_bias!mlp  proj proj.bias
            add2        norm1 proj_bias
            norm2       add2 norm2.weight norm2.bias
        """,
    }
)

# M = 7H + fixed computed nodes in a layer; below a site: its own layer's rest, and the readout.
_COUNTS: Final[Mapping[Architecture, tuple[int, dict[Component, int]]]] = MappingProxyType(
    {
        "llama": (15, {"head": 10, "mlp": 2}),
        "gpt2": (14, {"head": 12, "mlp": 2}),
        "encoder": (18, {"head": 13, "mlp": 3}),
    }
)


def transformer_cone(layers: int, heads: int, layer: int, site: Component = "head") -> int:
    """|V⁺| of a site of the paper's Llama-style transformer: 10 + (L−i)·M or 2 + (L−i)·M, M = 7H + 15.

    Computed nodes of a layer: norm1; q, k, v; rope(q), rope(k); per head slice q, k, v, scores,
    scale and mask, softmax, ·v; concat, o; add; norm2; gate, up, swiglu, down; add. Then one readout.
    """
    return _cone("llama", layers, heads, layer, site)


def transformer_nodes(layers: int, heads: int) -> int:
    """N of that transformer: L·M computed nodes and the readout."""
    return _nodes("llama", layers, heads)


def transformer_ratio(layers: int, heads: int, *, readout: bool = False) -> Fraction:
    """ρ(L, H) of a sweep over every head and every MLP of that transformer.

    (H+1)·M·L / ((H+1)·M·(L−1)/2 + 10H + 2): the paper's form, 2.145 for (12, 12) and 2.073 for (24, 16).
    It leaves the readout out of N, yet has it in every cone. With `readout`, N = L·M + 1, and the
    result equals `sweep_ratio` of the graph exactly: 2.147 and 2.074.
    """
    return _ratio("llama", layers, heads, readout)


def gpt2_cone(layers: int, heads: int, layer: int, site: Component = "head") -> int:
    """|V⁺| of a site of a GPT-2-style transformer: 12 + (L−i)·M or 2 + (L−i)·M, M = 7H + 14.

    Computed nodes of a layer: norm1; qkv (fused), qkv_bias; per head slice q, k, v, scores, scale
    and mask, softmax, ·v; concat, o, o_bias; add; norm2; fc, fc_bias, gelu, proj, proj_bias; add.
    Then one readout. The MLP's site is proj_bias.
    """
    return _cone("gpt2", layers, heads, layer, site)


def gpt2_nodes(layers: int, heads: int) -> int:
    """N of that transformer: L·M computed nodes and the readout."""
    return _nodes("gpt2", layers, heads)


def gpt2_ratio(layers: int, heads: int, *, readout: bool = False) -> Fraction:
    """ρ(L, H) of a GPT-2-style transformer; `readout` as in `transformer_ratio`."""
    return _ratio("gpt2", layers, heads, readout)


def encoder_cone(layers: int, heads: int, layer: int, site: Component = "head") -> int:
    """|V⁺| of a site of a post-norm, BERT-style encoder: 13 + (L−i)·M or 3 + (L−i)·M, M = 7H + 18.

    Computed nodes of a layer: q, q_bias, k, k_bias, v, v_bias; per head slice q, k, v, scores,
    scale and mask, softmax, ·v; concat, o, o_bias; add; norm1; fc, fc_bias, gelu, proj, proj_bias; add;
    norm2. Then one readout. The MLP's site is proj_bias.
    """
    return _cone("encoder", layers, heads, layer, site)


def encoder_nodes(layers: int, heads: int) -> int:
    """N of that encoder: L·M computed nodes and the readout."""
    return _nodes("encoder", layers, heads)


def encoder_ratio(layers: int, heads: int, *, readout: bool = False) -> Fraction:
    """ρ(L, H) of a BERT-style encoder; `readout` as in `transformer_ratio`."""
    return _ratio("encoder", layers, heads, readout)


def _cone(architecture: Architecture, layers: int, heads: int, layer: int, site: Component) -> int:
    L, H, i = *_expect_shape(layers, heads), expect.count(layer, "the layer")
    if i > L:
        raise TheoryError(f"layer {shown(i)} of {shown(L)}: layers are counted from 1 to {shown(L)}.")
    fixed, below = _COUNTS[architecture]
    return below[expect.one_of(site, COMPONENTS, "the site")] + (L - i) * (7 * H + fixed)


def _expect_shape(layers: object, heads: object) -> tuple[int, int]:
    return expect.count(layers, "the number of layers"), expect.count(heads, "the number of heads")


def _nodes(architecture: Architecture, layers: int, heads: int) -> int:
    L, H = _expect_shape(layers, heads)
    return L * (7 * H + _COUNTS[architecture][0]) + 1


def _ratio(architecture: Architecture, layers: int, heads: int, readout: bool) -> Fraction:
    L, H = _expect_shape(layers, heads)
    fixed, below = _COUNTS[architecture]
    M = 7 * H + fixed
    N = L * M + expect.flag(readout, "`readout`")
    mean_cones = Fraction((H + 1) * M * (L - 1), 2) + below["head"] * H + below["mlp"]
    return Fraction((H + 1) * N) / mean_cones


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A graph without rules: what reads what. Whoever builds it supplies the rules.

    `nodes`: (site, what it reads), inputs first, sources included (they read nothing); `params`: the
    sources that are parameters; `sites`: what is swept, as (site, layer, "head" or "mlp"); `readout`: the
    last node.
    """

    nodes: tuple[tuple[Site, tuple[Site, ...]], ...]
    params: frozenset[Site]
    sites: tuple[tuple[Site, int, Component], ...]
    readout: Site


def blueprint(architecture: Architecture, layers: int, heads: int) -> Blueprint:
    """The graph that the closed forms of an architecture are about, node for node.

    Sites are named `layers.3.o` and, per head, `layers.3.heads.0.out`; the one input is `x`. What the
    readout reads is the output of the last layer.
    """
    lines = _LAYERS[expect.one_of(architecture, tuple(_LAYERS), "the architecture")].split("\n")
    layers, heads = _expect_shape(layers, heads)
    expect.size(_nodes(architecture, layers, heads), "computed nodes")
    nodes: dict[Site, tuple[Site, ...]] = {"x": ()}
    sites: list[tuple[Site, int, Component]] = []
    params: list[Site] = []
    stream = "x"
    for layer in range(1, layers + 1):
        for line in lines:
            name, *reads = line.split() or [""]
            name, _, mark = name.partition("!")
            if not name:
                continue
            for place in _places(name, layer, heads):
                inputs = tuple(
                    source for read in reads for source in _sources(read, place, layer, heads, stream)
                )
                for param in inputs:
                    if param.endswith((".weight", ".bias")):
                        nodes[param] = ()
                        params.append(param)
                nodes[place] = inputs
                if mark:
                    sites.append((place, layer, "head" if mark == "head" else "mlp"))
        stream = next(reversed(nodes))
    nodes["readout"] = (stream,)
    return Blueprint(tuple(nodes.items()), frozenset(params), tuple(sites), "readout")


def _places(name: str, layer: int, heads: int) -> list[Site]:
    if name.startswith("*"):
        return [f"layers.{layer}.heads.{head}.{name[1:]}" for head in range(heads)]
    return [f"layers.{layer}.{name}"]


def _sources(read: str, reader: Site, layer: int, heads: int, stream: Site) -> list[Site]:
    if read == "x":
        return [stream]
    places = _places(read, layer, heads)
    head = reader.rpartition(".")[0]
    return (
        [place for place in places if place.rpartition(".")[0] == head]
        if ".heads." in head and read.startswith("*")
        else places
    )
