"""`python -m benchmarks.split_products`: float32 products in bfloat16 parts on a CUDA device; torch alone.

Times products of the shapes of a sweep in float32, in TF32, in bfloat16 and in parts, splitting included,
and measures their errors against float64. Then it finds which blocks are
best, and from how many rows on parts are faster, beside what `split_pays` predicts. `--quick` leaves out the
largest shapes.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conewise.program import split_products
from conewise.program.split_products import (
    LEFT,
    SplitWeight,
    split,
    split_by_operations,
    split_product,
    split_weight,
)
from conewise.program.tensors import multiplying
from conewise.sweeps.planning.costs import split_pays

DEVICE = torch.device("cuda")
WIDTHS = [(768, 768), (768, 3072), (3072, 768), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 16384)]
ROWS = [20 * 156, 128 * 408]
SEEN = 512
"""Of how many rows errors are measured."""


def milliseconds(action: Callable[[], Any], rounds: int = 9) -> float:
    """The median time on the device, of calls that are queued one behind the other."""
    for _ in range(3):
        action()
    times = []
    for _ in range(rounds):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        action()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return statistics.median(times)


def parts_of(weight: Tensor) -> SplitWeight:
    found = split_weight(weight)
    assert found is not None
    return found


def tf32(value: Tensor, weight: Tensor) -> Tensor:
    with multiplying("tf32"):
        return torch.mm(value, weight)


def error(found: Tensor, exact: Tensor) -> dict[str, float]:
    apart = found[:SEEN].double() - exact
    return {
        "rms": float(apart.square().mean().sqrt() / exact.square().mean().sqrt()),
        "largest": float(apart.abs().max() / exact.abs().max()),
    }


def measure(rows: int, inner: int, columns: int, *, linear: bool) -> dict[str, Any]:
    """One shape. With `linear` the weight lies as in a Linear, [columns, inner]; else as in a Conv1D."""
    torch.manual_seed(0)
    value = torch.randn(rows, inner, device=DEVICE)
    weight = torch.randn((columns, inner) if linear else (inner, columns), device=DEVICE) / inner**0.5
    weight = weight.t() if linear else weight
    exact = value[:SEEN].double() @ weight.double()
    parts = parts_of(weight)
    ways: dict[str, Callable[[], Tensor]] = {
        "float32": lambda: torch.mm(value, weight),
        "tf32": lambda: tf32(value, weight),
        "parts": lambda: split_product(value, parts),
    }
    halves = value.bfloat16(), weight.bfloat16()
    work = 2 * rows * inner * columns / 1e9
    row: dict[str, Any] = {"rows": rows, "inner": inner, "columns": columns, "linear": linear}
    for name, way in ways.items():
        taken = milliseconds(way)
        row[name] = {"ms": round(taken, 3), "tflops": round(work / taken, 1), **error(way(), exact)}
    row["bfloat16_tflops"] = round(work / milliseconds(lambda: torch.mm(*halves)), 1)
    block = value[: max(1, split_products.BLOCK // inner)]
    for name, way_to_split in {"": split, "_by_operations": split_by_operations}.items():
        row[f"splitting{name}_ms"] = round(milliseconds(lambda way=way_to_split: way(block, LEFT)), 3)  # type: ignore[misc]
    row["faster"] = round(row["float32"]["ms"] / row["parts"]["ms"], 2)
    row["error_over_float32"] = round(row["parts"]["rms"] / row["float32"]["rms"], 2)
    row["predicted"] = split_pays(rows, inner, columns)
    return row


def break_even(inner: int, columns: int) -> dict[str, Any]:
    """From how many rows on parts are faster, rows doubled each time; None where they never are."""
    torch.manual_seed(0)
    weight = torch.randn(columns, inner, device=DEVICE).t()
    parts, found, ratios = parts_of(weight), None, {}
    for exponent in range(8, 17):
        value = torch.randn(2**exponent, inner, device=DEVICE)
        plain = milliseconds(lambda value=value: torch.mm(value, weight))  # type: ignore[misc]
        own = milliseconds(lambda value=value: split_product(value, parts))  # type: ignore[misc]
        ratios[2**exponent] = round(plain / own, 2)
        found = found or (2**exponent if plain > own else None)
    predicted = next((2**e for e in range(8, 17) if split_pays(2**e, inner, columns)), None)
    return {
        "inner": inner,
        "columns": columns,
        "pays_from": found,
        "predicted_from": predicted,
        "faster": ratios,
    }


def by_block(rows: int, inner: int, columns: int) -> dict[str, Any]:
    """How fast parts are where fewer or more rows are multiplied at a time: fewer stay in the cache."""
    torch.manual_seed(0)
    value, weight = torch.randn(rows, inner, device=DEVICE), torch.randn(columns, inner, device=DEVICE).t()
    found: dict[str, Any] = {"rows": rows, "inner": inner, "columns": columns}
    found["float32_ms"] = round(milliseconds(lambda: torch.mm(value, weight)), 3)
    before = split_products.BLOCK
    try:
        parts = parts_of(weight)
        for exponent in range(21, 28):
            split_products.BLOCK = 1 << exponent
            found[f"2^{exponent}"] = round(milliseconds(lambda: split_product(value, parts)), 3)
    finally:
        split_products.BLOCK = before
    return found


def same_in_a_graph() -> bool:
    """Whether a product that was captured as a CUDA graph gives the same, for new values too."""
    value, weight = torch.randn(4096, 1024, device=DEVICE), torch.randn(1024, 1024, device=DEVICE)
    parts, other = parts_of(weight), torch.randn(4096, 1024, device=DEVICE)
    split_product(value, parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = split_product(value, parts)
    value.copy_(other)
    graph.replay()
    return torch.equal(out, split_product(other, parts))


def main() -> None:
    quick = "--quick" in sys.argv
    fused = split_products._fused(DEVICE) is not None
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "split_by_one_kernel": fused,
        "same_in_a_graph": same_in_a_graph(),
    }
    print(json.dumps(facts), flush=True)
    for rows in ROWS:
        for inner, columns in WIDTHS:
            if quick and rows * columns > 1 << 28:
                continue
            print(json.dumps(measure(rows, inner, columns, linear=True)), flush=True)
    print(json.dumps(measure(ROWS[0], 768, 3072, linear=False)), flush=True)
    for inner, columns in WIDTHS[3:6]:
        print(json.dumps(by_block(ROWS[1], inner, columns)), flush=True)
    for inner, columns in WIDTHS[:-1]:
        print(json.dumps(break_even(inner, columns)), flush=True)


if __name__ == "__main__":
    main()
