"""What is known to keep slices apart does: a part of what it reads gives that part of its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import conewise as cw
from conewise.model import Model
from conewise.program.records import SIZES, Record
from conewise.program.walk import Interpreter
from conewise.sweeps.planning.independence import Independence, Trial
from conewise.sweeps.planning.layout import Constants, Layout, compile_stacked_rule
from tests.sweeps.mixers import ATTENTION, BATCHES, POSITIONS, WIDTH, ids, module

MIXERS: dict[str, Any] = {**{name: make() for name, make in ATTENTION.items()}, **POSITIONS, **BATCHES}
_CAPTURED: dict[str, Model] = {}


def captured(name: str) -> Model:
    if name not in _CAPTURED:
        _CAPTURED[name] = cw.capture(module(MIXERS[name]), input_ids=ids(2, 6, 0))
    return _CAPTURED[name]


class Scene:
    """The values of two runs of one program, and how they lie."""

    def __init__(self, model: Model, batch: int, length: int) -> None:
        program = model.program
        shapes = {leaf.name: leaf.shape for leaf in program.inputs}
        given = {program.inputs[0].name: (batch, length)}
        self.layout = Layout(program, program.sizes.symbols_of(shapes, given))
        interpreter = Interpreter(program)
        self.runs = [interpreter.values({program.inputs[0].name: ids(batch, length, n)}) for n in (1, 2)]
        self.constants = Constants(self.layout, self.runs[0].__getitem__)

    def positions(self) -> Independence:
        return Independence(self.layout, self.layout.pos_dim, self.layout.position_symbols)

    def batch(self) -> Independence:
        return Independence(
            self.layout, self.layout.batch_dim, self.layout.batch_symbols, self.constants.alike
        )

    def is_apart_in_positions(self, record: Record, rows: int) -> bool:
        """Whether the last positions of what it reads give the last positions of its value."""
        layout, values = self.layout, self.runs[0]

        def last(name: str, value: Any) -> Any:
            return layout.tail(name, value, rows) if isinstance(value, Tensor) else value

        reads = [
            layout.sizes(1, rows) if name == SIZES else last(name, values[name]) for name in record.inputs
        ]
        return close(compile_stacked_rule(record)(*reads), last(record.name, values[record.name]))

    def is_apart_in_batches(self, record: Record) -> bool:
        """Whether two batches, one behind the other, give both values, one behind the other."""

        def both(name: str) -> Any:
            if name == SIZES:
                return self.layout.sizes(2)
            if name not in self.layout.varying:
                return self.constants.stacked(name, 2)
            dim = self.layout.batch_dim[name]
            one, other = (run[name] for run in self.runs)
            return one if dim is None else torch.cat([one, other], dim)

        return close(compile_stacked_rule(record)(*map(both, record.inputs)), both(record.name))


def close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return True  # its parts are looked at one by one
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def tensors(model: Model, layout: Layout) -> list[Record]:
    """The operations that depend on a run's inputs, and read tensors alone."""
    records = {record.name: record for record in model.program.records}
    return [
        record
        for record in model.program.records
        if record.name in layout.varying
        and all(name not in records or records[name].shape is not None for name in record.inputs)
    ]


@settings(max_examples=150)
@given(st.sampled_from(sorted(MIXERS)), st.integers(2, 3), st.sampled_from([4, 6]), st.data())
def test_what_is_known_to_keep_positions_apart_does(
    name: str, batch: int, length: int, data: st.DataObject
) -> None:
    model = captured(name)
    if name == "a position that is last at this length":
        length = 6
    scene, rows = Scene(model, batch, length), data.draw(st.integers(1, length - 1))
    known = scene.positions()
    for record in tensors(model, scene.layout):
        if known.known(record.name):
            assert scene.is_apart_in_positions(record, rows), record


@settings(max_examples=100)
@given(st.sampled_from(sorted(MIXERS)), st.integers(1, 3), st.sampled_from([1, 6]))
def test_what_is_known_or_found_to_keep_batches_apart_does(name: str, batch: int, length: int) -> None:
    model = captured(name)
    try:
        scene = Scene(model, batch, length)
    except (cw.errors.ConewiseError, RuntimeError, IndexError):
        return  # the module itself is not for this shape
    known, trial = scene.batch(), Trial(scene.layout, lambda node: scene.runs[0][node])
    for record in tensors(model, scene.layout):
        if known.known(record.name) or trial.is_batch_independent(record.name):
            assert scene.is_apart_in_batches(record), record


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": lambda x: (x * 2 + x.sigmoid()).clamp(min=0) - x.square(),
    "a weight of positions": lambda x: x * torch.arange(x.shape[1])[None, :, None],
    "softmax over features": lambda x: x.softmax(-1),
    "a norm of features": lambda x: functional.layer_norm(x, (WIDTH,)),
    "mean of features": lambda x: x - x.mean(-1, keepdim=True),
    "heads": lambda x: x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2).transpose(1, 2).reshape(x.shape),
    "heads in the batch": lambda x: (
        x.unflatten(-1, (2, -1))  # type: ignore[no-untyped-call]
        .transpose(1, 2)
        .flatten(0, 1)
        .unflatten(0, (-1, 2))
        .transpose(1, 2)
        .flatten(2)
    ),
    "batch and positions in one": lambda x: x.reshape(-1, WIDTH).tanh().view(*x.shape),
    "positions first": lambda x: x.transpose(0, 1).tanh().transpose(0, 1),
    "parts of features": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "a slice of features": lambda x: x * x[..., 1:2] + x[..., 2][..., None],
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_models_are_made_of_is_known_without_a_trial(name: str) -> None:
    model = cw.capture(module(KNOWN[name]), input_ids=ids(2, 6, 0))
    scene = Scene(model, 2, 5)
    for known in (scene.positions(), scene.batch()):
        unknown = [r.name for r in model.program.records if r.name in scene.layout.varying]
        assert [one for one in unknown if not known.known(one)] == []


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_rows_that_see_each_other_are_found(name: str, batch: int) -> None:
    model = captured(name)
    scene = Scene(model, batch, 6)
    trial = Trial(scene.layout, lambda node: scene.runs[0][node])
    assert not all(trial.is_batch_independent(record.name) for record in tensors(model, scene.layout))


@pytest.mark.parametrize("value", ["rows alike", "one number"])
def test_rows_that_are_alike_do_not_hide_that_they_are_mixed(value: str) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.batch_norm(x, None, None, training=True)

    model = cw.capture(Mean().eval(), torch.randn(2, 4))
    x = torch.randn(1, 4).expand(3, 4) if value == "rows alike" else torch.ones(3, 4)
    values = Interpreter(model.program).values({"x": x})
    layout = Layout(model.program, dict.fromkeys(model.program.sizes.symbols, 3))
    assert not Trial(layout, values.__getitem__).is_batch_independent(model.program.records[-1].name)
