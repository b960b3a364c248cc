"""Splicing: a captured model with a dictionary in it, whose outputs are the model's own."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conewise.anatomy.axes import View
from conewise.anatomy.places import Index, Place, PlaceLike, Spliced, as_place, site
from conewise.anatomy.sites import DICTIONARY as KIND
from conewise.anatomy.sites import Located, Site
from conewise.checks.hooking import Hook, HookedModule
from conewise.errors import ConewiseError, DictionaryError, describe, nearest_names
from conewise.program.export import Exported, export
from conewise.program.foreign import brief
from conewise.program.insertion import Nodes, inserted
from conewise.program.records import Program
from conewise.program.sizes import Size
from conewise.program.tensors import largest_difference
from conewise.program.walk import output_names, run_sources, stream
from conewise.runs.captured import Captured, Made
from conewise.runs.dictionaries import Dictionary
from conewise.runs.reading import Reading


@torch.no_grad()
def active(
    model: Captured, name: str, run: Reading, *, top: int | None = None, pos: Index | None = None
) -> tuple[int, ...]:
    """The numbers of the latents that are not zero in a run, the strongest first; see `Model.active`."""
    if name not in model.splices:
        near = ", ".join(nearest_names(str(name), list(model.splices)) or model.splices) or "none"
        raise DictionaryError(
            f"no dictionary {name!r} in {model.name}; there is {near}. `model.splice(place, ..., "
            f"name={name!r})` returns a model that has it."
        )
    model.expect_own("the run is one", run.model)
    if top is not None and top < 1:
        raise DictionaryError(f"top={top!r}: give how many latents to take at most, 1 or more, or nothing.")
    latents = run.read(site(f"{name}.latents") if pos is None else site(f"{name}.latents", pos=pos))
    strength = latents.abs().flatten(0, -2).amax(0) if latents.ndim > 1 else latents.abs()
    order = torch.argsort(strength, descending=True, stable=True).tolist()
    found = order[: int((strength > 0).sum())]
    return tuple(found if top is None else found[:top])


Function = Callable[..., Tensor]


class Held(nn.Module):
    """A function of tensors as a module. It holds the modules that the function reads."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        if not isinstance(function, nn.Module):
            for number, module in enumerate(_modules_of(function)):
                self.add_module(f"of{number or ''}", module)

    def forward(self, *values: Tensor) -> Tensor:
        """The function's value."""
        return self.function(*values)


def _modules_of(function: object) -> Iterator[nn.Module]:
    """The modules that a method, a partial function or a closure holds, each once."""
    held: list[object] = [getattr(function, "__self__", None)]
    if isinstance(function, partial):
        held += [*_modules_of(function.func), *function.args, *function.keywords.values()]
    for cell in getattr(function, "__closure__", None) or ():
        held.append(cell.cell_contents)
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    held += [names.get(name) for name in (code.co_names if code is not None else ())]
    yield from {id(one): one for one in held if isinstance(one, nn.Module)}.values()


class Splice(nn.Module):
    """A dictionary at its place: the value there, changed by what is done to the latents and to the error.

    The error term is of the latents as encoded, whatever is put in their place afterwards. The output is
    `value − ((clean − reconstruction) + (missed − error))`, which is `reconstruction + error`, and the value
    itself, bit for bit, where neither is changed.
    """

    acts_by_hook = True

    def __init__(
        self, encode: Function, decode: Function, also: tuple[str, ...] = (), *, skips: bool = False
    ) -> None:
        """`also` and `skips`: what `decode` reads beside latents; see `Model.splice`."""
        super().__init__()
        self.also, self.skips = also, skips
        self.others: tuple[Any, ...] = ()  # a tuple, so that they are not parts of this one
        self.made: dict[int, tuple[Tensor, Tensor]] = {}
        """The latents as encoded, and as they are, by the thread that runs the module."""
        self.encode, self.decode = Held(encode), Held(decode)
        self.latents, self.error = nn.Identity(), nn.Identity()
        self.read: dict[int, Tensor] = {}
        """The values that were read to be encoded, by the thread that runs the module."""

    def forward(self, value: Tensor, read: Tensor | None = None) -> Tensor:
        """`value` with the dictionary in it; the latents are of `read`, where they are those of another."""
        given = value if read is None else read
        thread, skipped = threading.get_ident(), [given] if self.skips else []
        others = [one.made[thread] for one in self.others]
        encoded = self.encode(given)
        clean = self.decode(encoded, *(before for before, _ in others), *skipped)
        missed = value - clean
        latents = self.latents(encoded)
        self.made[thread] = encoded, latents
        reconstruction = self.decode(latents, *(now for _, now in others), *skipped)
        error = self.error(missed)
        made: Tensor = value - ((clean - reconstruction) + (missed - error))
        return made


class SpliceHook:
    """Lets a splice act at one call of a module: it reads a tensor there, or takes its place."""

    acts_last = True
    """Hooks that are registered later act before it; see `checks.hooking`."""

    def __init__(self, splice: Any, hook: Hook, *, is_reading: bool, takes_two: bool) -> None:
        self.splice, self.hook = splice, hook
        self.is_reading, self.takes_two = is_reading, takes_two
        self.calls: dict[int, int] = {}  # of each thread, which may all run the module at once

    def __call__(self, _: nn.Module, first: Any, second: Any) -> Any:
        """Return what goes on from here: nothing else at other calls, or where the splice only reads."""
        thread = threading.get_ident()
        number = self.calls.get(thread, 0)
        self.calls[thread] = number + 1
        boundary = self.hook.boundary
        if number != boundary.call.call:
            return None
        whole = second if boundary.is_output else (first, second)
        value = self.hook.read(whole)
        if self.is_reading:
            self.splice.read[thread] = value
            return None
        made = self.splice(value, self.splice.read.pop(thread)) if self.takes_two else self.splice(value)
        return self.hook.replaced(whole, made)

    def begin(self, *_: Any) -> None:
        """Count calls from the start: a forward of the whole module begins."""
        self.calls.pop(threading.get_ident(), None)
        if self.takes_two:
            self.splice.read.pop(threading.get_ident(), None)


def hold(
    made: nn.Module, name: str, splice: nn.Module, write: Hook | None, read: Hook | None = None
) -> nn.Module:
    """Let a module hold a splice, or another block of one value, as `name`, and have it act at a hook."""
    made.add_module(name, splice)
    for one in made.modules():
        if isinstance(one, Splice):
            one.others = tuple(made.get_submodule(other) for other in one.also)
    kind = type(made)
    if kind.forward is nn.Sequential.forward:
        made.__class__ = type(kind.__name__, (kind,), {"forward": _forward_of_sequence})
    for hook in (read, write) if write is not None else ():
        if hook is None:
            continue
        acting = SpliceHook(splice, hook, is_reading=hook is read, takes_two=read is not None)
        part = made.get_submodule(hook.boundary.call.path)
        if hook.boundary.is_output:
            part.register_forward_hook(acting)
        else:
            part.register_forward_pre_hook(acting, with_kwargs=True)
        made.register_forward_pre_hook(acting.begin)
    return made


def sharing(module: nn.Module) -> nn.Module:
    """A copy of a module with the same tensors."""
    held = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        held += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    # What is in `memo` is taken for a copy that was made already.
    memo: dict[int, Any] = {id(one): one for one in held}
    return copy.deepcopy(module, memo)


def _forward_of_sequence(self: nn.Sequential, input: Any) -> Any:  # noqa: A002  # as torch calls it
    """Compute a sequence: each of its modules in turn, but for those that act by hooks."""
    for part in self:
        if not getattr(part, "acts_by_hook", False):
            input = part(input)  # noqa: A001
    return input


_SIZES = (3, 5, 7, 11, 13)
"""Sizes of the example that stand for those which vary: no two are equal, and none is 1."""


@dataclass(frozen=True)
class SpliceStep:
    """A dictionary as a step of a surgery: what `Model.splice` is given."""

    place: Place
    encode: Function
    decode: Function
    reads: Place | None = None
    name: str = "sae"
    also: tuple[str, ...] = ()
    skips: bool = False

    def __str__(self) -> str:
        return f"splice {self.name} at {self.place}"

    def parts(self, _: Any) -> tuple[SpliceStep, ...]:
        """The steps that it consists of."""
        return (self,)

    def operated(self, model: Any) -> Any:
        """The model with the dictionary in it."""
        return model.splice(
            self.place,
            encode=self.encode,
            decode=self.decode,
            reads=self.reads,
            name=self.name,
            also=self.also,
            skips=self.skips,
        )


@dataclass(frozen=True)
class Splicing(Made):
    """A model with a dictionary in it, ready to be held."""

    _: KW_ONLY
    nodes: Nodes
    spliced: Spliced

    def checked(self, before: Captured, now: Captured) -> Spliced:
        """Return what is known of the dictionary, once the outputs with it were compared with those before.

        Raises DictionaryError where they are not the same.
        """
        if before.fidelity.bitwise and not now.fidelity.bitwise:
            raise DictionaryError(
                f"a copy of {before.name} that holds the dictionary does not compute what it did: "
                f"{now.fidelity}. A module that goes through all modules in it meets the dictionary too: "
                "capture a part of it, or put it into a module that does not."
            )
        nodes, names = self.nodes, output_names(before.program)
        old = example_values(before, (*names, nodes.value))
        new = example_values(now, (*output_names(now.program), nodes.error))
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


def splicing(model: Captured, step: SpliceStep) -> Splicing:
    """Prepare to splice a dictionary in at a place; see `Model.splice`. The model is left as it is."""
    encode, decode, name, at = step.encode, step.decode, step.name, step.place
    source = at if step.reads is None else step.reads
    model.expect_program("splice a dictionary in")
    model.weights.expect_captured()  # it goes into a copy of the module as it is now
    written, read = _found(model, at), _found(model, source)
    nodes = Nodes(_free_name(model, name), read.node, written.node, step.also, step.skips)
    _expect_no_cycle(model, nodes, at, source)
    read_value, value = (_example(model.program, node) for node in (nodes.read, nodes.value))
    latents = _latents(encode, read_value, source)
    others = [_example(model.program, f"{one}.latents") for one in _in_front(model, nodes, at)]
    given = [latents, *others, *([read_value] if step.skips else [])]
    _expect_value(_applied("decode", decode, *given), latents, value, at)
    encoding, decoding = _half("encode", encode, read_value), _half("decode", decode, *given)
    # What is read is only read: whether others read it elsewhere does not matter.
    write_at, read_at = hook_at(model, nodes.value), None
    if nodes.read != nodes.value:
        read_at = hook_at(model, nodes.read, ())
    is_hooked = write_at is not None and (nodes.read == nodes.value or read_at is not None)

    def program_of(encoding: Exported, decoding: Exported) -> Program:
        found = inserted(model.program, nodes, encoding.program, decoding.program, is_hooked=is_hooked)
        return replace(found, module_name=f"{model.name}{', ' if model.splices else ' with '}{name}")

    def again() -> Program:
        model.weights.expect_captured()
        return program_of(_half("encode", encode, read_value), _half("decode", decode, *given))

    program = program_of(encoding, decoding)
    try:
        # Without a hook to write at, no module shows the place: the splice is held, and does nothing.
        module = hold(
            sharing(model.module),
            name,
            Splice(encode, decode, step.also, skips=step.skips),
            write_at if is_hooked else None,
            read_at,
        )
    except Exception as error:  # a module copies itself as it likes
        raise DictionaryError(
            f"{model.name} cannot be copied, and the dictionary is put into a copy of it: {brief(error)}."
        ) from error
    reasons = (*model.fidelity.reasons, *encoding.reasons, *decoding.reasons)
    own = tuple(_sites(nodes, read, written))
    unhooked = "" if is_hooked else f"no module shows {at}, all of it and nothing else"
    return Splicing(
        module,
        program,
        lambda made: model.site_table.operated(made, {nodes.value: nodes.output}, own),
        again,
        tuple(dict.fromkeys(reasons)),
        nodes=nodes,
        spliced=Spliced(name, at, source, latents.shape[-1], 0.0, 0.0, unhooked),
    )


def splice_step(
    place: PlaceLike,
    dictionary: Any,
    encode: Function | None,
    decode: Function | None,
    reads: PlaceLike | None,
    name: str,
    also: Sequence[str] = (),
    skips: bool | None = None,
) -> SpliceStep:
    """The step that `Model.splice` and `Surgery.splice` are asked for."""
    encode, decode = halves(dictionary, encode, decode)
    if reads is None and isinstance(dictionary, Dictionary) and dictionary.reads:
        reads = dictionary.reads
    read = None if reads is None else as_place(reads)
    does_skip = getattr(dictionary, "skips", False) is True if skips is None else skips
    return SpliceStep(as_place(place), encode, decode, read, name, tuple(also), does_skip)


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
    """Find where a dictionary reads or writes: one whole value, features along the last dimension."""
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
    """True if the last dimension is that of features, heads packed in it or not, and no other one is."""
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


def _in_front(model: Captured, nodes: Nodes, place: Place) -> tuple[str, ...]:
    """The names of `also`. Raises DictionaryError for one that is not there, or not in front of the place."""
    graph = model.graph
    for name in nodes.also:
        if name not in model.splices:
            known = ", ".join(model.splices) or "none"
            raise DictionaryError(f"also={name!r} is no dictionary of {model.name}; there is {known}.")
        if graph.number(f"{name}.latents") in graph.table.cone([graph.number(nodes.value)]):
            raise DictionaryError(
                f"the latents of {name!r} depend on {place}, which is to be written with them: a cross-layer "
                "transcoder writes where it reads, and in later layers."
            )
    return nodes.also


def _applied(half: str, function: Any, *examples: Tensor) -> Tensor:
    """Call `encode` or `decode` with examples. Raises DictionaryError where that returns not one tensor."""
    if not callable(function):
        raise DictionaryError(f"{half} is a function of a tensor, or a module, not {describe(function)}.")
    example = examples[0]
    more = f" and {len(examples) - 1} more" if len(examples) > 1 else ""
    shown = (
        f"{half}, given a tensor of shape {tuple(example.shape)}, {example.dtype}, on {example.device},{more}"
    )
    try:
        with torch.no_grad():
            found = function(*(one.clone() for one in examples))
    except Exception as error:  # it raises whatever it likes
        raise DictionaryError(f"{shown} raises {brief(error)}.") from error
    if not isinstance(found, Tensor):
        raise DictionaryError(f"{shown} returns {describe(found)}; it has to return one tensor.")
    return found


def _latents(encode: Any, value: Tensor, place: Place) -> Tensor:
    """Return the latents of a value: the same shape, but for the last dimension, which is that of latents."""
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


def _half(half: str, function: Function, *examples: Tensor) -> Exported:
    """`encode` or `decode`, captured."""
    try:
        exported = export(Held(function), examples)
    except ConewiseError as error:
        raise DictionaryError(f"{half} cannot be captured: {error}") from error
    program = exported.program
    if len(program.outputs) != 1 or getattr(program.outputs[0], "name", None) not in program.varying:
        raise DictionaryError(f"{half} returns something that does not depend on what it is given.")
    return exported


def hook_at(
    model: Captured, node: str, readers: Collection[str] | None = None, *, is_exact: bool = False
) -> Hook | None:
    """Find the hook at a node, for all who read it or for these `readers`; None where no module shows it."""
    values = example_values(model, (node,))
    module = HookedModule(model.module, model.program, model.signature)
    inputs = model.signature.bind(model.signature.example.args, model.signature.example.kwargs)
    hooks = module.find(values, inputs, None if readers is None else {node: readers}, is_exact=is_exact)
    found = hooks.get(node)
    # In another shape than the graph's, what is put there would not compute what its records do.
    return found if found is not None and found.shape is None and found.way is not None else None


@torch.no_grad()
def example_values(model: Captured, nodes: Sequence[str]) -> Mapping[str, Any]:
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
