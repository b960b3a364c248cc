"""Circuits and the models that they are of."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import conewise as cw
from conewise.circuits.replaced_parts import edge_facts
from conewise.errors import ArgumentError, CircuitError, NoEffectWarning, SweepError
from conewise.model import Model
from conewise.report.document import number
from conewise.sweeps.result import Result
from tests.circuits.edge_models import inputs_of, model_of, run_of
from tests.circuits.graphs import graph, random_scores

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("llama", {"kv_heads": 2}),
    ("gpt_neox", {"parallel": True}),
]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_the_graph_of_a_model_is_the_one_that_people_know(name: str, shape: dict[str, Any]) -> None:
    assert edge_facts(model_of(name)).graph == graph(2, 4, width=64, **shape)


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_a_circuit_comes_back_to_its_model_from_both_kinds_of_files(
    tmp_path: Path, name: str, shape: dict[str, Any]
) -> None:
    model = model_of(name)
    circuit = cw.Circuit.from_scores(model, random_scores(graph(2, 4, **shape), 5), threshold=1.0)
    assert (circuit.of, circuit.model) == (model.name, model)
    own = cw.Circuit.load(circuit.save(tmp_path / "own.json"), model)
    assert own == circuit
    assert own.model is model
    theirs = cw.Circuit.load(circuit.save(tmp_path / "eap.json", format="eap"), model)
    assert (theirs.edges, theirs.graph) == (circuit.edges, circuit.graph)
    assert theirs.scores == {edge: -score for edge, score in (circuit.scores or {}).items()}
    assert (circuit.helps, theirs.helps) == (-1.0, 1.0)  # theirs are positive where an edge helps


def test_what_a_search_found_is_written_as_eap_ig_reads_it(tmp_path: Path) -> None:
    model = model_of("gpt2")
    asked: dict[str, Any] = {"base": run_of("gpt2", 0), "source": run_of("gpt2", 1), "metric": cw.logit(3)}
    circuit = model.find_circuit(**asked, threshold=0.1).run()
    theirs = cw.Circuit.load(circuit.save(tmp_path / "eap.json", format="eap"), model)
    assert theirs.edges == circuit.edges
    assert theirs.scores == {edge: -score for edge, score in (circuit.scores or {}).items()}


def test_what_is_no_circuit_is_refused() -> None:
    model = model_of("gpt2")
    with pytest.raises(ArgumentError, match=r"`edges` is str 'm0->m1'; expected an iterable"):
        cw.Circuit.made(model, "m0->m1")
    with pytest.raises(ArgumentError, match="`edges` is NoneType None; expected an iterable"):
        cw.Circuit.made(model, cast(Any, None))
    with pytest.raises(CircuitError, match=r"named by a text such as 'a0.h1->m2', not by 3"):
        cw.Circuit.made(model, cast(Any, [3]))
    with pytest.raises(ArgumentError, match="`graph` is NoneType None; expected a graph of edges"):
        cw.Circuit.made(cast(Any, None), [])
    for made in (cw.Circuit.made, cw.Circuit.from_nodes):
        with pytest.raises(CircuitError, match="two models were given"):
            made(model, [], model=model_of("llama"))
        with pytest.raises(CircuitError, match="the graph is not that of"):
            made(graph(3, 4), [], model=model)
        assert made(model, [], model=model).model is model
    with pytest.raises(ArgumentError, match=r"`scores` is list \[1.0\]; expected a mapping"):
        cw.Circuit.from_scores(model, cast(Any, [1.0]), top=1)
    with pytest.raises(CircuitError, match="the score of m0->m1 is 'much'"):
        cw.Circuit.from_scores(model, cast(Any, {"m0->m1": "much"}), top=1)
    with pytest.raises(ArgumentError, match="`other` is int 3; expected a Circuit"):
        cw.Circuit.made(model, []).compare(cast(Any, 3))


def test_a_source_in_which_something_is_patched_warns_of_nothing() -> None:
    base, source, site = run_of("gpt2", 0), run_of("gpt2", 1), cw.site("z", layer=1, head=0)
    model = base.model
    with source.fork() as world, warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        world.patch(site, base.read(site))
        circuit = cw.Circuit.made(model, [])
        found = circuit.evaluate(base=base, source=world, metric=cw.logit(3), minimality=False)
        assert found.ablated == pytest.approx(float(world.logits[:, -1, 3].mean()), abs=1e-4)


def test_a_circuit_without_a_model_is_bound_to_one(tmp_path: Path) -> None:
    model = model_of("gpt2")
    circuit = cw.Circuit.from_nodes(model, ["a0.h1", "m1"])
    loose = cw.Circuit.load(circuit.save(tmp_path / "circuit.json"))
    assert loose.model is None
    assert loose.bind(model).model is model
    assert cw.Circuit.made(model, circuit.edges).edges == circuit.edges


def test_a_circuit_is_copied_whole_and_pickled_without_its_model() -> None:
    model = model_of("gpt2")
    circuit = cw.Circuit.from_scores(model, random_scores(graph(2, 4), 5), threshold=1.0)
    assert copy.deepcopy(circuit) == copy.copy(circuit) == circuit
    assert copy.deepcopy(circuit).model is copy.copy(circuit).model is model
    again = pickle.loads(pickle.dumps(circuit))
    assert again == circuit
    assert again.model is None


@pytest.mark.parametrize("kind", ["conewise", "eap"])
def test_a_circuit_of_another_model_is_refused(tmp_path: Path, kind: str) -> None:
    path = cw.Circuit.made(graph(3, 4), ["input->logits"], of="deeper").save(tmp_path / "x.json", format=kind)
    said = {"conewise": "does not fit GPT2LMHead", "eap": "3 layers of 4 heads, and the model has 2 layers"}
    with pytest.raises(CircuitError, match=said[kind]):
        cw.Circuit.load(path, model_of("gpt2"))
    with pytest.raises(CircuitError, match=r"does not fit GPT2LMHead.*a2.h0<q> here, logits there"):
        cw.Circuit.load(path).bind(model_of("gpt2"))


def own_model(name: str) -> Model:
    """The model that the runs are of."""
    model = run_of(name, 0).model
    assert isinstance(model, Model)
    return model


def edge_sweep(name: str) -> Result:
    """Every edge of a small model."""
    model = own_model(name)
    metrics = [cw.logit_diff(answer=3, wrong=5), cw.logit(7)]
    return model.sweep(model.edges(), base=run_of(name, 0), source=run_of(name, 1), metric=metrics).run()


def test_the_result_of_a_sweep_over_edges_makes_circuits(tmp_path: Path) -> None:
    result = edge_sweep("llama")
    circuit = result.circuit(top=12)
    assert circuit.model is run_of("llama", 0).model
    assert 0 < len(circuit) <= 12
    assert circuit.prune() == circuit
    assert circuit.scores is not None
    assert list(circuit.scores) == list(circuit.graph.edges)
    effects = (result.table[0] - result.base[0]).tolist()
    assert list(circuit.scores.values()) == effects
    largest = result.circuit(top=3, connected=False)
    assert set(largest.edges) == {cell.name for cell, _, _ in result.strongest(top=3)}
    other = result.circuit(threshold=0.0, metric="logit")
    assert other.scores is not None
    assert list(other.scores.values()) == (result.table[1] - result.base[1]).tolist()
    assert len(other) == circuit.graph.count
    loaded = cw.open(result.save(tmp_path / "saved"))
    assert isinstance(loaded, Result)
    with pytest.raises(SweepError, match="a loaded result has no model at hand, which a circuit is one of"):
        loaded.circuit(top=12)
    assert loaded.circuit(top=12, model=run_of("llama", 0).model) == circuit


def test_what_is_no_edge_makes_no_circuit() -> None:
    model = own_model("gpt2")
    runs: dict[str, Any] = {"base": run_of("gpt2", 0), "source": run_of("gpt2", 1), "metric": cw.logit(7)}
    with pytest.raises(
        SweepError, match=r"z\[layer=0, head=0\] is no single edge, and circuits are made of these"
    ):
        model.sweep(cw.sites("z", layer=0, head=0), **runs).run().circuit(top=1)
    pair = [["a0.h0->m0", "a0.h1->m0"]]
    with pytest.raises(SweepError, match=r"a0.h0->m0 .*a0.h1->m0 is no single edge"):
        model.sweep(pair, **runs).run().circuit(top=1)
    with pytest.raises(SweepError, match="is no single edge"):
        model.paths(["a0.h0"], ["logits"], freeze="none", **runs).run().circuit(top=1)
    with pytest.raises(CircuitError, match="is an edge at one position, and this graph has edges at all"):
        model.sweep(model.edges(pos=2)[:3], **runs).run().circuit(top=1)


def test_a_curve_has_the_faithfulness_of_the_circuits_of_its_thresholds(tmp_path: Path) -> None:
    runs: dict[str, Any] = {
        "base": run_of("llama", 0),
        "source": run_of("llama", 1),
        "metric": cw.logit_diff(answer=3, wrong=5),
    }
    circuit = edge_sweep("llama").circuit(top=12)
    curve = circuit.curve(**runs, n=5)
    assert curve.metric == "logit_diff"
    assert curve.faithfulness == pytest.approx(circuit.evaluate(**runs).faithfulness, abs=1e-6)
    assert len(curve.points) == 5
    for point in curve.points:
        chosen = circuit.select(threshold=point.threshold)
        assert point.edges == len(chosen)
        assert point.faithfulness == pytest.approx(chosen.evaluate(**runs).faithfulness, abs=1e-5)
    assert [point.edges for point in curve.points] == sorted(point.edges for point in curve.points)
    assert curve.points[-1].edges <= 60
    assert circuit.curve(**runs, top=82).points[-1].edges == 82
    assert circuit.curve(**runs, top=82).points[-1].faithfulness == pytest.approx(1, abs=1e-5)
    for given in (0, -1, 2.5, True):
        with pytest.raises(cw.ConewiseError, match="a whole number"):
            circuit.curve(**runs, n=cast(Any, given))
    page = circuit.report(tmp_path / "page.html", curve=curve, evaluation=circuit.evaluate(**runs))
    text = page.read_text("utf-8")
    assert "The edge that is needed least is" in text
    assert f"<dd>{number(curve.faithfulness or 0)}</dd><dt>faithfulness</dt>" in text


def test_without_a_model_or_scores_nothing_is_evaluated() -> None:
    circuit = cw.Circuit.made(graph(2, 2), ["input->logits"])
    runs: dict[str, Any] = {"base": run_of("gpt2", 0), "metric": cw.logit(3), "source": "zero"}
    with pytest.raises(CircuitError, match=r"holds no model to run it in: `circuit.bind\(model\).evaluate"):
        circuit.evaluate(**runs)
    with pytest.raises(CircuitError, match="has no scores, which `curve` goes by"):
        circuit.curve(**runs)


def test_metrics_of_a_double_model_are_computed_in_double() -> None:
    """Rounding to single would be many times what a search takes for a tie."""
    base, source = (run_of("gpt2", seed, torch.float64) for seed in (0, 1))
    model, found, logits = base.model, {}, source.logits
    targets = inputs_of("gpt2", 0)["input_ids"]
    for metric in (cw.prob(3), cw.kl_to(base), cw.cross_entropy(targets)):
        none = cw.Circuit.made(model, [])
        found[metric.name] = none.evaluate(base=base, source=source, metric=metric, minimality=False).ablated
    ours, theirs = (run.logits[:, -1].log_softmax(-1) for run in (source, base))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected = {"prob": ours.exp()[:, 3].mean(), "cross_entropy": loss}
    expected["kl"] = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-12)
