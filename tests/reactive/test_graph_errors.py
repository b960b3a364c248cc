"""Wrong calls on a graph: the message says what was found and what to do, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import conewise as cw
from conewise.errors import (
    ArityError,
    BlockError,
    CycleError,
    DuplicateSiteError,
    GraphError,
    InUseError,
    UnknownEdgeError,
    UnknownSiteError,
)
from tests.laws.oracle import wiring


def network() -> cw.Graph:
    graph = cw.Graph()
    graph.source("x", 3)
    graph.source("w", 2, param=True)
    graph.node("blocks.0.attn", lambda x, w: x * w, ["x", "w"])
    graph.node("blocks.0.mlp", lambda h: h + 1, ["blocks.0.attn"])
    graph.node("blocks.1.attn", lambda h: h * 2, ["blocks.0.mlp"])
    graph.node("logits", lambda a, b: a + b, ["blocks.1.attn", "blocks.0.attn"])
    return graph


WRONG: list[tuple[str, Callable[[cw.Graph], object], type[Exception], str]] = [
    (
        "unknown name",
        lambda g: g.cone("block.0.attn"),
        UnknownSiteError,
        "no site 'block.0.attn' in this graph of 6 sites. Nearest: blocks.0.attn, blocks.1.attn.*graph.sites",
    ),
    ("unknown, nothing near", lambda g: g.upstream("§§"), UnknownSiteError, "of 6 sites. List them all"),
    ("unknown among inputs", lambda g: g.node("n", sum, ["logit"]), UnknownSiteError, "Nearest: logits"),
    ("a name that cannot be one", lambda g: g.cone([["x"]]), UnknownSiteError, r"no site \['x'\]"),  # type: ignore[list-item]
    (
        "duplicate node",
        lambda g: g.node("logits", abs, ["x"]),
        DuplicateSiteError,
        r"already has a site 'logits'; names are unique.*another name.*graph.redefine\('logits', rule\)",
    ),
    ("duplicate source", lambda g: g.source("x", 1), DuplicateSiteError, "already has a site 'x'"),
    ("an empty name", lambda g: g.source("", 1), GraphError, "a string that is not empty, and '' is not one"),
    ("a name that is no string", lambda g: g.source(3, 1), GraphError, "3 is not one"),  # type: ignore[arg-type]
    (
        "missing edge",
        lambda g: g.graft(("x", "logits"), cw.chain(abs)),
        UnknownEdgeError,
        r"no edge 'x' -> 'logits': 'logits' reads blocks.* read by .* An edge is written \(input, reader\)",
    ),
    ("an edge into a source", lambda g: g.graft(("x", "w"), cw.chain(abs)), UnknownEdgeError, "is a source"),
    (
        "no edge at all",
        lambda g: g.graft("x", cw.chain(abs)),  # type: ignore[arg-type]
        GraphError,
        r"an edge is a pair \(input, reader\)",
    ),
    (
        "a cycle",
        lambda g: g.redefine("blocks.0.attn", inputs=["x", "blocks.1.attn"]),
        CycleError,
        "close a cycle: blocks.0.attn -> blocks.0.mlp -> blocks.1.attn -> blocks.0.attn.*nothing was changed",
    ),
    (
        "a cycle of one",
        lambda g: g.redefine("logits", inputs=["logits", "x"]),
        CycleError,
        "close a cycle: logits -> logits",
    ),
    (
        "too few inputs",
        lambda g: g.node("n", lambda a, b: a, ["x"]),
        ArityError,
        "the rule of 'n' takes 2 inputs, but 1 is given: x. List one input site for each argument",
    ),
    (
        "too many",
        lambda g: g.node("n", lambda a: a, ["x", "w"]),
        ArityError,
        "takes 1 input, but 2 are given: x, w",
    ),
    (
        "none",
        lambda g: g.node("n", lambda a, b=1: a, []),
        ArityError,
        "takes 1 to 2 inputs, but 0 are given: none",
    ),
    ("variadic", lambda g: g.node("n", lambda a, *b: a, []), ArityError, "takes 1 or more inputs"),
    ("redefined", lambda g: g.redefine("logits", lambda a: a), ArityError, "takes 1 input, but 2 are given"),
    (
        "a string for a list",
        lambda g: g.node("n", abs, "x"),
        GraphError,
        r"are the string 'x'; write the list \['x'\]",
    ),
    (
        "a value for a rule",
        lambda g: g.node("n", 3, ["x"]),  # type: ignore[arg-type]
        GraphError,
        r"the rule of 'n' is 3, which cannot be called.*graph.source\('n', value\)",
    ),
    (
        "redefining a source",
        lambda g: g.redefine("x", lambda a: a),
        GraphError,
        "'x' is a source.*`world.set`",
    ),
    ("redefining its inputs", lambda g: g.redefine("x", inputs=["w"]), GraphError, "'x' is a source"),
    (
        "the rule of a source",
        lambda g: g.rule("x"),
        GraphError,
        "'x' is a source: it has a value, not a rule",
    ),
    ("no block", lambda g: g.graft(("x", "blocks.0.attn"), abs), BlockError, "a graft takes a block"),  # type: ignore[arg-type]
    (
        "discarding what is read",
        lambda g: g.discard(["blocks.0.mlp"]),
        InUseError,
        "'blocks.1.attn' reads 'blocks.0.mlp': a site can be removed when nothing reads it",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_a_wrong_call_is_explained_and_changes_nothing(
    call: Callable[[cw.Graph], object], error: type[Exception], message: str
) -> None:
    graph = network()
    world = cw.World(graph)
    value = world.demand("logits")
    before = wiring(graph)
    with pytest.raises(error, match=message):
        call(graph)
    graph.check()
    world.check()
    assert wiring(graph) == before
    assert not world.is_stale("logits")
    assert world.demand("logits") == value == 20


def test_the_error_carries_the_cycle_and_the_near_names() -> None:
    graph = network()
    with pytest.raises(CycleError) as cycle:
        graph.redefine("blocks.0.attn", inputs=["logits", "w"])
    assert cycle.value.cycle == ("blocks.0.attn", "logits", "blocks.0.attn")
    with pytest.raises(UnknownSiteError) as unknown:
        graph.cone("logit")
    assert unknown.value.near == ("logits",)


def test_a_long_cycle_is_shown_from_both_ends() -> None:
    graph = cw.Graph()
    graph.node("0", lambda: 1, [])
    for number in range(1, 100):
        graph.node(str(number), lambda v: v, [str(number - 1)])
    with pytest.raises(CycleError, match=r"0 -> 1 -> 2 -> 3 -> 4 -> 5 -> ... 90 more ... -> 96") as caught:
        graph.redefine("0", lambda v: v, ["99"])
    assert len(caught.value.cycle) == 101


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g: g.node("b", lambda v: v, ["in"]), r"one output, and this graph has 2 \(a, b\). Join them"),
        (
            lambda g: g.source("second"),
            "one input, and this graph has 2 sources .*: in, second. Name the one",
        ),
    ],
)
def test_a_block_has_one_input_and_one_output(build: Callable[[cw.Graph], Any], message: str) -> None:
    graph = cw.Graph()
    graph.source("in")
    graph.node("a", lambda v: v, ["in"])
    build(graph)
    with pytest.raises(BlockError, match=message):
        cw.block(graph)


def test_a_block_that_is_nothing_or_ignores_its_input_is_refused() -> None:
    empty = cw.Graph()
    with pytest.raises(BlockError, match="has 0 sources"):
        cw.block(empty)
    empty.source("in")
    with pytest.raises(BlockError, match="none: no node is computed"):
        cw.block(empty)
    empty.source("weight", 1, param=True)
    empty.node("out", lambda v: v, ["weight"])
    with pytest.raises(BlockError, match="the output 'out' of this block does not depend on its input 'in'"):
        cw.block(empty)
    with pytest.raises(BlockError, match="'out' is computed"):
        cw.block(empty, entry="out")
    with pytest.raises(BlockError, match="'in' cannot be the one output"):
        cw.block(empty, output="in")
    with pytest.raises(BlockError, match="got no rule"):
        cw.chain()
    with pytest.raises(BlockError, match="argument 1 is 3"):
        cw.chain(abs, 3)  # type: ignore[arg-type]


def test_a_graft_is_removed_once() -> None:
    graph = network()
    graft = graph.graft(("x", "blocks.0.attn"), cw.chain(abs, abs))
    graph.remove(graft)
    with pytest.raises(GraphError, match=r"the graft 'x->blocks.0.attn' is not in this graph \(any more\)"):
        graph.remove(graft)
    graph.check()


def test_a_graft_whose_inside_is_read_stays() -> None:
    graph = network()
    graft = graph.graft(("x", "blocks.0.attn"), cw.chain(abs, abs))
    graph.node("probe", lambda v: v, [graft.sites[0]])
    before = wiring(graph)
    with pytest.raises(InUseError, match=r"'probe' reads 'x->blocks.0.attn.0', which is inside the graft"):
        graph.remove(graft)
    assert wiring(graph) == before
    graph.discard(["probe"])
    graph.remove(graft)
    assert wiring(graph) == wiring(network())
