"""A captured program as plain data: one record per operation, inputs first.

A record's arguments are a template: `Ref` stands for another value of the program, `SizeRef`
for a size that depends on the shapes of a run's inputs, all else stands for itself.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from conewise.program.sizes import Size, SizeTable, dim_along

SIZES = "$sizes"
"""The name of the source that holds a run's sizes: the tuple that `SizeTable.of` returns."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of a source or of an earlier record."""

    name: str


@dataclass(frozen=True, slots=True)
class SizeRef:
    """Entry `index` of a run's sizes."""

    index: int


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: the path it was called by (the root's is empty) and how many calls went before.

    All calls of the module count, by whatever path, as a hook on it would count them.
    """

    path: str
    call: int = 0

    def __str__(self) -> str:
        return f"{self.path}#{self.call}" if self.call else self.path


@dataclass(frozen=True, slots=True)
class Record:
    """One operation: `target(*args, **kwargs)` once every reference is replaced by its value.

    `modules` are the calls it was made under, outermost first. `shape`, `dtype` and `device` are those
    of its value, None when the value is not a tensor; a size that varies from run to run is a
    symbolic expression. `inputs` are the names that a rule takes, in order: each name once, and
    `SIZES` last where a size is used. `op` is the operation's bare name: `linear`, `add`, `getitem`.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    modules: tuple[ModuleCall, ...] = ()
    shape: tuple[Size, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    inputs: tuple[str, ...] = field(init=False)
    op: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        leaves = list(self.leaves())
        names = dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Ref))
        if any(isinstance(leaf, SizeRef) for leaf in leaves):
            names[SIZES] = None
        packet = getattr(self.target, "overloadpacket", None)
        op = str(getattr(packet or self.target, "__name__", type(self.target).__name__))
        object.__setattr__(self, "inputs", tuple(names))
        object.__setattr__(self, "op", op)

    def leaves(self) -> Iterator[Any]:
        """The leaves of the argument template, positional ones first."""
        yield from _leaves(self.args)
        yield from _leaves(tuple(self.kwargs.values()))


@dataclass(frozen=True, slots=True)
class Source:
    """A leaf of the program: a parameter, a buffer or a constant, with its value.

    The value is the module's own tensor, `requires_grad` included, because kernels are chosen by
    it (`matmul` folds a batch when the smaller operand wants a gradient). Records are therefore
    computed under `torch.no_grad()`. `aliases` are the other names of the same tensor (tied
    weights).
    """

    name: str
    value: torch.Tensor
    is_parameter: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a run must give: its name, shape (symbolic where it may vary) and dtype."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def has_positions(self) -> bool:
        """True if dimension 1 looks like positions: token ids and masks, or embeddings."""
        return len(self.shape) == (3 if self.dtype.is_floating_point else 2)


@dataclass(frozen=True, slots=True)
class ModulePort:
    """The inputs and outputs of one call of a module, as names of the program.

    `inputs` stand in the order of first use, `outputs` in the order of computation. Parameters
    are not inputs. A module that hands a value through unchanged (dropout in eval mode) has it
    on both sides. `paths` are all paths of the module. `hidden` says why no value of the program stands
    for what comes out, where that reaches the outputs; empty where one does, or where nothing reaches them.
    """

    call: ModuleCall
    type_name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    paths: tuple[str, ...] = ()
    hidden: str = ""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The symbols of the batch and of positions among the sizes of the inputs.

    `is_unbatched`: the inputs are one prompt, without a batch. `doubt` says why it is not known which
    dimension is the batch; where it is empty and no symbol is the batch's, the batch is fixed, and is
    dimension 0.
    """

    batch: frozenset[str] = frozenset()
    positions: frozenset[str] = frozenset()
    is_unbatched: bool = False
    doubt: str = ""


class LazySpec:
    """The structure of the outputs of a program from the cache; what it is made of is imported when needed.

    transformers has a class for the outputs of each kind of model, and importing one takes a second.
    """

    def __init__(self, shown: str, text: str) -> None:
        self._shown, self.text = shown, text

    def __str__(self) -> str:
        return self._shown

    def __reduce__(self) -> tuple[Any, ...]:
        return LazySpec, (self._shown, self.text)

    @cached_property
    def fields(self) -> tuple[str, ...] | None:
        """The names of the fields, each of them one value; None where the outputs are something else."""
        outer = json.loads(self.text)[1]
        if not _is_output(outer["type"]) or any(
            child["type"] is not None for child in outer["children_spec"]
        ):
            return None
        return tuple(map(str, json.loads(outer["context"])))

    @cached_property
    def spec(self) -> pytree.TreeSpec:
        """The structure itself."""
        waiting = [json.loads(self.text)[1]]
        for one in waiting:
            waiting.extend(one["children_spec"])
            if _is_output(one["type"]):
                importlib.import_module(one["type"].rpartition(".")[0])
        return pytree.treespec_loads(self.text)


def _is_output(kind: str | None) -> bool:
    """True for the name of a class that transformers registers with torch where it is imported."""
    return kind is not None and kind.startswith("transformers.")


Spec: TypeAlias = pytree.TreeSpec | LazySpec


@dataclass(frozen=True, eq=False)
class Program:
    """A module's forward pass, functional: no record writes to a value it did not make.

    Invariants: each record stands after all that it refers to; names are unique over sources,
    inputs and records; `outputs` are the leaves of `output_spec`, a `Ref` for each computed one.
    `written` are the sources that the module itself writes to whenever it runs, as a counter of calls is.
    `dimensions` says what the sizes of its inputs mean.

    The indices are made once, when they are first used: `record_of`, `order`, `readers`, `varying`,
    `devices`, `shapes`, `distinct_shapes`, `batch_dims`, `pos_dims`, `dtypes`, `parts`, `several`,
    `source_values`, `source_shapes`, `numbered_outputs`.
    """

    records: tuple[Record, ...]
    sources: tuple[Source, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Any, ...]
    output_spec: Spec
    sizes: SizeTable
    ports: tuple[ModulePort, ...]
    module_name: str
    written: tuple[str, ...] = ()
    dimensions: Dimensions = Dimensions()

    def __getstate__(self) -> dict[str, Any]:
        """The fields: a copy makes indices of its own records."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def record_of(self) -> Mapping[str, Record]:
        """The records by name, inputs first."""
        return MappingProxyType({record.name: record for record in self.records})

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The index of each record, by its name."""
        return MappingProxyType({record.name: index for index, record in enumerate(self.records)})

    @cached_property
    def readers(self) -> Mapping[str, tuple[Record, ...]]:
        """The records that read each value, in order; none for a value that nobody reads."""
        names = [SIZES, *(s.name for s in self.sources), *(i.name for i in self.inputs), *self.record_of]
        found: dict[str, list[Record]] = {name: [] for name in names}
        for record in self.records:
            for name in record.inputs:
                found[name].append(record)
        return MappingProxyType({name: tuple(records) for name, records in found.items()})

    @cached_property
    def varying(self) -> frozenset[str]:
        """The inputs, and the records whose values depend on them beyond their shapes."""
        found = {leaf.name for leaf in self.inputs}
        for record in self.records:
            if not found.isdisjoint(record.inputs):
                found.add(record.name)
        return frozenset(found)

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of what depends on the inputs: several where the weights are spread over several."""
        found = (record.device for record in self.records if record.name in self.varying)
        return tuple(dict.fromkeys(device for device in found if device is not None))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[Size, ...] | None]:
        """The shape of each input and record, symbolic where it varies; None where it is not one tensor."""
        inputs: dict[str, tuple[Size, ...] | None] = {leaf.name: leaf.shape for leaf in self.inputs}
        return MappingProxyType(inputs | {record.name: record.shape for record in self.records})

    @cached_property
    def distinct_shapes(self) -> tuple[tuple[tuple[Size, ...] | None, ...], Mapping[str, int]]:
        """The shapes that there are, each once, and the number of each input's and record's own.

        A model of many layers has few: what is asked of a shape is asked once, and not of every value.
        """
        numbers: dict[tuple[Size, ...] | None, int] = {}
        own = {name: numbers.setdefault(shape, len(numbers)) for name, shape in self.shapes.items()}
        return tuple(numbers), MappingProxyType(own)

    @cached_property
    def batch_dims(self) -> Mapping[str, int | None]:
        """The dimension of each input and record that holds the batch."""
        return self._dims_along(self.dimensions.batch)

    @cached_property
    def pos_dims(self) -> Mapping[str, int | None]:
        """The dimension of each input and record that holds positions."""
        return self._dims_along(self.dimensions.positions)

    def _dims_along(self, symbols: frozenset[str]) -> Mapping[str, int | None]:
        shapes, own = self.distinct_shapes
        dims = [dim_along(shape, symbols) for shape in shapes]
        return MappingProxyType({name: dims[number] for name, number in own.items()})

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype | None]:
        """The dtype of each input and record; None where it is not one tensor."""
        inputs: dict[str, torch.dtype | None] = {leaf.name: leaf.dtype for leaf in self.inputs}
        return MappingProxyType(inputs | {record.name: record.dtype for record in self.records})

    @cached_property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Of each record whose value is several tensors: the records that take one of them out."""
        found: dict[str, list[str]] = {}
        for record in self.records:
            if record.op == "getitem":
                found.setdefault(record.inputs[0], []).append(record.name)
        return MappingProxyType({name: tuple(parts) for name, parts in found.items()})

    @cached_property
    def several(self) -> frozenset[str]:
        """The records whose values are several tensors, or none."""
        return frozenset(record.name for record in self.records if record.shape is None)

    @cached_property
    def source_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the sources by name."""
        return MappingProxyType({source.name: tuple(source.value.shape) for source in self.sources})

    @cached_property
    def source_values(self) -> Mapping[str, torch.Tensor]:
        """The values of the sources by name: parameters, buffers and constants."""
        return MappingProxyType({source.name: source.value for source in self.sources})

    def returned(self, leaves: Sequence[Any]) -> Any:
        """What the module returns, made of the leaves of its outputs."""
        spec = self.output_spec
        return pytree.tree_unflatten(leaves, spec.spec if isinstance(spec, LazySpec) else spec)

    @cached_property
    def numbered_outputs(self) -> Any:
        """The outputs with the number of each leaf in its place; a dictionary may stand for their class."""
        spec, numbers = self.output_spec, list(range(len(self.outputs)))
        if isinstance(spec, LazySpec) and spec.fields is not None:
            return dict(zip(spec.fields, numbers, strict=True))
        return self.returned(numbers)

    def symbols_of(self, given: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The value of each symbol when the inputs have the `given` shapes; see `SizeTable.symbols_of`."""
        return self.sizes.symbols_of({leaf.name: leaf.shape for leaf in self.inputs}, given)

    def check(self) -> None:
        """Assert the invariants."""
        leaves = [SIZES, *(s.name for s in self.sources), *(i.name for i in self.inputs)]
        known = set(leaves)
        assert len(known) == len(leaves), leaves
        for record in self.records:
            assert record.name not in known, record.name
            assert known.issuperset(record.inputs), record
            known.add(record.name)
        assert all(out.name in known for out in self.outputs if isinstance(out, Ref))


def filled(template: Any, leaf: Callable[[Any], Any]) -> Any:
    """An argument template with `leaf(one)` in place of each of its leaves."""
    match template:
        case tuple():
            return tuple([filled(one, leaf) for one in template])
        case list():
            return [filled(one, leaf) for one in template]
        case dict():
            return {key: filled(one, leaf) for key, one in template.items()}
        case slice():
            bounds = (template.start, template.stop, template.step)
            return slice(*(filled(bound, leaf) for bound in bounds))
        case _:
            return leaf(template)


def _leaves(template: Any) -> Iterator[Any]:
    if isinstance(template, tuple | list):
        for item in template:
            yield from _leaves(item)
    elif isinstance(template, dict):
        yield from _leaves(tuple(template.values()))
    elif isinstance(template, slice):
        yield from _leaves((template.start, template.stop, template.step))
    else:
        yield template


# -- one element, one row, one dimension -------------------------------------------------------

POINTWISE = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "exp", "log", "square",
        "reciprocal", "abs", "sign", "floor", "ceil", "round", "clamp", "clamp_min", "clamp_max",
        "minimum", "maximum", "gelu", "silu", "relu", "tanh", "sigmoid", "softplus", "elu", "leaky_relu",
        "hardtanh", "mish", "erf", "sin", "cos", "where", "masked_fill", "eq", "ne", "lt", "le", "gt",
        "ge", "__and__", "__or__", "logical_and", "logical_or", "logical_not", "bitwise_and",
        "bitwise_or", "bitwise_not", "to", "_to_copy", "type_as", "contiguous", "clone", "alias",
        "detach", "lift_fresh_copy",
    }
)  # fmt: skip
"""Each element of the value is made of the elements in its place alone, operands broadcast."""

ELEMENTWISE = POINTWISE | {
    "multiply", "divide", "floor_divide", "remainder", "float", "copy", "relu6", "selu", "celu", "hardswish",
    "hardsigmoid", "prelu", "log_sigmoid", "softsign", "threshold",
}  # fmt: skip
"""The pointwise operations and their rarer spellings, which torch tags as pointwise or not."""

ADDITIONS = frozenset({"add", "sub", "rsub"})
SCALINGS = frozenset({"mul", "div", "multiply"})
NORMS = frozenset({"layer_norm", "rms_norm"})
PROBABILITIES = frozenset({"softmax", "_softmax"})
SOFTMAX = PROBABILITIES | {"log_softmax", "_log_softmax"}
TRIANGLES = frozenset({"tril", "triu"})
REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "logsumexp"})
STATISTICS = REDUCTIONS | {"var", "std", "linalg_vector_norm", "norm"}
"""The reductions, and those that norms are written with."""

CHOICES = frozenset({"topk", "argmax", "max"})
"""Operations by which a router chooses experts."""

ALONG_ONE_DIMENSION = SOFTMAX | CHOICES | {"sort", "argsort", "cumsum", "argmin", "min"}
"""Operations that mix the entries along one dimension, the last one unless they say another."""

# -- products ----------------------------------------------------------------------------------

PLAIN_PRODUCTS = frozenset({"linear", "mm", "matmul", "bmm"})
BIASED_PRODUCTS = frozenset({"addmm", "baddbmm"})
"""Products whose first argument is what is added; the factors come behind it."""

PRODUCTS = PLAIN_PRODUCTS | BIASED_PRODUCTS
CONTRACTIONS = PRODUCTS | {"einsum"}
CONVOLUTIONS = frozenset(
    {"conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d"}
)
RECURRENT = frozenset({"gru", "lstm", "rnn_tanh", "rnn_relu"})
ATTENTION = "scaled_dot_product_attention"

# -- other forms of the same numbers -----------------------------------------------------------

CASTS = frozenset({"to", "_to_copy"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
PERMUTATIONS = frozenset({"transpose", "permute", "t", "numpy_T", "mT", "swapaxes"})
"""The same dimensions in another order."""

DIMENSION_MOVES = frozenset({"transpose", "permute", "t", "unsqueeze", "squeeze", "expand"})
"""Operations that permute dimensions, add or drop one of size 1, or broadcast along it."""

COPIES = frozenset({"contiguous", "clone"})
REARRANGEMENTS = RESHAPES | PERMUTATIONS | DIMENSION_MOVES | COPIES | {"expand_as", "movedim"}
"""Operations that move values without mixing or dropping any."""

NUMBER_KEEPING = REARRANGEMENTS | CASTS | {"type_as", "float"}
"""Operations that return the numbers that they are given, rearranged or in another precision."""

TOKEN_KEEPING = frozenset(
    {"view", "reshape", "_to_copy", "to", "clone", "alias", "detach", "contiguous", "unsqueeze"}
)
"""Operations between token ids and the embedding that looks them up, which leave the ids in their order."""

# -- parts, and parts put together -------------------------------------------------------------

SPLITS = frozenset({"split", "split_with_sizes", "chunk"})
SLICES = frozenset({"slice", "select", "narrow"})
SELECTIONS = SPLITS | SLICES | {"unbind", "getitem", "tensor_split", "index", "index_select"}
"""Operations that take a part of a value."""

LOOKUPS = frozenset({"index", "index_select", "gather", "embedding"})
"""Operations that take rows by number."""

CONCATENATIONS = frozenset({"cat", "concat", "concatenate"})
PADS = frozenset({"pad", "constant_pad_nd"})
COUNTS = frozenset({"histc", "bincount"})
DISPATCHES = frozenset(
    {
        "index", "index_select", "index_put", "index_add", "gather", "scatter", "scatter_add", "one_hot",
        "repeat", "repeat_interleave", "zeros_like", "empty_like", "full_like", "ones_like", "new_zeros",
        "new_empty", "new_ones", "sum", "stack",
    }
)  # fmt: skip
"""Operations that hand rows to experts, in the order that a router chose, and put them back."""

AXIS_KEEPING = SPLITS | PADS | {"slice", "narrow", "cat", "getitem", "index", "index_select"}
"""Operations after which a dimension of another length is still the axis that it was."""

# -- what they do with memory, and with sums ---------------------------------------------------

ALLOCATING = PRODUCTS | NORMS | SOFTMAX | REDUCTIONS | {"embedding", "cat"}
"""Operations whose values are newly allocated, and contiguous."""

MAYBE_ALIASING = frozenset({"to", "_to_copy", "type_as", "contiguous", "alias", "detach", "lift_fresh_copy"})
"""Pointwise operations that may return an alias of what they read."""

LINEAR = NUMBER_KEEPING | SELECTIONS | CONCATENATIONS | {"add", "sub", "neg", "sum", "mean", "stack", "copy"}
"""Operations that are linear in what varies; `mul` and `div` are where one operand does not vary."""
