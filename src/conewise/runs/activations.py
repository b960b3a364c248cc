"""Activations: the values of a site for any number of texts of any lengths, as one array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from conewise.anatomy.places import Place, PlaceLike, as_place
from conewise.anatomy.selectors import Selector, chosen
from conewise.arguments import expect, shown_bytes
from conewise.errors import PromptError, SiteError, describe
from conewise.extras import needs
from conewise.files import as_path
from conewise.jobs.progress import Shown, bar
from conewise.program.tensors import Tensor, computing
from conewise.program.walk import run_sources, stream
from conewise.reactive.world import World
from conewise.runs.captured import Captured
from conewise.runs.inputs import token_inputs, tokens_of
from conewise.runs.run import Run, bound, sizes_of
from conewise.templates import heading, shown, table

if TYPE_CHECKING:
    import pandas as pd

MOST = 4096
"""Numbers along an axis are named up to here."""

Pos = int | str | Sequence[int]
"""A position, several, "mean" over all of a text, or "all", a row for each token."""


@dataclass(frozen=True, eq=False, repr=False)
class Activations:
    """Values of a site: `values` is [row, ...] with the axes `axes`, and one row for each text or each token.

    `texts` and `positions` hold the text and the position of each row; the position is -1 for a mean.
    `coordinates` are the selected numbers along the axes. If a file was given, `values` is stored on disk.
    """

    site: str
    values: Tensor
    axes: tuple[str, ...]
    coordinates: Mapping[str, tuple[int, ...]]
    texts: tuple[int, ...]
    positions: tuple[int, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.values.float().numpy() if self.values.dtype == torch.bfloat16 else self.values.numpy()
        return np.array(found, dtype=dtype, copy=True) if copy else np.asarray(found, dtype=dtype)

    def __len__(self) -> int:
        return len(self.values)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with a row for each text (or token) and place, and a column for each feature."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        inner = self.axes[1:-1]
        shape = self.values.shape[1:-1]
        index = np.indices((len(self), *shape)).reshape(1 + len(shape), -1)
        known = {"text": np.asarray(self.texts)[index[0]]}
        if self.axes[0] == "token":
            known["pos"] = np.asarray(self.positions)[index[0]]
        for axis, along in zip(inner, index[1:], strict=True):
            numbers = self.coordinates.get(axis)
            known[axis] = along if numbers is None else np.asarray(numbers)[along]
        features = np.asarray(self).reshape(-1, self.values.shape[-1])
        return pd.concat([pd.DataFrame(known), pd.DataFrame(features)], axis=1)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.values.shape))
        return f"Activations of {self.site}: {shape} ({', '.join(self.axes)}), {self.values.dtype}"

    def _repr_html_(self) -> str:
        sizes = [(axis, f"{size:,}") for axis, size in zip(self.axes, self.values.shape, strict=True)]
        about = table([*sizes, ("dtype", str(self.values.dtype)), ("bytes", shown_bytes(self.values.nbytes))])
        return shown(heading("Activations", f"of {self.site}"), about)


def activations(
    model: Captured,
    texts: Sequence[Any],
    sites: Selector | PlaceLike,
    pos: Pos,
    batch: int,
    out: str | Path | None,
    progress: Shown,
) -> Activations:
    """Return the values of a site for every text; see `Model.activations`."""
    rows = _token_rows(model, texts)
    places, layers = _places(model, sites)
    found = [model.locate(place) for place in places]
    axes = list(found[0].part_axes)
    if axes[:2] != ["batch", "pos"]:
        raise SiteError(
            f"{places[0]} has the axes {', '.join(axes)}, and activations are read of sites with a batch and "
            "positions. Leave both out of the site: positions are chosen with `pos=`."
        )
    picked = [_positions(pos, len(row), number) for number, row in enumerate(rows)]
    counts = [1 if pos == "mean" else len(own) for own in picked]
    is_alike = not isinstance(pos, str)
    starts = np.cumsum([0, *counts])
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    nodes = sorted({one.node for one in found} | {one.result.weight for one in found if one.result})
    leaves = [leaf.name for leaf in model.program.inputs]
    name = "input_ids" if "input_ids" in leaves else leaves[0]
    values: Tensor | None = None
    with bar(progress, len(rows), None) as tell, computing():
        for some in _batches(order, rows, batch):
            tokens = torch.tensor([rows[number] for number in some])
            inputs = bound(model, (), token_inputs(model, tokens, name))
            sources = run_sources(model.program, inputs)
            world = World.partial(model.graph, stream(model.graph, sources, nodes) | sources)
            run = Run(model, world, sizes_of(model, inputs), inputs)
            with run.trusted():
                read = torch.stack([run.read(place) for place in places], 2)  # [batch, pos, layer, ...]
            for row, number in enumerate(some):
                at = torch.tensor(picked[number], device=read.device)
                own = read[row].index_select(0, at)
                own = own.mean(0, keepdim=True) if pos == "mean" else own
                if values is None:
                    values = _empty((int(starts[-1]), *own.shape[1:]), own.dtype, out)
                values[int(starts[number]) : int(starts[number + 1])] = own.cpu()
            tell(len(some))
    assert values is not None
    positions = tuple(
        -1 if pos == "mean" else one for own in picked for one in (own[:1] if pos == "mean" else own)
    )
    of = tuple(number for number, count in enumerate(counts) for _ in range(count))
    coordinates: dict[str, tuple[int, ...]] = {
        axis: index if isinstance(index, tuple) else tuple(range(index.start or 0, MOST, index.step or 1))
        for axis, index in places[0].part.items()
        if isinstance(index, slice | tuple) and axis in axes[2:-1]
    }
    names = ["token" if pos == "all" else "text", "layer", *axes[2:]]
    if layers is None:
        values = values.squeeze(1)
        names.remove("layer")
    else:
        coordinates["layer"] = tuple(layers)
    if is_alike and not isinstance(pos, int):
        values = values.unflatten(0, (len(rows), -1))  # type: ignore[no-untyped-call]
        names.insert(1, "pos")
        coordinates["pos"] = tuple(int(one) for one in pos)
        of = tuple(range(len(rows)))
    return Activations(str(sites), values, tuple(names), MappingProxyType(coordinates), of, positions)


def _token_rows(model: Captured, texts: Sequence[Any]) -> list[list[int]]:
    """The tokens of each text; of rows of tokens, these."""
    if isinstance(texts, str) or not len(texts):
        raise PromptError(
            f"activations are read of a list of texts, or of rows of tokens, not {describe(texts)}."
        )
    rows = []
    for number, one in enumerate(texts):
        if isinstance(one, str):
            if model.tokenizer is None:
                raise PromptError(
                    f"text {number} is a text, and the model has no tokenizer: give rows of tokens."
                )
            rows.append(tokens_of(model.tokenizer, one)[0].tolist())
            continue
        row = one.tolist() if hasattr(one, "tolist") else list(one)
        if not row or not all(type(token) is int for token in row):
            raise PromptError(f"text {number} is {describe(one)}: give a text, or a row of tokens.")
        rows.append(row)
    return rows


def _places(model: Captured, sites: Selector | PlaceLike) -> tuple[list[Place], list[int] | None]:
    """The places of each layer, and the layers; None for one layer that was named by its number."""
    if not isinstance(sites, Selector):
        return [as_place(sites)], None
    choices = dict(sites.choices)
    if "pos" in choices or "batch" in choices:
        raise SiteError(f"{sites!r}: leave pos and batch out of the sites, and choose with `pos=`.")
    layer = choices.pop("layer", None)
    part: dict[str, Any] = {}
    known = model.sites.layers(sites.name, sites.stack)
    layers: list[int] | None = None
    if layer is not None:
        numbers = chosen(layer, max(known, default=-1) + 1, "layer", sites)
        layers = None if isinstance(layer, int) else [one for one in numbers if one in known]
        known = tuple(numbers if layers is None else layers)
    first = Place(sites.name, known[0] if layer is not None else None, sites.stack)
    lengths = dict(zip(model.locate(first).view.axes, (None,) * 9, strict=False))
    for axis, choice in choices.items():
        own = next((one for one in ("d_model", "d_head") if one in lengths), axis) if axis == "d" else axis
        if choice == ":":
            continue
        part[own] = (
            slice(*(int(b) if b.strip() else None for b in choice.split(":")))
            if isinstance(choice, str)
            else choice
        )
    return [
        Place(sites.name, one, sites.stack, MappingProxyType(part))
        for one in (known if layer is not None else [None])
    ], layers


def _positions(pos: Pos, length: int, number: int) -> list[int]:
    """The positions that are read of a text of so many tokens, from 0."""
    if isinstance(pos, str):
        if pos not in {"mean", "all"}:
            raise SiteError(f"pos={pos!r} is no position: give a number, several, 'mean' or 'all'.")
        return list(range(length))
    listed = [pos] if isinstance(pos, int) else [expect("pos", one, "int") for one in pos]
    outside = [one for one in listed if not -length <= one < length]
    if outside or not listed:
        raise SiteError(f"pos={outside[0] if outside else pos}: text {number} has {length} tokens.")
    return [one % length for one in listed]


def _batches(order: Sequence[int], rows: Sequence[Sequence[int]], batch: int) -> Iterator[list[int]]:
    """Texts of one length, so many at a time."""
    some: list[int] = []
    for number in order:
        if some and (len(some) == batch or len(rows[number]) != len(rows[some[0]])):
            yield some
            some = []
        some.append(number)
    if some:
        yield some


def _empty(shape: tuple[int, ...], dtype: torch.dtype, out: str | Path | None) -> Tensor:
    """An array to be filled: in memory, or a file of NumPy's on disk."""
    if out is None:
        return torch.empty(shape, dtype=dtype)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    kind = torch.empty(0, dtype=wide).numpy().dtype
    path = as_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    return torch.from_numpy(np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape))
