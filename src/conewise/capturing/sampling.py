"""Random inputs like those that a module was captured with, to check the capture on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from conewise.program.calls import Call, Signature
from conewise.program.records import Program
from conewise.structure.axes.outputs import Outputs
from conewise.threads import one_module


@dataclass(frozen=True)
class Sampler:
    """Draws calls like the captured one: other values, and other sizes where the capture allows them.

    Floats are drawn at random, token ids from the vocabulary where the module has one, an attention mask
    hides the end of some rows; other integers are drawn from the values of the example.
    """

    signature: Signature
    program: Program
    module: Any

    @property
    def batch(self) -> int:
        """The number of prompts of the captured example."""
        named = self.signature.example.leaves()[0]
        inputs = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        return Outputs(self.program).prompts(inputs)

    @property
    def length_is_fixed(self) -> bool:
        """Whether an input has positions, as token ids do, and their number cannot vary."""
        return any(
            len(i.shape) == (3 if i.dtype.is_floating_point else 2) and isinstance(i.shape[1], int)
            for i in self.program.inputs
        )

    def draw(self, seed: int, *, batch: int | None = None, length: int | None = None) -> Call:
        """A random call, with this batch and length where those may vary."""
        generator = torch.Generator().manual_seed(seed % 2**64)
        named, spec = self.signature.example.leaves()
        known = self.program.dimensions
        wanted = dict.fromkeys(known.batch, batch) | dict.fromkeys(known.positions, length)
        examples = dict(named)
        sizes, symbols = self.program.sizes, dict[str, int]()
        for symbol, (name, dim) in sizes.symbols.items():
            size = wanted.get(symbol)
            symbols[symbol] = int(examples[name].shape[dim]) if size is None else size
        shapes = {i.name: [sizes.value(n, symbols) for n in i.shape] for i in self.program.inputs}
        drawn = [
            self._drawn(name, value, shapes.get(name, list(value.shape)), generator)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in named
        ]
        args, kwargs = tree_unflatten(drawn, spec)
        return Call(args, kwargs)

    def _drawn(
        self, name: str, value: torch.Tensor, shape: list[int], generator: torch.Generator
    ) -> torch.Tensor:
        if value.is_floating_point():
            return torch.randn(shape, generator=generator).to(value)
        if name.endswith("attention_mask") and len(shape) == 2:
            return _right_padding(shape, generator).to(value)
        vocabulary = getattr(getattr(self.module, "config", None), "vocab_size", None)
        if name.endswith("input_ids") and isinstance(vocabulary, int):
            return torch.randint(0, vocabulary, shape, generator=generator).to(value)
        flat = value.reshape(-1)
        picks = torch.randint(0, len(flat), shape, generator=generator)
        return flat[picks.to(value.device)]

    def alone(self, call: Call, row: int) -> tuple[Call, int | None]:
        """One row of the batch alone, without its padding; and how many positions are left, if cut.

        The padding goes only where every input that has positions has them under one size.
        """
        length = self._real_length(call, row)
        known = self.program.dimensions
        shapes = {i.name: i.shape for i in self.program.inputs}

        def pick(name: str, value: Any) -> Any:
            for dim, size in enumerate(shapes.get(name, ())):
                if str(size) in known.batch:
                    value = value.narrow(dim, row, 1)
                if length is not None and str(size) in known.positions:
                    value = value.narrow(dim, 0, length)
            return value

        return _mapped(call, pick), length

    def _real_length(self, call: Call, row: int) -> int | None:
        masks = [v for n, v in call.leaves()[0] if n.endswith("attention_mask") and v is not None]
        if len(masks) != 1 or masks[0].ndim != 2 or len(self.program.dimensions.positions) != 1:
            return None
        return int(masks[0][row].sum())


def module_leaves(module: Any, call: Call) -> list[torch.Tensor]:
    """The tensors that the module itself returns for a call, in order."""
    with one_module(), torch.no_grad():
        return tensor_leaves(module(*call.args, **call.kwargs))


def tensor_leaves(outputs: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in order."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _right_padding(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """1 for what counts. The first half of a row always does: a row must have something to attend to."""
    rows, length = shape
    lengths = torch.randint((length + 1) // 2, length + 1, (rows, 1), generator=generator)
    return (torch.arange(length) < lengths).long()


def _mapped(call: Call, function: Callable[[str, Any], Any]) -> Call:
    named, spec = call.leaves()
    args, kwargs = tree_unflatten([function(name, value) for name, value in named], spec)
    return Call(args, kwargs)
