import numpy as np
import pytest

from conewise.paper import theory
from conewise.paper.experiments import grafts
from conewise.paper.theory import GraftAt
from conewise.reactive.graph import Block
from tests.paper.experiments.quick import quick


def test_grafts_cost_more_where_blocks_below_them_came_first() -> None:
    """So the order is told from the isolated sum, and the closed form has something to say."""
    graph, loss, _, ends = grafts.network()
    blocks = [grafts.residual_block(np.random.default_rng(0)) for _ in grafts.ORDER]
    planned = [GraftAt(ends[layer], block) for layer, block in zip(grafts.ORDER, blocks, strict=True)]
    predicted = theory.interleaved_cost(graph, planned, demand=loss)
    rows = [row for row in quick("growth").rows if row.name.endswith("recomputed for the loss")]
    assert [row.measured for row in rows] == list(predicted.costs)
    assert predicted.overcount > 0


def test_a_block_alone_is_trained_at_the_cost_of_its_own_cone() -> None:
    counts = [row.measured for row in quick("growth").rows if row.detail]
    fresh, whole = counts[8], counts[15]
    assert fresh < whole


def test_a_block_that_is_no_identity_changes_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    made = grafts.residual_block

    def shifted(random: np.random.Generator) -> Block:
        block = made(random)
        for part in block.nodes:
            if part.name == "down":
                part.value[...] = 1e-3
        return block

    monkeypatch.setattr(grafts, "residual_block", shifted)
    course = grafts.train((1,), steps=2)
    assert course.loss_changed == 1
    assert course.grafts[0][0] == course.grafts[0][1]
