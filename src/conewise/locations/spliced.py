"""What is known of a dictionary that was spliced into a model."""

from __future__ import annotations

from dataclasses import dataclass

from conewise.locations.places import Place


@dataclass(frozen=True, slots=True)
class Spliced:
    """A dictionary in its place: `reads` and `place` are one, but for a transcoder.

    `latents` is how many it has. On the example of the capture, `deviation` is the largest difference between
    the model's outputs with and without it (0: equal bit for bit), and `missed` the length of the error term,
    as a share of the length of what stands at the place. `unhooked` says why hooks on the module cannot
    check what is patched in it; it is empty where they can.
    """

    name: str
    place: Place
    reads: Place
    latents: int
    deviation: float
    missed: float
    unhooked: str = ""

    def __str__(self) -> str:
        where = f"at {self.place}" if self.reads == self.place else f"from {self.reads} to {self.place}"
        same = (
            "bit for bit as without it"
            if not self.deviation
            else f"{self.deviation:.2g} from those without it"
        )
        return (
            f"{self.name} {where}: {self.latents:,} latents, {self.missed:.1%} of the value in the error "
            f"term; outputs are {same}"
        )
