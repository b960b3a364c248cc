"""The gates of learned masks, against their definition and many draws."""

import math

import pytest
import torch

from conewise.errors import ArgumentError
from conewise.runs.learned import HardConcrete

GATES = HardConcrete()


def _drawn(log_alpha: float, n: int = 200_000) -> torch.Tensor:
    parameter = torch.full((n,), log_alpha, dtype=torch.float64)
    return GATES.sample(parameter, torch.Generator().manual_seed(0))


def test_a_sample_is_closed_and_open_as_often_as_the_distribution_says() -> None:
    for log_alpha in (-3.0, -0.5, 0.0, 2.0):
        drawn = _drawn(log_alpha)
        is_open = GATES.probability_open(torch.tensor(log_alpha, dtype=torch.float64)).item()
        assert abs((drawn > 0).double().mean().item() - is_open) < 0.005
        # P(z = 1): the stretched sigmoid is 1 or more, so s >= (1 - low) / (high - low).
        least = (1 - GATES.low) / (GATES.high - GATES.low)
        wholly = 1 / (1 + math.exp(GATES.temperature * math.log(least / (1 - least)) - log_alpha))
        assert abs((drawn == 1).double().mean().item() - wholly) < 0.005


def test_the_gradient_of_the_mean_sample_is_that_of_its_finite_difference() -> None:
    parameter = torch.full((100_000,), 0.3, dtype=torch.float64, requires_grad=True)
    GATES.sample(parameter, torch.Generator().manual_seed(0)).mean().backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None
    step = 1e-4
    slope = (_drawn(0.3 + step, 100_000).mean() - _drawn(0.3 - step, 100_000).mean()) / (2 * step)
    assert abs(parameter.grad.sum().item() - slope.item()) < 1e-3


def test_equal_seeds_give_equal_gates_and_half_precision_rounds_them() -> None:
    parameter = torch.randn(50, generator=torch.Generator().manual_seed(1))
    first, second = (GATES.sample(parameter, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    half = GATES.sample(parameter.bfloat16(), torch.Generator().manual_seed(7))
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), first, atol=0.02)


def test_a_trained_gate_is_the_stretched_sigmoid_and_begins_where_it_is_told() -> None:
    for gate in (0.01, 0.5, 0.95):
        parameter = torch.tensor(GATES.log_alpha(gate), dtype=torch.float64)
        assert GATES.gate(parameter).item() == pytest.approx(gate, abs=1e-12)
    assert GATES.gate(torch.tensor(9.0)).item() == 1.0
    assert GATES.gate(torch.tensor(-9.0)).item() == 0.0
    assert GATES.expected_open(torch.full((4,), 20.0)).item() == pytest.approx(4.0)


def test_numbers_that_make_no_distribution_are_refused() -> None:
    with pytest.raises(ArgumentError, match="temperature"):
        HardConcrete(temperature=0.0)
    with pytest.raises(ArgumentError, match="stretched"):
        HardConcrete(low=0.1)
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        GATES.log_alpha(1.0)
