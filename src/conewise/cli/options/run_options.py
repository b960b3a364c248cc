"""The options of running: how worlds are evaluated or their effects estimated, and by whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from conewise.cli.options.choices import Evaluator
from conewise.cli.options.options import MaxMemory, Seed
from conewise.cli.options.panels import RUNNING


@dataclass(frozen=True)
class RunOptions:
    """How worlds are evaluated."""

    evaluator: Annotated[
        Evaluator,
        typer.Option(
            "--evaluator",
            help="wavefront: all worlds in one pass. serial: one by one, bit for bit a full re-run.",
            rich_help_panel=RUNNING,
        ),
    ] = Evaluator.AUTO
    max_memory: MaxMemory = None
    seed: Seed = 0


@dataclass(frozen=True)
class FleetOptions:
    """Who runs it beyond this process."""

    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="[ADDRESS]",
            help="Run it on workers of Ray: those of a cluster (auto, ray://head:10001), or, without an "
            "address, of one that is started on this machine.",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="How many workers there are; without --ray, they are processes of this machine.",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="With a plan and --workers N: what so many workers would take, on paper.",
            rich_help_panel=RUNNING,
        ),
    ] = False


@dataclass(frozen=True)
class MethodOptions:
    """Whether effects are computed or estimated."""

    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Estimate effects by gradients instead of computing them: atp, atp*, ig, relp or hybrid "
            "for sites; eap, eap-ig, eap-ig-activations, relp or hybrid for edges.",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Steps along the line of --method ig, eap-ig and eap-ig-activations.",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None
