"""`conewise steer`: which layer and which strength change what the model goes on to say."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from conewise.arguments import Positive
from conewise.cli.failing import CommandError
from conewise.cli.options import LoadOptions, OutputOptions, ResultOptions, StoreOptions, command
from conewise.cli.output import (
    Status,
    expect_verified,
    expect_writable_file,
    print_json,
    progress_for,
    show_table,
    stdout,
)
from conewise.cli.questions import ModelName, captured, model_json

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.generation.result import SteeringStudy


@command
def steer(
    model: str,
    *,
    prompt: list[str],
    toward: list[str],
    away: list[str],
    count: list[str],
    kind: str = "resid_post",
    layer: str = ":",
    scales: str = "-4,-2,2,4",
    n: Positive = 20,
    steered: Literal["all", "new"] = "all",
    fluent: float = 2.0,
    plan: bool = False,
    max_memory: str | None = None,
    seed: int = 0,
    storing: StoreOptions,
    results: ResultOptions,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    r"""Steer what the model writes: every layer with every strength, weighed against the fluency it costs.

    The vector of a layer is the mean of its stream at the last position of the --toward texts, minus that of
    the --away texts. Each world adds it at one layer with one strength, and the model continues every
    prompt. The score of a text is how often it holds the --count words; its perplexity under the unpatched
    model says what that cost.

    Examples:
      conewise steer smollm2-135m --prompt 'I think that the film was' \
        --toward 'I love this' --away 'I hate this' --count great --count good --report steering.html
      conewise steer tiny --toward John --away Mary --count John --n 5 \
        --prompt 'When Mary and John went to the store, John gave a drink to'

    Options:
        --prompt TEXT: A prompt to continue. Repeat it for several.
        --toward TEXT: A text to steer towards. Repeat it for several.
        --away TEXT: A text to steer away from. Repeat it for several.
        --count WORD: A word that scores. Repeat it for several.
        --kind KIND: The sites: resid_post, resid_pre, mlp_out, attn_out.
        --layer CHOICE: ':', '4:8' or '6'.
        --scales LIST: The strengths, separated by commas.
        --n N: Number of tokens to write.
        --steered: all: the prompt and what is written. new: what is written.
        --fluent X: Fluent is up to so many times the unpatched perplexity.
    """
    strengths = _strengths(scales)
    expect_writable_file(results.report, "--report")
    status = Status(output.quiet)
    loaded = ModelName(model, loading).load(status)
    captured(loaded, status)
    from conewise.anatomy.selectors import sites
    from conewise.generation.sweep import writing
    from conewise.runs.interventions import add
    from conewise.text.ask import as_choice

    chosen = sites(kind, layer=as_choice(layer))
    with status.doing("reading the vectors"):
        means = [loaded.activations(texts, sites(kind, layer=":")).values.mean(0) for texts in (toward, away)]
    vectors = dict(zip(loaded.sites.layers(kind), means[0] - means[1], strict=True))
    how = writing(n, pos=steered, seed=seed)
    job = loaded.sweep(chosen, base=prompt, source=add(vectors, scale=strengths), generate=how)
    planned = job.plan(max_memory)
    body: dict[str, Any] = {
        "model": model_json(loaded),
        "prompts": prompt,
        "kind": kind,
        "scales": strengths,
        "count": count,
        "plan": {**asdict(planned), "passes": planned.passes, "peak_bytes": planned.peak_bytes},
    }
    if plan:
        print_json("steer", body) if output.json else stdout().print(str(planned), markup=False)
        return
    texts = job.run(
        out=storing.out,
        resume=storing.resume,
        max_memory=max_memory,
        progress=progress_for(status, results.progress),
        verify=results.verify,
    )
    study = texts.study(
        lambda written: [sum(text.count(word) for word in count) for text in written], most_perplexity=fluent
    )
    if results.report is not None:
        study.report(results.report)
        status(f"wrote {results.report}")
    if output.json:
        print_json("steer", {**body, **_as_json(study), "report": results.report and str(results.report)})
    else:
        _show(stdout(), study, results.top)
    expect_verified(texts, status)


def _strengths(text: str) -> list[float]:
    """The strengths that are written so. Raises CommandError for what is no list of numbers."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(map(math.isfinite, found)) or len(set(found)) < len(found):
        raise CommandError(f"--scales {text}: numbers separated by commas, each once, such as -4,-2,2,4.")
    return found


def _as_json(study: SteeringStudy) -> dict[str, Any]:
    """The finding, and each cell with its effect, its cost and its texts."""
    texts, best = study.texts, study.best
    effect, lost = study.effect.flatten().tolist(), study.lost.flatten().tolist()
    divergence = texts.divergence.reshape(len(texts.cells), -1).tolist()
    check = texts.verification
    cells = [
        {
            "name": name,
            "effect": effect[at],
            "perplexity": lost[at],
            "interval": list(study.interval(at)),
            "divergence": divergence[at],
            "texts": list(texts.written[at + 1]),
        }
        for at, name in enumerate(texts.cells)
    ]
    return {
        "finding": study.finding(),
        "best": None if best is None else texts.cells[best],
        "unpatched": list(texts.base),
        "cells": cells,
        "measured": asdict(texts.ledger),
        "verification": None if check is None else {**asdict(check), "ok": check.ok},
    }


def _show(console: Console, study: SteeringStudy, top: int) -> None:
    """The finding, the cells with the largest effects, and the text of each for the first prompt."""
    texts, effect, lost = study.texts, study.effect.flatten(), study.lost.flatten()
    console.print(f"{study.finding()}\nunpatched: {texts.base[0]!r}\n", markup=False)
    rows = [
        (rank, texts.cells[at], f"{effect[at]:+.3g}", f"{lost[at]:.2f}×", repr(texts.written[at + 1][0]))
        for rank, at in enumerate(study.order()[:top], 1)
    ]
    title = f"The strongest {len(rows)} of {len(effect)} cells, fluent ones first"
    show_table(console, title, ("", "cell", "effect", "perplexity", "text"), rows, right=(0, 2, 3))
