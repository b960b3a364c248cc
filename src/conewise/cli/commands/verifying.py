"""`conewise verify`: the captured graph against the module itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from conewise.cli import options as opt
from conewise.cli.option_groups import LoadOptions, OutputOptions
from conewise.cli.options import flat, help_text
from conewise.cli.output import Status, print_json, stdout
from conewise.cli.questions import ModelName
from conewise.cli.streams import CHECK_FAILED

HELP = """Check the captured graph against the model itself, on random inputs: bit for bit, every output.

Exits with 1 when they differ, unless the model computes otherwise while it is captured than when it runs, and
they differ by no more than rounding; what was found is said.

\b
Examples:
  conewise verify tiny
  conewise verify ./my-model --samples 10 --dtype bfloat16 --json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify", help=help_text(HELP), short_help="Check the captured graph against the model.")(
        flat(verify)
    )


def verify(
    model: opt.Model,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=1, help="Random inputs of the captured size.")
    ] = 3,
    seed: opt.Seed = 0,
    *,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Check the captured graph; see `HELP`."""
    status = Status(output.quiet)
    found = ModelName(model, loading).capture(status)
    with status.doing("comparing with the model itself"):
        check = found.verify(seed=seed, samples=samples)
    if output.json:
        body = {**asdict(check), "notes": list(check.notes), "ok": check.ok, "seed": seed}
        print_json("verify", {"model": found.label, "fingerprint": found.fingerprint(), **body})
    else:
        stdout().print(f"{found.label}: {check}", markup=False)
    if not check.ok:
        raise typer.Exit(CHECK_FAILED)
