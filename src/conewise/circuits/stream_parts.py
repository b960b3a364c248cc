"""The parts of the residual stream: what each component wrote into it, at each place where it is read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conewise.anatomy.axes import View
from conewise.anatomy.components import Components, HeadWriters
from conewise.anatomy.sites import HeadResult, SiteTable
from conewise.anatomy.wiring import AffinePath, Step, affine_path
from conewise.circuits.walks import StackedValues
from conewise.errors import NAN_OF_PADDING, EdgeError
from conewise.program.records import Record
from conewise.program.tensors import computing
from conewise.program.walk import Read, Rule, WalkStep, plan_walk
from conewise.runs.values import Values, reader
from conewise.sweeps.planning.layout import compile_stacked_rule

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 3e-2}
"""The error allowed between parts and the stream, relative to its largest value."""

_KINDS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


class StreamViews:
    """The views of the stream's values: those of sites, and of values that have the shape of a site's."""

    def __init__(self, sites: SiteTable, components: Components) -> None:
        shapes, by_shape = components.program.shapes, {}
        self._views: dict[str, View] = {}
        for layer in components.layers:
            for kind in _KINDS:
                if kind in layer.nodes:
                    site = sites.find(kind, layer.number, layer.stack)
                    if site.view is None or set(site.view.axes) - {"batch"} != {"pos", "d_model"}:
                        raise _unknown(site.node, f"layer {layer.number}")
                    self._views[site.node] = by_shape[shapes.get(site.node)] = site.view
        for entry in components.entries:
            if entry not in self._views:
                if shapes.get(entry) not in by_shape:
                    raise _unknown(entry, components.layer_of(entry))
                self._views[entry] = by_shape[shapes.get(entry)]

    def needs_sizes(self, node: str) -> bool:
        """True if the sizes of a run are needed to show a value."""
        return has_sizes(self._views[node])

    def shown(self, node: str, stack: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """[n, batch, pos, d_model] of n values of a node; the batch is 1 where the model has none."""
        view = self._views[node]
        shown = view.present(stack, sizes, leading=1)
        return shown if "batch" in view.axes else shown.unsqueeze(1)

    def as_node(self, node: str, stream: Tensor) -> Tensor:
        """A stream [batch, pos, d_model] in the form of the node's own value."""
        view = self._views[node]
        lengths = dict(zip(("batch", "pos", "d_model"), stream.shape, strict=True))
        if "batch" not in view.axes:
            stream = stream.squeeze(0)
        order = [view.axes.index(axis) for packed in view.packing for axis in packed]
        shape = [math.prod(lengths[axis] for axis in packed) for packed in view.packing]
        return stream.permute(order).reshape(shape)


def has_sizes(view: View) -> bool:
    """True if some length of the view depends on the sizes of a run."""
    return any(not isinstance(length, int) for length in view.lengths.values())


def _unknown(node: str, where: str) -> EdgeError:
    return EdgeError(
        f"{where}: where batch and positions lie in the residual stream at {node!r} is not known, so its "
        "parts cannot be shown by position."
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Parts of some writers in a row: `stack` is [writer, *the value's shape]."""

    stack: Tensor
    numbers: range

    def widened(self, numbers: range) -> Tensor:
        """Return a stack of more writers, of which the others have no part."""
        if self.numbers == numbers:
            return self.stack
        wide = self.stack.new_zeros((len(numbers), *self.stack.shape[1:]))
        wide[self.numbers.start - numbers.start : self.numbers.stop - numbers.start] = self.stack
        return wide


class AffineWalk:
    """The walk along an affine path: parts go through its linear part, what belongs to no part through all.

    It ends with the values of `keep`. `starts` are values that it is given and may drop.
    """

    def __init__(self, steps: Iterable[Step], keep: Collection[str], starts: Collection[str] = ()) -> None:
        self._steps = {step.record.name: step for step in steps}
        self._linear = {name: compile_stacked_rule(step.linear) for name, step in self._steps.items()}
        self._affine = {name: compile_stacked_rule(step.record) for name, step in self._steps.items()}
        walked = ((name, step.carried, self._affine[name]) for name, step in self._steps.items())
        self._walk = plan_walk(walked, keep, starts)

    def parts(
        self, values: dict[str, Rows], reading: Read, begin: Callable[[str], Rows] | None = None
    ) -> dict[str, Rows]:
        """Add the parts of each value to those that are given; `begin` has those of other names."""

        def compute(at: WalkStep, carried: list[Rows], _: dict[str, Rows]) -> Rows:
            ends = [(one.numbers.start, one.numbers.stop) for one in carried]
            numbers = range(min(start for start, _ in ends), max(stop for _, stop in ends))
            stacks = {name: one.widened(numbers) for name, one in zip(at.inputs, carried, strict=True)}
            return Rows(stepped(self._steps[at.node], self._linear[at.node], stacks, reading), numbers)

        return self._walk.run(values, begin or values.__getitem__, compute)

    def constants(
        self, values: dict[str, Tensor], reading: Read, begin: Callable[[str], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Add what of each value belongs to no part; `begin` has it of other names."""

        def compute(at: WalkStep, carried: list[Tensor], _: dict[str, Tensor]) -> Tensor:
            record = self._steps[at.node].record
            if self._steps[at.node].is_norm:
                return normed(record, carried[0], reading, with_bias=True)
            known = dict(zip(at.inputs, carried, strict=True))
            found: Tensor = self._affine[at.node](
                *[known[name] if name in known else reading(name) for name in record.inputs]
            )
            return found

        return self._walk.run(values, begin or values.__getitem__, compute)


def stepped(step: Step, rule: Rule, stacks: Mapping[str, Tensor], reading: Read) -> Tensor:
    """Return the linear part of a step for a stack of values, whose first dimension numbers them."""
    if step.is_norm:
        return normed(step.linear, stacks[step.carried[0]], reading, with_bias=False)
    inputs = [stacks[name] if name in stacks else reading(name) for name in step.linear.inputs]
    dims = tuple(0 if name in stacks else None for name in step.linear.inputs)
    for at, name in enumerate(step.linear.inputs):
        if name in step.added and name not in stacks:
            inputs[at] = torch.zeros_like(inputs[at])
    found: Tensor = torch.vmap(rule, in_dims=dims)(*inputs)
    return found


def normed(record: Record, value: Tensor, reading: Read, *, with_bias: bool) -> Tensor:
    """A fused norm of `value`, with the scale that the norm has in the run; leading dimensions are kept."""
    bias = () if record.op == "rms_norm" else ("bias",)
    names = ("input", "normalized_shape", "weight", *bias, "eps")
    given = dict(zip(names, record.args, strict=False)) | dict(record.kwargs)
    own = reading(given["input"].name)
    dims = tuple(range(-len(given["normalized_shape"]), 0))
    wide = torch.promote_types(own.dtype, torch.float32)
    eps, numbers = given.get("eps"), own.to(wide)
    if record.op == "layer_norm":
        eps = 1e-5 if eps is None else eps
        spread = numbers.var(dims, correction=0, keepdim=True)
        value = value.to(wide) - value.to(wide).mean(dims, keepdim=True)
    else:
        eps = torch.finfo(own.dtype).eps if eps is None else eps
        spread = numbers.square().mean(dims, keepdim=True)
        value = value.to(wide)
    value = value * torch.rsqrt(spread + eps)
    if given.get("weight") is not None:
        value = value * reading(given["weight"].name)
    if with_bias and given.get("bias") is not None:
        value = value + reading(given["bias"].name)
    return value.to(own.dtype)


def bent(components: Components, record: Record, what: str) -> EdgeError:
    """The error that says which record is not affine, and what passes through it."""
    layers = [layer for layer in components.layers if record.name in layer.members]
    reasons = [layer.missing["mlp_out"] for layer in layers if "mlp_out" in layer.missing]
    why = f" No MLP was found there: {reasons[0]}." if reasons else ""
    return EdgeError(
        f"{what} passes through {record.name!r} ({record.op}, {components.layer_of(record.name)}), which is "
        "neither a sum, a projection nor a norm: what one component wrote cannot be separated from what "
        f"others did behind it.{why} Edges are not defined for this model; its sites can be patched."
    )


class HeadShares:
    """The shares that the heads of one layer have in the term that their attention adds to the stream."""

    def __init__(
        self, sites: SiteTable, components: Components, heads: HeadWriters, values: StackedValues
    ) -> None:
        self.heads = heads
        self._values = values
        path = affine_path(components.wiring, [heads.node], heads.term)
        if path.bent is not None:
            what = f"what the heads of layer {heads.layer.number} add to the stream"
            raise bent(components, path.bent, what)
        self._result, steps = self._plain_projection(sites, path.steps)
        self.is_plain = self._result is not None and all(step.keeps_numbers for step in steps)
        self._whole = AffineWalk(path.steps, [heads.term])
        self._behind = AffineWalk(steps, [heads.term])

    def with_values(self, values: StackedValues) -> HeadShares:
        """The same with values of its own: what is read for a stack of worlds is not kept with the model."""
        found = copy.copy(self)
        found._values = values
        return found

    def _plain_projection(
        self, sites: SiteTable, steps: Sequence[Step]
    ) -> tuple[HeadResult | None, Sequence[Step]]:
        """Return the output projection where it reads z as it is, and the steps behind it."""
        layer = self.heads.layer
        projection, site = layer.attention.projection, ("result", layer.stack, layer.number)
        if projection is None or site in sites.missing or self.heads.view.axes[0] != "batch":
            return None, steps
        for at, step in enumerate(steps):
            if step.record == projection:
                return sites.find("result", layer.number, layer.stack).result, steps[at + 1 :]
            if not step.keeps_numbers:
                break
        return None, steps

    def projected(self, read: Read, out: Tensor | None = None) -> Tensor:
        """The shares behind the output projection, [head, batch, pos, d_model]; into `out` if given."""
        result = self._result
        assert result is not None
        view, weight = self.heads.view, read(result.weight)
        sizes = self._values.like(read, self.heads.node)[0] if has_sizes(view) else ()
        z = view.present(read(self.heads.node), sizes)
        by_head = result.by_head(weight, z.shape[-2:])
        batch, pos, heads, width = z.shape
        rows = z.to(weight.dtype).permute(2, 0, 1, 3).reshape(heads, batch * pos, width)
        if out is None or out.dtype != weight.dtype or not out.is_contiguous():
            made = torch.bmm(rows, by_head).view(heads, batch, pos, -1)
            return made if out is None else out.copy_(made)
        torch.bmm(rows, by_head, out=out.view(heads, batch * pos, -1))
        return out

    def at_term(self, read: Read) -> Tensor:
        """Return the shares as the term is laid out, [head, *its shape]."""
        node, layout = self.heads.node, self._values.layout(read)
        sizes, reading = self._values.like(read, node)
        if self._result is None:
            begin, stack = node, self._apart(read(node), sizes)
        else:
            begin, shares = self._result.projection.name, self.projected(read)
            shares = shares.transpose(1, 2) if self._result.is_pos_first else shares
            shape, worlds = list(layout.shape(begin) or ()), self._values.worlds_in(read, node, read(node))
            if (dim := layout.batch_dim.get(begin)) is not None:
                shape[dim] *= worlds
            stack = shares.reshape(len(self.heads.rows), *shape)
        return self._behind.parts({begin: Rows(stack, self.heads.rows)}, reading)[self.heads.term].stack

    def constant(self, read: Read) -> Tensor:
        """Return what the term has without any head: biases."""
        none = torch.zeros_like(read(self.heads.node))
        _, reading = self._values.like(read, self.heads.node)
        return self._whole.constants({self.heads.node: none}, reading)[self.heads.term]

    def _apart(self, z: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """[head, *z's shape]: z with one head each, and zeros for the others."""
        view, heads = self.heads.view, len(self.heads.rows)
        stack = z.new_zeros((heads, *z.shape))
        own, target = view.present(z, sizes), view.present(stack, sizes, leading=1)
        dim = view.axes.index("head")
        torch.diagonal(target, dim1=0, dim2=dim + 1).copy_(own.movedim(dim, -1))
        return stack


class StreamParts:
    """The parts that the writers of a model have in the values of its stream.

    The part of a head is its share of the output projection; that of an MLP, or of the stream as it enters,
    is the term itself. Both are carried through what lies on the way, with the run's own scale where that is
    a norm. What belongs to no writer, biases and the like, is the constant part. Parts and constant add up to
    the stream: `check` compares them. `is_carried_unchanged`: parts are the same wherever the stream is read,
    as in every model that does not norm its sums.
    """

    def __init__(self, sites: SiteTable, components: Components) -> None:
        self.components = components
        self._wiring = components.wiring
        self.values = StackedValues(components.program)
        _expect_one_device(components)
        self.views = StreamViews(sites, components)
        self.heads = [HeadShares(sites, components, heads, self.values) for heads in components.heads]
        """The shares of the heads of each layer."""
        self._terms = components.terms
        self._of_term = {one.heads.term: one for one in self.heads}
        paths = {entry: self._path(entry) for entry in components.entries}
        self.is_carried_unchanged = all(path.is_unchanged for path in paths.values())
        self._to_entries = dict(_in_a_row(paths))
        self._to_others: dict[str, tuple[AffineWalk, bool]] = {}

    def _path(self, end: str) -> AffinePath:
        path = affine_path(self._wiring, self._terms, end)
        if path.bent is not None:
            raise bent(self.components, path.bent, f"the stream at {end!r}")
        return path

    def at(self, read: Read, node: str, *, whole: bool = False) -> tuple[Tensor, Tensor]:
        """Parts [row, batch, pos, d_model] and constant [batch, pos, d_model] of any value of the stream.

        Rows are the writers before `node`, or with `whole` the terms that are added to the stream: all that
        the heads of a layer add is one row then, biases included. See `Components.terms_before`.
        """
        if node not in self._to_others:
            path = self._path(node)
            self._to_others[node] = AffineWalk(path.steps, [node]), path.is_unchanged
        walk, is_unchanged = self._to_others[node]
        count = self.components.prefix(node)
        with computing():
            ((_, constant),) = self._constants(read, {node: walk}, whole=whole)
            if is_unchanged and not whole:
                return self._unchanged(read, count), constant
            rows = {term: range(at, at + 1) for at, term in enumerate(self.components.terms_before(count))}
            ((_, parts),) = self._carried(read, {node: walk}, rows if whole else self._terms, whole=whole)
            return parts, constant

    def parts(self, read: Read, entry: str | None = None) -> Tensor:
        """[writer, batch, pos, d_model]: what the writers before `entry` have in the stream there.

        `read` gives the values of a run, or stacks of worlds along the batch. Without `entry`, the parts of
        all writers, where these do not depend on it; EdgeError where they do.
        """
        if entry is None and not self.is_carried_unchanged:
            raise EdgeError(
                "this model norms its sums, so what a component has in the stream is another value wherever "
                "the stream is read. Say where with `entry`, a value of the stream: see `components.entries`."
            )
        with computing():
            if self.is_carried_unchanged:
                own = None if entry is None else self.components.entries[entry][0].writers
                return self._unchanged(read, len(self.components.writers) if own is None else own)
            return next(
                parts for at, parts in self._carried(read, self._to_entries, self._terms) if at == entry
            )

    def by_entry(self, read: Read) -> Iterator[tuple[str, Tensor]]:
        """The parts at every value of the stream that is read, in order."""
        # Nothing is yielded within `computing()`: whoever goes through it would have no gradients, and two
        # that are gone through in turns would leave torch without them.
        if self.is_carried_unchanged:
            with computing():
                whole = self._unchanged(read, len(self.components.writers))
            for entry, readers in self.components.entries.items():
                yield entry, whole[: readers[0].writers]
            return
        carried = self._carried(read, self._to_entries, self._terms)
        while True:
            with computing():
                found = next(carried, None)
            if found is None:
                return
            yield found

    def stream(self, read: Read, entry: str) -> Tensor:
        """[batch, pos, d_model]: the stream itself, as a run has it."""
        return self._shown(read, entry, read(entry)[None])[0]

    def shown(self, read: Read, entry: str, value: Tensor) -> Tensor:
        """[batch, pos, d_model] of a value that is laid out as the stream's at `entry` is."""
        return self._shown(read, entry, value[None])[0]

    def as_node(self, entry: str, stack: Tensor) -> Tensor:
        """Streams [n, batch, pos, d_model], each in the form of the value at `entry`."""
        found: Tensor = torch.vmap(lambda stream: self.views.as_node(entry, stream))(stack)
        return found

    def constant(self, read: Read, entry: str) -> Tensor:
        """[batch, pos, d_model]: what belongs to no writer in the stream at `entry`."""
        with computing():
            return next(constant for at, constant in self.constants(read) if at == entry)

    def check(self, run: Values | Read, tolerance: float | None = None) -> float:
        """Compare parts and constant with the stream wherever it is read; the largest relative difference.

        Raises EdgeError where they differ by more than `tolerance` times the stream's largest value: 1e-4 in
        float32, 1e-9 in float64, 3e-2 in half precision.
        """
        read, worst = (reader(run) if isinstance(run, Values) else run), 0.0
        constants, added, done = self.constants(read), torch.zeros((), dtype=torch.float64), 0
        for entry, parts in self.by_entry(read):
            with computing():
                _, constant = next(constants)
                stream = self.stream(read, entry).double()
                fresh = parts[done:].sum(0, dtype=torch.float64)
                if self.is_carried_unchanged:  # those before are still the same
                    fresh, done = added.to(fresh) + fresh, len(parts)
                    added = fresh
                total = fresh + constant
            largest = float(stream.abs().max()) or 1.0
            apart = float((total - stream).abs().max()) / largest
            allowed = self.tolerance(entry) if tolerance is None else tolerance
            who = self.components.entries[entry][0]
            if math.isnan(apart):
                raise EdgeError(
                    f"the stream that {who.name} reads ({entry!r}) has NaN in it, or what components wrote "
                    f"into it, so that it cannot be taken apart. {NAN_OF_PADDING}"
                )
            if not apart <= allowed:
                raise EdgeError(
                    f"the parts that components wrote do not add up to the stream that {who.name} reads "
                    f"({entry!r}, {self.components.layer_of(entry)}): they differ by {apart:.1e} of its "
                    f"largest value, and {allowed:.0e} is allowed. The last to write into it is "
                    f"{self.components.writers[who.writers - 1].name}."
                )
            worst = max(worst, apart)
        return worst

    def tolerance(self, entry: str) -> float:
        """The error allowed between parts and a value of the stream: that of the coarsest dtype before it.

        A norm may be computed in float32 where the stream is float64.
        """
        wiring = self._wiring
        names = set(self.components.carrying(entry)) | {entry}
        count = self.components.prefix(entry)
        for one in self.components.heads:
            if one.rows.start < count:
                names |= wiring.above(one.term, frozenset(wiring.records), frozenset({one.node}))
        dtypes = {self.components.program.dtypes.get(name) for name in names}
        return max(tolerance for dtype, tolerance in TOLERANCES.items() if dtype in dtypes)

    def constants(self, read: Read) -> Iterator[tuple[str, Tensor]]:
        """The constant part at every entry, in order: no writer has any part, and biases are as they are."""
        return self._constants(read, self._to_entries)

    def _constants(
        self, read: Read, walks: Mapping[str, AffineWalk], *, whole: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The constant part at the end of each walk, in order."""
        _, reading = self.values.like(read, self.components.writers[0].node)
        known = dict[str, Tensor]()

        def begin(term: str) -> Tensor:
            shares = None if whole else self._of_term.get(term)
            return torch.zeros_like(read(term)) if shares is None else shares.constant(read)

        for end, walk in walks.items():
            walk.constants(known, reading, begin)
            value = known[end] if end in known else begin(end)
            yield end, self._shown(read, end, value[None])[0]

    def _carried(
        self, read: Read, walks: Mapping[str, AffineWalk], rows: Mapping[str, range], *, whole: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The parts of each row at the end of each walk, in order."""
        _, reading = self.values.like(read, self.components.writers[0].node)
        known = dict[str, Rows]()

        def begin(term: str) -> Rows:
            shares = None if whole else self._of_term.get(term)
            return Rows(read(term)[None] if shares is None else shares.at_term(read), rows[term])

        for end, walk in walks.items():
            walk.parts(known, reading, begin)
            yield end, self._shown(read, end, (known[end] if end in known else begin(end)).stack)

    # -- parts that stay as they are -----------------------------------------------------------

    def _unchanged(self, read: Read, count: int) -> Tensor:
        """The first so many parts, where all are found in the stream as they are."""
        last = list(self.components.entries)[-1]
        dtype = self._wiring.program.dtypes.get(last)
        node = self.components.writers[0].node
        first = self._shown(read, node, read(node)[None])
        out = first.new_empty((count, *first.shape[1:]), dtype=dtype)
        out[:1] = first
        for term, numbers in self._terms.items():
            if numbers.start and numbers.start < count:
                shares = self._of_term.get(term)
                own = out[numbers.start : numbers.stop]
                if shares is None:
                    own[:] = self._shown(read, term, read(term)[None])
                elif shares.is_plain:
                    shares.projected(read, own)
                else:
                    own[:] = self._shown(read, term, shares.at_term(read))
        return out

    def _shown(self, read: Read, node: str, stack: Tensor) -> Tensor:
        """[writer, batch, pos, d_model] of a stack of values of a node."""
        sizes: tuple[int, ...] = ()
        if self.views.needs_sizes(node):
            sizes = self.values.layout(read).sizes(self.values.worlds_in(read, node, stack[0]))
        return self.views.shown(node, stack, sizes)


def _expect_one_device(components: Components) -> None:
    """Raise EdgeError where the stream goes from one device to another: its parts are stacked on one."""
    records = components.program.record_of
    devices = dict.fromkeys(records[term].device for term in components.terms if term in records)
    if len(devices) > 1:
        raise EdgeError(
            f"the residual stream lies on several devices ({', '.join(map(str, devices))}), and its "
            "parts are added up on one. Load the model on one device."
        )


def _in_a_row(paths: Mapping[str, AffinePath]) -> Iterator[tuple[str, AffineWalk]]:
    """The walks to the ends of paths, each of which begins with what those before it have computed."""
    ends, known = list(paths), set[str]()
    fresh: list[list[Step]] = []
    for path in paths.values():
        fresh.append([step for step in path.steps if step.record.name not in known])
        known |= {step.record.name for step in path.steps}
    held = set[str]()
    for at, end in enumerate(ends):
        later = {name for steps in fresh[at + 1 :] for step in steps for name in step.carried}
        own = {step.record.name for step in fresh[at]}
        yield end, AffineWalk(fresh[at], later.union(ends[at:]), held)
        held = (held | own) & later.union(ends)
