"""`python -m benchmarks.gpu_sweeps`: sweeps on a CUDA device, in float32; needs torch and transformers only.

Contenders take turns; answers are compared. A wave is timed eagerly (the first run of a sweep) and replayed
(every run after the second).
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.cases import Case, random_pair
from conewise.sweeps.execution.executors import WavefrontExecution, WavefrontExecutor
from conewise.sweeps.execution.reading import MetricReader
from conewise.sweeps.running import executor_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def milliseconds(action: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def measure(name: str, case: Case, *, against_forwards: bool) -> dict[str, Any]:
    sweep = case.sweep()
    start = time.perf_counter()
    plan = sweep.plan(max_memory="40GiB")
    planning = time.perf_counter() - start
    torch.cuda.synchronize()
    result = sweep.run(evaluator="wavefront", max_memory="40GiB")
    peak = result.ledger.peak_bytes or 0
    row: dict[str, Any] = {
        "case": name,
        "sites": plan.worlds,
        "capture_s": round(case.capture_seconds, 2),
        "planning_ms": round(planning * 1e3, 2),
        "peak_predicted_MiB": round(plan.peak_bytes / 2**20, 1),
        "peak_measured_MiB": round(peak / 2**20, 1),
    }
    batch = sweep.batch(0)
    planned = sweep.plan(max_memory="40GiB", evaluator="wavefront")
    metrics = MetricReader(sweep.facts, sweep.metrics, sweep.spec.tokens)
    executor = executor_for(sweep.model, sweep.spec, planned, batch)
    assert isinstance(executor, WavefrontExecutor)
    assert len(executor.chunks) == 1
    execution, runner = executor.over(batch, metrics), executor.runner(0, batch)
    assert isinstance(execution, WavefrontExecution)
    read, put, columns = execution._read, execution._values, execution._columns

    def eager() -> Any:
        return runner._wavefront.run(runner.program, read, runner.fills, put, columns=columns)

    def replay() -> Any:
        return runner.run(read, put, columns)

    eager()
    replay()
    replay()
    hooked_ms = 0.0
    sample = case.all_sites()
    expected = case.hooked(sample)
    values = result.table[0].to(expected.device)
    row["largest_deviation"] = float((values - expected.double()).abs().max())
    row["largest_value"] = float(expected.abs().max())
    by_hand = case.batched()
    row["hand_batched_deviation"] = float((by_hand.double() - expected.double()).abs().max())
    row["wave_eager_ms"] = round(milliseconds(eager, 7), 2)
    row["wave_replayed_ms"] = round(milliseconds(replay, 15), 2)
    row["sweep_run_again_ms"] = round(
        milliseconds(lambda: sweep.run(evaluator="wavefront", max_memory="40GiB"), 5), 2
    )
    row["hand_batched_ms"] = round(milliseconds(case.batched, 7), 2)
    row |= in_precision(case, expected, "tf32")
    row |= in_precision(case, expected, "split")
    if against_forwards:
        hooked_ms = milliseconds(lambda: case.hooked(sample), 1)
        row["one_forward_per_site_ms"] = round(hooked_ms, 1)
        row["forwards_over_replay"] = round(hooked_ms / row["wave_replayed_ms"], 1)
        row["forwards_over_eager"] = round(hooked_ms / row["wave_eager_ms"], 1)
    row["hand_batched_over_replay"] = round(row["hand_batched_ms"] / row["wave_replayed_ms"], 2)
    row["plan_gflop"] = round(plan.flops / 1e9, 1)
    row["replay_tflops"] = round(plan.flops / row["wave_replayed_ms"] / 1e9, 2)
    return row


def in_precision(case: Case, expected: torch.Tensor, precision: str) -> dict[str, Any]:
    """The same sweep in another precision, and how far it lies from float32."""
    sweep = case.model.sweep(
        case.sites, base=case.base, source=case.source, metric=case.metric, precision=precision
    )

    def run() -> Any:
        return sweep.run(evaluator="wavefront", max_memory="40GiB")

    first = run()
    values = first.table[0].to(expected.device)
    run(), run()
    assert torch.get_float32_matmul_precision() == "highest"
    return {
        f"sweep_run_{precision}_ms": round(milliseconds(run, 5), 2),
        f"{precision}_deviation": float((values - expected.double()).abs().max()),
        f"{precision}_plan": first.plan.why,
        f"{precision}_peak_MiB": [
            None if size is None else round(size / 2**20, 1)
            for size in (first.plan.peak_bytes, first.ledger.peak_bytes)
        ],
    }


def matmul_tflops() -> float:
    left = torch.randn(8192, 8192, device=DEVICE)
    right = torch.randn(8192, 8192, device=DEVICE)
    torch.mm(left, right)
    return 2 * 8192**3 / milliseconds(lambda: torch.mm(left, right), 5) / 1e9


def llama(layers: int, heads: int, width: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=width,
        intermediate_size=(8 * width // 3 + 63) // 64 * 64,
        vocab_size=32000,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    rows: list[dict[str, Any]] = [
        {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "date": datetime.now(UTC).date().isoformat(),
            "matmul_tflops": round(matmul_tflops(), 1),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    ]
    attention, mlp = "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp"
    cases: list[tuple[str, Callable[[], Case], bool]] = [
        (
            "gpt2 small, T=20",
            lambda: Case(
                GPT2LMHeadModel(GPT2Config()),
                "transformer.h.{}.attn.c_proj",
                "transformer.h.{}.mlp",
                *random_pair(50257, 20, DEVICE),
            ),
            True,
        ),
        (
            "llama 12x12x768, T=20",
            lambda: Case(llama(12, 12, 768), attention, mlp, *random_pair(32000, 20, DEVICE)),
            True,
        ),
        (
            "llama 24x16x1024, T=20",
            lambda: Case(llama(24, 16, 1024), attention, mlp, *random_pair(32000, 20, DEVICE)),
            True,
        ),
        (
            "llama 24x16x1024, T=128",
            lambda: Case(llama(24, 16, 1024), attention, mlp, *random_pair(32000, 128, DEVICE)),
            False,
        ),
    ]
    asked = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    for name, make, against in cases:
        if asked and not any(word in name for word in asked):
            continue
        try:
            rows.append(measure(name, make(), against_forwards=against))
        except Exception as error:
            rows.append({"case": name, "error": f"{type(error).__name__}: {error}"})
            if "--strict" in sys.argv:
                raise
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    print(json.dumps(rows[0]), flush=True)


if __name__ == "__main__":
    main()
