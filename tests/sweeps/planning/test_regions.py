"""Which positions of which nodes are computed: from the first change on, where none before it can see it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import conewise as cw
from conewise.model import Model
from conewise.program.walk import Interpreter, compile_rule
from conewise.sweeps.planning.layout import Layout
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.regions import (
    RegionFinder,
    Regions,
    causal_rule,
    masks_of,
    read_masks,
    unmasked_rule,
)
from conewise.sweeps.planning.spec import first_difference
from tests.sweeps.mixers import ATTENTION, Attention, causal, ids, module

LENGTH, ATTENDED = 6, "between/scaled_dot_product_attention"


def captured(between: Any) -> Model:
    return cw.capture(module(between), input_ids=ids(2, LENGTH, 0))


def layout_of(model: Model, batch: int = 2) -> Layout:
    shapes = {leaf.name: leaf.shape for leaf in model.program.inputs}
    return Layout(model.program, model.program.sizes.symbols_of(shapes, {"input_ids": (batch, LENGTH)}))


def changed(model: Model, start: int, site: str = "embed/embedding") -> Regions:
    values = Interpreter(model.program).values({"input_ids": ids(2, LENGTH, 1)})
    computed = set(model.graph.cone([site]))
    masks = read_masks(masks_of(model.program), values.__getitem__)
    return RegionFinder(layout_of(model)).changed(
        start, {site}, computed, lambda mask, start: masks[mask].hides_from(start)
    )


SEEING = {"everything", "later positions", "added, a low number", "a position that sees all alike"}
"""Attention in which an early position sees one from 3 on; that to a prefix of 3 does not."""


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_has_a_region_where_nothing_before_sees_it(name: str) -> None:
    model = captured(ATTENTION[name]())
    regions = changed(model, 3)
    assert regions.of("norm/layer_norm") == 3
    assert regions.of(ATTENDED) == (None if name in SEEING else 3)
    assert regions.of("head/linear") == regions.of(ATTENDED)
    if name not in SEEING:
        read = model.program.records[[r.name for r in model.program.records].index(ATTENDED)].inputs
        assert [regions.wanted(ATTENDED, one) for one in read[:3]] == [3, None, None]


@pytest.mark.parametrize(("start", "rows"), [(0, None), (1, None), (2, None), (3, 3), (5, 1), (6, None)])
def test_a_prefix_is_seen_as_far_as_it_goes(start: int, rows: int | None) -> None:
    assert changed(captured(ATTENTION["a prefix"]()), start).of(ATTENDED) == rows


def test_a_mask_that_the_change_reaches_says_nothing() -> None:
    class Masked(Attention):
        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            q, k, v = (one(x)[:, None] for one in (self.q, self.k, self.v))
            mask = causal(length) & (x[..., :1].transpose(1, 2) > -9)
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None])
            return self.o(seen.reshape(batch, length, width))  # type: ignore[no-any-return]

    model = captured(Masked())
    assert changed(model, 3).of(ATTENDED) is None
    assert changed(model, 3, "between.q/linear").of(ATTENDED) == 3


LAST: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "the last, counted from the end": (lambda x: x[:, -1:].tanh(), True),
    "the last, counted by the length": (lambda x: x[:, x.shape[1] - 1 :].tanh(), True),
    "one that is last at this length": (lambda x: x[:, 5:6].tanh(), False),
    "another": (lambda x: x[:, 4:5].tanh(), False),
    "the last two": (lambda x: x[:, -2:].sum(1, keepdim=True), False),
}


@pytest.mark.parametrize("name", LAST)
def test_a_slice_of_the_last_position_leaves_the_others_out(name: str) -> None:
    function, is_last = LAST[name]
    model = captured(lambda x: x + function(x.sigmoid()))
    finder = RegionFinder(layout_of(model))
    region = finder.last(["head/linear"], ())
    assert {"head/linear", "mlp/linear"} <= region
    assert ("between/slice" in region) == ("between/sigmoid" in region) == is_last
    assert "head/linear" not in finder.last(["head/linear"], ["head/linear"])


@cache
def flattened() -> Model:
    return captured(lambda x: x.reshape(-1, 8).tanh().reshape(x.shape))


@given(st.integers(1, 3), st.integers(1, LENGTH), st.data())
def test_the_first_difference(batch: int, length: int, data: st.DataObject) -> None:
    """Where no input differs, the last position."""
    model = flattened()
    start = data.draw(st.integers(0, length))
    one = torch.randint(0, 5, (batch, length))
    other = one.clone()
    other[data.draw(st.integers(0, batch - 1)), start:] += 1
    base, source = (model.run(input_ids=given) for given in (one, other))
    facts = facts_of(model).shape({"input_ids": one})
    found, differing = first_difference(base, source, facts.finder, facts.layout)
    assert found == min(start, length - 1)
    assert differing == ({"input_ids"} if start < length else set())


@pytest.mark.parametrize(("pos", "expected"), [(2, 2), (slice(3, 5), 3), ([4, 1], 1), (None, 0)])
def test_the_first_difference_of_runs_in_which_something_is_patched(pos: Any, expected: int) -> None:
    model = flattened()
    inputs = ids(2, LENGTH, 1)
    base, source = model.run(input_ids=inputs), model.run(input_ids=inputs)
    facts = facts_of(model).shape({"input_ids": inputs})
    place = cw.site("embed") if pos is None else cw.site("embed", pos=pos)
    with source.fork() as patched:
        patched.patch(place, "zero")
        assert first_difference(base, patched, facts.finder, facts.layout)[0] == expected
        assert first_difference(patched, base, facts.finder, facts.layout)[0] == expected


@pytest.mark.parametrize("rows", range(1, LENGTH + 1))
def test_the_rules_of_attention_without_a_mask(rows: int) -> None:
    q, k, v = (torch.randn(2, 2, LENGTH, 4) for _ in range(3))
    plain = captured(Attention(is_causal=True))
    record = next(r for r in plain.program.records if r.name == ATTENDED)
    whole = compile_rule(record)(q, k, v)
    part = causal_rule(record, rows, LENGTH, q.device)(q[:, :, -rows:], k, v)
    torch.testing.assert_close(part, whole[:, :, -rows:])
    masked = captured(Attention(causal))
    other = next(r for r in masked.program.records if r.name == ATTENDED)
    torch.testing.assert_close(unmasked_rule(other)(q, k, v, None), whole)
