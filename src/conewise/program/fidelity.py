"""Comparison of the captured computation with the module's own: both are run on the example, once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from conewise.errors import CaptureError
from conewise.program.calls import Call
from conewise.program.export import Exported, called, distinct, tensor_leaves
from conewise.program.records import Program, Ref
from conewise.program.tensors import largest_difference
from conewise.program.walk import bitwise_same, output_names, run_sources, stream
from conewise.reactive.graph import Graph

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
