"""How often the interval of `Statistics` holds the true mean, and how often a bootstrap's percentiles do.

`python -m benchmarks.interval_coverage` prints the table of docs/guides/questions.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from conewise.sweeps.statistics import statistics_of

Tensor = torch.Tensor
PROMPTS = (2, 3, 5, 8, 10, 30, 100)
TRIALS, RESAMPLES, AT_ONCE = 20_000, 1_000, 500


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def heavy(*shape: int) -> Tensor:
    """Student's distribution of three degrees of freedom."""
    return normal(*shape) / (normal(3, *shape).square().mean(0)).sqrt()


EFFECTS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "normal": (normal, 0.0),
    "exponential": (lambda *shape: torch.empty(shape, dtype=torch.float64).exponential_(), 1.0),
    "lognormal": (lambda *shape: normal(*shape).exp(), math.exp(0.5)),
    "heavy-tailed (t, 3)": (heavy, 0.0),
}


def percentiles(effects: Tensor) -> tuple[Tensor, Tensor]:
    """The middle 95 % of the means of prompts that are drawn with replacement."""
    prompts = effects.shape[1]
    picked = torch.randint(prompts, (RESAMPLES, prompts))
    counts = torch.zeros(RESAMPLES, prompts, dtype=torch.float64)
    counts.scatter_add_(1, picked, torch.ones_like(picked, dtype=torch.float64))
    low, high = torch.quantile(effects @ counts.T / prompts, torch.tensor([0.025, 0.975]).double(), dim=-1)
    return low, high


def main() -> None:
    """Print the shares of trials in which the interval holds the mean, by Student's t and by percentiles."""
    torch.manual_seed(0)
    print("| effects |", " | ".join(f"n = {n}" for n in PROMPTS), "|")
    for name, (draw, true) in EFFECTS.items():
        row = []
        for prompts in PROMPTS:
            held, by_percentiles = 0, 0
            for _ in range(TRIALS // AT_ONCE):
                effects = draw(AT_ONCE, prompts)
                found = statistics_of(effects, resamples=1)
                held += int(((found.low <= true) & (true <= found.high)).sum())
                low, high = percentiles(effects)
                by_percentiles += int(((low <= true) & (true <= high)).sum())
            row.append(f"{held / TRIALS:.3f} ({by_percentiles / TRIALS:.2f})")
        print(f"| {name} |", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
