"""Shares: every chunk in exactly one, none above its even part unless it is one chunk, the heaviest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conewise.jobs.scheduling import ChunkCost, Share, cut_into_shares, halves

CHUNKS = st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=12), min_size=1, max_size=5)


@given(CHUNKS, st.integers(1, 64), st.integers(1, 8))
def test_every_chunk_is_in_one_share_and_shares_are_even(
    costs: list[list[int]], workers: int, per_worker: int
) -> None:
    chunks = [
        ChunkCost(batch, number, 1, cost)
        for batch, own in enumerate(costs)
        for number, cost in enumerate(own)
    ]
    shares = cut_into_shares(chunks, workers, per_worker)
    assert sorted((share.batch, chunk) for share in shares for chunk in share.chunks) == [
        (one.batch, one.chunk) for one in chunks
    ]
    even = sum(one.cost for one in chunks) / (workers * per_worker)
    for share in shares:
        assert share.cost == sum(costs[share.batch][chunk] for chunk in share.chunks)
        assert list(share.chunks) == list(range(share.chunks[0], share.chunks[-1] + 1))
        assert share.cost <= even or len(share.chunks) == 1
    assert [share.cost for share in shares] == sorted((share.cost for share in shares), reverse=True)


@given(st.integers(0, 10**9), st.integers(0, 100), st.integers(2, 1000))
def test_halves_are_all_of_it(cost: int, first: int, worlds: int) -> None:
    left, right = halves(Share(3, (5,), cost), first, worlds)
    assert left.worlds is not None
    assert right.worlds is not None
    assert (left.first, left.first + left.worlds, right.first + right.worlds) == (
        first,
        right.first,
        first + worlds,
    )
    assert left.cost + right.cost == cost
    assert {left.chunks, right.chunks} == {(5,)}
    assert min(left.worlds, right.worlds) >= worlds // 2
