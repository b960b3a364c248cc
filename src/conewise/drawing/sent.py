"""What a drawing sends to the script of cones and waves, as types; see `report/sent.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

SentCone = TypedDict(
    "SentCone",
    {
        "names": Sequence[str],
        "sites": Sequence[str],
        "at": Sequence[int],
        "from": int,
        "but": Sequence[tuple[int, int, int]],
        "lost": Sequence[tuple[int, int]],
        "reused": Sequence[tuple[int, int]],
    },
)
"""A cone in short: parts are recomputed whole from `from` on, except those of `but`.

`but` are (part, nodes, FLOPs). `lost` are (part, nodes) that are invalidated and not recomputed; `reused`
those that are read as they are.
"""


class SentFolded(TypedDict):
    """A model folded by layer.

    A part is (row, role, label, meaning, nodes, FLOPs, layer, stack), an edge (part, part, wires), a run
    (cone, how many cells in a row have it).
    """

    kind: Literal["conewise folded"]
    format: int
    model: str
    parts: Sequence[tuple[str, str, str, str, int, int, int | None, str]]
    edges: Sequence[tuple[int, int, int]]
    cones: Sequence[SentCone]
    runs: Sequence[tuple[int, int]]
    demanded: Sequence[str]
    full_evaluations: int
    full_flops: int


class SentWave(TypedDict):
    """What one patch does to a small graph: nodes by number, values in words for those that changed."""

    site: int
    after: Mapping[int, str]
    restored: int
    invalidated: Sequence[int]
    planned: Sequence[int]
    recomputed: Sequence[int]
    reused: Sequence[int]


class SentWaves(TypedDict):
    """Waves through a small graph; a node is (name, whether it is a source)."""

    kind: Literal["conewise waves"]
    nodes: Sequence[tuple[str, bool]]
    targets: Sequence[int]
    full: int
    before: Mapping[int, str]
    waves: Sequence[SentWave]
