"""A captured model whose graph was changed: what follows the change equals hooks, all else is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.errors import GraphChangedError, MetricError, PatchError, SweepError
from conewise.model import Model

CLEAN = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
METRIC = cw.logit_diff(5, 6)
SITES = [("mlp_out", 0), ("mlp_out", 1), ("resid_pre", 2)]
PATHS = ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.1"]


@cache
def captured() -> Model:
    return cw.capture(cw.load("tiny"))


def redefined(model: Model) -> Callable[[], None]:
    """The second MLP is 0."""
    node = model.locate(("mlp_out", 1)).node
    old = model.graph.rule(node)
    model.graph.redefine(node, lambda *inputs: torch.zeros_like(old(*inputs)))
    return lambda: model.graph.redefine(node, old)


def grafted(model: Model) -> Callable[[], None]:
    """The same, by a block behind it."""
    graft = model.graph.graft_after(model.locate(("mlp_out", 1)).node, cw.chain(lambda value: value * 0))
    return lambda: model.graph.remove(graft)


def rewired(model: Model) -> Callable[[], None]:
    """The same: the stream behind the MLP is the one in front of it, and reads another order of inputs."""
    behind, before, mlp = (model.locate((kind, 1)).node for kind in ("resid_post", "resid_mid", "mlp_out"))
    old, inputs = model.graph.rule(behind), model.graph.inputs(behind)
    model.graph.redefine(behind, lambda written, stream: stream + 0 * written, [mlp, before])
    return lambda: model.graph.redefine(behind, old, inputs)


def grafted_on_an_edge(model: Model) -> Callable[[], None]:
    """The same, by a block in front of the stream behind the MLP alone."""
    edge = model.locate(("mlp_out", 1)).node, model.locate(("resid_post", 1)).node
    graft = model.graph.graft(edge, cw.chain(lambda value: value * 0))
    return lambda: model.graph.remove(graft)


def joined(model: Model) -> Callable[[], None]:
    """The same, by a node of its own that the stream behind the MLP reads."""
    mlp, behind = (model.locate((kind, 1)).node for kind in ("mlp_out", "resid_post"))
    rule, inputs = model.graph.rule(behind), model.graph.inputs(behind)
    fresh = model.graph.node("nothing", lambda value: value * 0, [mlp])
    model.graph.redefine(behind, rule, [fresh if name == mlp else name for name in inputs])

    def undo() -> None:
        model.graph.redefine(behind, rule, inputs)
        model.graph.discard([fresh])

    return undo


CHANGES = [redefined, grafted, rewired, grafted_on_an_edge, joined]


@pytest.fixture(params=CHANGES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    found = captured()
    undo = request.param(found)
    yield found
    undo()
    assert not found.changed_sites


def _first(seen: list[Any], _: Any) -> Any:
    return seen[0]


def by_hooks(sites: list[str]) -> Tensor:
    """The metric with one module's output from the other prompt at a time; the second MLP puts out 0."""
    module: Any = captured().module
    clean, other = (captured().run(text).inputs["input_ids"] for text in (CLEAN, OTHER))

    def logits(ids: Tensor, changes: dict[str, Callable[[Any], Any]]) -> Tensor:
        changes = {"model.layers.1.mlp": torch.zeros_like, **changes}
        handles = [
            module.get_submodule(path).register_forward_hook(lambda _m, _i, out, change=change: change(out))
            for path, change in changes.items()
        ]
        try:
            with torch.no_grad():
                found: Tensor = module(ids).logits
        finally:
            for handle in handles:
                handle.remove()
        return found

    values = []
    for path in sites:
        seen: list[Any] = []

        def keep(out: Any, seen: list[Any] = seen, path: str = path) -> Any:
            seen.append(torch.zeros_like(out) if path == "model.layers.1.mlp" else out)
            return seen[-1]

        logits(other, {path: keep})
        last = logits(clean, {path: partial(_first, seen)})[:, -1]
        values.append((last[:, 5] - last[:, 6]).double().mean())
    return torch.stack(values)


@cache
def rebuilt() -> Model:
    """A capture of the module that has the change itself: the weights of its second MLP are 0."""
    module = copy.deepcopy(captured().module)
    torch.nn.init.zeros_(module.get_submodule("model.layers.1.mlp.down_proj").weight)
    return cw.capture(module, input_ids=captured().run(CLEAN).inputs["input_ids"])


def swept(model: Model, **given: Any) -> cw.Sweep:
    found: cw.Sweep = model.sweep(SITES, **{"base": CLEAN, "source": OTHER, "metric": METRIC, **given})
    return found


def test_a_sweep_of_a_changed_graph_is_that_of_hooks_and_says_why_it_is_serial(model: Model) -> None:
    result = swept(model).run(progress=False)
    assert result.plan.evaluator == "serial"
    assert "the graph was changed after the capture" in result.plan.why
    torch.testing.assert_close(result.values, by_hooks(PATHS), rtol=1e-5, atol=1e-5)
    assert result.ledger.node_evaluations == result.plan.node_evaluations
    assert "changed after the capture" in result.provenance["graph"]
    runs = swept(model, base=model.run(CLEAN), source=model.run(OTHER)).run(progress=False)
    assert torch.equal(runs.values, result.values)


def test_a_sweep_and_a_plan_from_before_the_change_give_no_old_numbers() -> None:
    model = captured()
    sweep, given = swept(model), swept(model)
    before, plan = sweep.run(progress=False), given.plan()
    undo = redefined(model)
    try:
        torch.testing.assert_close(sweep.run(progress=False).values, by_hooks(PATHS), rtol=1e-5, atol=1e-5)
        with pytest.raises(SweepError, match="cannot run as a wavefront: the graph was changed"):
            given.run(plan=plan, progress=False)
        with pytest.raises(SweepError, match="cannot run as a wavefront: the graph was changed"):
            sweep.run(evaluator="wavefront", progress=False)
    finally:
        undo()
    assert torch.equal(sweep.run(progress=False).values, before.values)


def test_a_fork_from_before_the_change_follows_it() -> None:
    model = captured()
    world = model.run(CLEAN).fork()
    world.patch(("mlp_out", 0), model.run(OTHER))
    _ = world.logits
    undo = redefined(model)
    try:
        last = world.logits[:, -1]
        found = (last[:, 5] - last[:, 6]).double()
    finally:
        undo()
    torch.testing.assert_close(found, by_hooks(PATHS[:1]), rtol=1e-5, atol=1e-5)


def ids(text: str) -> dict[str, Tensor]:
    return dict(captured().run(text).inputs)


def values(model: Model, sites: Any, **given: Any) -> Tensor:
    asked = {"base": ids(CLEAN), "source": ids(OTHER), "metric": METRIC, **given}
    found: Tensor = model.sweep(sites, **asked).run(progress=False).values
    return found


def forked(model: Model) -> Tensor:
    world = model.run(**ids(CLEAN)).fork()
    world.patch(("z", 2), "zero")
    found: Tensor = world.logits
    return found


HEADS, BLOCKS = cw.sites("z", layer=":", head=":"), [("resid_pre", 2), ("mlp_out", 0)]
FOLLOWS: dict[str, Callable[[Model], Tensor]] = {
    "a run": lambda model: model.run(**ids(CLEAN)).logits,
    "a run that keeps little": lambda model: model.run(**ids(CLEAN), keep=[("mlp_out", 0)]).logits,
    "one that keeps a site": lambda model: model.run(**ids(CLEAN), keep=[("resid_pre", 3)])["resid_pre", 3],
    "a fork": forked,
    "heads": lambda model: values(model, HEADS),
    "positions": lambda model: values(model, cw.sites("resid_pre", layer="2:", pos="-3:")),
    "several sites": lambda model: values(model, [[("z", 0), ("z", 2)], [("mlp_out", 0)]]),
    "ablation": lambda model: values(model, HEADS, source="zero"),
    "a mean": lambda model: values(model, BLOCKS, source=cw.mean(model, [ids(CLEAN), ids(OTHER)])),
    "noise": lambda model: values(model, BLOCKS, source=cw.noise(1.0, seed=3)),
    "a divergence": lambda model: values(model, BLOCKS, metric=cw.kl_to(model.run(**ids(CLEAN)))),
    "a function": lambda model: values(model, BLOCKS, metric=lambda out: out.logits[:, -1].logsumexp(-1)),
    "patterns": lambda model: model.run(**ids(CLEAN)).attention().tensor,
    "a trace": lambda model: (
        model.causal_trace(ids(CLEAN), subject=[1, 2], metric=METRIC, layer="2:", n=2).run().values
    ),
}


@pytest.mark.parametrize("job", list(FOLLOWS))
def test_what_follows_the_graph_is_that_of_a_module_with_the_change(model: Model, job: str) -> None:
    torch.testing.assert_close(FOLLOWS[job](model), FOLLOWS[job](rebuilt()), rtol=1e-4, atol=1e-5)


def before(kind: str) -> Any:
    """What was made before the change: estimates, a circuit, its edges, a plan, a result, a fork."""
    model = captured()
    if kind not in BEFORE:
        BEFORE["estimates"] = model.attribute(SITES, **GIVEN).run()
        BEFORE["circuit"] = model.find_circuit(**GIVEN, threshold=0.5).run()
        BEFORE["edges"] = model.edges()
        BEFORE["plan"] = swept(model).plan()
        BEFORE["result"] = swept(model).run(progress=False)
        BEFORE["fork"] = model.run(CLEAN).fork()
    return BEFORE[kind]


BEFORE: dict[str, Any] = {}
GIVEN: dict[str, Any] = {"base": CLEAN, "source": OTHER, "metric": METRIC}
REFUSED: dict[str, Callable[[Model, Path], object]] = {
    "components": lambda model, _: model.components(),
    "edges": lambda model, _: model.edges(),
    "named edges": lambda model, _: model.sweep(["m0->logits"], **GIVEN),
    "edges from before": lambda model, _: model.sweep(before("edges"), **GIVEN).run(progress=False),
    "paths": lambda model, _: model.paths("m0", "logits", **GIVEN),
    "acdc": lambda model, _: model.find_circuit(**GIVEN, threshold=0.1).run(),
    "the plan of acdc": lambda model, _: model.find_circuit(**GIVEN, threshold=0.1).plan(),
    "a circuit": lambda model, _: before("circuit").bind(model),
    "its evaluation": lambda *_: before("circuit").evaluate(**GIVEN),
    "its curve": lambda *_: before("circuit").curve(**GIVEN, n=2),
    "gradients": lambda model, _: model.run(CLEAN).gradients(METRIC, [("resid_pre", 1)]),
    "gradients in a fork": lambda *_: before("fork").gradients(METRIC, [("resid_pre", 1)]),
    "cost": lambda model, _: model.run(CLEAN).backward_cost(METRIC, [("resid_pre", 1)]),
    "attribution": lambda model, _: model.attribute(SITES, **GIVEN).run(),
    "attribution to edges": lambda model, _: model.attribute(before("edges"), **GIVEN, method="eap").run(),
    "the plan of an attribution": lambda model, _: model.attribute(SITES, **GIVEN).plan(),
    "check of estimates": lambda *_: before("estimates").check(),
    "lens": lambda model, _: model.run(CLEAN).lens(),
    "lens of a fork": lambda *_: before("fork").lens(),
    "decompose": lambda model, _: model.run(CLEAN).decompose(),
    "logits": lambda model, _: model.run(CLEAN).logit_attribution(METRIC),
    "generate": lambda model, _: model.generate(CLEAN, 2),
    "splice": lambda model, _: model.splice(("resid_post", 2), encode=torch.relu, decode=torch.clone),
    "check": lambda model, _: swept(model).run(progress=False, verify=1),
    "check of a result": lambda *_: before("result").verify(n=1),
    "store": lambda model, folder: swept(model).run(progress=False, out=folder),
    "workers": lambda model, _: swept(model).run(progress=False, workers=cw.Processes(1)),
}


@pytest.mark.parametrize("job", list(REFUSED))
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_computed_from_the_program_is_refused(
    change: Callable[[Model], Callable[[], None]], job: str, tmp_path: Path
) -> None:
    model = captured()
    _ = before("plan"), model.run(CLEAN)
    undo = change(model)
    try:
        with pytest.raises(
            GraphChangedError, match="the graph of LlamaForCausalLM was changed after the"
        ) as e:
            REFUSED[job](model, tmp_path / "out")
        assert "make the change in the module and capture that, or undo it" in str(e.value)
    finally:
        undo()


def test_patterns_of_an_attention_with_another_rule_are_refused() -> None:
    model = captured()
    node = next(iter(model.site_table.model_layers)).attention.core.name
    old = model.graph.rule(node)
    model.graph.redefine(node, lambda *inputs: old(*inputs) * 2)
    try:
        with pytest.raises(GraphChangedError, match="attention weights of layer 0"):
            model.run(CLEAN).attention()
        assert model.run(CLEAN).attention(1).layers == (1,)
    finally:
        model.graph.redefine(node, old)


def test_the_module_is_not_what_a_changed_graph_computes(model: Model) -> None:
    verified = model.verify(n=1)
    assert not verified
    assert "the graph was changed after the capture, at" in str(verified)


def test_a_mean_from_before_the_change_is_taken_anew() -> None:
    model = captured()
    mean = cw.mean(model, [model.run(OTHER).inputs])
    before = swept(model, source=mean).run(progress=False)
    undo = redefined(model)
    try:
        again = swept(model, source=mean).run(progress=False)
        fresh = swept(model, source=cw.mean(model, [model.run(OTHER).inputs])).run(progress=False)
        assert torch.equal(again.values, fresh.values)
        assert not torch.equal(again.values, before.values)
    finally:
        undo()
    assert torch.equal(swept(model, source=mean).run(progress=False).values, before.values)


def test_a_metric_that_compares_with_a_run_from_before_the_change_is_refused() -> None:
    model = captured()
    run = model.run(CLEAN)
    metric, sweep = cw.kl_to(run), swept(model, metric=cw.kl_to(run))
    question = model.ask([{"clean": CLEAN}], sites=SITES, metric="kl", source="zero")
    before, asked = sweep.run(progress=False), question.run(progress=False)
    undo = redefined(model)
    try:
        for job in (
            lambda: swept(model, metric=metric).run(progress=False),
            lambda: sweep.run(progress=False),
            sweep.plan,
        ):
            with pytest.raises(
                MetricError, match=r"before the graph of LlamaForCausalLM was changed, at '.*kl_to"
            ):
                job()
        # The run follows the change, and so does a metric that is made of it now.
        assert swept(model, metric=cw.kl_to(run)).run(progress=False).base.tolist() == pytest.approx([0.0])
        assert question.run(progress=False).base.tolist() == pytest.approx([0.0], abs=1e-6)
    finally:
        undo()
    assert torch.equal(swept(model, metric=metric).run(progress=False).values, before.values)
    assert torch.equal(question.run(progress=False).values, asked.values)


def test_edges_of_a_sweep_from_before_the_change_are_refused() -> None:
    model = captured()
    sweep = model.sweep(["m0->logits"], base=CLEAN, source=OTHER, metric=METRIC)
    undo = redefined(model)
    try:
        with pytest.raises(GraphChangedError, match="cannot sweep edges"):
            sweep.run(progress=False)
    finally:
        undo()


def test_shares_of_a_projection_with_another_rule_are_refused() -> None:
    model = captured()
    node = model.locate(("attn_out", 1)).node
    old = model.graph.rule(node)
    model.graph.redefine(node, lambda *inputs: old(*inputs) * 2)
    try:
        with pytest.raises(GraphChangedError, match="output projection"):
            _ = model.run(CLEAN)["result", 1]
        assert model.run(CLEAN)["result", 0].shape[2] == 4
    finally:
        model.graph.redefine(node, old)


@pytest.mark.parametrize("how", ["patch", "patch_rule", "patch_edge", "set"])
def test_a_run_whose_world_was_patched_below_it_is_refused_until_that_is_taken_back(how: str) -> None:
    """A wavefront, circuits and gradients would not see the patch; a serial sweep would."""
    model = captured()
    base, source = model.run(CLEAN), model.run(OTHER)
    sweep = model.sweep(SITES, base=base, source=source, metric=METRIC)
    expected, node = sweep.run().values, model.locate(("mlp_out", 1)).node
    value = torch.zeros_like(base["mlp_out", 1])
    (reader,) = model.graph.consumers(node)
    if how == "patch":
        base.world.patch(node, value)
    elif how == "patch_rule":
        base.world.patch_rule(node, lambda *_: value)
    elif how == "patch_edge":
        base.world.patch_edge((node, reader), value)
    else:
        base.world.set("input_ids", source.inputs["input_ids"])
    jobs: list[Callable[[], Any]] = [
        sweep.run,
        lambda: cw.Circuit.made(model, []).evaluate(base=base, source=source, metric=METRIC),
        lambda: base.gradients(METRIC, SITES),
        lambda: base.fork().logits,
        lambda: base.logits,
    ]
    for job in jobs:
        with pytest.raises(PatchError, match=r"was changed in `run.world`"):
            job()
    if how == "patch_edge":
        base.world.restore_edge((node, reader))
    elif how == "set":
        base.world.set("input_ids", base.inputs["input_ids"])
    else:
        base.world.restore(node)
    assert torch.equal(sweep.run().values, expected)


@pytest.mark.parametrize("evaluator", ["wavefront", "serial"])
def test_a_metric_that_changes_the_graph_is_refused(evaluator: str) -> None:
    model = cw.capture(cw.load("tiny"))
    seen: list[int] = []

    def metric(out: Any) -> Tensor:
        seen.append(len(seen))
        if len(seen) == 3:
            redefined(model)
        return out.logits[:, -1, 5]  # type: ignore[no-any-return]

    sweep = model.sweep(SITES, base=model.run(CLEAN), source=model.run(OTHER), metric=metric)
    with pytest.raises(SweepError, match="was changed while worlds were computed"):
        sweep.run(evaluator=evaluator)
