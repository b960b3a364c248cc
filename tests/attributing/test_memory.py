"""The memory that an attribution is planned to take is what it takes, in torch's own blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import conewise as cw
from conewise.attributing.pieces import Method
from conewise.program.rehearsal import is_rehearsal
from tests.circuits.edge_models import inputs_of, model_of
from tests.sweeps.execution.test_memory_of_passes import Held

HEADS = cw.sites("z", layer=":", head=":")
OFF = 0.02


class Blocks(Held):  # type: ignore[no-untyped-call]
    """Counts blocks of any shape; those that an operation is given were there before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_rehearsal():
            return func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._known.add(leaf.untyped_storage().data_ptr())
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return made


def taken(
    monkeypatch: pytest.MonkeyPatch,
    model: cw.Model,
    sites: Any,
    *,
    max_memory: int | None = None,
    **asked: Any,
) -> int:
    """The most that the passes of an attribution hold, beyond what was held before them."""
    scores, peaks = Method.scores, list[int]()

    def counted(*given: Any) -> Tensor:
        if is_rehearsal():
            return scores(*given)
        held = Blocks([])
        with held:
            found = scores(*given)
        peaks.append(held.peak)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Method, "scores", counted)
        model.attribute(sites, **asked).run(max_memory=max_memory)
    return max(peaks)


CASES = [
    ("gpt2", "atp", HEADS, "inputs"),
    ("gpt2", "eap", "edges", "inputs"),
    ("gpt2", "eap-ig", "edges", "runs"),
    ("gpt2", "atp*", HEADS + cw.sites("q", layer=":", head=":"), "zero"),
    ("llama", "atp", cw.sites("resid_pre", layer=":", pos=":"), "runs"),
    ("llama", "relp", "edges", "inputs"),
    ("gemma2", "ig", cw.sites("mlp_out", layer=":"), "runs"),
    ("gemma2", "eap", "edges", "zero"),
]


@pytest.mark.parametrize(("name", "method", "sites", "kind"), CASES)
def test_an_attribution_holds_what_its_plan_says(
    name: str, method: str, sites: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (base, source) = model_of(name, torch.float32), (inputs_of(name, seed, 2) for seed in (1, 2))
    sites = model.edges() if sites == "edges" else sites
    asked: dict[str, Any] = {
        "base": base if kind == "inputs" else model.run(**base),
        "source": {"inputs": source, "runs": model.run(**source), "zero": "zero"}[kind],
        "metric": [cw.logit_diff(3, 5), cw.prob(4)],
        "method": method,
        "steps": 2 if "ig" in method else None,
    }
    for _ in range(2):  # what is found once for a model and a shape is found by the first
        planned = model.attribute(sites, **asked).plan().peak_bytes
        assert taken(monkeypatch, model, sites, **asked) == pytest.approx(planned, rel=OFF)


def test_an_attribution_holds_no_more_than_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = model_of("gpt2", torch.float32), dict[str, Any](metric=cw.logit(3), method="eap")
    asked |= {"base": inputs_of("gpt2", 1, 4), "source": inputs_of("gpt2", 2, 4)}
    edges = model.edges()
    model.attribute(edges, **asked).run()
    budget = model.attribute(edges, **asked).plan().peak_bytes // 2
    planned = model.attribute(edges, **asked).plan(budget).peak_bytes
    found = taken(monkeypatch, model, edges, **asked, max_memory=budget)
    assert found <= budget
    assert found == pytest.approx(planned, rel=OFF)
    with pytest.raises(cw.errors.BudgetError) as refused:
        model.attribute(edges, **asked).plan(1000)
    assert model.attribute(edges, **asked).plan(refused.value.least).prompts_at_once == 1
