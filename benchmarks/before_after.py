"""`python -m benchmarks.before_after REV`: the same work by the code of a commit and by the code here.

The commit is checked out into a temporary folder, and one process runs the work with its `src`, another with
this one's. They take turns, forwards and backwards, so that a noisy moment hits both; answers are compared.
Seconds are those that a process was computing, with one thread, which a busy machine changes least. A line is
met where the new code takes at most a tenth longer. `--work` names some lines, `--rounds` how often each
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import Line, at_most, print_table

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 1.1
LEAST = 0.3
"""Work that takes fewer seconds than these is repeated for as long."""
TOLERANCE = 1e-5
"""How far answers may differ, relative to the largest: where old numbers were wrong, `--differ` says so."""

# -- the work: every function runs with both trees ----------------------------------------------------


@cache
def gpt2() -> Any:
    """The shape of GPT-2 small with random weights, captured, and a pair of prompts."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from benchmarks.cases import Case, random_pair

    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(n_layer=6))  # type: ignore[no-untyped-call]
    clean, corrupted = random_pair(50257, 20, torch.device("cpu"))
    return Case(module, "transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp", clean, corrupted)


@cache
def tiny() -> tuple[Any, Any, Any, Any]:
    """The model that comes with the package, captured: model, base, source, metric."""
    import conewise as cw

    loaded: Any = cw.load("tiny")
    texts = [f"When Mary and John went to the store, {who} gave a drink to" for who in ("John", "Mary")]
    clean, corrupted = loaded.tokenizer(texts, return_tensors="pt").input_ids.split(1)
    mary, john = loaded.tokenizer.convert_tokens_to_ids(["Mary", "John"])
    model = cw.capture(loaded.module, input_ids=clean)
    base, source = model.run(input_ids=clean), model.run(input_ids=corrupted)
    return model, base, source, cw.logit_diff(answer=mary, wrong=john)


def wavefront() -> Any:
    """All heads and MLPs, a new sweep each time, its plan found."""
    return gpt2().sweep().run(evaluator="wavefront", progress=False).table[0]


def serial() -> Any:
    """The heads of three layers, one world after another."""
    import conewise as cw

    case = gpt2()
    sites = cw.sites("z", layer="3:", head="::4")
    sweep = case.model.sweep(sites, base=case.base, source=case.source, metric=case.metric)
    return sweep.run(evaluator="serial", progress=False).table[0]


def positions() -> Any:
    """Many worlds in many passes: every head of the small model at every position."""
    import conewise as cw

    model, base, source, metric = tiny()
    sites = cw.sites("z", layer=":", head=":", pos=":") + cw.sites("mlp_out", layer=":", pos=":")
    return model.sweep(sites, base=base, source=source, metric=metric).run(progress=False).table[0]


def inputs() -> Any:
    """A sweep whose base and source are given as inputs: both baselines are computed with it."""
    import conewise as cw

    case = gpt2()
    sweep = case.model.sweep(
        cw.sites("mlp_out", layer=":"),
        base={"input_ids": case.corrupted},
        source={"input_ids": case.clean},
        metric=case.metric,
    )
    return sweep.run(progress=False).table[0]


def run() -> Any:
    """One run, all values kept."""
    case = gpt2()
    return case.model.run(input_ids=case.clean)["resid_post", case.layers - 1][0, -1, :64]


def what_if() -> Any:
    """Fork, patch the heads of a layer, read the last stream."""
    case = gpt2()
    with case.base.fork() as world:
        world.patch(("z", 4), case.source["z", 4])
        return world["resid_post", case.layers - 1][0, -1, :64]


def edges() -> Any:
    """Every edge of the small model."""
    model, base, source, metric = tiny()
    return model.sweep(model.edges(), base=base, source=source, metric=metric).run(progress=False).table[0]


def acdc() -> Any:
    """A search for a circuit of the small model."""
    import conewise as cw

    model, base, source, metric = tiny()
    given = {"base": base, "source": source, "metric": metric, "threshold": 0.01}
    if hasattr(cw, "acdc"):  # the name until 0.1.0
        return [float(len(cw.acdc(model, progress=False, **given).edges))]
    return [float(len(model.find_circuit(**given).run(progress=False).edges))]


def atp() -> Any:
    """Attribution patching of heads and MLPs."""
    return attributed(lambda case: case.sites, "atp")


def eap() -> Any:
    """Edge attribution patching of every edge."""
    return attributed(lambda case: case.model.edges(), "eap")


def attributed(sites: Callable[[Any], Any], method: str) -> Any:
    import conewise as cw

    case = gpt2()
    given = {"base": case.base, "source": case.source, "metric": case.metric, "method": method}
    if hasattr(cw, "attribution"):  # the name until 0.1.0
        return cw.attribution(case.model, sites(case), progress=False, **given).values.flatten()
    return case.model.attribute(sites(case), **given).run(progress=False).values.flatten()


def lens() -> Any:
    """The logit lens of one run."""
    case = gpt2()
    return case.base.lens().logits.flatten()[:64]


def gradients() -> Any:
    """The gradients of a metric by the streams of all layers."""
    import conewise as cw

    case = gpt2()
    found = case.base.gradients(case.metric, cw.sites("resid_pre", layer=":"))
    return [float(one.double().square().sum()) for one in found.values()]


WORK: dict[str, Callable[[], Any]] = {
    one.__name__: one
    for one in (
        *(wavefront, serial, positions, inputs, run, what_if),
        *(edges, acdc, atp, eap, lens, gradients),
    )
}


def serve() -> None:
    """Run what is asked for, a line each: seconds and answers as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        start, times = time.process_time(), 0
        try:
            while not times or time.process_time() - start < LEAST:
                found = WORK[line.strip()]()
                times += 1
        except Exception as error:  # noqa: BLE001 - the other process is told, whatever it was
            said: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
        else:
            seconds = (time.process_time() - start) / times
            said = {"seconds": seconds, "answer": [float(one) for one in found]}
        print(json.dumps(said), file=answers, flush=True)


# -- both sides, in turns -----------------------------------------------------------------------------


class Side:
    """A process that runs the work with the code of one tree."""

    def __init__(self, tree: Path) -> None:
        # The benchmarks are those that are here: both sides run the same work.
        paths = os.pathsep.join([str(tree / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.before_after", "--serve"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The files of a commit, in a folder that goes again."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        yield Path(folder)


def compare(name: str, before: Side, after: Side, rounds: int, *, may_differ: bool) -> Line:
    """One line of the table."""
    first, second = before.ask(name), after.ask(name)  # what is found out once is not timed
    for one in (first, second):
        if "error" in one:
            return Line(name, "runs", one["error"][:90], False)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        sides = ((before, seconds[0]), (after, seconds[1]))
        for side, series in sides if turn % 2 == 0 else reversed(sides):
            series.append(side.ask(name)["seconds"])
    largest = max([abs(one) for one in first["answer"]] or [1.0]) or 1.0
    apart = max((abs(a - b) for a, b in zip(first["answer"], second["answer"], strict=False)), default=0.0)
    is_same = len(first["answer"]) == len(second["answer"]) and apart <= TOLERANCE * largest
    pairs = [b / a for a, b in zip(*seconds, strict=True)]
    ratio = min(seconds[1]) / min(seconds[0])
    note = (
        f"{min(seconds[0]):.3f} -> {min(seconds[1]):.3f} s, middle of {rounds} pairs "
        f"{statistics.median(pairs):.2f}x, answers {apart / largest:.1e} apart"
    )
    line = at_most(name, min(ratio, statistics.median(pairs)), ALLOWED, note)
    return line if is_same or may_differ else Line(name, "same answer", "another", False, note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD", help="the commit to compare with")
    parser.add_argument("--work", nargs="+", choices=sorted(WORK), default=list(WORK))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--differ", nargs="+", default=[], help="lines whose answers are meant to differ")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    with checked_out(given.revision) as tree:
        before, after = Side(tree), Side(ROOT)
        lines = []
        for name in given.work:
            lines.append(compare(name, before, after, given.rounds, may_differ=name in given.differ))
            print(f"  {name}: {lines[-1].reached} {lines[-1].note}", flush=True)
        before.end()
        after.end()
    print_table(f"The code here against {given.revision}", lines)
    return int(not all(line.is_met for line in lines))


if __name__ == "__main__":
    sys.exit(main())
