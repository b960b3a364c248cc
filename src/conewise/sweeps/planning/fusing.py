"""Chains of operations that one kernel computes: found in the program, used where nothing looks inside.

GELU is often written out as eight pointwise operations, each of which reads and writes the widest values of
the model. On a stack of worlds they are one, equal up to rounding. On CUDA so are norms and rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conewise.program.records import Program, Record, Ref
from conewise.program.walk import Rule

Tensor = torch.Tensor
CUBE, SCALE = 0.044715, 0.7978845608028654  # of the tanh approximation: √(2/π)
HALVES = (torch.bfloat16, torch.float16)
CASTS = frozenset({"to", "_to_copy", "type_as", "float"})
"""The operations that give the numbers that they read first, in another precision."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """`node` from `inputs` by one `rule`, without the nodes `inside`."""

    node: str
    inside: frozenset[str]
    inputs: tuple[str, ...]
    rule: Rule


def find_fusions(program: Program, device: torch.device) -> tuple[Fusion, ...]:
    """The chains of a program that one kernel of a device can compute, whatever reads them."""
    finder = _Finder(program)
    chains = [finder.gelu, *([finder.norm_or_rotation] if device.type == "cuda" else [])]
    found = [fusion for chain in chains for record in program.records if (fusion := chain(record))]
    return tuple(one for one in found if len(program.devices) < 2 or _fits(one, program, device))


def _fits(fusion: Fusion, program: Program, device: torch.device) -> bool:
    """True if a chain is computed on one device, of the kind that it was looked for on."""
    where = {record.name: record.device for record in program.records}
    where |= {leaf.name: leaf.device for leaf in program.inputs}
    where |= {name: value.device for name, value in program.source_values.items()}
    (own, *others) = {where[name] for name in (fusion.node, *fusion.inside, *fusion.inputs)}
    return not others and own is not None and own.type == device.type


def fitting(
    fusions: Iterable[Fusion],
    steps: Mapping[str, Any],
    kept: Collection[str],
    readers: Callable[[str], Iterable[str]],
) -> dict[str, Fusion]:
    """Those that some steps (node: all that says how it is computed) can use, by the node that they compute.

    Nodes of `kept` are looked at. What is inside of a fusion is computed just as its last node is, and
    nothing else reads it.
    """
    fit = {}
    for fusion in fusions:
        how = steps.get(fusion.node)
        if how is None:
            continue
        alone = all(
            steps.get(node) == how
            and node not in kept
            and all(one == fusion.node or one in fusion.inside or one not in steps for one in readers(node))
            for node in fusion.inside
        )
        if alone:
            fit[fusion.node] = fusion
    return fit


# ------------------------------------------------------------------------------------------
# Chains as patterns: operations over operations, values that they read, and numbers.


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a chain reads: the same wherever it has this name. With a `dtype`, in that precision."""

    name: str
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """A number, which is bound to a name."""

    name: str


class Op:
    """An operation of these arguments; sums and products have theirs in either order."""

    def __init__(self, op: str, *args: Any, dtype: torch.dtype | None = None) -> None:
        self.op, self.args, self.dtype = op, args, dtype


def cast(dtype: torch.dtype, value: Any) -> Op:
    """A value in another precision."""
    return Op("cast", value, dtype=dtype)


X, COS, SIN, WEIGHT = Value("x"), Value("cos"), Value("sin"), "weight"

# ½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))
_CUBED = Op("add", X, Op("mul", Op("pow", X, 3.0), CUBE))
GELU = Op("mul", Op("mul", X, 0.5), Op("add", Op("tanh", Op("mul", _CUBED, SCALE)), 1.0))

# x · cos + (−x₂, x₁) · sin, where x₁ and x₂ are the halves of x. Five kernels that read and write whole
# values become three, two of which do half of one. In half precision they round less: a product is not
# rounded before it is added.
_PARTS = [Op("slice", X, *(Number(f"{what}{half}") for what in ("dim", "start", "stop"))) for half in (1, 2)]
_TURNED = Op("cat", [Op("neg", _PARTS[0]), _PARTS[1]], Number("dim"))
ROTATION = Op("add", Op("mul", X, COS), Op("mul", _TURNED, SIN))


def norms(dtype: torch.dtype) -> list[Op]:
    """Root-mean-square norms x / √(mean(x²) + ε) over the last dimension, with weights or without.

    In half precision they are written with casts, and the norm itself is in float32. The kernel casts inside.
    It rounds once where the chain may round twice, before it is scaled by the weights and behind that.
    """
    single, x, weight = torch.float32, Value("x", dtype), Value(WEIGHT, dtype)

    def norm(value: Any, squared: Any) -> Op:
        mean = Op("mean", Op("pow", squared, 2), [-1], True)
        return Op("mul", value, Op("rsqrt", Op("add", mean, Number("epsilon"))), dtype=single)

    if dtype == single:
        of_cast = norm(Value("below"), x)  # cast for the mean alone; the product casts it too
        return [Op("mul", weight, norm(x, x)), Op("mul", weight, of_cast), norm(x, x)]
    own = [norm(cast(single, x), cast(single, x)), norm(x, cast(single, x))]
    down = [cast(dtype, one) for one in own]
    return [
        *(cast(dtype, Op("mul", weight, one, dtype=single)) for one in own),
        *down,
        *(Op("mul", weight, one) for one in down),
    ]


Bound = Mapping[Any, Any]
"""What a pattern was found to be: numbers and names of values, by their names in it."""


class _Finder:
    """Finds chains in a program, by the record that ends one."""

    def __init__(self, program: Program) -> None:
        self._records = program.record_of
        # Vectors that a norm may be scaled by: weights, and what is made of them alone.
        sources = {one.name: one.value for one in program.sources}
        self._vectors = {name: len(value) for name, value in sources.items() if value.dim() == 1}
        for record in program.records:
            if record.shape is not None and len(record.shape) == 1 and record.name not in program.varying:
                self._vectors[record.name] = record.shape[0]
        self._dtypes = {**program.dtypes, **{name: value.dtype for name, value in sources.items()}}
        self._norms = {dtype: norms(dtype) for dtype in (torch.float32, *HALVES)}

    def gelu(self, record: Record) -> Fusion | None:
        """The GELU whose last record this is."""
        for bound, inside in self._found(GELU, record):
            return Fusion(record.name, inside, (bound["x"],), _gelu)
        return None

    def norm_or_rotation(self, record: Record) -> Fusion | None:
        """The norm, or the rotation, whose last record this is."""
        for pattern in self._norms.get(record.dtype, ()) if record.dtype is not None else ():
            for bound, inside in self._found(pattern, record):
                value, weight = bound["x"], bound.get(WEIGHT)
                if weight is None:
                    return Fusion(record.name, inside, (value,), partial(_plain_norm, bound["epsilon"]))
                if self._is_scaled(bound):
                    rule = partial(_weighted_norm, bound["epsilon"])
                    return Fusion(record.name, inside, (value, weight), rule)
        for bound, inside in self._found(ROTATION, record):
            if self._is_rotation(record, bound):
                inputs = bound["x"], bound["cos"], bound["sin"]
                return Fusion(record.name, inside, inputs, partial(_rotated, self._width(bound["x"]) // 2))
        return None

    def _is_scaled(self, bound: Bound) -> bool:
        """True if the weight of a norm is a vector, as wide as the value; and what was cast is that value."""
        value, below = self._records.get(bound["x"]), bound.get("below")
        is_cast = below is None or (value is not None and value.op in CASTS and value.inputs[0] == below)
        is_wide = value is not None and (value.shape or ())[-1:] == (self._vectors.get(bound[WEIGHT]),)
        return is_cast and is_wide

    def _is_rotation(self, record: Record, bound: Bound) -> bool:
        """True if both halves are turned, the value keeps its shape, and the factors are as wide as it is."""
        whole, width = self._records.get(bound["x"]), self._width(bound["x"])
        if whole is None or whole.shape is None or (whole.shape, whole.dtype) != (record.shape, record.dtype):
            return False
        last, half = {-1, len(whole.shape) - 1}, width // 2
        starts, stops = ([bound[f"{one}{n}"] for n in (1, 2)] for one in ("start", "stop"))
        is_halved = starts == [half, 0] and [min(stop, width) for stop in stops] == [width, half]
        is_last = last.issuperset(bound[name] for name in ("dim", "dim1", "dim2"))
        factors = [self._records.get(bound[name]) for name in ("cos", "sin")]
        are_wide = all(
            one is not None and (self._width(one.name), one.dtype) == (width, record.dtype) for one in factors
        )
        return is_halved and is_last and are_wide and bound["cos"] != bound["sin"] and not width % 2

    def _width(self, name: str) -> int:
        """The size of the last dimension; 0 where it is not known."""
        width = ((self._records[name].shape or ()) if name in self._records else ())[-1:]
        return width[0] if width and isinstance(width[0], int) else 0

    def _found(self, pattern: Op, record: Record) -> Iterator[tuple[Bound, frozenset[str]]]:
        """The ways in which a record is a pattern, and the records on the way to it."""
        for bound in self._matched(pattern, Ref(record.name), {}):
            yield bound, frozenset(key[0] for key in bound if isinstance(key, tuple)) - {record.name}

    def _matched(self, pattern: Any, given: Any, bound: Bound) -> Iterator[Bound]:
        """The ways in which an argument is a pattern; records on the way are bound to (name,)."""
        match pattern:
            case Value(name, dtype):
                if not isinstance(given, Ref) or bound.get(name, given.name) != given.name:
                    return
                if dtype is None or self._dtypes.get(given.name) == dtype:
                    yield {**bound, name: given.name}
            case Number(name):
                if isinstance(given, int | float) and not isinstance(given, bool):
                    yield {**bound, name: given}
            case Op():
                record = self._records.get(given.name) if isinstance(given, Ref) else None
                if record is None or (pattern.dtype is not None and record.dtype != pattern.dtype):
                    return
                is_cast = pattern.op == "cast"
                if not (record.op in CASTS if is_cast else record.op == pattern.op and not record.kwargs):
                    return
                own = record.args[:1] if is_cast else record.args
                for args in (own, own[::-1]) if record.op in {"add", "mul"} else (own,):
                    yield from self._all_matched(pattern.args, args, {**bound, (record.name,): record})
            case list():
                if isinstance(given, list | tuple):
                    yield from self._all_matched(pattern, given, bound)
            case _:
                if not isinstance(given, Ref) and given == pattern:
                    yield bound

    def _all_matched(self, patterns: Sequence[Any], given: Sequence[Any], bound: Bound) -> Iterator[Bound]:
        if len(patterns) != len(given):
            return
        if not patterns:
            yield bound
            return
        for one in self._matched(patterns[0], given[0], bound):
            yield from self._all_matched(patterns[1:], given[1:], one)


def _gelu(value: Tensor) -> Tensor:
    return torch.nn.functional.gelu(value, approximate="tanh")


def _weighted_norm(epsilon: float, value: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(value, weight.shape, weight, epsilon)


def _plain_norm(epsilon: float, value: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(value, value.shape[-1:], None, epsilon)


def _rotated(half: int, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = value * cos
    out[..., :half].addcmul_(value[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(value[..., :half], sin[..., half:])
    return out


# ------------------------------------------------------------------------------------------
# Products with a bias.


def product_then_bias(record: Record) -> Rule | None:
    """The rule of a product with a bias; on CUDA the bias of a narrow one is added afterwards."""
    if record.kwargs or len(record.args) != 3 or len(record.inputs) != 3:
        return None
    if record.device is not None and record.device.type != "cuda":
        return _PRODUCTS.get(record.op)
    return {"addmm": _addmm, "linear": _linear}.get(record.op)


_PRODUCTS: dict[str, Rule] = {"addmm": torch.addmm, "linear": torch.nn.functional.linear}


def _addmm(bias: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda or bias.dim() != 1 or not _is_narrow(value, *weight.shape):
        return torch.addmm(bias, value, weight)
    return torch.mm(value, weight).add_(bias)


def _linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda or not _is_narrow(value, weight.shape[1], weight.shape[0]):
        return torch.nn.functional.linear(value, weight, bias)
    return torch.nn.functional.linear(value, weight).add_(bias)


def _is_narrow(value: torch.Tensor, inner: int, columns: int) -> bool:
    """True if a device multiplies faster without a bias: on an H200 up to twice as fast."""
    rows = value.numel() // max(inner, 1)
    return columns <= 1024 and (inner > columns or rows <= 1024)
