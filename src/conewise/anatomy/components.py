"""Components: who writes into the residual stream, who reads it, and the edges and paths between them.

Writers are the stream as it enters the first layer, the attention heads and the MLPs. Readers are the heads'
queries, keys and values, the MLPs, and the unembedding. An edge joins a writer with a reader behind it; edges
are tables that can be swept.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from conewise.anatomy.attention import Activation
from conewise.anatomy.axes import View
from conewise.anatomy.places import EdgePlace, Index, as_numbers, component_name, edge_name
from conewise.anatomy.positionwise import is_light
from conewise.anatomy.residual import Stream
from conewise.anatomy.residual_names import Layer
from conewise.anatomy.wiring import Wiring
from conewise.arguments import has_items
from conewise.errors import EdgeError, nearest, write
from conewise.extras import needs
from conewise.program.records import Program, Ref
from conewise.program.walk import field_names

EXAMPLE = "a0.h1->a3.h2<q>"
"""An edge as people write it."""

SLOTS = ("q", "k", "v")
"""The slots in which a head reads the stream."""


@dataclass(frozen=True, slots=True)
class Writer:
    """A writer into the stream: `input`, a head (`a3.h1`) or an MLP (`m3`).

    `slot` is "input", "head" or "mlp". `node` is the stream as it enters the first layer, or the node of z,
    or the term that the MLP adds. `number` is its row in stacks of parts, in the order of computation.
    """

    name: str
    slot: str
    node: str
    layer: int | None
    head: int | None
    number: int


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of the stream: a head's queries, keys or values (`a3.h1<q>`), an MLP (`m3`), or `logits`.

    `slot` is "q", "k", "v", "mlp" or "logits". It reads the value of the stream at `entry`, in which the
    first `writers` writers have a part; what it makes of it lies at `node`, all of it or, along `axis`
    ("head", or "kv_head" where there are fewer of them), the part `head`. `site` names that node: (name,
    layer, stack).
    """

    name: str
    slot: str
    layer: int | None
    head: int | None
    axis: str | None
    entry: str
    node: str
    site: tuple[str, int | None, str]
    writers: int


@dataclass(frozen=True, slots=True)
class HeadWriters:
    """The heads of one layer as writers: z, how its heads lie, and the term that they add to the stream."""

    layer: Layer
    node: str
    view: View
    term: str
    rows: range


class Components:
    """The writers and readers of one stack of layers, in the order of computation.

    Nothing is computed: all is read off the program and its layers. Raises EdgeError where the model has no
    such components, and says which feature of it is in the way. Without `reads_heads`, heads are writers
    alone: what they read is not looked for.
    """

    def __init__(
        self, program: Program, layers: Sequence[Layer], stack: str = "", *, reads_heads: bool = True
    ) -> None:
        self.program, self._reads_heads = program, reads_heads
        self.wiring = Wiring(program)
        self.stack = stack
        self.layers = _of_stack(layers, stack)
        self._cores = frozenset(layer.attention.core.name for layer in layers)
        self._stream = Stream(self.wiring, frozenset(self.wiring.records))
        self.heads: list[HeadWriters] = []
        self.writers: tuple[Writer, ...] = tuple(self._writers())
        self._terms = {one.term: one.rows for one in self.heads} | {
            one.node: range(one.number, one.number + 1) for one in self.writers if one.slot != "head"
        }
        self._entries = self._values_of_stream()
        self.readers: tuple[Reader, ...] = tuple(self._readers())
        self._by_name = {one.name: one for one in self.writers}
        self._readers_by_name = {one.name: one for one in self.readers}

    def __repr__(self) -> str:
        return f"{len(self.writers)} writers, {len(self.readers)} readers, {self.edges:,} edges"

    @property
    def edges(self) -> int:
        """The number of edges."""
        return sum(reader.writers for reader in self.readers)

    @property
    def terms(self) -> dict[str, range]:
        """The nodes that carry writers' parts into the stream, and the numbers of these writers."""
        return dict(self._terms)

    @cached_property
    def entries(self) -> dict[str, tuple[Reader, ...]]:
        """The values of the stream that are read, in order, each with its readers."""
        found: dict[str, list[Reader]] = {}
        for reader in self.readers:
            found.setdefault(reader.entry, []).append(reader)
        return {entry: tuple(readers) for entry, readers in found.items()}

    def terms_before(self, count: int) -> tuple[str, ...]:
        """The nodes that carry the first so many writers' parts into the stream, in that order."""
        found = [(rows.start, term) for term, rows in self._terms.items() if rows.start < count]
        return tuple(term for _, term in sorted(found))

    def writer(self, name: str) -> Writer:
        """The writer of that name. Raises EdgeError with the nearest names."""
        name = name if name in self._by_name else component_name(name)
        if name not in self._by_name:
            raise _unknown("writer", name, self._by_name, "input, a3.h1 and m3")
        return self._by_name[name]

    def reader(self, name: str) -> Reader:
        """The reader of that name. Raises EdgeError with the nearest names."""
        name = name if name in self._readers_by_name else component_name(name)
        if name not in self._readers_by_name:
            raise _unknown("reader", name, self._readers_by_name, "a3.h1<q>, m3 and logits")
        return self._readers_by_name[name]

    def edge(self, name: str) -> tuple[Writer, Reader]:
        """The two ends of an edge, `a0.h1->a3.h2<q>`. Raises EdgeError where it joins nothing."""
        before, arrow, behind = name.partition("->")
        if not arrow:
            raise EdgeError(f"{name!r} names no edge: an edge is a writer and a reader, as in {EXAMPLE!r}.")
        writer, reader = self.writer(before.strip()), self.reader(behind.strip())
        if writer.number >= reader.writers:
            last = self.writers[reader.writers - 1].name
            raise EdgeError(
                f"no edge {name!r}: {reader.name} reads the stream before {writer.name} has written into it. "
                f"It reads what was written up to {last}."
            )
        return writer, reader

    def carrying(self, entry: str) -> frozenset[str]:
        """The records between the writers' terms and a value of the stream, the latter included."""
        return self.wiring.above(entry, until=self._terms)

    def layer_of(self, node: str) -> str:
        """The layer that a record is of, in words."""
        for layer in self.layers:
            if node in layer.members:
                return f"layer {layer.number}"
        return "what lies outside of the layers"

    # -- writers -------------------------------------------------------------------------------

    def _writers(self) -> Iterator[Writer]:
        first = self.layers[0]
        if first.number != 0:
            raise EdgeError(
                f"the first layer with attention is layer {first.number}: what the layers before it add to "
                "the stream is no head's. Edges are known where every layer has attention."
            )
        yield Writer("input", "input", _named(first, "resid_pre"), None, None, 0)
        number = 1
        for layer in self.layers:
            if layer.cross is not None:
                raise EdgeError(
                    f"layer {layer.number} reads another stack by cross-attention, which adds to the stream "
                    "what no head or MLP of its own stack wrote. Edges are known within stacks that read no "
                    "other one: say which with `stack`, as in stack='encoder'."
                )
            at = layer.number
            z = _activation(layer, "z", "heads that could be told apart")
            heads = _heads(z.view)
            if not heads:
                raise EdgeError(f"layer {at}: how many heads there are in {z.node!r} is not known.")
            mlp, is_first = layer.nodes.get("mlp_out"), self._is_mlp_first(layer)
            if mlp is not None and is_first:
                yield Writer(f"m{at}", "mlp", mlp, at, None, number)
                number += 1
            rows = range(number, number + heads)
            self.heads.append(HeadWriters(layer, z.node, z.view, _named(layer, "attn_out"), rows))
            for head in range(heads):
                yield Writer(f"a{at}.h{head}", "head", z.node, at, head, number + head)
            number += heads
            if mlp is not None and not is_first:
                yield Writer(f"m{at}", "mlp", mlp, at, None, number)
                number += 1

    def _is_mlp_first(self, layer: Layer) -> bool:
        """True if the attention of a layer reads what its MLP wrote."""
        mlp = layer.nodes.get("mlp_out")
        return mlp is not None and layer.attention.core.name in self.wiring.cone(mlp, layer.members)

    # -- the stream ----------------------------------------------------------------------------

    def _values_of_stream(self) -> frozenset[str]:
        """The values that terms are added to, and the last sum: what readers read.

        Where sums are normed before the next term is added (BERT), the normed values are among them.
        """
        last = _named(self.layers[-1], "resid_post")
        carrying = self.carrying(last)
        additions = [
            found
            for total in self._stream.totals
            if total in carrying and (found := self._stream.addition(total)) is not None
        ]
        carried = {name for one in additions for name in self._made_of(one.carried)}
        return frozenset({self.writers[0].node, *carried, last})

    def _made_of(self, carried: str) -> Iterator[str]:
        """The values that a term is added to, before rearranging and casts, and those they are norms of."""
        name = self._stream.unchanged(carried)
        while name not in self._terms:
            yield name
            record = self.wiring.records.get(name)
            if record is None or name in self._stream.sums or not is_light(record):
                return
            operands = self.wiring.operands(record)
            if len(operands) != 1:
                return
            (name,) = operands

    def _entry(self, node: str, what: str) -> str:
        """The value of the stream that a node is made of."""
        until = self._entries - {node}
        hits = sorted(self._read_above(node, until) & until, key=lambda name: self.wiring.order.get(name, -1))
        if len(hits) != 1:
            shown = " and ".join(map(repr, hits)) or "none"
            raise EdgeError(
                f"{what} reads {len(hits)} values of the residual stream ({shown}), where one was expected. "
                "Edges are known where each head and MLP reads the stream in one place."
            )
        return hits[0]

    def _read_above(self, node: str, until: Collection[str]) -> set[str]:
        """All that a node depends on, not past the values of `until`."""
        found = self.wiring.above(node, until=until)
        return {name for one in found for name in self.wiring.operands(self.wiring.records[one])}

    def prefix(self, entry: str) -> int:
        """Return the number of writers that have a part in a value of the stream: the first so many."""
        if entry in self._terms:
            rows = set(self._terms[entry])
        else:
            read = self._read_above(entry, self._terms) & self._terms.keys()
            rows = {row for term in read for row in self._terms[term]}
        if rows != set(range(len(rows))):
            missing = next(one.name for one in self.writers if one.number not in rows)
            raise EdgeError(
                f"the value of the stream at {entry!r} holds what later components wrote, but not what "
                f"{missing} did: this is not one stream that every component adds to."
            )
        return len(rows)

    # -- readers -------------------------------------------------------------------------------

    def _readers(self) -> Iterator[Reader]:
        for layer in self.layers:
            heads, mlp = self._readers_by_head(layer) if self._reads_heads else (), self._mlp_reader(layer)
            yield from (*mlp, *heads) if self._is_mlp_first(layer) else (*heads, *mlp)
        yield from self._last_reader()

    def _readers_by_head(self, layer: Layer) -> Iterator[Reader]:
        at = layer.number
        for slot in SLOTS:
            found = _activation(layer, slot, f"{slot!r} that heads could be told apart in")
            entry = self._entry(found.node, f"{slot} of layer {at}")
            axis, short = ("kv_head", "kv") if "kv_head" in found.view.axes else ("head", "h")
            site, writers = (slot, at, self.stack), self.prefix(entry)
            for head in range(_heads(found.view)):
                name = f"a{at}.{short}{head}<{slot}>"
                yield Reader(name, slot, at, head, axis, entry, found.node, site, writers)
        self._expect_no_other_way(layer)

    def _expect_no_other_way(self, layer: Layer) -> None:
        """Raise EdgeError where attention depends on the stream by more than queries, keys and values."""
        known = [one.attention.activations for one in self.layers]
        until = frozenset(one[slot].node for one in known for slot in SLOTS if slot in one)
        term = layer.nodes["attn_out"]
        between = self.wiring.above(term, until=until | self._entries)
        for name in sorted(between, key=self.wiring.order.__getitem__):
            for read in self.wiring.operands(self.wiring.records[name]):
                if read in self._entries:
                    raise EdgeError(
                        f"the attention of layer {layer.number} depends on the stream by more than queries, "
                        f"keys and values: {name!r} reads it on the way to {term!r}, as a gate does. Edges "
                        "are known where these three are all that attention reads."
                    )

    def _mlp_reader(self, layer: Layer) -> Iterator[Reader]:
        if "mlp_out" in layer.nodes:
            node, at = layer.nodes["mlp_out"], layer.number
            entry = self._entry(node, f"the MLP of layer {at}")
            site = ("mlp_out", at, self.stack)
            yield Reader(f"m{at}", "mlp", at, None, None, entry, node, site, self.prefix(entry))

    def _expect_no_more_sums(self, last: str, output: str) -> None:
        """Raise EdgeError where layers without attention add to the stream behind the last one with it."""
        behind = self.wiring.above(output, until={last})
        if self._cores & behind:
            return
        behind &= self.wiring.cone(last)
        for total in self._stream.totals:
            if total in behind and self._stream.addition(total) is not None:
                raise EdgeError(
                    f"{total!r} adds to the stream behind the last layer with attention, and is neither a "
                    "head's nor the MLP's of such a layer. Edges are known where every layer has attention."
                )

    def _last_reader(self) -> Iterator[Reader]:
        """The value that the unembedding reads, or a model without one returns; none for an inner stack."""
        names = field_names(self.program, "logits")
        outputs = names or [leaf.name for leaf in self.program.outputs if isinstance(leaf, Ref)][:1]
        last = _named(self.layers[-1], "resid_post")
        if len(outputs) != 1 or (outputs[0] != last and outputs[0] not in self.wiring.cone(last)):
            return
        (output,) = outputs
        self._expect_no_more_sums(last, output)
        if self._cores & self.wiring.above(output, until={last}) - self.carrying(last):
            return
        entry = self._leaving(last)
        products = [
            record
            for record in self.wiring.upward(output, lambda r: r.name == entry or self.wiring.is_linear(r))
            if self.wiring.is_linear(record) and record.name in self.wiring.cone(entry)
        ]
        node = self.wiring.operands(products[0])[0] if len(products) == 1 else output
        node = self._stream.unchanged(node)
        if entry in self._read_above(output, {node}):
            node = output
        name = "logits" if names or products else "output"
        yield Reader(name, "logits", None, None, None, entry, node, (node, None, ""), self.prefix(entry))

    def _leaving(self, last: str) -> str:
        """Return what leaves the last layer: its last sum, or a norm of it that is the layer's own (BERT)."""
        members, readers = self.layers[-1].members, self.wiring.readers
        normed = [
            name
            for name in members & self.wiring.cone(last)
            if self._stream.source(name) == last
            and (
                Ref(name) in self.program.outputs
                or any(one.name not in members for one in readers.get(name, ()))
            )
        ]
        return normed[0] if len(normed) == 1 else last


def _of_stack(layers: Sequence[Layer], stack: str) -> list[Layer]:
    if not layers:
        raise EdgeError(
            "this model has no layers with attention, so it has no heads and no edges between them. Its "
            "values can be patched by site: `model.sites` lists them."
        )
    stacks = list(dict.fromkeys(layer.stack for layer in layers))
    if stack not in stacks:
        shown = ", ".join(map(repr, stacks))
        raise EdgeError(f"this model has the stacks {shown}: say which one with `stack`, not {stack!r}.")
    return sorted((layer for layer in layers if layer.stack == stack), key=lambda layer: layer.number)


def _named(layer: Layer, kind: str) -> str:
    if kind not in layer.nodes:
        raise EdgeError(
            f"layer {layer.number} has no {kind!r}: {layer.missing.get(kind, 'it was not found')}."
        )
    return layer.nodes[kind]


def _activation(layer: Layer, kind: str, what: str) -> Activation:
    """An activation of a layer's attention. Raises EdgeError, which says what the layer has not."""
    found = layer.attention.activations.get(kind)
    if found is None:
        why = write(layer.attention.missing.get(kind, ("it was not found",)))
        raise EdgeError(f"layer {layer.number} has no {what}: {why}.")
    return found


def _heads(view: View) -> int:
    axis = "kv_head" if "kv_head" in view.axes else "head"
    length = view.lengths.get(axis, 0)
    return length if isinstance(length, int) else 0


def _unknown(what: str, name: str, known: Collection[str], forms: str) -> EdgeError:
    here = f"among the {len(known)} of this model"
    return EdgeError(f"no {what} {name!r} {here}.{nearest(name, known)} They look like {forms}.")


if TYPE_CHECKING:
    import pandas as pd

SHOWN = 8
"""The number of edges of a table that are printed."""


@dataclass(frozen=True, eq=False, repr=False)
class Edges:
    """Edges, each with the names of its writer and of its reader; `places` say where they are patched.

    They are a selector: `model.sweep(edges, ...)` has one world for each. `edges["a0.h1->m2"]` is one of
    them, `edges[:100]` are some, `edges.select(writer="a0.*", reader="*<k>")` those with such names.
    """

    places: tuple[EdgePlace, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the edges, in order: those into earlier readers come first."""
        return tuple([place.edge for place in self.places])

    @cached_property
    def entries(self) -> frozenset[str]:
        """The values of the stream that their readers read."""
        return frozenset({place.entry for place in self.places})

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, chosen: int | slice | str | Sequence[str]) -> Edges:
        """Some of the edges: by number, by a slice, by a name or a list of names."""
        if isinstance(chosen, int):
            if isinstance(chosen, bool) or not -len(self) <= chosen < len(self):
                raise EdgeError(f"no edge {chosen!r}: there are {len(self)}, from 0.")
            return self._picked([range(len(self))[chosen]])
        if isinstance(chosen, slice) and chosen.step != 0:
            return self._picked(range(len(self))[chosen])
        if not has_items(chosen):
            raise EdgeError(
                f"edges are chosen by a number, a slice, a name or a list of names, not by {chosen!r}."
            )
        numbers = {name: number for number, name in enumerate(self.names)}
        wanted = [chosen] if isinstance(chosen, str) else list(chosen)
        wanted = [edge_name(str(one)) if one not in numbers else one for one in wanted]
        for name in wanted:
            if name not in numbers:
                raise EdgeError(f"no edge {name!r} among these {len(self)}.{nearest(str(name), numbers)}")
        return self._picked([numbers[name] for name in wanted])

    def __add__(self, other: object) -> Edges:
        """These edges, and those of `other` that are not among them."""
        if not isinstance(other, Edges):
            return NotImplemented
        known = set(self.places)
        new = other._picked([number for number, place in enumerate(other.places) if place not in known])
        return Edges(self.places + new.places, self.writers + new.writers, self.readers + new.readers)

    def select(self, *, writer: str = "*", reader: str = "*") -> Edges:
        """The edges whose writer and reader have names like these; * is anything: "a0.*", "*<q>", "m?"."""
        for given in (writer, reader):
            if not isinstance(given, str):
                raise EdgeError(f"a component is named by a text such as 'a0.*' or 'm1', not by {given!r}.")
        writer, reader = component_name(writer), component_name(reader)
        pairs = zip(self.writers, self.readers, strict=True)
        found = [
            number
            for number, (one, other) in enumerate(pairs)
            if fnmatch.fnmatchcase(one, writer) and fnmatch.fnmatchcase(other, reader)
        ]
        if not found:
            raise EdgeError(f"no edge from {writer!r} to {reader!r} among these {len(self)}.")
        return self._picked(found)

    def _picked(self, numbers: Sequence[int]) -> Edges:
        return Edges(
            tuple([self.places[number] for number in numbers]),
            tuple([self.writers[number] for number in numbers]),
            tuple([self.readers[number] for number in numbers]),
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each edge: its name, its writer, its reader, the site that is patched."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        sites = [place.name for place in self.places]
        layers = pd.array([place.layer for place in self.places], dtype="Int64")
        columns: dict[str, Any] = {"edge": list(self.names), "writer": list(self.writers)}
        return pd.DataFrame({**columns, "reader": list(self.readers), "site": sites, "layer": layers})

    def __repr__(self) -> str:
        writers, readers = len(set(self.writers)), len(set(self.readers))
        return f"{len(self):,} edges from {writers} writers to {readers} readers"

    def __str__(self) -> str:
        names = list(self.names)
        shown = names if len(names) <= SHOWN else [*names[: SHOWN // 2], "...", *names[-SHOWN // 2 :]]
        return "\n".join([repr(self), *(f"  {name}" for name in shown)])


def as_positions(pos: object) -> tuple[int, ...]:
    """Positions as plain numbers. Raises EdgeError for what are none."""
    try:
        found = as_numbers(pos)
    except TypeError:
        raise EdgeError(
            f"pos is a number or a list of numbers, as in range(5), and {pos!r} is neither."
        ) from None
    numbers = (found,) if isinstance(found, int) else found
    if not numbers or len(set(numbers)) < len(numbers):
        raise EdgeError(f"pos has to name one position or several different ones, not {pos!r}.")
    return numbers


def part_of(reader: Reader) -> Mapping[str, Index]:
    """The part of a reader's site that is the reader: its head, or all."""
    is_all = reader.axis is None or reader.head is None
    return MappingProxyType({} if is_all else {reader.axis: reader.head})  # type: ignore[dict-item]


def edge_place(
    writer: Writer, reader: Reader, part: Mapping[str, Index], end: str = "", live: str = ""
) -> EdgePlace:
    """The place of an edge; `end` is what its name has behind those of writer and reader."""
    name = f"{writer.name}->{reader.name}{end}"
    return EdgePlace(*reader.site, part, name, writer.number, reader.entry, live)


def edges_of(components: Components, pos: Sequence[int] | None = None) -> Edges:
    """All edges between components, reader by reader; with `pos`, one for each of these positions."""
    places: list[EdgePlace] = []
    writers: list[str] = []
    readers: list[str] = []
    for reader in components.readers:
        part = part_of(reader)
        parts: list[tuple[str, Mapping[str, Index]]] = [("", part)]
        if pos is not None:
            parts = [(f"@{one}", MappingProxyType({**part, "pos": one})) for one in pos]
        for writer in components.writers[: reader.writers]:
            for end, own in parts:
                places.append(edge_place(writer, reader, own, end))
                writers.append(writer.name)
                readers.append(reader.name)
    return Edges(tuple(places), tuple(writers), tuple(readers))


FREEZE = {"all": "", "attention": "mlps", "none": "all"}
"""The components that are live between sender and receiver, by what is frozen."""

Senders = str | Iterable[str]
Receivers = str | Iterable[str | Iterable[str]]


def paths_of(
    components: Components, senders: Senders, receivers: Receivers, freeze: str
) -> list[tuple[EdgePlace, ...]]:
    """The places of each pair of a sender and a receiver behind it; receivers may be sets, patched together.

    Names may hold `*`. A receiver without a slot, `a9.h6`, stands for all slots that the head has. Raises
    EdgeError where nothing has such a name, or no sender stands before a receiver.
    """
    if freeze not in FREEZE:
        raise EdgeError(
            f"freeze={freeze!r} is none of 'all' (the direct path alone), 'attention' (MLPs between are "
            "live) and 'none' (all between are live)."
        )
    live = FREEZE[freeze]
    known = {one.name: one for one in components.writers}
    names = (name for one in _several(senders, "senders") for name in _matching(one, known, "sender"))
    writers = [known[name] for name in dict.fromkeys(names)]
    found: list[tuple[EdgePlace, ...]] = []
    for group in _receivers(components, receivers):
        for writer in writers:
            behind = [reader for reader in group if writer.number < reader.writers]
            if behind:
                via = f" via {live}" if live else ""
                path = (edge_place(writer, reader, part_of(reader), via, live) for reader in behind)
                found.append(tuple(path))
    if not found:
        raise EdgeError("no path: none of the receivers reads what one of the senders has written.")
    return found


def _receivers(components: Components, given: Receivers) -> list[tuple[Reader, ...]]:
    known = {one.name: one for one in components.readers}
    found: list[tuple[Reader, ...]] = []
    for one in _several(given, "receivers"):
        if isinstance(one, str):
            found += [(known[name],) for name in _matching(one, known, "receiver")]
            continue
        members = dict.fromkeys(
            name for each in _several(one, "receivers") for name in _matching(each, known, "receiver")
        )
        if not members:
            raise EdgeError("a set of no receivers: a world patches at least one.")
        found.append(tuple(known[name] for name in members))
    return list(dict.fromkeys(found))


def _several(given: Any, what: str) -> list[Any]:
    """Return what was given for senders or receivers as a list."""
    if not has_items(given) or isinstance(given, range):  # which may be endless
        raise EdgeError(f"{what} are a name such as 'a0.h1', which may hold `*`, or a list, not {given!r}.")
    return [given] if isinstance(given, str) else list(given)


def _matching(given: object, known: Iterable[str], what: str) -> list[str]:
    """The names that are meant by one that may hold `*`, or may lack its slot."""
    names = list(known)
    if not isinstance(given, str):
        raise EdgeError(f"a {what} is named by a text such as {names[-1]!r}, not by {given!r}.")
    given = component_name(given)
    found = [name for name in names if fnmatch.fnmatchcase(name, given)]
    found = found or [name for name in names if fnmatch.fnmatchcase(name, f"{given}<*>")]
    if not found:
        near = nearest(given, names, cutoff=0.4)
        raise EdgeError(f"no {what} {given!r} among the {len(names)} of this model.{near}")
    return found
