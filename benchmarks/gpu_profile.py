"""`python -m benchmarks.gpu_profile [rows]`: the short look at a CUDA device, in two minutes.

Rows: `pair` (GPT-2 small, a new pair by two runs and a sweep, by inputs, by hand), `run` (one run beside one
forward of the module), `long` and `deep` (T=64; 24 layers), `attribution` (AtP and EAP, the first time and
again, beside those by hand), `edges` (all edges of GPT-2 small in float32, in parts, in TF32), `kernels`
(what the device does in one sweep and in one pass over edges). Prompts are new in every round, contenders
take turns, medians count, and answers are compared. `--smoke` takes tiny models, on any device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import conewise as cw
from benchmarks import attribution as by_gradients
from benchmarks.by_hand import GPT2_PATHS, Pair
from benchmarks.gpu_pairs import (
    DEVICE,
    IS_CUDA,
    REAL,
    SMOKE,
    Scale,
    Scene,
    Turns,
    best_by_hand,
    gpt2,
    machine,
    milliseconds,
)

ROUNDS = 9


def from_runs(scene: Scene, pair: Pair) -> Any:
    """The five lines of the README: two runs, then a sweep."""
    base = scene.model.run(input_ids=pair.base)
    source = scene.model.run(input_ids=pair.source)
    metric = cw.logit_diff(answer=pair.answer, wrong=pair.wrong)
    sweep = scene.model.sweep(scene.selector, base=base, source=source, metric=metric)
    return sweep.run(progress=False)


def show(what: str, times: dict[str, float], note: str = "") -> None:
    """One line: milliseconds of each, and each as a multiple of the first."""
    first = next(iter(times.values()))
    shown = "  ".join(f"{name} {taken:.2f} ms ({taken / first:.2f}x)" for name, taken in times.items())
    print(f"{what:<14}{shown}{'  ' + note if note else ''}", flush=True)


def medians(ways: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median milliseconds of each; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(3):
            way()
    gc.collect()
    gc.disable()
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(milliseconds(ways[name])[0])
    gc.enable()
    return {name: statistics.median(one) for name, one in times.items()}


def pair_row(what: str, scene: Scene, *, runs: bool = True) -> None:
    """A new pair by inputs, by two runs, and by the best batches by hand."""
    ways: dict[str, Callable[[Pair], Any]] = {"inputs": scene.ours}
    if runs:
        ways["two runs"] = lambda pair: from_runs(scene, pair)
    first = {name: milliseconds(lambda way=way: way(scene.pair()))[0] for name, way in ways.items()}
    for way in ways.values():
        for _ in range(3):
            way(scene.pair())
    ways |= best_by_hand(scene, count=1, tries=2)
    turns = Turns().take(ways, scene.pairs(ROUNDS), list(ways)[-1])
    hand = turns.median(turns.best("by hand"))
    gains = ", ".join(f"{name} {hand / turns.median(name):.2f}x by hand" for name in ways if name in first)
    deviation = max(turns.deviation.values())
    note = f"{gains}; first {', '.join(f'{one:.0f}' for one in first.values())} ms; apart {deviation:.1e}"
    show(what, {name: turns.median(name) for name in ways}, note)


def run_row(scale: Scale) -> None:
    """One run, and two, beside the module's own forward."""
    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length)
    held: list[Any] = []

    def forward() -> Any:
        with torch.no_grad():
            return scene.module(input_ids=scene.pair().base, use_cache=False, logits_to_keep=1).logits

    def run() -> None:
        held[:] = [scene.model.run(input_ids=scene.pair().base).logits]

    def both() -> None:
        held[:] = [scene.model.run(input_ids=scene.pair().base).logits for _ in range(2)]

    pair = scene.pair()
    ours = scene.model.run(input_ids=pair.base).outputs.logits
    with torch.no_grad():
        theirs = scene.module(input_ids=pair.base, use_cache=False, logits_to_keep=1).logits
    is_same = "equal bit for bit" if torch.equal(ours, theirs) else "not equal bit for bit"
    show("run", medians({"forward": forward, "run": run, "two runs": both}), is_same)


def attribution_row(scale: Scale) -> None:
    """AtP and EAP: the first of their shape, again, and by hand; host seconds are the processor's."""
    module = gpt2(scale.small)
    ids = [torch.randint(0, scale.small["vocabulary"], (1, scale.length), device=DEVICE) for _ in range(2)]
    model = cw.capture(module, input_ids=ids[0])
    sites = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
    edges = model.edges()
    asked: dict[str, Any] = {
        "base": {"input_ids": ids[0]},
        "source": {"input_ids": ids[1]},
        "metric": cw.logit_diff(by_gradients.ANSWER, by_gradients.WRONG),
    }
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "atp": (
            by_gradients.ByHand(module, *ids).values,
            lambda: model.attribute(sites, **asked).run().effect,
        ),
        "eap": (
            by_gradients.EdgesByHand(module, *ids).values,
            lambda: model.attribute(edges, **asked, method="eap").run().effect,
        ),
    }
    two = by_gradients.ByHand(module, *ids).values
    for name, (by_hand, ours) in ways.items():
        expected = by_hand().cpu()
        first, found = milliseconds(ours)
        deviation = float((found.float() - expected).abs().max() / expected.abs().max())
        started = time.process_time()
        ours()
        host = (time.process_time() - started) * 1e3
        both = {"by hand": by_hand, "ours": ours} | (
            {"two forwards, a backward": two} if name == "eap" else {}
        )
        note = f"first {first:.0f} ms, processor {host:.1f} ms; apart {deviation:.1e}"
        show(name, medians(both), note)


def edges_row(scale: Scale) -> None:
    """All edges of GPT-2 small for a new pair, in three precisions."""
    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length)
    scene.selector = scene.model.edges()
    pair, found = scene.pair(), {}
    shown: dict[str, float] = {}
    for precision in (None, "split", "tf32") if IS_CUDA else (None,):
        for _ in range(2):
            scene.ours(scene.pair(), precision=precision)
        shown[precision or "float32"] = min(
            milliseconds(lambda precision=precision: scene.ours(scene.pair(), precision=precision))[0]
            for _ in range(2)
        )
        found[precision or "float32"] = scene.ours(pair, precision=precision).values
    truth = found["float32"]
    apart = {name: float((one - truth).abs().max() / truth.abs().max()) for name, one in found.items()}
    show(f"{len(scene.selector)} edges", shown, f"apart {', '.join(f'{one:.1e}' for one in apart.values())}")


def kernels_row(scale: Scale) -> None:
    """The kernels of one sweep and of all edges."""
    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if IS_CUDA:
        activities = [torch.profiler.ProfilerActivity.CUDA]
    for what, selector in (("one sweep", scene.selector), ("all edges", scene.model.edges())):
        scene.selector = selector
        for _ in range(3):
            scene.ours(scene.pair())
        pair = scene.pair()
        with torch.profiler.profile(activities=activities) as traced:
            taken, _ = milliseconds(lambda pair=pair: scene.ours(pair))
        averages = traced.key_averages()
        by = "self_device_time_total" if IS_CUDA else "self_cpu_time_total"
        rows = sorted(averages, key=lambda one: getattr(one, by), reverse=True)
        total = sum(getattr(one, by) for one in rows) / 1e3
        print(f"{what}: {taken:.2f} ms under the profiler, {total:.2f} ms of kernels and copies")
        for one in rows[:14]:
            spent = getattr(one, by) / 1e3
            print(f"  {spent:8.2f} ms {spent / total:6.1%} {one.count:6d}  {one.key[:90]}")


ROWS: dict[str, Callable[[Scale], None]] = {
    "pair": lambda scale: pair_row("pair", Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length)),
    "run": run_row,
    "long": lambda scale: pair_row("T=64", Scene(gpt2(scale.small), GPT2_PATHS, length=scale.prompts)),
    "deep": lambda scale: pair_row(
        "24 layers",
        Scene(gpt2({**scale.small, "layers": 2 * scale.small["layers"]}), GPT2_PATHS, length=scale.length),
    ),
    "attribution": attribution_row,
    "edges": edges_row,
    "kernels": kernels_row,
}


def main() -> None:
    """Measure the rows that are asked for, all unless named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    print(machine(), flush=True)
    for name in options.rows or ROWS:
        started = time.perf_counter()
        try:
            ROWS[name](SMOKE if options.smoke else REAL)
        except Exception as error:  # noqa: BLE001  # the other rows go on
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        gc.collect()
        print(f"    ({name}: {time.perf_counter() - started:.1f} s in all)", flush=True)


if __name__ == "__main__":
    main()
