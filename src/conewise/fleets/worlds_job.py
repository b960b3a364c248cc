"""Worlds with removed edges, as a worker evaluates them: it follows the current world of its driver."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conewise.circuits.forwards.following import FollowingForward, WorldsPart
from conewise.circuits.forwards.forwards import asked
from conewise.circuits.forwards.masked_forward import Forward, Mask
from conewise.fleets.outcomes import Done
from conewise.fleets.shares import Share
from conewise.runs.captured import Captured


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


class WorldsJob:
    """Evaluates parts; it makes its forward when the first comes, and keeps it for those that follow."""

    def __init__(self, model: Captured, **given: Any) -> None:
        self._model, self._given = model, given
        self._under_way = ExitStack()
        self._forward: Forward | None = None
        self._following: FollowingForward | None = None

    def know_plan(self, batch: int, text: str) -> None:
        """There are no plans: what is evaluated depends on what was decided."""

    def lacking(self, share: Share, memory: int | None) -> str:
        """What is known of memory is known with the forward: see `run`."""
        del share, memory
        return ""

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
        spent = forward.node_evaluations - before
        return Done((values,), np.zeros(0), None, spent, 1, 0.0)

    def rest(self) -> None:
        """Let go of all values."""
        self._forward = self._following = None
        self._under_way.close()

    def _begun(self, memory: int | None) -> tuple[Forward, FollowingForward]:
        if self._forward is None or self._following is None:
            budgets = [one for one in (memory, self._given["max_memory"]) if one is not None]
            given = {**self._given, "max_memory": min(budgets, default=None)}
            self._forward = self._under_way.enter_context(asked(self._model, **given).forward())
            self._following = FollowingForward(self._forward)
        return self._forward, self._following
