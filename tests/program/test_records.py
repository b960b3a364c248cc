"""The indices of a program: records by name, readers, what varies, shapes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.program.records import SIZES, Program


class Small(nn.Module):
    """A sum of the input, of a weight, and of numbers as many as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.linear.weight.sum() + torch.arange(x.shape[0]).unsqueeze(1)
        return out


@pytest.fixture(scope="module")
def program() -> Program:
    return cw.capture(Small(), torch.rand(4, 3)).program


def test_records_have_a_name_and_an_index(program: Program) -> None:
    assert list(program.record_of.values()) == list(program.records)
    assert [program.records[program.order[name]].name for name in program.record_of] == list(program.order)


def test_readers_mirror_inputs(program: Program) -> None:
    for name, readers in program.readers.items():
        assert list(readers) == [record for record in program.records if name in record.inputs]
    assert {name for record in program.records for name in record.inputs} <= program.readers.keys()
    assert program.readers[program.records[-1].name] == ()


def test_varying_is_what_depends_on_inputs_beyond_their_shapes(program: Program) -> None:
    assert {name for name in program.varying if name not in program.record_of} == {"x"}
    ops = {name: record.op for name, record in program.record_of.items()}
    assert sorted(ops[name] for name in program.varying - {"x"}) == ["add", "add", "linear"]
    assert sorted(op for name, op in ops.items() if name not in program.varying) == [
        "arange",
        "sum",
        "unsqueeze",
    ]
    assert any(SIZES in record.inputs for record in program.records)


def test_shapes_are_those_of_inputs_and_records(program: Program) -> None:
    assert program.shapes.keys() == {"x"} | program.record_of.keys()
    assert program.symbols_of({"x": (7, 3)}) == {str(program.shapes["x"][0]): 7}  # type: ignore[index]


def test_sources_have_their_values_by_name(program: Program) -> None:
    assert program.source_values.keys() == {source.name for source in program.sources}
    assert all(program.source_values[source.name] is source.value for source in program.sources)


def test_an_index_is_made_once_and_cannot_be_written_to(program: Program) -> None:
    assert program.readers is program.readers
    with pytest.raises(TypeError):
        program.record_of["x"] = program.records[0]  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch copies one of its own so
def test_a_copy_of_a_program_makes_its_own_indices(program: Program) -> None:
    assert program.readers
    copied = copy.deepcopy(program)
    assert copied.record_of.keys() == program.record_of.keys()
    assert all(copied.record_of[record.name] is record for record in copied.records)
