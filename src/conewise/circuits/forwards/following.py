"""Parts of a batch of worlds, each evaluated by a forward of its own that follows the current world.

Whoever evaluates a part is told with it which world is the current one. So it may have missed what was
decided meanwhile, or may just have been started: the values do not depend on what it did before, but for
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conewise.circuits.forwards.masked_forward import Forward, Mask, Numbers
from conewise.circuits.forwards.stages import Stage


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
        self._stage: Stage | None = None
        self._last: tuple[Stage, Mask] | None = None

    def values(self, part: WorldsPart) -> Numbers:
        """[world, prompt]: the metric of each world."""
        if part.stage is None:
            return self._forward.values(part.removed)
        stage = self._forward.stages[part.stage]
        if stage is not self._stage:  # from the base, as every search begins a stage
            self._go_to(part.current, self._forward.stages)
            self._stage = stage
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
        """Whether one more world would not fit into memory."""
        assert part.stage is not None
        return len(part) >= self._forward.most(part.stage)

    def _below(self, stage: Stage, removed: Mask) -> Numbers:
        self._last = stage, removed
        return self._forward.below(stage.number, removed)

    def _has(self, stage: Stage, current: Mask) -> bool:
        """Whether the world is one of those that were evaluated last."""
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
