"""`conewise schema`: what the JSON of a command looks like."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Annotated

import typer

from conewise.cli.options.help_texts import help_text
from conewise.cli.terminal.failing import CommandError
from conewise.cli.terminal.output import print_as_json
from conewise.errors import nearest_names

HELP = """Print the JSON Schema (draft 2020-12) of what a command prints with --json.

\b
Examples:
  conewise schema sweep
  conewise schema plan > plan.schema.json
"""

SCHEMAS = files("conewise.cli") / "schemas"
SUFFIX = ".json"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema", help=help_text(HELP), short_help="Print the JSON Schema of a command.")(schema)


def names() -> list[str]:
    """The commands that have a schema."""
    return sorted(file.name.removesuffix(SUFFIX) for file in SCHEMAS.iterdir() if file.name.endswith(SUFFIX))


def schema(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="sweep, plan, ...", show_default=False)],
) -> None:
    """Print a command's schema; see `HELP`."""
    known = names()
    if command not in known:
        near = nearest_names(command, known)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise CommandError(f"no schema of {command!r}; there are {', '.join(known)}.{hint}")
    print_as_json(json.loads((SCHEMAS / f"{command}{SUFFIX}").read_text(encoding="utf-8")))
