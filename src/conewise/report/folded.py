"""A folded model as data: its parts, the edges between them, the cones of a sweep's cells; JSON both ways.

Cells at the same node have the same cone, so that a million cells need no more room than the nodes they
lie at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any

from conewise.errors import MissingSiteError
from conewise.files import Format
from conewise.report.sent import SentCone, SentFolded
from conewise.report.story import JsonRecord
from conewise.sweeps.storage.codec import decoded

MOST = 20_000_000
"""Counts of all cones together, one for each part, that are read from a file."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some nodes of a model that are drawn as one.

    Parts of one `row` are drawn side by side, one for each `role`. `nodes` counts those that are
    computed, so that a part of inputs has none. `flops` are those of one run; 0 where none was given.
    """

    row: str
    role: str
    label: str
    meaning: str
    nodes: int
    flops: int = 0
    layer: int | None = None
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Cone:
    """The nodes that a world recomputes when it patches `sites`, counted for each part.

    `at` are the parts of the sites. `recomputed` is cut to what the demand needs: its sum is what the
    world's ledger counts. `invalidated` is not cut: all that was valid and is not any more.
    `reused` counts the computed nodes that are read as they are. `flops`: those of the recomputed nodes.
    """

    names: tuple[str, ...]
    sites: tuple[str, ...]
    at: tuple[int, ...]
    recomputed: tuple[int, ...]
    invalidated: tuple[int, ...]
    reused: tuple[int, ...]
    flops: tuple[int, ...]

    @property
    def node_evaluations(self) -> int:
        """The number of nodes that the world computes."""
        return sum(self.recomputed)


@dataclass(frozen=True)
class Folded(JsonRecord):
    """A model's parts, the edges between them with their numbers of wires, and the cones of some cells.

    `runs` are the cells in their order, as (cone, how many cells in a row have it). `demanded` are the
    nodes that were asked for; answering them from nothing computes `full_evaluations` nodes.
    """

    FORMAT = Format("conewise folded", 1)
    CALLED = "a folded model"

    model: str
    parts: tuple[Part, ...]
    edges: tuple[tuple[int, int, int], ...]
    cones: tuple[Cone, ...]
    runs: tuple[tuple[int, int], ...]
    demanded: tuple[str, ...]
    full_evaluations: int
    full_flops: int

    @property
    def rows(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The rows of the drawing, from the inputs down: their names, and their parts."""
        numbered = groupby(enumerate(self.parts), key=lambda item: item[1].row)
        return tuple((row, tuple(number for number, _ in items)) for row, items in numbered)

    @property
    def node_evaluations(self) -> int:
        """The sum over all cells of the nodes that their worlds compute: the plan's number."""
        return sum(self.cones[cone].node_evaluations * count for cone, count in self.runs)

    @property
    def flops(self) -> int:
        """The sum over all cells of the floating-point operations of their worlds, one by one."""
        return sum(sum(self.cones[cone].flops) * count for cone, count in self.runs)

    @cached_property
    def names(self) -> Mapping[str, int]:
        """The cone of each place by name, whatever part of its value is meant: see `without_part`."""
        return MappingProxyType({name: at for at, cone in enumerate(self.cones) for name in cone.names})

    def cone(self, name: str) -> Cone:
        """The cone of a cell, by the cell's name or by that of its site."""
        found = self.names.get(name, self.names.get(without_part(name)))
        if found is None:
            some = ", ".join(list(self.names)[:3])
            raise MissingSiteError(
                f"no cone of {name!r} was folded: there are {len(self.names)}, {some} for example. Fold it "
                "with `fold(model, [name])`."
            )
        return self.cones[found]

    def sent(self) -> SentFolded:
        """Return all of it as plain data, cones in short."""
        return {
            "kind": "conewise folded",
            "format": self.FORMAT.version,
            "model": self.model,
            "parts": [
                (p.row, p.role, p.label, p.meaning, p.nodes, p.flops, p.layer, p.stack) for p in self.parts
            ],
            "edges": self.edges,
            "cones": [_packed(cone, self.parts) for cone in self.cones],
            "runs": self.runs,
            "demanded": self.demanded,
            "full_evaluations": self.full_evaluations,
            "full_flops": self.full_flops,
        }

    def to_json(self) -> str:
        """Return all of it as JSON: see `from_json`."""
        whole = {**self.FORMAT.header(), **self.sent()}
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of(cls, data: Any) -> Folded:
        """See `JsonRecord`."""
        return _folded(decoded(data, SentFolded, cls.CALLED))


def without_part(name: str) -> str:
    """The name of a place, or of several, without the part of the value: `z[layer=2, head=1]`: `z[layer=2]`.

    `javascript/wave/show.js` does the same in the browser, where only these names are known.
    """
    return " + ".join(map(_without_part, name.split(" + ")))


def _without_part(name: str) -> str:
    site, bracket, where = name.partition("[")
    kept = [item for item in where.removesuffix("]").split(", ") if item.startswith(("layer=", "stack="))]
    if not bracket:
        return name
    return f"{site}[{', '.join(kept)}]" if kept else site


def _packed(cone: Cone, parts: Sequence[Part]) -> SentCone:
    """A cone in short: whole parts from `from` on, and `but` where that is not so.

    Below a site nearly every part is recomputed whole, above it none is.
    """
    whole = [part.nodes for part in parts]
    # What has to be listed if all parts from a place on count as whole: those above that are not zero, and
    # those below that are not whole.
    misses = sum(count != full for count, full in zip(cone.recomputed, whole, strict=True))
    best, least = 0, misses
    for at, (count, full) in enumerate(zip(cone.recomputed, whole, strict=True)):
        misses += (count != 0) - (count != full)
        if misses < least:
            best, least = at + 1, misses
    expected = [part.nodes if at >= best else 0 for at, part in enumerate(parts)]
    costs = [part.flops if at >= best else 0 for at, part in enumerate(parts)]
    lost = [i - r for i, r in zip(cone.invalidated, cone.recomputed, strict=True)]
    return {
        "names": cone.names,
        "sites": cone.sites,
        "at": cone.at,
        "from": best,
        "but": [
            (at, count, cone.flops[at])
            for at, count in enumerate(cone.recomputed)
            if (count, cone.flops[at]) != (expected[at], costs[at])
        ],
        "lost": [(at, count) for at, count in enumerate(lost) if count],
        "reused": [(at, count) for at, count in enumerate(cone.reused) if count],
    }


def _folded(written: SentFolded) -> Folded:
    """Return the model. Raises ValueError where a number of a part or a cone is that of none."""
    parts = tuple(Part(*part) for part in written["parts"])
    if len(parts) * len(written["cones"]) > MOST:
        raise ValueError(f"{len(written['cones']):,} cones over {len(parts):,} parts are too many")
    for one, other, _ in written["edges"]:
        _expect_numbers((one, other), len(parts), "part")
    _expect_numbers((cone for cone, _ in written["runs"]), len(written["cones"]), "cone")
    if any(count < 0 for _, count in written["runs"]):
        raise ValueError("a cone is that of fewer than no cells")
    return Folded(
        model=written["model"],
        parts=parts,
        edges=tuple(written["edges"]),
        cones=tuple(_unpacked(cone, parts) for cone in written["cones"]),
        runs=tuple(written["runs"]),
        demanded=tuple(written["demanded"]),
        full_evaluations=written["full_evaluations"],
        full_flops=written["full_flops"],
    )


def _expect_numbers(numbers: Iterable[int], count: int, what: str) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise ValueError(f"there is no {what} {number}: there are {count}")


def _unpacked(cone: SentCone, parts: Sequence[Part]) -> Cone:
    listed = (*cone["at"], *(at for at, *_ in (*cone["but"], *cone["lost"], *cone["reused"])))
    _expect_numbers(listed, len(parts), "part")
    recomputed = [part.nodes if at >= cone["from"] else 0 for at, part in enumerate(parts)]
    flops = [part.flops if at >= cone["from"] else 0 for at, part in enumerate(parts)]
    for at, count, cost in cone["but"]:
        recomputed[at], flops[at] = count, cost
    invalidated, reused = list(recomputed), [0] * len(parts)
    for at, count in cone["lost"]:
        invalidated[at] += count
    for at, count in cone["reused"]:
        reused[at] = count
    return Cone(
        names=tuple(cone["names"]),
        sites=tuple(cone["sites"]),
        at=tuple(cone["at"]),
        recomputed=tuple(recomputed),
        invalidated=tuple(invalidated),
        reused=tuple(reused),
        flops=tuple(flops),
    )
