"""Each op computes what its name says, and each of its gradients agrees with finite differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import conewise as cw
from conewise.errors import GradientError, GraphError, OpError
from conewise.paper import ops

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
ARRAY: Any = np.ones(2)


def real(*shape: int) -> Array:
    """Values away from 0, so that a step of the finite differences crosses no kink and no pole."""
    return np.asarray(RNG.uniform(0.3, 1.5, shape) * RNG.choice([-1.0, 1.0], shape))


def positive(*shape: int) -> Array:
    return RNG.uniform(0.3, 2.0, shape)


def integers(*shape: int, below: int) -> Array:
    return RNG.integers(0, below, shape)


CASES: dict[str, tuple[ops.Op, list[Any]]] = {
    "identity": (ops.identity, [real(2, 3)]),
    "neg": (ops.neg, [real(2, 3)]),
    "scale": (ops.scale(-0.7), [real(2, 3)]),
    "square": (ops.square, [real(4)]),
    "add": (ops.add, [real(2, 3), real(2, 3)]),
    "add of numbers": (ops.add, [real(), real()]),
    "sub": (ops.sub, [real(5), real(5)]),
    "mul": (ops.mul, [real(2, 3), real(2, 3)]),
    "mul of numbers": (ops.mul, [real(), real()]),
    "div": (ops.div, [real(2, 3), real(2, 3)]),
    "bias_add": (ops.bias_add, [real(2, 4, 3), real(3)]),
    "bias_add of a vector": (ops.bias_add, [real(3), real(3)]),
    "total of one": (ops.total, [real(2, 3)]),
    "total of four": (ops.total, [real(2, 3) for _ in range(4)]),
    "matmul": (ops.matmul, [real(2, 3), real(3, 4)]),
    "matmul, batched": (ops.matmul, [real(5, 2, 2, 3), real(5, 2, 3, 4)]),
    "linear": (ops.linear, [real(2, 5, 3), real(3, 4)]),
    "linear of a vector": (ops.linear, [real(3), real(3, 4)]),
    "transpose": (ops.transpose, [real(2, 3, 4)]),
    "transpose(axes)": (ops.transpose(axes=(2, 0, -2)), [real(2, 3, 4)]),
    "reshape": (ops.reshape((3, -1)), [real(2, 6)]),
    "reshape(of)": (ops.reshape((3, 4), of=(2, 6)), [real(2, 6)]),
    "expand": (ops.expand((4, 2, 3)), [real(2, 1)]),
    "expand of a number": (ops.expand((2, 3)), [real()]),
    "expand(of)": (ops.expand((4, 2, 3), of=(1, 3)), [real(1, 3)]),
    "slice": (ops.slice(axis=-1, start=1, stop=3), [real(2, 4)]),
    "slice from the end": (ops.slice(axis=0, start=-2), [real(5, 2)]),
    "slice(size)": (ops.slice(axis=1, start=1, stop=-1, size=4), [real(2, 4, 3)]),
    "concat": (ops.concat, [real(2, 1), real(2, 3), real(2, 2)]),
    "concat(axis=0)": (ops.concat(axis=0), [real(1, 2), real(3, 2)]),
    "concat(sizes)": (ops.concat(axis=-1, sizes=[1, 3]), [real(2, 1), real(2, 3)]),
    "sum": (ops.sum, [real(2, 3)]),
    "sum(axis)": (ops.sum(axis=-2), [real(2, 3, 4)]),
    "sum(axes, keepdims)": (ops.sum(axis=(0, -1), keepdims=True), [real(2, 3, 4)]),
    "sum(of)": (ops.sum(of=(2, 3)), [real(2, 3)]),
    "sum(axis, of)": (ops.sum(axis=1, of=(2, 3)), [real(2, 3)]),
    "mean": (ops.mean, [real(2, 3)]),
    "mean(axis)": (ops.mean(axis=-1), [real(2, 3, 4)]),
    "mean(axes, keepdims)": (ops.mean(axis=(0, 2), keepdims=True), [real(2, 3, 4)]),
    "mean(axis, of)": (ops.mean(axis=(0, 1), of=(2, 3, 4)), [real(2, 3, 4)]),
    "relu": (ops.relu, [real(3, 4)]),
    "gelu": (ops.gelu, [real(3, 4)]),
    "silu": (ops.silu, [real(3, 4)]),
    "tanh": (ops.tanh, [real(3, 4)]),
    "sigmoid": (ops.sigmoid, [real(3, 4)]),
    "sigmoid of a number": (ops.sigmoid, [real()]),
    "exp": (ops.exp, [real(3, 4)]),
    "log": (ops.log, [positive(3, 4)]),
    "swiglu": (ops.swiglu, [real(3, 4), real(3, 4)]),
    "softmax": (ops.softmax, [real(2, 5)]),
    "softmax(axis=0)": (ops.softmax(axis=0), [real(4, 2)]),
    "log_softmax": (ops.log_softmax, [real(2, 5)]),
    "log_softmax(axis=1)": (ops.log_softmax(axis=1), [real(2, 3, 2)]),
    "rope": (ops.rope, [real(3, 4)]),
    "rope(heads, start)": (ops.rope(heads=2, start=3, base=100.0), [real(2, 3, 8)]),
    "rmsnorm": (ops.rmsnorm, [real(2, 4), real(4)]),
    "rmsnorm(eps)": (ops.rmsnorm(eps=0.5), [real(2, 3, 4), real(4)]),
    "layernorm": (ops.layernorm, [real(2, 4), real(4), real(4)]),
    "layernorm(eps)": (ops.layernorm(eps=0.5), [real(3, 2, 4), real(4), real(4)]),
    "embedding": (ops.embedding, [real(5, 3), integers(2, 4, below=5)]),
    "embedding of one": (ops.embedding, [real(5, 3), integers(below=5)]),
    "embedding(size)": (ops.embedding(size=5), [real(5, 3), integers(6, below=5)]),
    "mse": (ops.mse, [real(2, 3), real(2, 3)]),
    "cross_entropy": (ops.cross_entropy, [real(2, 3, 5), integers(2, 3, below=5)]),
    "cross_entropy of one row": (ops.cross_entropy, [real(5), integers(below=5)]),
}

every_case = pytest.mark.parametrize(("op", "values"), CASES.values(), ids=CASES)


def pulled(op: ops.Op, values: Sequence[Any], place: int, gradient: Any) -> Any:
    """The vector-Jacobian product, given what it declares to read and nothing else."""
    vjp = op.vjps[place]
    assert vjp is not None
    known = {ops.GRADIENT: gradient, ops.OUTPUT: op(*values)} | dict(enumerate(values))
    return vjp.function(*(known[read] for read in vjp.reads))


def differences(f: Callable[[Array], Any], x: Array, step: float = 1e-6) -> Array:
    """Central finite differences of a number with respect to each entry of x."""
    slopes = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        slopes[place] = (f(up) - f(down)) / (2.0 * step)
    return slopes


def check_against_differences(op: ops.Op, values: Sequence[Any]) -> None:
    gradient = np.random.default_rng(1).normal(size=np.shape(op(*values)))
    for place, value in enumerate(values):
        if op.vjps[place] is None:
            continue

        def loss(x: Array, place: int = place) -> Any:
            return np.sum(gradient * op(*values[:place], x, *values[place + 1 :]))

        found = pulled(op, values, place, gradient)
        assert np.shape(found) == np.shape(value)
        np.testing.assert_allclose(found, differences(loss, np.asarray(value)), rtol=1e-6, atol=1e-7)


@every_case
def test_a_gradient_agrees_with_finite_differences(op: ops.Op, values: list[Any]) -> None:
    check_against_differences(op, values)


@every_case
def test_float32_stays_float32_and_is_right(op: ops.Op, values: list[Any]) -> None:
    narrow = [v.astype(np.float32) if np.issubdtype(v.dtype, np.floating) else v for v in values]
    exact, found = op(*values), op(*narrow)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)
    gradient = np.random.default_rng(2).normal(size=np.shape(exact))
    for place in range(len(values)):
        if op.vjps[place] is not None:
            back = pulled(op, narrow, place, gradient.astype(np.float32)[()])
            assert back.dtype == np.float32
            np.testing.assert_allclose(back, pulled(op, values, place, gradient), rtol=1e-4, atol=1e-5)


@every_case
def test_no_input_is_written_to(op: ops.Op, values: list[Any]) -> None:
    frozen = [value.copy() for value in values]
    for value in frozen:
        value.setflags(write=False)
    gradient = np.array(np.ones(np.shape(op(*frozen))))
    gradient.setflags(write=False)
    for place in range(len(values)):
        if op.vjps[place] is not None:
            pulled(op, frozen, place, gradient)


# Gradients that read a value for its shape alone, because nobody told them the shape.
READ_FOR_THE_SHAPE = {"reshape": 0, "expand": 0, "slice": 0, "sum": 0, "mean": 0, "embedding": 0}


@every_case
def test_every_value_that_a_gradient_reads_matters(op: ops.Op, values: list[Any]) -> None:
    """Nothing is read in vain: another value at any one of the reads gives another gradient."""
    rng = np.random.default_rng(3)
    for place in range(len(values)):
        vjp = op.vjps[place]
        if vjp is None:
            continue
        known: dict[Any, Any] = {
            ops.GRADIENT: rng.normal(size=np.shape(op(*values))),
            ops.OUTPUT: op(*values),
        }
        known |= dict(enumerate(values))
        before = vjp.function(*(known[read] for read in vjp.reads))
        for read in vjp.reads:
            if read in range(place + 1) and op.name == "concat":
                continue
            if read == READ_FOR_THE_SHAPE.get(op.name, ()):
                continue
            other = np.asarray(known[read])
            is_index = np.issubdtype(other.dtype, np.integer)
            changed = known | {read: (other + 1) % 5 if is_index else -1.5 * other + 0.25}
            after = vjp.function(*(changed[read] for read in vjp.reads))
            assert not np.array_equal(before, after), f"{op}: input {place} does not need {read}"


@pytest.mark.parametrize(
    "case",
    [
        *("identity", "neg", "scale", "add", "sub", "total of four", "bias_add", "transpose", "rope"),
        *("reshape(of)", "expand(of)", "slice(size)", "concat(sizes)", "sum(of)", "sum(axis, of)"),
        "mean(axis, of)",
    ],
)
def test_a_linear_gradient_reads_nothing_but_the_incoming_one(case: str) -> None:
    op, values = CASES[case]
    for place in range(len(values)):
        vjp = op.vjps[place]
        assert vjp is not None
        assert vjp.reads == (ops.GRADIENT,)


@pytest.mark.parametrize(
    ("op", "reads"),
    [
        (ops.mul, [(ops.GRADIENT, 1), (ops.GRADIENT, 0)]),
        (ops.matmul, [(ops.GRADIENT, 1), (ops.GRADIENT, 0)]),
        (ops.linear, [(ops.GRADIENT, 1), (ops.GRADIENT, 0)]),
        (ops.div, [(ops.GRADIENT, 1), (ops.GRADIENT, 0, 1)]),
        (ops.relu, [(ops.GRADIENT, ops.OUTPUT)]),
        (ops.softmax, [(ops.GRADIENT, ops.OUTPUT)]),
        (ops.log, [(ops.GRADIENT, 0)]),
        (ops.causal_mask, [(ops.GRADIENT,)]),
        (ops.rmsnorm, [(ops.GRADIENT, 0, 1), (ops.GRADIENT, 0)]),
        (ops.layernorm, [(ops.GRADIENT, 0, 1), (ops.GRADIENT, 0), (ops.GRADIENT,)]),
        (ops.swiglu, [(ops.GRADIENT, 0, 1), (ops.GRADIENT, 0)]),
        (ops.embedding(size=5), [(ops.GRADIENT, 1), None]),
        (ops.cross_entropy, [(ops.GRADIENT, 0, 1), None]),
        # The part of the first input begins at 0: the sizes of the others do not matter to it.
        (ops.concat, [(ops.GRADIENT, 0), (ops.GRADIENT, 0, 1), (ops.GRADIENT, 0, 1, 2)]),
    ],
    ids=str,
)
def test_what_a_gradient_reads(op: ops.Op, reads: list[tuple[Any, ...] | None]) -> None:
    vjps = [op.vjps[place] for place in range(len(reads))]
    assert [None if vjp is None else vjp.reads for vjp in vjps] == reads


# -- shapes that Hypothesis chooses -------------------------------------------------------------

sizes = st.integers(1, 3)
shapes = st.lists(sizes, max_size=3).map(tuple)
seeds = st.integers(0, 2**32 - 1)
UNARY = [ops.identity, ops.neg, ops.scale(3), ops.square, ops.relu, ops.gelu, ops.silu, ops.tanh, ops.sigmoid]
UNARY += [ops.exp, ops.log, ops.softmax, ops.log_softmax]
BINARY = [ops.add, ops.sub, ops.mul, ops.div, ops.swiglu, ops.mse]


def drawn(seed: int, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng(seed)
    return np.asarray(rng.uniform(0.4, 1.2, shape))


@settings(max_examples=60)
@given(st.sampled_from(UNARY), shapes, seeds)
def test_a_unary_op_takes_any_shape(op: ops.Op, shape: tuple[int, ...], seed: int) -> None:
    if "softmax" in op.name:
        shape = (*shape, 2)
    check_against_differences(op, [drawn(seed, shape)])


@settings(max_examples=40)
@given(st.sampled_from(BINARY), shapes, seeds)
def test_a_binary_op_takes_any_two_equal_shapes(op: ops.Op, shape: tuple[int, ...], seed: int) -> None:
    check_against_differences(op, [drawn(seed, shape), drawn(seed // 2 + 1, shape)])


@settings(max_examples=30)
@given(shapes, sizes, sizes, sizes, seeds)
def test_products_take_any_leading_axes(lead: tuple[int, ...], n: int, k: int, m: int, seed: int) -> None:
    check_against_differences(ops.matmul, [drawn(seed, (*lead, n, k)), drawn(seed // 3, (*lead, k, m))])
    check_against_differences(ops.linear, [drawn(seed, (*lead, k)), drawn(seed // 3, (k, m))])


@settings(max_examples=40)
@given(st.data(), shapes, st.booleans(), st.booleans(), seeds)
def test_a_reduction_takes_any_axes(
    data: st.DataObject, shape: tuple[int, ...], keepdims: bool, is_told: bool, seed: int
) -> None:
    places = st.lists(st.integers(-len(shape), len(shape) - 1), unique_by=lambda a: a % len(shape))
    axis = data.draw(st.none() | places.map(tuple)) if shape else None
    of = shape if is_told else None
    for op in (ops.sum(axis=axis, keepdims=keepdims, of=of), ops.mean(axis=axis, keepdims=keepdims, of=of)):
        check_against_differences(op, [drawn(seed, shape)])


@settings(max_examples=40)
@given(st.data(), st.lists(sizes, min_size=1, max_size=3), st.lists(sizes, min_size=1, max_size=4), seeds)
def test_slice_undoes_concat(data: st.DataObject, shape: list[int], parts: list[int], seed: int) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    values = []
    for count, part in enumerate(parts):
        size = list(shape)
        size[axis] = part
        values.append(drawn(seed + count, tuple(size)))
    check_against_differences(ops.concat(axis=axis), values)
    check_against_differences(ops.concat(axis=axis, sizes=parts), values)
    whole, start = ops.concat(axis=axis)(*values), 0
    for value, part in zip(values, parts, strict=True):
        op = ops.slice(axis=axis, start=start, stop=start + part)
        np.testing.assert_array_equal(op(whole), value)
        check_against_differences(op, [whole])
        start += part


@settings(max_examples=30)
@given(st.data(), shapes, seeds)
def test_expand_is_broadcasting(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    small = tuple(1 if data.draw(st.booleans()) else size for size in shape)
    small = small[data.draw(st.integers(0, len(shape))) :]
    x = drawn(seed, small)
    np.testing.assert_array_equal(ops.expand(shape)(x), np.broadcast_to(x, shape))
    check_against_differences(ops.expand(shape), [x])
    check_against_differences(ops.expand(shape, of=small), [x])


# -- what they compute ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        (ops.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        (ops.silu, torch.nn.functional.silu),
        (ops.sigmoid, torch.sigmoid),
        (ops.relu, torch.relu),
        (ops.softmax, lambda x: torch.softmax(x, -1)),
        (ops.log_softmax(axis=0), lambda x: torch.log_softmax(x, 0)),
        (ops.transpose, lambda x: x.mT),
    ],
    ids=lambda given: str(given) if isinstance(given, ops.Op) else "torch",
)
def test_a_function_of_one_value_is_the_one_torch_has(op: ops.Op, reference: Any) -> None:
    x = 4.0 * real(3, 4)
    np.testing.assert_allclose(op(x), reference(torch.from_numpy(x)).numpy(), rtol=1e-12, atol=1e-15)


def test_norms_and_losses_are_those_torch_has() -> None:
    f = torch.nn.functional
    x, w, b, targets = real(2, 3, 4), real(4), real(4), integers(2, 3, below=4)
    tx, tw, tb = map(torch.from_numpy, (x, w, b))
    np.testing.assert_allclose(ops.rmsnorm(x, w), f.rms_norm(tx, (4,), tw, 1e-6).numpy(), rtol=1e-12)
    np.testing.assert_allclose(
        ops.layernorm(x, w, b), f.layer_norm(tx, (4,), tw, tb, 1e-5).numpy(), rtol=1e-12
    )
    expected = f.cross_entropy(tx.reshape(-1, 4), torch.from_numpy(targets).reshape(-1)).item()
    assert math.isclose(ops.cross_entropy(x, targets), expected, rel_tol=1e-12)
    assert math.isclose(ops.mse(x, -x), f.mse_loss(tx, -tx).item(), rel_tol=1e-12)


def test_a_large_argument_neither_overflows_nor_loses_what_is_small() -> None:
    x = np.array([-800.0, -20.0, 0.0, 20.0, 800.0])
    np.testing.assert_allclose(ops.sigmoid(x), [0.0, math.exp(-20) / (1 + math.exp(-20)), 0.5, 1 - 2e-9, 1.0])
    np.testing.assert_allclose(ops.softmax(x), [0.0, 0.0, 0.0, 0.0, 1.0], atol=1e-300)
    assert ops.cross_entropy(x, np.array(0)) == 1600.0


def test_a_causal_mask_hides_what_is_ahead_and_passes_no_gradient_there() -> None:
    op, scores = ops.causal_mask, real(2, 3, 4)
    masked = op(scores)
    visible = np.tri(3, 4, 1, dtype=bool)
    np.testing.assert_array_equal(masked[:, visible], scores[:, visible])
    assert np.all(masked[:, ~visible] == -np.inf)
    gradient = real(2, 3, 4)
    np.testing.assert_array_equal(pulled(op, [scores], 0, gradient), np.where(visible, gradient, 0.0))
    assert op(scores.astype(np.float32)).dtype == np.float32


def test_attention_behind_a_mask_agrees_with_finite_differences() -> None:
    """The mask's −∞ must not turn into nan on the way back."""

    def attend(x: Any) -> Any:
        return ops.softmax(ops.causal_mask(x))

    x, gradient = real(3, 3), real(3, 3)
    back = pulled(ops.softmax, [ops.causal_mask(x)], 0, gradient)
    found = pulled(ops.causal_mask, [x], 0, back)
    np.testing.assert_allclose(found, differences(lambda v: np.sum(gradient * attend(v)), x), atol=1e-8)


def test_rope_turns_each_pair_by_its_angle_and_each_head_alike() -> None:
    x = real(3, 8)
    turned = ops.rope(heads=2, start=5)(x)
    for position in range(3):
        for head in range(2):
            for pair in range(2):
                angle = (position + 5) * 10_000.0 ** (-pair / 2)
                a, b = x[position, 4 * head + pair], x[position, 4 * head + pair + 2]
                assert math.isclose(
                    turned[position, 4 * head + pair], a * math.cos(angle) - b * math.sin(angle)
                )
                assert math.isclose(
                    turned[position, 4 * head + pair + 2], b * math.cos(angle) + a * math.sin(angle)
                )


# -- an op as a thing -----------------------------------------------------------------------------


def test_ops_are_frozen_hashable_and_equal_by_name_and_parameters() -> None:
    assert len({ops.scale(0.5), ops.scale(0.5), ops.scale(2), ops.mul}) == 3
    assert ops.softmax(axis=-1) == ops.softmax == ops.softmax()
    assert ops.concat(sizes=[1, 2]) == ops.concat(sizes=(1, 2)) != ops.concat
    assert {ops.slice(axis=0, start=1): 1}[ops.slice(axis=0, start=1)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.mul.name = "product"  # type: ignore[misc]


def test_an_op_says_what_it_is() -> None:
    assert repr(ops.mul) == "mul"
    assert repr(ops.scale(2)) == "scale(factor=2.0)"
    assert repr(ops.softmax(axis=0)) == "softmax(axis=0)"
    assert repr(ops.slice(axis=-1, start=0, stop=4)) == "slice(axis=-1, start=0, stop=4, size=None)"


def test_arity_is_the_number_of_inputs_or_none() -> None:
    assert [ops.neg.arity, ops.mul.arity, ops.layernorm.arity] == [1, 2, 3]
    assert [ops.total.arity, ops.concat.arity, ops.concat(sizes=(2, 3)).arity] == [None, None, 2]


def test_ops_are_rules_of_a_graph() -> None:
    g = cw.Graph()
    g.source("x", np.arange(6.0).reshape(2, 3))
    g.source("w", np.ones((3, 4)), param=True)
    g.node("h", ops.matmul, ["x", "w"])
    g.node("left", ops.slice(axis=-1, start=0, stop=1), ["h"])
    g.node("both", ops.concat(axis=-1), ["left", "left"])
    np.testing.assert_array_equal(cw.World(g).demand("both"), [[3.0, 3.0], [12.0, 12.0]])


def test_python_numbers_are_values_too() -> None:
    assert ops.mul(2.0, 3.0) == 6.0
    assert ops.relu(-2.0) == 0.0
    assert ops.tanh(0.0) == 0.0


def test_an_op_of_ones_own_needs_a_function_and_its_vjps() -> None:
    cube = ops.Op("cube", lambda x: x**3, (ops.Vjp(lambda g, x: 3 * g * x * x, (ops.GRADIENT, 0)),))
    assert cube.arity == 1
    check_against_differences(cube, [real(2, 2)])


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [ops.add, ops.sub, ops.mul, ops.div, ops.total, ops.mse, ops.swiglu], ids=str)
def test_unequal_shapes_are_not_broadcast(op: ops.Op) -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(3,\).*`ops\.expand\(shape\)`.*`ops\.bias_add`"):
        op(real(2, 3), real(3))


@pytest.mark.parametrize(
    ("op", "values", "message"),
    [
        (ops.matmul, [real(2, 3), real(2, 3)], r"got \(2, 3\) and \(2, 3\)"),
        (ops.matmul, [real(5, 2, 3), real(3, 4)], r"use `ops\.linear`"),
        (ops.matmul, [real(3), real(3)], r"matmul takes"),
        (ops.linear, [real(2, 3), real(5, 3, 4)], r"use `ops\.matmul`"),
        (ops.linear, [real(2, 3), real(4, 3)], r"one weight matrix \(k, m\)"),
        (ops.bias_add, [real(2, 3), real(2)], r"a bias of shape \(2,\) does not fit"),
        (ops.rmsnorm, [real(2, 3), real(2)], r"rmsnorm takes .* weights of shape \(2,\)"),
        (ops.layernorm, [real(2, 3), real(3), real(2)], r"layernorm takes"),
        (ops.rope, [real(2, 3)], r"1 heads of an even size d, and got the shape \(2, 3\)"),
        (ops.causal_mask, [real(3, 2)], r"no more queries than keys, and got \(3, 2\)"),
        (ops.transpose, [real(3)], r"its last two axes cannot take a value of shape \(3,\)"),
        (ops.transpose(axes=(1, 0)), [real(2, 3, 4)], r"the axes \(1, 0\) cannot take"),
        (
            ops.slice(axis=0, start=1, stop=9),
            [real(3)],
            r"1:9 takes nothing, or too much, of an axis of size 3",
        ),
        (ops.slice(axis=2, start=0), [real(3)], r"a value of shape \(3,\) has no axis 2"),
        (
            ops.slice(axis=0, start=0, stop=2, size=4),
            [real(3)],
            r"made for an axis of size 4, and axis 0 has 3",
        ),
        (ops.concat(sizes=(1, 2)), [real(2), real(2)], r"made for the sizes \(1, 2\), .* have \(2, 2\)"),
        (ops.sum(of=(2, 2)), [real(2, 3)], r"made for an input of shape \(2, 2\) .* has \(2, 3\)"),
        (ops.reshape((6,), of=(6, 1)), [real(2, 3)], r"this reshape was made for"),
        (ops.embedding, [real(3), integers(2, below=2)], r"a table of shape \(rows, d\), and got \(3,\)"),
        (ops.embedding(size=4), [real(3, 2), integers(2, below=2)], r"a table of shape \(4, d\)"),
        (ops.embedding, [real(3, 2), np.array([3])], r"indices of embedding lie between 0 and 2"),
        (ops.embedding, [real(3, 2), np.array([-1])], r"between 0 and 2, and these between -1 and -1"),
        (ops.embedding, [real(3, 2), real(2)], r"indices of embedding are integers, and these are float64"),
        (ops.cross_entropy, [real(2, 3), integers(3, below=2)], r"have targets of shape \(2,\), not \(3,\)"),
        (ops.cross_entropy, [real(2, 3), np.array([0, 3])], r"targets of cross_entropy lie between 0 and 2"),
    ],
)
def test_values_that_do_not_fit(op: ops.Op, values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op(*values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.scale(ARRAY), r"`ops\.scale` takes a number .* ndarray is no number.*`ops\.mul`"),
        (lambda: ops.reshape(ARRAY), r"`ops\.reshape` takes a tuple of integers .* ndarray is none"),
        (lambda: ops.expand(ARRAY), r"`ops\.expand` takes a tuple"),
        (lambda: ops.sum(axis="rows"), r"the axis of `ops\.sum` is a number, several, or None"),
        (lambda: ops.softmax(dim=0), r"some of its parameters axis, by name; it got 0 values and dim"),
        (lambda: ops.softmax(real(2), axis=0), r"1 values and axis.*`rule = ops\.softmax\(axis=\.\.\.\)`"),
        (lambda: ops.mul(axis=0), r"`mul` was called with axis; it takes values only: it has no parameters"),
        (lambda: ops.scale(2)(factor=3), r"since its parameters \(factor\) are already given"),
    ],
)
def test_parameters_that_do_not_fit(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()


def test_a_slice_that_cannot_be_is_refused_when_it_is_made_if_the_size_is_known() -> None:
    with pytest.raises(ValueError, match="slice 2:9 takes nothing, or too much, of an axis of size 4"):
        ops.slice(axis=0, start=2, stop=9, size=4)


@pytest.mark.parametrize("make", [ops.slice, ops.expand, ops.reshape, ops.scale])
def test_an_op_whose_parameters_were_forgotten_does_not_pass_as_a_rule(make: Any) -> None:
    g = cw.Graph()
    g.source("x", real(3))

    def use() -> None:
        g.node("y", make, ["x"])
        cw.World(g).demand("y")

    with pytest.raises((GraphError, OpError)):
        use()


# These pass a gradient on as it is, or times a number: what reads no shape cannot check one.
PASSED_ON = {(op, place) for op in ("identity", "neg", "scale", "add", "sub", "total") for place in range(4)}
PASSED_ON.add(("bias_add", 0))


@every_case
def test_the_seed_of_a_loss_that_is_no_number_is_refused_where_a_shape_is_known(
    op: ops.Op, values: list[Any]
) -> None:
    wrong = 1.0 if np.ndim(op(*values)) else np.ones(2)
    for place in range(len(values)):
        if op.vjps[place] is not None and (op.name, place) not in PASSED_ON:
            with pytest.raises(ValueError, match=r"shape|single number"):
                pulled(op, values, place, wrong)


def test_a_vjp_reads_only_what_there_is() -> None:
    with pytest.raises(
        GradientError, match=r"cannot read 'input'\. It reads GRADIENT, OUTPUT, or the number"
    ):
        ops.Vjp(lambda g: g, ("input",))  # type: ignore[arg-type]
    with pytest.raises(GradientError, match="cannot read -1"):
        ops.Vjp(lambda g: g, (-1,))
    with pytest.raises(
        GradientError, match=r"reads 2 values \(gradient, 0\), and its function does not take"
    ):
        ops.Vjp(lambda g: g, (ops.GRADIENT, 0))
