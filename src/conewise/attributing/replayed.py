"""Attributions on a CUDA device that are replayed: two forwards and a backward pass without Python.

The first attribution of its kind is computed. The second is too, and its work is recorded as two CUDA graphs,
the forwards and the backward pass, between which metrics are read. Where one bit differs from what was
computed, or the work cannot be recorded, none of that kind is replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from conewise.anatomy.selectors import Cell
from conewise.attributing.work import OnePass, Work
from conewise.program.tensors import Tensor, computing, recording
from conewise.program.walk import bitwise_same, run_sources
from conewise.program.weights import Sums
from conewise.runs.interventions import as_intervention
from conewise.runs.metrics import fetched
from conewise.runs.run import InputRun, PassRun, replays_of
from conewise.sweeps.execution.cuda_graph import GraphPool, copy_all

KINDS = 4
"""Graphs of so many kinds are kept with a model."""

_REPLAYS = "_replayed_attributions"

Make = Callable[[Work], OnePass]
"""The effects of some cells in one batch, by some rules."""


@dataclass(slots=True)
class _Kind:
    """Attributions of one kind, with the same weights; `is_out` where they cannot be replayed."""

    cells: tuple[Cell, ...]
    weights: Sums
    replayed: ReplayedPass | None = None
    is_out: bool = False


@dataclass
class _Replays:
    """The recorded attributions of a model, by what kernels are chosen by."""

    pool: GraphPool
    known: OrderedDict[Hashable, _Kind] = field(default_factory=OrderedDict)


def effects(work: Work, name: str, cells: tuple[Cell, ...], make: Make) -> Tensor:
    """[metric, cell, prompt]: replayed where an attribution of the kind was recorded, else computed."""
    key = _key(work, name, cells)
    if key is None:
        return make(work).effects()
    kept = vars(work.model)
    if _REPLAYS not in kept:
        kept[_REPLAYS] = _Replays(pool_of(next(iter(work.inputs.values())).device))
    replays: _Replays = kept[_REPLAYS]
    kind = replays.known.get(key)
    if kind is None or kind.cells is not cells or kind.weights != work.weights:
        replays.known[key] = _Kind(cells, work.weights)
        while len(replays.known) > KINDS:
            replays.known.popitem(last=False)
        return make(work).effects()
    replays.known.move_to_end(key)
    found = None if kind.replayed is None else kind.replayed.effects(work)
    if found is not None:
        return found
    found = make(work).effects()
    if kind.replayed is None and not kind.is_out:
        kind.replayed = _recorded(work, make, replays.pool, found)
        kind.is_out = kind.replayed is None
    return found


def pool_of(device: torch.device) -> GraphPool:
    """The memory of the graphs of a model."""
    return GraphPool(device)


def _key(work: Work, name: str, cells: tuple[Cell, ...]) -> Hashable | None:
    """All that kernels are chosen by; None where attributions of the kind are not recorded."""
    model, given, narrow = work.model, work.given, work.narrowest
    base, source = given.base, given.source
    if not work.may_replay or not work.has_source:
        return None
    if not isinstance(base, InputRun) or not isinstance(source, InputRun):
        return None
    runs = replays_of(model, base.inputs)
    if runs is None:
        return None
    addresses = model.weights.addresses()
    keys = (runs.key(run_sources(model.program, dict(one.inputs)), addresses) for one in (base, source))
    tokens = None if narrow is None else len(narrow.tokens)
    return (name, id(cells), work.targets, len(work.metrics), work.tail, tokens, *keys)


def _recorded(work: Work, make: Make, pool: GraphPool, expected: Tensor) -> ReplayedPass | None:
    if not make(work).is_apart:
        return None
    counts = work.counts
    try:
        made = ReplayedPass(work, make, pool)
        found, work.counts = made.effects(work), counts
    except Exception:  # noqa: BLE001  # whatever a device says: it is computed as before
        return None
    return made if found is not None and bitwise_same(found, expected) else None


class ReplayedPass:
    """The two forwards and the backward pass of attributions of one kind, over slots for their inputs."""

    def __init__(self, work: Work, make: Make, pool: GraphPool) -> None:
        self._asked, self._make, self._counts = work, make, work.counts
        given, model = work.given, work.model
        assert given.source is not None
        runs = {"base": given.base, "source": given.source}
        self._slots = {
            (which, name): x.clone() for which, one in runs.items() for name, x in one.inputs.items()
        }
        tokens = () if work.narrowest is None else work.narrowest.tokens
        self._columns = torch.tensor(tokens, dtype=torch.long, device=next(iter(self._slots.values())).device)
        own = {
            which: InputRun(model, {name: slot for (of, name), slot in self._slots.items() if of == which})
            for which in runs
        }
        put = as_intervention(own["source"], model)
        self._given = replace(given, base=own["base"], source=own["source"], intervention=put)
        self._index: Tensor | None = None
        self._is_ready = False
        with ExitStack() as trusted:
            for run in own.values():
                trusted.enter_context(run.trusted())
            self._prepare()
            pool.warm(self._forward)
            self._passed = {name: torch.zeros_like(value) for name, value in self._targets().items()}
            pool.warm(self._backward)
            self._prepare()
            self._graphs = pool.record(self._forward), pool.record(self._backward)

    def _prepare(self) -> None:
        """Make ready what the host does before a forward."""
        asked, columns = self._asked, self._columns
        given, weights = self._given, asked.weights
        self._work = Work(given, asked.spec, asked.reads, weights, is_one_pass=True, columns=columns)
        self._scores = self._make(self._work)
        self._is_ready = True

    def _forward(self) -> None:
        if not self._is_ready:  # a graph does not come here again
            self._prepare()
        self._is_ready = False
        self._values = self._scores.forward()
        source = self._work.batch.source
        assert isinstance(source, PassRun)
        self._source_values = source.values
        with computing():
            self._has_nan = self._scores.has_nan()

    def _targets(self) -> dict[str, Tensor]:
        """What metrics read, as far as gradients go through it."""
        found = ((name, self._values[name]) for name in self._work.targets)
        return {name: one for name, one in found if isinstance(one, Tensor) and one.requires_grad}

    def _read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What metrics read, in memory of its own: a metric may keep it."""
        found = ((name, values[name]) for name in self._work.targets)
        return {name: one.detach().clone() if isinstance(one, Tensor) else one for name, one in found}

    def _backward(self) -> None:
        targets, wanted = self._targets(), self._scores.wanted()
        passed = [self._passed[name] for name in targets]
        with recording():
            found: Sequence[Tensor | None] = torch.autograd.grad(
                list(targets.values()),
                wanted,
                passed,
                allow_unused=True,
                retain_graph=len(self._asked.metrics) > 1,
            )
        pairs = zip(found, wanted, strict=True)
        numbers = self._scores.backward([torch.zeros_like(x) if one is None else one for one, x in pairs])
        with computing():
            self._shape = numbers.shape
            self._numbers = torch.cat([numbers.reshape(-1), self._has_nan.to(numbers.dtype)[None]])

    def effects(self, work: Work) -> Tensor | None:
        """[metric, cell, prompt]; None where what is put in has NaN: computing it says what."""
        given, narrow = work.given, None if self._work.narrow is None else work.narrowest
        assert given.source is not None
        work.expect_apart(self._work.behind)
        runs, tokens = {"base": given.base, "source": given.source}, narrow.tokens if narrow else ()
        copy_all(list(self._slots.values()), [runs[which].inputs[name] for which, name in self._slots])
        if tokens:
            self._columns.copy_(torch.tensor(tokens))
        forward, backward = self._graphs
        forward.replay()
        rows, base = [], []
        tape = work.tape_of(given.base)
        for metric in work.metrics:
            values = self._read(self._values)
            leaves = {name: values[name].requires_grad_() for name in self._targets()}
            measured = tape.measure(metric, values, given.base.inputs, narrow)
            gradients = tape.gradients(measured, list(leaves.values()))
            copy_all([self._passed[name] for name in leaves], list(gradients))
            backward.replay()
            numbers = self._numbers.cpu()
            if numbers[-1]:
                return None
            rows.append(work.by_prompt(measured.is_shared, self._finished(numbers[:-1].view(self._shape))))
            base.append(fetched(metric, measured.numbers.detach()))
        work.note("base", torch.stack(base))
        work.note_numbers(
            "source",
            work.tape_of(given.source),
            self._read(self._source_values),
            given.source.inputs,
            work.narrowed(work.reads),
        )
        work.counts += self._counts
        return torch.stack(rows)

    def _finished(self, numbers: Tensor) -> Tensor:
        """[cell, prompt], of the numbers on the host: most often they are picked out of them, and no more."""
        if self._index is None:
            places = torch.arange(numbers.numel(), dtype=torch.float64).view(self._shape)
            self._index = self._scores.finish(places).long()
            others = torch.rand_like(places)
            is_picked = torch.equal(self._scores.finish(others), others.flatten()[self._index])
            self._index = self._index if is_picked else torch.zeros(0)
        return numbers.flatten()[self._index] if self._index.numel() else self._scores.finish(numbers)
