"""The plans and the results of all groups of prompts, as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from conewise.program.tensors import Tensor
from conewise.prompts.answer import whole_check
from conewise.runs.interventions.filling import joined
from conewise.sweeps.execution.ledger import SweepLedger, most
from conewise.sweeps.planning.plan import Lazy, SweepPlan
from conewise.sweeps.result import Result
from conewise.sweeps.storage.result_data import Missing


def whole_plan(plans: Sequence[SweepPlan]) -> SweepPlan:
    """The plans of all groups as one: counts are added up, the peak is the largest.

    `chunks` are those of the group that is cut most. The steps are those of each group's own plan.
    """
    if len(plans) == 1:
        return plans[0]
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    return replace(
        without_steps(plans[0]),
        batches=sum(plan.batches for plan in plans),
        node_evaluations=sum(plan.node_evaluations for plan in plans),
        full_evaluations=sum(plan.full_evaluations for plan in plans),
        launches=sum(plan.launches for plan in plans),
        flops=sum(plan.flops for plan in plans),
        full_flops=sum(plan.full_flops for plan in plans),
        peak_bytes=max(plan.peak_bytes for plan in plans),
        chunks=max((plan.chunks for plan in plans), key=len),
        evaluator=" and ".join(dict.fromkeys(plan.evaluator for plan in plans)),
        why=" and ".join(dict.fromkeys(plan.why for plan in plans)),
        seconds=sum(seconds) if len(seconds) == len(plans) else None,
    )


def without_steps(plan: SweepPlan) -> SweepPlan:
    """The costs of a group's plan, without its steps and the sweep, which holds what its metric reads."""
    return replace(plan, compiled=None, spec={}, sweep=None)


def whole_result(results: Sequence[Result], groups: Sequence[Sequence[int]]) -> Result:
    """The results of all groups as one, each prompt weighing the same, in the order of the pairs."""
    numbers = [number for group in groups for number in group]
    order = sorted(range(len(numbers)), key=numbers.__getitem__)

    def together(parts: Iterator[Tensor | None]) -> Tensor | None:
        known = [part for part in parts if part is not None]
        return joined(known)[..., order] if len(known) == len(results) else None

    checks = [result.verification for result in results]
    origins = [result.origin for result in results]  # not the results, which have sweeps
    per_prompt = together(result.per_prompt for result in results)
    base = together(result.base_per_prompt for result in results)
    source = together(result.source_per_prompt for result in results)
    assert per_prompt is not None
    assert base is not None
    return Result(
        whole_plan([result.plan for result in results]),
        _whole_ledger([result.ledger for result in results]),
        results[0].spreads,
        results[0].metrics,
        per_prompt.mean(-1),
        per_prompt,
        base.mean(-1),
        None if source is None else source.mean(-1),
        Lazy(lambda: _whole_provenance(origins)),
        None if None in checks else whole_check([check for check in checks if check is not None]),
        base_per_prompt=base,
        source_per_prompt=source,
        weights=results[0].weights,
        method=" and ".join(dict.fromkeys(result.method for result in results)),
        missing=tuple(_missing(results)),
    )


def _missing(results: Sequence[Result]) -> Iterator[Missing]:
    """What is missing, with batches counted through all groups."""
    before = 0
    for result in results:
        for one in result.missing:
            yield replace(one, batch=before + one.batch)
        before += result.plan.batches


def _whole_ledger(ledgers: Sequence[SweepLedger]) -> SweepLedger:
    return SweepLedger(
        sum(one.node_evaluations for one in ledgers),
        sum(one.launches for one in ledgers),
        sum(one.resumed for one in ledgers),
        sum(one.seconds for one in ledgers),
        sum(one.compute_seconds for one in ledgers),
        most(one.peak_bytes for one in ledgers),
        most(one.reserved_bytes for one in ledgers),
        {name: sum(one.phases.get(name, 0.0) for one in ledgers) for name in ledgers[0].phases},
    )


def _whole_provenance(provenances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all groups share, their batches one after another, and every metric that was read."""
    metrics = [metric for one in provenances for metric in one["metrics"]]
    return {
        **provenances[0],
        "metrics": [metric for place, metric in enumerate(metrics) if metric not in metrics[:place]],
        "batches": [batch for one in provenances for batch in one["batches"]],
    }
