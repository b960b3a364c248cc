"""What a metric reads is watched: the last position alone, or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from conewise.compat.patching_result import LastPosition, ReadsMoreError, reads_only_last

LOGITS = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "metric",
    [
        lambda x: x[:, -1, 3].mean(),
        lambda x: x[:, -1].log_softmax(-1)[0, 2],
        lambda x: x[..., -1, :].sum(),
        lambda x: x[0, 3, 5],
        lambda x: x[:, -1:].sum(),
        lambda x: x[:, 3:, 2].sum(),
        lambda x: x[torch.arange(2), -1, torch.tensor([3, 4])].mean(),
        lambda x: x[torch.arange(2), torch.tensor([3, -1])].mean(),
        lambda x: (x[:, -1, :] if len(x.shape) == 3 else x).gather(1, torch.tensor([[1], [2]])).mean(),
        lambda x: x.float().to("cpu").detach()[:, -1].sum(),
        lambda x: x.log_softmax(dim=-1)[:, -1, 4].mean(),
        lambda x: functional.softmax(x, dim=-1)[:, -1, 4].mean(),
        lambda x: torch.log_softmax(x, -1)[:, -1, 4].mean(),
        lambda x: x[:, x.size(1) - 1].sum() / len(x) + x.ndim + x.shape[2],
        lambda x: 1.0,
    ],
)
def test_a_metric_of_the_last_position_is_seen_as_one_and_has_the_same_value(
    metric: Callable[[Tensor], Any],
) -> None:
    assert reads_only_last(metric, LOGITS)
    watched = metric(LastPosition.of(LOGITS[:, -1], 4))
    assert type(watched) is not LastPosition
    torch.testing.assert_close(torch.as_tensor(watched), torch.as_tensor(metric(LOGITS)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "metric",
    [
        lambda x: x.mean(),
        lambda x: x[0].sum(),
        lambda x: x[:, 2].sum(),
        lambda x: x[:, -2:].sum(),
        lambda x: x[:, :, 3].sum(),
        lambda x: x[..., 3].sum(),
        lambda x: x[x > 0].sum(),
        lambda x: x[:, torch.tensor([0, 3])].sum(),
        lambda x: x[:, [True, False, False, True]].sum(),
        lambda x: x[:, None, -1].sum(),
        lambda x: x.softmax(1)[:, -1].sum(),
        lambda x: x.softmax(dim=1)[:, -1].sum(),
        lambda x: (x - 1)[:, -1].sum(),
        lambda x: torch.cat([x, x])[:, -1].sum(),
        lambda x: torch.zeros(2, 4, 9) + x,
        lambda x: x.mT,
        lambda x: x.tolist()[0][-1][0],
        lambda x: x.permute(1, 0, 2)[-1].sum(),
        list,
        lambda x: functional.cross_entropy(x.flatten(0, 1), torch.zeros(8).long()),
        lambda x: x.numpy(),
        lambda x: x.data[:, 0],
    ],
)
def test_a_metric_that_reads_more_is_seen_to(metric: Callable[[Tensor], Any]) -> None:
    assert not reads_only_last(metric, LOGITS)


def test_reading_more_later_raises() -> None:
    with pytest.raises(ReadsMoreError):
        LastPosition.of(LOGITS[:, -1], 4)[:, 0]
