"""Recording and replaying, over a graph that is no GPU's: what is copied, what stays, what a replay gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from conewise.sweeps.execution.cuda_graph import KERNEL_RATE, LAUNCH_SECONDS, Replayed, replay_pays


class Tape:
    """Records an action as a graph does: what it computes lies where it lay when it was recorded."""

    def __init__(self) -> None:
        self.replays = 0
        self._action: Callable[[], dict[str, Tensor]] | None = None
        self._places: dict[str, Tensor] = {}

    def of(
        self, action: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], slots: dict[str, Tensor]
    ) -> Replayed:
        def noted(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
            self._action = lambda: action(given)
            self._places = {name: torch.full_like(one, torch.nan) for name, one in action(given).items()}
            return self._places

        def record(act: Callable[[], None]) -> Tape:
            act()
            return self

        return Replayed(noted, slots, record)

    def replay(self) -> None:
        assert self._action is not None
        self.replays += 1
        for name, value in self._action().items():
            self._places[name].copy_(value)


def doubled(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"y": 2 * given["x"] + given["z"]}


def test_a_replay_computes_what_it_is_given() -> None:
    tape = Tape()
    replayed = tape.of(doubled, {"x": torch.zeros(3), "z": torch.zeros(3)})
    assert tape.replays == 0, "recording runs nothing"
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x, z = torch.randn(2, 3, generator=generator).unbind(0)
        assert torch.equal(replayed.run({"x": x, "z": z})["y"], 2 * x + z)
    assert tape.replays == 4


def test_outputs_hold_until_the_next_run() -> None:
    replayed = Tape().of(doubled, {"x": torch.zeros(2), "z": torch.zeros(2)})
    first = replayed.run({"x": torch.ones(2), "z": torch.zeros(2)})["y"]
    kept = first.clone()
    second = replayed.run({"x": torch.zeros(2), "z": torch.ones(2)})["y"]
    assert first.data_ptr() == second.data_ptr()
    assert not torch.equal(first, kept)


def test_what_lies_in_its_slot_already_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    monkeypatch.setattr(
        "conewise.sweeps.execution.cuda_graph.copy_all", lambda slots, values: copied.append(len(slots))
    )
    stays = torch.ones(2)
    replayed = Tape().of(doubled, {"x": stays, "z": torch.zeros(2)})
    stays.fill_(3)  # another graph writes there before each run
    assert replayed.run({"x": stays, "z": torch.ones(2)})["y"].tolist() == [6, 6], "z was not copied: it is 0"
    assert copied == [1]
    replayed.run({"x": stays[:2], "z": torch.ones(2)})
    replayed.run({"x": stays.clone(), "z": torch.ones(2)})
    assert copied == [1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaying_pays_where_kernels_are_shorter_than_a_launch(dtype: torch.dtype) -> None:
    flops = int(KERNEL_RATE[dtype] * LAUNCH_SECONDS) * 100
    assert replay_pays(flops // 2, 100, dtype)
    assert not replay_pays(2 * flops, 100, dtype)
    assert replay_pays(2 * flops, 400, dtype)
