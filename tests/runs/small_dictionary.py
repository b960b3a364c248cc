"""Small dictionaries with random weights, and the hooks that put one into a module by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]


class Autoencoder(nn.Module):
    """A sparse autoencoder; a transcoder where `d_out` is another width, or the place another."""

    def __init__(self, d: int, latents: int, seed: int = 0, d_out: int | None = None, top: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / shape[0] ** 0.5)

        self.w_enc, self.w_dec = drawn(d, latents), drawn(latents, d_out or d)
        self.b_enc, self.b_dec = drawn(latents), drawn(d_out or d)
        self.top = top

    def encode(self, value: Tensor) -> Tensor:
        latents = value @ self.w_enc + self.b_enc
        if self.top:
            kept, at = latents.topk(self.top, dim=-1)
            return torch.zeros_like(latents).scatter(-1, at, kept.relu())
        return latents.relu()

    def decode(self, latents: Tensor) -> Tensor:
        return latents @ self.w_dec + self.b_dec


@contextmanager
def by_hand(
    module: nn.Module,
    path: str,
    dictionary: Any,
    change: Change = lambda latents: latents,
    change_error: Change = lambda error: error,
    read: str = "",
) -> Iterator[None]:
    """A dictionary at the output of the module at `path`, as one writes it with a hook.

    It reads what goes into the module at `read`, if that is given.
    """
    seen: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])

    def leave(_: nn.Module, __: Any, out: Any) -> Any:
        value = out[0] if isinstance(out, tuple) else out
        latents = dictionary.encode(seen.pop() if read else value)
        error = value - dictionary.decode(latents)
        new = dictionary.decode(change(latents.clone())) + change_error(error.clone())
        return (new, *out[1:]) if isinstance(out, tuple) else new

    handles = [module.get_submodule(path).register_forward_hook(leave)]
    if read:
        handles.append(module.get_submodule(read).register_forward_pre_hook(enter))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
