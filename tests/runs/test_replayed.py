"""Runs that are replayed, over a recorder that is no GPU's: each is the eager one, in memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import conewise as cw
from conewise.errors import WeightsChangedError
from conewise.model import Model
from conewise.runs import run as replayed
from tests.program.small_llama import small_llama


class Graph:
    """Does an action again, as a graph does."""

    def __init__(self, action: Callable[[], None], count: list[int]) -> None:
        self._action, self._count = action, count
        action()

    def replay(self) -> None:
        self._count[0] += 1
        self._action()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let runs be recorded here; the number of replays is counted."""
    count = [0]
    monkeypatch.setattr(replayed, "can_be_recorded", lambda _: True)
    monkeypatch.setattr(replayed, "recorder", lambda _: lambda action: Graph(action, count))
    return count


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=32)
    make: Any = transformers.GPT2LMHeadModel
    return make(config).eval()


def models(make: Callable[[], Any]) -> tuple[Model, Model]:
    """One model whose runs are eager, and one of the same module whose runs are replayed."""
    module = make()
    eager, other = (cw.capture(module, input_ids=torch.arange(6)[None]) for _ in range(2))
    vars(eager)["_replayed_runs"] = replayed.Replays(eager.program, eager.graph)
    vars(eager)["_replayed_runs"]._are_recorded = False
    return eager, other


def computed(model: Model, ids: torch.Tensor) -> Any:
    """A run of which something was read."""
    found = model.run(input_ids=ids)
    assert found.outputs is not None
    return found


@pytest.mark.parametrize("make", [small_llama, gpt2])
def test_a_replay_is_the_eager_run_bit_for_bit_in_memory_of_its_own(
    make: Callable[[], Any], replays: list[int]
) -> None:
    eager, model = models(make)
    shapes = [(1, 5), (1, 5), (1, 5), (2, 7), (1, 5), (2, 7), (2, 7), (2, 7)]
    given = [
        torch.randint(0, 30, shape, generator=torch.Generator().manual_seed(n))
        for n, shape in enumerate(shapes)
    ]
    runs = [computed(model, ids) for ids in given]
    assert replays == [2 + 4], "one to compare of each shape, and each run from the third on"
    for run, ids in zip(runs, given, strict=True):
        expected = eager.run(input_ids=ids)
        assert torch.equal(run.outputs.logits, expected.outputs.logits)
        names = [record.name for record in model.program.records]
        for name in names:
            ours, theirs = run.world[name], expected.world[name]
            if isinstance(ours, torch.Tensor):
                assert torch.equal(ours, theirs), name
                assert ours.stride() == theirs.stride(), name
        assert run.ledger.count("recomputed") == expected.ledger.count("recomputed")
    last, before = runs[-1], runs[-2]
    own = {last.world[name].untyped_storage().data_ptr() for name in names if name.endswith("linear")}
    assert own.isdisjoint(
        {before.world[n].untyped_storage().data_ptr() for n in names if n.endswith("linear")}
    )


def test_forks_and_sweeps_of_replayed_runs_are_those_of_eager_ones(replays: list[int]) -> None:
    eager, model = models(small_llama)
    ids = [torch.randint(0, 30, (1, 6), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    runs = [computed(model, one) for one in ids]
    base, source = runs[2:]
    theirs = [eager.run(input_ids=one) for one in ids[2:]]
    sites, metric = cw.sites("z", layer=":", head=":"), cw.logit_diff(3, 5)
    ours = model.sweep(sites, base=base, source=source, metric=metric).run()
    given = [{"input_ids": one} for one in ids[2:]]
    expected = eager.sweep(sites, base=given[0], source=given[1], metric=metric).run()
    assert torch.equal(ours.values, expected.values)
    with base.fork() as world, theirs[0].fork() as other:
        for one, run in ((world, source), (other, theirs[1])):
            one.patch("resid_post.0", run["resid_post", 0])
        assert torch.equal(world.outputs.logits, other.outputs.logits)


def test_weights_that_are_written_to_are_those_of_the_next_replay(replays: list[int]) -> None:
    eager, model = models(small_llama)
    ids = torch.arange(6)[None]
    runs = [*(computed(model, ids) for _ in range(3)), model.run(input_ids=ids)]
    with torch.no_grad():
        model.module.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    for run in runs[-2:]:
        with pytest.raises(WeightsChangedError):
            run["resid_post", 1]
        with pytest.raises(WeightsChangedError):
            model.sweep("z.*", base=run, source="zero", metric=cw.logit(3)).run()
    again = computed(model, ids)
    assert replays == [3]
    assert torch.equal(again.outputs.logits, eager.run(input_ids=ids).outputs.logits)


def test_what_is_not_equal_bit_for_bit_or_cannot_be_recorded_is_computed(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = models(small_llama)
    monkeypatch.setattr(replayed, "bitwise_same", lambda *_: False)
    for _ in range(4):
        computed(model, torch.arange(6)[None])
    assert replays == [1]

    def failing(action: Callable[[], None]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    _, model = models(small_llama)
    monkeypatch.setattr(replayed, "recorder", lambda _: failing)
    for _ in range(4):
        computed(model, torch.arange(6)[None])
    assert replays == [1]


def test_a_run_is_computed_when_it_is_read_and_by_a_sweep_with_its_source(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = models(small_llama)
    ids = [torch.randint(0, 30, (1, 6), generator=torch.Generator().manual_seed(n)) for n in range(2)]
    seen: list[str] = []
    compute = replayed.computed

    def noted(*given: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return compute(*given)

    monkeypatch.setattr(replayed, "computed", noted)
    base, source = (model.run(input_ids=one) for one in ids)
    metric = cw.logit_diff(3, 5)
    first = model.sweep("z.*", base=base, source=source, metric=metric).run()
    assert not seen, "base and source are one pass of two worlds"
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert base.logits.ndim == 3
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [before], "as precise as when the run was made"
    again = model.sweep("z.*", base=base, source=source, metric=metric).run()
    assert torch.equal(first.values, again.values), "that it was read changes no rounding"
    assert replays == [0]


def test_only_programs_on_one_cuda_device_are_recorded() -> None:
    model = cw.capture(small_llama(), input_ids=torch.arange(6)[None])
    assert not replayed.can_be_recorded(model.program)
