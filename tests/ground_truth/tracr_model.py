"""A program that tracr compiled, as a torch module: the weights and examples of a file in `tracr/`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ground_truth.stack import Outputs, of_weights

FOLDER = Path(__file__).parent / "tracr"


class Compiled:
    """What stands in the files of a program: its model, its tokens and values, and examples.

    `example_ids` [example, pos] are inputs, `example_outputs` [example, pos, value] what tracr's own model
    makes of them. `examples` has the tokens, without the one that tracr puts in front, and what the program
    makes of them: None where it leaves a position open.
    """

    def __init__(self, program: str, folder: Path = FOLDER) -> None:
        said = json.loads((folder / f"{program}.json").read_text(encoding="utf-8"))
        arrays = load_file(folder / f"{program}.safetensors")
        self.program = program
        self.numbers = {token: number for number, token in enumerate(said["vocabulary"])}
        self.values: list[Any] | None = said["values"]
        self.examples: list[tuple[list[Any], list[Any]]] = [
            (example["tokens"], example["answer"]) for example in said["examples"]
        ]
        self.example_ids = arrays.pop("examples.ids")
        self.example_outputs = arrays.pop("examples.outputs")
        self.module = of_weights(arrays, heads=said["heads"], is_causal=False)

    def ids(self, inputs: Iterable[Iterable[str | int]]) -> Tensor:
        """Inputs of one length as numbers, with tracr's first token in front."""
        return torch.tensor([[self.numbers[token] for token in ("BOS", *tokens)] for tokens in inputs])

    def decode(self, outputs: Outputs) -> list[list[Any]]:
        """What the program puts out, without the first position."""
        found = outputs.logits[:, 1:]
        if self.values is None:
            return [[number.item() for number in row] for row in found[..., 0]]
        return [[self.values[number] for number in row] for row in found.argmax(-1)]
