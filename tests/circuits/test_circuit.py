"""A circuit as a value: made, asked, compared, drawn, written and read."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.anatomy.edge_graph import EdgeGraph, GraphReader, GraphWriter
from conewise.circuits.circuit import Circuit
from conewise.circuits.circuit_data import Decision
from conewise.circuits.circuit_files import from_json
from conewise.errors import CircuitError
from conewise.report.circuit import layered
from tests.circuits.graphs import graph, random_scores

SMALL = graph(2, 2)
GROUPED = graph(2, 4, kv_heads=2)


def found(edges: list[str], **given: Any) -> Circuit:
    return Circuit.made(SMALL, edges, of="small", **given)


# -- the graph ----------------------------------------------------------------------------------------


def test_the_graph_of_gpt2_small_has_32491_edges() -> None:
    whole = graph(12, 12)
    assert (len(whole.writers), whole.count) == (157, 32491)
    assert whole.edges[0] == "input->a0.h0<q>"
    assert whole.edges[-1] == "m11->logits"
    assert whole.number("a0.h1->a3.h2<q>") == whole.edges.index("a0.h1->a3.h2<q>")


@pytest.mark.parametrize("one", [SMALL, GROUPED, graph(2, 2, parallel=True)])
def test_names_and_numbers_of_edges_are_each_other_s(one: EdgeGraph) -> None:
    assert len(set(one.edges)) == one.count
    assert [one.number(edge) for edge in one.edges] == list(range(one.count))
    for edge in one.edges:
        writer, reader = one.split(edge)
        assert edge == f"{writer.name}->{reader.name}"


def test_a_parallel_block_s_mlp_does_not_read_its_heads() -> None:
    assert "a0.h0->m0" in SMALL.edges
    assert "a0.h0->m0" not in graph(2, 2, parallel=True).edges


def test_what_a_group_shares_is_a_part_of_all_its_heads() -> None:
    at = [reader.name for reader in GROUPED.readers].index("a1.kv1<v>")
    assert [GROUPED.writers[one].name for one in GROUPED.fed[at]] == ["a1.h2", "a1.h3"]
    head = GROUPED.writer_number("a1.h2")
    assert [GROUPED.readers[one].name for one in GROUPED.feeding[head]] == [
        "a1.h2<q>",
        "a1.kv1<k>",
        "a1.kv1<v>",
    ]


@pytest.mark.parametrize(
    ("edge", "said"),
    [
        ("a0.h0", "'a0.h0' is no edge in this graph of 7 writers, 15 readers.*writer, arrow, reader"),
        ("a0.h9->m1", r"no writer 'a0.h9'\. Nearest: a0.h"),
        ("a0.h1->a1.h0", r"no reader 'a1.h0'\. Nearest: a1.h0<"),
        ("a0.h1->m1@3", "'a0.h1->m1@3' is an edge at one position, and this graph has edges at all"),
        (
            "m1->a1.h0<q>",
            "a1.h0<q> reads what was written before it, 4 writers, the last of them m0; m1 writes",
        ),
    ],
)
def test_an_edge_that_is_none_is_refused_with_what_is_near(edge: str, said: str) -> None:
    with pytest.raises(CircuitError, match=said):
        found([edge])


def test_a_graph_with_a_name_twice_is_refused() -> None:
    with pytest.raises(CircuitError, match="two components have the name 'input'"):
        EdgeGraph((GraphWriter("input"), GraphWriter("input")), (GraphReader("logits", "logits", 1),))


# -- the value ----------------------------------------------------------------------------------------


def test_edges_stand_in_graph_order_and_once() -> None:
    circuit = found(["m1->logits", "input->m1", "m1->logits", "input->a0.h0<q>"])
    assert circuit.edges == ("input->a0.h0<q>", "input->m1", "m1->logits")
    assert len(circuit) == 3
    assert "input->m1" in circuit
    assert "input->m0" not in circuit
    assert len(circuit.complement) == SMALL.count - 3
    assert set(circuit.complement) | set(circuit.edges) == set(SMALL.edges)


def test_nodes_are_what_the_edges_join() -> None:
    circuit = found(["input->a0.h1<v>", "a0.h1->a1.h0<k>", "a1.h0->logits"])
    assert circuit.nodes == ("input", "a0.h1", "a1.h0", "logits")


def test_what_a_group_shares_stands_for_the_heads_of_it_that_are_there() -> None:
    one = Circuit.made(GROUPED, ["input->a0.kv1<k>", "a0.h3->logits"])
    assert one.nodes == ("input", "a0.h3", "logits")
    none = Circuit.made(GROUPED, ["input->a0.kv1<k>"])
    assert none.nodes == ("input", "a0.h2", "a0.h3")


def test_nodes_are_all_edges_between_them() -> None:
    circuit = Circuit.from_nodes(SMALL, ["a0.h1", "m1"])
    assert circuit.edges == (
        "input->a0.h1<q>",
        "input->a0.h1<k>",
        "input->a0.h1<v>",
        "input->m1",
        "a0.h1->m1",
        "input->logits",
        "a0.h1->logits",
        "m1->logits",
    )
    assert circuit.nodes == ("input", "a0.h1", "m1", "logits")
    shared = Circuit.from_nodes(GROUPED, ["a0.h2", "logits"])
    assert [edge for edge in shared.edges if "kv" in edge] == ["input->a0.kv1<k>", "input->a0.kv1<v>"]
    with pytest.raises(CircuitError, match=r"no writer 'a0.h7' in this graph of 7\. Nearest: a0.h"):
        Circuit.from_nodes(SMALL, ["a0.h7"])


def test_a_dead_end_is_pruned() -> None:
    circuit = found(["input->a0.h0<q>", "a0.h0->logits", "input->a1.h0<q>", "a0.h1->logits"])
    assert circuit.prune().edges == ("input->a0.h0<q>", "a0.h0->logits")


def test_circuits_are_equal_and_hashed_by_what_they_say() -> None:
    scores = {"input->m0": 1.0, "input->m1": 2.0}
    one = found(["input->m0"], scores=scores, log=[Decision("input->m0", True, 0.5)])
    assert one == found(
        ["input->m0"], scores=dict(reversed(scores.items())), log=[Decision("input->m0", True, 0.5)]
    )
    assert hash(one) == hash(found(["input->m0"]))
    assert one != found(["input->m1"], scores=scores)
    assert one.scores is not None
    with pytest.raises(TypeError):
        one.scores["input->m0"] = 2.0  # type: ignore[index]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_is_a_finite_number(score: float) -> None:
    with pytest.raises(CircuitError, match=r"the score of input->m0 is (nan|inf); scores are finite"):
        found([], scores={"input->m0": score})


def test_a_circuit_from_scores_says_how_it_was_chosen() -> None:
    scores = random_scores(SMALL, 1)
    circuit = Circuit.from_scores(SMALL, scores, top=12, of="small")
    assert 0 < len(circuit) <= 12
    assert circuit.method == "top 12, connected"
    assert circuit.scores == scores
    smaller = circuit.select(threshold=1.25)
    assert smaller == Circuit.from_scores(SMALL, scores, threshold=1.25, of="small")
    assert smaller.threshold == 1.25
    with pytest.raises(CircuitError, match="this circuit has no scores, which `select` goes by"):
        found(["input->m0"]).select(top=1)


def test_two_circuits_are_compared_edge_by_edge() -> None:
    one = found(["input->m0", "m0->logits", "input->logits"])
    other = found(["input->m0", "m0->logits", "input->m1", "m1->logits"])
    compared = one.compare(other)
    assert compared.both == ("input->m0", "m0->logits")
    assert compared.only_first == ("input->logits",)
    assert compared.only_second == ("input->m1", "m1->logits")
    assert compared.jaccard == pytest.approx(2 / 5)
    assert compared.overlap == pytest.approx(2 / 3)
    assert "2 edges in both, 1 only in the first, 2 only in the second" in repr(compared)
    assert found([]).compare(found([])).jaccard == found([]).compare(found([])).overlap == 1.0


def test_circuits_of_other_graphs_are_not_compared() -> None:
    with pytest.raises(CircuitError, match=r"cannot be compared.*46 edges.*a0.h2<q> there"):
        found([]).compare(Circuit.made(graph(2, 3), []))


def test_a_circuit_says_what_it_is() -> None:
    circuit = found(["input->m0", "m0->logits"], method="acdc", threshold=0.01, scores={"m0->logits": -0.5})
    assert repr(circuit) == "Circuit of small: 2 of 46 edges, 3 nodes by acdc (threshold 0.01)"
    html = circuit._repr_html_()
    assert "m0-&gt;logits" in html
    assert "-0.5" in html
    assert "<b>" not in Circuit.made(SMALL, [], of="<b>")._repr_html_()


# -- files --------------------------------------------------------------------------------------------


def test_a_circuit_is_equal_after_json(tmp_path: Path) -> None:
    for number, one in enumerate((SMALL, GROUPED, graph(1, 2, parallel=True))):
        scores = random_scores(one, number, missing=0.5)
        log = [Decision(edge, score > 0, score) for edge, score in scores.items()]
        circuit = Circuit.made(
            one,
            [e for e, s in scores.items() if s > 0],
            of="ä\u2028'\"",
            method="acdc",
            threshold=0.1,
            scores=scores,
            log=log,
        )
        path = circuit.save(tmp_path / "deep" / f"{number}.json")
        again = Circuit.load(path)
        assert again == circuit
        assert again.graph == circuit.graph
        assert again.log == circuit.log


def write(folder: Path, value: object) -> Path:
    path = folder / "circuit.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def written(folder: Path) -> dict[str, Any]:
    path = found(["input->m0"], scores={"input->m0": 1.0}).save(folder / "one.json")
    read: dict[str, Any] = json.loads(path.read_text())
    return read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "2"}, "its format is '2', where a whole number from 1 is expected"),
        ({"kind": "conewise plan"}, "it says that it is 'conewise plan', where kind: 'conewise circuit' is"),
        ({"edges": ["input->m7"]}, "no reader 'm7'.*Nearest"),
        ({"edges": [3]}, r"edges\[0\] is a whole number, where a text is expected"),
        ({"edges": None}, "edges is null, where a list is expected"),
        ({"scores": {"input->m7": 1}}, "no reader 'm7'"),
        ({"scores": {"input->m0": "1"}}, "scores.input->m0 is a text, where a number is expected"),
        ({"threshold": [1]}, "threshold is a list"),
        ({"graph": {}}, "its graph has no writers and readers"),
        (
            {"graph": {"writers": [["input", None, None]], "readers": [["logits", "logits", 5, None, None]]}},
            "logits reads 5 writers, where there are 1",
        ),
        ({"log": [["input->m9", True, 0.0]]}, "no reader 'm9'"),
        ({"log": [["input->m0", 1, 0.0]]}, r"log\[0\]\[1\] is a whole number"),
    ],
)
def test_a_file_that_is_no_circuit_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(CircuitError, match=said):
        Circuit.load(write(tmp_path, written(tmp_path) | change))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is not an object"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ('{"kind": "conewise circuit", "format": 1}', "it has no model"),
        ('{"format": 1}', "neither kind: 'conewise circuit', as our files have, nor cfg, nodes and edges"),
    ],
)
def test_a_text_that_is_no_circuit_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CircuitError, match=said):
        Circuit.load(write(tmp_path, text))


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CircuitError, match=r"nowhere\.json cannot be read: No such file"):
        Circuit.load(tmp_path / "nowhere.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(CircuitError, match="not text in UTF-8"):
        Circuit.load(tmp_path / "bytes")
    (tmp_path / "x.json").mkdir()
    with pytest.raises(CircuitError, match="it is a folder"):
        found([]).save(tmp_path / "x.json")
    assert Circuit.load(found([]).save(tmp_path / "folder")).equals(found([]))
    with pytest.raises(
        CircuitError, match="format='gexf' is no format of circuits; there are conewise, eap, eap-pt"
    ):
        found([]).save(tmp_path / "x.json", format="gexf")


# -- EAP-IG's graphs ----------------------------------------------------------------------------------


def eap(one: EdgeGraph, edges: list[str], **cfg: Any) -> dict[str, Any]:
    """A graph as their tools write it, made here by hand."""
    return {
        "cfg": {"n_layers": 2, "n_heads": 2, "parallel_attn_mlp": False, "d_model": 8} | cfg,
        "nodes": {writer.name: {"in_graph": True} for writer in one.writers} | {"logits": {"in_graph": True}},
        "edges": {
            name: {"score": number / 8, "in_graph": name in edges} for number, name in enumerate(one.edges)
        },
    }


def test_a_graph_of_eap_ig_is_read(tmp_path: Path) -> None:
    edges = ["input->a0.h1<q>", "a0.h1->m1", "m1->logits"]
    circuit = Circuit.load(write(tmp_path, eap(SMALL, edges)))
    assert circuit.edges == tuple(edges)
    assert circuit.scores is not None
    assert list(circuit.scores.values()) == [number / 8 for number in range(SMALL.count)]
    assert (circuit.graph.writers, circuit.graph.readers) == (SMALL.writers, SMALL.readers)


def test_a_circuit_is_written_as_eap_ig_reads_it(tmp_path: Path) -> None:
    scores = random_scores(SMALL, 3)
    circuit = Circuit.from_scores(SMALL, scores, threshold=1.0)
    path = circuit.save(tmp_path / "graph.json", format="eap")
    whole = json.loads(path.read_text())
    assert whole["cfg"] == {"n_layers": 2, "n_heads": 2, "parallel_attn_mlp": False, "d_model": 8}
    assert set(whole["nodes"]) == {*(one.name for one in SMALL.writers), "logits"}
    assert {name for name, said in whole["nodes"].items() if said["in_graph"]} == {*circuit.nodes, "logits"}
    assert whole["edges"] == {
        name: {"score": -scores[name], "in_graph": name in circuit.edges} for name in SMALL.edges
    }
    again = Circuit.load(path)
    assert (again.edges, again.scores) == (circuit.edges, {edge: -score for edge, score in scores.items()})
    assert again.select(top=9, select="signed").edges == circuit.select(top=9, select="signed").edges


def test_a_circuit_comes_back_from_tables_of_tensors(tmp_path: Path) -> None:
    circuit = Circuit.from_scores(SMALL, random_scores(SMALL, 3), threshold=1.0)
    again = Circuit.load(circuit.save(tmp_path / "graph.pt", format="eap-pt"))
    json_again = Circuit.load(circuit.save(tmp_path / "graph.json", format="eap"))
    assert (again.edges, again.scores, again.helps) == (json_again.edges, json_again.scores, 1.0)
    assert again.equals(cw.open(tmp_path / "graph.pt"))
    assert json_again.equals(cw.open(tmp_path / "graph.json"))
    torch.save({"cfg": Path("code")}, tmp_path / "code.pt")
    with pytest.raises(
        CircuitError, match="is no circuit of EAP-IG's tools that can be read without running"
    ):
        Circuit.load(tmp_path / "code.pt")


def _tables(folder: Path) -> dict[str, Any]:
    circuit = Circuit.from_scores(SMALL, random_scores(SMALL, 3), threshold=1.0)
    found: dict[str, Any] = torch.load(circuit.save(folder / "graph.pt", format="eap-pt"), weights_only=True)
    return found


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"cfg": {"n_layers": 10**7, "n_heads": 10}}, "it has 10000000 layers of 10 heads"),
        ({"cfg": [2, 2]}, "cfg is no object"),
        ({"edges_scores": None}, "edges_scores is no table of numbers"),
        ({"edges_in_graph": torch.zeros(2, 2)}, r"edges_in_graph is \[2, 2\] large, where the nodes make it"),
        ({"src_nodes": []}, "src_nodes and dst_nodes are not the nodes of a model of the sizes in cfg"),
    ],
)
def test_tables_that_are_no_circuit_say_why(changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    torch.save(_tables(tmp_path) | changed, tmp_path / "other.pt")
    with pytest.raises(CircuitError, match=f"other.pt cannot be read as a circuit: {why}"):
        Circuit.load(tmp_path / "other.pt")


def test_tables_of_neurons_are_refused_as_their_json_is(tmp_path: Path) -> None:
    tables = _tables(tmp_path)
    tables["neurons_in_graph"] = torch.eye(len(tables["src_nodes"])).bool()
    torch.save(tables, tmp_path / "neurons.pt")
    with pytest.raises(CircuitError, match="it is a circuit of neurons"):
        Circuit.load(tmp_path / "neurons.pt")


def test_files_of_tables_that_cannot_be_read_or_written_say_so(tmp_path: Path) -> None:
    circuit = Circuit.from_scores(SMALL, random_scores(SMALL, 3), threshold=1.0)
    (tmp_path / "empty.pt").touch()
    with pytest.raises(CircuitError, match="is no circuit of EAP-IG's tools that can be read"):
        Circuit.load(tmp_path / "empty.pt")
    with pytest.raises(CircuitError, match="cannot be read: No such file"):
        Circuit.load(tmp_path / "missing.pt")
    with pytest.raises(CircuitError, match="cannot be written to"):
        circuit.save(tmp_path / "empty.pt" / "graph.pt", format="eap-pt")
    with pytest.raises(CircuitError, match=r"files whose names end in \.pt"):
        circuit.save(tmp_path / "graph", format="eap-pt")


def test_helpful_edges_come_first_where_signs_count() -> None:
    scores = {edge: float(number - 7) for number, edge in enumerate(SMALL.edges)}
    circuit = Circuit.from_scores(SMALL, scores, top=3, connected=False, select="signed")
    assert circuit.edges == SMALL.edges[:3]
    helping = Circuit.from_scores(SMALL, scores, top=3, connected=False, select="signed", helps=1.0)
    assert helping.edges == SMALL.edges[-3:]
    above = Circuit.from_scores(SMALL, scores, threshold=5.0, connected=False, select="signed")
    assert above.edges == SMALL.edges[:3]
    with pytest.raises(CircuitError, match="select='best' is none of 'signed', 'absolute'"):
        Circuit.from_scores(SMALL, scores, top=3, select="best")


def test_the_sign_of_what_helps_is_kept_in_a_file(tmp_path: Path) -> None:
    scores = random_scores(SMALL, 3)
    circuit = Circuit.from_scores(SMALL, scores, threshold=1.0, helps=1.0)
    assert Circuit.load(circuit.save(tmp_path / "circuit.json")) == circuit


def test_heads_that_share_keys_have_equal_shares_of_their_scores_there(tmp_path: Path) -> None:
    scores = {edge: 1.0 + number for number, edge in enumerate(GROUPED.edges)}
    circuit = Circuit.made(GROUPED, ["input->a0.kv1<k>", "a0.h3->logits"], scores=scores)
    whole = json.loads(circuit.save(tmp_path / "graph.json", format="eap").read_text())
    kept = {name for name, said in whole["edges"].items() if said["in_graph"]}
    assert kept == {"input->a0.h2<k>", "input->a0.h3<k>", "a0.h3->logits"}
    assert whole["edges"]["input->a0.h2<k>"]["score"] == -scores["input->a0.kv1<k>"] / 2
    assert whole["edges"]["input->a0.h2<q>"]["score"] == -scores["input->a0.h2<q>"]
    again = from_json(json.dumps(whole), GROUPED)
    assert (again.edges, again.scores) == (circuit.edges, {edge: -score for edge, score in scores.items()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cfg": {"n_layers": 2}}, "cfg.n_heads is null, where a whole number is expected"),
        ({"cfg": {"n_layers": 10**9, "n_heads": 12}}, "1000000000 layers of 12 heads"),
        ({"edges": {"input->m9": {"score": 1, "in_graph": True}}}, "no reader 'm9'"),
        ({"edges": {"input->m0": {"score": "1", "in_graph": True}}}, "edges.input->m0.score is a text"),
        ({"edges": {"input->m0": 1}}, "edges.input->m0 is no object"),
        ({"nodes": {"m0": {"in_graph": True, "neurons": [True, False]}}}, "circuit of neurons .m0"),
    ],
)
def test_a_graph_of_theirs_that_is_damaged_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(CircuitError, match=said):
        Circuit.load(write(tmp_path, eap(SMALL, []) | change))


def test_what_was_never_scored_is_nan_there_and_nothing_here(tmp_path: Path) -> None:
    whole = eap(SMALL, [])
    whole["edges"]["input->m0"]["score"] = math.nan
    whole["nodes"]["m0"]["score"] = math.nan
    circuit = Circuit.load(write(tmp_path, whole))
    assert circuit.scores is not None
    assert "input->m0" not in circuit.scores


def test_a_graph_that_theirs_cannot_say_is_refused(tmp_path: Path) -> None:
    odd = EdgeGraph(
        (GraphWriter("input"), GraphWriter("m0", 0)),
        (GraphReader("m0", "mlp", 1, 0), GraphReader("logits", "logits", 2)),
        8,
    )
    with pytest.raises(CircuitError, match="EAP-IG's graphs have an input, layers of one number of heads"):
        Circuit.made(odd, []).save(tmp_path / "x.json", format="eap")
    unsized = EdgeGraph(SMALL.writers, SMALL.readers)
    with pytest.raises(CircuitError, match=r"d_model in it.*circuit.bind\(model\)"):
        Circuit.made(unsized, []).save(tmp_path / "x.json", format="eap")


# -- drawings -----------------------------------------------------------------------------------------

TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|-?[\d.]+|->|[{}\[\];,=])')


def parsed(text: str) -> tuple[str, dict[str, dict[str, str]], list[tuple[str, str, dict[str, str]]]]:
    """A digraph in Graphviz' language, by its grammar: the name, the nodes, the edges, with attributes."""
    at = 0
    tokens = []
    while text[at:].strip():
        token = TOKEN.match(text, at)
        assert token is not None, text[at : at + 40]
        tokens.append(token[1])
        at = token.end()
    tokens.reverse()

    def take(expected: str | None = None) -> str:
        token = tokens.pop()
        assert expected in (None, token), (expected, token)
        return re.sub(r"\\(.)", r"\1", token[1:-1]) if token.startswith('"') else token

    def attributes() -> dict[str, str]:
        found: dict[str, str] = {}
        if tokens and tokens[-1] == "[":
            take("[")
            while tokens[-1] != "]":
                name = take()
                take("=")
                found[name] = take()
                if tokens[-1] == ",":
                    take()
            take("]")
        return found

    nodes: dict[str, dict[str, str]] = {}
    edges = []

    def statements() -> None:
        while tokens[-1] != "}":
            if tokens[-1] == "{":
                take()
                statements()
                take("}")
                continue
            name = take()
            if tokens[-1] == "=":
                take()
                take()
            elif tokens[-1] == "->":
                take()
                stop = take()
                edges.append((name, stop, attributes()))
            elif name in ("node", "edge"):
                attributes()
            else:
                nodes[name] = attributes()
            if tokens[-1] == ";":
                take()

    take("digraph")
    name = take()
    take("{")
    statements()
    take("}")
    assert not tokens
    return name, nodes, edges


def test_dot_has_every_component_and_every_edge() -> None:
    edges = ["input->a0.h1<v>", "a0.h1->a1.h0<k>", "a1.h0->logits", "m0->logits"]
    circuit = Circuit.made(SMALL, edges, of='a "model" \\ of\nmine', scores={edges[0]: -2.0, edges[1]: 1.0})
    name, nodes, drawn = parsed(circuit.to_dot())
    assert name.startswith('a "model" \\ of')
    assert set(nodes) == {"input", "a0.h1", "a1.h0", "m0", "logits"}
    assert {(start, stop, said.get("label")) for start, stop, said in drawn} == {
        ("input", "a0.h1", "v"),
        ("a0.h1", "a1.h0", "k"),
        ("a1.h0", "logits", None),
        ("m0", "logits", None),
    }
    by_name = {said["tooltip"].partition(" ")[0]: said for _, _, said in drawn}
    colours = [by_name[edge]["color"] for edge in edges]
    assert len(set(colours)) == 3
    assert float(by_name[edges[0]]["penwidth"]) > float(by_name[edges[1]]["penwidth"])


def test_dot_joins_what_a_group_shares_to_its_heads() -> None:
    circuit = Circuit.made(GROUPED, ["input->a0.kv1<k>", "a0.h3->logits"])
    _, nodes, drawn = parsed(circuit.to_dot())
    assert set(nodes) == {"input", "a0.kv1", "a0.h3", "logits"}
    assert ("a0.kv1", "a0.h3") in {
        (start, stop) for start, stop, said in drawn if said.get("style") == "dashed"
    }


def test_an_empty_circuit_is_drawn() -> None:
    assert parsed(found([]).to_dot())[1:] == ({}, [])
    assert len(found([]).plot().data) == 2


def test_a_figure_tells_every_edge_and_component() -> None:
    scores = random_scores(GROUPED, 2)
    circuit = Circuit.from_scores(GROUPED, scores, top=20, of="<b>mine</b>")
    made = circuit.plot()
    traces = {trace.name: trace for trace in made.data if trace.name}
    told = dict(traces["edges"].customdata)
    assert set(told) == {edge.replace(">", "&gt;").replace("<", "&lt;") for edge in circuit.edges}
    assert float(told["a0.h2-&gt;logits"].split()[1]) == scores["a0.h2->logits"]
    assert set(circuit.nodes) <= set(traces["components"].text)
    assert "&lt;b&gt;mine" in made.layout.title.text
    heights = dict(zip(traces["components"].text, traces["components"].y, strict=True))
    for edge in circuit.edges:
        writer, reader = edge.split("->")
        assert heights[writer] < heights[reader.partition("<")[0]]


def test_a_large_circuit_shows_its_strongest_edges() -> None:
    whole = graph(8, 8)
    scores = {edge: 1.0 + number for number, edge in enumerate(whole.edges)}
    assert whole.count > 4000
    made = Circuit.made(whole, whole.edges, scores=scores).plot()
    assert f"the 4,000 strongest of {whole.count:,} edges" in made.layout.title.text
    assert len(made.data) < 20


def test_what_writes_first_stands_higher() -> None:
    """In a layer whose MLP comes first, heads read what it wrote."""
    first = EdgeGraph(
        (GraphWriter("input"), GraphWriter("m0", 0), GraphWriter("a0.h0", 0, 0)),
        (
            GraphReader("m0", "mlp", 1, 0),
            *(GraphReader(f"a0.h0<{slot}>", slot, 2, 0, 0) for slot in "qkv"),
            GraphReader("logits", "logits", 3),
        ),
    )
    drawn = layered(first, first.edges, None)
    assert all(drawn.boxes[line.start].y < drawn.boxes[line.stop].y for line in drawn.lines)
    drawn = layered(GROUPED, GROUPED.edges, None)
    assert all(drawn.boxes[line.start].y < drawn.boxes[line.stop].y for line in drawn.lines)
    assert all(drawn.boxes[kv].y < drawn.boxes[head].y for kv, head in drawn.links)
