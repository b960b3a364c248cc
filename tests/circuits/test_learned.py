"""Edge pruning and optimal ablation against a training in plain PyTorch, step for step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.circuits.acdc import EdgePruning
from conewise.circuits.circuit import Circuit
from conewise.errors import CircuitError, GradientError
from tests.circuits.small_models import Small, small
from tests.circuits.test_random_circuits import ANSWER, WRONG, model_of, prompts, removed_parts

STEPS, RATE, TOP = 4, 0.3, 30
CLOSE = {"gpt2": 1e-9}
"""The others compute norms, or rotary tables, in float32 whatever the model's dtype is."""

Gates = Mapping[tuple[str, str], Tensor]


class Adam:
    """Adam of one tensor, written out."""

    def __init__(self, given: Tensor, rate: float) -> None:
        self.value, self.rate = given.clone().requires_grad_(), rate
        self.first, self.second, self.steps = torch.zeros_like(given), torch.zeros_like(given), 0

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        self.value -= self.rate * first / (second.sqrt() + 1e-8)


class Training:
    """Prompts of two lengths, and the distance of a gated world from the model."""

    def __init__(self, given: Small, ablation: str, metric: str) -> None:
        self.plain, self.asked, self.metric = given.plain, prompts(), metric
        self.ids = [self.asked.inputs_of(group, "clean")["input_ids"] for group in range(2)]
        self.put = removed_parts(given, ablation, self.asked)
        with torch.no_grad():
            self.full = [self.logits(group, lambda _, __, part: part) for group in range(2)]

    def logits(self, group: int, carried: Callable[[str, str, Tensor], Tensor]) -> Tensor:
        return self.plain.world(self.ids[group], carried)[0][:, -1]

    def distance(self, gates: Gates, put: list[Mapping[str, Tensor]] | None = None) -> Tensor:
        found = []
        for group, own in enumerate(self.put if put is None else put):

            def carried(writer: str, reader: str, part: Tensor, own: Mapping[str, Tensor] = own) -> Tensor:
                gate = gates[writer, reader]
                return gate * part + (1 - gate) * own[writer]

            logits, full = self.logits(group, carried), self.full[group]
            if self.metric == "kl":
                found.append((full.softmax(-1) * (full.log_softmax(-1) - logits.log_softmax(-1))).sum(-1))
            else:
                found.append(((logits - full)[:, ANSWER] - (logits - full)[:, WRONG]) ** 2)
        return torch.cat(found).mean()

    def gates(self, numbers: Tensor) -> Gates:
        return dict(zip(self.plain.edges(), numbers.unbind(), strict=True))


def trained_gates(training: Training, seed: int) -> tuple[Tensor, list[float]]:
    """The log-odds of gates, and the distance at each step."""
    edges = training.plain.edges()
    share = (0.9 + 0.1) / 1.2
    learned = Adam(torch.full((len(edges),), float(np.log(share / (1 - share))), dtype=torch.float64), RATE)
    multipliers = Adam(torch.zeros(2, dtype=torch.float64), RATE)
    generator, losses = torch.Generator().manual_seed(seed), []
    with torch.no_grad():
        most = training.distance(training.gates(torch.zeros(len(edges), dtype=torch.float64)))
    for step in range(STEPS):
        drawn = torch.rand(len(edges), generator=generator, dtype=torch.float64)
        soft = torch.sigmoid((torch.log(drawn / (1 - drawn)) + learned.value) / (2 / 3))
        loss = training.distance(training.gates((soft * 1.2 - 0.1).clamp(0, 1)))
        there = torch.sigmoid(learned.value - 2 / 3 * np.log(0.1 / 1.1)).mean()
        missing = (1 - TOP / len(edges)) * min(1, 2 * (step + 1) / STEPS) - (1 - there)
        whole = loss / most + multipliers.value[0] * missing + multipliers.value[1] * missing**2
        own, other = torch.autograd.grad(whole, [learned.value, multipliers.value])
        learned.step(own)
        multipliers.step(-other)
        losses.append(float(loss.detach()))
    return learned.value.detach(), losses


@pytest.mark.parametrize(
    ("name", "ablation", "metric"),
    [
        ("gpt2", "resample", "logit_diff"),
        ("gpt2", "mean", "kl"),
        ("llama", "resample", "kl"),
        ("gpt_neox", "zero", "logit_diff"),
        ("gemma2", "resample", "logit_diff"),
    ],
)
def test_gates_are_those_of_plain_pytorch_after_every_step(name: str, ablation: str, metric: str) -> None:
    given = model_of(name)
    wanted, losses = trained_gates(Training(given, ablation, metric), seed=3)
    job = given.model.find_circuit(
        prompts(),
        source=None if ablation == "resample" else ablation,
        metric=metric,
        method="edge-pruning",
        top=TOP,
        steps=STEPS,
        lr=RATE,
        seed=3,
    )
    assert isinstance(job, EdgePruning)
    found = job.run(progress=False)
    apart = CLOSE.get(name, 1e-4)
    assert job.losses == pytest.approx(losses, rel=apart, abs=apart)
    assert found.scores is not None
    ours = [found.scores[f"{writer}->{reader}"] for writer, reader in given.plain.edges()]
    scores = torch.tensor(ours, dtype=torch.float64)
    assert torch.allclose(scores, torch.sigmoid(wanted), rtol=apart, atol=apart)
    least = float(scores.sort().values[-TOP])
    assert len(found) <= TOP
    assert all(found.scores[edge] >= least for edge in found.edges)


@pytest.mark.parametrize(("name", "metric"), [("gpt2", "kl"), ("gemma2", "logit_diff")])
def test_constants_are_those_of_plain_pytorch_after_every_step(name: str, metric: str) -> None:
    given = model_of(name)
    training, edges = Training(given, "mean", metric), given.plain.edges()
    rng = np.random.default_rng(5)
    kept = {edge for edge in edges if rng.random() < 0.5}
    gates = {edge: torch.tensor(float(edge in kept), dtype=torch.float64) for edge in edges}
    names = list(training.put[0])
    learned, losses = Adam(torch.stack([training.put[0][name][0, 0] for name in names]), 0.02), []
    for _ in range(STEPS):
        put = dict(zip(names, learned.value.unbind(), strict=True))
        loss = training.distance(gates, [put, put])
        learned.step(*torch.autograd.grad(loss, [learned.value]))
        losses.append(float(loss.detach()))
    circuit = Circuit.made(given.model, [f"{writer}->{reader}" for writer, reader in kept])
    found = circuit.optimal_ablation(prompts(), metric=metric, steps=STEPS, lr=0.02)
    apart = CLOSE.get(name, 1e-4)
    assert list(found.writers) == names
    assert found.losses == pytest.approx(losses, rel=apart)
    assert torch.allclose(found.values, learned.value, rtol=apart, atol=apart)
    with torch.no_grad():
        put = dict(zip(names, learned.value.unbind(), strict=True))
        wanted = float(training.distance(gates, [put, put]))
    if metric == "kl":
        assert circuit.evaluate(prompts(), source=found, metric="kl").circuit == pytest.approx(
            wanted, rel=apart
        )


def test_a_step_may_be_over_some_prompts_in_turn() -> None:
    given = model_of("gpt2")
    asked_for: dict[str, Any] = {"method": "edge-pruning", "top": TOP, "steps": 4}
    job = given.model.find_circuit(prompts(), batch_size=1, **asked_for)
    assert isinstance(job, EdgePruning)
    assert job.plan().forwards == 4
    job.run(progress=False)
    assert len(set(job.losses)) == 4


def test_a_trained_circuit_is_kept_and_says_what_it_cannot(tmp_path: Path) -> None:
    given = small("gpt2")
    asked_for: dict[str, Any] = {"base": given.base, "source": given.source, "metric": cw.logit_diff(3, 5)}
    job = given.model.find_circuit(**asked_for, method="edge-pruning", top=20, steps=2)
    done: list[int] = []
    found = job.run(out=tmp_path / "run", progress=lambda at, _: done.append(at))
    assert done[-1] == 2
    kept = cw.open(tmp_path / "run")
    assert isinstance(kept, Circuit)
    assert kept.equals(found)
    assert found.method == "edge-pruning"
    assert len(found.select(top=5, connected=False)) == 5
    with pytest.raises(CircuitError, match="holds a circuit already"):
        job.run(out=tmp_path / "run")
    for refused in ({"workers": 2}, {"max_memory": "1GB"}):
        with pytest.raises(CircuitError, match="one sequence of steps"):
            job.run(**refused)
    with pytest.raises(CircuitError, match="say how many with"):
        given.model.find_circuit(**asked_for, method="edge-pruning")
    with pytest.raises(CircuitError, match="is for ACDC"):
        given.model.find_circuit(**asked_for, method="edge-pruning", top=5, threshold=0.1)
    with pytest.raises(CircuitError, match="not for ACDC"):
        given.model.find_circuit(**asked_for, top=5, threshold=0.1)
    with pytest.raises(CircuitError, match="runs are one batch each"):
        given.model.find_circuit(**asked_for, method="edge-pruning", top=5, batch_size=1)
    ranked = asked_for | {"metric": lambda outputs: outputs.logits[:, -1].argmax(-1).double()}
    with pytest.raises(GradientError, match="nothing can be learned by it"):
        given.model.find_circuit(**ranked, method="edge-pruning", top=5, steps=1).run()
    with pytest.raises(CircuitError, match="a change of the metric; give one"):
        given.model.find_circuit(**asked_for)


@pytest.mark.parametrize("metric", ["kl", "logit_diff"])
def test_a_training_is_the_same_under_inference_mode(metric: str) -> None:
    given = model_of("gpt2")
    asked_for: dict[str, Any] = {"method": "edge-pruning", "top": TOP, "steps": 2, "metric": metric}
    expected = given.model.find_circuit(prompts(), **asked_for).run()
    with torch.inference_mode():
        found = given.model.find_circuit(prompts(), **asked_for).run()
        constants = found.optimal_ablation(prompts(), metric=metric, steps=1)
    assert found.equals(expected)
    assert len(constants.losses) == 1


def test_constants_of_another_model_are_refused() -> None:
    circuit = Circuit.made(model_of("gpt2").model, ["input->logits"])
    found = circuit.optimal_ablation(prompts(), steps=1)
    assert "after 1 steps" in repr(found)
    other = Circuit.made(model_of("llama").model, ["input->logits"])
    with pytest.raises(CircuitError, match="Learn its own"):
        other.evaluate(prompts(), source=found)
