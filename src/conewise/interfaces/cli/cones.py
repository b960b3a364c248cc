"""`conewise cone`: what depends on a site, drawn on the model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conewise.interfaces.cli import options as opt
from conewise.interfaces.cli.failing import CommandError
from conewise.interfaces.cli.helping import literal, shown
from conewise.interfaces.cli.loading import EXAMPLE, Named
from conewise.interfaces.cli.selecting import placed
from conewise.interfaces.cli.showing import Teller, print_json, stdout

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.workloads.folding import Cone, Folded

HELP = """Draw the cone of a site: all that a patch there recomputes, on the model's layers.

In the terminal a row for each layer; with -o a drawing (.svg) or a page to step through (.html).

\b
Examples:
  conewise cone tiny 'z[layer=1]'
  conewise cone smollm2-135m 'mlp_out[layer=12]' -o cone.svg
  conewise cone smollm2-135m blocks.29.attn.hook_z -o cone.html
"""

WIDTH = 24
"""Characters of the longest bar."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cone", help=shown(HELP), short_help="Draw what depends on a site.")(cone)


def cone(
    model: opt.Model,
    site: Annotated[
        str,
        typer.Argument(
            metavar="SITE", help=literal("'z[layer=1]', 'z[layer=1, head=2]', or a name."), show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A .svg or .html file.", show_default=False),
    ] = None,
    quiet: opt.Quiet = False,
    json: opt.Json = False,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    attention: opt.Attention = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """Draw the cone of a site; see `HELP`."""
    if output is not None and output.suffix.lower() not in {".svg", ".html"}:
        raise CommandError(f"-o {output}: a cone is drawn as .svg or as .html.")
    tell = Teller(quiet)
    named = Named(model, device, dtype, attention, revision, trust_remote_code)
    loaded, found = named.capture(tell)
    place = placed(site, found)
    from conewise.frontends.torch.answers import token_rows
    from conewise.workloads.facts import facts_of
    from conewise.workloads.folding import fold

    base = found.run(input_ids=token_rows([EXAMPLE], facts_of(found).device))
    folded = fold(found, [place], base=base)
    one = folded.cone(str(place))
    if output is not None:
        _draw(output, folded, str(place))
        tell(f"wrote {output}")
    if json:
        told = _told(folded, one)
        print_json("cone", {"model": loaded.name, "site": str(place), **told, "file": output and str(output)})
        return
    _show(stdout(), loaded.name, str(place), folded, one)


def _draw(path: Path, folded: Folded, site: str) -> None:
    from conewise.interfaces.wave import cone_svg, wave_page
    from conewise.workloads.files import write_whole

    text = cone_svg(folded, site) if path.suffix.lower() == ".svg" else wave_page(folded)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise CommandError(f"the cone cannot be written to {path}: {error.strerror}.") from None


def _told(folded: Folded, one: Cone) -> dict[str, Any]:
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


def _show(console: Console, model: str, site: str, folded: Folded, one: Cone) -> None:
    """The cone in words, then a row for each layer with how much of it is recomputed."""
    share = one.node_evaluations / folded.full_evaluations
    console.print(
        f"{site} of {model}: a patch recomputes {one.node_evaluations:,} of {folded.full_evaluations:,} "
        f"nodes ({share:.1%}), {sum(one.flops):.3g} of {folded.full_flops:.3g} FLOPs; "
        f"{sum(one.reused):,} values are read as they are",
        markup=False,
    )
    labels = [f"layer {row}" if row.isdigit() else row for row, _ in folded.rows]
    widest = max(map(len, labels))
    for label, (_, numbers) in zip(labels, folded.rows, strict=True):
        nodes = sum(folded.parts[number].nodes for number in numbers)
        again = sum(one.recomputed[number] for number in numbers)
        if not nodes:
            continue
        bar = "█" * round(WIDTH * again / nodes)
        patched = "  ← patched here" if any(number in one.at for number in numbers) else ""
        console.print(f"  {label:<{widest}}  {bar:<{WIDTH}}  {again:>5,} of {nodes:,}{patched}", markup=False)
