"""Places: which site of a model, and which part of its value, as people write it."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, overload

from conewise.arguments import checked
from conewise.errors import NotAPlaceError, describe

Index = int | slice | Sequence[int]
MOST = 10_000_000
"""More entries than any axis has: a longer range is a mistake."""
Writers = int | tuple[int, ...]
"""The number of a component that writes into the stream, or those of several."""


@dataclass(frozen=True)
class Place:
    """A site by name, or by kind and layer, and the selected part of its value.

    `part` selects along the natural axes of the site (batch, pos, head, kv_head, neuron, ...); empty means
    all of it.
    """

    name: str
    layer: int | None = None
    stack: str = ""
    part: Mapping[str, Index] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if type(self.part) is not MappingProxyType and not isinstance(self.part, Mapping):
            raise NotAPlaceError(
                f"the part of a place says axes by name, {{'pos': 3}}, not {self.part!r:.80}."
            )
        if not isinstance(self.name, str):
            raise NotAPlaceError(f"a site is named by a text, not by {describe(self.name)}.")
        if self.layer is not None and not isinstance(self.layer, int):
            raise NotAPlaceError(f"a layer is a number, not {describe(self.layer)}.")

    def __hash__(self) -> int:
        return hash((self.name, self.layer, self.stack, frozenset(map(_hashed, self.part.items()))))

    def __str__(self) -> str:
        where = [] if self.layer is None else [f"layer={self.layer}"]
        where += [f"{axis}={_shown(index)}" for axis, index in self.part.items()]
        where += [f"stack={self.stack!r}"] if self.stack else []
        return f"{self.name}[{', '.join(where)}]" if where else self.name

    def __repr__(self) -> str:
        return as_written("site", self.name, {"layer": self.layer, "stack": self.stack or None, **self.part})


class Places(tuple[Place, ...]):
    """Places that one world patches together: one kind of site in several layers."""

    __slots__ = ()


@dataclass(frozen=True)
class EdgePlace(Place):
    """The place of a reader, and an edge into it: what its site would be if another part were written there.

    `edge` is its name, `writer` the number of who writes the part, `entry` the node at which the reader reads
    the sum of all parts. `live` is what is computed anew on the way from the one to the other: nothing, or
    "mlps", or "all". `also` are further writers, where several edges into one reader are patched together.
    """

    edge: str = ""
    writer: int = 0
    entry: str = ""
    live: str = ""
    also: tuple[int, ...] = ()

    @property
    def written_by(self) -> Writers:
        """Whose parts the reader sees others of."""
        return (self.writer, *self.also) if self.also else self.writer

    def __hash__(self) -> int:
        return hash((self.edge, self.writer, self.entry))

    def __str__(self) -> str:
        return self.edge

    def __repr__(self) -> str:
        return f"EdgePlace({self.edge})"


@dataclass(frozen=True)
class SourcedPlace(Place):
    """A place of a sweep that has a source of its own: what is put there is not the sweep's.

    `number` is that of the source among those of the sweep, `label` what it is called. `how` says how it is
    put in: a "value" that is the same in every base, a "shift" that is added to what is there, a "function"
    of what is there, or as a "whole" site of which parts are taken, as from a run. `size` is how many numbers
    a value or a shift has.
    """

    number: int = 0
    label: str = ""
    how: str = "whole"
    size: int = 0

    @property
    def is_function(self) -> bool:
        """True if what is put there depends on what would have been there."""
        return self.how in {"shift", "function"}

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.number, self.label))

    def __str__(self) -> str:
        return f"{super().__str__()} ← {self.label}"


@overload
def site(name: str, *, layer: int | None = None, stack: str = "", **part: Index | str) -> Place: ...
@overload
def site(name: str, *, layer: Index, stack: str = "", **part: Index | str) -> Place | Places: ...
@checked
def site(name: str, *, layer: Index | None = None, stack: str = "", **part: Index | str) -> Place | Places:
    """Name a place: `site("z", layer=2, head=1)`, `site("mlp_out", layer=0, pos=-1)`, `site("lm_head")`.

    `name` is a kind (`z`, `resid_pre`, ...) with its `layer`, a full TransformerLens name, a module's path,
    or an operation's name. `"z[layer=2, head=1]"` includes its part, and so does `"L2H1"`. `stack` selects
    the encoder or the decoder if there are two.

    A part is a number, a slice (or a text, "2:5"), a range, or a list of numbers; lists on several axes mean
    every combination. Several layers, as in `site("attn_scores", layer=range(10, 21), ...)`, are one place in
    each of them, which one world patches together; `cw.sites` has a world for each.
    """
    kind, own = read_name(name)
    given = part if layer is None else {"layer": layer, **part}
    given = {"stack": stack, **given} if stack else given
    if twice := sorted(own.keys() & given.keys()):
        raise NotAPlaceError(f"{name!r} says {twice[0]} already: say it once.")
    own.update(given)
    name, stack, layer = kind, own.pop("stack", ""), own.pop("layer", None)
    indices = MappingProxyType({axis: _index(axis, index) for axis, index in own.items()})
    layers = _layers(layer)
    if isinstance(layers, tuple):
        return Places(Place(name, one, stack, indices) for one in layers)
    return Place(name, layers, stack, indices)


PlaceLike = Place | str | tuple[str, int]

_HEAD = re.compile(r"L(\d+|\*)H(\d+|\*)(<[qkv*]>)?")
_WITH_PART = re.compile(r"\s*([^\[\]]+?)\s*\[([^=\]]+=.*)\]\s*")
_ITEM = re.compile(r"\s*(\w+)\s*=\s*(\[[^\]]*\]|[^,\[\]]+?)\s*(?:,|$)")
_HOOK = re.compile(r"blocks\.(\d+)\.(?:attn\.|mlp\.)?hook_(\w+)")


_NUMBERED = re.compile(r"([a-z]\w*)\[(-?\d+)\]")


def component(name: str) -> tuple[str, str] | None:
    """Layer and head of "L2H1", each a number or "*"; None for what is no head, or a head's input."""
    head = _HEAD.fullmatch(name)
    return None if head is None or head[3] else (head[1], head[2])


def read_name(name: str) -> tuple[str, dict[str, Any]]:
    """The kind that a name means and what it chooses: of "z[layer=2, head=1]", of "L2H1", of "resid_post[2]".

    Any other name is as it is. Choices are numbers, tuples of them, or slices as texts.
    """
    head = component(name)
    if head is not None and "*" not in head:
        return "z", {"layer": int(head[0]), "head": int(head[1])}
    if numbered := _NUMBERED.fullmatch(name):
        return numbered[1], {"layer": int(numbered[2])}
    found = _WITH_PART.fullmatch(name)
    if found is None:
        return name, {}
    choices: dict[str, Any] = {}
    at, text = 0, found[2]
    while at < len(text.rstrip()):
        item = _ITEM.match(text, at)
        try:
            if item is None or item[1] in choices:
                raise ValueError(text)
            choices[item[1]] = _choice(item[1], item[2])
        except ValueError:
            raise NotAPlaceError(
                f"cannot read {text[at:].strip()!r} in {name!r}. A part is AXIS=CHOICE: a number, a list of "
                "numbers or a slice, as in 'z[layer=2, head=1]' and 'resid_pre[layer=3, pos=2:5]'."
            ) from None
        at = item.end()
    return found[1], choices


def _choice(axis: str, text: str) -> Any:
    """A number, several, or a slice as it is written. Raises ValueError for what is none of them."""
    if axis == "stack":
        return text.strip("'\"")
    if text.startswith("["):
        return tuple(int(one) for one in text[1:-1].split(","))
    if text == "*":
        return ":"
    if ":" in text:
        _ = [int(bound) for bound in text.split(":") if bound.strip()]
        return text
    return int(text)


def component_name(text: str) -> str:
    """The name that edges have for a component: "a0.h2" of "L0H2" and of "z[layer=0, head=2]".

    Likewise "a1.h3<v>" of "L1H3<v>", "v[layer=1, head=3]" and "blocks.1.attn.hook_v[head=3]", and "m1" of
    "mlp_out[layer=1]". What is none of these stays as it is.
    """
    text = text.strip()
    if head := _HEAD.fullmatch(text):
        return f"a{head[1]}.h{head[2]}{head[3] or ''}"
    kind, own = read_name(text)
    if hook := _HOOK.fullmatch(kind):
        kind, own = hook[2], {"layer": int(hook[1]), **own}
    if not all(isinstance(index, int) for index in own.values()):
        return text
    match kind, sorted(own):
        case (("z" | "q" | "k" | "v"), [("head" | "kv_head") as axis, "layer"]):
            slot = "" if kind == "z" else f"<{kind}>"
            return f"a{own['layer']}.{'h' if axis == 'head' else 'kv'}{own[axis]}{slot}"
        case (("mlp_out" | "mlp_in"), ["layer"]):
            return f"m{own['layer']}"
        case "resid_pre", ["layer"] if own["layer"] == 0:
            return "input"
    return text


def edge_name(text: str) -> str:
    """The name of an edge, `a0.h2->m1` or `a0.h2->m1@7`, of one whose ends are named in any way."""
    writer, arrow, reader = text.partition("->")
    reader, at, pos = reader.partition("@")
    return f"{component_name(writer)}{arrow}{component_name(reader)}{at}{pos.strip()}" if arrow else text


def as_place(given: object) -> Place:
    """A place from what people write in brackets: `run["z", 2]`, `run["L2H1"]`, `run["z[layer=2]"]`."""
    if isinstance(given, Place):
        return given
    if isinstance(given, str) and read_name(given)[0] != given:
        given = site(given)
        if isinstance(given, Place):
            return given
    match given:
        case str():
            return Place(given)
        case (str() as kind, int() as layer) if not isinstance(layer, bool):
            return Place(kind, layer)
    if isinstance(given, Places):
        raise NotAPlaceError(
            f"{' + '.join(map(str, given))} are {len(given)} places, and one is meant here: take them apart."
        )
    raise NotAPlaceError(
        f"a place is a site's name, a pair (kind, layer) or `site(kind, layer=..., head=...)`, and "
        f"{given!r} is none of these."
    )


def as_written(function: str, name: str, options: Mapping[str, object]) -> str:
    """The call that makes a place or a selector, as people write it; options that are None are left out."""
    given = [f"{option}={value!r}" for option, value in options.items() if value is not None]
    return f"{function}({', '.join([repr(name), *given])})"


def _layers(layer: object) -> int | tuple[int, ...] | None:
    """The layer of a place, or those of several places."""
    found = None if layer is None else _index("layer", layer)
    if isinstance(found, slice):
        # How many layers there are, only a model says.
        if found.stop is None or found.stop < 0 or (found.start or 0) < 0:
            raise NotAPlaceError(f"layer={layer!r} has no end that is known here: write range(first, end).")
        found = tuple(range(min(found.stop, MOST))[found])
    if isinstance(found, Sequence) and (not found or len(set(found)) < len(found)):
        raise NotAPlaceError(f"layer has to name one layer or several different ones, not {layer!r}.")
    return found if found is None or isinstance(found, int) else tuple(found)


def _index(axis: str, index: object) -> Index:
    """A part as a plain number, a slice, or a tuple of numbers, whatever kind of number was given."""
    try:
        if isinstance(index, slice):
            bounds = (index.start, index.stop, index.step)
            return _stepping(slice(*(None if bound is None else as_number(bound) for bound in bounds)))
        if isinstance(index, str) and ":" in index:
            return _stepping(slice(*(int(bound) if bound.strip() else None for bound in index.split(":"))))
        return as_numbers(index)
    except (TypeError, ValueError):
        raise NotAPlaceError(
            f"{axis} is a number, a slice or a list of numbers, and {index!r} is none of these."
        ) from None


def _stepping(index: slice) -> slice:
    """The slice. Raises ValueError for one that stays where it is."""
    if index.step == 0:
        raise ValueError(index)
    return index


def as_numbers(index: object) -> int | tuple[int, ...]:
    """A plain number, or several, whatever they were given in. Raises TypeError for what is none."""
    if hasattr(index, "tolist"):  # an array or a tensor
        try:
            index = index.tolist()
        except (RuntimeError, NotImplementedError):  # it has no numbers, or no dense ones
            raise TypeError(index) from None
    index = expect_few(index)
    if isinstance(index, Iterable) and not isinstance(index, str | bytes | Mapping):
        return tuple(map(as_number, index))
    return as_number(index)


def expect_few(given: Any) -> Any:
    """Return what was given. Raises TypeError for a range that would not end."""
    if isinstance(given, range) and (given.stop - given.start) // given.step > MOST:
        raise TypeError(given)
    return given


def as_number(index: object) -> int:
    """A plain number, whatever kind of whole number was given. Raises TypeError for what is none."""
    if isinstance(index, bool | type) or not hasattr(index, "__index__"):
        raise TypeError(index)
    return operator.index(index)


def _hashed(item: tuple[str, Index]) -> tuple[object, ...]:
    axis, index = item
    if isinstance(index, slice):
        return axis, index.start, index.stop, index.step
    return axis, index if isinstance(index, int) else tuple(index)


def _shown(index: Index) -> str:
    if isinstance(index, slice):
        start, stop = ("" if bound is None else str(bound) for bound in (index.start, index.stop))
        return f"{start}:{stop}" + (f":{index.step}" if index.step is not None else "")
    return str(index) if isinstance(index, int) else str(list(index))


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
