import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conewise.paper.experiments import e9
from conewise.paper.experiments.e9 import Point, by_work, clock, grid, table
from conewise.paper.experiments.result import warm
from conewise.paper.experiments.transformers import llama
from conewise.paper.theory.clocks import calibrate
from conewise.reactive.world import World
from tests.paper.experiments.quick import SMALL


def test_patched_outputs_equal_full_runs_bit_for_bit_at_every_site() -> None:
    timed = clock(SMALL, "cpu", full=True, repetitions=1)
    assert len(timed.cones) == timed.compared == 6
    assert timed.different == 0
    assert timed.nodes == 2 * (7 * 2 + 15) + 1


def test_a_sample_weighs_one_head_for_all_heads_of_its_layer() -> None:
    timed = clock(SMALL, "cpu", full=False, repetitions=2)
    assert len(timed.cones) == 4
    assert len(timed.spent["full"]) == len(timed.as_dict()["ratios"]) == 2
    assert timed.ratio() > 0
    assert "4 of 6 sites" in timed.note


def test_the_script_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(e9, "SIZES", (SMALL,))
    assert e9.main(["--device", "cpu", "--full", "--repetitions", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (size,) = printed["sizes"]
    assert {"ratio", "prediction", "distance_percent", "outputs_different"} <= size.keys()
    assert {"date", "versions"} <= printed.keys()


def test_the_script_needs_torch_and_numpy_only() -> None:
    heavy = {"pandas", "rich", "typer", "plotly"}
    script = f"import sys, conewise.paper.experiments.e9; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def made_up(a: float, beta: float, ratio: float) -> Point:
    """A point of the grid whose demands cost exactly a for each node, and β for each of the graph."""
    samples = [(cone, nodes, a * cone + beta * nodes + 1e-4) for nodes in (100, 200) for cone in (5, 50, 90)]
    return Point(64, 8, calibrate(samples), a, ratio, ratio, 2.0, 1.9, 2.1, 4, 0)


def test_a_clock_outside_of_the_stated_band_fails() -> None:
    bound, worked = (made_up(a, 0.0, 1.9).row(1e-5) for a in (1e-5, 2e-5))
    assert (bound.facts["bound_by"], worked.facts["bound_by"]) == ("launches", "work")
    assert bound.band == pytest.approx((1.9, 2.1))
    assert worked.band == pytest.approx((1.805, 2.1))
    for ratio, is_right in ((2.09, True), (2.11, False), (1.89, False)):
        assert made_up(1e-5, 0.0, ratio).row(1e-5).match is is_right


def test_what_beta_takes_of_the_limit_is_read_off_the_upper_end_of_its_interval() -> None:
    assert made_up(1e-5, 0.0, 2.0).share == pytest.approx(0, abs=1e-6)
    assert made_up(1e-5, 1e-6, 2.0).share == pytest.approx(1 - (1.1 / 0.6) / 2, abs=1e-6)


def doubled(site: str, world: World) -> None:
    world.patch(site, 2 * world.demand(site))


def test_the_ratio_by_work_is_what_torch_counts() -> None:
    model = llama(2, 2, 64, positions=4)

    def counted(change: Callable[[World], object]) -> int:
        """Return the multiplications and additions of one change and one demand."""
        with warm(model.graph, model.output).fork() as world, FlopCounterMode(display=False) as counter:
            change(world)
            world.demand(model.output)
        return int(counter.get_total_flops())

    full = counted(lambda world: world.set("x", torch.ones(4, 64)))
    patches = [counted(partial(doubled, one.site)) for one in model.patched]
    assert by_work(2, 2, 64, 4) == pytest.approx(len(patches) * full / sum(patches), rel=2e-3)


def test_the_grid_is_timed_and_judged() -> None:
    rows = grid("cpu", widths=(8,), lengths=(4, 6), depths=(1, 2, 3), judged=2, heads=2, repetitions=1)
    assert [row.facts["length"] for row in rows[:-1]] == [4, 6]
    assert rows[-1].match
    assert len(table(rows)) == 4


def test_a_grid_that_is_out_of_time_begins_no_further_point() -> None:
    told: list[Point] = []
    small: dict[str, Any] = {
        "widths": (8,),
        "lengths": (6, 4),
        "depths": (1, 2),
        "judged": 1,
        "heads": 2,
        "repetitions": 1,
    }
    rows = grid("cpu", **small, seconds=0.0, tell=told.append)
    assert [one.length for one in told] == [row.facts["length"] for row in rows[:-1]] == [4]
