"""Steps of decoding that are recorded once on a CUDA device, and replayed without Python.

Every text has a row of its own then, and keys and values lie in slots that are as long as texts can become. A
step writes into the column `at` of them, and a mask hides all columns behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conewise.program.calls import forward_parameters
from conewise.program.walk import bitwise_same
from conewise.sweeps.execution.cuda_graph import Record, Replayed, replay_pays

LEAST_STEPS = 4
"""Recording a step takes as long as a few of them."""

LAUNCHES = 12
"""Kernels that the host launches for a layer, at least."""

KINDS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""The layers of caches that slots can take the place of."""


class Slots:
    """The keys and values of one layer, [row, head, column, number], in memory that stays where it is."""

    is_sliding = False
    is_compileable = False
    is_initialized = True

    def __init__(self, layer: Any, rows: Tensor | None, columns: int, length: int, at: Tensor) -> None:
        self.keys, self.values = (_slot(held, rows, columns, length) for held in (layer.keys, layer.values))
        self._at = at

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write those of the step's token, and return all."""
        self.keys.index_copy_(2, self._at, keys)
        self.values.index_copy_(2, self._at, values)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """The columns in front of the last one: what positions would be counted from, if none were given."""
        return int(self.keys.shape[2]) - 1

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """All columns, from the first one on."""
        return int(self.keys.shape[2]), 0


def _slot(held: Tensor, rows: Tensor | None, columns: int, length: int) -> Tensor:
    """Memory for so many columns; what is held stands in front of the column `length`."""
    count = len(held) if rows is None else len(rows)
    made = held.new_zeros(count, held.shape[1], columns, held.shape[3])
    made[:, :, length - held.shape[2] : length] = held if rows is None else held[rows.to(held.device)]
    return made


class SlotStep:
    """A forward for one token of each text: `mask` [text, column] says what was there before it."""

    def __init__(
        self, module: Any, cache: Any, rows: Sequence[Tensor | None], mask: Tensor, columns: int
    ) -> None:
        self.module, device, length = module, mask.device, mask.shape[1]
        self._dtype = next(held.keys.dtype for held in cache.layers)
        self.at = torch.tensor([length], device=device)
        self._cache = copy.copy(cache)
        self._cache.layers = []
        for number, index in enumerate(rows):
            self._cache.layers.append(Slots(cache.layers[number], index, columns, length, self.at))
            cache.layers[number].keys = cache.layers[number].values = (
                None  # one layer at a time is there twice
            )
        hidden = torch.full((len(mask), 1, 1, columns), torch.finfo(self._dtype).min, device=device)
        self._mask = hidden.to(self._dtype)
        self._mask[:, 0, 0, :length].masked_fill_(mask.bool(), 0)
        self._first = mask.long().sum(1, keepdim=True) - length
        self._replayed: Replayed | None = None

    def logits(self, tokens: Tensor, column: int) -> Tensor:
        """The logits of the tokens [text, 1] that stand in a column; they hold until the next step."""
        self.at.fill_(column)
        given = {"tokens": tokens, "positions": self._first + column}
        return (
            self._forward(given)["logits"] if self._replayed is None else self._replayed.run(given)["logits"]
        )

    def _forward(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._mask.index_fill_(3, self.at, 0)
        known = forward_parameters(self.module)
        more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        more |= {"cache_position": self.at} if "cache_position" in known else {}
        outputs = self.module(
            input_ids=given["tokens"],
            attention_mask=self._mask,
            position_ids=given["positions"],
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
            **more,
        )
        return {"logits": outputs.logits[:, -1].float()}

    def record(self, tokens: Tensor, column: int, record: Record) -> Tensor:
        """Compute a step, and record it; where a replay of it differs in one bit, steps are computed."""
        found = self.logits(tokens, column)
        slots = {"tokens": tokens.clone(), "positions": self._first + column}
        try:
            self._replayed = Replayed(self._forward, slots, record)
            if not bitwise_same(self.logits(tokens, column), found):
                self._replayed = None
        except Exception:  # noqa: BLE001  # whatever a device says: steps are computed as before
            self._replayed = None
        return found


def pays(module: Any, texts: int, layers: int) -> bool:
    """True if the device would wait for the host in each step."""
    weights = list(module.parameters())
    flops = 2 * texts * sum(weight.numel() for weight in weights)
    return replay_pays(flops, LAUNCHES * layers, weights[0].dtype)


def has_slots(cache: Any, columns: int) -> bool:
    """True if slots can take the place of a cache: each layer sees all of so many columns."""
    return all(
        type(layer).__name__ in KINDS and columns <= getattr(layer, "sliding_window", columns)
        for layer in cache.layers
    )


@torch.no_grad()
def is_steppable(module: Any, forward: Callable[[Tensor, Tensor, Any], Any]) -> bool:
    """True if a small forward over slots shows what one over the module's own cache does.

    `forward` takes tokens, a mask and a cache.
    """
    attention = getattr(module.config, "_attn_implementation", None)
    if "position_ids" not in forward_parameters(module) or attention not in {"eager", "sdpa"}:
        return False
    device = next(module.parameters()).device
    ids = torch.arange(10, device=device).reshape(2, 5) % 7 + 1
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    try:
        cache = forward(ids[:, :4], mask[:, :4], None).past_key_values
        if not has_slots(cache, 8):
            return False
        step = SlotStep(module, copy.deepcopy(cache), [None] * len(cache.layers), mask[:, :4], 8)
        own = forward(ids[:, 4:], mask, cache).logits[:, -1].float()
        found = step.logits(ids[:, 4:], 4)
    except Exception:  # noqa: BLE001  # of a module that takes no such mask or cache
        return False
    allowed = float(torch.finfo(step._dtype).eps) ** 0.5 * float(own.abs().max())
    return bool(own.shape == found.shape and (own - found).abs().max() <= allowed)
