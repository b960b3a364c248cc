"""A sweep over edges: every reader sees another part of one writer, and all behind it is computed anew."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.anatomy.places import EdgePlace
from conewise.errors import ArgumentError, EdgeError, PatchError, SiteError, UnhookedWarning
from conewise.paper import theory
from conewise.runs.run import Run
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.result import Result
from conewise.sweeps.sweep import Sweep
from tests.circuits.edge_models import LENGTH, inputs_of, module_of, readers_of, run_of
from tests.circuits.hook_oracle import HookOracle
from tests.ground_truth.stack import Outputs, Stack

NAMES = ["gpt2", "llama", "gpt_neox", "gemma2"]
METRIC = cw.logit_diff(answer=3, wrong=5)


def model_of(name: str) -> Any:
    """The model that the runs are of."""
    return run_of(name, 0).model


def difference(logits: Tensor) -> Tensor:
    """What METRIC reads, for each prompt."""
    return (logits[:, -1, 3] - logits[:, -1, 5]).double()


@functools.cache
def swept(name: str) -> tuple[Sweep, Result]:
    """Every edge of a small model, as a wavefront."""
    model = model_of(name)
    sweep = model.sweep(model.edges(), base=run_of(name, 0), source=run_of(name, 1), metric=METRIC)
    return sweep, sweep.run()


def some(name: str, step: int = 11) -> Any:
    return model_of(name).edges()[::step]


@pytest.mark.parametrize("name", NAMES)
def test_every_edge_is_what_plain_hooks_say(name: str) -> None:
    oracle = HookOracle(module_of(name))
    _, result = swept(name)
    edges = model_of(name).edges()
    assert list(edges.names) == oracle.edges()
    inputs, source = inputs_of(name, 0), oracle.forward(**inputs_of(name, 1))
    expected = torch.stack([difference(oracle.edge(one, source, inputs).logits) for one in edges.names])
    span = float((difference(source.logits) - difference(oracle.forward(**inputs).logits)).abs().max())
    assert span > 0.01
    torch.testing.assert_close(result.per_prompt[0], expected, rtol=0, atol=2e-5 * max(1.0, span))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_computed_was_planned_node_by_node(name: str) -> None:
    sweep, result = swept(name)
    assert result.ledger.node_evaluations == result.plan.node_evaluations == sweep.plan().node_evaluations
    assert result.ledger.launches == result.plan.launches


@pytest.mark.parametrize("name", NAMES)
def test_every_edge_costs_what_the_theory_says(name: str) -> None:
    """Readers once for each writer, and a cone for each edge: from the graph alone, to the node."""
    sweep, result = swept(name)
    model = model_of(name)
    cost = theory.edge_cost(model.graph, readers_of(model.components()), sweep.targets())
    assert len(result.plan.chunks) == 1
    assert cost.total == result.plan.node_evaluations == result.ledger.node_evaluations
    assert cost.one_by_one == sweep.plan(evaluator="serial").node_evaluations > cost.total
    assert cost.full == result.plan.full_evaluations
    kv_heads = 2 if name in {"llama", "gemma2"} else 4
    assert cost.edges == theory.edge_count(2, 4, kv_heads, parallel=name == "gpt_neox")


def test_edge_by_edge_nothing_is_shared() -> None:
    model = model_of("llama")
    sweep = model.sweep(some("llama"), base=run_of("llama", 0), source=run_of("llama", 1), metric=METRIC)
    ends = [model.components().edge(name)[1] for name in some("llama").names]
    readers = [theory.ReaderAt(reader.entry, reader.node, 1) for reader in ends]
    cost = theory.edge_cost(model.graph, readers, sweep.targets())
    assert cost.total == sweep.run(evaluator="serial").ledger.node_evaluations


@pytest.mark.parametrize("name", NAMES)
def test_one_by_one_is_the_same(name: str) -> None:
    model = model_of(name)
    sweep = model.sweep(some(name), base=run_of(name, 0), source=run_of(name, 1), metric=METRIC)
    serial = sweep.run(evaluator="serial")
    assert serial.ledger.node_evaluations == serial.plan.node_evaluations
    torch.testing.assert_close(serial.values, swept(name)[1].values[::11], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_on_the_module_agree(name: str) -> None:
    with warnings.catch_warnings():
        if name in {"gpt2", "gpt_neox"}:  # no module shows queries, keys and values by themselves
            warnings.simplefilter("ignore", UnhookedWarning)
        check = swept(name)[1].verify(n=12)
    assert check.ok, str(check)


def test_a_budget_cuts_the_worlds_and_changes_nothing() -> None:
    sweep, whole = swept("llama")
    budget = int(0.6 * whole.plan.peak_bytes)
    cut = sweep.run(max_memory=budget)
    assert len(cut.plan.chunks) > 1
    assert cut.plan.peak_bytes <= budget
    assert cut.ledger.node_evaluations == cut.plan.node_evaluations
    torch.testing.assert_close(cut.values, whole.values, rtol=0, atol=2e-5)


def test_readers_work_is_shared_within_a_pass_alone() -> None:
    """More passes over one reader's edges compute what lies before it once more for each."""
    sweep, whole = swept("llama")
    edges = model_of("llama").edges()
    serial = sweep.plan(evaluator="serial")
    assert whole.plan.node_evaluations < serial.node_evaluations
    assert serial.worlds == whole.plan.worlds == len(edges)


def test_inputs_are_swept_like_runs() -> None:
    model, edges = model_of("gpt2"), some("gpt2")
    given = model.sweep(edges, base=inputs_of("gpt2", 0), source=inputs_of("gpt2", 1), metric=METRIC).run()
    torch.testing.assert_close(given.values, swept("gpt2")[1].values[::11], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_computed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that parts and readers are made of is kept by the pass that computes base and source."""
    model = model_of(name)
    sweep = model.sweep(some(name), base=inputs_of(name, 0), source=inputs_of(name, 1), metric=METRIC)

    def refuse(*_: Any) -> None:
        raise AssertionError("a baseline is computed again")

    monkeypatch.setattr("conewise.runs.run.computed", refuse)
    result = sweep.run()
    torch.testing.assert_close(result.values, swept(name)[1].values[::11], rtol=0, atol=2e-5)


def test_batches_are_swept_one_after_another() -> None:
    model, edges = model_of("gpt2"), some("gpt2")
    pairs = [(inputs_of("gpt2", at), inputs_of("gpt2", at + 1)) for at in (0, 4)]
    bases, sources = zip(*pairs, strict=True)
    both = model.sweep(edges, base=list(bases), source=list(sources), metric=METRIC).run()
    assert both.ledger.node_evaluations == both.plan.node_evaluations
    alone = [model.sweep(edges, base=base, source=source, metric=METRIC).run() for base, source in pairs]
    expected = torch.cat([one.per_prompt for one in alone], -1)
    torch.testing.assert_close(both.per_prompt, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_edge_at_one_position(name: str) -> None:
    model, oracle = model_of(name), HookOracle(module_of(name))
    edges = model.edges(pos=[2, -1])[::23]
    result = model.sweep(edges, base=run_of(name, 0), source=run_of(name, 1), metric=METRIC).run()
    inputs, source = inputs_of(name, 0), oracle.forward(**inputs_of(name, 1))
    expected = []
    for edge in edges.names:
        whole, _, pos = edge.partition("@")
        expected.append(difference(oracle.edge(whole, source, inputs, int(pos) % LENGTH).logits))
    torch.testing.assert_close(result.per_prompt[0], torch.stack(expected), rtol=0, atol=2e-5)
    if name == "llama":
        assert result.verify(n=6).ok


def ablated(name: str, parts: dict[str, Tensor]) -> Tensor:
    oracle, inputs = HookOracle(module_of(name)), inputs_of(name, 0)
    return torch.stack(
        [difference(oracle.removed([edge], parts, inputs).logits) for edge in some(name).names]
    )


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize("kind", ["zero", "mean", "dataset", "function", "add"])
def test_what_is_written_instead(name: str, kind: str) -> None:
    model, oracle = model_of(name), HookOracle(module_of(name))
    own = oracle.forward(**inputs_of(name, 0)).parts
    others = [oracle.forward(**inputs_of(name, at)).parts for at in (5, 6)]
    vector = torch.linspace(-1, 1, own["input"].shape[-1])
    given: dict[str, tuple[Any, Any]] = {
        "zero": ("zero", torch.zeros_like),
        "mean": ("mean", lambda part: part.mean((0, 1), keepdim=True).expand_as(part)),
        "function": (lambda part: -0.5 * part, lambda part: -0.5 * part),
        "add": (cw.add(vector, 2.0), lambda part: part + 2 * vector),
    }
    if kind == "dataset":
        source: Any = cw.mean(model, [inputs_of(name, at) for at in (5, 6)])
        means = {w: torch.cat([one[w] for one in others]).mean((0, 1), keepdim=True) for w in own}
        parts = {writer: means[writer].expand_as(part) for writer, part in own.items()}
    else:
        source, change = given[kind]
        parts = {writer: change(part) for writer, part in own.items()}
    result = model.sweep(some(name), base=run_of(name, 0), source=source, metric=METRIC).run()
    torch.testing.assert_close(result.per_prompt[0], ablated(name, parts), rtol=0, atol=1e-4)


def test_what_stands_in_the_base_stands_in_every_world() -> None:
    model, base, source = model_of("gpt2"), run_of("gpt2", 0), run_of("gpt2", 1)
    with base.fork() as world:
        world.patch(cw.site("z", layer=0, head=1), source.read(cw.site("z", layer=0, head=1)))
        result = model.sweep(some("gpt2"), base=world, source=source, metric=METRIC).run()
        serial = model.sweep(some("gpt2"), base=world, source=source, metric=METRIC).run(evaluator="serial")
        torch.testing.assert_close(result.values, serial.values, rtol=0, atol=2e-5)
        none = [n for n, edge in enumerate(some("gpt2").names) if edge.startswith("a0.h1->")]
        assert none
        for number in none:  # the head writes already what it writes in the source
            assert abs(float(result.effect[number])) < 1e-4


def test_edges_and_sites_in_one_sweep() -> None:
    model, base, source = model_of("gpt2"), run_of("gpt2", 0), run_of("gpt2", 1)
    sites = cw.sites("z", layer=":", head=":")
    both = model.sweep(some("gpt2") + sites, base=base, source=source, metric=METRIC).run()
    alone = model.sweep(sites, base=base, source=source, metric=METRIC).run()
    torch.testing.assert_close(both[1], alone.values, rtol=0, atol=2e-5)
    torch.testing.assert_close(both[0], swept("gpt2")[1].values[::11], rtol=0, atol=2e-5)


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    sweep, whole = swept("gpt2")
    budget = int(0.5 * whole.plan.peak_bytes)

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(max_memory=budget, out=tmp_path / "run", progress=stop)
    result = sweep.run(max_memory=budget, out=tmp_path / "run", resume=True)
    assert result.ledger.resumed > 0
    assert result.ledger.node_evaluations == result.plan.node_evaluations
    assert result.equals(sweep.run(max_memory=budget))


def test_a_result_of_edges_is_saved_and_read_back(tmp_path: Path) -> None:
    _, result = swept("llama")
    loaded = cw.open(str(result.save(tmp_path / "edges")))
    assert isinstance(loaded, Result)
    assert loaded.equals(result)
    table = loaded.to_dataframe()
    assert list(table.columns[:4]) == ["site", "writer", "reader", "kind"]
    assert table["writer"][0] == "input"
    assert set(table["reader"]) == {name.partition("->")[2] for name in model_of("llama").edges().names}


def test_a_plan_of_edges_is_a_value() -> None:
    sweep, result = swept("gpt2")
    plan = SweepPlan.from_json(sweep.plan().to_json())
    assert plan == sweep.plan()
    assert plan.run(model_of("gpt2")).equals(result)


def test_edges_are_drawn_as_writers_by_readers() -> None:
    drawn = swept("gpt2")[1].plot()
    (heat,) = drawn.data
    assert heat.type == "heatmap"
    assert heat.y[0] == "input"
    assert heat.x[-1] == "logits"


def test_edges_are_chosen_by_name() -> None:
    edges = model_of("llama").edges()
    one = edges["a0.h1->a1.kv0<k>"]
    assert one.names == ("a0.h1->a1.kv0<k>",)
    (place,) = one.places
    assert isinstance(place, EdgePlace)
    assert (place.name, place.layer, dict(place.part)) == ("k", 1, {"kv_head": 0})
    assert set(edges.select(writer="a0.*", reader="*<v>").writers) == {"a0.h0", "a0.h1", "a0.h2", "a0.h3"}
    assert len(edges[3:7]) == 4
    both = edges[3:7] + edges[5:9]
    assert (both.names, both.writers, both.readers) == (
        edges[3:9].names,
        edges[3:9].writers,
        edges[3:9].readers,
    )
    with pytest.raises(TypeError, match="unsupported operand"):
        edges + cast(Any, 3)
    assert edges[-1].names == ("m1->logits",)
    assert "m0->m1" in edges
    assert model_of("llama").edges() is edges
    frame = edges.to_dataframe()
    assert list(frame.columns) == ["edge", "writer", "reader", "site", "layer"]
    assert repr(edges) == f"{len(edges):,} edges from 11 writers to {len(set(edges.readers))} readers"


def test_what_is_no_edge_is_refused() -> None:
    edges = model_of("gpt2").edges()
    with pytest.raises(EdgeError, match=r"no edge 'a0.h1->m9'.*Nearest"):
        edges["a0.h1->m9"]
    with pytest.raises(EdgeError, match="no edge from 'm1' to 'm0'"):
        edges.select(writer="m1", reader="m0")
    with pytest.raises(SiteError, match="no edges"):
        model_of("gpt2").sweep(edges[:0], base=run_of("gpt2", 0), source=run_of("gpt2", 1), metric=METRIC)
    with pytest.raises(EdgeError, match="several different"):
        model_of("gpt2").edges(pos=[1, 1])
    with pytest.raises(EdgeError, match="a slice, a name or a list of names, not by None"):
        edges[cast(Any, None)]
    with pytest.raises(EdgeError, match=r"such as 'a0.\*' or 'm1', not by 3"):
        edges.select(writer=cast(Any, 3))
    with pytest.raises(EdgeError, match="a position is a number"):
        model_of("gpt2").sweep("m0->m1@--1", base=run_of("gpt2", 0), source="zero", metric=METRIC)
    with pytest.raises(ArgumentError, match="`pos` is str ':'; expected a whole number or a sequence"):
        model_of("gpt2").edges(pos=":")


class BentStack(Stack):
    """A stack whose stream passes through what is no sum: no part of it can be told from others."""

    def forward(self, ids: Tensor) -> Outputs:
        x = self.entry(ids)
        for layer in self.blocks:
            x = torch.tanh(x + layer.attn(x))
        return Outputs(self.unembed(x))


def test_a_stream_without_parts_has_no_edges() -> None:
    stack = BentStack(
        tokens=5, length=4, width=8, layers=2, heads=2, head_width=4, neurons=0, outputs=5, is_causal=True
    )
    model = cw.capture(stack, ids=torch.tensor([[1, 2, 3, 4]]))
    with pytest.raises(EdgeError, match="passes through 'tanh'"):
        model.edges()
    with pytest.raises(EdgeError, match="passes through 'tanh'"):
        model.find_circuit(
            base={"ids": torch.tensor([[1, 2, 3, 4]])}, source="zero", metric=cw.logit(1), threshold=1.0
        ).run()


def test_edges_of_another_model_are_refused() -> None:
    edges = model_of("llama").edges()[:3]
    base, source = run_of("gpt_neox", 0), run_of("gpt_neox", 1)
    with pytest.raises(EdgeError, match="of another model"):
        model_of("gpt_neox").sweep(edges, base=base, source=source, metric=METRIC)


def test_nan_in_what_is_written_is_refused() -> None:
    model = model_of("gpt2")
    broken: Run = model.run(**inputs_of("gpt2", 1))
    with broken.fork() as world:
        world.patch(cw.site("mlp_out", layer=0), lambda value: torch.full_like(value, torch.nan))
        sweep = model.sweep(some("gpt2"), base=run_of("gpt2", 0), source=world, metric=METRIC)
        with pytest.raises(PatchError, match="NaN"):
            sweep.run()
