"""The options of loading a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from conewise.cli.options.panels import LOADING


@dataclass(frozen=True)
class LoadOptions:
    """How the weights of MODEL are loaded."""

    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="cpu, cuda, cuda:1, mps; several, as cuda:0,cuda:1, each have a worker.",
            rich_help_panel=LOADING,
            show_default="cpu",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="float32, bfloat16, float16, float64.",
            rich_help_panel=LOADING,
            show_default="as saved",
        ),
    ] = None
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="NAME",
            help="eager makes the attention patterns sites; sdpa is faster.",
            rich_help_panel=LOADING,
            show_default="the model's own",
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="NAME",
            help="Of a model on the hub.",
            rich_help_panel=LOADING,
            show_default=False,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the Python code that a model brings.", rich_help_panel=LOADING
        ),
    ] = False
