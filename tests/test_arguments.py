"""Every public function, called with hostile values: each is taken as documented, or refused by ours.

The oracle reads the annotations, and shares no code with the checks.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import conewise as cw
from conewise.arguments import checked, expect
from conewise.errors import ArgumentError, ConewiseError
from conewise.jobs import pool as pools
from conewise.models import tiny
from tests.doors import limited
from tests.sweeps.small import model as small_model
from tests.sweeps.small import prompts


class Strange:
    """Something that nobody expects."""


HOSTILE: tuple[Any, ...] = (
    *(None, 5, -1, 1.5, math.nan, math.inf, 10**30, True, np.int64(3)),
    *("x", "", "\0", b"x", [], ["x"], {}, Strange(), torch.zeros(2, 3)),
)
# Parameters of which more is taken than the annotation says in types, each by what it takes.
TAKEN: dict[str, Callable[[Any], Any]] = {
    "Any": lambda _: True,
    "object": lambda _: True,
    "int": lambda value: isinstance(value, int | np.integer) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float | np.number) and math.isfinite(value),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "Path": lambda value: isinstance(value, str | Path) and str(value).strip("\0") != "",
    "None": lambda value: value is None,
    "Callable": callable,
    "Tensor": lambda value: isinstance(value, torch.Tensor),
    "Sequence": lambda value: isinstance(value, list | tuple),
    "Iterable": lambda value: isinstance(value, list | tuple | dict | torch.Tensor),
    "Mapping": lambda value: isinstance(value, dict),
    "Positive": lambda value: isinstance(value, int | np.integer) and value > 0,
    "Samples": lambda value: isinstance(value, int | np.integer) and 0 < value < 10**7,
    "Count": lambda value: isinstance(value, int | np.integer) and value >= 0,
    "Seed": lambda value: isinstance(value, int | np.integer) and abs(int(value)) < 2**64,
    "NonNegative": lambda value: isinstance(value, int | float | np.number) and 0 <= value < math.inf,
    "PositiveNumber": lambda value: isinstance(value, int | float | np.number) and 0 < value < math.inf,
}
# Aliases of unions, whose functions look at what they are given: what they take is checked where it is used.
OPEN = {
    "SelectorLike",
    "PlaceLike",
    "Index",
    "Choice",
    "Token",
    "Base",
    "Keep",
    "Prompts",
    "Prompt",
    "Patches",
    "Position",
}


def taken(annotation: str, value: Any) -> bool:
    """True if an annotation allows a value, as a reader of it would say."""
    parts = [part.strip().partition("[")[0].rpartition(".")[2] for part in _top_level(annotation)]
    if "Path" in parts:
        parts.remove("str")
    if isinstance(value, bool) and not {"bool", "Any", "object", *OPEN} & set(parts):
        return False
    return any(part in OPEN or (part in TAKEN and TAKEN[part](value)) for part in parts)


def _top_level(annotation: str) -> Iterator[str]:
    depth, start = 0, 0
    for at, sign in enumerate(annotation):
        depth += (sign == "[") - (sign == "]")
        if sign == "|" and not depth:
            yield annotation[start:at]
            start = at + 1
    yield annotation[start:]


class Dictionary:
    """A dictionary that does nothing."""

    def encode(self, value: torch.Tensor) -> torch.Tensor:
        return value.relu()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents


@cache
def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public functions and methods, each with arguments that it takes."""
    model, text = small_model(), cw.capture(cw.load("tiny"))
    base, source = (model.run(input_ids=prompts(seed, 2)) for seed in (1, 2))
    metric, sites = cw.logit_diff(1, 2), cw.sites("z", layer=0, head=":")
    given: dict[str, Any] = {"base": base, "source": source, "metric": metric}
    sweep = model.sweep(sites, **given)
    result, estimated = sweep.run(), model.attribute(sites, **given).run()
    edges = model.sweep(model.edges()[:40], **given).run()
    paired = model.sweep(cw.pairs(sites, singles=True), **given).run()
    circuit, plan = edges.circuit(top=3), sweep.plan()
    spliced = model.splice(("resid_post", 0), Dictionary())
    question = text.ask(str(tiny.PROMPTS), sites="resid_post[layer=0]")
    clean = "When Mary and John went to the store, John gave a drink to"
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "capture": (cw.capture, {"module": model.module, "input_ids": prompts(1, 2)}),
        "load": (cw.load, {"name": "tiny"}),
        "ask": (text.ask, {"prompts": str(tiny.PROMPTS)}),
        "attribute": (model.attribute, {"sites": sites, **given}),
        "attribute by steps": (model.attribute, {"sites": sites, "method": "ig", **given}),
        "attribute, hybrid": (
            model.attribute,
            {"sites": sites, "method": "hybrid", "top": 1, "n": 2, **given},
        ),
        "find_circuit": (model.find_circuit, {"threshold": 1e9, **given}),
        "causal_trace": (
            text.causal_trace,
            {"inputs": clean, "subject": 1, "n": 1, "layer": 0, "pos": 0},
        ),
        "compare": (cw.compare, {"approx": estimated, "exact": result}),
        "cross_entropy": (cw.cross_entropy, {"targets": prompts(1, 2)}),
        "add": (cw.add, {"vector": torch.zeros(16)}),
        "noise": (cw.noise, {"scale": 1.0}),
        "resample": (cw.resample, {"run": source}),
        "mean": (cw.mean, {"model": model, "dataset": [{"input_ids": prompts(1, 2)}]}),
        "metric": (cw.metric, {"function": len, "key": "k"}),
        "intervention": (cw.intervention, {"function": len, "key": "k"}),
        "kl_to": (cw.kl_to, {"run": source}),
        "logit": (cw.logit, {"token": 1}),
        "prob": (cw.prob, {"token": 1}),
        "logit_diff": (cw.logit_diff, {"answer": 1, "wrong": 2}),
        "pairs": (cw.pairs, {"sites": sites}),
        "site": (cw.site, {"name": "z"}),
        "sites": (cw.sites, {"name": "z"}),
        "cell": (cw.cell, {"place": "z", "source": "zero"}),
        "cells": (cw.cells, {"place": "z", "sources": {"a": "zero"}}),
        "dictionary": (cw.dictionary, {"folder": "nowhere"}),
        "block": (cw.block, {"graph": cw.Graph()}),
        "World": (cw.World, {"graph": cw.Graph()}),
        "Processes": (cw.Processes, {"workers": 1}),
        "Sweep": (cw.Sweep, {"model": model, "sites": sites, **given}),
        "SweepPlan.from_json": (cw.SweepPlan.from_json, {"text": plan.to_json()}),
        "Circuit.from_nodes": (cw.Circuit.from_nodes, {"graph": model, "nodes": ["m0"]}),
        "Circuit.from_scores": (
            cw.Circuit.from_scores,
            {"graph": model, "scores": dict(circuit.scores or {}), "top": 2},
        ),
        "Circuit.made": (cw.Circuit.made, {"graph": model, "edges": list(circuit.edges)}),
        "Circuit.load": (cw.Circuit.load, {"path": "nowhere"}),
    }
    methods: list[tuple[Any, dict[str, dict[str, Any]]]] = [
        (
            model,
            {
                "run": {"input_ids": prompts(1, 2)},
                "sweep": {"sites": sites, **given},
                "paths": {"senders": "a0.h0", "receivers": "logits", **given},
                "components": {},
                "edges": {},
                "verify": {"n": 1},
                "planned": {"plan": plan},
                "splice": {"place": ("resid_post", 0), "dictionary": Dictionary()},
            },
        ),
        (spliced, {"active": {"name": "sae", "run": spliced.run(input_ids=prompts(1, 2))}}),
        (text, {"generate": {"prompt": clean, "n": 1}}),
        (
            base,
            {
                "decompose": {},
                "attention": {},
                "lens": {},
                "logit_attribution": {"metric": metric},
                "gradients": {"metric": metric, "sites": sites},
                "backward_cost": {"metric": metric, "sites": sites},
                "read": {"place": ("z", 0)},
            },
        ),
        (
            sweep,
            {"run": {}, "plan": {}, "of_cells": {"numbers": [0]}, "batch": {"number": 0}, "provenance": {}},
        ),
        (plan, {"run": {}}),
        (
            result,
            {
                "equals": {"other": result},
                "metric": {"name": "logit_diff"},
                "plot": {},
                "plot_intervals": {},
                "save": {"folder": "saved"},
                "select": {"metric": "logit_diff"},
                "strongest": {},
                "to_dataframe": {},
                "verify": {"n": 1},
                "report": {"path": "nowhere/page.html"},
            },
        ),
        (edges, {"circuit": {"top": 2}}),
        (paired, {"matrix": {}, "interactions": {}}),
        (estimated, {"check": {"top": 1, "n": 2}}),
        (
            circuit,
            {
                "bind": {"model": model},
                "compare": {"other": circuit},
                "evaluate": given,
                "curve": given,
                "save": {"path": "circuit.json"},
                "select": {"top": 2},
                "report": {"path": "nowhere/page.html"},
            },
        ),
        (
            question,
            {
                "plan": {},
                "sweep": {"group": 0},
                "split": {},
                "attribute": {"method": "atp"},
                "story": {},
            },
        ),
        (base.lens(), {"plot": {}}),
        (base.decompose(), {"plot": {}}),
        (base.logit_attribution(metric), {"plot": {}, "strongest": {}}),
        (cw.compare(estimated, result), {"worst": {}}),
    ]
    for of, known in methods:
        for name, arguments in known.items():
            found[f"{type(of).__name__}.{name}"] = getattr(of, name), arguments
    return found


# What only a run over a cluster, or a whole file, would show: the text that is given is looked at there.
LATER = {(f"{kind}.run", "workers") for kind in ("Sweep", "SweepPlan", "Attribution", "Search", "Question")}


def one_process(pool: cw.Processes) -> Callable[[int], AbstractContextManager[cw.Processes]]:
    """Give each number of workers that is taken the same pool, of one: not every call starts five."""
    made = type(pool)

    @contextmanager
    def processes(workers: int) -> Iterator[cw.Processes]:
        made(workers)
        yield pool

    return processes


def test_whatever_is_given_is_taken_as_documented_or_refused_by_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pools, "Processes", one_process(cw.Processes(1)))
    wrong: list[str] = []
    cases = 0
    for name, (function, arguments) in calls().items():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind.name.startswith("VAR"):
                continue
            for value in HOSTILE:
                if (name, parameter.name) in LATER and isinstance(value, str):
                    continue
                cases += 1
                said = outcome(function, parameter, arguments, value)
                if said == "taken" and not taken(str(parameter.annotation), value):
                    wrong.append(f"{name}({parameter.name}={value!r}) was taken")
                elif said not in {"taken", "refused"}:
                    wrong.append(f"{name}({parameter.name}={value!r}): {said}")
    assert cases > 3_000
    assert not wrong, "\n".join(wrong)


def outcome(
    function: Callable[..., Any], parameter: inspect.Parameter, arguments: dict[str, Any], value: Any
) -> str:
    """Call a function with one argument changed: taken, refused by an error of ours, or what it raised."""
    given = {**arguments, parameter.name: value}
    first = [given.pop(parameter.name if parameter.kind.name == "POSITIONAL_ONLY" else "module", None)]
    first = first if "module" in arguments else []
    try:
        with warnings.catch_warnings(), limited(90):  # a worker starts in less, on two busy cores
            warnings.simplefilter("ignore")
            function(*first, **given)
    except ConewiseError as error:
        return "refused" if str(error) else "an empty message"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is listed
        return f"{type(error).__name__}: {error}"
    return "taken"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("x", "`top` is str 'x'; expected a whole number of at least 1 or None."),
        (0, "`top` is int 0; expected a whole number of at least 1 or None."),
        (True, "`top` is bool True; expected a whole number of at least 1 or None."),
        (torch.zeros(2), r"`top` is Tensor of shape \(2,\), torch.float32; expected a whole number"),
    ],
)
def test_a_message_names_the_argument_what_was_found_and_what_was_expected(given: Any, said: str) -> None:
    for kind in (ArgumentError, TypeError, ValueError):
        with pytest.raises(kind, match=said):
            expect("top", given, "Positive | None")


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    @checked
    def function(
        count: int, *, share: float = 0.5, path: str | Path | None = None, is_on: bool = False
    ) -> Any:
        return count, share, path, is_on

    found = function(np.int64(3), share=np.float32(0.25), path=Path("a"), is_on=np.bool_(True))  # type: ignore[arg-type]
    assert found == (3, 0.25, Path("a"), True)
    assert [type(one) for one in found[:2]] == [int, float]
    assert found[3] is True
    assert function(torch.tensor(3))[0] == 3  # type: ignore[arg-type]


def test_ids_that_the_model_does_not_know_are_refused_before_a_run() -> None:
    model = cw.capture(cw.load("tiny"))
    known = model.module.config.vocab_size
    ids = torch.zeros(1, 4, dtype=torch.long)
    model.run(input_ids=ids + known - 1)
    for wrong in (-1, known, 10**6):
        ids[0, 2] = wrong
        said = f"'input_ids' holds the id {wrong}, and LlamaForCausalLM knows {known}, from 0 to {known - 1}"
        jobs: list[Callable[[], Any]] = [
            lambda: model.run(input_ids=ids),
            lambda: model.generate(ids, 1),
            lambda: model.causal_trace(ids, subject=0).run(),
            lambda: model.sweep(("z", 0), base={"input_ids": ids}, source="zero", metric=cw.logit(1)),
        ]
        for job in jobs:
            with pytest.raises(cw.errors.InputMismatchError, match=said):
                job()
