"""`conewise sites`, `cone` and `verify`: a model's sites, what depends on one, and a check of its graph."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conewise.cli import CHECK_FAILED
from conewise.cli import options as opt
from conewise.cli.failing import CommandError, as_option
from conewise.cli.options import LoadOptions, OutputOptions, literal, subcommand
from conewise.cli.output import Status, add_row, expect_writable_file, print_json, stdout, table
from conewise.cli.questions import ModelName, placed
from conewise.errors import Piece

if TYPE_CHECKING:
    from conewise.report.folded import Cone, Folded

SITES_HELP = """List the sites of a model that can be patched: kinds, layers, heads, axes, and sizes of cones.

With --kind, every site of one kind; "all" lists modules and operations too.

\b
Examples:
  conewise sites tiny
  conewise sites smollm2-135m --kind z
  conewise sites ./my-model --kind all --json
"""

CONE_HELP = """Draw the cone of a site: everything that a patch there recomputes.

Prints a row for each layer; -o writes a drawing (.svg) or an interactive page (.html).

\b
Examples:
  conewise cone tiny 'z[layer=1]'
  conewise cone smollm2-135m 'mlp_out[layer=12]' -o cone.svg
  conewise cone smollm2-135m blocks.29.attn.hook_z -o cone.html
"""

VERIFY_HELP = """Check the captured graph against the model itself, on random inputs, bit for bit.

Exit code 1 if they differ, unless the module itself computes differently while it is captured and the
difference is rounding. The output says what was found.

\b
Examples:
  conewise verify tiny
  conewise verify ./my-model --n 10 --dtype bfloat16 --json
"""


@subcommand("sites", SITES_HELP, "List what can be patched in a model.")
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
    """List what can be patched; see `SITES_HELP`."""
    found = ModelName(model, loading).capture(Status(output.quiet))
    listing = found.sites
    if output.json or kind is not None:
        rows = _of_kind(list(listing.rows()), kind, listing.kinds, listing.missing())
        if output.json:
            print_json("sites", {"model": found.label, "kinds": list(listing.kinds), "sites": rows})
            return
        _show_sites(rows, kind or "all")
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


def _show_sites(rows: list[dict[str, Any]], kind: str) -> None:
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


@subcommand("cone", CONE_HELP, "Draw what depends on a site.")
def cone(
    model: opt.Model,
    site: Annotated[
        str,
        typer.Argument(
            metavar="SITE", help=literal("'z[layer=1]', 'z[layer=1, head=2]', or a name."), show_default=False
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A .svg or .html file.", show_default=False),
    ] = None,
    *,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Draw the cone of a site; see `CONE_HELP`."""
    if file is not None:
        if file.suffix.lower() not in {".svg", ".html"}:
            raise CommandError(f"-o {file}: a cone is drawn as .svg or as .html.")
        expect_writable_file(file, "-o")
    status = Status(output.quiet)
    found = ModelName(model, loading).capture(status)
    place = placed(site, found)
    from conewise.report.folding import fold
    from conewise.runs.inputs import token_rows
    from conewise.sweeps.planning.planner import facts_of

    base = found.run(input_ids=token_rows([range(8)], facts_of(found).input_device))
    base[place]  # says what is wrong with its part
    folded = fold(found, [place], base=base)
    one = folded.cone(str(place))
    if file is not None:
        _draw(file, folded, str(place))
        status(f"wrote {file}")
    if output.json:
        body = _cone_json(folded, one)
        print_json("cone", {"model": found.label, "site": str(place), **body, "file": file and str(file)})
        return
    from conewise.report.wave import cone_text

    stdout().print(cone_text(folded, str(place)), markup=False)


def _draw(path: Path, folded: Folded, site: str) -> None:
    from conewise.files import write_whole
    from conewise.report.wave import cone_svg, wave_page

    text = cone_svg(folded, site) if path.suffix.lower() == ".svg" else wave_page(folded)
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise CommandError(f"the cone cannot be written to {path}: {error.strerror}.") from None


def _cone_json(folded: Folded, one: Cone) -> dict[str, Any]:
    return {
        "node_evaluations": one.node_evaluations,
        "full_evaluations": folded.full_evaluations,
        "flops": sum(one.flops),
        "full_flops": folded.full_flops,
        "reused": sum(one.reused),
        "parts": [
            {
                "row": part.row,
                "part": part.label,
                "layer": part.layer,
                "nodes": part.nodes,
                "recomputed": one.recomputed[number],
                "reused": one.reused[number],
                "is_patched": number in one.at,
            }
            for number, part in enumerate(folded.parts)
        ],
    }


@subcommand("verify", VERIFY_HELP, "Check the captured graph against the model.")
def verify(
    model: opt.Model,
    n: Annotated[
        int, typer.Option("--n", metavar="N", min=1, help="Random inputs of the captured size.")
    ] = 3,
    seed: opt.Seed = 0,
    *,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Check the captured graph; see `VERIFY_HELP`."""
    status = Status(output.quiet)
    found = ModelName(model, loading).capture(status)
    with status.doing("comparing with the model itself"):
        check = found.verify(seed=seed, n=n)
    if output.json:
        body = {**asdict(check), "notes": list(check.notes), "ok": check.ok, "seed": seed}
        print_json("verify", {"model": found.label, "fingerprint": found.fingerprint(), **body})
    else:
        stdout().print(f"{found.label}: {check}", markup=False)
    if not check.ok:
        raise typer.Exit(CHECK_FAILED)
