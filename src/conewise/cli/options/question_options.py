"""The options of a question: what is put at which sites or edges, in which run, and what is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from conewise.cli.options.choices import Direction, Metric, Patch
from conewise.cli.options.help_texts import literal
from conewise.cli.options.options import Pos, ReadMetric
from conewise.cli.options.panels import CHANGE, RUNNING
from conewise.cli.options.prompt_options import PromptOptions


@dataclass(frozen=True)
class SiteChoice:
    """Which sites a sweep patches."""

    sites: Annotated[
        str,
        typer.Option(
            "--sites",
            metavar="KINDS",
            help=literal(
                "What is patched, separated by commas: kinds (z: every head, mlp_out: every MLP), parts of "
                "kinds as 'z[layer=2:5, head=0]', or names; see `conewise sites`."
            ),
            rich_help_panel=CHANGE,
        ),
    ] = "z,mlp_out"


@dataclass(frozen=True)
class EdgeChoice:
    """Which edges a sweep patches."""

    edges: Annotated[
        str,
        typer.Option(
            "--edges",
            metavar="NAMES",
            help="Which edges, as WRITER->READER with * for anything: 'a0.*->*', '*->*<k>', 'm?->logits'.",
            rich_help_panel=CHANGE,
        ),
    ] = "*->*"


@dataclass(frozen=True)
class ChangeOptions:
    """What is put at a site or an edge, in which run, and what is read."""

    pos: Pos = None
    patch: Annotated[
        Patch,
        typer.Option(
            "--patch",
            help="What is put there: the source run's value, zero, the mean over the prompts, or noise.",
            rich_help_panel=CHANGE,
        ),
    ] = Patch.SOURCE
    noise_scale: Annotated[
        float | None,
        typer.Option(
            "--noise-scale",
            metavar="S",
            help="The standard deviation of --patch noise.",
            rich_help_panel=CHANGE,
            show_default="1.0",
        ),
    ] = None
    direction: Annotated[
        Direction | None,
        typer.Option(
            "--direction",
            help="denoise: the corrupted run is changed (values come from the clean one). noise: the clean "
            "run is changed. Usual: denoise with --patch source, noise otherwise.",
            rich_help_panel=CHANGE,
            show_default=False,
        ),
    ] = None
    metric: ReadMetric = Metric.LOGIT_DIFF
    tf32: Annotated[
        bool,
        typer.Option(
            "--tf32",
            help="Multiply float32 in TF32, on a CUDA device: faster, rounds to 10 bits.",
            rich_help_panel=RUNNING,
        ),
    ] = False
    split: Annotated[
        bool,
        typer.Option(
            "--split",
            help="Multiply float32 in three bfloat16 parts, on a CUDA device: faster, a few times its error.",
            rich_help_panel=RUNNING,
        ),
    ] = False


# The fields of the last base come first.
@dataclass(frozen=True)
class QuestionOptions(ChangeOptions, SiteChoice, PromptOptions):
    """What a sweep is about: the prompts, the sites, what is put there and what is read."""


@dataclass(frozen=True)
class EdgeOptions(ChangeOptions, EdgeChoice, PromptOptions):
    """What a sweep over edges is about: the prompts, the edges, what is put there and what is read."""
