"""A layer of two heads and an MLP that computes OR or AND of two bits, its weights set by hand.

The input is two bits and a third position, where the answer is wanted: ids [batch, 3], the last one 2. Head 0
brings the first bit to every position, head 1 the second; the MLP makes the gate of their sum:

    OR  = relu(a + b) - relu(a + b - 1)        AND = relu(a + b - 1)

The stream's directions: the bit, whether the position is 0 and whether it is 1, a constant 1, what head 0 and
what head 1 brought, and the answer.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tests.ground_truth.stack import Outputs, Stack, of_weights

BIT, IS_0, IS_1, ONE, FIRST, SECOND, ANSWER = range(7)
WIDTH = 7
HEAD_WIDTH = 2  # of which one is used
QUERY = 2
LOOKS = 40.0  # what a score exceeds the others by: the weight of the others is exp(-40), 4e-18


@functools.cache
def gate(name: str) -> Stack:
    """The model of `"or"` or `"and"`."""
    heads = 2
    embed = torch.zeros(3, WIDTH)
    embed[1, BIT] = 1.0
    positions = torch.zeros(3, WIDTH)
    positions[0, IS_0] = positions[1, IS_1] = 1.0
    positions[:, ONE] = 1.0
    query, key, value = (torch.zeros(heads * HEAD_WIDTH, WIDTH) for _ in range(3))
    out = torch.zeros(WIDTH, heads * HEAD_WIDTH)
    for head, (place, brought) in enumerate(((IS_0, FIRST), (IS_1, SECOND))):
        row = head * HEAD_WIDTH
        query[row, ONE] = LOOKS * HEAD_WIDTH**0.5
        key[row, place] = 1.0
        value[row, BIT] = 1.0
        out[brought, row] = 1.0
    into = torch.zeros(2, WIDTH)
    into[:, FIRST] = into[:, SECOND] = 1.0
    into[1, ONE] = -1.0
    back = torch.zeros(WIDTH, 2)
    back[ANSWER] = torch.tensor({"or": [1.0, -1.0], "and": [0.0, 1.0]}[name])
    unembed = torch.zeros(1, WIDTH)
    unembed[0, ANSWER] = 1.0
    weights = {
        "embed.weight": embed,
        "positions.weight": positions,
        "layers.0.attn.query.weight": query,
        "layers.0.attn.key.weight": key,
        "layers.0.attn.value.weight": value,
        "layers.0.attn.out.weight": out,
        "layers.0.mlp.0.weight": into,
        "layers.0.mlp.2.weight": back,
        "unembed.weight": unembed,
    }
    return of_weights(weights, heads=heads, is_causal=False)


def bits(first: int, second: int) -> Tensor:
    """The input that asks for the gate of two bits."""
    return torch.tensor([[first, second, QUERY]])


def answer(outputs: Outputs) -> Tensor:
    """What is put out at the position that asks."""
    return outputs.logits[:, -1, 0]
