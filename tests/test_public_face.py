"""The public names, pinned: each new one is a decision."""

from __future__ import annotations

import conewise


def test_the_public_names_are_these() -> None:
    assert sorted(conewise.__all__) == list(conewise.__all__)
    assert set(conewise.__all__) == {
        "Block",
        "Circuit",
        "ConewiseError",
        "Event",
        "Graft",
        "Graph",
        "Ledger",
        "Model",
        "Node",
        "Place",
        "Plan",
        "Result",
        "Run",
        "Sweep",
        "SweepPlan",
        "World",
        "acdc",
        "acdc_plan",
        "add",
        "attribution",
        "block",
        "capture",
        "causal_trace",
        "chain",
        "cross_entropy",
        "gradients",
        "intervention",
        "kl_to",
        "load",
        "logit",
        "logit_diff",
        "mean",
        "metric",
        "noise",
        "ops",
        "prob",
        "resample",
        "site",
        "sites",
    }


def test_every_public_name_is_there_and_documented() -> None:
    for name in conewise.__all__:
        assert getattr(conewise, name).__doc__, name
