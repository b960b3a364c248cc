"""`python -m benchmarks.gpu_pairs [rows]`: what new pairs of prompts cost on a CUDA device, beside hooks.

Needs torch and transformers only; `--peers FOLDER` adds TransformerLens and nnsight, from a folder made by
`make pack-peers`. Every round has prompts and answer tokens of its own; contenders take turns, the median of
the rounds counts, and all answers are compared. A row is one line of JSON, printed when it is measured.

`--profile ROW` shows where the time of one new pair goes instead. `--smoke` takes tiny models, on any device.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import gc
import itertools
import json
import platform
import pstats
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import conewise as cw
from benchmarks.by_hand import GPT2_PATHS, LLAMA_PATHS, ByHand, Pair, Paths, Site
from conewise.errors import SweepError

Tensor = torch.Tensor
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_CUDA = DEVICE.type == "cuda"
MIB = 2**20


@dataclass(frozen=True)
class Scale:
    """How large all is: as measured, or tiny."""

    small: dict[str, int]
    """GPT-2 small: layers, heads, width, vocabulary, positions."""
    middle: dict[str, int]
    large: dict[str, int]
    length: int
    other_length: int
    long: int
    positions: int
    prompts: int
    hooked: int
    rounds: int
    few_rounds: int


REAL = Scale(
    {"layers": 12, "heads": 12, "width": 768, "vocabulary": 50257},
    {"layers": 24, "heads": 16, "kv": 16, "width": 1024, "inner": 2752, "vocabulary": 32000},
    {"layers": 32, "heads": 32, "kv": 8, "width": 4096, "inner": 14336, "vocabulary": 128256},
    20, 13, 128, 32, 64, 64, 11, 3,
)  # fmt: skip
SMOKE = Scale(
    {"layers": 2, "heads": 4, "width": 32, "vocabulary": 97},
    {"layers": 3, "heads": 4, "kv": 4, "width": 32, "inner": 64, "vocabulary": 97},
    {"layers": 2, "heads": 4, "kv": 2, "width": 64, "inner": 128, "vocabulary": 97},
    6, 4, 9, 5, 3, 4, 3, 2,
)  # fmt: skip


# -- models and scenes -------------------------------------------------------------------------------


def gpt2(size: dict[str, int]) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=size["layers"],
        n_head=size["heads"],
        n_embd=size["width"],
        vocab_size=size["vocabulary"],
        bos_token_id=size["vocabulary"] - 1,
        eos_token_id=size["vocabulary"] - 1,
    )
    return GPT2LMHeadModel(config).to(DEVICE).eval()


def llama(size: dict[str, int], dtype: torch.dtype) -> Any:
    """Made on the device, in its precision: eight billion random numbers take a minute on the CPU."""
    config = LlamaConfig(
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        hidden_size=size["width"],
        intermediate_size=size["inner"],
        vocab_size=size["vocabulary"],
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with DEVICE:
            module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return module.eval()


class Scene:
    """A module, its capture, what is swept, and the same sweep written by hand."""

    def __init__(
        self,
        module: Any,
        paths: Paths,
        *,
        length: int,
        prompts: int = 1,
        by_position: bool = False,
        max_memory: str | None = None,
    ) -> None:
        config = module.config
        self.module, self.length, self.prompts, self.max_memory = module, length, prompts, max_memory
        layers, heads = range(config.num_hidden_layers), range(config.num_attention_heads)
        self.sites: list[Site]
        if by_position:
            self.selector = cw.sites("resid_pre", layer=":", pos=":")
            self.sites = [("resid_pre", layer, at) for layer in layers for at in range(length)]
        else:
            self.selector = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
            self.sites = [("z", layer, head) for layer in layers for head in heads]
            self.sites += [("mlp_out", layer, 0) for layer in layers]
        self.by_hand = ByHand(module, paths, self.sites)
        self._random = torch.Generator().manual_seed(1)
        self.capture()

    def capture(self) -> float:
        """Capture the module afresh; the seconds that it took."""
        self.model: Any = None
        start = time.perf_counter()
        self.model = cw.capture(self.module, input_ids=self.pair(self.length).base, logits_to_keep=1)
        return time.perf_counter() - start

    def pair(self, length: int | None = None) -> Pair:
        """New prompts, and new tokens to compare."""
        vocabulary, shape = self.module.config.vocab_size, (2, self.prompts, length or self.length)
        base, source = torch.randint(0, vocabulary, shape, generator=self._random).to(DEVICE)
        answer, wrong = torch.randperm(vocabulary, generator=self._random)[:2].tolist()
        return Pair(base, source, answer, wrong)

    def pairs(self, rounds: int) -> Iterator[Pair]:
        return (self.pair() for _ in range(rounds))

    def ours(self, pair: Pair, *, streamed: bool = False, precision: str | None = None) -> Any:
        """A sweep of a pair by the public names, from token ids to the result."""
        base: Any = {"input_ids": pair.base}
        source: Any = {"input_ids": pair.source}
        if streamed:
            alone = pair.alone()
            base = [{"input_ids": one.base} for one in alone]
            source = [{"input_ids": one.source} for one in alone]
        metric = cw.logit_diff(answer=pair.answer, wrong=pair.wrong)
        sweep = self.model.sweep(self.selector, base=base, source=source, metric=metric, precision=precision)
        return sweep.run(max_memory=self.max_memory, progress=False)

    def chunks(self) -> list[int]:
        """How many sites are tried in a batch by hand: all, a half, a quarter and so on."""
        return sorted({max(1, len(self.sites) // parts) for parts in (1, 2, 4, 8, 32)}, reverse=True)


# -- measuring ---------------------------------------------------------------------------------------


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def milliseconds(action: Callable[[], Any]) -> tuple[float, Any]:
    synchronize()
    start = time.perf_counter()
    answer = action()
    synchronize()
    return (time.perf_counter() - start) * 1e3, answer


def as_numbers(answer: Any) -> Tensor:
    """An answer, ours or by hand, as [site, prompt] in float64."""
    return (answer if isinstance(answer, Tensor) else answer.per_prompt[0]).double().cpu()


@dataclass
class Memory:
    """What our runs took: predicted, allocated, and reserved beyond what was reserved before them."""

    budget: str | None
    floor: int = 0
    predicted: int = 0
    allocated: int | None = None
    reserved: int | None = None
    reserved_of_runs: int | None = None
    off: float | None = None
    limit: int | None = None
    passes: int = 0

    def __post_init__(self) -> None:
        gc.collect()
        if IS_CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.floor = torch.cuda.memory_reserved()

    def note(self, result: Any) -> None:
        plan, ledger = result.plan, result.ledger
        self.predicted = max(self.predicted, plan.peak_bytes)
        if ledger.peak_bytes is not None:
            self.allocated = max(self.allocated or 0, ledger.peak_bytes)
            off = ledger.peak_bytes / max(plan.peak_bytes, 1) - 1
            self.off = off if self.off is None else max(self.off, off, key=abs)
        self.limit, self.passes = plan.max_memory, len(plan.chunks)
        if ledger.reserved_bytes is not None:
            self.reserved_of_runs = max(self.reserved_of_runs or 0, ledger.reserved_bytes)
        if IS_CUDA:  # all that the process has more than before, whoever of our own parts took it
            self.reserved = max(self.reserved or 0, torch.cuda.max_memory_reserved() - self.floor)

    def line(self) -> dict[str, Any]:
        within = None if self.reserved is None or self.limit is None else self.reserved <= self.limit
        return {
            "predicted_MiB": _mib(self.predicted),
            "allocated_MiB": _mib(self.allocated),
            "reserved_MiB": _mib(self.reserved),
            "reserved_of_runs_MiB": _mib(self.reserved_of_runs),
            "budget": self.budget,
            "passes": self.passes,
            "allocated_off": None if self.off is None else round(self.off, 4),
            "within_5_percent": None if self.off is None else abs(self.off) <= 0.05,
            "within_budget": within,
        }


def _mib(amount: int | None) -> float | None:
    return None if amount is None else round(amount / MIB, 1)


@dataclass
class Turns:
    """Times of contenders that took turns, and how far their answers are apart."""

    times: dict[str, list[float]] = field(default_factory=dict)
    deviation: dict[str, float] = field(default_factory=dict)
    effect: float = 0.0

    def take(
        self, contenders: dict[str, Callable[[Pair], Any]], pairs: Iterator[Pair], reference: str
    ) -> Turns:
        """One round for each pair. Odd rounds go backwards; collecting garbage is nobody's time."""
        for number, pair in enumerate(pairs):
            names = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
            answers: dict[str, Tensor] = {}
            gc.collect()
            gc.disable()
            try:
                for name in names:
                    taken, answer = milliseconds(lambda name=name, pair=pair: contenders[name](pair))
                    self.times.setdefault(name, []).append(taken)
                    answers[name] = as_numbers(answer)
                    del answer
            finally:
                gc.enable()
            self.compare(answers, reference)
        return self

    def compare(self, answers: dict[str, Tensor], reference: str) -> None:
        """Note deviations, as shares of the largest value."""
        truth = answers[reference]
        largest = truth.abs().max()
        for name, answer in answers.items():
            off = float((answer - truth[: len(answer)]).abs().max() / largest)
            self.deviation[name] = max(self.deviation.get(name, 0.0), off)
        spread = truth.max(0).values - truth.min(0).values
        self.effect = max(self.effect, float(spread.max() / largest))

    def median(self, name: str) -> float:
        return statistics.median(self.times[name])

    def best(self, beginning: str) -> str:
        """The contender of the least median, of those whose names begin so."""
        return min((name for name in self.times if name.startswith(beginning)), key=self.median)

    def line(self) -> dict[str, Any]:
        return {
            "median_ms": {name: round(self.median(name), 2) for name in self.times},
            "least_ms": {name: round(min(times), 2) for name, times in self.times.items()},
            "rounds": max(map(len, self.times.values())),
            "deviation": {name: float(f"{off:.2g}") for name, off in self.deviation.items()},
            "largest_deviation": max(self.deviation.values()),
            "values_differ_by": float(f"{self.effect:.2g}"),
        }


def verdict(name: str, what: str, to_reach: float, reached: float, **more: Any) -> dict[str, Any]:
    return {
        "row": name,
        "what": what,
        "to_reach": to_reach,
        "reached": round(reached, 2),
        "met": reached >= to_reach,
        **more,
    }


def best_by_hand(
    scene: Scene, *, streamed: bool = False, count: int = 2, tries: int = 3
) -> dict[str, Callable[[Pair], Any]]:
    """The best sizes of batches by hand, which then take turns with ours; what does not fit is left out."""
    found: dict[int, float] = {}
    for chunk in scene.chunks():
        pairs = [scene.pair().alone()[0] if streamed else scene.pair() for _ in range(tries)]
        way = scene.by_hand.batched(chunk)
        try:
            found[chunk] = min(milliseconds(lambda way=way, pair=pair: way(pair))[0] for pair in pairs)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
    make = scene.by_hand.streamed if streamed else scene.by_hand.batched
    best = sorted(found, key=found.__getitem__)[:count]
    return {f"by hand, {chunk} sites": make(chunk) for chunk in best}


# -- rows --------------------------------------------------------------------------------------------


def known_shape(
    name: str, what: str, to_reach: float, scene: Scene, rounds: int, *, streamed: bool = False
) -> list[dict[str, Any]]:
    """New pairs of a shape that was swept before, against the best way by hand."""

    def ours(pair: Pair) -> Any:
        return scene.ours(pair, streamed=streamed)

    memory, before = Memory(scene.max_memory), []
    for _ in range(4):  # compiles; captures graphs, if any; replays them
        taken, result = milliseconds(lambda: ours(scene.pair()))
        before.append(round(taken, 1))
        memory.note(result)
    used = memory.line()
    hand = best_by_hand(scene, streamed=streamed)
    turns = Turns().take({"ours": ours, **hand}, scene.pairs(rounds), next(iter(hand)))
    best = turns.best("by hand")
    line = verdict(
        name,
        what,
        to_reach,
        turns.median(best) / turns.median("ours"),
        sites=len(scene.sites),
        against=best,
        first_runs_ms=before,
        **turns.line(),
        memory=used,
    )
    if scene.prompts > 1:
        line["ours_ms_a_pair"] = round(turns.median("ours") / scene.prompts, 2)
        line["against_ms_a_pair"] = round(turns.median(best) / scene.prompts, 2)
    return [line]


def new_pair(scale: Scale) -> list[dict[str, Any]]:
    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length)
    what = f"GPT-2 small, heads and MLPs, T={scale.length}: a new pair, plan known"
    return known_shape("new-pair", what, 2.2, scene, scale.rounds)


def first_pair(scale: Scale) -> list[dict[str, Any]]:
    """Each round has a capture of its own, in which only another length was swept."""
    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length)
    hand = best_by_hand(scene)
    turns, captures, memory = Turns(), [], Memory(scene.max_memory)

    def ours(pair: Pair) -> Any:
        memory.note(result := scene.ours(pair))
        return result

    for number in range(scale.few_rounds + 2):
        captures.append(round(scene.capture(), 2))
        for swept in (scene.ours, *hand.values()):
            swept(scene.pair(scale.other_length))
        order = {"ours": ours, **hand} if number % 2 == 0 else {**hand, "ours": ours}
        turns.take(order, scene.pairs(1), next(iter(hand)))
    best = turns.best("by hand")
    what = f"GPT-2 small, T={scale.length}: the first pair of its shape after capture"
    return [
        verdict(
            "first-pair",
            what,
            0.6,
            turns.median(best) / turns.median("ours"),
            sites=len(scene.sites),
            against=best,
            ours_ms=[round(one, 1) for one in turns.times["ours"]],
            capture_s=captures,
            **turns.line(),
            memory=memory.line() | {"reserved_MiB": None},  # others took turns
        )
    ]


def streamed(scale: Scale) -> list[dict[str, Any]]:
    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length, prompts=scale.prompts)
    what = f"GPT-2 small, T={scale.length}: {scale.prompts} pairs, one a batch, in one sweep"
    return known_shape("streamed", what, 2.2, scene, scale.few_rounds, streamed=True)


def one_batch(scale: Scale) -> list[dict[str, Any]]:
    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length, prompts=scale.prompts)
    what = f"GPT-2 small, T={scale.length}: {scale.prompts} pairs in one batch"
    return known_shape("one-batch", what, 2.6, scene, scale.few_rounds)


def positions(scale: Scale) -> list[dict[str, Any]]:
    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.positions, by_position=True)
    what = f"GPT-2 small, layer by position of resid_pre, T={scale.positions}: a new pair"
    return known_shape("positions", what, 3.0, scene, scale.rounds)


def large(scale: Scale, name: str, length: int, to_reach: float, *, hooked: bool) -> list[dict[str, Any]]:
    """Ten new pairs; the first is the first sweep of its capture, and nothing of ours ran before it."""
    scene = Scene(large_module(scale), LLAMA_PATHS, length=length, max_memory="60GiB")
    scene.by_hand.batched(len(scene.sites))(scene.pair(scale.other_length))
    memory, turns, firsts = Memory(scene.max_memory), Turns(), []
    for _ in range(4):
        taken, result = milliseconds(lambda: scene.ours(scene.pair()))
        firsts.append(taken)
        memory.note(result)
    used = memory.line()
    used["memory_of_all_MiB"] = round(torch.cuda.memory_allocated() / MIB) if IS_CUDA else None
    tries = 2 if hooked else 1
    hand = best_by_hand(scene, count=tries, tries=tries)
    turns.take({"ours": scene.ours, **hand}, scene.pairs(2), next(iter(hand)))
    firsts += turns.times["ours"]
    firsts += [milliseconds(lambda: scene.ours(scene.pair()))[0] for _ in range(3)]
    best = turns.best("by hand")
    turns.take({"ours": scene.ours, best: hand[best]}, scene.pairs(1), best)
    ours = [*firsts, turns.times["ours"][-1]]
    by_hand = turns.median(best)
    shape = "{layers} layers, {heads} heads of {kv}, width {width}".format(**scale.large)
    lines = [
        verdict(
            f"{name}",
            f"Llama of {shape}, bfloat16, T={length}: first run after capture",
            to_reach,
            by_hand / ours[0],
            tenth=round(by_hand / ours[-1], 2),
            tenth_met=by_hand / ours[-1] >= to_reach,
            sites=len(scene.sites),
            against=best,
            ours_ms=[round(one, 1) for one in ours],
            **turns.line(),
            memory=used,
        )
    ]
    if hooked:
        count = min(scale.hooked, len(scene.sites))
        every = scene.sites[:: len(scene.sites) // count][:count]
        picked = [scene.sites.index(site) for site in every]
        one_by_one = scene.by_hand.one_by_one(every)
        one_by_one(scene.pair())
        pair = scene.pair()
        taken, answer = milliseconds(lambda: one_by_one(pair))
        expected = as_numbers(scene.ours(pair))[picked]
        forwards = taken * len(scene.sites) / count
        lines.append(
            verdict(
                f"{name}-hooked",
                f"the same: one hooked forward for each site ({count} of {len(scene.sites)} timed, scaled)",
                80,
                forwards / ours[-1],
                first=round(forwards / ours[0], 1),
                hooked_ms=round(forwards, 1),
                ours_ms=round(ours[-1], 2),
                largest_deviation=float((as_numbers(answer) - expected).abs().max() / expected.abs().max()),
            )
        )
    return lines


_LARGE: list[Any] = []


def large_module(scale: Scale) -> Any:
    """Made once, for all rows that read it."""
    if not _LARGE:
        _LARGE.append(llama(scale.large, torch.bfloat16))
    return _LARGE[0]


def large_short(scale: Scale) -> list[dict[str, Any]]:
    return large(scale, "8b-short", scale.length, 1.7, hooked=True)


def large_long(scale: Scale) -> list[dict[str, Any]]:
    return large(scale, "8b-long", scale.long, 1.9, hooked=False)


def split(scale: Scale) -> list[dict[str, Any]]:
    """Our own float32 against products in parts, and both against float64."""
    scene = Scene(llama(scale.middle, torch.float32), LLAMA_PATHS, length=scale.long)
    ways: dict[str, Callable[[Pair], Any]] = {
        "ours": scene.ours,
        "ours, split": lambda pair: scene.ours(pair, precision="split"),
    }
    what = (
        f"Llama of {scale.middle['layers']} layers, float32, T={scale.long}: precision='split' against ours"
    )
    try:
        memory = Memory(scene.max_memory)
        for _ in range(3):
            memory.note(ways["ours, split"](scene.pair()))
    except SweepError as error:
        return [{"row": "split", "what": what, "met": False, "error": f"SweepError: {error}"}]
    used = memory.line()
    for _ in range(3):
        scene.ours(scene.pair())
    exact = Scene(copy.deepcopy(scene.module).double(), LLAMA_PATHS, length=scale.long)
    turns = Turns().take(ways, scene.pairs(2 * scale.few_rounds + 1), "ours")
    errors: dict[str, list[float]] = {name: [] for name in ways}
    for pair in scene.pairs(2):
        truth = as_numbers(exact.ours(pair))
        for name, way in ways.items():
            off = (as_numbers(way(pair)) - truth).abs().max() / truth.abs().max()
            errors[name].append(float(off))
    ratio = max(errors["ours, split"]) / max(errors["ours"])
    return [
        verdict(
            "split",
            what,
            1.5,
            turns.median("ours") / turns.median("ours, split"),
            sites=len(scene.sites),
            error_against_float64=errors,
            error_ratio=round(ratio, 2),
            error_met=ratio <= 2,
            **turns.line(),
            memory=used,
        )
    ]


def peers(scale: Scale) -> list[dict[str, Any]]:
    """TransformerLens and nnsight, each on a copy of the module; their clean runs are their own."""
    from benchmarks.peers import NNsight, PeerCase, TransformerLens

    scene = Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length)
    for _ in range(4):
        scene.ours(scene.pair())
    ways: dict[str, Callable[[Pair], Any]] = dict(best_by_hand(scene))
    reference, missing, slow = next(iter(ways)), {}, {}

    def case() -> PeerCase:
        return PeerCase(copy.deepcopy(scene.module), scene.pair(), scene.sites)

    try:
        lens = TransformerLens(case())
        slow["TransformerLens"] = lambda pair: lens.new_pair(pair)[:, None]
        slow["TransformerLens"](scene.pair())
    except Exception as error:  # noqa: BLE001  # one that does not run is said, and the others go on
        slow.pop("TransformerLens", None)
        missing["TransformerLens"] = f"{type(error).__name__}: {error}"
    try:
        traced = NNsight(case())
        for chunk, last in itertools.product(scene.chunks()[:3], (False, True)):
            way = f"nnsight, {chunk} invokes{', last logits' if last else ''}"
            ways[way] = lambda pair, chunk=chunk, last=last: traced.new_pair(pair, chunk, last=last)[:, None]
            ways[way](scene.pair())
    except Exception as error:  # noqa: BLE001
        ways = {name: way for name, way in ways.items() if not name.startswith("nnsight")}
        missing["nnsight"] = f"{type(error).__name__}: {error}"
    turns = Turns().take({"ours": scene.ours, **ways}, scene.pairs(scale.few_rounds + 2), reference)
    if slow:
        both = {"ours": scene.ours, reference: ways[reference], **slow}
        turns.take(both, scene.pairs(scale.few_rounds), reference)
    ours, lines = turns.median("ours"), []
    for peer, to_reach in (("TransformerLens", 200), ("nnsight", 3)):
        if peer in missing:
            lines.append({"row": "peers", "what": peer, "met": False, "error": missing[peer]})
            continue
        best = turns.best(peer)
        what = f"{peer}, GPT-2 small, T={scale.length}: against ours, a new pair"
        lines.append(verdict("peers", what, to_reach, turns.median(best) / ours, against=best))
    lines[0] |= turns.line()
    return lines


def memory_of_all(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The row on memory: the largest distance from what was predicted, and budgets that did not hold."""
    used = {line["row"]: line["memory"] for line in lines if "memory" in line}
    off = {row: one["allocated_off"] for row, one in used.items() if one["allocated_off"] is not None}
    broken = [row for row, one in used.items() if one["within_budget"] is False]
    return {
        "row": "memory",
        "what": "allocated peaks within 5 % of the predicted ones, reserved within the budget",
        "allocated_off": off,
        "over_budget": broken,
        "met": bool(off) and all(abs(one) <= 0.05 for one in off.values()) and not broken,
    }


ROWS: dict[str, Callable[[Scale], list[dict[str, Any]]]] = {
    "new-pair": new_pair,
    "first-pair": first_pair,
    "streamed": streamed,
    "one-batch": one_batch,
    "positions": positions,
    "8b-short": large_short,
    "8b-long": large_long,
    "split": split,
    "peers": peers,
}


# -- where the time goes -------------------------------------------------------------------------------


def profiled(row: str, scale: Scale) -> None:
    """One new pair of a row, by function and by kernel; the second one, so that profilers are warm."""
    makes: dict[str, Callable[[], Scene]] = {
        "new-pair": lambda: Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length),
        "streamed": lambda: Scene(gpt2(scale.small), GPT2_PATHS, length=scale.length, prompts=scale.prompts),
        "positions": lambda: Scene(gpt2(scale.small), GPT2_PATHS, length=scale.positions, by_position=True),
        "8b-short": lambda: Scene(large_module(scale), LLAMA_PATHS, length=scale.length, max_memory="60GiB"),
        "8b-long": lambda: Scene(large_module(scale), LLAMA_PATHS, length=scale.long, max_memory="60GiB"),
        "split": lambda: Scene(llama(scale.middle, torch.float32), LLAMA_PATHS, length=scale.long),
    }
    makes |= {"first-pair": makes["new-pair"], "one-batch": makes["streamed"]}
    if row not in makes:
        sys.exit(f"no profile of {row!r}; there are those of {', '.join(makes)}.")
    scene = makes[row]()
    options: dict[str, Any] = {"streamed": True} if row == "streamed" else {}
    if row == "split":
        options = {"precision": "split"}
    is_first = row == "first-pair"

    def prepare() -> Pair:
        if is_first:
            scene.capture()
            scene.ours(scene.pair(scale.other_length))
        return scene.pair()

    for _ in range(3):
        taken, _ = milliseconds(lambda: scene.ours(prepare(), **options))
    pair = prepare()
    taken, _ = milliseconds(lambda: scene.ours(pair, **options))
    print(f"{row}: {taken:.2f} ms without a profiler", flush=True)
    pair, profile = prepare(), cProfile.Profile()
    synchronize()
    profile.enable()
    scene.ours(pair, **options)
    synchronize()
    profile.disable()
    stats = pstats.Stats(profile, stream=sys.stdout)
    stats.sort_stats("tottime").print_stats(40)
    stats.sort_stats("cumulative").print_stats("conewise", 40)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if IS_CUDA:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    pair = prepare()
    with torch.profiler.profile(activities=activities) as traced:
        scene.ours(pair, **options)
        synchronize()
    averages = traced.key_averages()
    by = "self_device_time_total" if IS_CUDA else "self_cpu_time_total"
    print(averages.table(sort_by=by, row_limit=25, max_name_column_width=60))
    if IS_CUDA:
        total = sum(one.self_device_time_total for one in averages) / 1e3
        print(f"kernels and copies on the device: {total:.2f} ms in all")


# -- the command ---------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    found = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", found.read_text()) if found.exists() else []
    return {
        "device": torch.cuda.get_device_name() if IS_CUDA else "cpu",
        "processor": f"{names[0]}, {len(names)} threads" if names else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all unless named")
    parser.add_argument("--smoke", action="store_true", help="tiny models: tries the script itself")
    parser.add_argument("--peers", metavar="FOLDER", help="where TransformerLens and nnsight lie")
    parser.add_argument("--profile", metavar="ROW", help="show where the time of one new pair goes")
    options = parser.parse_args()
    unknown = [row for row in options.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}.")
    if not IS_CUDA and not options.smoke:
        parser.error("there is no CUDA device here; --smoke tries the script on any.")
    if options.peers:  # last: what the machine has of its own goes first
        sys.path.append(str(Path(options.peers).resolve()))
    torch.set_float32_matmul_precision("highest")
    scale = SMOKE if options.smoke else REAL
    if options.profile:
        profiled(options.profile, scale)
        return
    print(json.dumps(machine()), flush=True)
    measured: list[dict[str, Any]] = []
    for name in options.rows or ROWS:
        start = time.perf_counter()
        try:
            lines = ROWS[name](scale)
        except Exception as error:  # noqa: BLE001  # the other rows go on
            lines = [{"row": name, "met": False, "error": f"{type(error).__name__}: {error}"}]
            gc.collect()  # the frames of the error held its tensors
        for line in lines:
            print(json.dumps(line | {"row_s": round(time.perf_counter() - start, 1)}), flush=True)
        measured += lines
        gc.collect()
        if IS_CUDA:
            torch.cuda.empty_cache()
    print(json.dumps(memory_of_all(measured)), flush=True)


if __name__ == "__main__":
    main()
