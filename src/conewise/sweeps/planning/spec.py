"""What a sweep asks: places, metrics, precision. Frozen, and without a run in it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from conewise.locations.places import Place, SourcedPlace
from conewise.runs.metrics import Metric


@functools.lru_cache(maxsize=256)
def _digest(names: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class SweepSpec:
    """`cells` has the places that each world patches, `names` what they are called.

    With `is_function`, what is put there is a function of what would have been there; with `from_run`, it is
    the value of another run. Places that have sources of their own hold numbers of them, and not what they
    are.
    """

    cells: tuple[tuple[Place, ...], ...]
    names: tuple[str, ...]
    metrics: tuple[Metric, ...]
    precision: str | None = None
    is_function: bool = False
    from_run: bool = False

    @cached_property
    def identity(self) -> str:
        """Equal specs have equal identities; of metrics it says what they read, not which tokens."""
        read = [
            (m.name, m.output, m.last, m.whole, len(set(m.tokens)), m.among is not None, m.copies)
            for m in self.metrics
        ]
        tokens = len(self.tokens)
        parts = (
            *(_digest(self.names), repr(read), tokens, self.precision, self.is_function, self.from_run),
            *self.own,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @cached_property
    def own(self) -> tuple[tuple[int, str, int], ...]:
        """Of places that have sources of their own: which, how they are put in, and how large they are."""
        # Kinds are looked at first, without a step of Python for each place: cells may be tens of thousands.
        kinds = set(map(type, chain.from_iterable(self.cells)))
        if not any(issubclass(kind, SourcedPlace) for kind in kinds):
            return ()
        places = (place for cell in self.cells for place in cell if isinstance(place, SourcedPlace))
        return tuple([(place.number, place.how, place.size) for place in places])

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The tokens whose logits the metrics read, where they read no others."""
        return tuple(sorted({token for metric in self.metrics for token in metric.tokens}))

    @property
    def reads_few_tokens(self) -> bool:
        """Whether every metric reads the logits of a few tokens only."""
        return all(metric.among is not None for metric in self.metrics)

    def reads_last(self, has_last: Callable[[Metric], bool]) -> bool:
        """Whether every metric reads the last position alone, of an output where that is known."""
        return all(metric.last and has_last(metric) for metric in self.metrics)
