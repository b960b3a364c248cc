"""`conewise cone`: what depends on a site, drawn on the model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conewise.cli import options as opt
from conewise.cli.failing import CommandError
from conewise.cli.option_groups import LoadOptions, OutputOptions
from conewise.cli.options import flat, help_text, literal
from conewise.cli.output import Status, expect_writable_file, print_json, stdout
from conewise.cli.questions import ModelName, placed

if TYPE_CHECKING:
    from conewise.report.folded import Cone, Folded

HELP = """Draw the cone of a site: all that a patch there recomputes, on the model's layers.

In the terminal a row for each layer; with -o a drawing (.svg) or a page to step through (.html).

\b
Examples:
  conewise cone tiny 'z[layer=1]'
  conewise cone smollm2-135m 'mlp_out[layer=12]' -o cone.svg
  conewise cone smollm2-135m blocks.29.attn.hook_z -o cone.html
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cone", help=help_text(HELP), short_help="Draw what depends on a site.")(flat(cone))


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
    """Draw the cone of a site; see `HELP`."""
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
        body = _as_json(folded, one)
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


def _as_json(folded: Folded, one: Cone) -> dict[str, Any]:
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
