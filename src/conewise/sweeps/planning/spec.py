"""The spec of a sweep: places, metrics, precision. Frozen, and without a run in it."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from conewise.anatomy.places import Place, SourcedPlace
from conewise.program.tensors import Tensor, computing
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.sweeps.planning.layout import Layout
from conewise.sweeps.planning.regions import RegionFinder
from conewise.sweeps.planning.shapes import ShapeFacts


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
            (
                *(m.name, m.output, m.last, m.rows, m.whole),
                *(len(set(m.tokens)), m.among is not None, m.copies),
                *map(str, m.reads),
            )
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
        """The places with sources of their own: which source, how it is put in, and how large it is."""
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


@dataclass(frozen=True, slots=True)
class ReadOut:
    """The nodes that metrics read, those read at the last positions alone, and how many columns of a product.

    `taken` has what each metric takes for one number of what it reads, in bytes; see `Metric.copies`.
    """

    targets: tuple[str, ...]
    last: tuple[str, ...]
    columns: tuple[tuple[str, int], ...] = ()
    taken: tuple[tuple[str, bool, int], ...] = ()


# ------------------------------------------------------------------------------------------
# What a plan depends on besides what is asked and the shape of the runs: plain values, read off the runs.


@dataclass(frozen=True, slots=True)
class StandingEdit:
    """An edit that stands in the base: its number, its node, whether it replaces the node's whole value."""

    number: int
    node: str
    covers: bool
    is_function: bool
    site: tuple[str, int | None, str] = ("", None, "")


@dataclass(frozen=True, slots=True)
class StoredCut:
    """The chunks of a stored run: another cut would round differently."""

    evaluator: str
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that a plan depends on besides what is asked and the shape of the runs.

    `first_change` is the first position at which base and source can differ, `differing` the inputs that do.
    `masks` says what attention masks hide, `edits` what stands in the base. `tail` is how many of the last
    positions the metrics read, where each reads one: more than 1 where prompts are padded behind. `obstacle`
    says why worlds cannot be stacked. `cut` is how a run that is resumed was cut. `along` is how many runs
    are computed along with the worlds, where weights stream.
    """

    first_change: int = 0
    differing: frozenset[str] = frozenset()
    masks: tuple[tuple[str, Any], ...] = ()
    edits: tuple[StandingEdit, ...] = ()
    tail: int = 1
    obstacle: str = ""
    max_memory: int | None = None
    evaluator: str = "auto"
    cut: StoredCut | None = None
    along: int = 0


def read_conditions(
    base: Reading, source: Reading | None, shape: ShapeFacts, read: Callable[[str], Any]
) -> Conditions:
    """The conditions of two runs of one shape, without what is asked of the plan; `read` reads the base.

    Whether anything keeps worlds from being stacked is not known yet.
    """
    first, differing = 0, frozenset[str]()
    if source is not None:
        first, differing = first_difference(base, source, shape.finder, shape.layout)
    with computing():
        masks = tuple(sorted(shape.masks(read).items(), key=lambda item: item[0]))
    return Conditions(first, differing, masks, standing_edits(base))


def standing_edits(base: Reading) -> tuple[StandingEdit, ...]:
    """Return the edits that stand in a base, in the order in which it was patched."""
    edits = []
    for number, edit in enumerate(base.edits):
        site = edit.place.name, edit.place.layer, edit.place.stack
        is_function = not isinstance(edit.part, Tensor)
        edits.append(StandingEdit(number, edit.node, edit.covers, is_function, site))
    return tuple(edits)


# ------------------------------------------------------------------------------------------
# Where a sweep's changes begin: read off the inputs and the places, before anything is computed.
#
# In a causal model, runs whose inputs agree up to a position agree in every value up to there. So the first
# position at which base and source inputs differ is the first that a patch from the source can change.


def only_length(layout: Layout) -> int:
    """Return how many positions a run has; 0 where its inputs have several lengths, or none."""
    lengths = layout.lengths
    return next(iter(lengths)) if len(lengths) == 1 else 0


def first_position(part: Any, length: int) -> int:
    """The first of the positions that are selected."""
    rows = range(length)
    picked = [rows[part]] if isinstance(part, int) else rows[part] if isinstance(part, slice) else part
    return min((row % length for row in picked), default=0)


@torch.no_grad()
def first_difference(
    base: Reading, source: Reading, finder: RegionFinder, layout: Layout
) -> tuple[int, frozenset[str]]:
    """The first position at which two runs can differ, and the inputs that do.

    They differ in their inputs, or where either was patched; where nothing does, it is the last position. The
    device is waited for once.
    """
    length = only_length(layout)
    if not length:
        return 0, frozenset()
    found, differing, whole = length - 1, set[str](), set[str]()
    for run in (base, source):
        for edit in run.edits:
            part = edit.place.part.get("pos")
            view = edit.found.site.view or edit.found.view
            if part is None or not finder.shows_positions(edit.node, view):
                return 0, frozenset()
            found = min(found, first_position(part, length))
    if not base.inputs.keys() <= source.inputs.keys():
        return 0, frozenset()
    flags: dict[str, torch.Tensor] = {}
    for name, value in base.inputs.items():
        differs = value != source.inputs[name]
        dim, batch = layout.pos_dim.get(name), layout.batch_dim.get(name)
        if dim is None or layout.length(name) != length or (dim == batch and not finder.has_rows(name)):
            flags[name] = differs.any().reshape(1)
            whole.add(name)
            continue
        if dim == batch:
            differs, dim = differs.unflatten(dim, (-1, length)), dim + 1  # type: ignore[no-untyped-call]
        flags[name] = differs.movedim(dim, 0).reshape(differs.shape[dim], -1).any(1)
    for name, rows in _read(flags).items():
        if True in rows:
            if name in whole:
                return 0, frozenset()
            found = min(found, rows.index(True))
            differing.add(name)
    return found, frozenset(differing)


def _read(flags: Mapping[str, torch.Tensor]) -> dict[str, list[bool]]:
    """The flags of each name, read at once where they lie on one device."""
    if len({one.device for one in flags.values()}) > 1:
        return {name: one.tolist() for name, one in flags.items()}
    together = iter(torch.cat(list(flags.values())).tolist() if flags else [])
    return {name: list(itertools.islice(together, len(one))) for name, one in flags.items()}
