"""A splice as records: the programs of `encode` and `decode`, put into the program of a model.

    encoded = encode(read)                      latents = encoded            (the site)
    clean = decode(encoded)                     reconstruction = decode(latents)
    missed = value − clean                      error = missed               (the site)
    output = value − ((clean − reconstruction) + (missed − error))

`decode` may read more than latents: those of dictionaries in front, as a cross-layer transcoder does (as they
were encoded where it makes `clean`, as they are where it makes the reconstruction), and the value that was
read, along a skip connection.

All that read the value reads the output. Unpatched, both differences are zero, so that the output is the
value bit for bit. `clean` and `missed` do not depend on the latents that are patched: an error term that did
would take back what the patch did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from conewise.errors import ConewiseError, DictionaryError
from conewise.program.lowering import live
from conewise.program.records import (
    Input,
    ModuleCall,
    ModulePort,
    Program,
    Record,
    Ref,
    SizeRef,
    Source,
    filled,
)
from conewise.program.sizes import Size, SizeTable, is_equal

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a splice: what it reads and writes, and what it makes of them."""

    name: str
    read: str
    value: str
    also: tuple[str, ...] = ()
    """The names of dictionaries in front whose latents `decode` reads too."""
    skips: bool = False
    """True if `decode` reads the value that was read too."""

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
    into, value, root = Insertion(program, DictionaryError), nodes.value, ModuleCall(nodes.name)
    under = (*into.around(value), root)

    def half(name: str, call: int, part: Program, given: Sequence[str], made: Sequence[str] = ()) -> str:
        """Add the records of `encode` or `decode`, applied to values."""
        own = ModuleCall(f"{nodes.name}.{name}", call)
        (found,) = into.put(part, given, own.path, (*under, own), call=call, made=made, what=name)
        into.ports.append(ModulePort(own, "Held", tuple(given), (found,)))
        return found

    def combined(name: str, target: Any, one: str, other: str) -> str:
        """Add a record of two values of one shape."""
        return into.note(into.like(value, name, target, (Ref(one), Ref(other)), under))

    def shown(name: str, part: str, of: str) -> None:
        """Add a value that is another one, until it is patched: what comes out of a module of its own."""
        call = ModuleCall(f"{nodes.name}.{part}")
        into.aliased(name, of, (*under, call))
        into.ports.append(ModulePort(call, "Identity", (of,), (name,)))

    others = [f"{name}.latents" for name in nodes.also]
    clean_others = [program.record_of[name].inputs[0] for name in others]
    skipped = [nodes.read] if nodes.skips else []
    encoded = half("encode", 0, encode, [nodes.read])
    shown(nodes.latents, "latents", encoded)
    clean = half("decode", 0, decode, [encoded, *clean_others, *skipped])
    missed = combined(f"{nodes.name}/missed", _aten.sub.Tensor, value, clean)
    shown(nodes.error, "error", missed)
    again = half("decode", 1, decode, [nodes.latents, *others, *skipped], (nodes.reconstruction,))
    of_latents = combined(f"{nodes.name}/of_latents", _aten.sub.Tensor, clean, again)
    of_error = combined(f"{nodes.name}/of_error", _aten.sub.Tensor, missed, nodes.error)
    change = combined(f"{nodes.name}/change", _aten.add.Tensor, of_latents, of_error)
    combined(nodes.output, _aten.sub.Tensor, value, change)
    given = (value,) if nodes.read == value else (value, nodes.read)
    into.ports.append(ModulePort(root, "Splice", given, (nodes.output,)))
    return into.finish({value: nodes.output}, is_hooked=is_hooked)


class Insertion:
    """Programs that are put into another one: the new records, sources, sizes and ports.

    `error` is what is raised where a part does not fit.
    """

    def __init__(self, program: Program, error: type[ConewiseError]) -> None:
        self.program, self.error = program, error
        self.sizes: SizeTable = program.sizes.copy()
        self.sources = {source.name: source for source in program.sources}
        self.by_tensor = {id(source.value): source.name for source in program.sources}
        self.records: list[Record] = []
        self.ports: list[ModulePort] = []
        self.written = dict.fromkeys(program.written)
        self.values: dict[str, Record | Input] = {leaf.name: leaf for leaf in program.inputs}
        self.values |= program.record_of

    def put(
        self,
        part: Program,
        given: Sequence[str],
        prefix: str,
        under: tuple[ModuleCall, ...],
        *,
        call: int = 0,
        made: Sequence[str] = (),
        what: str = "the block",
        root: str = "",
    ) -> tuple[str, ...]:
        """Add the records of `part`, applied to the values `given`; the names of what they make.

        `prefix` is the path of the module that it was captured from, which is `root` in the part's own paths;
        `under` are the calls that it is made under, its own last. With `made`, the results have these names.
        """
        suffix = f"#{call}" if call else ""
        symbols = self.symbols(part, given, what)
        names = {leaf.name: name for leaf, name in zip(part.inputs, given, strict=True)}
        names |= {source.name: self.source(source, prefix, root) for source in part.sources}
        returned = [out.name for out in part.outputs]
        wanted = dict(zip(returned, made, strict=True)) if made else {}
        for record in part.records:
            own = record.name.removeprefix(f"{root}.").removeprefix(f"{root}/") if root else record.name
            names[record.name] = wanted.get(record.name) or self.free(
                f"{prefix}{suffix}{'.' if '/' in own else '/'}{own}"
            )
            inner = (
                ModuleCall(f"{prefix}.{one.path.removeprefix(f'{root}.')}", call or one.call)
                for one in record.modules
                if one.path != root
            )
            self.note(
                replace(
                    record,
                    name=names[record.name],
                    args=self.template(record.args, names, part.sizes, symbols),
                    kwargs=self.template(dict(record.kwargs), names, part.sizes, symbols),
                    modules=(*under, *inner),
                    shape=record.shape and tuple(_size(size, symbols) for size in record.shape),
                )
            )
        for guard in part.sizes.relations:
            self.sizes.guard(guard.xreplace(symbols))
        for written in part.written:
            self.written[self.path(written, prefix, root)] = None
        return tuple(
            self.aliased(wanted[name], names[name], under)
            if names[name] != wanted.get(name, names[name])
            else names[name]
            for name in returned
        )

    def around(self, value: str, readers: Iterable[str] | None = None) -> tuple[ModuleCall, ...]:
        """The calls that a value and its readers, or these of them, are all made under, outermost first."""
        record = self.program.record_of.get(value)
        stacks = [
            one.modules for one in self.program.readers[value] if readers is None or one.name in readers
        ]
        if record is None or (readers is None and Ref(value) in self.program.outputs):
            return ()
        found: list[ModuleCall] = []
        for calls in zip(record.modules, *stacks, strict=False):
            if len(set(calls)) > 1:
                break
            found.append(calls[0])
        return tuple(found)

    def note(self, record: Record) -> str:
        """Add a record; its name."""
        self.records.append(record)
        self.values[record.name] = record
        return record.name

    def free(self, name: str) -> str:
        """The name, or one like it that no value has yet."""
        number, found = 1, name
        while found in self.values or found in self.sources:
            number, found = number + 1, f"{name}.{number}"
        return found

    def aliased(self, name: str, of: str, under: tuple[ModuleCall, ...]) -> str:
        """Add a value that is another one, until it is patched."""
        return self.note(self.like(of, name, _aten.alias.default, (Ref(of),), under))

    def like(
        self, value: str, name: str, target: Any, args: tuple[Any, ...], under: tuple[ModuleCall, ...]
    ) -> Record:
        """A record whose value has the shape, dtype and device of another one."""
        of = self.values[value]
        return Record(name, target, args, {}, under, of.shape, of.dtype, of.device)

    def symbols(self, part: Program, given: Sequence[str], what: str) -> dict[Any, Any]:
        """The program's symbols for those of a part's own inputs."""
        found: dict[Any, Any] = {}
        for leaf, name in zip(part.inputs, given, strict=True):
            for dim, (own, size) in enumerate(zip(leaf.shape, self.values[name].shape or (), strict=True)):
                if isinstance(own, int):
                    if not (isinstance(size, int) and own == size):
                        raise self.error(
                            f"{what} works for {own} entries along dimension {dim} alone, and {name!r} has "
                            f"{size} there. It has to work for any batch and any number of positions."
                        )
                elif isinstance(own, sympy.Symbol):
                    there = sympy.Integer(size) if isinstance(size, int) else size
                    if not is_equal(found.setdefault(own, there), there):
                        raise self.error(
                            f"{what} takes {found[own]} and {there} for one size, and these are two: it "
                            "has to work for any batch and any number of positions."
                        )
        return found

    @staticmethod
    def path(path: str, prefix: str, root: str) -> str:
        """The path in the whole module of a weight of a part, which was captured as `root`."""
        return f"{prefix}.{path.removeprefix(f'{root}.')}"

    def source(self, source: Source, prefix: str, root: str = "") -> str:
        """The name of a weight in the program, which may have it already."""
        paths = tuple(self.path(path, prefix, root) for path in (source.name, *source.aliases))
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

        def translated(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return Ref(names[leaf.name])
            if not isinstance(leaf, SizeRef):
                return leaf
            size = _size(sizes.expressions[leaf.index], symbols)
            return size if isinstance(size, int) else SizeRef(self.sizes.index(size))

        return filled(given, translated)

    def finish(
        self, renamed: Mapping[str, str], *, is_hooked: bool, without: Collection[str] = ()
    ) -> Program:
        """The program, each record behind all that it reads; nothing is in it that no output needs.

        Readers of a value that is `renamed` read the other one instead, but for the records that were added.
        Records of the program that are among `without` are left out.
        """
        host = [reading(record, renamed) for record in self.program.records if record.name not in without]
        outputs = tuple(
            Ref(renamed.get(out.name, out.name)) if isinstance(out, Ref) else out
            for out in self.program.outputs
        )
        records = live(ordered((*host, *self.records)), outputs)
        there = {*(record.name for record in records), *(leaf.name for leaf in self.program.inputs)}

        def ports(given: Iterable[ModulePort], renamed: Mapping[str, str]) -> Iterator[ModulePort]:
            for port in given:
                inputs, made = (
                    tuple(dict.fromkeys(n for name in names if (n := renamed.get(name, name)) in there))
                    for names in (port.inputs, port.outputs)
                )
                why = "nothing reads it after the surgery" if port.outputs and not made else ""
                yield replace(port, inputs=inputs, outputs=made, hidden=port.hidden or why)

        known = (*ports(self.program.ports, renamed), *ports(self.ports if is_hooked else (), {}))
        read = {name for record in records for name in record.inputs}
        read |= {out.name for out in outputs if isinstance(out, Ref)}
        program = replace(
            self.program,
            records=records,
            sources=tuple(source for source in self.sources.values() if source.name in read),
            outputs=outputs,
            sizes=self.sizes,
            ports=known,
            written=tuple(self.written),
        )
        program.check()
        return program


def _size(size: Size, symbols: Mapping[Any, Any]) -> Size:
    """A size in the symbols of the program."""
    if isinstance(size, int):
        return size
    found = size.xreplace(symbols)
    return int(found) if found.is_Integer else found


def reading(record: Record, renamed: Mapping[str, str]) -> Record:
    """The record, with others of the values that it reads."""
    if renamed.keys().isdisjoint(record.inputs):
        return record

    def named(leaf: Any) -> Any:
        return Ref(renamed.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf

    return replace(record, args=filled(record.args, named), kwargs=filled(dict(record.kwargs), named))


def ordered(records: Sequence[Record]) -> tuple[Record, ...]:
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
