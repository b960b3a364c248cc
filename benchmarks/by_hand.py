"""A sweep over prompts as one writes it by hand with hooks: sites stacked into batches, or one at a time.

It is as fast as plain hooks allow: source and base are run together, indices stand on the device before
anything is timed, hooks write in place, and only the last position's logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Site = tuple[str, int, int]
"""A kind, a layer, and a head (of z) or a position (of resid_pre); 0 where the whole value is patched."""


@dataclass(frozen=True)
class Paths:
    """Where an architecture has its blocks, the projections that read z, and its MLPs."""

    block: str
    projection: str
    mlp: str


GPT2_PATHS = Paths("transformer.h.{}", "transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp")
LLAMA_PATHS = Paths("model.layers.{}", "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp")


@dataclass(frozen=True)
class Pair:
    """Base and source prompts, [prompt, position], and the two tokens whose logits are compared."""

    base: Tensor
    source: Tensor
    answer: int
    wrong: int

    def alone(self) -> list[Pair]:
        """Each prompt as a pair of its own."""
        rows = range(len(self.base))
        return [Pair(self.base[i : i + 1], self.source[i : i + 1], self.answer, self.wrong) for i in rows]


class ByHand:
    """The values of a logit difference, [site, prompt], with each of `sites` patched from the source."""

    def __init__(self, module: Any, paths: Paths, sites: list[Site]) -> None:
        self.module, self.paths, self.sites = module, paths, sites
        self.heads = module.config.num_attention_heads
        self.device = next(module.parameters()).device
        self._indices: dict[tuple[int, int], dict[tuple[str, int], tuple[Tensor, Tensor]]] = {}

    def batched(self, chunk: int) -> Callable[[Pair], Tensor]:
        """Full forwards of up to `chunk` sites, for all prompts of a pair at once."""
        parts = [(start, min(start + chunk, len(self.sites))) for start in range(0, len(self.sites), chunk)]
        for part in parts:
            self._index(part)

        def run(pair: Pair) -> Tensor:
            clean = self._clean(pair)
            return torch.cat([self._stacked(pair, part, clean) for part in parts])

        return run

    def streamed(self, chunk: int) -> Callable[[Pair], Tensor]:
        """The same, for one prompt of a pair after the other."""
        one = self.batched(chunk)
        return lambda pair: torch.cat([one(alone) for alone in pair.alone()], 1)

    def one_by_one(self, sites: list[Site]) -> Callable[[Pair], Tensor]:
        """One full forward for each of these sites."""

        def run(pair: Pair) -> Tensor:
            clean = self._clean(pair)
            found = []
            for kind, layer, part in sites:
                whole = clean[kind, layer]
                width = whole.shape[-1] // self.heads
                places = {
                    "z": (..., slice(part * width, (part + 1) * width)),
                    "resid_pre": (slice(None), part),
                }
                at = places.get(kind, ...)

                def put(value: Tensor, at: Any = at, whole: Tensor = whole) -> None:
                    value[at] = whole[at]

                found.append(self._forward(pair, pair.base, {(kind, layer): put}))
            return torch.stack(found)

        return run

    def _clean(self, pair: Pair) -> dict[tuple[str, int], Tensor]:
        """The source's values at all layers that are patched; the base is run along."""
        prompts = len(pair.source)
        found: dict[tuple[str, int], Tensor] = {}

        def keep(key: tuple[str, int]) -> Callable[[Tensor], None]:
            def put(value: Tensor) -> None:
                found[key] = value[:prompts].clone()

            return put

        self._forward(
            pair,
            torch.cat([pair.source, pair.base]),
            {(kind, layer): keep((kind, layer)) for kind, layer, _ in self.sites},
        )
        return found

    def _index(self, part: tuple[int, int]) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
        """For each value that is patched: rows, and heads or positions, of a chunk of sites."""
        if part not in self._indices:
            by_value: dict[tuple[str, int], list[tuple[int, int]]] = {}
            for row, (kind, layer, at) in enumerate(self.sites[slice(*part)]):
                by_value.setdefault((kind, layer), []).append((row, at))
            self._indices[part] = {
                key: (
                    torch.tensor([row for row, _ in places], device=self.device),
                    torch.tensor([at for _, at in places], device=self.device),
                )
                for key, places in by_value.items()
            }
        return self._indices[part]

    def _stacked(self, pair: Pair, part: tuple[int, int], clean: dict[tuple[str, int], Tensor]) -> Tensor:
        sites, prompts = part[1] - part[0], len(pair.base)
        hooks: dict[tuple[str, int], Callable[[Tensor], None]] = {}
        for key, (rows, at) in self._index(part).items():

            def put(value: Tensor, key: Any = key, rows: Tensor = rows, at: Tensor = at) -> None:
                whole, stack = clean[key], value.unflatten(0, (sites, prompts))
                if key[0] == "z":
                    by_head = whole.unflatten(-1, (self.heads, -1))[:, :, at]
                    stack.unflatten(-1, (self.heads, -1))[rows, :, :, at] = by_head.permute(2, 0, 1, 3)
                elif key[0] == "resid_pre":
                    stack[rows, :, at] = whole[:, at].transpose(0, 1)
                else:
                    stack[rows] = whole

            hooks[key] = put
        found = self._forward(pair, pair.base.repeat(sites, 1), hooks)
        return found.view(sites, prompts)

    def _forward(
        self, pair: Pair, ids: Tensor, hooks: dict[tuple[str, int], Callable[[Tensor], None]]
    ) -> Tensor:
        """The logit difference of each row, where each hook is given its value, to read or to write."""
        handles = []
        for (kind, layer), put in hooks.items():
            if kind == "mlp_out":

                def after(_: Any, __: Any, out: Tensor, put: Any = put) -> None:
                    put(out)

                module = self.module.get_submodule(self.paths.mlp.format(layer))
                handles.append(module.register_forward_hook(after))
            else:
                path = self.paths.projection if kind == "z" else self.paths.block

                def before(_: Any, args: Any, named: Any, put: Any = put) -> None:
                    put(args[0] if args else named["hidden_states"])

                module = self.module.get_submodule(path.format(layer))
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        try:
            with torch.no_grad():
                logits = self.module(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        finally:
            for handle in handles:
                handle.remove()
        return logits[:, pair.answer].double() - logits[:, pair.wrong].double()
