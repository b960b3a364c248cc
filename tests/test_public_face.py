"""The public names, pinned: each new one is a decision."""

from __future__ import annotations

from pathlib import Path

import conewise


def test_the_public_names_are_these() -> None:
    assert sorted(conewise.__all__) == list(conewise.__all__)
    assert set(conewise.__all__) == {
        "Block",
        "CaptureError",
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
        "Processes",
        "Ray",
        "Result",
        "Run",
        "Surgery",
        "Sweep",
        "SweepPlan",
        "World",
        "add",
        "block",
        "boundless",
        "capture",
        "cell",
        "cells",
        "chain",
        "compare",
        "cross_entropy",
        "dictionary",
        "evaluate",
        "gradients",
        "intervention",
        "kl_to",
        "learned_mask",
        "load",
        "log_prob",
        "logit",
        "logit_diff",
        "low_rank",
        "masked",
        "mean",
        "metric",
        "multiply",
        "noise",
        "open",
        "ops",
        "pairs",
        "prob",
        "prob_diff",
        "project_out",
        "read",
        "resample",
        "rotation",
        "site",
        "sites",
        "subspace",
        "sweep",
        "tasks",
        "writing",
    }


def test_no_public_name_is_that_of_a_folder() -> None:
    """Importing the folder would put it in the name's place."""
    folders = {path.name for path in Path(conewise.__file__).parent.iterdir() if path.is_dir()}
    assert folders & set(conewise.__all__) == set()


def test_every_public_name_is_there_and_documented() -> None:
    for name in conewise.__all__:
        assert getattr(conewise, name).__doc__, name
