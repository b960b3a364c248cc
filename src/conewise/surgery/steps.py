"""The steps of a surgery: each makes a model of a model, as records, and as a copy of its module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from conewise.anatomy.places import Place
from conewise.anatomy.sites import Located, Site, SiteTable
from conewise.checks.hooking import Hook
from conewise.errors import MissingSiteError, SurgeryError, describe, nearest_names
from conewise.program.compaction import Compaction
from conewise.program.export import Exported, called, distinct, eager
from conewise.program.foreign import brief
from conewise.program.insertion import Insertion, reading
from conewise.program.lowering import live
from conewise.program.records import ModuleCall, ModulePort, Program, Record, Ref, SizeRef, Source
from conewise.program.sizes import is_equal
from conewise.program.walk import bitwise_same, output_names
from conewise.runs.captured import Captured, Made
from conewise.runs.interventions import mean
from conewise.runs.run import baseline
from conewise.runs.splicing import example_values, hold, hook_at, sharing
from conewise.status import status_line
from conewise.surgery.module import (
    Example,
    Grafted,
    Operated,
    Pruned,
    as_block,
    captured,
    device_of,
    run_as_records,
    runs_records,
)
from conewise.threads import one_module

_aten = torch.ops.aten

COLUMNS_APART = 1000
"""A program without the columns that were zero differs from one that has them by the order of its sums: by at
most so many times the precision of its numbers, as a share of the largest output."""
MOST_APART = 1e-3
"""An operated module and its program differ by rounding, and by less than this share of the outputs."""


@dataclass(frozen=True)
class Step(ABC):
    """One step of a surgery."""

    @abstractmethod
    def on(self, model: Captured) -> Made:
        """Return what the step makes of a model. Raises SurgeryError where the model does not allow it."""

    def parts(self, _: Captured) -> tuple[Step, ...]:
        """The steps that it consists of in a model."""
        return (self,)

    def _again(self, model: Captured) -> Program:
        model.weights.expect_captured()
        return self.on(model).program

    def operated(self, model: Captured) -> Any:
        """The model that the step makes, once its program was compared with its module."""
        model.expect_program(str(self))
        model.weights.expect_captured()  # it is done to a copy of the module as it is now
        with one_module(), status_line(str(self)) as doing:
            doing("exporting")
            made = model._made_of(self, self.on(model), doing)
        made.phases = doing.seconds()
        apart = made.fidelity
        if apart.unmeasured or apart.relative > max(MOST_APART, 10 * model.fidelity.relative):
            raise SurgeryError(
                f"{self}: the operated module and its program do not compute the same: the graph is {apart}. "
                "A block has to compute the same each time, from what it is given and its weights alone."
            )
        return made


class _Operation:
    """The insertion of one step, and the copy of the module that goes with it."""

    def __init__(self, model: Captured) -> None:
        self.model, self.program = model, model.program
        self.insertion = Insertion(model.program, SurgeryError)
        self.renamed: dict[str, str] = {}
        self.without: set[str] = set()
        self.edit: Callable[[nn.Module], object] = lambda _: None
        self.is_hooked = False
        self.reasons: tuple[str, ...] = model.fidelity.reasons
        self.own: list[Site] = []
        self.at: str | tuple[str, tuple[str, ...]] | None = None
        self.replaced: tuple[str, ...] = ()
        self.reread: tuple[str, str] | None = None

    def act(self, name: str, block: nn.Module, hook: Hook | None) -> None:
        """Let a block act at a hook of the copy; where there is none, it is held for the records."""
        self.is_hooked = hook is not None
        self.edit = partial(hold, name=name, splice=block, write=hook)

    def made(self, name: str, why: str, again: Callable[[], Program]) -> Made:
        """The step's result. Where no module shows its place, the copy computes the records."""
        program = self.insertion.finish(self.renamed, is_hooked=self.is_hooked, without=self.without)
        inner = tuple(f"{path}." for path in self.replaced)
        kept = (port for port in program.ports if not port.call.path.startswith(inner))
        ports = tuple(self._reread(program, port) for port in kept)
        program = replace(program, module_name=_named(self.model, name), ports=ports)
        try:
            module = sharing(self.model.module)
            self.edit(module)
        except Exception as error:  # a module copies itself as it likes
            raise SurgeryError(
                f"{self.model.name} cannot be copied, and the surgery is of a copy: {brief(error)}."
            ) from error
        if not self.is_hooked or runs_records(self.model.module):
            module = run_as_records(module, program, self.model.signature)
        renamed = self.renamed
        while any(new in renamed for new in renamed.values()):
            renamed = {old: renamed.get(new, new) for old, new in renamed.items()}
        own = [site for site in self.own if site.node in program.record_of or site.node in program.shapes]

        def sites_of(made: Program) -> SiteTable:
            return self.model.site_table.operated(made, renamed, own, why, self.replaced)

        return Made(module, program, sites_of, again, self.reasons, self.at)

    def _reread(self, program: Program, port: ModulePort) -> ModulePort:
        """A call of a module, with what it reads since a graft on an edge."""
        old, new = self.reread or ("", "")
        if old not in port.inputs or port.type_name == "Grafted":
            return port
        if any(port.call in one.modules for one in program.readers[old]):
            return port  # it is handed the old value; the graft is inside of it, or beside it
        inside = any(port.call in one.modules for one in program.readers[new])
        names = (new if name == old else name for name in port.inputs if inside or name != old)
        return replace(port, inputs=tuple(names))


def _named(model: Captured, name: str) -> str:
    """The name of the model with one more thing that was done to it."""
    known = model.name.partition(" with ")[2].split(", ")
    if name in (model.name, *known):
        return model.name
    return f"{model.name}{', ' if ' with ' in model.name else ' with '}{name}"


def free_name(model: Captured, name: str, wanted: str) -> str:
    """A name that no part of the model has: the one that was given, or a new one."""
    if name:
        if not name.isidentifier():
            raise SurgeryError(f"the name of a step is a word, such as 'adapter', not {name!r}.")
        if _is_taken(model, name):
            raise SurgeryError(f"{name!r} is a part of {model.name} already. Choose another name.")
        return name
    number, found = 1, wanted
    while _is_taken(model, found):
        number, found = number + 1, f"{wanted}_{number}"
    return found


def _is_taken(model: Captured, name: str) -> bool:
    return hasattr(model.module, name) or any(
        site.name == name or site.name.startswith((f"{name}.", f"{name}/")) for site in model.site_table
    )


def _located(model: Captured, place: Place, doing: str) -> Located:
    """Where a step acts: one value of floating-point numbers."""
    try:
        found = model.locate(place)
    except MissingSiteError as error:
        raise SurgeryError(f"cannot {doing} {place}: {error}") from error
    if found.result is not None:
        raise SurgeryError(
            f"cannot {doing} {place}: no single value of the model is it, it is computed from z. Take z."
        )
    dtype = model.program.dtypes[found.node]
    if dtype is None or not dtype.is_floating_point:
        raise SurgeryError(f"cannot {doing} {place}: it holds {dtype}, and numbers are expected there.")
    if model.program.shapes[found.node] is None:
        raise SurgeryError(f"cannot {doing} {place}: it is several tensors.")
    return found


# -- prune -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prune(Step):
    """A part of a value is replaced by what does not depend on the input."""

    place: Place
    value: Any = "zero"
    over: Any = None

    def __str__(self) -> str:
        is_zero = isinstance(self.value, str | int | float) and self.value in {"zero", 0}
        to = "" if is_zero else f" to {_shown(self.value)}"
        return f"prune {self.place}{to}"

    def parts(self, model: Captured) -> tuple[Step, ...]:
        """Of a layer, all that it adds to the stream is pruned."""
        layer = next((one for one in model.site_table.model_layers if one.call.path == self.place.name), None)
        if layer is None or self.place.part or self.place.layer is not None:
            return (self,)
        kinds = [kind for kind in ("attn_out", "cross_attn_out", "mlp_out") if kind in layer.nodes]
        if not kinds:
            raise SurgeryError(f"{self.place} adds nothing to the stream that could be pruned.")
        return tuple(replace(self, place=Place(kind, layer.number, layer.stack)) for kind in kinds)

    def on(self, model: Captured) -> Made:
        """See `Step`."""
        found = _located(model, self.place, "prune")
        name = free_name(model, "", "pruned")
        operation = _Operation(model)
        mask, value = self._pruned(model, found)
        insertion, program, node = operation.insertion, model.program, found.node
        block = Pruned(mask, value)
        under = (*insertion.around(node), ModuleCall(name))
        source = partial(insertion.source, prefix=name)
        given = source(Source("value", block.value, is_parameter=False))
        output = f"{name}.output"
        if mask is None:
            pairs = zip(value.shape, program.shapes[node] or (), strict=True)
            repeats = [1 if here == there else there for here, there in pairs]
            sizes = [n if isinstance(n, int) else SizeRef(insertion.sizes.index(n)) for n in repeats]
            insertion.note(insertion.like(node, output, _aten.repeat.default, (Ref(given), sizes), under))
        else:
            at = source(Source("mask", mask, is_parameter=False))
            insertion.note(
                insertion.like(node, output, _aten.where.self, (Ref(at), Ref(given), Ref(node)), under)
            )
        insertion.ports.append(ModulePort(under[-1], "Pruned", (node,), (output,)))
        operation.renamed[node] = output
        operation.at = None if mask is None else node
        if mask is None and not bool(value.any()):
            self._drop_sums(operation, node)
        operation.act(name, block, hook_at(model, node))
        why = f"{self.place} was pruned"
        return operation.made(name, why, lambda: self._again(model))

    def _drop_sums(self, operation: _Operation, node: str) -> None:
        """Take out sums with what is zero now: they are the other term, where nothing else reads that."""
        program = operation.program
        for reader in program.readers[node]:
            terms = [leaf.name for leaf in reader.args if isinstance(leaf, Ref)]
            is_sum = reader.target is _aten.add.Tensor and len(terms) == 2 and not reader.kwargs
            if not is_sum or terms[0] == terms[1]:
                continue
            other = terms[1] if terms[0] == node else terms[0]
            is_alike = program.shapes.get(other) == reader.shape and program.dtypes.get(other) == reader.dtype
            # The term is no output, and nobody reads it but the sum and what makes the zero.
            left = live((one for one in program.records if one.name != node), program.outputs)
            is_read = Ref(other) in program.outputs or any(
                other in one.inputs for one in left if one is not reader
            )
            if is_alike and not is_read:
                operation.renamed[reader.name] = other
                operation.without.add(reader.name)

    def _pruned(self, model: Captured, found: Located) -> tuple[Tensor | None, Tensor]:
        """What is pruned, and what is put there, as far as it does not vary; no mask where it is all."""
        example = Example(model.program)
        like, view = example.like(found.node), found.view
        try:
            hole = view.read(like, found.part, example.sizes)
        except MissingSiteError as error:
            raise SurgeryError(f"cannot prune {self.place}: {error}") from error
        part = self._value(model, found, hole)
        if part.isnan().any():
            raise SurgeryError(f"the value for {self.place} is not a number (NaN) in places.")
        value = view.replace(torch.zeros_like(like), found.part, part, example.sizes)
        mask = view.replace(torch.zeros_like(like), found.part, torch.ones_like(hole), example.sizes).bool()
        for dim, size in enumerate(model.program.shapes[found.node] or ()):
            if not isinstance(size, int):
                one = mask.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
                same = zip(one, (mask, value), strict=True)
                if not all(torch.equal(first.expand_as(whole), whole) for first, whole in same):
                    raise SurgeryError(
                        f"{self.place} is a part of the positions or of the batch, and what is pruned is "
                        "gone for all of them. Patch it in a run instead: `world.patch(place, 'zero')`."
                    )
                mask, value = one
        return (None if bool(mask.all()) else mask.contiguous()), value.contiguous()

    def _value(self, model: Captured, found: Located, hole: Tensor) -> Tensor:
        """What is put there, in natural axes."""
        value = self.value
        if isinstance(value, str):
            if value not in {"zero", "mean"}:
                raise SurgeryError(f"prune to 'zero', 'mean', a number or a tensor, not {value!r}.")
            value = 0.0 if value == "zero" else self._mean(model, found)
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
            raise SurgeryError(f"prune to 'zero', 'mean', a number or a tensor, not {describe(value)}.")
        if not isinstance(value, Tensor):
            return torch.full_like(hole, value)
        if value.dtype != hole.dtype or value.device != hole.device:
            raise SurgeryError(
                f"the value for {self.place} is {value.dtype} on {value.device}, and {hole.dtype} on "
                f"{hole.device} stands there. Nothing is cast or moved silently: convert it first."
            )
        try:
            return value.detach().expand(hole.shape).clone()
        except RuntimeError:
            raise SurgeryError(
                f"the value for {self.place} has shape {tuple(value.shape)}, which does not fit "
                f"[{', '.join(found.part_axes)}]."
            ) from None

    def _mean(self, model: Captured, found: Located) -> Tensor:
        example = model.signature.example
        given = [model.signature.bind(example.args, example.kwargs)] if self.over is None else self.over
        run = baseline(model, (), model.signature.bind(example.args, example.kwargs))
        part = mean(model, given).for_world(self.place, run)
        assert isinstance(part, Tensor)
        axes = found.part_axes
        for dim, axis in enumerate(axes):
            if axis in {"batch", "pos"}:
                part = part.narrow(dim, 0, 1)
        return part


# -- graft -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graft(Step):
    """A block behind a value, for all who read it; or on an edge, for one who does."""

    at: Place
    block: Any
    into: Place | None = None
    name: str = ""

    def __str__(self) -> str:
        where = f"after {self.at}" if self.into is None else f"on {self.at} → {self.into}"
        return f"graft {_shown(self.block)} {where}"

    def on(self, model: Captured) -> Made:
        """See `Step`."""
        if self.at.part:
            raise SurgeryError(
                f"a graft is of a whole value, and {self.at} is a part of one. Leave out "
                f"{', '.join(self.at.part)}: the block may leave the rest as it is."
            )
        found = _located(model, self.at, "graft after")
        name = free_name(model, self.name, "graft")
        node, readers = found.node, None
        if self.into is not None:
            node, readers = _edge(model, node, self.at, self.into)
        block = as_block("a block", self.block, Grafted)
        operation = _Operation(model)
        operation.act(name, block, hook_at(model, node, readers, is_exact=readers is not None))
        exported = captured("the block", block, model.program, [node])
        output = self._put(operation, name, node, exported, readers)
        operation.reasons = (*operation.reasons, *exported.reasons)
        operation.own = [
            Site(output, "graft", output, found.site.view),
            Site(f"{name}.input", "graft", node, found.site.view),
        ]
        return operation.made(name, "the graft does not read it", lambda: self._again(model))

    def _put(
        self, operation: _Operation, name: str, node: str, exported: Exported, readers: Sequence[str] | None
    ) -> str:
        insertion, output, part = operation.insertion, f"{name}.output", exported.program
        if len(part.outputs) != 1:
            raise SurgeryError(
                f"the block returns {len(part.outputs)} tensors, and one is read in its place."
            )
        if not isinstance(part.outputs[0], Ref) or part.outputs[0].name not in part.varying:
            raise SurgeryError("the block returns something that does not depend on what it is given. Prune.")
        call = ModuleCall(name)
        insertion.put(
            part, [node], name, (*insertion.around(node, readers), call), made=[output], root="held"
        )
        _expect_alike(insertion, output, node, f"the block at {self.at}")
        insertion.ports.append(ModulePort(call, "Grafted", (node,), (output,)))
        if readers is None:
            operation.renamed[node], operation.at = output, node
            return output
        for reader in readers:
            operation.without.add(reader)
            insertion.note(reading(operation.program.record_of[reader], {node: output}))
        operation.at, operation.reread = (node, tuple(readers)), (node, output)
        return output


def _edge(model: Captured, node: str, at: Place, into: Place) -> tuple[str, tuple[str, ...]]:
    """What is read along an edge, and who reads it: the records of a module, or the one record of a site.

    Where the edge has a graft already, that is what the block before made.
    """
    is_module = (
        into.layer is None
        and not into.part
        and any(into.name in _paths(model, one.call) for one in model.program.ports)
    )
    own = "" if is_module else _located(model, into, "graft on the edge into").node
    sites = {site.name: site.node for site in model.site_table if site.kind == "graft"}
    blocks = [name.removesuffix(".input") for name in sites if name.endswith(".input")]
    ends = [node]
    for end in ends:  # it grows: on an edge, blocks stand one behind the other
        ends += [sites[f"{name}.output"] for name in blocks if sites[f"{name}.input"] == end]
    found: dict[str, tuple[str, ...]] = {}
    for end in ends:
        reads = model.program.readers[end]
        inside = [one.name for one in reads if any(into.name in _paths(model, call) for call in one.modules)]
        if named := inside if is_module else [one.name for one in reads if one.name == own]:
            found[end] = tuple(named)
    if len(found) > 1:
        several = ", ".join(name for names in found.values() for name in names)
        raise SurgeryError(
            f"{into} reads {at} along several edges, and not all have the same grafts: {several}. Name one."
        )
    for end, names in found.items():
        return end, names
    shown = ", ".join(one.name for one in model.program.readers[node][:4]) or "nothing"
    raise SurgeryError(
        f"no edge from {at} to {into}: {at} is read by {shown}. Name one of these, or a module that one "
        "of them is in."
    )


def _paths(model: Captured, call: ModuleCall) -> tuple[str, ...]:
    """All paths of the module that is called."""
    own = next((port.paths for port in model.program.ports if port.call == call), ())
    return own or (call.path,)


def _expect_alike(insertion: Insertion, made: str, old: str, what: str) -> None:
    """Raise SurgeryError where a new value has another shape, dtype or device than the old one."""
    record, shape = insertion.values.get(made), insertion.program.shapes[old]
    assert record is not None
    assert shape is not None
    own = record.shape
    if own is None or len(own) != len(shape) or not all(map(is_equal, own, shape)):
        made_shape, read_shape = (f"[{', '.join(map(str, sizes))}]" for sizes in (own or (), shape))
        raise SurgeryError(
            f"{what} makes shape {made_shape}, and {read_shape} is read there. What is put in has to fit "
            "what reads it."
        )
    before = insertion.program.dtypes[old], device_of(insertion.program, old)
    if (record.dtype, record.device) != before:
        raise SurgeryError(
            f"{what} makes {record.dtype} on {record.device}, and {before[0]} on {before[1]} is read there. "
            "Nothing is cast or moved silently: let it return what is read."
        )


# -- redefine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Redefine(Step):
    """A submodule, or the one operation of a site, by another rule."""

    what: Place
    rule: Any

    def __str__(self) -> str:
        return f"redefine {self.what} as {_shown(self.rule)}"

    def on(self, model: Captured) -> Made:
        """See `Step`."""
        ports = [port for port in model.program.ports if self.what.name in (port.paths or (port.call.path,))]
        operation = _Operation(model)
        rule = as_block(f"the new rule of {self.what}", self.rule, Operated)
        if ports and self.what.layer is None and not self.what.part:
            _Calls(operation, self.what.name, rule, ports).redefine()
        else:
            self._site(operation, rule)
        return operation.made(
            self.what.name.rpartition(".")[2], f"{self.what} was redefined", lambda: self._again(model)
        )

    def _expect_own(self, model: Captured, found: Located) -> None:
        """Raise SurgeryError where what is called by the place is another value than it was."""
        before = model
        while before.operated_from is not None:
            before = before.operated_from[0]
            try:
                own = before.locate(self.what).node
            except MissingSiteError:
                return
            if own != found.node:
                raise SurgeryError(
                    f"{self.what} is {found.node!r} since an earlier step, and was {own!r}. Redefine it "
                    "before that step, or give the name of the operation that is meant."
                )

    def _site(self, operation: _Operation, rule: Operated) -> None:
        """One operation: the rule receives what it read, weights excepted."""
        model = operation.model
        if self.what.part:
            raise SurgeryError(f"a whole value is computed by a rule, and {self.what} is a part of one.")
        found = _located(model, self.what, "redefine")
        self._expect_own(model, found)
        record = model.program.record_of.get(found.node)
        if record is None:
            raise SurgeryError(f"{self.what} is an input of the model: there is no rule to redefine.")
        given = [name for name in record.inputs if name in model.program.shapes]
        if not given:
            raise SurgeryError(f"{self.what} is computed of weights alone. Replace these with `weight=`.")
        name = free_name(model, "", "rule")
        exported = captured(f"the new rule of {self.what}", rule, model.program, given)
        if len(exported.program.outputs) != 1:
            raise SurgeryError(f"the new rule of {self.what} returns several tensors; one is read there.")
        insertion = operation.insertion
        under = (*record.modules, ModuleCall(name))
        insertion.put(exported.program, given, name, under, made=[record.name], root="held")
        _expect_alike(insertion, record.name, record.name, f"the new rule of {self.what}")
        operation.without.add(record.name)
        operation.reasons = (*operation.reasons, *exported.reasons)
        operation.act(name, rule, None)


class _Calls:
    """All calls of a module, by another one."""

    def __init__(self, operation: _Operation, path: str, rule: Operated, ports: Sequence[ModulePort]) -> None:
        self.operation, self.path, self.rule, self.ports = operation, path, rule, ports
        self.program = operation.program
        self.paths = next((port.paths for port in ports if port.paths), (path,))
        self.seen_in = operation.model
        while runs_records(self.seen_in.module) and self.seen_in.operated_from is not None:
            self.seen_in = self.seen_in.operated_from[0]

    def redefine(self) -> None:
        """Replace the records of each call, and the module at each of its paths."""
        calls = self._calls()
        for port in self.ports:
            if not any(port.call in record.modules for record in self.program.records):
                raise SurgeryError(f"{port.call} cannot be redefined: nothing reads what it computes.")
            self._call(port.call, *calls[port.call.call])
        self.operation.is_hooked, self.operation.replaced = True, self.paths
        self.operation.edit = self._replace

    def _replace(self, made: nn.Module) -> None:
        old = made.get_submodule(self.path)
        # What acts on what goes in and comes out stays there.
        for table in _HOOKS:
            getattr(self.rule, table).update(getattr(old, table))
        for path in self.paths:
            made.set_submodule(path, self.rule)

    def _call(self, call: ModuleCall, given: Any, out: Any) -> None:
        program, insertion, what = self.program, self.operation.insertion, f"the new {self.path}"
        inside = {record.name: record for record in program.records if call in record.modules}
        made = [
            name
            for name in inside
            if Ref(name) in program.outputs or any(one.name not in inside for one in program.readers[name])
        ]
        leaves, spec = tree_flatten(given)
        returned = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        read = self._read(inside)
        values = example_values(self.seen_in, list(dict.fromkeys((*read, *made))))
        at = {
            place: name
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            and (name := next((new for old, new in read.items() if bitwise_same(leaf, values[old])), None))
        }
        made_at: dict[str, int] = {}
        for name in made:
            places = [place for place, leaf in enumerate(returned) if bitwise_same(leaf, values[name])]
            if not places:
                raise SurgeryError(
                    f"{self.path} cannot be redefined: others read {name!r}, which is computed in it and is "
                    "none of what it returns."
                )
            made_at[name] = places[0]
        if not at:
            raise SurgeryError(f"{self.path} cannot be redefined: it is handed nothing that it reads.")
        exported = captured(what, self.rule, program, list(at.values()), (leaves, spec, list(at)))
        outputs = exported.program.outputs
        if len(outputs) <= max(made_at.values()):
            raise SurgeryError(
                f"{what} returns {len(outputs)} tensors, and {self.path} returned {len(returned)}, which are "
                "read behind it."
            )
        modules = next(iter(inside.values())).modules
        names = {place: name for name, place in made_at.items()}
        insertion.put(
            exported.program,
            list(at.values()),
            self.path,
            modules[: modules.index(call) + 1],
            call=call.call,
            made=[names.get(n) or insertion.free(f"{call}/returned.{n}") for n in range(len(outputs))],
            root="held",
            what=what,
        )
        for name in made:
            _expect_alike(insertion, name, name, what)
        self.operation.without |= inside.keys()
        self.operation.reasons = (*self.operation.reasons, *exported.reasons)

    def _read(self, inside: Mapping[str, Record]) -> dict[str, str]:
        """What the records of a call read from outside: as it was where the call was seen, and as it is."""
        before = self.seen_in.program.record_of
        if new := [name for name in inside if name not in before]:
            raise SurgeryError(
                f"{self.path} cannot be redefined: it holds {new[0]!r} since a step that no module "
                "shows the place of. Redefine it before that step."
            )
        pairs = {
            old.name: new.name
            for name, record in inside.items()
            for old, new in zip(before[name].leaves(), record.leaves(), strict=True)
            if isinstance(old, Ref) and isinstance(new, Ref) and new.name not in inside
        }
        return {old: new for old, new in pairs.items() if old in self.seen_in.program.shapes}

    @one_module()
    @torch.no_grad()
    def _calls(self) -> dict[int, tuple[Any, Any]]:
        """What each call is handed, and what it returns, on the example of the capture."""
        given: list[Any] = []
        made: list[Any] = []
        module, call = sharing(self.seen_in.module), distinct(self.seen_in.signature.example)
        part = module.get_submodule(self.path)
        # Behind what acts on the arguments, and in front of what acts on the result.
        part.register_forward_pre_hook(lambda _, *given_: given.append(given_), with_kwargs=True)
        part.register_forward_hook(lambda _, __, out: made.append(out), prepend=True)
        with eager(module):
            called(module, self.seen_in.program, call)
        if len(given) != len({port.call.call for port in self.ports}):
            raise SurgeryError(f"{self.path} is called otherwise than in the captured graph.")
        return dict(enumerate(zip(given, made, strict=True)))


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


# -- weights -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight(Step):
    """Another tensor in place of one weight of a module."""

    path: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"redefine {self.path} as another weight"

    def on(self, model: Captured) -> Made:
        """See `Step`."""
        known = {path: one for one in model.program.sources for path in (one.name, *one.aliases)}
        own = known.get(self.path)
        if own is None:
            near = ", ".join(nearest_names(self.path, list(known))) or "none like it"
            raise SurgeryError(f"no weight {self.path!r} in {model.name}. Nearest: {near}.")
        if own.aliases:
            others = ", ".join(path for path in (own.name, *own.aliases) if path != self.path)
            raise SurgeryError(
                f"{self.path!r} is the same tensor as {others}: another one here would change both, or untie "
                "them. Redefine the module that is meant, with a rule that holds the new weight."
            )
        new, old = self.tensor, own.value
        if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            raise SurgeryError(
                f"the new {self.path} has shape {tuple(new.shape)}, {new.dtype}, on {new.device}; "
                f"{tuple(old.shape)}, {old.dtype}, on {old.device} is read there."
            )
        held = new.detach().clone()
        weight = nn.Parameter(held, requires_grad=old.requires_grad) if own.is_parameter else held
        operation = _Operation(model)
        operation.insertion.sources[own.name] = replace(own, value=weight)

        operation.edit, operation.is_hooked = partial(_put, paths=(own.name,), weight=weight), True
        made = operation.made(self.path.rpartition(".")[2], f"{self.path} was replaced", lambda: made.program)
        return made


def _put(made: nn.Module, paths: Sequence[str], weight: Tensor) -> None:
    """Put a weight in place of another one of a module."""
    for path in paths:
        owner, _, last = path.rpartition(".")
        part = made.get_submodule(owner)
        table: dict[str, Any] = part._parameters if last in part._parameters else part._buffers
        table[last] = weight


# -- compact -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compact(Step):
    """Rows and columns of weights that serve nothing but what was pruned to zero are removed."""

    def __str__(self) -> str:
        return "remove what is multiplied by zero"

    def on(self, model: Captured) -> Made:
        """See `Step`."""
        cut = Compaction(model.program)
        if not cut.sources:
            raise SurgeryError(
                "no row or column of a weight serves pruned entries alone. Prune heads, neurons or channels "
                "to zero first; what is put to another value is added up as before, and stays. Where all "
                "heads of a layer go, prune what they add: ('attn_out', layer)."
            )
        program = replace(cut.program, module_name=_named(model, "columns removed"))
        module = sharing(model.module)
        for source in cut.sources.values():
            _put(
                module,
                [path for path in (source.name, *source.aliases) if _holds(module, path)],
                source.value,
            )

        def sites_of(made: Program) -> SiteTable:
            table = model.site_table.operated(made, {}, (), "its columns were removed")
            return table.narrowed(model.program.shapes, cut.kept)

        return Made(
            run_as_records(module, program, model.signature),
            program,
            sites_of,
            lambda: self._again(model),
            model.fidelity.reasons,
        )

    def operated(self, model: Captured) -> Any:
        """See `Step`; the outputs are compared with those of the model that has zeros."""
        made = super().operated(model)
        names = [output_names(one.program) for one in (model, made)]
        old, new = (example_values(one, own) for one, own in zip((model, made), names, strict=True))
        for one, other in zip(*names, strict=True):
            before = old[one]
            if not isinstance(before, Tensor) or not before.is_floating_point():
                continue
            most = COLUMNS_APART * torch.finfo(before.dtype).eps * float(before.abs().max())
            apart = float((before - new[other]).abs().max())
            if not apart <= most:
                raise SurgeryError(
                    f"without the columns the outputs are {apart:.2g} from those with zeros in their place, "
                    f"and {most:.2g} is what sums in another order may differ by."
                )
        return made


def _holds(module: nn.Module, path: str) -> bool:
    owner, _, last = path.rpartition(".")
    try:
        part = module.get_submodule(owner)
    except AttributeError:
        return False
    return last in part._parameters or last in part._buffers


def _shown(given: Any) -> str:
    """A block or a value in a word or two."""
    if isinstance(given, Tensor):
        return f"a tensor {tuple(given.shape)}"
    if isinstance(given, nn.Module) or not callable(given):
        return type(given).__name__ if callable(given) else repr(given)
    return str(getattr(given, "__name__", type(given).__name__))
