"""Questions by hand: one prompt at a time, one forward of the module for each head, with plain hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from conewise.loading import load
from conewise.model import Model

Edit = Callable[[Tensor], Tensor]


@cache
def tiny() -> Model:
    """The tiny model, loaded once."""
    return load("tiny")


NAMES = ("Mary", "John", "Paul", "Julia", "Victor", "Lily", "Jack", "Dan", "Grace", "Ella")
TEMPLATES = (
    "When {0} and {1} went to the store, {2} gave a drink to",
    "{2} gave a letter to",
    "When {0} and {1} went to the office, {2} gave the book to {1}, and to",
)


def pairs(count: int) -> list[dict[str, Any]]:
    """Pairs of prompts of three lengths, in turn: 15, 6 and 19 tokens."""
    found = []
    for number in range(count):
        one = NAMES[number % 10]
        other = NAMES[(number + 1 + number % 7) % 10]
        made = [TEMPLATES[number % 3].format(one, other, giver) for giver in (other, one)]
        row = {"clean": made[0], "corrupted": made[1]}
        found.append({**row, "answers": [f" {one}"], "wrong_answers": [f" {other}"]})
    return found


def tokens(text: str) -> Tensor:
    """A prompt as the module takes it."""
    tokenizer: Any = tiny().tokenizer
    return torch.tensor([tokenizer(text)["input_ids"]])


def token(text: str) -> int:
    """An answer's token."""
    tokenizer: Any = tiny().tokenizer
    (number,) = tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(number)


def projections() -> list[Any]:
    """What the heads of each layer are put together by."""
    module: Any = tiny().module
    return [layer.self_attn.o_proj for layer in module.model.layers]


def logits(text: str, edits: Mapping[Any, Edit] | None = None, *, of_inputs: bool = True) -> Tensor:
    """The last position's logits, with the inputs (or outputs) of modules edited."""
    with ExitStack() as hooks, torch.no_grad():
        for module, edit in (edits or {}).items():
            if of_inputs:
                handle = module.register_forward_pre_hook(lambda _, given, edit=edit: (edit(given[0]),))
            else:
                handle = module.register_forward_hook(lambda _, __, out, edit=edit: edit(out))
            hooks.callback(handle.remove)
        found: Tensor = tiny().module(tokens(text)).logits[0, -1].double()
    return found


def heads(text: str) -> list[Tensor]:
    """What the heads of each layer put out: [1, pos, head · width]."""
    seen: dict[Any, Tensor] = {}

    def keep(module: Any) -> Edit:
        def edit(value: Tensor) -> Tensor:
            seen[module] = value.clone()
            return value

        return edit

    logits(text, {module: keep(module) for module in projections()})
    return [seen[module] for module in projections()]


def difference(found: Tensor, row: Mapping[str, Any]) -> float:
    """The answer's logit less that of the wrong answer."""
    return float(found[token(row["answers"][0])] - found[token(row["wrong_answers"][0])])


def head_effects(rows: Sequence[Mapping[str, Any]], layers: int = 4, count: int = 4) -> Tensor:
    """[layer, head, prompt]: each head of the corrupted run given its value of the clean one."""
    found = torch.zeros(layers, count, len(rows), dtype=torch.float64)
    for number, row in enumerate(rows):
        clean, base = heads(row["clean"]), difference(logits(row["corrupted"]), row)
        for layer, module in enumerate(projections()):
            width = clean[layer].shape[-1] // count
            for head in range(count):
                cut = slice(head * width, (head + 1) * width)

                def edit(value: Tensor, cut: slice = cut, layer: int = layer, clean: Any = clean) -> Tensor:
                    value = value.clone()
                    value[..., cut] = clean[layer][..., cut]
                    return value

                found[layer, head, number] = difference(logits(row["corrupted"], {module: edit}), row) - base
    return found
