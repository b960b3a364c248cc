"""`python -m benchmarks.edges`: every edge of a model, exactly, against one hooked forward for each edge.

Rows: `gpt2` (the shape of GPT-2 small: 32,491 edges), `sample` (1,000 of them, drawn uniformly), `smollm2`
(its shape: 270 heads with grouped queries). What is timed of ours is everything after the capture: the table
of edges, planning, both baselines, all worlds; kernels were loaded by another length on both sides. Of the
hooked forwards a stated number is timed and scaled. Answers are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import conewise as cw

Tensor = torch.Tensor
LENGTH = 20


@dataclass(frozen=True)
class Block:
    """One layer, by its modules; `fused` where one projection makes queries, keys and values."""

    attn_norm: nn.Module
    projections: dict[str, nn.Module]
    mlp_norm: nn.Module
    mlp: nn.Module
    out: nn.Module
    weight: Tensor
    fused: bool


def blocks_of(module: Any) -> tuple[list[Block], nn.Module]:
    """The layers of a GPT-2 or a Llama, and the final norm."""
    if hasattr(module, "transformer"):
        layers = [
            Block(
                one.ln_1,
                dict.fromkeys("qkv", one.attn.c_attn),
                one.ln_2,
                one.mlp,
                one.attn.c_proj,
                one.attn.c_proj.weight,
                fused=True,
            )
            for one in module.transformer.h
        ]
        return layers, module.transformer.ln_f
    layers = [
        Block(
            one.input_layernorm,
            {"q": one.self_attn.q_proj, "k": one.self_attn.k_proj, "v": one.self_attn.v_proj},
            one.post_attention_layernorm,
            one.mlp,
            one.self_attn.o_proj,
            one.self_attn.o_proj.weight.T,
            fused=False,
        )
        for one in module.model.layers
    ]
    return layers, module.model.norm


class HookedEdges:
    """One full forward for each edge: its reader computes norm and projection again, of another stream."""

    def __init__(self, module: Any, base: Tensor, source: Tensor, answer: int, wrong: int) -> None:
        self.module, self.base, self.answer, self.wrong = module, base, answer, wrong
        self.blocks, self.final = blocks_of(module)
        self.head_dim = module.config.hidden_size // module.config.num_attention_heads
        self.parts = {
            name: one - other
            for (name, one), other in zip(
                self._written(source).items(), self._written(base).values(), strict=True
            )
        }

    def values(self, edges: list[str]) -> Tensor:
        """The logit difference in the world of each edge."""
        return torch.stack([self._world(*edge.split("->")) for edge in edges])

    @torch.no_grad()
    def _written(self, ids: Tensor) -> dict[str, Tensor]:
        """What each head and each MLP wrote, and what entered."""
        seen: dict[str, Tensor] = {}
        handles = []

        def keep(name: str) -> Callable[..., None]:
            return lambda _, args, *__: seen.update({name: args[0]})

        def keep_output(name: str) -> Callable[..., None]:
            return lambda _, __, output: seen.update({name: output})

        handles.append(self.blocks[0].attn_norm.register_forward_pre_hook(keep("input")))
        for at, block in enumerate(self.blocks):
            handles.append(block.out.register_forward_pre_hook(keep(f"z{at}")))
            handles.append(block.mlp.register_forward_hook(keep_output(f"m{at}")))
        self._forward(ids)
        for handle in handles:
            handle.remove()
        found = {"input": seen["input"]}
        for at, block in enumerate(self.blocks):
            z, rows = seen[f"z{at}"], self.head_dim
            for head in range(z.shape[-1] // rows):
                own = slice(head * rows, (head + 1) * rows)
                found[f"a{at}.h{head}"] = z[..., own] @ block.weight[own]
            found[f"m{at}"] = seen[f"m{at}"]
        return found

    def _forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.module(ids, use_cache=False, logits_to_keep=1).logits
        return logits

    @torch.no_grad()
    def _world(self, writer: str, reader: str) -> Tensor:
        with self._hooked(self.parts[writer], reader):
            logits = self._forward(self.base)[0, -1]
        return logits[self.answer] - logits[self.wrong]

    @contextmanager
    def _hooked(self, more: Tensor, reader: str) -> Iterator[None]:
        stream: list[Tensor] = []
        busy: list[bool] = []

        def enter(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not busy:
                stream[:] = [args[0]]

        def again(function: Callable[[Tensor], Tensor]) -> Tensor:
            busy.append(True)
            made = function(stream[0] + more)
            busy.clear()
            return made

        if reader == "logits":
            norm, place = self.final, self.final

            def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
                return None if busy else again(self.final)
        elif reader.startswith("m"):
            block = self.blocks[int(reader[1:])]
            norm, place = block.mlp_norm, block.mlp

            def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
                return None if busy else again(lambda x: block.mlp(block.mlp_norm(x)))
        else:
            layer, rest = reader[1:].split(".")
            head, slot = int(rest.strip("hkv").split("<")[0]), rest[-2]
            block = self.blocks[int(layer)]
            norm, place = block.attn_norm, block.projections[slot]
            first = head * self.head_dim
            if block.fused:
                first += "qkv".index(slot) * self.module.config.hidden_size
            own = slice(first, first + self.head_dim)

            def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
                if busy:
                    return None
                fresh = output.clone()
                fresh[..., own] = again(lambda x: place(norm(x)))[..., own]
                return fresh

        handles = [norm.register_forward_pre_hook(enter), place.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def gpt2(device: str) -> Any:
    """The shape of GPT-2 small, random weights."""
    return GPT2LMHeadModel(GPT2Config()).eval().to(device)


def smollm2(device: str) -> Any:
    """The shape of SmolLM2-135M, random weights."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().to(device)


def synchronized(device: str, action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def measure(
    name: str,
    module: Any,
    device: str,
    *,
    hooked: int,
    to_reach: float,
    sample: int | None = None,
    length: int = LENGTH,
    precision: str | None = None,
) -> dict[str, Any]:
    """One row: ours in full and again with another pair, `hooked` forwards in turns with it, scaled."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = module.config.vocab_size

    def pair(length: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, (2, length), generator=generator)
        return ids[:1].to(device), ids[1:].to(device)

    example, _ = pair(length)
    capture, model = synchronized(device, lambda: cw.capture(module, input_ids=example, logits_to_keep=1))
    metric = cw.logit_diff(answer=5, wrong=7)

    def ours(base: Tensor, source: Tensor, chosen: Any) -> Any:
        sweep = model.sweep(
            chosen,
            base={"input_ids": base},
            source={"input_ids": source},
            metric=metric,
            precision=precision,
        )
        return sweep.run(progress=False)

    def edges() -> Any:
        whole = model.edges()
        if sample is None:
            return whole
        drawn = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1))[:sample]
        return whole[[whole.names[number] for number in sorted(drawn.tolist())]]

    warm = pair(length - 1)
    names = list(model.edges().names)[:: max(1, len(model.edges()) // 60)]
    ours(*warm, model.edges()[names])
    HookedEdges(module, *warm, 5, 7).values(names[:20])
    vars(model).pop("_edges", None)

    base, source = pair(length)
    first, result = synchronized(device, lambda: ours(base, source, edges()))
    table = edges()
    picked = torch.randperm(len(table), generator=torch.Generator().manual_seed(2))[:hooked].tolist()
    chosen = [table.names[number] for number in picked]
    by_hand = HookedEdges(module, base, source, 5, 7)
    slow, answers = synchronized(device, lambda: by_hand.values(chosen))
    deviation = float((result.values[picked].to(device) - answers.double()).abs().max())
    span = float(answers.abs().max())
    assert deviation <= 2e-3 * span if precision else deviation <= 1e-4 * span, (deviation, span)
    again = [synchronized(device, lambda: ours(*pair(length), table))[0] for _ in range(3)]
    scaled = slow / hooked * len(table)
    ratio = scaled / first
    return {
        "row": name,
        "edges": len(table),
        "first sweep, s": round(first, 3),
        "new pair, s": round(min(again), 3),
        "hooked forwards, s": round(scaled, 1),
        "of which timed": hooked,
        "ratio": round(ratio, 1),
        "to reach": to_reach,
        "verdict": "met" if ratio >= to_reach else "missed",
        "deviation": f"{deviation / span:.1e}",
        "passes": len(result.plan.chunks),
        "peak": result.ledger.peak_bytes,
        "planned": result.plan.peak_bytes,
        "phases": {phase: round(seconds, 3) for phase, seconds in result.ledger.phases.items()},
        "capture, s": round(capture, 1),
    }


def main() -> None:
    """Measure the rows that are asked for, and print each as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=["gpt2", "sample", "smollm2"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--hooked", type=int, default=None)
    asked = parser.parse_args()
    torch.manual_seed(0)
    cpu = asked.device == "cpu"
    for row in asked.rows:
        hooked = asked.hooked or (40 if cpu else 300)
        if row == "gpt2":
            found = measure(
                row, gpt2(asked.device), asked.device, hooked=hooked, to_reach=300, precision=asked.precision
            )
        elif row == "sample":
            found = measure(row, gpt2(asked.device), asked.device, hooked=hooked, to_reach=6, sample=1000)
        elif row == "smollm2":
            found = measure(
                row,
                smollm2(asked.device),
                asked.device,
                hooked=hooked,
                to_reach=200,
                length=14,
                precision=asked.precision,
            )
        else:
            sys.exit(f"no row {row!r}: there are gpt2, sample, smollm2")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
