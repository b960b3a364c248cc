"""Metrics read off a run, or off a stack of worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from conewise.anatomy.sites import Located
from conewise.errors import MetricError
from conewise.program.tensors import Tensor, computing
from conewise.program.walk import assembled
from conewise.runs.metrics import Metric, applied, at_run, fetched, flat
from conewise.runs.reading import Reading
from conewise.sweeps.planning.layout import Layout
from conewise.sweeps.planning.planner import ModelFacts

PHASES = ("weights", "planning", "baselines", "passes", "storing")
"""The phases of a run; what is none of them is `phases.REST`."""


@dataclass(slots=True)
class SweepLedger:
    """Counts what a run of a sweep does, while it does it.

    `peak_bytes` is the most that the process grew by while chunks were computed, on a GPU the most that
    tensors took there, beyond what was held before; `reserved_bytes` is how much more torch's allocator then
    had from a GPU. Parts of weights count at every run, though they are made once. Of a model that is spread
    over several devices, both are sums over its GPUs. None where nothing was computed or measured.
    `moved_bytes` are those of weights that were streamed to the device for the passes.

    `phases` has the seconds by phase; together they are `seconds`. It is empty in results that were saved
    before there were any. `weights`: reading their bits. `planning`: finding or compiling the plan.
    `baselines`: computing base and source, and their metrics. `passes`: computing the worlds, and their
    metrics. `storing`: reading and writing the folder `out`. `other`: the rest. Phases are what the host
    waited for: a GPU is given baselines, passes and the last reading of the weights one behind the other, and
    the passes wait for most of it.
    """

    node_evaluations: int = 0
    launches: int = 0
    resumed: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    moved_bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    def note_memory(self, peak: int | None, reserved: int | None, kept: int = 0) -> None:
        """Keep the most that was taken, beside what was kept of it already: parts of weights."""
        self.peak_bytes = most([self.peak_bytes, None if peak is None else peak + kept])
        self.reserved_bytes = most([self.reserved_bytes, None if reserved is None else reserved + kept])

    def add(self, other: SweepLedger) -> None:
        """Add what another run did, one after the other: of memory it is the most of both."""
        for name in ("node_evaluations", "launches", "resumed", "moved_bytes", "seconds", "compute_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.note_memory(other.peak_bytes, other.reserved_bytes)
        for phase, seconds in other.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds


def summed(ledgers: Iterable[SweepLedger]) -> SweepLedger:
    """Return the ledger of all runs together."""
    total = SweepLedger()
    for one in ledgers:
        total.add(one)
    return total


def most(amounts: Iterable[int | None]) -> int | None:
    """The largest of those that are known; None where none is."""
    return max((amount for amount in amounts if amount is not None), default=None)


class MetricReader:
    """Reads the metrics of one sweep. `tokens`: whose logits they read, where they read no others.

    Stacks of worlds are read at the positions of `base`.
    """

    def __init__(
        self,
        facts: ModelFacts,
        metrics: Sequence[Metric],
        tokens: Sequence[int] = (),
        base: Reading | None = None,
    ) -> None:
        self._facts, self._metrics = facts, tuple(metrics)
        self._inputs = None if base is None else base.inputs
        self._of_base = self._metrics if base is None else self._placed(base)
        self.tokens = tuple(tokens)
        self._column_of = {token: at for at, token in enumerate(tokens)}

    def _placed(self, run: Reading) -> tuple[Metric, ...]:
        """The metrics with the positions that they read of a run."""
        target = self._facts.target
        return tuple(
            [
                one if one.whole and not one.reads else at_run(one, run.model, run.inputs, target(one))
                for one in self._metrics
            ]
        )

    def prompts(self, run: Reading) -> int:
        """Return how many prompts a run has."""
        return self._facts.read.prompts(run.inputs)

    def of_run(self, run: Any) -> Tensor:
        """Every metric of a run, as [metric, prompt] in float64; a vector is as many as it has entries."""
        return self._fetched(self._of_run(run))

    def of_baseline(self, run: Reading, which: str) -> Callable[[], Tensor]:
        """Every metric of the base or the source itself, computed; the call fetches the numbers."""
        with self._naming(which):
            found = self._of_run(run)

        def fetch() -> Tensor:
            with self._naming(which):
                return self._fetched(found)

        return fetch

    @contextmanager
    def _naming(self, which: str) -> Iterator[None]:
        try:
            yield
        except MetricError as error:
            raise MetricError(f"in the {which} itself: {error}") from error

    def _of_run(self, run: Any) -> list[Tensor]:
        """Each metric of a run as [1, prompt, ...], where it was computed; copies, fetched later."""
        found, batch = [], self.prompts(run)
        with computing():
            for metric in self._of_base if run.inputs is self._inputs else self._placed(run):
                stack = None
                if metric.is_of_output:
                    target = self._facts.target(metric)
                    stack = self._facts.read.arranged(target, run.demand([target])[0], 1, batch)
                outputs = run.outputs if metric.whole else None
                found.append(applied(metric, batch, stack, presented_in(run), outputs).clone())
        return found

    def _fetched(self, found: Sequence[Tensor]) -> Tensor:
        return torch.cat(
            [flat(fetched(one, numbers))[0] for one, numbers in zip(self._metrics, found, strict=True)]
        )

    def of_stack(
        self,
        outputs: Mapping[str, Tensor],
        worlds: int,
        layout: Layout,
        columns: Mapping[str, int],
        prompts: int | None = None,
    ) -> Callable[[], Tensor]:
        """Every metric of a stack of worlds, computed. The call fetches them: [world, metric, prompt].

        `prompts` is how many there are in a world, where the batch is fixed and no size says so.
        """
        found = self.computed(outputs, worlds, layout, columns, prompts)

        def fetch() -> Tensor:
            numbers = [
                flat(torch.cat([fetched(metric, one) for one in parts]))
                for metric, parts in zip(self._metrics, found, strict=True)
            ]
            return torch.cat(numbers, dim=1)

        return fetch

    def computed(
        self,
        outputs: Mapping[str, Tensor],
        worlds: int,
        layout: Layout,
        columns: Mapping[str, int],
        prompts: int | None = None,
    ) -> list[list[Tensor]]:
        """Every metric of a stack of worlds where it was computed, recorded if the outputs are.

        Each is one [world, prompt]; one of all outputs is [1, prompt] for each world.
        """
        batch = layout.batch if prompts is None else prompts
        return [self._of_stack(metric, outputs, worlds, layout, columns, batch) for metric in self._of_base]

    def _of_stack(
        self,
        metric: Metric,
        outputs: Mapping[str, Tensor],
        worlds: int,
        layout: Layout,
        columns: Mapping[str, int],
        batch: int,
    ) -> list[Tensor]:
        """A metric as [world, prompt, ...]; one of all outputs as [1, prompt, ...] for each world."""

        def presented(one: Located, chosen: int | None = None) -> torch.Tensor:
            return presented_stack(one, outputs[one.node], worlds, layout, chosen)

        if not metric.whole:
            stack = None
            if metric.is_of_output:
                target = self._facts.target(metric)
                if target in columns and metric.among is not None:
                    metric = replace(metric.among(self._column_of), behind=metric.behind)
                stack = self._facts.read.arranged(target, outputs[target], worlds, batch)
                if metric.rows and metric.ending and stack.shape[2] < layout.length(target):
                    metric = metric.ending(stack.shape[2])
            return [applied(metric, batch, stack, presented).clone()]  # a view would hold all of the stack
        rows, dims = [], layout.batch_dim
        for world in range(worlds):
            leaves = {
                name: value if (dim := dims.get(name)) is None else value.chunk(worlds, dim)[world]
                for name, value in outputs.items()
            }
            whole = assembled(self._facts.program, leaves, layout.sizes(1))
            own = partial(presented, chosen=world)
            rows.append(applied(metric, batch, presented=own, outputs=whole).clone())
        return rows


def presented_in(run: Reading) -> Callable[[Located], torch.Tensor]:
    """The value of a site in a run, as [1, *axes]."""

    def presented(one: Located) -> torch.Tensor:
        (value,) = run.demand([one.node])
        return one.view.present(value, run._sizes)[None]

    return presented


def presented_stack(
    one: Located, value: torch.Tensor, worlds: int, layout: Layout, chosen: int | None = None
) -> torch.Tensor:
    """The value of a site in a stack of worlds, as [world, *axes]; of the `chosen` one alone, as [1, *axes].

    It may have the last positions alone.
    """
    dim, pos = layout.batch_dim.get(one.node), layout.pos_dim.get(one.node)
    if dim is None:
        stack = value.expand(1 if chosen is not None else worlds, *value.shape)
    else:
        stack = value.unflatten(dim, (worlds, -1)).movedim(dim, 0)  # type: ignore[no-untyped-call]
        stack = stack if chosen is None else stack[chosen : chosen + 1]
    own, rows = layout.shape(one.node), None
    if pos is not None and own is not None:
        have = value.shape[pos] // worlds if pos == dim else value.shape[pos]
        rows = have * layout.length(one.node) // own[pos]
    return one.view.present(stack, layout.sizes(1, rows), leading=1)
