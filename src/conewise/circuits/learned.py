"""Circuits that are learned: gates of edges (Bhaskar et al. 2024), constants of writers (Li & Janson 2024).

Edges have gates between 0 and 1. Reader r sees what no writer wrote, and of each writer w

    gate[r, w] · (its part in this world) + (1 − gate[r, w]) · (what removed edges carry)

so that at gates of 0 and 1 the metric is that of a circuit, and it has gradients by the gates and by what
removed edges carry. Edge pruning learns the gates, optimal ablation a constant for each writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.circuits.curve import LOSSES
from conewise.circuits.masked_forward import Ablated, Numbers, Stage, can_stack
from conewise.circuits.pruned_forward import Changes, PrunedForward, Stack
from conewise.circuits.question import CircuitQuestion, OptimalAblation, read_prompts
from conewise.circuits.replaced_parts import edge_facts, wide
from conewise.errors import CircuitError, GradientError
from conewise.program.tensors import brought, recording
from conewise.runs.captured import Captured
from conewise.runs.learned import HardConcrete
from conewise.sweeps.planning.planner import facts_of

START = 0.9
"""The gates that a training begins with."""


class GatedForward(PrunedForward):
    """The metric where each edge carries a share of its writer's part, recorded for gradients.

    Changes are what writers wrote more than removed edges carry.
    """

    _gates: Tensor | None = None
    _put: Tensor

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._walks.rebase(self._weights_as_constants)

    def gated(self, gates: Tensor, put: Tensor | None = None) -> Tensor:
        """[prompt]: the metric under gates [reader, writer], where removed edges carry `put`.

        `put` is [writer, batch, pos, d_model], or has one prompt and one position for all; without it, it is
        what the question says.
        """
        self._gates, self._put = gates, self._replaced[0].given if put is None else put
        with recording():
            stack = self._stacked(self._base, {0: self._base.removed[None, self.stages[0].rows]})
            self._note(stack, stack.full, [0], self._replaced[0].parts[:1])
            for stage in self.stages[:-1]:
                todo = np.flatnonzero(stack.need_reader[stage.rows]).tolist()
                if todo:
                    self._compute(stage, stack, todo)
            outputs = self._outputs(self.stages[-1], stack)
            columns = {node: len(index) for node, index in self._columns.items()}
            (numbers,) = self._metrics.computed(outputs, 1, self._layout, columns)
            return numbers[0][0]

    @property
    def value(self) -> Numbers:
        """[prompt]: the metric with all edges."""
        return self._base.value

    def _weights_as_constants(self, name: str) -> Any:
        value = self._read(name)
        return value.detach() if isinstance(value, Tensor) and value.requires_grad else value

    def _note(self, stack: Stack, changes: Changes, writers: Sequence[int], wrote: Tensor) -> None:
        put = self._put[list(writers)][:, None]
        put = put[:, :, :, -1:] if changes is stack.last else put
        shape = (len(writers), 1, *self._stream.shape[:1], -1, self._stream.shape[-1])
        super()._note(stack, changes, writers, wrote.reshape(shape).to(put.dtype) - put)

    def _seen(self, stage: Stage, stack: Stack, at: Sequence[int], *, at_last: bool) -> Tensor:
        """[reader, 1, batch, pos, d_model]: the streams that some readers of a stage see, by their gates."""
        if self._gates is None:  # the base, before any gates
            return super()._seen(stage, stack, at, at_last=at_last)
        one, put = stage.readers[at[0]], self._put[: stage.readers[at[0]].writers].sum(0)
        still = self._replaced[at_last].constants[one.entry] + (put[:, -1:] if at_last else put)
        total = still.expand(len(at), 1, *still.shape)
        gates = self._gates[[stage.first + place for place in at]]
        for changes in (stack.full, stack.last) if at_last else (stack.full,):
            for writers, stack_of_them in changes.blocks():
                if not self._is_seen(writers[0], one):
                    continue
                more = stack_of_them[:, :, :, -1:] if at_last else stack_of_them
                is_constant = writers[0] >= self.shape[1]
                shares = gates.new_ones(len(at), 1) if is_constant else gates[:, writers]
                total = total + (shares.to(more.dtype) @ more.flatten(1)).view(len(at), *more.shape[1:])
        return total.to(self._dtype)


# -- training ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Training:
    """The options of a training: `steps` of Adam with the rate `lr`, random numbers from `seed`.

    With `in_turn` each step is over one group of prompts of one length; else it is over all.
    """

    steps: int
    lr: float
    seed: int = 0
    in_turn: bool = False


def in_batches(model: Captured, prompts: Any, batch_size: int | None) -> Any:
    """The prompts in groups of at most so many of one length, as `circuit_question` takes them."""
    if batch_size is None:
        return prompts
    if prompts is None:
        raise CircuitError("`batch_size` is for prompts, and runs are one batch each: give `prompts`.")
    read = read_prompts(model, prompts)
    groups = (group[at : at + batch_size] for group in read.groups for at in range(0, len(group), batch_size))
    return replace(read, groups=tuple(groups))


class Distance:
    """How far a circuit is from the model: the mean of a loss (`kl` and the like), or of squared differences.

    Prompts of each length have a forward of their own; in a step of a training some or all of them count.
    """

    def __init__(self, given: CircuitQuestion, forwards: Sequence[GatedForward], *, in_turn: bool) -> None:
        self._forwards, self._in_turn = list(forwards), in_turn
        self._full = [torch.as_tensor(one.value) for one in forwards]
        self._metric = given.metric.name
        self._is_loss = (given.metric.described or (given.metric.name,))[0] in LOSSES

    def gradients(
        self, step: int, gates: Tensor, put: Tensor | None, by: Sequence[Tensor]
    ) -> tuple[float, list[Tensor]]:
        """The distance in a step, and its gradients by what gates or constants are made of."""
        some = range(len(self._forwards))
        some = range(step % len(some), step % len(some) + 1) if self._in_turn else some
        prompts, total = sum(len(self._full[at]) for at in some), 0.0
        found = [torch.zeros_like(one) for one in by]
        for at in some:
            with recording():
                numbers = self._forwards[at].gated(gates, put)
                if not numbers.requires_grad:
                    raise GradientError(
                        f"the metric {self._metric!r} has no gradient: it leaves torch, or is constant "
                        "around the outputs (a rank, a comparison), and nothing can be learned by it."
                    )
                apart = numbers if self._is_loss else (numbers - self._full[at].to(numbers)) ** 2
                value = apart.sum() / prompts
                rows = torch.autograd.grad(value, list(by), retain_graph=True)
            found = [one + row for one, row in zip(found, rows, strict=True)]
            total += float(value.detach())
        return total, found

    def of(self, gates: Tensor) -> float:
        """The distance over all prompts."""
        total, prompts = 0.0, sum(map(len, self._full))
        for forward, full in zip(self._forwards, self._full, strict=True):
            numbers = forward.gated(gates).detach().cpu().double()
            total += float((numbers if self._is_loss else (numbers - full) ** 2).sum())
        return total / prompts


@contextmanager
def distance_of(given: CircuitQuestion, *, in_turn: bool = False) -> Iterator[Distance]:
    """The distance from a model. Raises CircuitError where its parts cannot be gated."""
    if not edge_facts(given.model).parts.is_carried_unchanged or not can_stack(given.base):
        raise CircuitError(
            "edges of this model have no gates: it norms its sums, or its prompts read each other. Find "
            "circuits by method='acdc', or by attributions."
        )
    with torch.inference_mode(mode=False), ExitStack() as all_of_them:
        forwards = [all_of_them.enter_context(one._forward(None, GatedForward)) for one in given.groups]
        yield Distance(given, [one for one in forwards if isinstance(one, GatedForward)], in_turn=in_turn)


def by_edge(graph: EdgeGraph, numbers: Tensor) -> Tensor:
    """[reader, writer] of numbers by edge, 0 where there is no edge."""
    at = tuple(
        brought(torch.from_numpy(one), numbers.device) for one in (graph.edge_readers, graph.edge_writers)
    )
    return numbers.new_zeros(len(graph.readers), len(graph.writers)).index_put(at, numbers)


def learned_gates(
    given: CircuitQuestion, training: Training, top: int, tell: Callable[[int], None]
) -> tuple[Tensor, list[float]]:
    """The log-odds of each edge's gate after a training, and the distance at each step.

    What is made small is the distance, as a share of that without any edge, under the constraint that a
    share 1 − top / edges of the gates are 0 in expectation: with two multipliers, which are learned too, as
    l₁ · missing + l₂ · missing². The share that is asked for rises in the first half of the steps.
    """
    kind, graph, device = HardConcrete(), given.graph, facts_of(given.model).device
    generator = torch.Generator().manual_seed(training.seed)
    losses: list[float] = []
    with distance_of(given, in_turn=training.in_turn) as distance:
        dtype = wide(facts_of(given.model).dtype)
        numbers = torch.full((graph.count,), kind.log_alpha(START), dtype=dtype, device=device)
        most = distance.of(torch.zeros(graph.there.shape, dtype=dtype, device=device)) or 1.0
        numbers.requires_grad_()
        multipliers = torch.zeros(2, dtype=dtype, device=device, requires_grad=True)
        learners = (
            torch.optim.Adam([numbers], lr=training.lr),
            torch.optim.Adam([multipliers], lr=training.lr, maximize=True),
        )
        for step in range(training.steps):
            with recording():
                drawn = kind.sample(numbers, generator)
                leaf = drawn.detach().requires_grad_()
                gates = by_edge(graph, leaf)
            loss, (row,) = distance.gradients(step, gates, None, [leaf])
            with recording():
                wanted = (1 - top / graph.count) * min(1.0, 2 * (step + 1) / training.steps)
                missing = wanted - (1 - kind.expected_open(numbers) / graph.count)
                penalty = multipliers[0] * missing + multipliers[1] * missing**2
                own, other = torch.autograd.grad([drawn, penalty], [numbers, multipliers], [row / most, None])
            numbers.grad, multipliers.grad = own, other
            for one in learners:
                one.step()
            losses.append(loss)
            tell(1)
    return numbers.detach(), losses


def optimal_constants(
    given: CircuitQuestion, edges: NDArray[np.int64], training: Training
) -> OptimalAblation:
    """What removed edges carry best: for each writer the constant with which the distance is smallest.

    `edges` are those of the circuit. Constants begin with the means over prompts and positions.
    """
    graph, facts = given.graph, edge_facts(given.model)
    losses: list[float] = []
    with distance_of(given, in_turn=training.in_turn) as distance:
        runs = [one.base for one in given.groups]
        mean = Ablated(facts, "mean", given.base, None, over=runs).whole[:, 0, 0]
        put = mean.to(wide(mean.dtype)).clone().requires_grad_()
        learner = torch.optim.Adam([put], lr=training.lr)
        kept = torch.zeros(graph.count, dtype=put.dtype, device=put.device)
        kept[torch.from_numpy(edges).to(put.device)] = 1
        gates = by_edge(graph, kept)
        for step in range(training.steps):
            with recording():
                stack = put[:, None, None]
            loss, (row,) = distance.gradients(step, gates, stack, [put])
            put.grad = row
            learner.step()
            losses.append(loss)
    writers = tuple(one.name for one in graph.writers)
    return OptimalAblation(given.model.name, writers, put.detach().to(mean.dtype), tuple(losses))
