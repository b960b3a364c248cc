"""Models on the CPU and a CUDA device: parts on each, or all on one while there is the other."""

from __future__ import annotations

import pytest
import torch

from tests.devices import spread
from tests.devices.spread import CPU, MODELS, WAYS, Case
from tests.gpu.scenes import needs_cuda

pytestmark = needs_cuda

CUDA = torch.device("cuda", 0)


@pytest.fixture(params=[(CPU, CUDA), (CUDA, CPU)], ids=["CPU first", "CUDA first"], scope="module")
def devices(request: pytest.FixtureRequest) -> tuple[torch.device, torch.device]:
    first, second = request.param
    return first, second


@pytest.fixture(params=MODELS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WAYS, scope="module")
def case(request: pytest.FixtureRequest, name: str, devices: tuple[torch.device, torch.device]) -> Case:
    """A model that is captured once for all tests; nothing writes to its weights."""
    return Case(name, str(request.param), *devices)


@pytest.fixture(params=[("gpt2", "by accelerate"), ("llama", "by hand")], ids=lambda param: param[0])
def own_case(request: pytest.FixtureRequest) -> Case:
    """A model of one test alone."""
    name, way = request.param
    return Case(name, way, CPU, CUDA)


def test_the_graph_is_the_module(case: Case) -> None:
    spread.check_capture(case)


def test_sweeps_find_what_the_model_on_the_cpu_finds(case: Case) -> None:
    spread.check_sweep(case)


def test_memory_is_budgeted_and_measured(case: Case) -> None:
    spread.check_memory(case, is_measured=True)


def test_a_write_to_a_weight_is_noticed_on_either_device(own_case: Case) -> None:
    spread.check_writes(own_case)


def test_half_precision_is_judged_by_a_copy_that_lies_where_the_module_does(own_case: Case) -> None:
    spread.check_half_precision(own_case)


def test_what_is_for_one_device_is_refused(case: Case) -> None:
    spread.check_refusals(case)


def test_all_on_one_device_is_computed_there(name: str, devices: tuple[torch.device, torch.device]) -> None:
    spread.check_one_device(name, *devices)


def test_offloaded_weights_are_refused() -> None:
    spread.check_offloaded(CUDA)
