"""`conewise trace`: causal tracing of one prompt."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
