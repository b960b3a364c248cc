"""Places: which site of a model, and which part of its value, as people write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

Index = int | slice | Sequence[int]


@dataclass(frozen=True)
class Place:
    """A site by name, or by kind and layer, and the part of its value that is meant.

    `part` selects along the natural axes of the site (batch, pos, head, kv_head, neuron, ...);
    empty means all of it.
    """

    name: str
    layer: int | None = None
    stack: str = ""
    part: Mapping[str, Index] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        where = [] if self.layer is None else [f"layer={self.layer}"]
        where += [f"{axis}={_shown(index)}" for axis, index in self.part.items()]
        where += [f"stack={self.stack!r}"] if self.stack else []
        return f"{self.name}[{', '.join(where)}]" if where else self.name


def site(name: str, *, layer: int | None = None, stack: str = "", **part: Index) -> Place:
    """A place: `site("z", layer=2, head=1)`, `site("mlp_out", layer=0, pos=-1)`, `site("lm_head")`.

    `name` is a kind (`z`, `resid_pre`, ...) with its `layer`, a full TransformerLens name, a
    module's path, or an operation's name. `stack` tells encoder from decoder where there are two.
    """
    return Place(name, layer, stack, MappingProxyType(part))


PlaceLike = Place | str | tuple[str, int]


def as_place(given: object) -> Place:
    """A place from what people write in brackets: `run["z", 2]`, `run["blocks.2.attn.hook_z"]`."""
    if isinstance(given, Place):
        return given
    match given:
        case str():
            return Place(given)
        case (str() as kind, int() as layer):
            return Place(kind, layer)
    raise TypeError(
        f"a place is a site's name, a pair (kind, layer) or `site(kind, layer=..., head=...)`, and "
        f"{given!r} is none of these."
    )


def _shown(index: Index) -> str:
    if isinstance(index, slice):
        start, stop = ("" if bound is None else str(bound) for bound in (index.start, index.stop))
        return f"{start}:{stop}" + (f":{index.step}" if index.step is not None else "")
    return str(index)
