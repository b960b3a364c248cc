"""A circuit search by workers: each batch of worlds is cut into a part for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conewise.circuits.masked_forward import Forward, Numbers, Stage, layers_of
from conewise.circuits.question import CircuitQuestion, circuit_question
from conewise.circuits.replaced_parts import Mask
from conewise.errors import FleetError
from conewise.jobs.payload import Work, packed
from conewise.jobs.scheduling import Crew, Done, Failed, FleetLedger, Share, WorkerJob, run_shares
from conewise.runs.captured import Captured
from conewise.sweeps.execution.reading import SweepLedger


@dataclass(frozen=True, slots=True, eq=False)
class WorldsPart:
    """Worlds to be evaluated.

    With a `stage`, they are the one that has `current`, [reader, writer], removed, but for edges [world,
    reader of the stage, writer], which are those and more; without one they have edges [world, reader,
    writer] removed.
    """

    removed: Mask
    current: Mask
    stage: int | None = None

    def __len__(self) -> int:
        return len(self.removed)

    def some(self, first: int, count: int) -> WorldsPart:
        """So many of its worlds, from `first` on."""
        return WorldsPart(self.removed[first : first + count], self.current, self.stage)


class FollowingForward:
    """Evaluates parts, one behind the other.

    Going on from a world that was in the part before costs nothing. One that was not is evaluated as one more
    world of the next part, and gone on from behind that. Where the worlds of a part differ in a single
    reader, which is computed in each of them anyway, it can wait until a part is about another stage.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._removed: Mask | None = None
        self._layer: list[Stage] = []
        self._last: tuple[Stage, Mask] | None = None

    def values(self, part: WorldsPart) -> Numbers:
        """[world, prompt]: the metric of each world."""
        if part.stage is None:
            return self._forward.values(part.removed)
        stage = self._forward.stages[part.stage]
        if stage not in self._layer:  # from the base, as every search begins a layer
            self._go_to(part.current, self._forward.stages)
            self._layer = next(one for one in layers_of(self._forward.stages) if stage in one)
        behind = self._behind(part.current)
        is_single = len(stage.readers) == 1
        if behind and (
            behind != [stage] or self._has(stage, part.current) or (not is_single and self._is_full(part))
        ):
            self._go_to(part.current, behind)
            behind = []
        if not behind or is_single:
            return self._below(stage, part.removed)
        found = self._below(stage, np.concatenate([part.current[None, stage.rows], part.removed]))
        self._go_to(part.current, behind)
        return found[1:]

    def _behind(self, current: Mask) -> list[Stage]:
        """The stages in which more is removed than in the world that was gone on from.

        All of them at first, and where something is not removed any more.
        """
        stages, known = self._forward.stages, self._removed
        if known is None or (known & ~current).any():
            return list(stages)
        return [stage for stage in stages if (known[stage.rows] != current[stage.rows]).any()]

    def _is_full(self, part: WorldsPart) -> bool:
        """True if one more world would not fit into memory."""
        assert part.stage is not None
        return len(part) >= self._forward.most(part.stage)

    def _below(self, stage: Stage, removed: Mask) -> Numbers:
        self._last = stage, removed
        return self._forward.below(stage.number, removed)

    def _has(self, stage: Stage, current: Mask) -> bool:
        """True if the world is one of those that were evaluated last."""
        if self._last is None or self._last[0] != stage:
            return False
        return bool((self._last[1] == current[stage.rows]).all((1, 2)).any())

    def _go_to(self, current: Mask, behind: Sequence[Stage]) -> None:
        """Let the world be the current one, which differs in some stages from the one before."""
        if len(behind) == 1:
            self._forward.adopt(behind[0].number, current[behind[0].rows])
        else:
            self._forward.begin(current)
        self._removed, self._last = current.copy(), None


@dataclass(frozen=True, slots=True)
class Bits:
    """A mask as it travels: eight edges to a byte."""

    shape: tuple[int, ...]
    packed: NDArray[np.uint8]

    @classmethod
    def of(cls, mask: Mask) -> Bits:
        """A mask, packed."""
        return cls(mask.shape, np.packbits(mask))

    def mask(self) -> Mask:
        """The mask."""
        count = int(np.prod(self.shape))
        found: Mask = np.unpackbits(self.packed, count=count).view(bool).reshape(self.shape)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class WorldsShare(Share):
    """Some worlds of a batch. `removed` has all that were given out together: those from `start` on."""

    start: int = 0
    stage: int | None = None
    removed: Bits | None = None
    current: Bits | None = None

    def part(self) -> WorldsPart:
        """Its worlds."""
        assert self.removed is not None
        assert self.current is not None
        assert self.worlds is not None
        whole = WorldsPart(self.removed.mask(), self.current.mask(), self.stage)
        return whole.some(self.first - self.start, self.worlds)


class WorldsJob(WorkerJob):
    """Evaluates parts; it makes its forward when the first comes, and keeps it for those that follow."""

    def __init__(self, model: Captured, **given: Any) -> None:
        self._model, self._given = model, given
        self._under_way = ExitStack()
        self._forward: Forward | None = None
        self._following: FollowingForward | None = None

    def run(self, share: Share, memory: int | None) -> Done:
        """Evaluate worlds. Raises MemoryError where there are more than fit into the memory of the worker."""
        assert isinstance(share, WorldsShare)
        part = share.part()
        forward, following = self._begun(memory)
        if memory is not None and part.stage is not None and len(part) > max(1, forward.most(part.stage)):
            raise MemoryError(
                f"{len(part)} worlds at once take more than the {memory:,} bytes of this worker"
            )
        before = forward.node_evaluations
        values = following.values(part)
        return Done((values,), np.zeros(0), None, SweepLedger(forward.node_evaluations - before, 1))

    def rest(self) -> None:
        """Let go of all values."""
        self._forward = self._following = None
        self._under_way.close()

    def _begun(self, memory: int | None) -> tuple[Forward, FollowingForward]:
        if self._forward is None or self._following is None:
            budgets = [one for one in (memory, self._given["max_memory"]) if one is not None]
            given = {**self._given, "max_memory": min(budgets, default=None)}
            self._forward = self._under_way.enter_context(circuit_question(self._model, **given).forward())
            self._following = FollowingForward(self._forward)
        return self._forward, self._following


def work_of(question: CircuitQuestion) -> Work:
    """Return a search as workers are told of it."""
    given = {
        "base": question.base,
        "source": question.carried,
        "metric": question.metric,
        "max_memory": question.max_memory,
    }
    return Work(question.model, packed((WorldsJob, given), question.model))


class FleetForward:
    """Evaluates batches by workers; `own` is the forward of this process.

    That one begins, and computes single worlds anew from the base: where a change is too close to a
    threshold, what decides is computed here, as without workers. Batches are as large as without workers:
    wider ones hardly decide more, since they end at the first wrong guess. Each is cut into as many parts as
    there are workers, of neighbouring worlds; so one worker evaluates what a local search does, bit for bit,
    unless memory is so short that candidates are evaluated alone. A part that does not fit into a worker is
    halved, and those behind it are as small; at the next stage, where worlds take less, twice as large ones
    are tried.
    """

    def __init__(self, own: Forward, crew: Crew, workers: int, ledger: FleetLedger) -> None:
        self._own, self._crew, self._workers, self.ledger = own, crew, workers, ledger
        self.stages, self.moved, self.epsilon = own.stages, own.moved, own.epsilon
        self.node_evaluations = own.node_evaluations
        self._removed: Mask = np.zeros(own.shape, dtype=bool)
        self._batches = 0
        self._fits: int | None = None

    # -- as this process has it --------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of readers and writers."""
        return self._own.shape

    @property
    def few(self) -> int:
        """Return the number of worlds that take hardly longer than one does."""
        return self._own.few

    def search_bytes(self, *, speculative: bool = True) -> tuple[int, int]:
        """Return the bytes held for all worlds of a search, and the most that a step takes beside them."""
        return self._own.search_bytes(speculative=speculative)

    def most(self, stage: int, removed: Mask | None = None) -> int:
        """Return the number of worlds that fit into the memory of all workers at once."""
        each = self._own.most(stage, self._removed if removed is None else removed)
        if self._fits is not None:
            self._fits *= 2
            each = min(each, self._fits)
        return each * self._workers

    def begin(self, removed: Mask) -> Numbers:
        """Let a world be the current one; its metric is computed here."""
        self._removed = removed.copy()
        return self._here(self._own.begin, removed)

    def _here(self, compute: Callable[[Mask], Numbers], removed: Mask) -> Numbers:
        before = self._own.node_evaluations
        found = compute(removed)
        self.node_evaluations += self._own.node_evaluations - before
        return found

    # -- by workers --------------------------------------------------------------------------------

    def values(self, removed: Mask) -> Numbers:
        """[world, prompt] of worlds computed from the base; that of one world alone is computed here."""
        if len(removed) < 2:
            return self._here(self._own.values, removed)
        return self._evaluated(None, removed)

    def below(self, stage: int, removed: Mask) -> Numbers:
        """[world, prompt] of worlds that are the current one but for edges into one stage."""
        return self._evaluated(stage, removed)

    def adopt(self, stage: int, removed: Mask) -> None:
        """Let a world be the current one: workers are told with their next parts."""
        self._removed[self.stages[stage].rows] = removed

    def _evaluated(self, stage: int | None, removed: Mask) -> Numbers:
        if not self._crew.seats:
            raise FleetError("the workers were closed in the middle of a search for a circuit.")
        current, worlds = Bits.of(self._removed), len(removed)
        shares: list[Share] = []
        for first, count in cuts(worlds, self._workers, self._fits):
            some = Bits.of(removed[first : first + count])
            shares.append(
                WorldsShare(self._batches, (0,), count, first, count, None, first, stage, some, current)
            )
        self._batches += 1
        found: dict[int, Numbers] = {}
        failed: list[tuple[Share, Failed]] = []

        def done(share: Share, outcome: Done) -> int:
            (found[share.first],) = outcome.rows
            self.node_evaluations += outcome.ledger.node_evaluations
            return len(found[share.first])

        halved = self.ledger.halved
        run_shares(
            shares,
            self._crew,
            lambda share: (share.first, share.worlds or 0),
            done,
            lambda share, why: failed.append((share, why)),
            self.ledger,
        )
        if failed:
            share, why = failed[0]
            raise FleetError(f"{share.label} could not be evaluated by a worker: {why.said}")
        if self.ledger.halved > halved:
            self._fits = min(map(len, found.values()))
        return np.concatenate([found[first] for first in sorted(found)])


def cuts(worlds: int, workers: int, most: int | None = None) -> list[tuple[int, int]]:
    """Cut so many worlds into even parts for workers, each as (first, how many), none above `most`."""
    parts = min(worlds, max(workers, -(-worlds // most) if most else 0))
    ends = [worlds * (part + 1) // parts for part in range(parts)]
    return [(first, end - first) for first, end in zip([0, *ends], ends, strict=False)]


# -- what workers would gain ---------------------------------------------------------------------------

ENOUGH = 0.9
"""Workers are worth having until a batch goes so near to as fast as it could."""


@dataclass(frozen=True, slots=True)
class BatchRates:
    """A narrow batch of a search: its worlds, and the seconds that it takes for itself and for each of them.

    So many candidates are tried at once even where guesses fail; where they turn out right batches are wider,
    and workers gain more. `seconds` is without the way to a worker and back.
    """

    worlds: int
    launch: float
    world: float

    def seconds(self, workers: int) -> float:
        """The seconds of a batch cut into parts; all but one of them have the current world beside."""
        part = -(-self.worlds // workers) + (workers > 1)
        return self.launch + min(part, self.worlds) * self.world

    def gain(self, workers: int) -> float:
        """The speedup of a batch with so many workers."""
        return self.seconds(1) / self.seconds(workers)

    def worth_having(self, most: int) -> int:
        """Beyond how many workers, up to `most`, more hardly help."""
        best = self.gain(most)
        return next(count for count in range(1, most + 1) if self.gain(count) >= ENOUGH * best)


def batch_rates(question: CircuitQuestion, clock: Callable[[], float] = time.perf_counter) -> BatchRates:
    """Time batches of a search on this machine, with nothing removed: below the attention in the middle."""
    with question.forward() as forward:
        worlds = forward.few + 1
        few, many = (_seconds(forward, count, clock) for count in (1, worlds))
    world = max(0.0, many - few) / (worlds - 1)
    return BatchRates(worlds, max(0.0, few - world), world)


def _seconds(forward: Forward, count: int, clock: Callable[[], float]) -> float:
    stages = [stage for stage in forward.stages if stage.kind == "attention"] or forward.stages
    stage = stages[len(stages) // 2]
    removed = np.zeros((count, len(stage.readers), forward.shape[1]), dtype=bool)
    for world in range(count):  # one edge more in each world
        reader, writer = divmod(world, stage.readers[0].writers)
        removed[world:, -1 - reader % len(stage.readers), writer] = True
    forward.below(stage.number, removed)
    taken = []
    for _ in range(3):
        started = clock()
        forward.below(stage.number, removed)
        taken.append(clock() - started)
    return min(taken)
