"""The options of a search for a circuit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from conewise.cli.options.choices import Ablation, Method, Metric
from conewise.cli.options.options import ReadMetric
from conewise.cli.options.panels import FINDING


@dataclass(frozen=True)
class FindOptions:
    """How a circuit is found: the method, how much is kept, what removed edges carry, what is read."""

    method: Annotated[
        Method,
        typer.Option(
            "--method",
            help="acdc: remove edges one after the other where the metric can do without. exact: patch every "
            "edge alone, and keep those with the largest effects.",
            rich_help_panel=FINDING,
        ),
    ] = Method.ACDC
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            metavar="T",
            help="How much an edge has to change the metric to be kept.",
            rich_help_panel=FINDING,
            show_default="1% of what removing all edges changes",
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            metavar="N",
            min=1,
            help="With --method exact, keep at most so many edges, and not by a threshold.",
            rich_help_panel=FINDING,
            show_default=False,
        ),
    ] = None
    connected: Annotated[
        bool,
        typer.Option(
            "--connected/--no-connected",
            help="With --method exact, keep only edges on a path from the input to the logits.",
            rich_help_panel=FINDING,
        ),
    ] = True
    ablation: Annotated[
        Ablation,
        typer.Option(
            "--ablation",
            help="What removed edges carry: what they do on the corrupted prompt, nothing, or their mean.",
            rich_help_panel=FINDING,
        ),
    ] = Ablation.RESAMPLE
    metric: ReadMetric = Metric.LOGIT_DIFF
    minimality: Annotated[
        bool,
        typer.Option(
            "--minimality/--no-minimality",
            help="Evaluate the circuit without each of its edges too.",
            rich_help_panel=FINDING,
        ),
    ] = True
