"""Splicing: a captured model with a dictionary in it, whose outputs are the model's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from conewise.capturing.export import Exported, export
from conewise.capturing.foreign import brief
from conewise.checks.hooking import HookedModule, Spot
from conewise.errors import ConewiseError, DictionaryError, describe
from conewise.locations.located import Located
from conewise.locations.places import Place, PlaceLike, as_place
from conewise.locations.sites import DICTIONARY as KIND
from conewise.locations.sites import Site, SiteTable
from conewise.locations.spliced import Spliced
from conewise.program.build import run_sources
from conewise.program.records import Program
from conewise.program.sizes import Size
from conewise.program.streaming import output_names
from conewise.program.tensors import largest_difference
from conewise.program.walk import stream
from conewise.runs.captured import Captured
from conewise.splicing.insertion import Nodes, inserted
from conewise.splicing.splice_module import Function, Held, Splice, with_splice
from conewise.structure.axes.views import View

_SIZES = (3, 5, 7, 11, 13)
"""Sizes of the example that stand for those which vary: no two are equal, and none is 1."""


@dataclass(frozen=True, slots=True)
class Splicing:
    """A model with a dictionary in it, ready to be held: its module, what it computes, its sites."""

    module: nn.Module
    exported: Exported
    sites_of: Callable[[Program], SiteTable]
    nodes: Nodes
    spliced: Spliced

    def checked(self, before: Captured, now: Captured) -> Spliced:
        """What is known of the dictionary, once the outputs with it were compared with those before.

        Raises DictionaryError where they are not the same.
        """
        if before.fidelity.bitwise and not now.fidelity.bitwise:
            raise DictionaryError(
                f"a copy of {before.name} that holds the dictionary does not compute what it did: "
                f"{now.fidelity}. A module that goes through all modules in it meets the dictionary too: "
                "capture a part of it, or put it into a module that does not."
            )
        nodes, names = self.nodes, output_names(before.program)
        old = _values(before, (*names, nodes.value))
        new = _values(now, (*output_names(now.program), nodes.error))
        apart = [
            largest_difference(old[one], new[other])
            for one, other in zip(names, output_names(now.program), strict=True)
            if isinstance(old[one], Tensor)
        ]
        deviation = max(apart, default=0.0)
        if deviation:
            raise DictionaryError(
                f"with {nodes.name!r} in it, the outputs of {before.name} are {deviation:.2g} off on the "
                "example of the capture, and they have to be the same bit for bit: decode has to return the "
                "same each time, and finite numbers."
            )
        value, error = (one.double().norm() for one in (old[nodes.value], new[nodes.error]))
        missed = float(error / value) if value else math.inf if error else 0.0
        return replace(self.spliced, deviation=deviation, missed=missed)


def splicing(
    model: Captured, place: PlaceLike, encode: Function, decode: Function, reads: PlaceLike | None, name: str
) -> Splicing:
    """What it takes to splice a dictionary in at a place; see `Model.splice`. The model is left as it is."""
    model.expect_program("splice a dictionary in")
    model.weights.expect_captured()  # it goes into a copy of the module as it is now
    at = as_place(place)
    source = at if reads is None else as_place(reads)
    written, read = _found(model, at), _found(model, source)
    nodes = Nodes(_free_name(model, name), read.node, written.node)
    _expect_no_cycle(model, nodes, at, source)
    read_value, value = (_example(model.program, node) for node in (nodes.read, nodes.value))
    latents = _latents(encode, read_value, source)
    _expect_value(_applied("decode", decode, latents), latents, value, at)
    encoding, decoding = _half("encode", encode, read_value), _half("decode", decode, latents)
    write_at, read_at = _spots(model, nodes)
    is_hooked = write_at is not None and (nodes.read == nodes.value or read_at is not None)
    program = inserted(model.program, nodes, encoding.program, decoding.program, is_hooked=is_hooked)
    program = replace(program, module_name=f"{model.name}{', ' if model.splices else ' with '}{name}")
    try:
        module = with_splice(
            model.module, name, Splice(encode, decode), write_at if is_hooked else None, read_at
        )
    except Exception as error:  # a module copies itself as it likes
        raise DictionaryError(
            f"{model.name} cannot be copied, and the dictionary is put into a copy of it: {brief(error)}."
        ) from error
    reasons = (*model.fidelity.reasons, *encoding.reasons, *decoding.reasons)
    exported = Exported(program, model.signature, model.batch_is_fixed, tuple(dict.fromkeys(reasons)))
    own = tuple(_sites(nodes, read, written))
    unhooked = "" if is_hooked else f"no module shows {at}, all of it and nothing else"
    return Splicing(
        module,
        exported,
        lambda made: model.site_table.spliced(made, nodes.value, nodes.output, own),
        nodes,
        Spliced(name, at, source, latents.shape[-1], 0.0, 0.0, unhooked),
    )


def halves(dictionary: Any, encode: Function | None, decode: Function | None) -> tuple[Function, Function]:
    """The two functions of a dictionary, however it was given."""
    given: list[Any] = [getattr(dictionary, half, None) for half in ("encode", "decode")]
    if dictionary is not None and not all(map(callable, given)):
        raise DictionaryError(
            f"a dictionary has the functions `encode` and `decode`, and {describe(dictionary)} has not. Give "
            "them by name: `splice(place, encode=..., decode=...)`."
        )
    made = {"encode": encode or given[0], "decode": decode or given[1]}
    for half, function in made.items():
        if function is None:
            raise DictionaryError(
                f"a dictionary is two functions, and there is no {half}: "
                "`splice(place, encode=..., decode=...)`."
            )
    return made["encode"], made["decode"]


def _found(model: Captured, place: Place) -> Located:
    """Where a dictionary reads or writes: one whole value, with its features along the last dimension."""
    if place.part:
        raise DictionaryError(
            f"a dictionary is spliced into a whole value, and {place} is a part of one. Leave out "
            f"{', '.join(place.part)}; what is patched may be a part: `site('sae.latents', pos=-1)`."
        )
    found = model.locate(place)
    if found.result is not None:
        raise DictionaryError(
            f"no single value of the model is {place}: it is computed from z. Splice into z's own place, the "
            "input of the output projection, or into attn_out."
        )
    dtype = model.program.dtypes[found.node]
    if dtype is None or not dtype.is_floating_point:
        raise DictionaryError(f"{place} holds {dtype}, and a dictionary is of floating-point numbers.")
    if not _has_features_last(found.view):
        raise DictionaryError(
            f"a dictionary reads features along the last dimension, and {place} lies in memory as "
            f"{_layout(found.view)}. Splice where features lie last, such as the input or the output of a "
            "module, by its path: `model.sites.to_dataframe()` lists them."
        )
    return found


def _has_features_last(view: View) -> bool:
    """Whether the last dimension is that of features, heads packed in it or not, and no other one is."""
    last = view.packing[-1] if view.packing else ()
    return bool(last) and view.axes[-len(last) :] == last and {"batch", "pos"}.isdisjoint(last)


def _layout(view: View) -> str:
    return f"[{', '.join('·'.join(packed) or '1' for packed in view.packing)}]"


def _free_name(model: Captured, name: str) -> str:
    """The name, where it can be that of a new module and of new sites."""
    if not str(name).isidentifier():
        raise DictionaryError(f"a dictionary's name is a word, such as 'sae' or 'sae_3', not {name!r}.")
    if name in model.splices:
        raise DictionaryError(
            f"there is a dictionary {name!r} in this model already, at {model.splices[name].place}. Give "
            "each one a name of its own: name='sae_3'."
        )
    taken = hasattr(model.module, name) or any(
        site.name == name or site.name.startswith((f"{name}.", f"{name}/")) for site in model.site_table
    )
    if taken:
        raise DictionaryError(
            f"{name!r} is a part of {model.name} already. Choose another name for the dictionary."
        )
    return name


def _expect_no_cycle(model: Captured, nodes: Nodes, place: Place, reads: Place) -> None:
    graph = model.graph
    if nodes.read != nodes.value and graph.number(nodes.read) in graph.table.cone(
        [graph.number(nodes.value)]
    ):
        raise DictionaryError(
            f"a transcoder reads before it writes, and {reads} depends on {place}. `splice(place, "
            "reads=...)` takes the place that is written first."
        )


def _example(program: Program, node: str) -> Tensor:
    """A value like those of a node, of sizes that tell dimensions apart."""
    shape, dtype = program.shapes[node], program.dtypes[node]
    assert shape is not None
    made = program.record_of.get(node)
    device = made.device if made is not None else next(i.device for i in program.inputs if i.name == node)
    return torch.zeros([_size(size, dim) for dim, size in enumerate(shape)], dtype=dtype, device=device)


def _size(size: Size, dim: int) -> int:
    return size if isinstance(size, int) else _SIZES[min(dim, len(_SIZES) - 1)]


def _applied(half: str, function: Any, example: Tensor) -> Tensor:
    """What `encode` or `decode` makes of an example. Raises DictionaryError where that is not one tensor."""
    if not callable(function):
        raise DictionaryError(f"{half} is a function of a tensor, or a module, not {describe(function)}.")
    shown = f"{half}, given a tensor of shape {tuple(example.shape)}, {example.dtype}, on {example.device},"
    try:
        with torch.no_grad():
            found = function(example.clone())
    except Exception as error:  # it raises whatever it likes
        raise DictionaryError(f"{shown} raises {brief(error)}.") from error
    if not isinstance(found, Tensor):
        raise DictionaryError(f"{shown} returns {describe(found)}; it has to return one tensor.")
    return found


def _latents(encode: Any, value: Tensor, place: Place) -> Tensor:
    """What `encode` makes of a value: the same, but for the last dimension, which is that of latents."""
    found = _applied("encode", encode, value)
    if found.ndim != value.ndim or found.shape[:-1] != value.shape[:-1] or not found.is_floating_point():
        wanted = ", ".join(map(str, (*value.shape[:-1], "latents")))
        raise DictionaryError(
            f"encode makes {describe(found)} of a value of shape {tuple(value.shape)} at {place}. It has to "
            f"return latents along the last dimension, and all else as it was: [{wanted}]."
        )
    return found


def _expect_value(decoded: Tensor, latents: Tensor, value: Tensor, place: Place) -> None:
    """Raise DictionaryError where `decode` does not give what stands at the place."""
    if decoded.shape != value.shape:
        raise DictionaryError(
            f"decode makes shape {tuple(decoded.shape)} of latents of shape {tuple(latents.shape)}, and "
            f"{place} has {tuple(value.shape)} there: give the dictionary of this place, or the place of "
            "this dictionary."
        )
    if (decoded.dtype, decoded.device) != (value.dtype, value.device):
        raise DictionaryError(
            f"decode returns {decoded.dtype} on {decoded.device}, and {place} has {value.dtype} on "
            f"{value.device}. Nothing is cast or moved silently: convert the dictionary, or let decode do it."
        )


def _half(half: str, function: Function, example: Tensor) -> Exported:
    """`encode` or `decode`, captured."""
    try:
        exported = export(Held(function), (example,))
    except ConewiseError as error:
        raise DictionaryError(f"{half} cannot be captured: {error}") from error
    program = exported.program
    if len(program.outputs) != 1 or getattr(program.outputs[0], "name", None) not in program.varying:
        raise DictionaryError(f"{half} returns something that does not depend on what it is given.")
    return exported


def _spots(model: Captured, nodes: Nodes) -> tuple[Spot | None, Spot | None]:
    """Where the module shows what is written, and what is read; None where it does not."""
    values = _values(model, (nodes.value, nodes.read))
    module = HookedModule(model.module, model.program, model.signature)
    inputs = model.signature.bind(model.signature.example.args, model.signature.example.kwargs)
    hooks = module.find({nodes.value: values[nodes.value]}, inputs)
    if nodes.read != nodes.value:
        # It is only read: whether others read it elsewhere does not matter.
        hooks |= module.find({nodes.read: values[nodes.read]}, inputs, {nodes.read: ()})
    # In another shape than the graph's, the module of the dictionary would not be that of its records.
    spots = {node: spot for node, spot in module.spots(hooks, inputs).items() if not spot.is_reshaped}
    read = spots.get(nodes.read) if nodes.read != nodes.value else None
    return spots.get(nodes.value), read


@torch.no_grad()
def _values(model: Captured, nodes: Sequence[str]) -> Mapping[str, Any]:
    """Values on the example of the capture."""
    example = model.signature.example
    sources = run_sources(model.program, model.signature.bind(example.args, example.kwargs))
    given = {node: sources[node] for node in nodes if node in sources}
    return {**given, **stream(model.graph, sources, [node for node in nodes if node not in given])}


def _sites(nodes: Nodes, read: Located, written: Located) -> Iterator[Site]:
    """The sites of a dictionary, in the axes of the places that it reads and writes."""
    view, features = read.view, read.view.packing[-1]
    axes = (*view.axes[: -len(features)], "latent")
    lengths = {axis: length for axis, length in view.lengths.items() if axis not in features}
    latents = View(axes, (*view.packing[:-1], ("latent",)), lengths)
    yield Site(nodes.latents, KIND, nodes.latents, latents)
    for name in (nodes.reconstruction, nodes.error, nodes.output):
        yield Site(name, KIND, name, written.view)
    yield Site(f"{nodes.name}.input", KIND, nodes.value, written.view)
