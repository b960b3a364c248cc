"""Sites found on some prompts, and how much of the behaviour they have on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conewise.errors import SweepError
from conewise.locations.places import Place
from conewise.program.tensors import Tensor
from conewise.prompts.answer import Answer


def expect_counts(counts: Sequence[Any], most: int) -> None:
    """Raise SweepError for what are no numbers of sites, of which there are `most`."""
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
            raise SweepError(f"top is {count!r}; it is a number of sites, or several, from 1 to {most}.")
    if not counts:
        raise SweepError("top names no number of sites.")


def strongest(found: Answer, counts: Sequence[int]) -> tuple[tuple[Place, ...], ...]:
    """The places that move the metric furthest towards the source: the first so many, for each count."""
    assert found.source is not None
    towards = 1.0 if float(found.source[0]) > float(found.base[0]) else -1.0
    effects = (found.table[0] * towards).tolist()
    order = sorted(range(len(effects)), key=lambda number: -effects[number])
    return tuple(
        tuple(place for number in order[:count] for place in found.cells[number].places) for count in counts
    )


@dataclass(frozen=True)
class HeldOut:
    """Growing sets of the strongest sites, found on one part of the prompts and tried on the other.

    `sets` has the places of each; all of a set are patched together, in one world. `shares` are how far that
    goes from the base to the source on prompts that were held out, 1 being all the way, and `found_shares`
    the same on those that the sites were found on. `found`, `tried` and `tried_where_found` are the answers.
    """

    sets: tuple[tuple[Place, ...], ...]
    found: Answer = field(repr=False)
    tried: Answer = field(repr=False)
    tried_where_found: Answer = field(repr=False)

    @property
    def shares(self) -> Tensor:
        """How much of the way each set goes on the held out prompts."""
        return self.tried.normalised

    @property
    def found_shares(self) -> Tensor:
        """How much of the way each set goes on the prompts that it was found on."""
        return self.tried_where_found.normalised

    def __str__(self) -> str:
        counts = (answer.per_prompt.shape[-1] for answer in (self.found, self.tried))
        lines = ["sites found on {} prompts, tried on {} others:".format(*counts)]
        for places, share, own in zip(
            self.sets, self.shares.tolist(), self.found_shares.tolist(), strict=True
        ):
            lines.append(f"  {len(places):>3}  {share:6.2f}  ({own:.2f} where found)  + {places[-1]}")
        return "\n".join(lines)
