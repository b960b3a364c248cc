"""`conewise schema`: what the JSON of a command looks like."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Annotated, Any

import typer

from conewise.cli.failing import CommandError
from conewise.cli.options import help_text
from conewise.cli.output import print_as_json
from conewise.errors import nearest_names

HELP = """Print the JSON Schema (draft 2020-12) of what a command prints with --json.

\b
Examples:
  conewise schema sweep
  conewise schema plan > plan.schema.json
"""

SCHEMAS: dict[str, Any] = json.loads((files("conewise.cli") / "schemas.json").read_text(encoding="utf-8"))
"""The commands' own schemas, and under `$defs` the parts that they share."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema", help=help_text(HELP), short_help="Print the JSON Schema of a command.")(schema)


def names() -> list[str]:
    """Return the commands that have a schema."""
    return sorted(SCHEMAS["commands"])


def schema_of(command: str) -> dict[str, Any]:
    """Return the whole schema of a command: its own, and the shared parts that it refers to."""
    own, parts = SCHEMAS["commands"][command], SCHEMAS["$defs"]
    used: dict[str, Any] = {}
    waiting = [own]
    while waiting:
        item = waiting.pop()
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        if isinstance(item, dict) and isinstance(item.get("$ref"), str):
            name = item["$ref"].rpartition("/")[2]
            if name not in used:
                used[name] = parts[name]
                waiting.append(parts[name])
    shared = {"$defs": dict(sorted(used.items()))} if used else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **own, **shared}


def schema(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="sweep, plan, ...", show_default=False)],
) -> None:
    """Print a command's schema; see `HELP`."""
    known = names()
    if command not in known:
        near = nearest_names(command, known)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise CommandError(f"no schema of {command!r}; there are {', '.join(known)}.{hint}")
    print_as_json(schema_of(command))
