"""`python -m benchmarks.acdc`: ACDC, against the same algorithm one edge at a time through full forwards.

The other side is written by hand in plain PyTorch, as fast as that goes: every reader's stream is one row of
a product, norms and projections of a layer are computed for all heads at once, each with its own slice of
the weights, and only the last position's logits are computed. Both decide by the same rule in the same
order, so the logs are compared. Of the 12-layer shape the other side is timed at decisions spread over the
log, and scaled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import conewise as cw
from conewise.anatomy.edge_graph import EdgeGraph
from conewise.circuits.acdc import Search
from conewise.circuits.replaced_parts import edge_facts


class FullForward:
    """A GPT-2 or Llama with removed edges, by hand; `graph` numbers readers and writers."""

    def __init__(
        self, module: Any, graph: EdgeGraph, base: Tensor, source: Tensor, tokens: Sequence[int]
    ) -> None:
        self.module, self.graph, self.base = module, graph, base
        self.answer, self.wrong = tokens
        self.is_llama = hasattr(module, "model")
        config = module.config
        self.heads = config.num_attention_heads
        self.groups = getattr(config, "num_key_value_heads", None) or self.heads
        self.width = config.hidden_size
        self.blocks = module.model.layers if self.is_llama else module.transformer.h
        self.slots = [self._slots(block) for block in self.blocks]
        nothing = torch.zeros(len(graph.readers), len(graph.writers), device=base.device)
        self.ablated = torch.zeros(0)
        with torch.no_grad():
            self.ablated = self._run(source, nothing)[1]

    def _slots(self, block: Any) -> list[tuple[Tensor, Tensor | None]]:
        """The weights of q, k and v by head, [head, d_model, d_head], and their biases."""
        if self.is_llama:
            attention = block.self_attn
            weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            counts = [self.heads, self.groups, self.groups]
            split = [
                w.T.reshape(self.width, n, -1).permute(1, 0, 2).contiguous()
                for w, n in zip(weights, counts, strict=True)
            ]
            return [(weight, None) for weight in split]
        weight = (
            block.attn.c_attn.weight.reshape(self.width, 3, self.heads, -1).permute(1, 2, 0, 3).contiguous()
        )
        bias = block.attn.c_attn.bias.reshape(3, self.heads, 1, -1)
        return [(weight[n], bias[n]) for n in range(3)]

    @torch.no_grad()
    def metric(self, removed: Tensor) -> float:
        """The logit difference with edges [reader, writer] removed; a full forward."""
        logits = self._run(self.base, removed)[0]
        return float((logits[:, self.answer] - logits[:, self.wrong]).double().mean())

    def _run(self, ids: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
        batch, length = ids.shape
        if self.is_llama:
            first = self.module.model.embed_tokens(ids)
        else:
            body = self.module.transformer
            first = body.wte(ids) + body.wpe(torch.arange(length, device=ids.device))
        parts = first.new_zeros(len(self.graph.writers), *first.shape)
        parts[0] = first
        constant = torch.zeros_like(first)
        kept, row, written = 1 - removed, 0, 1

        def seen(count: int) -> Tensor:
            """[reader, batch, pos, d_model] of the next readers."""
            rows = slice(row, row + count)
            stream = kept[rows, :written] @ parts[:written].reshape(written, -1)
            if len(self.ablated):
                stream += removed[rows, :written] @ self.ablated[:written].reshape(written, -1)
            return stream.view(count, *first.shape) + constant

        for block, slots in zip(self.blocks, self.slots, strict=True):
            norm = block.input_layernorm if self.is_llama else block.ln_1
            made = []
            for weight, bias in slots:
                rows = norm(seen(len(weight))).reshape(len(weight), batch * length, -1)
                row += len(weight)
                made.append(torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias, rows, weight))
            q, k, v = (one.reshape(len(one), batch, length, -1).transpose(0, 1) for one in made)
            if self.is_llama:
                cos, sin = self.module.model.rotary_emb(v, torch.arange(length, device=ids.device)[None])
                q, k = apply_rotary_pos_emb(q, k, cos, sin)
                each = self.heads // self.groups
                k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
            z = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            if self.is_llama:
                out = block.self_attn.o_proj.weight.T
            else:
                out = block.attn.c_proj.weight
                constant = constant + block.attn.c_proj.bias
            rows = z.transpose(0, 1).reshape(self.heads, batch * length, -1)
            wrote = torch.bmm(rows, out.reshape(self.heads, -1, self.width))
            parts[written : written + self.heads] = wrote.view(self.heads, *first.shape)
            written += self.heads
            norm = block.post_attention_layernorm if self.is_llama else block.ln_2
            parts[written] = block.mlp(norm(seen(1)[0]))
            row, written = row + 1, written + 1
        stream = seen(1)[0, :, -1]
        norm = self.module.model.norm if self.is_llama else self.module.transformer.ln_f
        return self.module.lm_head(norm(stream)), parts


def one_at_a_time(
    forward: FullForward, threshold: float, device: torch.device
) -> tuple[list[tuple[str, bool]], int]:
    """The published algorithm through full forwards: the log, and how many forwards it took."""
    graph = forward.graph
    removed = torch.zeros(len(graph.readers), len(graph.writers), device=device)
    there = torch.arange(len(graph.writers), device=device) < torch.tensor(
        [[r.writers] for r in graph.readers], device=device
    )
    current, log, forwards = forward.metric(removed), [], 1
    for reader in reversed(range(len(graph.readers))):
        fed = list(graph.fed[reader])
        is_read = not fed or bool((there[:, fed] & (removed[:, fed] == 0)).any())
        for writer in reversed(range(graph.readers[reader].writers)):
            removed[reader, writer] = 1
            kept = False
            if is_read:
                value = forward.metric(removed)
                forwards += 1
                kept = not abs(value - current) < threshold
                if kept:
                    removed[reader, writer] = 0
                else:
                    current = value
            log.append((graph.edges[int(graph.starts[reader]) + writer], kept))
    return log, forwards


def synchronized(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sampled(
    forward: FullForward, circuit: Any, moved: Sequence[Sequence[int]], count: int, device: torch.device
) -> tuple[float, int, float]:
    """Seconds of a full forward at decisions spread over a log, how many there are, the largest deviation."""
    graph = forward.graph
    removed = torch.zeros(len(graph.readers), len(graph.writers), device=device)
    visited = []
    counts = np.array([one.writers for one in graph.readers])
    kept_edges = np.arange(len(graph.writers)) < counts[:, None]
    for at, one in enumerate(circuit.log):
        number = graph.number(one.edge)
        reader = int(graph.edge_readers[number])
        if not moved[reader] or kept_edges[:, list(moved[reader])].any():
            visited.append(at)
        if not one.kept:
            kept_edges[reader, int(graph.edge_writers[number])] = False
    wanted = set(visited[:: max(1, len(visited) // count)][:count])
    times, apart = [], 0.0
    forward.metric(removed)
    for at, one in enumerate(circuit.log):
        number = graph.number(one.edge)
        place = int(graph.edge_readers[number]), int(graph.edge_writers[number])
        if at in wanted:
            before = forward.metric(removed)
            removed[place] = 1
            start = synchronized(device)
            value = forward.metric(removed)
            times.append(synchronized(device) - start)
            removed[place] = 0
            apart = max(apart, abs(value - before - one.change))
        if not one.kept:
            removed[place] = 1
    return statistics.mean(times), len(visited), apart


def tiny(device: torch.device) -> tuple[Any, Tensor, Tensor, tuple[int, int]]:
    loaded = cw.load("tiny")
    texts = [f"When Mary and John went to the store, {who} gave a drink to" for who in ("John", "Mary")]
    clean, corrupted = loaded.tokenizer(texts, return_tensors="pt").input_ids.to(device).split(1)
    mary, john = loaded.tokenizer.convert_tokens_to_ids(["Mary", "John"])
    return loaded.module.to(device), corrupted, clean, (mary, john)


def gpt2(device: torch.device, layers: int, positions: int) -> tuple[Any, Tensor, Tensor, tuple[int, int]]:
    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(n_layer=layers)).eval().to(device)
    base, source = torch.randint(0, 50257, (2, 1, positions), device=device)
    return module, base, source, (464, 318)


def measure(name: str, case: Any, threshold: float, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    module, base_ids, source_ids, (answer, wrong) = case
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    model = cw.capture(module, input_ids=base_ids)
    base, source = model.run(input_ids=base_ids), model.run(input_ids=source_ids)
    metric = cw.logit_diff(answer=answer, wrong=wrong)
    facts = edge_facts(model)
    graph = EdgeGraph.of(facts.components)
    forward = FullForward(module, graph, base_ids, source_ids, (answer, wrong))
    options: dict[str, Any] = {"base": base, "source": source, "metric": metric, "threshold": threshold}
    ours, theirs, row = [], [], {}
    for _ in range(arguments.rounds):
        search = Search(model, **options)
        start = synchronized(device)
        circuit = search.run(max_memory=arguments.max_memory)
        ours.append(synchronized(device) - start)
        if arguments.whole or name == "tiny":
            start = synchronized(device)
            log, forwards = one_at_a_time(forward, threshold, device)
            theirs.append(synchronized(device) - start)
            assert log == [(one.edge, one.kept) for one in circuit.log], "the two decide differently"
            row |= {"logs": "equal, edge for edge", "forwards": forwards}
        else:
            each, forwards, apart = sampled(forward, circuit, graph.fed, arguments.sample, device)
            theirs.append(each * forwards)
            row |= {"sampled": arguments.sample, "largest_deviation": apart, "forwards": forwards}
    spent = search.spent
    best, other = min(ours), min(theirs)
    return {
        "case": name,
        "device": str(device),
        "edges": graph.count,
        "threshold": threshold,
        "kept": len(circuit.edges),
        **row,
        "worlds": spent.worlds,
        "stacks": spent.stacks,
        "in_vain": spent.in_vain,
        "ties": spent.ties,
        "acdc_s": round(best, 3),
        "one_at_a_time_s": round(other, 2),
        "ratio": round(other / best, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", choices=["tiny", "gpt2"], default=None, help="one of the two alone")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--positions", type=int, default=20)
    parser.add_argument("--threshold", type=float, default=None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--sample", type=int, default=40, help="full forwards timed of the 12-layer shape, each scaled"
    )
    parser.add_argument("--whole", action="store_true", help="time all forwards of the 12-layer shape")
    parser.add_argument("--max-memory", default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.case != "gpt2":
        print(json.dumps(measure("tiny", tiny(device), arguments.threshold or 0.01, arguments)), flush=True)
    if arguments.case != "tiny":
        case = gpt2(device, arguments.layers, arguments.positions)
        print(json.dumps(measure("gpt2", case, arguments.threshold or 0.02, arguments)), flush=True)


if __name__ == "__main__":
    main()
