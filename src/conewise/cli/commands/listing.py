"""`conewise sites`: what can be patched in a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from conewise.cli import options as opt
from conewise.cli.failing import CommandError, as_option
from conewise.cli.option_groups import LoadOptions, OutputOptions
from conewise.cli.options import flat, help_text
from conewise.cli.output import Status, add_row, print_json, stdout, table
from conewise.cli.questions import ModelName
from conewise.errors import Piece

HELP = """List what can be patched in a model: its kinds of sites, their layers, heads, axes and cones.

With --kind, every site of one kind; "all" lists modules and operations too.

\b
Examples:
  conewise sites tiny
  conewise sites smollm2-135m --kind z
  conewise sites ./my-model --kind all --json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sites", help=help_text(HELP), short_help="List what can be patched in a model.")(flat(sites))


def sites(
    model: opt.Model,
    kind: Annotated[
        str | None,
        typer.Option("--kind", metavar="KIND", help="Every site of this kind, or all.", show_default=False),
    ] = None,
    *,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """List what can be patched; see `HELP`."""
    found = ModelName(model, loading).capture(Status(output.quiet))
    listing = found.sites
    if output.json or kind is not None:
        rows = _of_kind(list(listing.rows()), kind, listing.kinds, listing.missing())
        if output.json:
            print_json("sites", {"model": found.label, "kinds": list(listing.kinds), "sites": rows})
            return
        _show(rows, kind or "all")
        return
    stdout().print(listing.text("--kind all", as_option), markup=False, soft_wrap=True)


def _of_kind(
    rows: list[dict[str, Any]],
    kind: str | None,
    kinds: tuple[str, ...],
    missing: list[tuple[str, str, tuple[Piece, ...]]],
) -> list[dict[str, Any]]:
    if kind is None or kind == "all":
        return rows
    chosen = [row for row in rows if row["kind"] == kind]
    if not chosen:
        others = sorted({row["kind"] for row in rows} - set(kinds))
        why = [reason for names, _, reason in missing if kind in names.split(", ")]
        raise CommandError(
            f"no site of the kind {kind!r}; there are {', '.join([*kinds, *others])}, and all.",
            *((f" Why not {kind}: ", *why[0], ".") if why else ()),
        )
    return chosen


def _show(rows: list[dict[str, Any]], kind: str) -> None:
    grid = table(
        f"{len(rows)} sites{'' if kind == 'all' else f' of the kind {kind}'}",
        ("name", "kind", "layer", "heads", "axes", "cone"),
        right=(2, 3, 5),
    )
    for row in rows:
        add_row(
            grid,
            row["name"],
            row["kind"],
            *("" if row[name] is None else str(row[name]) for name in ("layer", "head")),
            row["shape"],
            f"{row['cone']:,}",
        )
    stdout().print(grid)
