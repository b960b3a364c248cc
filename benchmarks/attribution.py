"""`python -m benchmarks.attribution`: effects by gradients, against the module's own forwards and backwards.

The shape of GPT-2 small, random weights, one pair of prompts of 20 tokens. Rows:

- `atp`: all heads and MLPs (156 sites), both baselines included, against two forwards and one backward of the
  module with hooks that keep what AtP needs;
- `eap`: all 32,491 edges, both baselines included, against the same two forwards and one backward;
- `check`: `check(top=50, sample=200)` on edges, against 250 hooked forwards (a stated number is timed and
  scaled).

Answers are compared: AtP with the module's own gradients, the checked cells with hooked forwards.
"""

from __future__ import annotations

import argparse
import json
import sys
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


def measured(device: str, rounds: int, forwards: int) -> list[Line]:
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

    atp = cw.attribution(model, sites, **asked)
    torch.testing.assert_close(atp.effect.float(), hand.values().cpu(), rtol=1e-3, atol=1e-4)
    edges = model.edges()
    ours, eap, plain = interleaved(
        synced(lambda: cw.attribution(model, sites, **asked)),
        synced(lambda: cw.attribution(model, edges, **asked, method="eap")),
        synced(hand.values),
        rounds=rounds,
    )
    found = cw.attribution(model, edges, **asked, method="eap")
    found.check(top=50, sample=200)
    checked = min(seconds(lambda: found.check(top=50, sample=200)) for _ in range(2))
    check = found.check(top=50, sample=200)
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
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    lines = measured(given.device, given.rounds, given.forwards)
    if given.json:
        json.dump([vars(line) if hasattr(line, "__dict__") else str(line) for line in lines], sys.stdout)
    else:
        print_table(f"Attribution on {given.device}", lines)


if __name__ == "__main__":
    main()
