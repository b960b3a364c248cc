"""A sweep as people write it by hand: full forwards with hooks, one site at a time or many in a batch."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import torch

import conewise as cw
from conewise.model import capture


class Case:
    """A model, a pair of prompts, all heads and MLPs, a logit difference."""

    def __init__(
        self,
        module: Any,
        projection: str,
        mlp: str,
        clean: torch.Tensor,
        corrupted: torch.Tensor,
        *,
        answer: int = 7,
        wrong: int = 9,
    ) -> None:
        self.device = clean.device
        self.module = module.to(self.device).eval()
        self.clean, self.corrupted = clean, corrupted
        self.answer, self.wrong = answer, wrong
        start = time.perf_counter()
        self.model = capture(self.module, input_ids=self.clean, logits_to_keep=1)
        self.capture_seconds = time.perf_counter() - start
        self.base = self.model.run(input_ids=self.corrupted)
        self.source = self.model.run(input_ids=self.clean)
        self.sites = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
        self.metric = cw.logit_diff(answer=answer, wrong=wrong)
        self.projection, self.mlp = projection, mlp
        self.layers = self.module.config.num_hidden_layers
        self.heads = self.module.config.num_attention_heads

    @cached_property
    def clean_values(self) -> dict[tuple[str, int], torch.Tensor]:
        """The values of the source that are put in, read before any hook is on the module."""
        return {(kind, at): self.source[kind, at] for kind in ("z", "mlp_out") for at in range(self.layers)}

    def sweep(self) -> cw.Sweep:
        return self.model.sweep(self.sites, base=self.base, source=self.source, metric=self.metric)

    def difference(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, self.answer] - logits[:, -1, self.wrong]

    def hooked(self, sites: list[tuple[str, int, int]], *, all_logits: bool = False) -> torch.Tensor:
        """One full forward for each site, with the last position's logits only, or as people write it."""
        wanted = {} if all_logits else {"logits_to_keep": 1}
        found = []
        for kind, layer, head in sites:
            if kind == "z":
                width = self.module.config.hidden_size // self.heads
                part = slice(head * width, (head + 1) * width)
                clean = self.clean_values["z", layer].flatten(2)

                def pre(_: Any, args: Any, part: slice = part, clean: torch.Tensor = clean) -> Any:
                    value = args[0].clone()
                    value[..., part] = clean[..., part]
                    return (value, *args[1:])

                handle = self.module.get_submodule(self.projection.format(layer)).register_forward_pre_hook(
                    pre
                )
            else:
                clean = self.clean_values["mlp_out", layer]

                def post(_: Any, __: Any, ___: Any, clean: torch.Tensor = clean) -> torch.Tensor:
                    return clean

                handle = self.module.get_submodule(self.mlp.format(layer)).register_forward_hook(post)
            with torch.no_grad():
                out = self.module(input_ids=self.corrupted, use_cache=False, **wanted).logits
            handle.remove()
            found.append(self.difference(out))
        return torch.cat(found)

    def batched(self, chunk: int | None = None) -> torch.Tensor:
        """Sites stacked by hand: full forwards of batches of up to `chunk` sites, one row for each."""
        sites = self.all_sites()
        size = chunk or len(sites)
        return torch.cat([self._stacked(sites[start : start + size]) for start in range(0, len(sites), size)])

    def _stacked(self, sites: list[tuple[str, int, int]]) -> torch.Tensor:
        width, values = self.module.config.hidden_size // self.heads, self.clean_values
        handles = []
        for layer in range(self.layers):
            heads = [(row, head) for row, (kind, at, head) in enumerate(sites) if (kind, at) == ("z", layer)]
            if heads:
                rows, picked = (
                    torch.tensor(column, device=self.device) for column in zip(*heads, strict=True)
                )
                clean = values["z", layer][0]

                def pre(_: Any, args: Any, rows: Any = rows, picked: Any = picked, clean: Any = clean) -> Any:
                    value = args[0].clone().unflatten(-1, (self.heads, width))
                    value[rows, :, picked] = clean[:, picked].transpose(0, 1)
                    return (value.flatten(-2), *args[1:])

                module = self.module.get_submodule(self.projection.format(layer))
                handles.append(module.register_forward_pre_hook(pre))
            for row, site in enumerate(sites):
                if site[:2] == ("mlp_out", layer):
                    whole = values["mlp_out", layer][0]

                    def post(_: Any, __: Any, out: Any, row: int = row, whole: Any = whole) -> Any:
                        out = out.clone()
                        out[row] = whole
                        return out

                    module = self.module.get_submodule(self.mlp.format(layer))
                    handles.append(module.register_forward_hook(post))
        ids = self.corrupted.expand(len(sites), -1)
        with torch.no_grad():
            out = self.module(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        for handle in handles:
            handle.remove()
        return self.difference(out)

    def all_sites(self) -> list[tuple[str, int, int]]:
        heads = [("z", layer, head) for layer in range(self.layers) for head in range(self.heads)]
        return heads + [("mlp_out", layer, 0) for layer in range(self.layers)]


def random_pair(vocabulary: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random prompts: clean and corrupted."""
    torch.manual_seed(1)
    clean, corrupted = torch.randint(0, vocabulary, (2, 1, length), device=device).unbind(0)
    return clean, corrupted
