"""Chains that one kernel computes: found as written, equal up to rounding, used where none looks inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import conewise as cw
from conewise.model import Model
from conewise.program.interpret import Interpreter
from conewise.sweeps.planning.shapes.fusing import CUBE, SCALE, Fusion, find_fusions, fitting

WIDTH = 8
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Written(nn.Module):
    def __init__(self, function: Callable[[Tensor, Any], Tensor], shape: tuple[int, ...] = (WIDTH,)) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.weight, self.function = nn.Parameter(torch.rand(shape) + 0.5), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.function(self.first(x), self.weight))
        return out


def captured(function: Callable[[Tensor, Any], Tensor], shape: tuple[int, ...] = (WIDTH,)) -> Model:
    torch.manual_seed(0)
    return cw.capture(Written(function, shape).eval(), torch.randn(2, 3, WIDTH))


def gelu(x: Tensor, _: Any = None) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(SCALE * (x + CUBE * torch.pow(x, 3.0))))


def turned(x: Tensor) -> Tensor:
    return (torch.tanh((x.pow(3.0) * CUBE + x) * SCALE) + 1.0) * (x * 0.5)


GELU: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "as it is written most": gelu,
    "the other way round": lambda x, _: turned(x),
    "of a product that looks like a part of it": lambda x, _: turned(x * CUBE),
}
NOT_GELU: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "another cube": lambda x, _: 0.5 * x * (1.0 + torch.tanh(SCALE * (x + 0.05 * torch.pow(x, 3.0)))),
    "another scale": lambda x, _: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2) * (x + CUBE * torch.pow(x, 3.0)))),
    "another power": lambda x, _: 0.5 * x * (1.0 + torch.tanh(SCALE * (x + CUBE * torch.pow(x, 2.0)))),
    "another value": lambda x, _: 0.5 * x.abs() * (1.0 + torch.tanh(SCALE * (x + CUBE * torch.pow(x, 3.0)))),
    "no half": lambda x, _: x * (1.0 + torch.tanh(SCALE * (x + CUBE * torch.pow(x, 3.0)))),
}


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def scaled_last(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Normed head by head, each with weights of its own."""
    return normed(x.unflatten(-1, (2, -1)), weight).flatten(-2)  # type: ignore[no-untyped-call]


NOT_NORM: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[int, ...]]] = {
    "one weight": (normed, ()),
    "one weight in a list": (normed, (1,)),
    "weights of heads": (heads, (2, WIDTH // 2)),
    "weights with a dimension in front": (normed, (1, WIDTH)),
    "over positions": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)), (WIDTH,)),
    "another value": (
        lambda x, w: w * (x.abs() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        (WIDTH,),
    ),
}


def assert_equal(model: Model, fusion: Fusion) -> None:
    """What it computes is what the chain does, and its parts are all that leads from its inputs to it."""
    values = Interpreter(model.program).values({"x": torch.randn(2, 3, WIDTH) * 3})
    torch.testing.assert_close(fusion.rule(*[values[n] for n in fusion.inputs]), values[fusion.node])
    chain = {record.name: record.inputs for record in model.program.records}
    reached, waiting = set(), [fusion.node]
    while waiting:
        for read in chain.get(waiting.pop(), ()):
            if read not in fusion.inputs and read not in reached:
                reached.add(read)
                waiting.append(read)
    assert reached == fusion.inside


@pytest.mark.parametrize("name", GELU)
def test_a_gelu_is_found_however_it_is_written(name: str) -> None:
    model = captured(GELU[name])
    (fusion,) = find_fusions(model.program, CPU)
    assert_equal(model, fusion)


@pytest.mark.parametrize("name", NOT_GELU)
def test_what_is_no_gelu_is_left_as_it_is(name: str) -> None:
    assert find_fusions(captured(NOT_GELU[name]).program, CPU) == ()


@pytest.mark.parametrize("function", [normed, scaled_last], ids=["weight first", "weight last"])
def test_a_norm_is_found_on_cuda(function: Any) -> None:
    model = captured(function)
    (fusion,) = find_fusions(model.program, CUDA)
    assert_equal(model, fusion)
    assert find_fusions(model.program, CPU) == ()


@pytest.mark.parametrize("name", NOT_NORM)
def test_what_is_no_norm_over_the_features_is_left_as_it_is(name: str) -> None:
    function, shape = NOT_NORM[name]
    assert find_fusions(captured(function, shape).program, CUDA) == ()


def test_a_value_scaled_by_an_input_is_no_norm() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return normed(x.tanh(), gate)

    model = cw.capture(Gated().eval(), torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH))
    assert find_fusions(model.program, CUDA) == ()


FUSION = Fusion("end", frozenset({"a", "b"}), ("x",), lambda x: x)
READERS = {"a": ["b"], "b": ["end"], "end": []}


@given(
    st.fixed_dictionaries(
        {node: st.sampled_from([None, (1, 2), (3, 2), (3, None)]) for node in ("a", "b", "end")}
    ),
    st.frozensets(st.sampled_from(["a", "b", "end", "x"]), max_size=1),
    st.sampled_from(["nobody", "a step", "no step"]),
)
def test_a_chain_is_one_where_nothing_looks_inside(
    how: dict[str, Any], kept: frozenset[str], reader: str
) -> None:
    steps: dict[str, Any] = {node: one for node, one in how.items() if one is not None}
    readers = {**READERS, "a": ["b", "other"]} if reader != "nobody" else READERS
    if reader == "a step":
        steps["other"] = (3, 2)
    fit = fitting([FUSION], steps, kept, readers.__getitem__)
    alike = how["end"] is not None and how["a"] == how["b"] == how["end"]
    assert bool(fit) == (alike and not kept & {"a", "b"} and reader != "a step")


def test_patches_inside_of_a_chain_and_behind_it() -> None:
    """In one sweep some worlds patch its parts, some what it reads, some what reads it."""
    model = captured(gelu)
    records = [r.name for r in model.program.records if r.name not in {"first/linear", "last/linear"}]
    base, source = model.run(torch.randn(2, 3, WIDTH)), model.run(torch.randn(2, 3, WIDTH))
    for sites in (["first"], ["first", *records], records[-2:], ["first", records[3]]):
        sweep = model.sweep(sites, base=base, source=source, metric=lambda out: out.sum((1, 2)))
        serial, wave = sweep.run(evaluator="serial"), sweep.run(evaluator="wavefront")
        torch.testing.assert_close(wave.per_prompt, serial.per_prompt, rtol=1e-5, atol=1e-5)
        assert wave.ledger.node_evaluations == serial.ledger.node_evaluations == wave.plan.node_evaluations
        assert wave.ledger.launches == wave.plan.launches
