"""The types of what pages send to their scripts.

`javascript/sent.d.ts` says the same to the scripts: `python -m tests.javascript.sent_types` writes it, a test
compares it. Keys are those of JSON, and so are their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, final

Colour = tuple[int, int, int]


@final
class SentFixed(TypedDict):
    """A coordinate that is the same for every cell of a part."""

    fixed: int


@final
class SentAlong(TypedDict):
    """A coordinate that is the number along an axis of its part."""

    axis: int


@final
class SentListed(TypedDict):
    """A coordinate of each cell of a part: base64 of 32-bit whole numbers, low byte first."""

    list: str


class SentPart(TypedDict):
    """A part of a sweep: a grid of cells, the last axis the fastest.

    A cell's name is `pieces`, texts and numbers of axes in turn, or is listed in `names`; its kind is `kind`,
    or is listed in `kinds`. `labels` are those of each axis, none for an axis of numbers.
    """

    name: str
    axes: Sequence[str]
    coordinates: Sequence[Sequence[int]]
    labels: Sequence[Sequence[str]] | None
    start: int
    count: int
    pieces: Sequence[str | int] | None
    names: Sequence[str] | None
    kind: str | None
    kinds: Sequence[str] | None
    at: Mapping[str, SentFixed | SentAlong | SentListed]


class SentCosts(TypedDict):
    """The costs of the cones of cells: `runs` are cells in their order, as (cone, how many in a row have it).

    `full` are the nodes and FLOPs of a full run.
    """

    runs: Sequence[tuple[int, int]]
    evaluations: Sequence[int]
    flops: Sequence[int]
    full: tuple[int, int]


class SentColours(TypedDict):
    """The colours of effects, from the lowest to the highest, on a light page and on a dark one."""

    light: Sequence[Colour]
    dark: Sequence[Colour]


class SentSweep(TypedDict):
    """A sweep. Numbers are base64 of 64 bits each: [metric, cell], [metric], [metric, cell, prompt].

    `tokens` are those at each position, none where prompts have different lengths.
    """

    metrics: Sequence[str]
    table: str
    base: str
    source: str | None
    prompts: int
    unit: str
    perPrompt: str | None
    basePerPrompt: str | None
    sourcePerPrompt: str | None
    parts: Sequence[SentPart]
    tokens: Sequence[str]
    costs: SentCosts | None
    colours: SentColours


class SentPattern(TypedDict):
    """Where one head looks on one prompt: `weights` are [query, key]."""

    layer: int
    head: int
    effect: float
    prompt: int
    weights: Sequence[Sequence[float]]


class SentInside(TypedDict):
    """The inside of the base run: the tokens of each prompt, and where heads look."""

    tokens: Sequence[Sequence[str]]
    patterns: Sequence[SentPattern]


SentEdge = TypedDict(
    "SentEdge",
    {
        "name": str,
        "from": int,
        "to": int,
        "slot": str,
        "curve": Sequence[tuple[float, float]],
        "score": float | None,
        "level": float,
        "own": bool,
    },
)
"""An edge of a circuit between two boxes, by number; `level` is the largest threshold that has it, or −1."""


class SentOwn(TypedDict):
    """The circuit itself: its size, and its faithfulness where that was measured."""

    edges: int
    faithfulness: float | None


class SentCircuit(TypedDict):
    """A circuit: a picture of so many columns and rows, and the points of its curve.

    A box is (name, kind, layer, column, row), a link (box, box), a point (threshold, edges, faithfulness).
    """

    columns: int
    rows: int
    boxes: Sequence[tuple[str, str, int | None, float, float]]
    links: Sequence[tuple[int, int]]
    edges: Sequence[SentEdge]
    points: Sequence[tuple[float, int, float | None]]
    own: SentOwn


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
    """The effect of one patch on a small graph: nodes by number, values in words for those that changed."""

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
