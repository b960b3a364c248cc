"""`python -m benchmarks.attribution`: effects by gradients, against the module's own forwards and backwards.

The shape of GPT-2 small, random weights, one pair of prompts of 20 tokens. Rows:

- `atp`: all heads and MLPs (156 sites), both baselines included, against two forwards and one backward of the
  module with hooks that keep what AtP needs;
- `eap`: all 32,491 edges, both baselines included, against the same two forwards and one backward, and
  against EAP by hand in plain PyTorch, as published: two forwards and one backward of a module in which
  every head's queries, keys and values read a stream of their own, and one product for each layer;
- `check`: `check(top=50, sample=200)` on edges, against 250 hooked forwards (a stated number is timed and
  scaled).

Answers are compared: AtP with the module's own gradients, EAP with that by hand, the checked cells with
hooked forwards. Seconds are those of a clock; with --processor they are those that the process was computing,
which a busy machine changes less. Of both sides gradients by weights are never computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from benchmarks.edges import HookedEdges
from benchmarks.harness import Line, at_least, at_most, interleaved, print_table, seconds

Tensor = torch.Tensor
LENGTH, ANSWER, WRONG = 20, 3, 5


class ByHand:
    """AtP with hooks on the module: two forwards, one backward."""

    def __init__(self, module: Any, base: Tensor, source: Tensor) -> None:
        self.module, self.base, self.source = module, base, source

    def values(self) -> Tensor:
        """(source − base) · gradient of each head and each MLP, layer by layer, heads first."""
        with torch.no_grad():
            theirs, _ = self._forward(self.source)
        ours, metric = self._forward(self.base)
        gradients = torch.autograd.grad(metric, list(ours.values()))
        heads, mlps = [], []
        for (name, own), gradient in zip(ours.items(), gradients, strict=True):
            product = (theirs[name] - own.detach()) * gradient
            if name.startswith("z"):
                heads.append(product.unflatten(-1, (self.module.config.n_head, -1)).sum((0, 1, 3)))
            else:
                mlps.append(product.sum()[None])
        return torch.cat([*heads, *mlps])

    def _forward(self, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        seen: dict[str, Tensor] = {}
        handles = []
        for number, block in enumerate(self.module.transformer.h):

            def before(_: Any, args: Any, name: str = f"z{number}") -> None:
                seen[name] = args[0]

            def behind(_: Any, __: Any, out: Tensor, name: str = f"m{number}") -> None:
                seen[name] = out

            handles.append(block.attn.c_proj.register_forward_pre_hook(before))
            handles.append(block.mlp.register_forward_hook(behind))
        logits = self.module(input_ids=ids, use_cache=False).logits[0, -1]
        for handle in handles:
            handle.remove()
        return seen, logits[ANSWER] - logits[WRONG]


class EdgesByHand:
    """EAP in plain PyTorch over the module's weights: streams of their own for each head's q, k and v."""

    def __init__(self, module: Any, base: Tensor, source: Tensor) -> None:
        self.module, self.base, self.source = module, base, source
        self.heads = module.config.n_head

    def values(self) -> Tensor:
        """Every edge, reader after reader as `model.edges()` has them: q, k, v of a layer, then its MLP."""
        with torch.no_grad():
            theirs, _, _ = self._forward(self.source)
        ours, read, metric = self._forward(self.base)
        gradients = torch.autograd.grad(metric, read)
        with torch.no_grad():
            more = torch.cat([a - b for a, b in zip(theirs, ours, strict=True)])  # [writer, pos, d_model]
            found = []
            count, per_layer = 1, self.heads + 1
            for layer in range(len(self.module.transformer.h)):
                split, mlp = gradients[2 * layer], gradients[2 * layer + 1]
                found.append((split.flatten(1) @ more[:count].flatten(1).T).flatten())
                found.append(more[: count + self.heads].flatten(1) @ mlp.flatten())
                count += per_layer
            found.append(more.flatten(1) @ gradients[-1].flatten())
        return torch.cat(found)

    def _forward(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """What is written [writers, pos, d_model], what is read, the metric."""
        inner, heads = self.module.transformer, self.heads
        stream = inner.wte(ids[0]) + inner.wpe(torch.arange(ids.shape[1], device=ids.device))
        is_recorded = torch.is_grad_enabled()
        if is_recorded:
            stream = stream.detach().requires_grad_()
        written, read = [stream.detach()[None]], []
        for block in inner.h:
            split = stream.expand(3 * heads, *stream.shape)
            if is_recorded:
                split = split.clone()  # a value of its own for each reader, as hooks on split inputs have it
            read.append(split)
            normed = block.ln_1(split).view(3, heads, *stream.shape)
            weight = block.attn.c_attn.weight.view(-1, 3, heads, stream.shape[-1] // heads)
            bias = block.attn.c_attn.bias.view(3, heads, 1, -1)
            q, k, v = torch.einsum("shpd,dshe->shpe", normed, weight) + bias
            z = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            by_head = block.attn.c_proj.weight.view(heads, -1, stream.shape[-1])
            shares = torch.bmm(z, by_head)
            written.append(shares.detach())
            stream = stream + shares.sum(0) + block.attn.c_proj.bias
            own = stream.view_as(stream)
            read.append(own)
            term = block.mlp(block.ln_2(own))
            written.append(term.detach()[None])
            stream = stream + term
        own = stream.view_as(stream)
        read.append(own)
        logits = self.module.lm_head(inner.ln_f(own))[-1]
        return written, read, logits[ANSWER] - logits[WRONG]


def measured(device: str, rounds: int, forwards: int, clock: Callable[[], float]) -> list[Line]:
    """All rows on a device."""
    torch.manual_seed(0)
    module: Any = GPT2LMHeadModel(GPT2Config()).eval().to(device)
    ids = [torch.randint(0, 50_000, (1, LENGTH), device=device) for _ in range(2)]
    model = cw.capture(module, input_ids=ids[0])
    sites = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
    asked: dict[str, Any] = {
        "base": {"input_ids": ids[0]},
        "source": {"input_ids": ids[1]},
        "metric": cw.logit_diff(ANSWER, WRONG),
    }
    hand = ByHand(module, *ids)

    def synced(action: Any) -> Any:
        def run() -> Any:
            found = action()
            if device != "cpu":
                torch.cuda.synchronize()
            return found

        return run

    atp = model.attribute(sites, **asked).run()
    torch.testing.assert_close(atp.effect.float(), hand.values().cpu(), rtol=1e-3, atol=1e-4)
    by_hand = EdgesByHand(module, *ids)
    edges = model.edges()
    found = model.attribute(edges, **asked, method="eap").run()
    torch.testing.assert_close(found.effect.float(), by_hand.values().cpu(), rtol=1e-3, atol=1e-4)
    ours, eap, plain, published = interleaved(
        synced(lambda: model.attribute(sites, **asked).run()),
        synced(lambda: model.attribute(edges, **asked, method="eap").run()),
        synced(hand.values),
        synced(by_hand.values),
        rounds=rounds,
        clock=clock,
    )
    found.check(top=50, n=200)
    checked = min(seconds(lambda: found.check(top=50, n=200)) for _ in range(2))
    check = found.check(top=50, n=200)
    names = [check.names[number] for number in check.computed[:forwards]]
    hooked = HookedEdges(module, ids[0], ids[1], ANSWER, WRONG)
    with torch.no_grad():
        expected = hooked.values(names)
        one = seconds(lambda: hooked.values(names)) / len(names)
    values = check.result.values[:forwards]
    torch.testing.assert_close(values.float(), expected.float().cpu().flatten(), rtol=1e-3, atol=1e-3)
    said = f"two forwards and a backward {plain * 1e3:.0f} ms"
    return [
        at_most("atp, 156 sites", ours / plain, 1.3, f"{ours * 1e3:.0f} ms; {said}"),
        at_most(f"eap, {len(edges):,} edges", eap / plain, 1.2, f"{eap * 1e3:.0f} ms; {said}"),
        at_most("eap, against EAP by hand", eap / published, 1.2, f"by hand {published * 1e3:.0f} ms"),
        at_least(
            "check(50, 200) on edges",
            250 * one / checked,
            4,
            f"{checked:.2f} s; a hooked forward {one * 1e3:.0f} ms, {forwards} timed",
        ),
    ]


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forwards", type=int, default=20, help="hooked forwards that are timed")
    parser.add_argument("--processor", action="store_true", help="count seconds of computing")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.processor else time.perf_counter
    lines = measured(given.device, given.rounds, given.forwards, clock)
    if given.json:
        json.dump([vars(line) if hasattr(line, "__dict__") else str(line) for line in lines], sys.stdout)
    else:
        print_table(f"Attribution on {given.device}", lines)


if __name__ == "__main__":
    main()
