"""Two circuits of one graph side by side: what both have, and what only one of them has."""

from __future__ import annotations

from dataclasses import dataclass

from conewise.markup import heading, table


@dataclass(frozen=True, slots=True)
class Comparison:
    """The edges that both circuits have, and those of one alone, each in graph order."""

    both: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def jaccard(self) -> float:
        """Edges of both over edges of either: 1 where they are equal, 0 where they share none."""
        either = len(self.both) + len(self.only_first) + len(self.only_second)
        return len(self.both) / either if either else 1.0

    @property
    def overlap(self) -> float:
        """Edges of both over the edges of the smaller: 1 where one is a part of the other."""
        smaller = len(self.both) + min(len(self.only_first), len(self.only_second))
        return len(self.both) / smaller if smaller else 1.0

    def __repr__(self) -> str:
        return (
            f"Comparison: {len(self.both):,} edges in both, {len(self.only_first):,} only in the first, "
            f"{len(self.only_second):,} only in the second (Jaccard {self.jaccard:.3f}, "
            f"overlap {self.overlap:.3f})"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("both", f"{len(self.both):,}"),
            ("only in the first", f"{len(self.only_first):,}"),
            ("only in the second", f"{len(self.only_second):,}"),
            ("Jaccard", f"{self.jaccard:.3f}"),
            ("overlap", f"{self.overlap:.3f}"),
        ]
        return heading("Comparison", "of two circuits' edges") + table(rows)
