"""`python -m benchmarks.sweeps`: sweeps on the CPU, against the ways people write them and against peers.

Peers take part where they are installed (`make bench-sweeps` installs them). Contenders take turns, and all
answers are compared. Where a contender is too slow to run in full, a stated sample of its sites is timed and
scaled.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from benchmarks.cases import Case, random_pair
from benchmarks.harness import Line, at_least, print_table

CPU = torch.device("cpu")
ROUNDS = 2


def best_of(
    actions: dict[str, tuple[Callable[[], torch.Tensor], float]],
) -> tuple[dict[str, float], dict[str, Any]]:
    """The least seconds of each contender, scaled; and its answers."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    answers: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for name, (action, scale) in actions.items():
            gc.collect()
            start = time.perf_counter()
            answers[name] = action()
            times[name].append((time.perf_counter() - start) * scale)
    return {name: min(series) for name, series in times.items()}, answers


def expect_equal(answers: dict[str, Any], reference: str, sampled: dict[str, list[int]]) -> float:
    """The largest deviation from the reference, relative to its largest value; must be rounding."""
    truth = answers[reference].double()
    worst = 0.0
    for name, answer in answers.items():
        expected = truth[sampled[name]] if name in sampled else truth
        worst = max(worst, float((answer.double() - expected).abs().max() / truth.abs().max()))
    assert worst < 1e-4, {name: answer[:4] for name, answer in answers.items()}
    return worst


def gpt2_heads_and_mlps() -> list[Line]:
    torch.manual_seed(0)
    case = Case(
        GPT2LMHeadModel(GPT2Config()),
        "transformer.h.{}.attn.c_proj",
        "transformer.h.{}.mlp",
        *random_pair(50257, 20, CPU),
    )
    sites = case.all_sites()
    every = list(range(0, len(sites), 6))
    part = [sites[i] for i in every]
    scale = len(sites) / len(part)
    sweep = case.sweep()
    start = time.perf_counter()
    plan = sweep.plan()
    planning = time.perf_counter() - start
    actions: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
        "wavefront": (lambda: sweep.run(evaluator="wavefront", progress=False).table[0], 1.0),
        "hooked, all logits": (lambda: case.hooked(part, all_logits=True), scale),
        "hooked, last logits": (lambda: case.hooked(part), scale),
    }
    for chunk in (26, 52, 156):
        actions[f"hand-batched by {chunk}"] = (lambda chunk=chunk: case.batched(chunk), 1.0)
    if importlib.util.find_spec("transformer_lens"):
        from benchmarks.peers import TransformerLens

        actions["TransformerLens"] = (TransformerLens(case).run, 1.0)
    if importlib.util.find_spec("nnsight"):
        from benchmarks.peers import NNsight

        nnsight = NNsight(case)
        actions["nnsight, a trace for each site"] = (lambda: nnsight.one_by_one(part), scale)
        for chunk in (26, 52, 156):
            for last in (False, True):
                name = f"nnsight, {chunk} invokes{', last logits' if last else ''}"
                actions[name] = (lambda chunk=chunk, last=last: nnsight.invoked(chunk, last=last), 1.0)
    times, answers = best_of(actions)
    sampled = {name: every for name, (_, factor) in actions.items() if factor != 1.0}
    worst = expect_equal(answers, "hand-batched by 156", sampled)
    ours = times["wavefront"]
    by_hand = min(seconds for name, seconds in times.items() if name.startswith("hand-batched"))
    print(f"GPT-2 small, T=20, {len(sites)} sites; largest deviation {worst:.1e} of the largest value")
    for name, seconds in times.items():
        note = f" (every 6th site, scaled by {scale:g})" if name in sampled else ""
        print(f"  {name:<34} {seconds:7.2f} s{note}")
    lines = [
        at_least(
            "GPT-2 small: one hooked forward for each site / ours", times["hooked, all logits"] / ours, 8
        ),
        at_least(
            "GPT-2 small: the same, last position's logits / ours", times["hooked, last logits"] / ours, 6
        ),
        at_least("GPT-2 small: hand-batched, best chunk / ours", by_hand / ours, 1.9),
    ]
    if "TransformerLens" in times:
        lines.append(
            at_least("GPT-2 small: TransformerLens's helpers / ours", times["TransformerLens"] / ours, 9)
        )
    if "nnsight, a trace for each site" in times:
        ways = {name: seconds for name, seconds in times.items() if name.startswith("nnsight")}
        told = min(seconds for name, seconds in ways.items() if "last logits" in name)
        best = min(seconds for name, seconds in ways.items() if "last logits" not in name)
        note = f"{told / ours:.2f}x where the model is told to compute the last position's logits only"
        lines.append(at_least("GPT-2 small: nnsight, its best documented way / ours", best / ours, 2.7, note))
    share = planning / ours
    lines.append(
        Line(
            "GPT-2 small: planning, of the run",
            "<= 5 %",
            f"{share:.1%}",
            share <= 0.05,
            f"{plan.worlds} worlds",
        )
    )
    return lines


def heads_by_position() -> Line:
    """Every head at every position: 2,160 cells, which a demo of TransformerLens skips as too slow."""
    torch.manual_seed(0)
    clean, corrupted = random_pair(50257, 15, CPU)
    case = Case(
        GPT2LMHeadModel(GPT2Config()),
        "transformer.h.{}.attn.c_proj",
        "transformer.h.{}.mlp",
        clean,
        corrupted,
    )
    sweep = case.model.sweep(
        cw.sites("z", layer=":", head=":", pos=":"), base=case.base, source=case.source, metric=case.metric
    )
    cells = [(layer, head, pos) for layer in range(12) for head in range(12) for pos in range(15)]
    every = list(range(0, len(cells), 90))
    scale = len(cells) / len(every)
    width = case.module.config.hidden_size // case.heads

    def hooked() -> torch.Tensor:
        found = []
        for layer, head, pos in (cells[i] for i in every):
            clean_z = case.source["z", layer].flatten(2)
            part = slice(head * width, (head + 1) * width)

            def pre(_: Any, args: Any, pos: int = pos, part: slice = part, clean_z: Any = clean_z) -> Any:
                value = args[0].clone()
                value[:, pos, part] = clean_z[:, pos, part]
                return (value, *args[1:])

            handle = case.module.get_submodule(case.projection.format(layer)).register_forward_pre_hook(pre)
            with torch.no_grad():
                found.append(
                    case.difference(
                        case.module(input_ids=case.corrupted, use_cache=False, logits_to_keep=1).logits
                    )
                )
            handle.remove()
        return torch.cat(found)

    times, answers = best_of(
        {
            "wavefront": (lambda: sweep.run(evaluator="wavefront", progress=False).table[0], 1.0),
            "hooked": (hooked, scale),
        }
    )
    deviation = float((answers["wavefront"][every] - answers["hooked"].double()).abs().max())
    assert deviation < 1e-4 * float(answers["hooked"].abs().max()), deviation
    note = f"{times['hooked']:.0f} s (every 90th cell, scaled) against {times['wavefront']:.1f} s"
    return at_least(
        "GPT-2 shape: heads by position, 2,160 cells: hooked / ours",
        times["hooked"] / times["wavefront"],
        8,
        note,
    )


def smollm2() -> Line:
    """One IOI pair on SmolLM2: 270 heads and 30 MLPs."""
    loaded = cw.load("smollm2-135m")
    tokens = loaded.tokenizer
    clean = tokens(
        "When Mary and John went to the store, John gave a drink to", return_tensors="pt"
    ).input_ids
    corrupted = tokens(
        "When Mary and John went to the store, Mary gave a drink to", return_tensors="pt"
    ).input_ids
    answer, wrong = (tokens(name).input_ids[0] for name in (" Mary", " John"))
    case = Case(
        loaded.module,
        "model.layers.{}.self_attn.o_proj",
        "model.layers.{}.mlp",
        clean,
        corrupted,
        answer=answer,
        wrong=wrong,
    )
    sites = case.all_sites()
    every = list(range(0, len(sites), 6))
    sweep = case.sweep()
    times, answers = best_of(
        {
            "wavefront": (lambda: sweep.run(evaluator="wavefront", progress=False).table[0], 1.0),
            "hooked": (lambda: case.hooked([sites[i] for i in every]), len(sites) / len(every)),
        }
    )
    deviation = float((answers["wavefront"][every] - answers["hooked"].double()).abs().max())
    assert deviation < 1e-4 * float(answers["hooked"].abs().max()), deviation
    note = f"{times['hooked']:.1f} s (every 6th site, scaled) against {times['wavefront']:.2f} s"
    return at_least(
        "SmolLM2, one IOI pair, 300 sites: hooked / ours", times["hooked"] / times["wavefront"], 8, note
    )


def main() -> None:
    chosen = sys.argv[1:] or ["gpt2", "positions", "smollm2"]
    lines: list[Line] = []
    if "gpt2" in chosen:
        lines += gpt2_heads_and_mlps()
    if "smollm2" in chosen:
        lines.append(smollm2())
    if "positions" in chosen:
        lines.append(heads_by_position())
    print_table(f"Sweeps on the CPU, {torch.get_num_threads()} threads, torch {torch.__version__}", lines)


if __name__ == "__main__":
    main()
