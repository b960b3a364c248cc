"""A model with its weights, ready to be captured; and the names of those that come with conewise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from conewise.identity.digests import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT = "smollm2-135m"
"""The embedded model, which the command line asks by default."""

TINY = "tiny"
"""The model that lies in this package, and needs nothing else."""

KNOWN = (DEFAULT, TINY)
"""The names that stand for a model before any folder or hub is looked at."""

ALIASES = {"smollm2": DEFAULT}
"""Shorter names, for where no folder or file has that name."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to be captured.

    `module` is in eval mode. `tokenizer` is None where the model has none. `source` says in words
    where the weights came from.
    """

    module: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    source: str

    def fingerprint(self) -> str:
        """A sha256 of the module's architecture and weights as they are now: `fingerprint(module)`."""
        return fingerprint(self.module)

    def __repr__(self) -> str:
        weights = sum(weight.numel() for weight in self.module.parameters())
        tokenizer = "no tokenizer" if self.tokenizer is None else "its tokenizer"
        return (
            f"Loaded {self.name}: {type(self.module).__name__} of {weights:,} weights, and {tokenizer} "
            f"({self.source})"
        )
