"""Learned gates between 0 and 1: the hard-concrete distribution (Louizos et al. 2018).

A gate has one parameter, the log-odds `log_alpha`. In training its value is random, and has a gradient:

    s = sigmoid((log u − log(1 − u) + log_alpha) / temperature)     u uniform in (0, 1)
    z = clamp(s · (high − low) + low, 0, 1)

Because low < 0 and high > 1, z is exactly 0 or exactly 1 with positive probability, so that the expected
number of gates that are not 0 (`expected_open`) can be a penalty. A trained gate is not random (`gate`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from conewise.errors import ArgumentError


@dataclass(frozen=True)
class HardConcrete:
    """A hard-concrete distribution: its temperature, and the ends to which 0 to 1 is stretched."""

    temperature: float = 2 / 3
    low: float = -0.1
    high: float = 1.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ArgumentError(f"a temperature is a number above 0, not {self.temperature}")
        if not (-math.inf < self.low < 0 and 1 < self.high < math.inf):
            raise ArgumentError(
                f"the interval is stretched to below 0 and above 1, not to {self.low} and {self.high}"
            )

    def sample(self, log_alpha: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random gate for each of `log_alpha`, with a gradient to it.

        The numbers are drawn on the generator's device, in `log_alpha`'s dtype but float32 at least, and
        moved to `log_alpha`'s device: a generator on the CPU gives the same gates on every device.
        """
        dtype = torch.promote_types(log_alpha.dtype, torch.float32)
        tiny = torch.finfo(dtype).eps
        uniform = torch.rand(log_alpha.shape, generator=generator, dtype=dtype, device=generator.device)
        uniform = uniform.clamp(tiny, 1 - tiny).to(log_alpha.device)
        soft = torch.sigmoid((uniform.logit() + log_alpha) / self.temperature)
        return self._stretched(soft).to(log_alpha.dtype)

    def gate(self, log_alpha: Tensor) -> Tensor:
        """Return each gate once it is trained: the stretched sigmoid of `log_alpha`, not random."""
        return self._stretched(torch.sigmoid(log_alpha))

    def probability_open(self, log_alpha: Tensor) -> Tensor:
        """Return the probability that a sample of each gate is not 0."""
        return torch.sigmoid(log_alpha - self.temperature * math.log(-self.low / self.high))

    def expected_open(self, log_alpha: Tensor) -> Tensor:
        """Return how many gates are not 0 in expectation: the expected L0 norm of a sample."""
        return self.probability_open(log_alpha).sum()

    def log_alpha(self, gate: float) -> float:
        """Return the parameter with which the trained gate is `gate`, a number between 0 and 1."""
        if not 0 < gate < 1:
            raise ArgumentError(f"a gate to begin with lies between 0 and 1, not at {gate}")
        soft = (gate - self.low) / (self.high - self.low)
        return math.log(soft / (1 - soft))

    def _stretched(self, soft: Tensor) -> Tensor:
        return (soft * (self.high - self.low) + self.low).clamp(0, 1)
