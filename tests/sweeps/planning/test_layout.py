"""Where batch and positions lie in a program written by hand, and how stacks are cut and put together."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from conewise.program.records import Program, Ref
from conewise.sweeps.planning.layout import Constants, Layout, compile_stacked_rule, repeated
from tests.sweeps.handmade import WIDTH, B, Handmade, T, numbers, run_by_hand

aten = torch.ops.aten
BATCH, LENGTH = 2, 5
SYMBOLS = {"b": BATCH, "t": LENGTH}
X, H, FLAT = Ref("x"), Ref("h"), Ref("flat")


@cache
def by_hand() -> Program:
    """One value in several shapes, and constants of several kinds."""
    made = Handmade(x=(B, T, WIDTH))
    weight = made.source("weight", numbers(WIDTH, WIDTH, seed=1))
    made.record("h", aten.add.Tensor, X, X, shape=(B, T, WIDTH))
    made.record("flat", aten.view.default, H, [made.size(B * T), WIDTH], shape=(B * T, WIDTH))
    made.record("turned", aten.transpose.int, H, 0, 1, shape=(T, B, WIDTH))
    made.record("total", aten.sum.dim_IntList, H, [1], shape=(B, WIDTH))
    made.record("parts", aten.split.Tensor, H, 2, 2, shape=None)
    made.record("ones", aten.ones.default, [made.size(B), 1, WIDTH], shape=(B, 1, WIDTH))
    made.record("rows", aten.arange.default, made.size(B), shape=(B,))
    made.record("steps", aten.arange.default, made.size(T), shape=(T,))
    made.record("product", aten.mm.default, FLAT, weight, shape=(B * T, WIDTH))
    return made.program("product")


@cache
def layout() -> Layout:
    return Layout(by_hand(), SYMBOLS)


@cache
def values(seed: int = 0) -> dict[str, Any]:
    return run_by_hand(by_hand(), {"x": numbers(BATCH, LENGTH, WIDTH, seed=seed)}, layout().sizes(1))


def stack(name: str, *seeds: int) -> Tensor:
    """The values of several runs, one behind the other along the batch."""
    dim = layout().batch_dim[name]
    assert dim is not None
    return torch.cat([values(seed)[name] for seed in seeds], dim)


def test_batch_and_positions_are_found_in_every_shape() -> None:
    found = {name: (layout().batch_dim[name], layout().pos_dim[name]) for name in layout().batch_dim}
    assert found == {
        "x": (0, 1),
        "h": (0, 1),
        "flat": (0, 0),
        "turned": (1, 0),
        "total": (0, None),
        "parts": (None, None),
        "ones": (0, None),
        "rows": (0, None),
        "steps": (None, 0),
        "product": (0, 0),
    }
    assert layout().varying == {"x", "h", "flat", "turned", "total", "parts", "product"}
    assert (layout().batch, layout().lengths) == (BATCH, {LENGTH})
    assert [layout().length(name) for name in ("h", "flat", "total")] == [LENGTH, LENGTH, 1]


def test_the_sizes_of_a_stack_are_those_of_so_many_batches_and_positions() -> None:
    def sizes(worlds: int, rows: int | None = None) -> set[int]:
        return set(layout().sizes(worlds, rows))

    assert sizes(1) == {BATCH * LENGTH, BATCH, LENGTH}
    assert sizes(3) == {3 * BATCH * LENGTH, 3 * BATCH, LENGTH}
    assert sizes(3, 2) == {3 * BATCH * 2, 3 * BATCH, 2}


@pytest.mark.parametrize("name", ["h", "flat", "turned", "product"])
@pytest.mark.parametrize("rows", range(1, LENGTH + 1))
def test_the_last_positions_of_a_stack_are_those_of_each_run(name: str, rows: int) -> None:
    found = layout().tail(name, stack(name, 0, 1, 2), rows)
    sliced = [_by_position(name, values(seed)[name])[:, -rows:] for seed in (0, 1, 2)]
    assert torch.equal(_by_position(name, found, rows), torch.cat(sliced))
    fewer = layout().tail(name, found, 1, rows)
    assert torch.equal(fewer, layout().tail(name, stack(name, 0, 1, 2), 1))


def _by_position(name: str, value: Tensor, rows: int = LENGTH) -> Tensor:
    """A value as [row of the batch, position, feature], whatever its own shape."""
    if name == "turned":
        return value.transpose(0, 1)
    return value if name == "h" else value.reshape(-1, rows, WIDTH)


@pytest.mark.parametrize("name", ["total", "parts", "ones"])
def test_what_has_no_positions_has_no_last_ones(name: str) -> None:
    value = values()[name]
    assert layout().tail(name, value, 2) is value


@pytest.mark.parametrize("name", ["h", "flat", "turned", "product"])
@pytest.mark.parametrize("rows", range(1, LENGTH + 1))
def test_the_positions_before_are_the_baselines(name: str, rows: int) -> None:
    """As if the last positions alone had been written over the baseline's, in every world."""
    base, worlds = values(0)[name], (1, 2, 3)
    found = layout().extended(name, base, layout().tail(name, stack(name, *worlds), rows), rows)
    expected = []
    for seed in worlds:
        whole = _by_position(name, base).clone()
        whole[:, -rows:] = _by_position(name, values(seed)[name])[:, -rows:]
        expected.append(whole)
    assert torch.equal(_by_position(name, found), torch.cat(expected))


def test_an_encoder_may_have_another_length() -> None:
    s = sympy.Symbol("s", integer=True, positive=True)
    made = Handmade(x=(B, T, WIDTH), memory=(B, s, WIDTH))
    made.record("total", aten.sum.dim_IntList, Ref("memory"), [1], True, shape=(B, 1, WIDTH))
    made.record("h", aten.add.Tensor, X, Ref("total"), shape=(B, T, WIDTH))
    program = made.program("h", positions=frozenset({"t", "s"}))
    found = Layout(program, {"b": 2, "t": 5, "s": 3})
    assert (found.length("h"), found.length("memory"), found.lengths) == (5, 3, {3, 5})
    value = numbers(2, 3, WIDTH)
    assert torch.equal(found.tail("memory", value, 2), value[:, 1:])


def test_a_row_is_repeated_without_a_copy_and_a_batch_with_one() -> None:
    row, batch = numbers(1, 3), numbers(2, 3)
    assert torch.equal(repeated(row, 0, 4), row.repeat(4, 1))
    assert repeated(row, 0, 4).data_ptr() == row.data_ptr()
    assert torch.equal(repeated(batch, 0, 2), batch.repeat(2, 1))
    assert torch.equal(repeated(batch, 1, 3), batch.repeat(1, 3))
    assert repeated(batch, 0, 1) is batch


# -- constants -------------------------------------------------------------------------------------


def test_a_constant_is_repeated_where_all_worlds_have_the_same() -> None:
    constants = Constants(layout(), values().__getitem__)
    assert constants.alike("ones")
    assert torch.equal(constants.stacked("ones", 3), torch.ones(3 * BATCH, 1, WIDTH))


def test_a_constant_that_counts_rows_is_computed_for_the_whole_stack() -> None:
    constants = Constants(layout(), values().__getitem__)
    assert not constants.alike("rows")
    assert torch.equal(constants.stacked("rows", 3), torch.arange(3 * BATCH))


def test_a_constant_without_a_batch_is_that_of_the_baseline() -> None:
    constants = Constants(layout(), values().__getitem__)
    for name in ("steps", "weight"):
        assert constants.stacked(name, 3) is values()[name]


def test_another_baseline_of_the_shape_is_read_after_it_was_given() -> None:
    constants, read = Constants(layout(), values().__getitem__), dict(values())
    read["steps"] = torch.zeros(LENGTH)
    constants.rebase(read.__getitem__)
    assert constants.stacked("steps", 2) is read["steps"]


def test_a_stack_that_is_not_contiguous_is_shaped_all_the_same() -> None:
    """`view` refuses such a stack; what it shows is the same."""
    record = by_hand().record_of["flat"]
    strided = stack("h", 0, 1).transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        aten.view.default(strided, [2 * BATCH * LENGTH, WIDTH])
    found = compile_stacked_rule(record)(strided, layout().sizes(2))
    assert torch.equal(found, stack("flat", 0, 1))
