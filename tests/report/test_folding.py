"""A model folded by layer: every node in one part, and cones that are the plan's and the ledger's."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.anatomy.selectors import Cell
from conewise.errors import MissingSiteError, SweepError
from conewise.model import Model
from conewise.program.export import export
from conewise.program.walk import output_names
from conewise.report.folded import Folded, without_part
from conewise.report.folding import ROLES, fold, group
from conewise.runs.run import baseline
from conewise.sweeps.sweep import Sweep
from tests.anatomy import made
from tests.program.zoo import ZOO
from tests.sweeps import small
from tests.sweeps.captured import inputs
from tests.sweeps.captured import small as zoo

ARCHITECTURES = (
    "gpt2",
    "llama",
    "gptj",
    "gpt_neox",
    "bert",
    "t5",
    "mixtral",
    "olmo2",
    "mamba",
    "skips",
    "two_and_two",
)


def captured(name: str) -> Model:
    return zoo(name, ZOO[name].attention[0])


def first_number(outputs: Any) -> Tensor:
    """One number for each row of the batch, of whatever comes out first."""
    out: Tensor = next(iter(outputs.values())) if hasattr(outputs, "values") else outputs
    return out.flatten(1)[:, 0]


def sweep_of(name: str, sites: Any, metric: Any = None) -> Sweep:
    model = captured(name)
    base, source = (model.run(**inputs(name, seed=seed)) for seed in (1, 2))
    made: Sweep = model.sweep(
        sites, base=base, source=source, metric=metric or cw.logit_diff(answer=7, wrong=9)
    )
    return made


def folded_of(sweep: Sweep, base: Any) -> Folded:
    return fold(sweep.model, sweep.cells, targets=sweep.targets(), base=base)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in {"gpt2", "llama", "bert", "t5", "mamba"} else [pytest.mark.slow]
        )
        for name in ARCHITECTURES
    ],
)
def test_every_node_is_in_exactly_one_part(name: str) -> None:
    program = captured(name).program
    found = Counter(node for part in group(program) for node in part.nodes)
    expected = [leaf.name for leaf in program.inputs] + [record.name for record in program.records]
    assert found == Counter(expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_part_reads_one_that_is_drawn_after_it(name: str) -> None:
    folded = fold(captured(name), [])
    assert all(start < end for start, end, _ in folded.edges)
    rows = [part.row for part in folded.parts]
    assert len([row for row, _ in itertools.groupby(rows)]) == len(set(rows)), "a row is drawn in two places"


def test_the_layers_of_a_transformer_have_the_parts_that_people_know() -> None:
    folded = fold(captured("llama"), [])
    layer = {part.role: part.nodes for part in folded.parts if part.layer == 1}
    assert list(layer) == ["norm", "qkv", "heads", "out", "add", "mlp_norm", "mlp", "mlp_out", "mlp_add"]
    assert layer["norm"] == layer["mlp_norm"] == 6  # a root mean square norm is six operations
    assert layer["out"] == layer["mlp_out"] == layer["add"] == layer["mlp_add"] == 1
    ends = [part.label for part in folded.parts if part.layer is None]
    assert ends == ["input", "positions, mask", "embedding", "final norm", "unembedding"]


def test_a_parallel_block_has_one_sum_and_one_norm() -> None:
    layer = [part.role for part in fold(captured("gptj"), []).parts if part.layer == 0]
    assert layer == ["norm", "qkv", "heads", "out", "mlp", "mlp_out", "mlp_add"]


def test_two_stacks_stand_one_after_the_other() -> None:
    rows = [row for row, _ in fold(captured("t5"), []).rows]
    assert rows == [
        "encoder embedding",
        "encoder 0",
        "encoder 1",
        "after encoder layer 1",
        "decoder embedding",
        "decoder 0",
        "decoder 1",
        "output",
    ]


def test_a_module_without_layers_is_folded_by_its_submodules() -> None:
    folded = fold(captured("skips"), [])
    modules = [part.label for part in folded.parts if part.role == "module"]
    assert modules == ["stem", "norm", *(f"blocks.{i}.{j}" for i in range(3) for j in range(3)), "head"]


def test_every_role_of_a_layer_has_a_name_and_words() -> None:
    assert all(label and meaning for label, meaning in ROLES.values())


@pytest.mark.parametrize(
    ("name", "sites", "metric"),
    [
        ("gpt2", cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":"), None),
        ("gpt2", cw.sites("resid_pre", layer=":", pos=":") + cw.sites("post", layer=1, neuron="0:40"), None),
        ("llama", cw.sites("q", layer=":", head=":") + cw.sites("k", layer=":"), None),
        ("skips", ["stem", "blocks.0.1", "blocks.2.0", "pixel_values"], first_number),
        ("two_and_two", ["left", "out.input"], first_number),
    ],
    ids=["gpt2 heads", "gpt2 positions", "llama queries", "skips", "two_and_two"],
)
def test_the_sum_of_the_cones_is_what_the_plan_says(name: str, sites: Any, metric: Any) -> None:
    sweep = sweep_of(name, sites, metric)
    folded = folded_of(sweep, baseline(sweep.model, (), inputs(name, seed=1)))
    plan = sweep.plan(evaluator="serial")
    assert folded.node_evaluations == plan.node_evaluations
    assert folded.flops == plan.flops
    assert folded.full_evaluations * plan.worlds == plan.full_evaluations
    assert folded.full_flops * plan.worlds == plan.full_flops
    assert sum(count for _, count in folded.runs) == len(sweep.cells)


def test_sets_of_sites_and_functions_are_planned_alike() -> None:
    pairs = [[("z", 0), ("z", 1)], [("z", 1), ("mlp_out", 0)], [("resid_pre", 0), ("resid_post", 1)]]
    model = captured("gpt2")
    base = model.run(**inputs("gpt2", seed=1))
    for source, whole in ((model.run(**inputs("gpt2", seed=2)), True), (lambda value: value * 2, False)):
        sweep: Sweep = model.sweep(pairs, base=base, source=source, metric=cw.logit_diff(answer=7, wrong=9))
        folded = fold(model, sweep.cells, targets=sweep.targets(), base=base, whole=whole)
        assert folded.node_evaluations == sweep.plan().node_evaluations


def test_what_is_patched_in_the_base_already_is_patched_again() -> None:
    model = captured("gpt2")
    run, source = (model.run(**inputs("gpt2", seed=seed)) for seed in (1, 2))
    with run.fork() as base:
        base.patch(("mlp_out", 1), source)
        sites = cw.sites("z", layer=":")
        sweep: Sweep = model.sweep(sites, base=base, source=source, metric=cw.logit_diff(answer=7, wrong=9))
        folded = folded_of(sweep, base)
        assert folded.node_evaluations == sweep.plan().node_evaluations
        assert folded.node_evaluations < folded_of(sweep, run).node_evaluations


@pytest.mark.parametrize("name", ["gpt2", "llama", "skips", "two_and_two"])
def test_a_cone_is_what_the_engine_tells(name: str) -> None:
    """Part by part: what a fork's ledger lists as invalidated, recomputed and reused."""
    model = captured(name)
    run, source = (model.run(**inputs(name, seed=seed), keep="all") for seed in (1, 2))
    part_of = {node: at for at, part in enumerate(group(model.program)) for node in part.nodes}
    places = {"gpt2": ["z", "q", "mlp_out"], "llama": ["v", "rot_q", "resid_mid"]}.get(name, [])
    sites: list[Any] = [(kind, layer) for kind in places for layer in (0, 2)]
    sites = sites or {"skips": ["norm", "blocks.1.0", "head"], "two_and_two": ["left", "right", "out"]}[name]
    folded = fold(model, sites)
    for (number, _), site in zip(folded.runs, sites, strict=True):
        cone = folded.cones[number]
        with run.fork() as world:
            world.patch(site, source)
            world.demand(output_names(model.program))
            ledger = world.ledger
            for told, counted in (
                (ledger.recomputed, cone.recomputed),
                (ledger.invalidated, cone.invalidated),
                (ledger.reused, cone.reused),
            ):
                by_part = Counter(part_of[node] for node in told)
                assert [by_part[at] for at in range(len(folded.parts))] == list(counted)


def test_what_no_one_asked_for_is_invalid_and_not_recomputed() -> None:
    model = captured("two_and_two")
    asked = output_names(model.program)[1:2]
    (cone,) = fold(model, ["left"], targets=asked).cones
    everything = fold(model, ["left"]).cones[0]
    assert cone.invalidated == everything.invalidated == everything.recomputed
    assert sum(cone.recomputed) < sum(everything.recomputed)


def test_cells_at_one_node_share_a_cone() -> None:
    model = captured("gpt2")
    cells = [
        Cell((cw.site("z", layer=layer, head=head, pos=pos),), 0)
        for layer in range(3)
        for head in range(4)
        for pos in range(100)
    ]
    folded = fold(model, cells)
    assert len(folded.cones) == 3
    assert folded.runs == ((0, 400), (1, 400), (2, 400))
    assert folded.cone("z[layer=2, head=3, pos=7]") is folded.cones[2]
    assert folded.node_evaluations == 400 * fold(model, [("z", 0), ("z", 1), ("z", 2)]).node_evaluations
    assert len(folded.to_json()) < 1.01 * len(fold(model, cells[::100]).to_json())


def test_names_of_one_node_share_a_cone_too() -> None:
    folded = fold(captured("gpt2"), [("resid_post", 0), ("resid_pre", 1), "blocks.1.hook_resid_pre"])
    assert len(folded.cones) == 1
    assert folded.cones[0].names == ("resid_post[layer=0]", "resid_pre[layer=1]", "blocks.1.hook_resid_pre")
    assert folded.runs == ((0, 3),)


NAMES = Path(__file__).parents[1] / "javascript" / "names_without_part.json"
"""The script of cones is tested with the same names."""


@pytest.mark.parametrize(("name", "bare"), json.loads(NAMES.read_text(encoding="utf-8")))
def test_a_name_without_its_part(name: str, bare: str) -> None:
    assert without_part(name) == bare


def test_every_cell_of_a_sweep_finds_its_cone_by_name() -> None:
    sweep = small.sweep_over(small.model(), [cw.sites("z", layer=":", head=":", pos=":"), ("mlp_out", 1)])
    folded = folded_of(sweep, small.model().run(input_ids=small.prompts(1, 2)))
    in_order = [cone for cone, count in folded.runs for _ in range(count)]
    assert [folded.cone(cell.name) for cell in sweep.cells] == [folded.cones[cone] for cone in in_order]


@pytest.mark.parametrize("name", ["gpt2", "t5", "skips"])
def test_json_brings_back_the_same(name: str) -> None:
    model = captured(name)
    sites = (
        ["stem", "blocks.1.0"] if name == "skips" else [site.name for site in model.sites if site.layer == 1]
    )
    places = [site for site in sites if not site.endswith("hook_result")]
    folded = fold(model, places, base=model.run(**inputs(name)))
    assert Folded.from_json(folded.to_json()) == folded
    counts = [(c, p.nodes) for one in folded.cones for c, p in zip(one.recomputed, folded.parts, strict=True)]
    assert any(0 < count < nodes for count, nodes in counts) is (name != "skips"), (
        "a part that is cut by a cone"
    )


def test_json_that_is_something_else_is_refused() -> None:
    text = fold(captured("skips"), ["stem"]).to_json()
    data = json.loads(text)
    for wrong, said in (
        ("{", "it is not JSON"),
        ("[]", "it is not an object"),
        ("{}", "it does not say what it is, where kind: 'conewise folded' is expected"),
        (
            json.dumps({key: value for key, value in data.items() if key != "cones"}),
            "a folded model has no cones",
        ),
        (json.dumps({**data, "parts": [[1]]}), r"parts\[0\] has 1 items, where 8 are expected"),
    ):
        with pytest.raises(SweepError, match=said):
            Folded.from_json(wrong)


def test_a_site_that_was_not_folded_is_named() -> None:
    folded = fold(captured("gpt2"), [("z", 0)])
    with pytest.raises(
        MissingSiteError, match=r"no cone of 'q\[layer=1\]' was folded: there are 1, z\[layer=0\]"
    ):
        folded.cone("q[layer=1]")


def test_what_is_no_node_has_no_cone() -> None:
    with pytest.raises(SweepError, match="no node of the graph"):
        fold(captured("gpt2"), [("result", 0)])


def test_without_a_run_there_are_no_flops() -> None:
    folded = fold(captured("gpt2"), [("z", 0)])
    assert folded.full_flops == folded.flops == 0
    assert dataclasses.replace(folded, cones=()).names == {}


def test_a_million_cells_are_no_more_than_their_nodes() -> None:
    places = (cw.site("z", layer=layer, pos=pos) for layer in range(3) for pos in range(1000))
    cells = [Cell((place,), 0) for place in places]
    repeated = itertools.chain.from_iterable(itertools.repeat(cells, 20))
    assert len(fold(captured("gpt2"), repeated).to_json()) < 10_000


def test_the_inputs_can_be_patched_too() -> None:
    model = captured("gpt2")
    (cone,) = fold(model, ["input_ids"]).cones
    folded = fold(model, [("resid_pre", 0)])
    assert cone.at == (0,)
    assert sum(cone.recomputed) > folded.node_evaluations


FORMS: dict[str, Any] = {
    "attention_only": lambda: made.stacked(made.attention_only, ln1=made.norm, attn=made.Heads),
    "one_layer": made.OneLayer,
    "lists": made.Lists,
    "nested": made.Nested,
}


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_any_form_have_every_node_in_one_part(form: str) -> None:
    given: dict[str, Any] = {"ids": torch.zeros(2, made.LENGTH, dtype=torch.long)}
    if form == "one_layer":
        given["positions"] = torch.arange(made.LENGTH).repeat(2, 1)
    program = export(FORMS[form]().eval(), (), given).program
    parts = group(program)
    placed = Counter(node for part in parts for node in part.nodes)
    assert placed == Counter([leaf.name for leaf in program.inputs] + [r.name for r in program.records])
    layers = {part.layer for part in parts if part.layer is not None}
    for layer in layers:
        roles = [part.role for part in parts if part.layer == layer]
        expected = [*(["norm"] if form != "lists" else []), "qkv", "heads", "out", "add"]
        expected += [] if form == "attention_only" else ["mlp_norm", "mlp", "mlp_out", "mlp_add"]
        assert [role for role in roles if role not in {"after", "rest"}] == expected
