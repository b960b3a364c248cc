"""Circuits and the models that they are of."""

from pathlib import Path
from typing import Any

import pytest

import conewise as cw
from conewise.circuits.circuit import graph_of
from conewise.errors import CircuitError
from tests.circuits.graphs import graph, random_scores
from tests.edges.small_models import model_of

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("llama", {"kv_heads": 2}),
    ("gpt_neox", {"parallel": True}),
]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_the_graph_of_a_model_is_the_one_that_people_know(name: str, shape: dict[str, Any]) -> None:
    assert graph_of(model_of(name)) == graph(2, 4, width=64, **shape)


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
    assert (theirs.edges, theirs.scores, theirs.graph) == (circuit.edges, circuit.scores, circuit.graph)


def test_a_circuit_without_a_model_is_bound_to_one(tmp_path: Path) -> None:
    model = model_of("gpt2")
    circuit = cw.Circuit.from_nodes(model, ["a0.h1", "m1"])
    loose = cw.Circuit.load(circuit.save(tmp_path / "circuit.json"))
    assert loose.model is None
    assert loose.bind(model).model is model
    assert cw.Circuit.made(model, circuit.edges).edges == circuit.edges


@pytest.mark.parametrize("kind", ["conewise", "eap"])
def test_a_circuit_of_another_model_is_refused(tmp_path: Path, kind: str) -> None:
    path = cw.Circuit.made(graph(3, 4), ["input->logits"], of="deeper").save(tmp_path / "x.json", format=kind)
    said = {"conewise": "does not fit GPT2LMHead", "eap": "3 layers of 4 heads, and the model has 2 layers"}
    with pytest.raises(CircuitError, match=said[kind]):
        cw.Circuit.load(path, model_of("gpt2"))
    with pytest.raises(CircuitError, match=r"does not fit GPT2LMHead.*a2.h0<q> here, logits there"):
        cw.Circuit.load(path).bind(model_of("gpt2"))
