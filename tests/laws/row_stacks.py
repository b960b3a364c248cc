"""Stacks of a few layers and positions."""

from __future__ import annotations

from hypothesis import strategies as st

from conewise.paper.theory import RowStack


@st.composite
def row_stacks(draw: st.DrawFn) -> RowStack:
    """Causal ones and others, with and without queries of their own."""
    return RowStack(
        layers=draw(st.integers(1, 5)),
        positions=draw(st.integers(1, 4)),
        keys=draw(st.integers(1, 3)),
        queries=draw(st.integers(0, 2)),
        mixed=draw(st.integers(1, 3)),
        terminal=draw(st.integers(1, 2)),
        causal=draw(st.booleans()),
    )
