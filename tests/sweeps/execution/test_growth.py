"""What a watch measures, and when it has memory given back."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conewise.sweeps.execution.growth import MARGIN, SMALL, Meter, ProcessWatch, process_meter, watching

MB = 1_000_000
PLANNED = 100 * MB


class Process:
    """A process whose blocks leave holes: `held` is what it has from the system, `live` what it uses."""

    def __init__(self, live: int = 300 * MB, highest: int = 0) -> None:
        self.live = self.held = live
        self.highest = max(highest, live)
        self.given_back = 0

    def take(self, size: int) -> None:
        """Take a block that fits no hole."""
        self.live += size
        self.held += size
        self.highest = max(self.highest, self.held)

    def free(self, size: int) -> None:
        self.live -= size

    def give_back(self) -> None:
        self.held = self.live
        self.given_back += 1

    @property
    def meter(self) -> Meter:
        return Meter(lambda: self.held, lambda: self.highest, self.give_back)


def test_holes_are_given_back_before_the_process_would_go_beyond_the_plan() -> None:
    process = Process()
    with ProcessWatch(process.meter, PLANNED) as watch:
        for _ in range(10):
            watch.room_for(60 * MB)
            process.take(60 * MB)
            process.free(60 * MB)
    assert watch.peak == 60 * MB
    assert process.given_back >= 9
    assert process.held == 300 * MB, "what is left at the end is given back"


def test_without_a_watch_the_same_grows_tenfold() -> None:
    process = Process()
    for _ in range(10):
        process.take(60 * MB)
        process.free(60 * MB)
    assert process.held == 900 * MB


def test_nothing_is_given_back_within_the_plan() -> None:
    process = Process()
    with ProcessWatch(process.meter, PLANNED) as watch:
        for size in (40, 30, 30):
            watch.room_for(size * MB)
            process.take(size * MB)
        watch.settle()
        assert process.given_back == 0
        process.free(100 * MB)
    assert watch.peak == 100 * MB


def test_blocks_that_fit_into_holes_are_looked_at_and_nothing_is_given_back() -> None:
    """What was announced is more than what the process grew by."""
    process = Process()
    with ProcessWatch(process.meter, PLANNED) as watch:
        for _ in range(20):
            watch.room_for(30 * MB)
        assert process.given_back == 0
    assert watch.peak == 0


def test_what_is_no_hole_is_not_given_back_again_and_again() -> None:
    process = Process()
    with ProcessWatch(process.meter, PLANNED) as watch:
        process.take(500 * MB)  # by someone else
        for _ in range(10):
            watch.room_for(MB)
        watch.settle()
        assert process.given_back == 1
    assert watch.peak == 500 * MB


def test_a_budget_is_kept_where_the_plan_would_allow_for_more() -> None:
    for budget, given_back in ((None, 0), (102 * MB, 1)):
        process = Process()
        with ProcessWatch(process.meter, PLANNED, budget) as watch:
            watch.room_for(50 * MB)
            process.take(50 * MB)
            process.free(50 * MB)
            watch.room_for(54 * MB)
            assert process.given_back == given_back


def test_a_process_that_went_too_far_is_settled() -> None:
    process = Process()
    with ProcessWatch(process.meter, PLANNED) as watch:
        process.take(150 * MB)
        process.free(150 * MB)
        watch.settle()
        assert (process.given_back, process.held) == (1, 300 * MB)
    assert watch.peak == 150 * MB


def test_a_broken_record_is_the_peak_and_else_the_highest_look() -> None:
    process = Process(highest=400 * MB)
    with ProcessWatch(process.meter, 0) as watch:
        process.take(250 * MB)
        process.held -= 250 * MB
    assert watch.peak == 250 * MB
    process = Process(highest=900 * MB)
    with ProcessWatch(process.meter, PLANNED) as watch:
        process.take(40 * MB)
        watch.settle()
        process.held -= 40 * MB
    assert watch.peak == 40 * MB


def test_small_work_is_measured_and_left_alone() -> None:
    process = Process()
    with ProcessWatch(process.meter, SMALL - 1) as watch:
        process.take(80 * MB)
        watch.room_for(80 * MB)
        watch.settle()
    assert process.given_back == 0
    assert watch.peak == 80 * MB


def test_a_system_that_says_nothing_measures_nothing() -> None:
    with ProcessWatch(Meter(lambda: 0, lambda: 0), PLANNED) as watch:
        watch.room_for(PLANNED)
        watch.settle()
    assert watch.peak is None


def test_a_system_that_tells_its_record_alone_measures_how_far_it_was_broken() -> None:
    process = Process()
    with ProcessWatch(Meter(lambda: process.highest, lambda: process.highest), PLANNED) as watch:
        process.take(70 * MB)
        watch.room_for(PLANNED)
    assert watch.peak == 70 * MB


SIZE = 64 << 20
GROWING = f"""
import json, time, torch
from conewise.sweeps.execution.growth import MARGIN
from conewise.sweeps.execution.growth import INTERVAL, watching
with watching([torch.device("cpu")], {SIZE}) as free:
    pass
with watching([torch.device("cpu")], {SIZE}, 4 * {SIZE}) as watch:
    block = torch.ones({SIZE} // 4)
    time.sleep(20 * INTERVAL)  # it is looked at from time to time
    del block
print(json.dumps({{"free": free.peak, "peak": watch.peak, "reserved": watch.reserved}}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_measured() -> None:
    """Another one: this one has free memory of other tests, and need not grow."""
    told = json.loads(subprocess.check_output([sys.executable, "-c", GROWING], text=True))
    assert told["free"] is None, "without a budget nothing is given back, so that growth says little"
    assert 0.9 * SIZE <= told["peak"] <= SIZE + SMALL
    assert told["reserved"] is None
    with process_meter() as meter:
        assert 0 < meter.held() <= meter.record() + SMALL


TOTAL, MIB = 1 << 30, 1 << 20
HALF = TOTAL // 2


class Gpu:
    """What `torch.cuda` says of a device, and is told of it."""

    def __init__(self) -> None:
        self.allocated, self.most, self.reserved, self.split, self.emptied = 7, 50, 20, 3, 0
        self.fraction = 0.5

    def reset_peak_memory_stats(self, _: torch.device) -> None:
        self.most = self.allocated

    def memory_stats_as_nested_dict(self, _: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.most}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.reserved}},
            "inactive_split_bytes": {"all": {"current": self.split, "peak": self.split}},
        }

    def empty_cache(self) -> None:
        self.emptied += 1

    def get_device_properties(self, _: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=TOTAL)

    def get_per_process_memory_fraction(self, _: torch.device) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, _: torch.device) -> None:
        self.fraction = fraction


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(torch, "cuda", found)
    return found


@pytest.fixture
def pieces(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The sizes of all pieces that are asked for, and what the allocator may have of the device then."""
    taken: list[tuple[int, int]] = []

    def empty(size: int, **_: Any) -> None:
        limit = round(gpu.fraction * TOTAL)
        taken.append((size, limit))
        if gpu.reserved + size > limit:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", empty)
    return taken


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator is told of its segments."""
    found: list[str] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    return found


def test_a_gpu_is_measured_by_what_tensors_take_there(gpu: Gpu, pieces: list[tuple[int, int]]) -> None:
    with watching([torch.device("cuda")], 100) as watch:
        watch.room_for(10)
        watch.settle()
        gpu.most, gpu.reserved = 19, 64
    assert (watch.peak, watch.reserved) == (12, 44)
    assert pieces == [(140, HALF)]


def test_a_graph_that_is_replayed_counts_with_what_it_took(gpu: Gpu, pieces: list[tuple[int, int]]) -> None:
    with watching([torch.device("cuda")], 10) as watch:
        watch.note(30)
        gpu.most = 19
    assert watch.peak == 30


def test_a_roomy_budget_is_taken_as_one_piece(
    gpu: Gpu, pieces: list[tuple[int, int]], told: list[str]
) -> None:
    with watching([torch.device("cuda")], 10 * MIB, budget=40 * MIB) as watch:
        watch.room_for(5 * MIB)
    assert pieces == [(14 * MIB, HALF)]
    assert told == []


def test_under_a_tight_budget_the_allocator_has_no_more(
    gpu: Gpu, pieces: list[tuple[int, int]], told: list[str]
) -> None:
    """Holes are given back where it would take more; nobody else is refused anything."""
    limit = gpu.allocated + gpu.split + 300 * MIB - MARGIN
    with watching([torch.device("cuda")], 100 * MIB, budget=300 * MIB) as watch:
        assert told == ["expandable_segments:True"]
        watch.room_for(5 * MIB)
        watch.room_for(100)
        assert pieces == [(5 * MIB, limit)], "small blocks lie elsewhere"
        assert gpu.fraction == 0.5
    assert told == ["expandable_segments:True", "expandable_segments:False", ""]


def test_a_limit_is_not_lifted_by_what_the_run_holds(
    gpu: Gpu, pieces: list[tuple[int, int]], told: list[str]
) -> None:
    with watching([torch.device("cuda")], 100 * MIB, budget=300 * MIB) as watch:
        gpu.allocated, gpu.reserved = 250 * MIB, 258 * MIB
        watch.room_for(5 * MIB)
        assert gpu.fraction == 0.5
        watch.room_for(5 * MIB)
    (_, before), (_, after) = pieces
    assert before == after < gpu.reserved + 5 * MIB


def test_what_graphs_keep_for_themselves_is_not_of_the_budget(
    gpu: Gpu, pieces: list[tuple[int, int]], told: list[str]
) -> None:
    gpu.fraction = 1.0
    with watching([torch.device("cuda")], 100 * MIB, budget=300 * MIB) as watch:
        gpu.reserved = 400 * MIB
        for _ in range(3):
            watch.room_for(5 * MIB)
    (_, before), (_, after), (_, then) = pieces
    assert after == then == before + gpu.reserved - gpu.allocated - gpu.split


@pytest.mark.parametrize("settings", ["expandable_segments:False", "backend:cudaMallocAsync"])
def test_segments_are_left_as_the_user_wants_them(
    settings: str, gpu: Gpu, pieces: list[tuple[int, int]], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings)
    with watching([torch.device("cuda")], 10 * MIB, budget=30 * MIB):
        assert told == []
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "max_split_size_mb:64")
    with watching([torch.device("cuda")], 10 * MIB, budget=30 * MIB):
        assert told == ["max_split_size_mb:64,expandable_segments:True"]
    assert told[-1] == "max_split_size_mb:64"


def test_a_gpu_gives_back_what_is_beyond_a_budget(
    gpu: Gpu, pieces: list[tuple[int, int]], told: list[str]
) -> None:
    for grown, emptied in ((60, 0), (61, 1)):
        with watching([torch.device("cuda")], 50, budget=60) as watch:
            gpu.reserved += grown
        assert (watch.reserved, gpu.emptied) == (grown, emptied)


def test_a_model_that_is_spread_is_measured_on_all_its_gpus(gpu: Gpu, pieces: list[tuple[int, int]]) -> None:
    spread = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    with watching(spread, 100) as watch:
        watch.room_for(10)
        watch.settle()
        watch.note(5)
        gpu.most, gpu.reserved = 19, 64
    assert (watch.peak, watch.reserved) == (2 * 12, 2 * 44)
    assert pieces == [], "it is not known how much will be taken where"
