"""A splice as records: the programs of `encode` and `decode`, put into the program of a model.

    encoded = encode(read)                      latents = encoded            (the site)
    clean = decode(encoded)                     reconstruction = decode(latents)
    missed = value − clean                      error = missed               (the site)
    output = value − ((clean − reconstruction) + (missed − error))

All that read the value reads the output. Unpatched, both differences are zero, so that the output is the
value bit for bit. `clean` and `missed` do not depend on the latents that are patched: an error term that did
would take back what the patch did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from conewise.errors import DictionaryError
from conewise.program.records import ModuleCall, ModulePort, Program, Record, Ref, SizeRef, Source
from conewise.program.sizes import Size, SizeTable

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a splice: what it reads and writes, and what it makes of them."""

    name: str
    read: str
    value: str

    @property
    def latents(self) -> str:
        """The latents: the result of `encode`, or what was put in its place."""
        return f"{self.name}.latents"

    @property
    def reconstruction(self) -> str:
        """The result of `decode` on the latents."""
        return f"{self.name}.reconstruction"

    @property
    def error(self) -> str:
        """The dictionary's error: the value less its reconstruction from the latents as encoded."""
        return f"{self.name}.error"

    @property
    def output(self) -> str:
        """The value that the rest of the model reads instead."""
        return f"{self.name}.output"


def inserted(program: Program, nodes: Nodes, encode: Program, decode: Program, *, is_hooked: bool) -> Program:
    """The program with a splice in it. With `is_hooked`, its modules are at work in the module too.

    Raises DictionaryError where `encode` or `decode` works for one size only.
    """
    insertion = _Insertion(program, nodes)
    insertion.make(encode, decode)
    return insertion.finish(is_hooked=is_hooked)


class _Insertion:
    """The state of one insertion: the new records, sources and sizes."""

    def __init__(self, program: Program, nodes: Nodes) -> None:
        self.program, self.nodes = program, nodes
        self.sizes: SizeTable = program.sizes.copy()
        self.sources = {source.name: source for source in program.sources}
        self.by_tensor = {id(source.value): source.name for source in program.sources}
        self.records: list[Record] = []
        self.ports: list[ModulePort] = []
        self.written = dict.fromkeys(program.written)
        self.root = ModuleCall(nodes.name)

    def make(self, encode: Program, decode: Program) -> None:
        """Add the records of a splice."""
        nodes, value = self.nodes, self.nodes.value
        encoded = self.add("encode", 0, encode, nodes.read)
        self.alias(nodes.latents, "latents", encoded)
        clean = self.add("decode", 0, decode, encoded)
        missed = self.combined(f"{nodes.name}/missed", _aten.sub.Tensor, value, clean)
        self.alias(nodes.error, "error", missed)
        live = self.add("decode", 1, decode, nodes.latents, nodes.reconstruction)
        of_latents = self.combined(f"{nodes.name}/of_latents", _aten.sub.Tensor, clean, live)
        of_error = self.combined(f"{nodes.name}/of_error", _aten.sub.Tensor, missed, nodes.error)
        change = self.combined(f"{nodes.name}/change", _aten.add.Tensor, of_latents, of_error)
        self.combined(nodes.output, _aten.sub.Tensor, value, change)
        given = (value,) if nodes.read == value else (value, nodes.read)
        self.ports.append(ModulePort(self.root, "Splice", given, (nodes.output,)))

    def add(self, half: str, call: int, part: Program, given: str, made: str = "") -> str:
        """Add the records of `encode` or `decode`, applied to a value; the name of what they make."""
        prefix = f"{self.nodes.name}.{half}"
        suffix = f"#{call}" if call else ""
        (leaf,) = part.inputs
        symbols = self.symbols(leaf.shape, given, half)
        names = {leaf.name: given}
        for source in part.sources:
            names[source.name] = self.source(source, prefix)
        (returned,) = part.outputs
        for record in part.records:
            name = f"{prefix}{suffix}{'.' if '/' in record.name else '/'}{record.name}"
            names[record.name] = made if made and record.name == returned.name else name
            self.records.append(
                replace(
                    record,
                    name=names[record.name],
                    args=self.template(record.args, names, part.sizes, symbols),
                    kwargs=self.template(dict(record.kwargs), names, part.sizes, symbols),
                    modules=(
                        self.root,
                        ModuleCall(prefix, call),
                        *(ModuleCall(f"{prefix}.{one.path}", call or one.call) for one in record.modules),
                    ),
                    shape=None if record.shape is None else self.shape(record.shape, symbols),
                )
            )
        for guard in part.sizes.relations:
            self.sizes.guard(guard.xreplace(symbols))
        for written in part.written:
            self.written[names[written]] = None
        found = names[returned.name]
        if made and found != made:  # `decode` hands something through
            self.alias(made, half, found)
            found = made
        self.ports.append(ModulePort(ModuleCall(prefix, call), "Held", (given,), (found,)))
        return found

    def symbols(self, shape: Sequence[Size], given: str, half: str) -> dict[Any, Any]:
        """The program's symbols for those of a half's own input."""
        found: dict[Any, Any] = {}
        for dim, (own, size) in enumerate(zip(shape, self.shape_of(given), strict=True)):
            if isinstance(own, int):
                if not (isinstance(size, int) and own == size):
                    raise DictionaryError(
                        f"{half} works for {own} entries along dimension {dim} alone, and {given!r} has "
                        f"{size} there. It has to work for any batch and any number of positions."
                    )
            elif isinstance(own, sympy.Symbol):
                found[own] = sympy.Integer(size) if isinstance(size, int) else size
        return found

    def source(self, source: Source, prefix: str) -> str:
        """The name of a weight in the program, which may have it already."""
        paths = tuple(f"{prefix}.{path}" for path in (source.name, *source.aliases))
        known = self.by_tensor.get(id(source.value))
        if known is None:
            self.by_tensor[id(source.value)] = paths[0]
            self.sources[paths[0]] = Source(paths[0], source.value, source.is_parameter, paths[1:])
            return paths[0]
        own = self.sources[known]
        more = tuple(path for path in paths if path not in (own.name, *own.aliases))
        self.sources[known] = replace(own, aliases=(*own.aliases, *more))
        return known

    def template(
        self, given: Any, names: Mapping[str, str], sizes: SizeTable, symbols: Mapping[Any, Any]
    ) -> Any:
        """The arguments of a record, with names and sizes of the program in them."""
        match given:
            case Ref(name):
                return Ref(names[name])
            case SizeRef(index):
                size = self.size(sizes.expressions[index], symbols)
                return size if isinstance(size, int) else SizeRef(self.sizes.index(size))
            case tuple():
                return tuple(self.template(item, names, sizes, symbols) for item in given)
            case list():
                return [self.template(item, names, sizes, symbols) for item in given]
            case dict():
                return {key: self.template(item, names, sizes, symbols) for key, item in given.items()}
            case slice():
                bounds = (given.start, given.stop, given.step)
                return slice(*(self.template(bound, names, sizes, symbols) for bound in bounds))
            case _:
                return given

    def shape(self, shape: Iterable[Size], symbols: Mapping[Any, Any]) -> tuple[Size, ...]:
        """A shape in the symbols of the program."""
        return tuple(self.size(size, symbols) for size in shape)

    @staticmethod
    def size(size: Size, symbols: Mapping[Any, Any]) -> Size:
        """A size in the symbols of the program."""
        if isinstance(size, int):
            return size
        found = size.xreplace(symbols)
        return int(found) if found.is_Integer else found

    def combined(self, name: str, target: Any, one: str, other: str) -> str:
        """Add a record of two values of one shape."""
        like = self.program.record_of.get(self.nodes.value)
        device = like.device if like is not None else self.input_of(self.nodes.value).device
        self.records.append(
            Record(
                name,
                target,
                (Ref(one), Ref(other)),
                {},
                (self.root,),
                self.shape_of(self.nodes.value),
                self.dtype_of(self.nodes.value),
                device,
            )
        )
        return name

    def alias(self, name: str, half: str, of: str) -> None:
        """Add a value that is another one, until it is patched."""
        made = self.made(of)
        call = ModuleCall(f"{self.nodes.name}.{half}")
        device = made.device if made is not None else self.input_of(of).device
        self.records.append(
            Record(
                name,
                _aten.alias.default,
                (Ref(of),),
                {},
                (self.root, call),
                self.shape_of(of),
                self.dtype_of(of),
                device,
            )
        )
        self.ports.append(ModulePort(call, "Identity", (of,), (name,)))

    def made(self, name: str) -> Record | None:
        """The record of that name, of the program or of the splice."""
        found = self.program.record_of.get(name)
        return found or next((record for record in self.records if record.name == name), None)

    def input_of(self, name: str) -> Any:
        """The program's input of that name."""
        return next(leaf for leaf in self.program.inputs if leaf.name == name)

    def shape_of(self, name: str) -> tuple[Size, ...]:
        """The shape of a value that is one tensor."""
        record = self.made(name)
        shape = self.program.shapes[name] if record is None else record.shape
        assert shape is not None
        return shape

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a value that is one tensor."""
        record = self.made(name)
        dtype = self.program.dtypes[name] if record is None else record.dtype
        assert dtype is not None
        return dtype

    def finish(self, *, is_hooked: bool) -> Program:
        """The program, each record behind all that it reads."""
        value, output = self.nodes.value, self.nodes.output
        renamed = {value: output}
        host = [_reading(record, renamed) for record in self.program.records]
        ports = [
            replace(
                port,
                inputs=tuple(renamed.get(name, name) for name in port.inputs),
                outputs=tuple(renamed.get(name, name) for name in port.outputs),
            )
            for port in self.program.ports
        ]
        outputs = tuple(Ref(output) if out == Ref(value) else out for out in self.program.outputs)
        program = replace(
            self.program,
            records=_ordered((*host, *self.records)),
            sources=tuple(self.sources.values()),
            outputs=outputs,
            sizes=self.sizes,
            ports=(*ports, *(self.ports if is_hooked else ())),
            written=tuple(self.written),
        )
        program.check()
        return program


def _reading(record: Record, renamed: Mapping[str, str]) -> Record:
    """The record, with others of the values that it reads."""
    if renamed.keys().isdisjoint(record.inputs):
        return record

    def named(given: Any) -> Any:
        match given:
            case Ref(name):
                return Ref(renamed.get(name, name))
            case tuple():
                return tuple(map(named, given))
            case list():
                return list(map(named, given))
            case dict():
                return {key: named(item) for key, item in given.items()}
            case slice():
                return slice(named(given.start), named(given.stop), named(given.step))
            case _:
                return given

    return replace(record, args=named(record.args), kwargs=named(dict(record.kwargs)))


def _ordered(records: Sequence[Record]) -> tuple[Record, ...]:
    """The records in their order, but for those that have to stand in front of one that reads them."""
    by_name = {record.name: record for record in records}
    done: dict[str, Record] = {}
    for record in records:
        waiting = [record]
        while waiting:
            one = waiting[-1]
            missing = [by_name[name] for name in one.inputs if name in by_name and name not in done]
            if missing and one.name not in done:
                waiting += missing[::-1]
            else:
                done.setdefault(one.name, waiting.pop())
    return tuple(done.values())
