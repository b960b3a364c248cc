"""Recorded parts of runs, and what they cost: every forward and backward pass is counted as it is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from conewise.errors import GradientError
from conewise.program.tensors import Tensor
from conewise.runs.metrics import Metric
from conewise.runs.reader import reader
from conewise.runs.run import Reading
from conewise.runs.tape import Branch, Measured, Recorded
from conewise.sweeps.execution.batch import Batch
from conewise.sweeps.execution.ledger import SweepLedger
from conewise.sweeps.planning.model_facts import facts_of


class Work:
    """What attribution computes for one batch: passes over parts of the base's program, recorded.

    `ledger` counts a node once for each pass that computes it, and once for each backward pass through it;
    `flops` likewise, a backward pass by each input that is differentiated. `peak_bytes` is an upper estimate
    of what one pass holds.
    """

    def __init__(self, batch: Batch, metrics: Sequence[Metric], ledger: SweepLedger) -> None:
        self.batch, self.metrics, self.ledger = batch, tuple(metrics), ledger
        self.base: Reading = batch.base
        self.model = batch.base.model
        self.tape = batch.base._tape()
        self.read: Callable[[str], Any] = reader(batch.base)
        self.facts = facts_of(self.model)
        self.shape = self.facts.shape(batch.base.inputs)
        self.prompts = self.facts.read.prompts(batch.base.inputs)
        self.targets = self.facts.targets(self.metrics)
        self.flops = self.peak_bytes = self.forwards = self.backwards = 0
        self._behind: tuple[str, ...] = ()

    def record(
        self,
        nodes: Collection[str],
        *,
        given: Mapping[str, Tensor] = MappingProxyType({}),
        branches: Sequence[Branch] = (),
        keep: Collection[str] = (),
    ) -> Recorded:
        """A forward pass over what lies behind `nodes`: see `Tape.record`."""
        nodes = tuple(dict.fromkeys(nodes))
        behind = tuple(name for name in self.tape.behind(nodes, self.targets) if name not in given)
        self._expect_apart(behind)
        values = self.tape.record(nodes, self.targets, given=given, branches=branches, keep=keep)
        self._behind, self.forwards = behind, self.forwards + 1
        costs, sizes = self.shape.costs, self.model.estimated_bytes(self.base.inputs)
        self.flops += sum(costs.flops(name) for name in behind)
        self.peak_bytes = max(self.peak_bytes, 2 * sum(sizes.get(name, 0) for name in behind))
        self._count(len(behind))
        return values

    def measure(self, metric: Metric, values: Recorded) -> Measured:
        """A metric of the values of a pass."""
        return self.tape.measure(metric, values, self.base.inputs)

    def gradients(
        self, measured: Measured, values: Sequence[Tensor], *, is_last: bool = True
    ) -> tuple[Tensor, ...]:
        """A backward pass through the last forward pass."""
        self.backwards += 1
        behind, records = frozenset(self._behind), self.model.program.record_of
        for name in self._behind:
            into = sum(1 for one in records[name].inputs if one in behind)
            self.flops += max(1, into) * self.shape.costs.flops(name)
        self._count(len(self._behind))
        return self.tape.gradients(measured, values, is_last=is_last)

    def count(self, evaluations: int) -> None:
        """Count what was computed beside passes."""
        self._count(evaluations)

    def _count(self, evaluations: int) -> None:
        self.ledger.node_evaluations += evaluations
        self.ledger.launches += evaluations

    def _expect_apart(self, nodes: tuple[str, ...]) -> None:
        """Raise GradientError where prompts read each other: their gradients cannot be told apart."""
        if self.prompts == 1 or self.model.batch_is_fixed:
            return
        mixing = self.shape.mixing(nodes, self.read)
        if mixing:
            raise GradientError(
                f"{mixing!r} mixes the prompts of a batch, so that a gradient is not of one prompt alone. "
                "Give the prompts one by one: a list of bases, and a list of sources."
            )

    def by_prompt(self, measured: Measured, effects: Tensor) -> Tensor:
        """Effects [cell, prompt] as a metric has them: what one number for all prompts has is their sum."""
        return effects.sum(-1, keepdim=True).expand_as(effects) if measured.is_shared else effects
