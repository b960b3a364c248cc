"""What a pass of a plan consists of: steps, and how each gets what it reads. Data, without a tensor in it.

A pass computes some worlds together. The values of a node in the worlds that changed it are its *stack*, laid
one behind the other along the batch, in the order of the worlds; what no world changed is the baseline's.
Where worlds are numbered, they are numbered within the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conewise.sweeps.planning.passes.worlds import Ranges, count_of


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a stack is brought to the worlds that a reader computes.

    The stack has `worlds`. First those at the places `pick` are taken, None for all; then the baseline is
    added for `add` more worlds, behind them; then they are put in `order`, places again, None where they are
    in order.
    """

    worlds: int = 0
    pick: Ranges | None = None
    add: int = 0
    order: Ranges | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether the stack is taken as it is."""
        return self.pick is None and not self.add and self.order is None


AS_IT_IS = Alignment()


@dataclass(frozen=True, slots=True)
class Read:
    """What a step gets for one of its inputs: the last `rows` positions of it, None for all.

    With `stacked` it is made of the input's stack, which has the last `have` positions, None for all; else it
    is the baseline's value, for as many worlds as the step has.
    """

    node: str
    rows: int | None = None
    stacked: bool = False
    have: int | None = None
    align: Alignment = AS_IT_IS


@dataclass(frozen=True, slots=True)
class Put:
    """Write what worlds put into a node, by the fill tables of the node.

    `fresh` worlds begin with the baseline's value. `again` are worlds whose value was computed; they stand at
    `places` of the stack. Both together are put in `order`. The last `rows` positions are kept, None for all.
    """

    node: str
    fresh: Ranges = ()
    again: Ranges = ()
    places: Ranges = ()
    order: Ranges | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Compute `node` in `worlds`, then `put`, then drop what nothing reads any more.

    Only the last `rows` positions are computed, None for all. `inside` are nodes that the same kernel
    computes on the way. `align` is for a part of several values: it is aligned after it was taken out.
    `kernel` says which of several ways to compute it is meant. A step without worlds only puts.
    """

    node: str
    worlds: Ranges = ()
    rows: int | None = None
    reads: tuple[Read, ...] = ()
    inside: tuple[str, ...] = ()
    align: Alignment = AS_IT_IS
    kernel: str = ""
    put: Put | None = None
    drop: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """In how many worlds the node is computed."""
        return count_of(self.worlds)


@dataclass(frozen=True, slots=True)
class PassProgram:
    """Steps in order, then the `targets`, aligned to all `worlds`.

    `rises` says for each step how many bytes are taken while it runs, beyond what was held before it,
    `reading` the same of the end, when targets are aligned and metrics read; `peak` is the most that is held.
    """

    worlds: int
    steps: tuple[Step, ...]
    targets: tuple[Read, ...]
    rises: tuple[int, ...] = ()
    reading: int = 0
    peak: int = 0
    flops: int = 0

    @property
    def node_evaluations(self) -> int:
        """A node counts once for each world, those inside of a fused chain too."""
        return sum(step.count * (1 + len(step.inside)) for step in self.steps)

    @property
    def launches(self) -> int:
        """How many operations it launches, fills not counted."""
        return sum(1 for step in self.steps if step.worlds)


def to_plain(item: Any) -> Any:
    """Instructions as lists and mappings, what is as usual left out."""
    if isinstance(item, Alignment | Read | Put | Step | PassProgram):
        plain: dict[str, Any] = {}
        for name, field in type(item).__dataclass_fields__.items():
            value = getattr(item, name)
            if value != field.default:
                plain[name] = to_plain(value)
        return plain
    if isinstance(item, tuple):
        return [to_plain(one) for one in item]
    return item


def _ranges(given: Sequence[Sequence[int]] | None) -> Ranges | None:
    return None if given is None else tuple((int(start), int(stop)) for start, stop in given)


def alignment(plain: Mapping[str, Any]) -> Alignment:
    """An alignment from what `to_plain` made of it."""
    pick, order = _ranges(plain.get("pick")), _ranges(plain.get("order"))
    return Alignment(plain.get("worlds", 0), pick, plain.get("add", 0), order)


def read(plain: Mapping[str, Any]) -> Read:
    """A read from what `to_plain` made of it."""
    return Read(
        plain["node"],
        plain.get("rows"),
        bool(plain.get("stacked", False)),
        plain.get("have"),
        alignment(plain.get("align", {})),
    )


def put(plain: Mapping[str, Any]) -> Put:
    """A put from what `to_plain` made of it."""
    fresh, again, places = (_ranges(plain.get(name, ())) or () for name in ("fresh", "again", "places"))
    return Put(plain["node"], fresh, again, places, _ranges(plain.get("order")), plain.get("rows"))


def step(plain: Mapping[str, Any]) -> Step:
    """A step from what `to_plain` made of it."""
    return Step(
        plain["node"],
        _ranges(plain.get("worlds", ())) or (),
        plain.get("rows"),
        tuple(map(read, plain.get("reads", ()))),
        tuple(plain.get("inside", ())),
        alignment(plain.get("align", {})),
        plain.get("kernel", ""),
        put(plain["put"]) if "put" in plain else None,
        tuple(plain.get("drop", ())),
    )


def pass_program(plain: Mapping[str, Any]) -> PassProgram:
    """A pass from what `to_plain` made of it."""
    return PassProgram(
        plain["worlds"],
        tuple(map(step, plain["steps"])),
        tuple(map(read, plain["targets"])),
        tuple(plain.get("rises", ())),
        plain.get("reading", 0),
        plain.get("peak", 0),
        plain.get("flops", 0),
    )
