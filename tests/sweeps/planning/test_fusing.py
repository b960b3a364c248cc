"""Chains that one kernel computes: found as written, equal up to rounding, used where none looks inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import conewise as cw
from conewise.model import Model
from conewise.program.walk import Interpreter
from conewise.sweeps.planning import planner as model_facts
from conewise.sweeps.planning.fusing import CUBE, SCALE, Fusion, find_fusions, fitting
from conewise.sweeps.result import Result
from tests.program.zoo import ZOO

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


def captured(
    function: Callable[[Tensor, Any], Tensor],
    shape: tuple[int, ...] = (WIDTH,),
    dtype: torch.dtype = torch.float32,
) -> Model:
    torch.manual_seed(0)
    return cw.capture(Written(function, shape).eval().to(dtype), torch.randn(2, 3, WIDTH, dtype=dtype))


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


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded before it is scaled."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def t5(x: Tensor, weight: Tensor) -> Tensor:
    """Cast for the mean alone."""
    scaled = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * scaled.to(weight.dtype)


def olmo(x: Tensor, weight: Tensor) -> Tensor:
    """Scaled in float32."""
    wide = x.to(torch.float32)
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    """Scaled in float32, by one more than the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.float())).type_as(x)


def unweighted(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "llama": llama,
    "t5": t5,
    "olmo": olmo,
    "gemma": gemma,
    "unweighted": unweighted,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


NOT_NORM: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[int, ...]]] = {
    "over positions": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)), (WIDTH,)),
    "another value": (
        lambda x, w: w * (x.abs() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        (WIDTH,),
    ),
}
NOT_SCALED: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[int, ...]]] = {
    "one weight": (normed, ()),
    "one weight in a list": (normed, (1,)),
    "weights of heads": (heads, (2, WIDTH // 2)),
    "weights with a dimension in front": (normed, (1, WIDTH)),
}


def assert_equal(model: Model, fusion: Fusion) -> None:
    """What it computes is what the chain does, and its parts are all that leads from its inputs to it."""
    dtype = model.program.inputs[0].dtype
    values = Interpreter(model.program).values({"x": torch.randn(2, 3, WIDTH).to(dtype) * 3})
    with torch.no_grad():
        found = fusion.rule(*[values[n] for n in fusion.inputs])
    assert found.dtype == values[fusion.node].dtype
    expected = values[fusion.node]
    near = 2 * torch.finfo(found.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=near, rtol=1.3e-6)
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


def test_a_gelu_of_a_model_that_is_spread_is_found_where_all_of_it_lies_on_one_device() -> None:
    program = captured(next(iter(GELU.values()))).program
    (fusion,) = find_fusions(program, CPU)
    inside, outside = min(fusion.inside), program.records[-1].name
    assert outside not in {fusion.node, *fusion.inside}
    for moved, is_found in ((outside, True), (inside, False), (fusion.node, False)):
        records = [replace(one, device=CUDA if one.name == moved else CPU) for one in program.records]
        spread = replace(program, records=tuple(records))
        assert set(spread.devices) == {CPU, CUDA}
        assert bool(find_fusions(spread, CPU)) == is_found


@pytest.mark.parametrize("name", NOT_GELU)
def test_what_is_no_gelu_is_left_as_it_is(name: str) -> None:
    assert find_fusions(captured(NOT_GELU[name]).program, CPU) == ()


@pytest.mark.parametrize("function", [normed, scaled_last], ids=["weight first", "weight last"])
def test_a_norm_is_found_on_cuda(function: Any) -> None:
    model = captured(function)
    inner, fusion = find_fusions(model.program, CUDA)
    assert_equal(model, fusion)
    assert_equal(model, inner)
    assert inner.node in fusion.inside
    assert find_fusions(model.program, CPU) == ()


def sum_of(functions: Iterable[Callable[[Tensor, Any], Tensor]]) -> Callable[[Tensor, Any], Tensor]:
    def function(x: Tensor, weight: Any) -> Tensor:
        return torch.stack([one(x, weight) for one in functions]).sum(0)

    return function


def outermost(model: Model) -> dict[str, Fusion]:
    """The fusions that are found and lie in no other, by what they compute; each computes what it should."""
    fusions = find_fusions(model.program, CUDA)
    for fusion in fusions:
        assert_equal(model, fusion)
    return {one.node: one for one in fusions if not any(one.node in other.inside for other in fusions)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_rotations_are_found_in_every_precision(dtype: torch.dtype) -> None:
    model = captured(sum_of([*NORMS.values(), rotary, rotary_otherwise]), dtype=dtype)
    fusions = outermost(model)
    ends = next(record.inputs for record in model.program.records if record.op == "stack")
    is_half = dtype != torch.float32
    sizes = dict.fromkeys(NORMS, 7 if is_half else 5) | {"unweighted": 6 if is_half else 4}
    for (name, size), end in zip(sizes.items(), ends, strict=False):
        if name == "gemma" and is_half:  # its weights are in float32: the casts stay
            assert len(fusions[model.program.record_of[end].inputs[0]].inside) == 5
        else:
            assert fusions[end].inputs[0] == "first/linear"
            assert len(fusions[end].inside) == size, name
    assert all(len(fusions[end].inputs) == 3 for end in ends[-2:])
    assert len(fusions) == len(ends)
    assert find_fusions(model.program, CPU) == ()


@pytest.mark.parametrize("name", NOT_SCALED)
def test_a_norm_with_other_weights_is_one_kernel_without_them(name: str) -> None:
    function, shape = NOT_SCALED[name]
    model = captured(function, shape)
    (fusion,) = find_fusions(model.program, CUDA)
    assert len(fusion.inputs) == 1
    assert_equal(model, fusion)


def test_a_weight_of_another_precision_is_not_part_of_a_norm() -> None:
    model = captured(lambda x, w: normed(x, w.bfloat16()))
    (fusion,) = find_fusions(model.program, CUDA)
    assert len(fusion.inputs) == 1


def test_operations_that_only_look_like_a_product_are_left_alone() -> None:
    case = ZOO["two_and_two"]  # it multiplies in place, through a view
    model = cw.capture(case.make(""), **case.example(2, 12))
    assert find_fusions(model.program, CUDA) == ()


def turned_halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def angles(x: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.arange(x.shape[1], dtype=torch.float32)[None, :, None]
    turns = positions * torch.linspace(0.1, 1, WIDTH // 2)
    turns = torch.cat((turns, turns), dim=-1)
    return turns.cos().to(x.dtype), turns.sin().to(x.dtype)


def rotary(x: Tensor, _: Any = None) -> Tensor:
    cos, sin = angles(x)
    return x * cos + turned_halves(x) * sin


def rotary_otherwise(x: Tensor, _: Any = None) -> Tensor:
    cos, sin = angles(x)
    return sin * turned_halves(x) + cos * x


def not_rotary(turn: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    def function(x: Tensor, _: Any) -> Tensor:
        cos, sin = angles(x)
        return x * cos + turn(x) * sin

    return function


def one_factor(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor + turned_halves(x) * factor


NOT_ROTARY: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "turned the other way": not_rotary(
        lambda x: torch.cat((x[..., WIDTH // 2 :], -x[..., : WIDTH // 2]), -1)
    ),
    "unequal parts": not_rotary(lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1)),
    "of another value": not_rotary(lambda x: turned_halves(x.tanh())),
    "along positions": not_rotary(lambda x: torch.cat((-x[:, 1:], x[:, :1]), 1)),
    "one factor": lambda x, _: one_factor(x, angles(x)[0]),
    "a factor as narrow as a number": lambda x, _: x * 0.3 + turned_halves(x) * angles(x)[1],
}


def test_what_is_no_rotation_is_left_as_it_is() -> None:
    assert find_fusions(captured(sum_of(NOT_ROTARY.values())).program, CUDA) == ()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_sweep_of_a_llama_with_the_kernels_of_cuda(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chains fit, positions and worlds included, and the result is what it is without them."""
    torch.manual_seed(0)
    library: Any = transformers
    config = library.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
        intermediate_size=48, vocab_size=61, max_position_embeddings=32,
    )  # fmt: skip
    model = cw.capture(
        library.LlamaForCausalLM(config).eval().to(dtype),
        input_ids=torch.randint(0, 61, (1, 7)),
        use_cache=False,
    )
    ids = torch.arange(7)[None]
    base, source = model.run(input_ids=ids), model.run(input_ids=torch.where(ids == 3, 50, ids))
    sites = cw.sites("resid_pre", layer=":", pos=":") + cw.sites("z", layer=":", head=":")

    def run() -> Result:
        return model.sweep(sites, base=base, source=source, metric=cw.logit_diff(3, 5)).run()

    plain = run()
    del vars(model)[model_facts._FACTS]
    monkeypatch.setattr(model_facts, "find_fusions", lambda program, _: find_fusions(program, CUDA))
    fused = run()
    assert fused.plan.launches < 0.7 * plain.plan.launches
    assert fused.ledger.node_evaluations == plain.ledger.node_evaluations
    near = 40 * torch.finfo(dtype).eps * float(plain.table.abs().max())
    torch.testing.assert_close(fused.per_prompt, plain.per_prompt, rtol=0, atol=near)
    assert fused.verify(n=6).passed


def test_a_value_scaled_by_an_input_is_no_norm() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return normed(x.tanh(), gate)

    model = cw.capture(Gated().eval(), torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH))
    (fusion,) = find_fusions(model.program, CUDA)
    assert fusion.inputs == ("tanh",)  # what is scaled is one


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
