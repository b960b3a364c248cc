"""From a module and an example to the program that `torch.export` sees.

The batch may vary, and the number of positions too where the module allows it. The
module is read, never written: no hook, buffer or attribute is added to it.
"""

from __future__ import annotations

import inspect
import io
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from conewise.anatomy.dimensions import find_dimensions
from conewise.anatomy.placements import Outputs
from conewise.anatomy.wiring import ModulePaths
from conewise.errors import CaptureError, ControlFlowError, describe
from conewise.program.calls import (
    Call,
    Signature,
    hugging_face_defaults,
    normal_call,
)
from conewise.program.lowering import lower
from conewise.program.records import Program, Ref
from conewise.program.streaming import standing_in
from conewise.program.tensors import largest_difference
from conewise.program.untraced import Untraced, traced, untraced
from conewise.program.walk import bitwise_same, output_names, run_sources, stream
from conewise.reactive.graph import Graph
from conewise.threads import one_module


def expect_values(module: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
    """Raise CaptureError where weights have no values, though the inputs have."""
    inputs = list(inputs)
    held = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers()])
    for value in inputs:
        if value.layout is not torch.strided or value.is_nested:
            raise CaptureError(f"the example holds {describe(value)}, {value.layout}; give a dense tensor.")
        if value.is_meta and held and not any(tensor.is_meta for tensor in held.values()):
            device = str(next(iter(held.values())).device)
            raise CaptureError(
                f"the inputs of {type(module).__name__} lie on meta, and its weights on {device}: they have "
                f"no values. Move them: `inputs.to({device!r})`, or give others."
            )
    if all(value.is_meta for value in inputs):
        return
    missing = [name for name, tensor in held.items() if tensor.is_meta]
    if not missing:
        return
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    shown = ", ".join(map(repr, missing[:3])) + more
    raise CaptureError(
        f"{len(missing)} of the {len(held)} weights of {type(module).__name__} have no values: {shown} lie "
        "on the meta device. Nothing was loaded into them. Load the model whole (`device_map='cpu'`, "
        "`device_map='cuda'`), or let it stream: `cw.load(folder, weights='stream')`, or a `device_map` by "
        "which accelerate offloads what does not fit."
    )


def expect_plain(module: nn.Module) -> None:
    """Raise CaptureError where weights are spread over processes, or packed so that nothing shows them.

    Weights that wrap others, as those that torchao quantised, are computed with as they are.
    """
    name = type(module).__name__
    for path, one in module.named_parameters():
        if type(one).__name__ == "DTensor":
            raise CaptureError(
                f"the weight {path!r} of {name} is a DTensor: a part of it lies in each "
                "of several processes. A graph holds whole weights: load the model in one process, with "
                "`device_map` where it takes several devices."
            )
    for path, part in module.named_modules():
        if type(part).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise CaptureError(
                f"{path!r} of {name} is a {type(part).__module__}.{type(part).__qualname__}: torch.ao packs "
                "its weights into an object that shows neither numbers nor operations, and torch.export does "
                "not trace it. Capture the model before it is quantised, or quantise it with torchao, whose "
                "weights are tensors."
            )


def expect_one_device(module: nn.Module, inputs: Sequence[torch.Tensor], failure: BaseException) -> None:
    """Raise CaptureError where a capture failed, and inputs lie where no weight does."""
    weights = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    given = {value.device for value in inputs}
    if not weights or not given or given <= weights:
        return
    (first, *others) = sorted(map(str, weights))
    where = ", ".join([first, *others])
    raise CaptureError(
        f"the inputs of {type(module).__name__} lie on {', '.join(sorted(map(str, given)))}, and its weights "
        f"on {where}. Nothing is moved silently: give inputs on the device of the weights, as in "
        f"`inputs.to({first!r})`, or move the module. torch.export says: {failure}"
    ) from failure


@dataclass(frozen=True)
class Sampler:
    """Draws calls like the captured one: other values, and other sizes where the capture allows them.

    Floats are drawn at random, token ids from the vocabulary where the module has one, an attention mask
    hides the end of some rows; other integers are drawn from the values of the example.
    """

    signature: Signature
    program: Program
    module: Any

    @property
    def batch(self) -> int:
        """The number of prompts of the captured example."""
        named = self.signature.example.leaves()[0]
        inputs = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        return Outputs(self.program).prompts(inputs)

    @property
    def length_is_fixed(self) -> bool:
        """True if an input has positions, as token ids do, and their number cannot vary."""
        return any(leaf.has_positions and isinstance(leaf.shape[1], int) for leaf in self.program.inputs)

    def draw(self, seed: int, *, batch: int | None = None, length: int | None = None) -> Call:
        """A random call, with this batch and length where those may vary."""
        generator = torch.Generator().manual_seed(seed % 2**64)
        known = self.program.dimensions
        wanted = dict.fromkeys(known.batch, batch) | dict.fromkeys(known.positions, length)
        examples = dict(self.signature.example.leaves()[0])
        sizes, symbols = self.program.sizes, dict[str, int]()
        for symbol, (name, dim) in sizes.symbols.items():
            size = wanted.get(symbol)
            symbols[symbol] = int(examples[name].shape[dim]) if size is None else size
        shapes = {i.name: [sizes.value(n, symbols) for n in i.shape] for i in self.program.inputs}

        def drawn(name: str, value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return self._drawn(name, value, shapes.get(name, value.shape), generator) if is_tensor else value

        return self.signature.example.mapped(drawn)

    def _drawn(
        self, name: str, value: torch.Tensor, shape: Sequence[int], generator: torch.Generator
    ) -> torch.Tensor:
        if value.is_floating_point():
            return torch.randn(shape, generator=generator).to(value)
        if name.endswith("attention_mask") and len(shape) == 2:
            return _right_padding(shape, generator).to(value)
        vocabulary = getattr(getattr(self.module, "config", None), "vocab_size", None)
        if name.endswith("input_ids") and isinstance(vocabulary, int):
            return torch.randint(0, vocabulary, shape, generator=generator).to(value)
        flat = value.reshape(-1)
        picks = torch.randint(0, len(flat), shape, generator=generator)
        return flat[picks.to(value.device)]

    def alone(self, call: Call, row: int) -> tuple[Call, int | None]:
        """One row of the batch alone, without its padding; and how many positions are left, if cut.

        The padding goes only where every input that has positions has them under one size.
        """
        length = self._real_length(call, row)
        known = self.program.dimensions
        shapes = {i.name: i.shape for i in self.program.inputs}

        def pick(name: str, value: Any) -> Any:
            for dim, size in enumerate(shapes.get(name, ())):
                if str(size) in known.batch:
                    value = value.narrow(dim, row, 1)
                if length is not None and str(size) in known.positions:
                    value = value.narrow(dim, 0, length)
            return value

        return call.mapped(pick), length

    def _real_length(self, call: Call, row: int) -> int | None:
        masks = [v for n, v in call.leaves()[0] if n.endswith("attention_mask") and v is not None]
        if len(masks) != 1 or masks[0].ndim != 2 or len(self.program.dimensions.positions) != 1:
            return None
        return int(masks[0][row].sum())


def module_leaves(module: nn.Module, program: Program, call: Call) -> list[torch.Tensor]:
    """The tensors that the module itself returns for a call, in order."""
    with one_module(), torch.no_grad():
        return tensor_leaves(called(module, program, call))


def called(module: nn.Module, program: Program, call: Call) -> Any:
    """The outputs of a program's module for a call; its own tensors that it writes to stay as they are."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())} if program.written else {}
    own = {name: tensors[name].detach().clone() for name in program.written if name in tensors}
    if not own:
        return module(*call.args, **call.kwargs)
    return functional_call(module, own, call.args, dict(call.kwargs))


def tensor_leaves(outputs: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in order."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _right_padding(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """1 for what counts. The first half of a row always does: a row must have something to attend to."""
    rows, length = shape
    lengths = torch.randint((length + 1) // 2, length + 1, (rows, 1), generator=generator)
    return (torch.arange(length) < lengths).long()


@dataclass(frozen=True)
class Exported:
    """A captured module: its program, and how to call it.

    `fixed` says why the batch cannot vary, and is empty when it can. `reasons` say where the module
    itself may compute otherwise than the program, as far as that was seen; see `untraced`.
    """

    program: Program
    signature: Signature
    fixed: str
    reasons: tuple[str, ...] = ()


def unwrapped(module: Any) -> Any:
    """The module inside `DataParallel`, `DistributedDataParallel` and `torch.compile`; else what was given.

    Their weights are its own, and what they compute is what it computes.
    """
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif type(module).__name__ == "OptimizedModule" and "_orig_mod" in getattr(module, "_modules", {}):
            module = module._modules["_orig_mod"]
        else:
            return module


@contextmanager
def eager(module: nn.Module) -> Iterator[None]:
    """Let compiled parts of a module run as they were written: compiled code does not see hooks."""
    is_compiled = any(
        vars(part).get("_compiled_call_impl") is not None or type(part).__name__ == "OptimizedModule"
        for part in module.modules()
    )
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        yield


def export(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    last_position_only: bool = False,
    batch_dim: int | None = None,
    varying: Any = None,
) -> Exported:
    """Capture `module` as it computes for an example like `args` and `kwargs`.

    `batch_dim` is the dimension of the inputs along which prompts lie; None leaves that to be found.
    `varying` are the dimensions that may vary, as `torch.export` takes them, where they are known: then what
    they mean is not looked for.
    Raises ControlFlowError where what is computed depends on the values of tensors,
    RandomnessError where random numbers are drawn (dropout in training mode), and CaptureError
    with torch's reason otherwise.
    """
    expect_plain(module)
    expect_values(module, tensor_leaves((tuple(args), dict(kwargs or {}))))
    forward = inspect.signature(module.forward)
    defaults = hugging_face_defaults(module, forward, last_position_only=last_position_only)
    call = distinct(normal_call(forward, args, {**defaults, **(kwargs or {})}))
    name = type(module).__name__
    reasons: list[str] = []
    paths = ModulePaths(module)
    attempts = _attempts(forward, call, batch_dim) if varying is None else [(call, varying, False, False)]
    for example, shapes, is_shared, keeps_open in attempts:
        for answering in (untraced, traced):
            answers = Untraced()
            try:
                with answering(answers), paths.counting(), standing_in(module) as streamed:
                    exported = _torch_export(module, example, shapes)
            except Exception as error:  # torch.export raises whatever the module raises
                if answers.used:
                    continue  # once more, as it is when it is traced
                if reason := _data_dependence(error):
                    raise ControlFlowError(name, reason) from error
                reasons.append(f"{type(error).__name__}: {error}")
                failure = error
                break
            program = _with_streamed(lower(exported, example, name, paths), streamed)
            if (is_shared and _takes_two_for_one(program)) or (keeps_open and not _is_open(program)):
                break
            if varying is not None:
                return Exported(program, Signature(forward, call), "", answers.reasons)
            given = {leaf: value for leaf, value in example.leaves()[0] if isinstance(value, torch.Tensor)}
            program = replace(program, dimensions=find_dimensions(program, given, module, batch_dim))
            fixed = _why_fixed(program, reasons)
            return Exported(program, Signature(forward, call), fixed, answers.reasons)
    expect_one_device(module, tensor_leaves((call.args, dict(call.kwargs))), failure)
    raise CaptureError(
        f"torch.export cannot capture {name}. It says: {reasons[-1]}\n"
        "Check that `module(*args, **kwargs)` runs with this example; if it does, capture the "
        "submodule that torch.export accepts, or rewrite what it names."
    ) from failure


def _with_streamed(program: Program, streamed: Mapping[int, Any]) -> Program:
    """The program with the streamed weights in place of what stood for them in the trace."""
    sources = [replace(one, value=streamed.get(id(one.value), one.value)) for one in program.sources]
    return replace(program, sources=tuple(sources))


def _why_fixed(program: Program, reasons: Sequence[str]) -> str:
    """Why the batch cannot vary; empty when it can."""
    dimensions = program.dimensions
    if dimensions.batch:
        return ""
    if dimensions.doubt:
        return dimensions.doubt
    if dimensions.is_unbatched:
        return "the inputs are one prompt, without a batch"
    return reasons[-1] if reasons else "the module's own computation fixes the batch of its inputs"


def _attempts(
    forward: inspect.Signature, call: Call, batch_dim: int | None = None
) -> Iterator[tuple[Call, Any, bool, bool]]:
    """Examples with their dynamic dimensions, the most general first; None is fully static.

    The third says whether all leading sizes that are equal in the example are taken for one; the fourth that
    the attempt is to be left for the next where a size was fixed on the way.
    """
    tensors = [leaf for _, leaf in call.leaves()[0] if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if tensors:
        # An input of one dimension beside others may be positions: its size need not be the batch's. Nor need
        # that of a square one, which may be a mask.
        wide = [tensor for tensor in tensors if tensor.ndim > 1] or tensors
        wide = [tensor for tensor in wide if not _is_square(tensor)] or wide
        is_one = all(tensor.shape[0] == 1 for tensor in wide)
        batch, rank = max(2, wide[0].shape[0]), min(tensor.ndim for tensor in wide)
        # Some versions of torch refuse a batch of any size where they find out by themselves that it may
        # vary. A fixed size of 1 beside it would be taken for what it is not.
        ways = [
            (Dim("batch"), True),
            (Dim.AUTO, True),
            (Dim("batch"), False),
            (Dim.AUTO, True),
            (Dim.AUTO, False),
        ]
        for number, (leading, sequence) in enumerate(ways):
            grown = _without_ones(call, is_one, sequence)
            vary = _Varying(batch, rank, leading, sequence, batch_dim)
            yield grown, vary.shapes(forward, grown), leading is not Dim.AUTO, number == 1
    yield call, None, False, False


def _is_open(program: Program) -> bool:
    """True if no leading size of an input was fixed, nor one that looks like positions."""
    return all(
        not isinstance(leaf.shape[dim], int)
        for leaf in program.inputs
        for dim in range(min(len(leaf.shape), 2 if leaf.has_positions else 1))
    )


def _is_square(tensor: torch.Tensor) -> bool:
    return tensor.ndim > 1 and tensor.shape[-2] == tensor.shape[-1]


def distinct(call: Call) -> Call:
    """The example with a copy of every tensor: `torch.export` takes one tensor, given twice, for one."""
    return call.mapped(lambda _, value: value.detach().clone() if isinstance(value, torch.Tensor) else value)


def _without_ones(call: Call, repeat_batch: bool, repeat_sequence: bool) -> Call:
    """The example with dimensions of size 1 repeated: `torch.export` would take 1 for a constant."""

    def repeat(_: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if repeat_batch and value.shape[0] == 1:
            value = value.repeat(2, *[1] * (value.ndim - 1))
        if repeat_sequence and _has_sequence(value) and value.shape[1] == 1:
            value = value.repeat(1, 2, *[1] * (value.ndim - 2))
        return value

    return call.mapped(repeat)


def _has_sequence(tensor: torch.Tensor) -> bool:
    """True if dimension 1 looks like positions: token ids and masks, or embeddings."""
    if tensor.is_floating_point():
        return tensor.ndim == 3
    return tensor.ndim == 2


@dataclass(frozen=True, slots=True)
class _Varying:
    """The sizes that may vary: the `batch` that leads inputs of `rank` dimensions or more, and lengths.

    What else leads an input may vary where the module allows it, and so may dimension `given`.
    """

    batch: int
    rank: int
    leading: Any
    sequence: bool
    given: int | None

    def shapes(self, forward: inspect.Signature, call: Call) -> Any:
        """As `torch.export` takes them, by argument."""
        bound = forward.bind(*call.args, **call.kwargs)
        return tree_map(self._dims, dict(bound.arguments))

    def _dims(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        dynamic: dict[int, Any] = {}
        if value.ndim >= self.rank and value.shape[0] == self.batch:
            dynamic[0] = self.leading
        elif value.ndim:
            dynamic[0] = Dim.AUTO
        if self.sequence and _has_sequence(value):
            dynamic[1] = Dim.AUTO
        if isinstance(self.given, int) and 0 < self.given < value.ndim:
            dynamic[self.given] = Dim.AUTO
        return dynamic


def _takes_two_for_one(program: Program) -> bool:
    """True if each size that leads an input is also another dimension of one.

    With as many prompts as positions in the example, a mask [pos, pos] makes one size of the two.
    """
    varying = [[str(size) for size in leaf.shape if not isinstance(size, int)] for leaf in program.inputs]
    twice = {size for sizes in varying for size in sizes if sizes.count(size) > 1}
    leading = {str(leaf.shape[0]) for leaf in program.inputs if len(leaf.shape) > 1}
    return bool(leading) and leading <= twice


def _torch_export(module: nn.Module, call: Call, shapes: Any) -> ExportedProgram:
    with torch.no_grad(), _quiet(), _attributes_kept(module):
        return torch.export.export(module, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=False)


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Take back what `forward` does to attributes in a trace, which would leave tensors without values."""
    held = [(vars(part), {**vars(part)}) for part in module.modules()]
    values = (value for _, before in held for value in before.values())
    filled = [(value, copy(value)) for value in values if type(value) in (list, dict, set)]
    try:
        yield
    finally:
        for now, before in held:
            for name in [name for name in now if name not in before]:
                del now[name]
            now.update(before)
        for value, before in filled:
            if _identities(value) == _identities(before):
                continue
            value.clear()
            add = value.extend if isinstance(value, list) else value.update
            add(before)


def _identities(value: list[Any] | dict[Any, Any] | set[Any]) -> list[int]:
    """The identities of the objects that a container holds, in order."""
    held = [*value, *value.values()] if isinstance(value, dict) else value
    return list(map(id, held))


def _data_dependence(error: BaseException) -> str:
    """Torch's reason, in a line or two, when `error` speaks of data-dependent control flow."""
    seen: BaseException | None = error
    while seen is not None:
        kind, text = type(seen).__name__, str(seen)
        if "DataDependent" in kind or "data-dependent" in text or "Could not guard on" in text:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return " ".join(lines[:2])
        seen = seen.__cause__ or seen.__context__
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch logs and prints about an attempt that fails out of the user's terminal."""
    logger = logging.getLogger("torch")
    level = logger.level
    printed = io.StringIO()
    try:
        logger.setLevel(logging.CRITICAL)
        with redirect_stderr(printed):
            yield
        if sys.stderr is not None:
            sys.stderr.write(printed.getvalue())
    finally:
        try:
            logger.setLevel(level)
        except BaseException:  # interrupted: once more, for the user's own logs would be gone
            logger.setLevel(level)
            raise


# -- the captured computation, compared with the module's own -----------------------------------

FUSED = (
    "torch's own attention layers run in one kernel, which shows nothing inside, unless they are traced or "
    "hooked; after `torch.backends.mha.set_fastpath_enabled(False)` they run as they were captured"
)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """True if a captured model computes what its module does, to the last bit.

    `deviation` is the largest difference between an output of the graph and the module's own, on the
    example of the capture; `relative` is the same, of the largest output. `reasons` say where the module
    computes otherwise than the graph, as far as that is known; they may concern other inputs than the
    example. `unmeasured` says why the two were not compared, and is empty where they were.
    """

    deviation: float = 0.0
    relative: float = 0.0
    bitwise: bool = True
    reasons: tuple[str, ...] = ()
    unmeasured: str = ""

    def __str__(self) -> str:
        if self.unmeasured:
            return f"not compared with the module ({self.unmeasured})"
        if self.bitwise:
            return "equal to the module bit for bit on the example"
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return (
            f"not equal to the module bit for bit: up to {self.deviation:.2g} apart on the example, "
            f"{self.relative:.2g} of the largest output{why}"
        )


def compare(module: nn.Module, exported: Exported, graph: Graph) -> Fidelity:
    """Run the module and the graph on the example; nothing is left on the module, its buffers included."""
    program, reasons = exported.program, exported.reasons
    call = distinct(exported.signature.example)
    if any(leaf.device.type == "meta" for leaf in program.inputs):
        return Fidelity(bitwise=False, reasons=reasons, unmeasured="there are no values on the meta device")
    try:
        with torch.no_grad():
            sources = run_sources(program, exported.signature.bind(call.args, call.kwargs))
            values = stream(graph, sources, output_names(program))
            theirs = _outputs(module, program, call)
    except Exception as error:  # noqa: BLE001  # a module raises whatever it likes; the capture stands
        return Fidelity(bitwise=False, reasons=reasons, unmeasured=f"{type(error).__name__}: {error}")
    ours = [values[out.name] for out in program.outputs if isinstance(out, Ref)]
    if bitwise_same(ours, theirs):
        return Fidelity(reasons=reasons)
    _expect_repeatable(program.module_name, theirs, _outputs(module, program, call))
    if _is_fused(module):
        with _unfused():
            reasons += (FUSED,) if bitwise_same(ours, _outputs(module, program, call)) else ()
    pairs = zip(ours, theirs, strict=False)
    apart = [
        (largest_difference(one, other), largest_difference(other, torch.zeros_like(other)))
        for one, other in pairs
    ]
    deviation = max((far for far, _ in apart), default=math.inf)
    scale = max((size for _, size in apart), default=0.0)
    return Fidelity(deviation, deviation / scale if scale else deviation, False, reasons)


def _expect_repeatable(name: str, first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    """Raise CaptureError where two runs on the same example are further apart than kernels' rounding."""
    for one, other in zip(first, second, strict=False):
        if not one.dtype.is_floating_point or one.shape != other.shape:
            is_apart = not bitwise_same(one, other)
        else:
            far, size = largest_difference(one, other), largest_difference(one, torch.zeros_like(one))
            is_apart = far > size * math.sqrt(torch.finfo(one.dtype).eps)
        if is_apart:
            raise CaptureError(
                f"{name} computes something else each time that it runs, on the same example: it draws "
                "random numbers, counts, or reads a clock. A graph computes the same each time: give what "
                "varies as an input."
            )


@torch.no_grad()
def _outputs(module: nn.Module, program: Program, call: Call) -> list[torch.Tensor]:
    """The tensors that the module returns; it gets copies of all that it might write to."""
    return tensor_leaves(called(module, program, distinct(call)))


def _is_fused(module: nn.Module) -> bool:
    """True if the module has layers that torch may run in one kernel."""
    layers = nn.MultiheadAttention, nn.TransformerEncoderLayer
    is_on: bool = torch.backends.mha.get_fastpath_enabled()
    return is_on and any(isinstance(one, layers) for one in module.modules())


@contextmanager
def _unfused() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
