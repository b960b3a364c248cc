"""The run of a model for one input: what every patch is compared with, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conewise.amounts import as_bytes
from conewise.arguments import has_items
from conewise.errors import PatchError, SweepError
from conewise.locations.places import Place, PlaceLike
from conewise.program.build import run_sources
from conewise.program.records import SIZES
from conewise.program.streaming import output_names
from conewise.program.tensors import Tensor, computing, copy_of
from conewise.program.walk import stream
from conewise.reactive.world import World
from conewise.runs.captured import Captured
from conewise.runs.run import Run
from conewise.runs.text_inputs import with_tokens

KEEP_ALL_BYTES = 1 << 30
"""A run keeps every value while they are estimated to take no more than this; see `Model.run`."""

Keep = Iterable[PlaceLike] | str | int | None


def baseline(model: Captured, args: Sequence[Any], kwargs: Mapping[str, Any], keep: Keep = None) -> Run:
    """The module's outputs for one input, and every site's value; see `Model.run` for `keep`."""
    model.weights.expect_captured()
    inputs = bound(model, args, kwargs)
    return Run(model, computed(model, inputs, keep), sizes_of(model, inputs), inputs)


def bound(model: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Inputs by name, as copies of what was given; texts as tokens.

    Raises InputMismatchError where they do not fit, PromptError where texts cannot be read.
    """
    args, kwargs = with_tokens(model, args, kwargs)
    inputs = {name: copy_of(value) for name, value in model.signature.bind(args, kwargs).items()}
    sizes_of(model, inputs)
    model.expect_known_ids(inputs)
    return inputs


def sizes_of(model: Captured, inputs: dict[str, Tensor]) -> tuple[int, ...]:
    """The sizes of a run with these inputs."""
    sizes: tuple[int, ...] = run_sources(model.program, inputs)[SIZES]
    return sizes


def computed(model: Captured, inputs: dict[str, Tensor], keep: Keep = None) -> World:
    """The world of these inputs, its outputs computed; it holds what `keep` says."""
    sources = run_sources(model.program, inputs)
    outputs = output_names(model.program)
    budget = _budget(keep)
    if keep is None or budget is not None:
        fits = sum(model.estimated_bytes(inputs).values()) <= (budget or KEEP_ALL_BYTES)
        keep = "all" if fits else keep or list(model.site_table.kinds) or "all"
    if isinstance(keep, str) and keep == "all":
        world = World(model.graph)
        for name, value in sources.items():
            world.set(name, value)
        with computing():
            world.demand(outputs)
        return world
    if budget is not None:
        wanted = _that_fit(model, budget, inputs) | set(outputs)
    else:
        wanted = model.read_by_patches_at(_kept(model, keep)) | set(outputs)
    with computing():
        values = stream(model.graph, sources, wanted)
    return World.partial(model.graph, values | sources)


def _that_fit(model: Captured, budget: int, inputs: Mapping[str, Tensor]) -> set[str]:
    """Nodes whose values are estimated to take no more than `budget`, what patches read first."""
    first = model.read_by_patches_at(_kept(model, list(model.site_table.kinds)))
    wanted: set[str] = set()
    for name, size in sorted(model.estimated_bytes(inputs).items(), key=lambda item: item[0] not in first):
        if size <= budget:
            budget -= size
            wanted.add(name)
    return wanted


def _kept(model: Captured, keep: object) -> list[PlaceLike]:
    """The places of `keep`, kinds spelled out."""
    keep = keep.tolist() if type(keep).__name__ == "ndarray" else keep  # type: ignore[attr-defined]
    if isinstance(keep, str | bytes | Place | Tensor | Mapping) or not has_items(keep):
        raise PatchError(
            f"keep is 'all', a list of places, an amount of memory or None, and {keep!r} is none of them."
        )
    listed = list(keep)
    if len(listed) == 2 and isinstance(listed[1], int):
        raise PatchError(f"keep is a list of places: write keep=[{tuple(listed)!r}].")
    kinds = model.site_table.kinds
    places: list[PlaceLike] = []
    for place in listed:
        if isinstance(place, str) and place in kinds:
            places += [site.name for site in model.site_table if site.kind == place]
        else:
            places.append(place)
    return places


def _budget(keep: object) -> int | None:
    """The bytes that `keep` allows, or None where it is no amount of memory."""
    if isinstance(keep, int) and not isinstance(keep, bool):
        return as_bytes(keep)
    if not isinstance(keep, str) or keep == "all":
        return None
    try:
        return as_bytes(keep)
    except SweepError:
        return None
