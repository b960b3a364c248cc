"""Arguments that nobody means: each is refused by an error of ours, at once, or does what it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import conewise as cw
from conewise.anatomy.places import Place
from conewise.circuits.circuit_data import Decision
from conewise.errors import ArgumentError, ConewiseError, MetricError

ENDLESS = range(10**12)
TEXT = "When Mary and John went to the store, John gave a drink to"
WIDTH = 64


@cache
def model() -> Any:
    return cw.capture(cw.load("tiny"), TEXT)


@cache
def base() -> Any:
    return model().run(TEXT)


def ids() -> torch.Tensor:
    found: torch.Tensor = base().inputs["input_ids"]
    return found


def swept(sites: Any = ("resid_post", 1), **given: Any) -> Any:
    return model().sweep(sites, **{"base": base(), "source": "zero", "metric": cw.logit(3), **given}).run()


def patched(value: Any) -> None:
    with base().fork() as world:
        world.patch(("resid_post", 1), value)
        _ = world.logits


def path_patched(senders: Any, receivers: Any) -> None:
    model().paths(senders, receivers, base=base(), source="zero", metric=cw.logit(3))


def graph() -> cw.Graph:
    found = cw.Graph()
    found.source("x", 1.0)
    found.node("y", abs, ["x"])
    return found


def ablated() -> dict[str, Any]:
    return {"base": base(), "metric": cw.logit(3), "source": "zero"}


HALF = "a \ud800 b"
SPARSE, META = torch.zeros(WIDTH).to_sparse(), torch.zeros(WIDTH, device="meta")
CALLS: dict[str, Any] = {
    **{
        f"mean {name}": lambda dataset=dataset: swept(source=cw.mean(model(), dataset()))
        for name, dataset in {
            "[None]": lambda: [None],
            "tensor": ids,
            "[tensor]": lambda: [ids()],
            "mapping": lambda: {"input_ids": ids()},
            "generator": lambda: iter([None]),
            "[run]": lambda: [base()],
            "text": lambda: [HALF],
        }.items()
    },
    **{f"demand {given!r}": lambda given=given: base().demand(given) for given in (None, 0, 5, 1.5, b"x")},
    **{f"fork demand {given!r}": lambda given=given: base().fork().demand(given) for given in (None, 0, 5)},
    **{
        f"nodes {given!r}": lambda given=given: cw.Circuit.from_nodes(model(), [given])
        for given in (None, 3, ())
    },
    **{
        f"devices {given!r}": lambda given=given: cw.Processes(devices=[given])
        for given in cast(Any, (None, 3, b"cpu", []))
    },
    **{
        f"part {given!r}": lambda given=given: base()[Place("z", 1, part=given)]
        for given in (None, 5, "x", [1])
    },
    **{f"layer {one!r}": lambda one=one: base()[Place("z", one)] for one in cast(Any, ("x", [1], {}))},
    **{f"name {given!r}": lambda given=given: base()[Place(given, 1)] for given in (None, 5, [1])},
    "dictionary of a long name": lambda: cw.dictionary("x" * 100_000),
    **{
        f"{kind} of {place!r}": lambda place=place, call=call: call(place)
        for kind, call in {
            "sweep": swept,
            "sweep of a list": lambda given: swept([given]),
            "reading": lambda given: base()[given],
            "attribution": lambda given: (
                model().attribute(given, base=base(), source="zero", metric=cw.logit(3)).run()
            ),
            "question": lambda given: model().ask([TEXT], sites=given, metric=cw.logit(3), source="zero"),
            "keep": lambda given: model().run(TEXT, keep=given),
        }.items()
        for place in (torch.zeros(3), torch.tensor(0.5), np.zeros(3), b"z", META, SPARSE)
    },
    **{
        f"{kind} {name}": lambda given=given, call=call: call(given(ids()))
        for kind, call in {
            "run of": lambda given: model().run(input_ids=given),
            "base of": lambda given: swept(base={"input_ids": given}),
            "prompt of": lambda given: model().generate(given, 1),
            "capture with": lambda given: cw.capture(model().module, input_ids=given),
        }.items()
        for name, given in {
            "meta": lambda given: given.to("meta"),
            "sparse": lambda given: given.to_sparse(),
            "complex": lambda given: given.to(torch.complex64),
            "unknown": lambda given: given + 10**6,
        }.items()
    },
    **{
        f"{kind} {value.layout} {value.device}": lambda value=value, call=call: call(value)
        for kind, call in {
            "add": lambda given: swept(source=cw.add(given)),
            "cell": lambda given: swept([cw.cell(("resid_post", 1), source=given)], source=None),
            "patch": lambda given: patched(
                given.expand(1, 15, WIDTH) if given.is_meta else ids().to_sparse()
            ),
        }.items()
        for value in (SPARSE, META)
    },
    **{
        f"cell {number:g}": lambda number=number: swept(
            [cw.cell(("resid_post", 1), source=number)], source=None
        )
        for number in (1e300, -1e300)
    },
    "cell of a huge number": lambda: swept([cw.cell(("resid_post", 1), source=10**400)], source=None),
    "half of a pair, run": lambda: model().run(HALF),
    "half of a pair, lens": lambda: base().lens(tokens=[HALF]),
    "half of a pair, prompt": lambda: model().generate(HALF, 1),
    "endless site": lambda: cw.site("resid_post", layer=1, pos=ENDLESS),
    "endless layers": lambda: cw.site("resid_post", layer=ENDLESS),
    "endless sites": lambda: cw.sites("resid_post", layer=":", pos=ENDLESS),
    "endless edges": lambda: model().edges(pos=ENDLESS),
    "endless positions": lambda: model().generate(TEXT, 1, [(("mlp_out", 0), "zero")], pos=ENDLESS),
    "array of positions": lambda: model().generate(TEXT, 1, pos=np.zeros(3)),
    "endless metric": lambda: cw.logit(3, pos=ENDLESS),
    "endless answers": lambda: cw.prob(ENDLESS),
    "endless lens": lambda: base().lens(tokens=ENDLESS),
    "endless cells": lambda: (
        model().sweep("resid_post", base=base(), source="zero", metric=cw.logit(3)).of_cells(ENDLESS)
    ),
    **{
        f"targets {name}": lambda targets=targets: swept(metric=cw.cross_entropy(targets()))
        for name, targets in {
            "beyond the vocabulary": lambda: ids() + 10**6,
            "below 0": lambda: ids() * 0 - 1,
            "left out": lambda: torch.full_like(ids(), -100),
            "bool": lambda: ids().bool(),
            "meta": lambda: ids().to("meta"),
        }.items()
    },
    **{
        f"{kind} {name}": lambda given=given, call=call: call(given)
        for kind, call in {
            "senders": lambda given: path_patched(given, ["logits"]),
            "receivers": lambda given: path_patched(["m0"], given),
            "demand": lambda given: base().demand(given),
            "cell of": lambda given: cw.cell(given, source="zero"),
            "cells of": lambda given: cw.cells(given, sources={"zero": "zero"}),
            "prompts": lambda given: model().ask(given),
            "nodes": lambda given: cw.Circuit.from_nodes(model(), given),
            "edges": lambda given: cw.Circuit.made(model(), given),
            "chosen edges": lambda given: model().edges()[given],
            "patches": lambda given: model().generate(TEXT, 1, given),
            "kept": lambda given: model().run(TEXT, keep=given),
        }.items()
        for name, given in {"tensor": torch.tensor(1.0), "array": np.array(1.0)}.items()
    },
    **{
        f"{kind} {index!r}": lambda index=index, call=call: call(index)
        for kind, call in {
            "site": lambda given: base()[cw.site("z", layer=1, head=given)],
            "layers": lambda given: cw.site("z", layer=given),
            "sites": lambda given: swept(cw.sites("z", layer=1, head=given)),
            "part": lambda given: base()[Place("z", 1, part={"head": given})],
            "edges": lambda given: model().edges()[given],
        }.items()
        for index in (slice(0, 3, 0), "0:3:0", "::0")
    },
    **{
        f"workers of {kind}": lambda call=call: call(workers=torch.nn.Linear(3, 3))
        for kind, call in {
            "sweep": lambda **given: (
                model().sweep(("resid_post", 1), base=base(), source="zero", metric=cw.logit(3)).run(**given)
            ),
            "evaluate": lambda **given: cw.Circuit.from_nodes(model(), ["m1"]).evaluate(**ablated(), **given),
            "curve": lambda **given: cw.Circuit.from_scores(
                model(), {"input->m1": 1.0, "m1->logits": 1.0}, top=2
            ).curve(**ablated(), **given),
            "acdc": lambda **given: model().find_circuit(**ablated(), threshold=1.0).run(**given),
        }.items()
    },
    **{
        f"{kind} {name}": lambda given=given, call=call: call(given)
        for kind, call in {
            "token": cw.logit,
            "position": lambda given: cw.logit(3, pos=given),
            "lens": lambda given: base().lens(tokens=given),
        }.items()
        for name, given in {
            "meta": torch.ones(1, device="meta", dtype=torch.long),
            "sparse": torch.ones(1, dtype=torch.long).to_sparse(),
        }.items()
    },
    "out of a surrogate": lambda: (
        model().sweep(("resid_post", 1), base=base(), source="zero", metric=cw.logit(3)).run(out="\ud800")
    ),
    "folder of a surrogate": lambda: swept().save(Path("\ud800")),
    "prompt of truths": lambda: model().generate(ids().bool(), 1),
    **{
        f"position {pos} of 17": lambda pos=pos: model().generate(
            TEXT, 3, [(cw.site("resid_post", layer=2, pos=pos), "zero")]
        )
        for pos in (17, 500, [3, 500], slice(17, None))
    },
    "seed that draws nothing, attribution": lambda: (
        model().attribute("z", base=base(), source="zero", metric=cw.logit(3), seed=7).run()
    ),
    **{
        f"log {log!r}": lambda log=log: cw.Circuit.made(model(), ["input->m0"], log=log)
        for log in ([0, None], [("input->m0", True, 1.0)], [Decision("m0", True, 1.0)])
    },
    "endless log": lambda: cw.Circuit.made(model(), ["input->m0"], log=cast(Any, ENDLESS)),
    "endless components": lambda: cw.Circuit.from_nodes(model(), cast(Any, ENDLESS)),
    "endless demand": lambda: base().demand(ENDLESS),
    "metrics of no run": lambda: model().sweep(("resid_post", 1), **ablated()).read_metrics(5),
    "half of a surrogate pair as a label": lambda: cw.cells(("mlp_out", 0), sources={"\ud800": "zero"}),
    "endless places": lambda: swept(ENDLESS),
    "endless places to attribute to": lambda: model().attribute(ENDLESS, **ablated()),
    "endless places to ask about": lambda: model().ask([question()], sites=ENDLESS),
    "endless places together": lambda: swept([ENDLESS]),
    "endless senders": lambda: path_patched(ENDLESS, "logits"),
    "endless receivers": lambda: path_patched("a0.h1", ENDLESS),
    **{
        f"source {given!r}": lambda given=given: model().find_circuit(
            **{**ablated(), "source": given}, threshold=1.0
        )
        for given in cast(Any, (np.array([1, 2]), (np.array([1, 2]), 3), torch.ones(2)))
    },
    "endless keep": lambda: model().run(TEXT, keep=ENDLESS),
    **{
        f"imaginary vector, {kind}": lambda call=call: call(cw.add(1j * torch.ones(WIDTH)))
        for kind, call in {
            "sweep": lambda given: swept(source=given),
            "patch": patched,
            "prompt": lambda given: model().generate(TEXT, 1, [(("resid_post", 1), given)]),
        }.items()
    },
    "a text and ids": lambda: model().run(TEXT, input_ids=ids()),
    "words of no tokens": lambda: model().generate(TEXT, 1, bad_words_ids=[[]]),
    **{
        f"count {flag!r}": lambda flag=flag: swept().strongest(top=flag)
        for flag in (torch.tensor(True), np.array(True))
    },
    **{
        f"{kind} of {given!r}": lambda given=given, call=call: call(graph(), given)
        for kind, call in {
            "world": lambda of, given: cw.World(of).demand(given),
            "plan": lambda of, given: cw.World(of).plan(given),
            "cone": lambda of, given: of.cone(given),
            "discard": lambda of, given: of.discard(given),
            "gradients": lambda of, given: cw.gradients(of, "y", given),
            "gradients of several": lambda of, given: cw.gradients(of, "y", [given]),
        }.items()
        for given in cast(Any, (torch.tensor(1.0), np.array(1.0), [[]]))
    },
    **{
        f"values {given!r}": lambda given=given: cw.World.partial(graph(), given)
        for given in cast(Any, (None, 3, "x", ["x"]))
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_what_nobody_means_is_refused_by_an_error_of_ours(name: str) -> None:
    with pytest.raises(ConewiseError) as found:
        CALLS[name]()
    assert len(str(found.value)) < 1_000


JOBS: dict[str, Callable[[], Any]] = {
    "Sweep": lambda: model().sweep(("resid_post", 1), **ablated()),
    "Attribution": lambda: model().attribute(("resid_post", 1), **ablated()),
    "Search": lambda: model().find_circuit(**ablated(), threshold=1.0),
    "CausalTrace": lambda: model().causal_trace(TEXT, subject=[1], metric=cw.logit(3), n=1),
    "Question": lambda: model().ask([question()], source="zero"),
    "QuestionAttribution": lambda: model().ask([question()], source="zero").attribute("atp"),
}


def question() -> dict[str, str]:
    return {"clean": TEXT, "answer": " Mary", "wrong": " John"}


@pytest.mark.parametrize("name", JOBS)
def test_an_option_that_a_job_does_not_have_is_refused_with_those_that_it_has(name: str) -> None:
    job = JOBS[name]()
    for option in ("executor", "phases", "how", "args"):
        with pytest.raises(ArgumentError, match=rf"`run` has no option '{option}' here; it has out, resume"):
            job.run(**{option: 5})


def test_numbers_of_any_size_and_kind_are_numbers(tmp_path: Path) -> None:
    """Whole numbers of more than 64 bits are taken for what they are; a name alone is demanded as one."""
    large = swept(source=cw.add(torch.ones(WIDTH), 10**30)).values
    assert torch.equal(large, swept(source=cw.add(torch.ones(WIDTH), 1e30)).values)
    cells = [cw.cell(("resid_post", 1), source=source, label=str(source)) for source in (10**30, 1e30)]
    first, second = swept(cells, source=None).values
    assert first == second
    (logits,) = base().demand("logits") if "logits" in model().graph.sites else (base().logits,)
    assert torch.equal(logits, base().logits)
    assert model().run(TEXT, keep=np.array(["z"]))["z", 1].shape == base()["z", 1].shape
    assert cw.Processes(devices=[torch.device("cpu")]) is not None


def test_a_metric_that_is_a_plain_number_keeps_its_digits() -> None:
    for number in (0.1, 10**30, 2**53 + 0.0):

        def read(_: Any, number: float = number) -> float:
            return number

        plain = cw.metric(read, key="plain", name="plain")
        for metrics in (plain, [cw.logit(3), plain]):
            assert swept(metric=metrics).metric("plain").item() == float(number)


def test_targets_are_whole_numbers_of_any_size_in_the_vocabulary() -> None:
    """−100 is left out, in each dtype; a prompt without any target has no mean."""
    targets = ids().roll(-1, 1)
    expected = swept(metric=cw.cross_entropy(targets)).values
    for dtype in (torch.int32, torch.int16):
        assert torch.equal(swept(metric=cw.cross_entropy(targets.to(dtype))).values, expected)
    with pytest.raises(MetricError, match=r"target token \d+ is not in the vocabulary of \d+"):
        swept(metric=cw.cross_entropy(targets + 10**6))
    targets = torch.cat([targets, torch.full_like(targets, -100)])
    with pytest.raises(MetricError, match="prompt 1 has no target"):
        cw.cross_entropy(targets)


def test_positions_that_are_written_can_be_patched() -> None:
    """Up to the last but one that is written: the last token is never read."""
    place = cw.site("resid_post", layer=2, pos=16)
    assert model().generate(TEXT, 3, [(place, "zero")]).new.shape == (1, 3)
    assert model().generate(TEXT, 3, [(cw.site("resid_post", layer=2, pos="3:500"), "zero")])


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    for call in (cw.metric, cw.intervention):
        with pytest.raises(ArgumentError, match=r"`key` is .*; expected a text"):
            call(torch.abs, key="\ud800")
