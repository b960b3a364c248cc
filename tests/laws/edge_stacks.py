"""Stacks of layers with readers and writers, as graphs of numbers; the ledger's bill of all their edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import conewise as cw
from conewise.paper import theory
from tests.laws.cost_scenes import bill
from tests.laws.scenes import Mix, fresh_value


@dataclass(frozen=True)
class EdgeStack:
    """A uniform stack: how long the chains are that make queries, keys, values, MLPs and logits.

    `norm` nodes are shared by queries, keys and values; `before` nodes come before the first layer, `end`
    ones behind what the logits' product reads; each layer has `aside` nodes that do not read the stream.
    """

    layers: int
    heads: int
    kv_heads: int
    mlp: bool
    parallel: bool
    chains: tuple[int, int, int, int, int]
    norm: int
    before: int
    end: int
    aside: int

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of the closed forms."""
        return {
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "mlp": self.mlp,
            "parallel": self.parallel,
        }

    def graph(self) -> tuple[cw.Graph, list[theory.ReaderAt], str]:
        """The graph, its readers, and what is demanded; the writers are counted as they write."""
        graph, written = cw.Graph(), 1
        position = graph.source("position", 7)
        stream = _chain(graph, "embed", graph.source("x", 1), self.before)
        readers: list[theory.ReaderAt] = []
        for layer in range(self.layers):
            at, entry = f"{layer}.", stream
            normed = _chain(graph, f"{at}norm", entry, self.norm)
            places = [
                _chain(graph, f"{at}{slot}", normed, length)
                for slot, length in zip("qkv", self.chains[:3], strict=True)
            ]
            readers += [
                theory.ReaderAt(entry, place, written, parts)
                for place, parts in zip(places, (self.heads, self.kv_heads, self.kv_heads), strict=True)
            ]
            aside = _chain(graph, f"{at}aside", position, self.aside)
            z = graph.node(f"{at}z", Mix(), [*places, aside])
            stream = graph.node(f"{at}sum1", Mix(), [stream, z])
            if self.mlp:
                reads = entry if self.parallel else stream
                term = _chain(graph, f"{at}mlp", reads, self.chains[3])
                readers.append(
                    theory.ReaderAt(reads, term, written if self.parallel else written + self.heads)
                )
                stream = graph.node(f"{at}sum2", Mix(), [stream, term])
            written += self.heads + self.mlp
        place = _chain(graph, "final", stream, self.chains[4])
        readers.append(theory.ReaderAt(stream, place, written))
        return graph, readers, _chain(graph, "logits", place, self.end)

    def closed_form(self) -> theory.EdgeCost:
        """The closed form, in numbers that are read off the description and not off the graph."""
        q, k, v, mlp, final = self.chains
        tail = final + self.end
        last = 2 + (mlp + 1 if self.mlp else 0)  # z, sum1; the MLP and its sum, which behind z all change
        if self.parallel:
            last = 2 + 1
        between: dict[str, int] = {
            "q": self.norm + q,
            "k": self.norm + k,
            "v": self.norm + v,
            **({"mlp": mlp} if self.mlp else {}),
            "logits": final,
        }
        below: dict[str, int] = {
            "q": last + tail,
            "k": last + tail,
            "v": last + tail,
            **({"mlp": 1 + tail} if self.mlp else {}),
            "logits": self.end,
        }
        full = self.before + self.layers * (self.layer + self.aside) + tail
        return theory.stack_edge_cost(**self.shape, between=between, below=below, layer=self.layer, full=full)

    @property
    def layer(self) -> int:
        """What a layer adds to a cone."""
        *attention, mlp, _ = self.chains
        return self.norm + sum(attention) + 2 + (mlp + 1 if self.mlp else 0)

    @property
    def limit(self) -> Any:
        """What the ratio tends to as layers are added."""
        return theory.edge_limit(self.layer, self.layer + self.aside)


def bills(stack: EdgeStack) -> Iterator[tuple[int, list[int]]]:
    """For each reader and writer: what the reader computes of another stream, and then each of its parts."""
    graph, readers, output = stack.graph()
    base = cw.World(graph)
    bill(base, [output])
    for reader in readers:
        for _ in range(reader.writers):
            with base.fork() as fork:
                fork.patch(reader.entry, fresh_value())
                own = bill(fork, [reader.site])
            behind = []
            for _ in range(reader.parts):
                with base.fork() as fork:
                    fork.patch(reader.site, fresh_value())
                    behind.append(int(bill(fork, [output])))
            yield int(own), behind


def _chain(graph: cw.Graph, name: str, reads: str, length: int) -> str:
    for step in range(length):
        reads = graph.node(f"{name}.{step}", Mix(), [reads])
    return reads


@st.composite
def edge_stacks(draw: st.DrawFn) -> EdgeStack:
    """Stacks small enough to be swept edge by edge."""
    kv_heads = draw(st.integers(1, 2))
    mlp = draw(st.booleans())
    lengths = st.integers(1, 3)
    return EdgeStack(
        layers=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        mlp=mlp,
        parallel=mlp and draw(st.booleans()),
        chains=(draw(lengths), draw(lengths), draw(lengths), draw(lengths), draw(lengths)),
        norm=draw(st.integers(0, 2)),
        before=draw(st.integers(0, 2)),
        end=draw(st.integers(1, 2)),
        aside=draw(st.integers(0, 2)),
    )
