"""Attribution by real workers: the bits of a local run with the same pieces, whatever happens to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import SweepError
from conewise.model import Model
from tests.jobs.fleet_cases import HEADS, METRIC, ids, killing, raising_while

pytestmark = pytest.mark.ray

SITES = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":", pos=":")
SEVERAL = [{"input_ids": ids(seed)} for seed in (1, 2, 3)]


def asked(**other: Any) -> dict[str, Any]:
    return {"base": SEVERAL, "source": SEVERAL[::-1], "metric": METRIC, **other}


def budget(model: Model, sites: Any, share: float, **given: Any) -> int:
    """So much memory that batches are cut into pieces."""
    return int(share * model.attribute(sites, **given).plan().peak_bytes)


def assert_same(found: Any, local: Any) -> None:
    assert torch.equal(found.per_prompt, local.per_prompt)
    assert torch.equal(found.base_per_prompt, local.base_per_prompt)
    assert found.equals(local)
    assert found.method == local.method
    assert found.ledger.node_evaluations == local.ledger.node_evaluations
    plan, own = found.plan, local.plan
    assert (plan.flops, plan.full_flops, plan.why) == (own.flops, own.full_flops, own.why)


@pytest.mark.parametrize("method", ["atp", "atp*", "ig", "relp", "eap", "eap-ig"])
def test_methods_have_the_bits_of_a_local_run(fleet: Any, model: Model, method: str) -> None:
    sites = model.edges() if method.startswith("eap") else SITES
    how: dict[str, Any] = {"method": method, "steps": 2 if "ig" in method else None}
    seen: list[tuple[int, int]] = []
    local = model.attribute(sites, **asked(), **how).run()
    found = model.attribute(sites, **asked(), **how).run(
        workers=fleet, progress=lambda *both: seen.append(both)
    )
    assert_same(found, local)
    assert seen[-1] == (3 * len(local.cells), 3 * len(local.cells))
    assert sum(one.shares for one in fleet.ledger.seats.values()) == 3


def test_pieces_runs_and_what_is_put_in_travel(fleet: Any, model: Model) -> None:
    base, source = (model.run(input_ids=ids(seed, batch=5)) for seed in (1, 2))
    answers = cw.logit_diff(answer=[1, 2, 3, 4, 5], wrong=[9] * 5, name="own")
    one: list[dict[str, Any]] = [
        asked(base=base, source=source, metric=[METRIC, answers]),
        asked(base={"input_ids": ids(1, batch=5)}, source="zero"),
    ]
    for given in one:
        tight = budget(model, SITES, 0.5, **given)
        local = model.attribute(SITES, **given).run(max_memory=tight)
        found = model.attribute(SITES, **given).run(max_memory=tight, workers=fleet)
        assert_same(found, local)
        assert sum(seat.shares for seat in fleet.ledger.seats.values()) > 1
    whole: list[dict[str, Any]] = [
        asked(source=lambda present: present / 2, metric=lambda outputs: outputs.logits[:, -1, 3]),
        asked(source=cw.mean(model, SEVERAL)),
        asked(metric=[METRIC, cw.logit_diff([1, 2, 3, 4, 5, 6], [9] * 6, name="own")]),
    ]
    for given in whole:
        assert_same(model.attribute(SITES, **given).run(workers=fleet), model.attribute(SITES, **given).run())


def test_a_killed_worker_costs_nothing_and_runs_go_on_anywhere(
    fleet: Any, model: Model, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    given = asked(metric=killing(flag))
    local = model.attribute(SITES, **given).run(out=tmp_path / "local")
    flag.touch()
    found = model.attribute(SITES, **given).run(workers=fleet, out=tmp_path / "run")
    assert not flag.exists()
    assert_same(found, local)
    assert fleet.ledger.died == 1
    for folder in ("run", "local"):
        for executor in (None, fleet):
            again = model.attribute(SITES, **given).run(workers=executor, out=tmp_path / folder, resume=True)
            assert again.ledger.resumed == 3 * len(local.cells)
            assert torch.equal(again.per_prompt, local.per_prompt)


def test_a_piece_that_raises_says_so_and_the_others_are_kept(
    fleet: Any, model: Model, tmp_path: Path
) -> None:
    flag, folder = tmp_path / "flag", tmp_path / "run"
    given = asked(metric=raising_while(flag))
    local = model.attribute(SITES, **given).run()
    assert local.base_per_prompt is not None
    flag.write_text(str(float(local.base_per_prompt[0, 2])))  # the first prompt of the second batch
    with pytest.raises(Exception, match="no such kernel"):
        model.attribute(SITES, **given).run()
    with pytest.raises(SweepError, match=r"1 of 3 pieces .*batch 1: RuntimeError: no such kernel"):
        model.attribute(SITES, **given).run(workers=fleet, out=folder)
    flag.unlink()
    found = model.attribute(SITES, **given).run(out=folder, resume=True)
    assert found.ledger.resumed == 2 * len(local.cells)
    assert torch.equal(found.per_prompt, local.per_prompt)


def test_prompts_that_do_not_fit_are_cut_down_to_one(fleet: Any, model: Model) -> None:
    given = asked(base={"input_ids": ids(1, batch=4)}, source={"input_ids": ids(2, batch=4)})
    local = model.attribute(SITES, **given).run()
    shared: dict[str, Any] = {} if isinstance(fleet, cw.Processes) else {"cpus_per_worker": 0}
    with type(fleet)(workers=1, max_memory=budget(model, SITES, 0.4, **given), **shared) as small:
        found = model.attribute(SITES, **given).run(workers=small)
        assert small.ledger.halved == 3
        torch.testing.assert_close(found.per_prompt, local.per_prompt, rtol=0, atol=1e-5)
        apart = {**given, "source": lambda present: present / 2}
        with pytest.raises(SweepError, match="may depend on all prompts"):
            model.attribute(SITES, **apart).run(workers=small)
        long = {"base": {"input_ids": ids(1, 28, 1)}, "source": {"input_ids": ids(2, 28, 1)}}
        with pytest.raises(SweepError, match="does not fit into a worker"):
            model.attribute(SITES, **{**given, **long}).run(workers=small)


def test_hybrid_and_checks_compute_their_worlds_by_workers(fleet: Any, model: Model) -> None:
    how: dict[str, Any] = {"method": "hybrid", "top": 3, "n": 4}
    local = model.attribute(HEADS, **asked(), **how).run()
    found = model.attribute(HEADS, **asked(), **how).run(workers=fleet)
    assert torch.equal(found.per_prompt, local.per_prompt)
    assert found.exact == local.exact
    approx = model.attribute(HEADS, **asked()).run()
    exact, here = approx.check(3, 4, workers=fleet), approx.check(3, 4)
    assert exact.estimate.tolist() == here.estimate.tolist()
    assert sum(seat.worlds for seat in fleet.ledger.seats.values()) == 3 * 7
