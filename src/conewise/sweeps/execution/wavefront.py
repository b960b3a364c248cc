"""The wavefront: follows a pass of a plan over tensors; each node is computed once, for a stack of worlds.

A node's stack holds just the worlds in which it was changed. What it reads and is not changed there comes
from the baseline, repeated without a copy where the batch is one row. What is to be done was decided when the
pass was built; here it is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch

from conewise.errors import ConewiseError
from conewise.jobs.digests import device_and_dtype
from conewise.program.records import ATTENTION, SIZES, Program, Record
from conewise.program.tensors import SPLIT, Tensor, computing, multiplying, recording, without_cudnn_attention
from conewise.program.walk import Rule, compile_rule
from conewise.runs.captured import Captured
from conewise.sweeps.execution.fills import PassFills, Values, nan_flags
from conewise.sweeps.planning.costs import SplitWeights
from conewise.sweeps.planning.fusing import Fusion, product_then_bias
from conewise.sweeps.planning.layout import (
    Constants,
    Layout,
    compile_stacked_rule,
    repeated,
)
from conewise.sweeps.planning.passes import Alignment, PassProgram, Put, Read, Step
from conewise.sweeps.planning.planner import ModelFacts, facts_of
from conewise.sweeps.planning.regions import causal_rule, repeated_rule, unmasked_rule
from conewise.sweeps.planning.schedule import Ranges, count_of

ReadValue = Callable[[str], Any]
"""The baseline's value of a node, by its name."""
NOTHING: Mapping[str, Tensor] = MappingProxyType({})


READY = 64
"""The number of passes that are kept ready: plans for small budgets have hundreds of shapes."""


class Wavefront:
    """Runs passes over baselines of one shape.

    `plain` are rules of records that know no shape, kept; `split_weights` are the parts of weights, where a
    plan has products in parts.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        fusions: Sequence[Fusion] = (),
        plain: dict[str, Rule] | None = None,
        split_weights: SplitWeights | None = None,
    ) -> None:
        self.layout = layout
        self._plain = {} if plain is None else plain
        self._columns: Mapping[str, Tensor] = NOTHING
        self._fusions = {(fusion.node, fusion.inside): fusion for fusion in fusions}
        self._records = program.record_of
        self._rules: dict[tuple[str, int | None, str, tuple[str, ...]], Rule] = {}
        self._constants = Constants(layout, _unread)
        self._split_weights = split_weights
        self._read: ReadValue = _unread
        self._ready: dict[int, ReadyPass] = {}

    def run(
        self,
        program: PassProgram,
        read: ReadValue,
        fills: PassFills | None = None,
        values: Values | None = None,
        room_for: Callable[[int], None] = lambda _: None,
        *,
        given: Mapping[str, Tensor] = NOTHING,
        columns: Mapping[str, Tensor] = NOTHING,
        before: Callable[[str], None] | None = None,
        records: bool = False,
    ) -> dict[str, Tensor]:
        """The values of the targets in all worlds of the pass, stacked; with `records`, for a way back.

        `before` is told of each node before its step, `room_for` before each step that takes memory how much
        that is. `given` are stacks that the pass begins with. `columns` are nodes that multiply with a
        weight, and the columns of theirs that anything reads.
        """
        self._read, self._columns = read, columns
        self._constants.rebase(read)
        try:
            with recording() if records else computing():
                ready = self._ready.get(id(program))
                if ready is None or ready.program is not program or ready.narrowed != tuple(columns):
                    ready = self._ready[id(program)] = self._made_ready(program)
                    while len(self._ready) > READY:
                        del self._ready[next(iter(self._ready))]
                steps = ready.steps if before is None else ready.told(before)
                held = ready.held(read, given)
                _follow(steps, held, fills, values, room_for)
                room_for(program.reading)
                return {node: operand(held) for node, operand in ready.targets}
        finally:
            # A dataset is streamed: no baseline is kept for the next.
            self._read, self._columns = _unread, NOTHING
            self._constants.rebase(_unread)

    def piecemeal(
        self, program: PassProgram, read: ReadValue, given: Mapping[str, Tensor]
    ) -> tuple[Callable[[int], None], Mapping[str, Callable[[], Tensor]]]:
        """A pass that is run a part at a time, by nothing else meanwhile: it puts nothing in.

        The first computes the steps before that number. The second reads the targets that were computed.
        """
        self._read = read
        self._constants.rebase(read)
        ready = self._made_ready(program)
        held, waiting = ready.held(read, given), iter(ready.steps)
        done = 0

        def up_to(stop: int) -> None:
            nonlocal done
            own = list(itertools.islice(waiting, max(0, stop - done)))
            done += len(own)
            _follow(own, held, None, None, lambda _: None)

        return up_to, {node: partial(operand, held) for node, operand in ready.targets}

    # -- what is found out once ------------------------------------------------------------------

    def _made_ready(self, program: PassProgram) -> ReadyPass:
        """All of a pass that is the same in each run."""
        at = ReadyPass(program, tuple(self._columns))
        risen = zip(program.steps, program.rises, strict=True)
        at.steps = tuple(self._ready_step(step, rise, at) for step, rise in risen)
        at.targets = tuple((one.node, self._operand(one, program.worlds, at)) for one in program.targets)
        return at

    def _ready_step(self, step: Step, rise: int, at: ReadyPass) -> ReadyStep:
        place, drop = at.of_stack(step.node), tuple(map(at.of_stack, step.drop))
        put = None if step.put is None else self._ready_put(step.put)
        if not step.worlds:
            return rise, place, None, 0, None, put, drop
        rule = self._rule(step)
        if not step.align.is_nothing:
            plain = rule

            def rule(*operands: Any) -> Any:
                return self._aligned(step.node, plain(*operands), step.align, step.rows)

        return rise, place, rule, *self._operands(step, at), put, drop

    def _operands(self, step: Step, at: ReadyPass) -> tuple[int, Operands | None]:
        """Return what reads all inputs of a step; or the place of its one input, and None."""
        count, is_narrow = step.count, step.node in self._columns
        places = [self._place_of(one, step, at) for one in step.reads]
        known = [place for place in places if place is not None]
        if len(known) == len(places) and not is_narrow:
            return (known[0], None) if len(known) == 1 else (0, itemgetter(*known) if known else _nothing)
        found = [
            self._operand(one, count, at) if place is None else itemgetter(place)
            for one, place in zip(step.reads, places, strict=True)
        ]
        if is_narrow:
            found = [
                operand if one.node in self.layout.varying else self._narrowed(step.node, operand)
                for one, operand in zip(step.reads, found, strict=True)
            ]
        return 0, each_of(found)

    def _place_of(self, one: Read, step: Step, at: ReadyPass) -> int | None:
        """Return the place of what a step reads; None where it has to be brought to the step's worlds."""
        if one.node == SIZES:
            return at.of_sizes(self.layout.sizes(step.count, step.rows))
        if one.stacked:
            is_alike = one.align.is_nothing and one.rows == one.have
            return at.of_stack(one.node) if is_alike else None
        is_weight = one.node not in self.layout.varying and one.node not in self._records
        return at.of_weight(one.node) if is_weight and self.layout.pos_dim.get(one.node) is None else None

    def _rule(self, step: Step) -> Rule:
        key = step.node, step.rows, step.kernel, step.inside
        rule = self._rules.get(key)
        if rule is None:
            if step.inside:
                rule = self._fusions[step.node, frozenset(step.inside)].rule
            else:
                rule = self._plain_rule(self._records[step.node], step.rows, step.kernel)
            self._rules[key] = rule
        return rule

    def _plain_rule(self, record: Record, rows: int | None, kernel: str) -> Rule:
        if kernel == SPLIT and self._split_weights is not None:
            rule = self._split_weights.rule(record)
            if rule is not None:
                return rule
        if record.op != ATTENTION:
            if record.name not in self._plain:
                self._plain[record.name] = product_then_bias(record) or compile_stacked_rule(record)
            return self._plain[record.name]
        if record.kwargs.get("enable_gqa"):
            return repeated_rule(record, lambda plain: self._attention_rule(plain, rows, kernel))
        return self._attention_rule(record, rows, kernel)

    def _attention_rule(self, record: Record, rows: int | None, kernel: str) -> Rule:
        if kernel == "causal":
            return unmasked_rule(record)
        if kernel == "last rows":
            assert rows is not None
            key = record.inputs[1]
            made = self._records.get(key)
            # A value may be still to be computed: where it will lie is known.
            device = made.device if made is not None and made.device is not None else self._read(key).device
            return causal_rule(record, rows, self.layout.length(key), device)
        return compile_rule(record)

    # -- what a step reads -----------------------------------------------------------------------

    def _operand(self, one: Read, count: int, at: ReadyPass) -> Operand:
        """Return what a step of `count` worlds gets for one of its inputs."""
        if not one.stacked:
            return lambda _: self._baseline(one.node, count, one.rows)
        place = at.of_stack(one.node)
        if one.align.is_nothing and one.rows == one.have:
            return itemgetter(place)
        joined = self._joined(one, count, place)
        return joined or (lambda held: self._brought(one, held[place]))

    def _joined(self, one: Read, count: int, place: int) -> Operand | None:
        """A stack and a part of the baseline, one behind the other, where that is all that a reader wants."""
        node, layout, align = one.node, self.layout, one.align
        pos, batch = layout.pos_dim.get(node), layout.batch_dim[node]
        if batch is None or node not in layout.varying or node in self._columns:
            return None
        length, cat = layout.length(node), torch.cat
        if one.rows == one.have and align.pick is None and align.order is None:
            start = 0 if one.rows is None else length - one.rows
            behind = layout.as_view(node, align.add, start, length)
            if behind is None:
                return None
            cut, sizes = behind
            return lambda held: cat((held[place], self._read(node).narrow(*cut).expand(sizes)), batch)
        if one.rows is None and one.have is not None and align.is_nothing and pos is not None:
            before = layout.as_view(node, count, 0, length - one.have)
            if before is None or one.have == length:
                return None
            cut, sizes = before
            return lambda held: cat((self._read(node).narrow(*cut).expand(sizes), held[place]), pos)
        return None

    def _brought(self, one: Read, value: Any) -> Any:
        """A stack brought to what a reader wants of it."""
        if not isinstance(value, torch.Tensor):
            return value
        have = one.have
        if one.rows is not None and one.rows != have:
            value = self.layout.tail(one.node, value, one.rows, have)
            have = one.rows
        if not one.align.is_nothing:
            value = self._aligned(one.node, value, one.align, have)
        if one.rows is None and have is not None:
            value = self.layout.extended(one.node, self._base_value(one.node, None), value, have)
        return value

    def _aligned(self, name: str, value: Tensor, align: Alignment, rows: int | None) -> Tensor:
        """A stack brought to the worlds of a reader."""
        dim = self.layout.batch_dim[name]
        assert dim is not None, f"{name} was changed, yet has no batch"
        each = value.shape[dim] // align.worlds
        if align.pick is not None:
            value = picked(value, dim, each, align.pick)
        if align.add:
            value = torch.cat([value, self._baseline(name, align.add, rows)], dim)
        return value if align.order is None else picked(value, dim, each, align.order)

    def _baseline(self, name: str, count: int, rows: int | None) -> Any:
        """The baseline's value for `count` worlds, its last `rows` positions."""
        if name not in self.layout.varying:
            value = self._constants.stacked(name, count)
            if rows is not None and isinstance(value, torch.Tensor):
                value = self.layout.tail(name, value, rows)
            return value
        value = self._base_value(name, rows)
        dim = self.layout.batch_dim.get(name)
        if dim is None or not isinstance(value, torch.Tensor):
            return value
        return repeated(value, dim, count)

    def _narrowed(self, node: str, operand: Operand) -> Operand:
        """The rows of a weight that make the wanted columns."""

        def narrowed(held: Held) -> Any:
            weight = operand(held)
            is_tensor = isinstance(weight, torch.Tensor)
            return weight.index_select(0, self._columns[node]) if is_tensor else weight

        return narrowed

    def _base_value(self, name: str, rows: int | None) -> Any:
        value = self._read(name)
        if name in self._columns:
            value = value.index_select(-1, self._columns[name])
        if rows is not None and isinstance(value, torch.Tensor):
            value = self.layout.tail(name, value, rows)
        return value

    # -- what worlds put in ----------------------------------------------------------------------

    def _ready_put(self, put: Put) -> ReadyPut:
        """Return how a node's stack gets the worlds that patch it: fresh rows, or changed ones.

        Nothing else holds the old stack, so that it goes as soon as there is a new one.
        """
        dim, order, cat = self.layout.batch_dim[put.node], put.order, torch.cat
        assert dim is not None
        if not put.fresh:
            return lambda value, fills, values: self._changed(put, _known(value), fills, values)
        fresh, is_changed = self._ready_fresh(put, dim), bool(put.again)
        worlds = 0 if order is None else count_of(order)

        def with_fresh(value: Tensor | None, fills: PassFills, values: Values) -> Tensor:
            if is_changed:
                value = self._changed(put, _known(value), fills, values)
            rows = fresh(fills, values)
            if value is None:
                return rows
            both = cat((value, rows), dim)
            return both if order is None else picked(both, dim, both.shape[dim] // worlds, order)

        return with_fresh

    def _ready_fresh(self, put: Put, dim: int) -> Callable[[PassFills, Values], Tensor]:
        """Return how rows of worlds are made: the baseline's value, with what they put into it."""
        node, worlds, layout, kept = put.node, put.fresh, self.layout, put.rows
        count, sizes, is_first = count_of(worlds), layout.sizes(1), dim == 0
        length = layout.length(node)
        alike, contiguous = layout.as_view(node, count, 0, length), torch.contiguous_format
        tail = None if kept is None else layout.tail_of(node, kept)

        def fresh(fills: PassFills, values: Values) -> Tensor:
            base = self._read(node)
            if alike is not None:
                rows = base.expand(alike[1]).clone(memory_format=contiguous)
                each = rows.unsqueeze(1) if is_first else by_world(rows, dim, 1)
            else:
                rows = repeated(base, dim, count) if count > 1 else base.clone(memory_format=contiguous)
                each = by_world(rows, dim, base.shape[dim])
            fills.write(node, each, worlds, values, sizes)
            return rows if tail is None else tail(rows)

        return fresh

    def _changed(self, put: Put, value: Tensor, fills: PassFills, values: Values) -> Tensor:
        """A stack with what some of its worlds put into it."""
        node, layout = put.node, self.layout
        dim = layout.batch_dim[node]
        assert dim is not None
        base = self._read(node)
        whole = value if put.rows is None else layout.extended(node, base, value, put.rows)
        if whole is value:  # it may be a view of another node's stack
            whole = value.clone()
        each = by_world(whole, dim, base.shape[dim])
        if len(put.places) == 1 and put.places[0] == (0, each.shape[0]):
            fills.write(node, each, put.again, values, layout.sizes(1))
        elif len(put.places) == 1:
            start, stop = put.places[0]
            fills.write(node, each[start:stop], put.again, values, layout.sizes(1))
        else:
            at = _index_of(put.places, 1, value.device)
            own = each.index_select(0, at)
            fills.write(node, own, put.again, values, layout.sizes(1))
            each.index_copy_(0, at, own)
            del own
        return whole if put.rows is None else layout.tail(node, whole, put.rows)


def _follow(
    steps: Iterable[ReadyStep],
    held: Held,
    fills: PassFills | None,
    values: Values | None,
    room_for: Callable[[int], None],
) -> None:
    for rise, place, rule, only, operands, put, drop in steps:
        if rise:
            room_for(rise)
        if rule is not None:
            held[place] = rule(held[only]) if operands is None else rule(*operands(held))
        if put is not None:
            assert fills is not None
            assert values is not None
            held[place] = put(_taken(held, place), fills, values)
        for dropped in drop:
            held[dropped] = None


def by_world(stack: Tensor, dim: int, each: int) -> Tensor:
    """A stack as [world, ...], where each world has `each` rows along `dim`; it shares memory with it."""
    if dim == 0:
        return stack.view(-1, each, *stack.shape[1:])
    return torch.unflatten(stack, dim, (-1, each)).movedim(dim, 0)


def picked(value: Tensor, dim: int, each: int, places: Ranges) -> Tensor:
    """The worlds at some places of a stack, in that order; `each` has so many rows along `dim`."""
    if len(places) == 1:
        start, stop = places[0]
        return value.narrow(dim, start * each, (stop - start) * each)
    return value.index_select(dim, _index_of(places, each, value.device))


@lru_cache(maxsize=4096)
def _index_of(places: Ranges, each: int, device: torch.device) -> Tensor:
    """Rows of worlds as indices; kept, since making them waits for the device and cannot be captured."""
    rows = [torch.arange(start * each, stop * each) for start, stop in places]
    return torch.cat(rows).to(device)


def _known(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _taken(held: Held, place: int) -> Any:
    """Take what stands at a place; it stands there no more."""
    value, held[place] = held[place], None
    return value


def _unread(name: str) -> Any:
    raise AssertionError(f"{name} is read between two runs")


# ------------------------------------------------------------------------------------------
# A pass made ready: what each of its steps does, found out once; values have places in a list, not names.
#
# A step follows an operation over a whole stack, which leaves nothing of Python in the processor's caches. So
# what is looked at for a step is one short tuple.

Held = list[Any]
"""The values that a run of a pass holds, by their places."""
Operand = Callable[[Held], Any]
"""Something that is read, of what is held."""
Operands = Callable[[Held], Sequence[Any]]
"""The operands of a rule, of what is held."""
ReadyPut = Callable[[torch.Tensor | None, PassFills, Values], torch.Tensor]
"""A node's stack, None where there is none, with what worlds put into it."""
ReadyStep = tuple[int, int, Rule | None, int, Operands | None, ReadyPut | None, tuple[int, ...]]
"""The bytes it takes, its node's place, its rule and what that gets, what is put in, what is dropped.

A rule gets what stands at one place where there are no operands.
"""


class ReadyPass:
    """A pass, ready to run over any baseline. `narrowed` are the nodes of which some columns are computed.

    `stacks` and `weights` are the places of stacks and weights, given out as they are asked for; `beginning`
    is what every run begins with: sizes, and None in all other places.
    """

    def __init__(self, program: PassProgram, narrowed: tuple[str, ...]) -> None:
        self.program, self.narrowed = program, narrowed
        self.steps: tuple[ReadyStep, ...] = ()
        self.targets: tuple[tuple[str, Operand], ...] = ()
        self.stacks: dict[str, int] = {}
        self.weights: dict[str, int] = {}
        self.beginning: Held = []
        self._sizes: dict[tuple[int, ...], int] = {}

    def held(self, read: Callable[[str], Any], given: Mapping[str, Any]) -> Held:
        """Return what a run holds when it begins: sizes, weights, and the stacks that it is given."""
        held = self.beginning.copy()
        for name, place in self.weights.items():
            held[place] = read(name)
        for name, stack in given.items():
            if name in self.stacks:
                held[self.stacks[name]] = stack
        return held

    def told(self, before: Callable[[str], None]) -> Iterator[ReadyStep]:
        """The steps, each after `before` was told of its node."""
        for step, one in zip(self.program.steps, self.steps, strict=True):
            before(step.node)
            yield one

    def of_stack(self, node: str) -> int:
        """The place of a node's stack."""
        return self.stacks.setdefault(node, self._next(node in self.stacks))

    def of_weight(self, name: str) -> int:
        """The place of a weight."""
        return self.weights.setdefault(name, self._next(name in self.weights))

    def of_sizes(self, sizes: tuple[int, ...]) -> int:
        """The place of sizes, which stand there from the beginning."""
        place = self._sizes.setdefault(sizes, self._next(sizes in self._sizes))
        self.beginning[place] = sizes
        return place

    def _next(self, is_known: bool) -> int:
        if not is_known:
            self.beginning.append(None)
        return len(self.beginning) - 1


def each_of(operands: Sequence[Operand]) -> Operands:
    """Return what reads by each of these."""
    if len(operands) == 2:
        first, second = operands
        return lambda held: (first(held), second(held))
    if len(operands) == 3:
        first, second, third = operands
        return lambda held: (first(held), second(held), third(held))
    return lambda held: [operand(held) for operand in operands]


def _nothing(held: Held) -> Sequence[Any]:
    del held
    return ()


# ------------------------------------------------------------------------------------------
# Kernels of the operations of a pass, where torch has several.


@contextmanager
def kernels_of_passes(device: torch.device, precision: str | None) -> Iterator[None]:
    """Products in a precision, attention without cuDNN."""
    with multiplying(precision), without_cudnn_attention(device):
        yield


# Kernels that passes use and a module does not: a CUDA device loads them when the module is captured.
#
# A kernel is loaded at its first use, which takes milliseconds, and may wait for all that the device is at
# work on. In the first sweep of a process that would come to as much as a small sweep takes.

SIZE = 16
"""Stands for a size that varies from run to run."""

_LOADED: set[tuple[Any, ...]] = set()
"""Kernels that this process loaded, by what they are for, with the device, the dtype and the width."""


@torch.no_grad()
def load_kernels(model: Captured) -> None:
    """Let the device of a model load the kernels of its passes; nothing happens on a CPU."""
    device, dtype = device_and_dtype(model.program)
    if device.type != "cuda" or len(model.program.devices) > 1:
        return
    try:
        facts = facts_of(model)
    except ConewiseError:
        return  # a sweep says what cannot be swept
    wanted: dict[tuple[Any, ...], Any] = {("fills", device, dtype): lambda: _fill(device, dtype)}
    for fusion in facts.fusions:
        rule = getattr(fusion.rule, "func", fusion.rule)
        of = facts.program.record_of[fusion.node].dtype
        wanted.setdefault((rule, device, of), lambda f=fusion: f.rule(*_inputs(facts.program, f.inputs)))
    for record in facts.program.records:
        if record.op == ATTENTION:
            width = (record.shape or ())[-1:]
            wanted.setdefault((ATTENTION, device, record.dtype, width), lambda r=record: _attend(facts, r))
    for key in wanted.keys() - _LOADED:
        _LOADED.add(key)
        try:
            with kernels_of_passes(device, None):
                wanted[key]()
        except Exception:  # noqa: BLE001  # what cannot be tried like this is loaded when it is used
            continue


def _fill(device: torch.device, dtype: torch.dtype) -> None:
    """Bring stacks to their worlds, and put something into them."""
    stack, at = torch.ones(4, 8, 64, device=device, dtype=dtype), torch.tensor([2, 0], device=device)
    stack[at, at] = stack[at, at]
    torch.cat([stack.index_select(0, at), stack.expand(4, 8, 64)]).repeat(2, 1, 1)
    nan_flags([stack])


def _attend(facts: ModelFacts, record: Record) -> None:
    """Attention of a stack: keys and values are repeated for the queries that share them."""
    (query,) = _inputs(facts.program, record.inputs[:1])
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def _inputs(program: Program, names: tuple[str, ...]) -> list[Tensor]:
    """Small tensors in place of values; weights are there."""
    found = []
    for name in names:
        if name in program.source_values:
            found.append(program.source_values[name])
            continue
        record = program.record_of[name]
        shape = [size if isinstance(size, int) else SIZE for size in record.shape or ()]
        found.append(torch.ones(shape, dtype=record.dtype, device=record.device))
    return found
