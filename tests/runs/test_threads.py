"""Threads: one at a time has a model, a second one gets a BusyError; several models work side by side."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from conewise.errors import BusyError
from conewise.model import Model

METRIC = cw.logit_diff(answer=3, wrong=5)
HEADS = cw.sites("z", layer=":", head=":")


def small_module() -> Any:
    torch.manual_seed(0)
    kind: Any = GPT2LMHeadModel
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return kind(config).eval()


def ids(seed: int) -> Tensor:
    return torch.randint(0, 31, (2, 5), generator=torch.Generator().manual_seed(seed))


def jobs(model: Model) -> dict[str, Callable[[], Tensor]]:
    """Public calls on a model and on what was made of it, each with a number that it returns."""
    base, source = model.run(input_ids=ids(1)), model.run(input_ids=ids(2))
    asked: Any = {"base": base, "source": source, "metric": METRIC}
    sweep = model.sweep(HEADS, **asked)
    result = sweep.run()
    circuit = model.sweep(model.edges(), **{**asked, "source": "zero"}).run().circuit(top=5)
    world = base.fork()
    world.patch(("z", 1), source)
    _ = world.logits

    def fork() -> Tensor:
        with base.fork() as fork:
            fork.patch(("z", 1), source)
            logits: Tensor = fork.logits
            return logits

    return {
        "run": lambda: model.run(input_ids=ids(3)).logits,
        "read": lambda: base["mlp_out", 0],
        "outputs": lambda: base.outputs.logits,
        "logits": lambda: base.logits,
        "fork": fork,
        "world": lambda: world.logits,
        "gradients": lambda: base.gradients(METRIC, cw.sites("z", layer=0))["z", 0],
        "sweep": lambda: model.sweep(HEADS, **{**asked, "base": {"input_ids": ids(1)}}).run().per_prompt,
        "sweep.run": lambda: sweep.run().per_prompt,
        "serial": lambda: sweep.run(evaluator="serial").per_prompt,
        "sweep.plan": lambda: torch.tensor(sweep.plan().flops),
        "edges": lambda: model.sweep(model.edges(), **{**asked, "source": "zero"}).run().per_prompt,
        "result.verify": lambda: torch.tensor(float(str(result.verify(n=3)) != "")),
        "model.verify": lambda: torch.tensor(float(str(model.verify(n=1)) != "")),
        "generate": lambda: model.generate(ids(1)[:1], 2, [(("mlp_out", 0), "zero")]).ids,
        "attribution": lambda: model.attribute(HEADS, **asked).run().per_prompt,
        "acdc": lambda: torch.tensor(len(model.find_circuit(**asked, threshold=0.05).run().edges)),
        "circuit.evaluate": lambda: torch.tensor(circuit.evaluate(**asked).faithfulness).double(),
    }


@pytest.mark.filterwarnings("ignore::conewise.errors.UnhookedWarning")
def test_a_second_thread_gets_a_busy_error_from_every_call_at_once() -> None:
    model = cw.capture(small_module(), input_ids=ids(1))
    calls = jobs(model)
    right = {name: call() for name, call in calls.items()}
    is_under_way, may_end = threading.Event(), threading.Event()

    def waiting(outputs: Any) -> Tensor:
        is_under_way.set()
        assert may_end.wait(60)
        value: Tensor = outputs.logits[:, -1, 3] - outputs.logits[:, -1, 5]
        return value

    sweep = model.sweep(HEADS, base=model.run(input_ids=ids(1)), source="zero", metric=waiting)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sweep.run)
        try:
            assert is_under_way.wait(60)
            for call in calls.values():
                with pytest.raises(BusyError, match="another thread uses the same model"):
                    call()
            with pytest.raises(BusyError, match=r"Sweep\.run was called"):
                asyncio.run(asyncio.to_thread(calls["sweep.run"]))
            other = cw.capture(small_module(), input_ids=ids(1))  # another model is another matter
            assert torch.equal(other.run(input_ids=ids(3)).logits, right["run"])
        finally:
            may_end.set()
        assert torch.equal(first.result().per_prompt, sweep.run().per_prompt)
    for name, call in calls.items():
        assert torch.equal(call(), right[name]), name


def test_after_an_error_another_thread_can_use_the_model() -> None:
    model = cw.capture(small_module(), input_ids=ids(1))
    base = model.run(input_ids=ids(1))

    def broken(outputs: Any) -> Tensor:
        raise RuntimeError("no such metric")

    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(model.sweep(HEADS, base=base, source="zero", metric=broken).run)
        assert isinstance(failed.exception(), Exception)
    assert torch.equal(base.logits, model.run(input_ids=ids(1)).logits)


@pytest.mark.parametrize("evaluator", ["wavefront", "serial"])
def test_a_metric_and_an_intervention_may_use_the_model_that_they_are_asked_of(evaluator: str) -> None:
    model = cw.capture(small_module(), input_ids=ids(1))
    base = model.run(input_ids=ids(1))
    inner = model.sweep(HEADS, base=base, source="zero", metric=METRIC)
    expected = inner.run().per_prompt

    def half(present: Tensor) -> Tensor:
        assert torch.equal(inner.run().per_prompt, expected)
        return present / 2

    def third(outputs: Any) -> Tensor:
        value: Tensor = outputs.logits[:, -1, 3]
        return value

    def third_beside(outputs: Any) -> Tensor:
        assert torch.equal(model.run(input_ids=ids(1))["z", 1], base["z", 1])
        return third(outputs)

    using = model.sweep(HEADS, base=base, source=half, metric=third_beside)
    plain = model.sweep(HEADS, base=base, source=lambda value: value / 2, metric=third)
    assert torch.equal(using.run(evaluator=evaluator).per_prompt, plain.run(evaluator=evaluator).per_prompt)


def test_hooks_of_a_check_do_not_act_in_other_threads_that_run_the_module() -> None:
    module = small_module()
    model = cw.capture(module, input_ids=ids(1))
    with torch.no_grad():
        expected = module(input_ids=ids(3)).logits
    seen = []

    def zero(present: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(module, input_ids=ids(3)).result().logits)
        return torch.zeros_like(present)

    result = model.sweep(
        cw.sites("mlp_out", layer=":"), base=model.run(input_ids=ids(1)), source=zero, metric=METRIC
    ).run()
    seen.clear()
    result.verify(n=2)
    model.generate(ids(1)[:1], 2, [(("mlp_out", 0), zero)])
    assert len(seen) >= 4
    assert all(torch.equal(one, expected) for one in seen)


@pytest.mark.filterwarnings("ignore::conewise.errors.UnhookedWarning")
def test_threads_with_captures_of_their_own_of_one_module_get_right_numbers() -> None:
    module = small_module()
    models = [cw.capture(module, input_ids=ids(1)) for _ in range(2)]
    calls = [jobs(model) for model in models]
    right = {name: call() for name, call in calls[0].items()}

    def work(number: int) -> list[str]:
        draw, wrong = random.Random(number), []
        for _ in range(12):
            name = draw.choice([*right])
            if not torch.equal(calls[number][name](), right[name]):
                wrong.append(name)
        cw.capture(module, input_ids=ids(1))  # while the other is at work
        return wrong

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[], []]


class Waiting(torch.nn.Module):
    """A linear layer; `meanwhile` is called in another thread while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        if not MEANWHILE.empty():
            MEANWHILE.get()()
        made: Tensor = self.inner(given)
        return made


# No list: what a module reads in the containers of its own file counts as a setting of it.
MEANWHILE: SimpleQueue[Callable[[], object]] = SimpleQueue()


def in_another_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def test_verify_counts_the_calls_of_its_own_thread_alone() -> None:
    waiting = Waiting()
    module = torch.nn.Sequential(waiting, torch.nn.ReLU())
    model, given = cw.capture(module, torch.ones(2, 4)), torch.ones(3, 4)
    MEANWHILE.put(lambda: in_another_thread(lambda: waiting.inner(given)))
    found = model.verify(n=1)
    assert MEANWHILE.empty()
    assert found.ok, str(found)


@pytest.mark.parametrize("reads", [None, "0"])
def test_a_dictionary_s_hooks_count_and_read_in_their_own_thread(reads: str | None) -> None:
    module = torch.nn.Sequential(torch.nn.Tanh(), Waiting(), torch.nn.Sigmoid())
    encode, decode = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    spliced = cw.capture(module, torch.ones(2, 4)).splice("2", encode=encode, decode=decode, reads=reads)
    given, other = torch.rand(2, 4), torch.rand(2, 4)
    encoded: list[Tensor] = []
    encode.register_forward_pre_hook(lambda _, inputs: encoded.append(inputs[0]))
    spliced.module(other)
    spliced.module(given)
    expected = torch.stack(encoded)
    encoded.clear()
    MEANWHILE.put(lambda: in_another_thread(lambda: spliced.module(other)))
    spliced.module(given)
    assert torch.equal(torch.stack(encoded), expected)
