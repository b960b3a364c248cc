"""What a plan says is what happens: operations, memory, launches; and it holds to its budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import conewise as cw
from conewise.model import Model
from conewise.program.records import PRODUCTS
from conewise.runs.metrics import Metric
from conewise.sweeps.planning.costs import Costs
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.sweep import Sweep

WeakStorage: Any = StorageWeakRef
LENGTH, VOCABULARY, LAYERS = 16, 900, 2
WITHIN = 0.1
"""How far the predicted peak may lie from the measured one; typically the two are equal to the byte."""


class Live(TorchDispatchMode):
    """Counts the bytes of the memory that operations made and that is still held; `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[Any, int]] = {}
        self.found: dict[int, Any] = {}
        self.peak: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.made:
                    self.found.setdefault(storage._cdata, WeakStorage(storage))
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.found:
                    self.made.setdefault(storage._cdata, (WeakStorage(storage), storage.nbytes()))
        self.made = {key: held for key, held in self.made.items() if not held[0].expired()}
        self.found = {key: held for key, held in self.found.items() if not held.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return out


def gpt2(attention: str) -> Model:
    options = {"n_layer": LAYERS, "n_head": 12, "n_embd": 192, "n_positions": 32}
    return _captured("GPT2Config", "GPT2LMHeadModel", options, attention)


def llama(attention: str) -> Model:
    options = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return _captured("LlamaConfig", "LlamaForCausalLM", options, attention)


def _captured(config: str, module: str, options: dict[str, Any], attention: str) -> Model:
    options = {**options, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    made = getattr(transformers, config)(**options, attn_implementation=attention)
    return cw.capture(getattr(transformers, module)(made).eval(), input_ids=ids(2))


def ids(batch: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Callable[[str], Model], str]] = {
    "gpt2": (gpt2, "eager"),
    "llama": (llama, "sdpa"),
}
_CAPTURED: dict[str, Model] = {}


def model(name: str) -> Model:
    if name not in _CAPTURED:
        make, attention = MODELS[name]
        _CAPTURED[name] = make(attention)
    return _CAPTURED[name]


SITES: dict[str, Any] = {
    "heads and MLPs": cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":"),
    "positions": cw.sites("resid_pre", layer=":", pos=":"),
    "late": cw.sites("resid_post", layer=LAYERS - 1, pos=":"),
    "keys": cw.sites("k", layer=":", pos=":"),
    "several together": [
        (cw.site("resid_pre", layer=0, pos=p), cw.site("mlp_out", layer=1, pos=p)) for p in range(LENGTH)
    ],
}
METRICS: dict[str, Callable[[int], Metric]] = {
    "logit difference": lambda batch: cw.logit_diff(1, 2),
    "probability": lambda batch: cw.prob(1),
    "cross entropy": lambda batch: cw.cross_entropy(ids(batch, 5)),
}


def sweep_of(name: str, sites: Any, metric: Any, batch: int = 1) -> Sweep:
    captured = model(name)
    base, source = captured.run(input_ids=ids(batch, 1)), captured.run(input_ids=ids(batch, 2))
    made: Sweep = captured.sweep(sites, base=base, source=source, metric=metric)
    return made


def measured(sweep: Sweep, **how: Any) -> int:
    sweep.run(evaluator="wavefront", **how)
    live = Live()
    with live:
        sweep.run(evaluator="wavefront", **how)
    return live.peak


@pytest.mark.parametrize(
    ("metric", "batch"), [("logit difference", 2), ("probability", 1), ("cross entropy", 2)]
)
@pytest.mark.parametrize("sites", SITES)
@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_peak_is_the_measured_one(name: str, sites: str, metric: str, batch: int) -> None:
    sweep = sweep_of(name, SITES[sites], METRICS[metric](batch), batch)
    predicted, found = sweep.plan().peak_bytes, measured(sweep)
    assert abs(predicted - found) <= WITHIN * found


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_holds_to_its_budget(name: str, share: float) -> None:
    sweep = sweep_of(name, SITES["heads and MLPs"], cw.prob(1), batch=2)
    budget = int(sweep.plan().peak_bytes * share)
    plan = sweep.plan(max_memory=budget)
    assert len(plan.chunks) > 1
    assert plan.peak_bytes <= budget
    assert measured(sweep, max_memory=budget) <= 1.05 * budget


def costs_for(captured: Model) -> Costs:
    return facts_of(captured).shape({"input_ids": ids(2)}).costs


@pytest.mark.parametrize("name", MODELS)
def test_the_operations_of_a_full_run_are_those_that_torch_counts(name: str) -> None:
    """The matrix products, which torch counts; ours counts the other operations too."""
    captured = model(name)
    sweep = sweep_of(name, SITES["late"], cw.prob(1), batch=2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        captured.module(input_ids=ids(2), use_cache=False)
    costs = costs_for(captured)
    products = [record for record in captured.program.records if record.op in PRODUCTS]
    counted = sum(costs.flops(record.name) for record in products)
    assert counted == counter.get_total_flops()
    plan = sweep.plan()
    assert plan.full_flops / plan.worlds == sum(costs.flops(r.name) for r in captured.program.records)
    assert counted <= plan.full_flops / plan.worlds <= 1.1 * counted


def test_fused_attention_counts_as_much_as_its_products() -> None:
    """Torch does not count it on the CPU."""
    counted = []
    for attention in ("eager", "sdpa"):
        captured = llama(attention)
        costs = costs_for(captured)
        records = captured.program.records
        counted.append(sum(costs.flops(r.name) for r in records if r.op in PRODUCTS or "attention" in r.op))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("name", MODELS)
def test_the_operations_of_a_wavefront_are_those_that_torch_counts(name: str) -> None:
    sweep = sweep_of(name, SITES["heads and MLPs"], cw.prob(1))
    sweep.run(evaluator="wavefront")
    with FlopCounterMode(display=False) as counter:
        sweep.run(evaluator="wavefront")
    assert counter.get_total_flops() <= sweep.plan().flops <= 1.2 * counter.get_total_flops()


def test_a_metric_of_the_last_position_pays_for_no_other() -> None:
    sites = cw.sites("resid_post", layer=LAYERS - 1, pos=0)  # all positions are changed
    last = sweep_of("gpt2", sites, cw.prob(1)).plan()
    every = sweep_of("gpt2", sites, METRICS["cross entropy"](1)).plan()
    assert last.flops * LENGTH == every.flops
    assert last.node_evaluations == every.node_evaluations
    serial = sweep_of("gpt2", sites, cw.prob(1)).plan(evaluator="serial")
    assert serial.flops == every.flops


def test_a_change_pays_for_no_position_before_it() -> None:
    def flops(pos: int) -> int:
        sites = cw.sites("resid_post", layer=LAYERS - 1, pos=pos)
        return sweep_of("gpt2", sites, METRICS["cross entropy"](1)).plan().flops

    for pos in range(LENGTH):
        assert flops(pos) * LENGTH == flops(0) * (LENGTH - pos)


def test_the_plan_of_a_run_is_that_of_all_its_batches() -> None:
    def change(length: int, pos: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        one = ids(1)[:, :length]
        other = one.clone()
        other[0, pos] = (other[0, pos] + 1) % VOCABULARY
        return {"input_ids": one}, {"input_ids": other}

    captured, metric = model("llama"), cw.prob(1)
    pairs = [change(9, 5), change(12, 2), change(9, 8)]
    bases, sources = zip(*pairs, strict=True)
    alone = [
        captured.sweep(SITES["heads and MLPs"], base=[base], source=[source], metric=metric).run()
        for base, source in pairs
    ]
    sweep = captured.sweep(SITES["heads and MLPs"], base=list(bases), source=list(sources), metric=metric)
    result = sweep.run()
    assert result.plan.flops == sum(one.plan.flops for one in alone)
    assert result.plan.peak_bytes == max(one.plan.peak_bytes for one in alone)
    assert result.plan.launches == result.ledger.launches == sum(one.ledger.launches for one in alone)
    assert result.plan.node_evaluations == result.ledger.node_evaluations
    assert len({one.plan.flops for one in alone}) == 3


def test_launches_are_counted_once_for_each_chunk() -> None:
    sweep = sweep_of("gpt2", SITES["heads and MLPs"], cw.prob(1))
    whole = sweep.run(evaluator="wavefront")
    assert whole.plan.launches == whole.ledger.launches < whole.plan.node_evaluations
    cut = sweep.run(evaluator="wavefront", max_memory=whole.plan.peak_bytes // 3)
    assert cut.plan.launches == cut.ledger.launches > whole.plan.launches
    serial = sweep.run(evaluator="serial")
    assert serial.plan.launches == serial.ledger.launches == serial.plan.node_evaluations


def test_planning_computes_nothing_of_the_sweep() -> None:
    sweep = sweep_of("gpt2", SITES["heads and MLPs"], cw.prob(1))
    sweep.plan()
    with FlopCounterMode(display=False) as counter:
        sweep.plan(max_memory="1MiB")
    assert counter.get_total_flops() == 0
