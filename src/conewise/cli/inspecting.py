"""`conewise sites`, `cone`, `verify` and `task`: what a model has, a check of its graph, prompts for it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from conewise.arguments import Positive
from conewise.cli import FAILURE
from conewise.cli.failing import CommandError, as_option
from conewise.cli.options import LoadOptions, OutputOptions, command
from conewise.cli.output import Status, expect_writable_file, print_json, show_table, stdout
from conewise.cli.questions import ModelName, placed
from conewise.errors import Piece

if TYPE_CHECKING:
    from conewise.report.folded import Folded


@command
def sites(model: str, *, kind: str | None = None, output: OutputOptions, loading: LoadOptions) -> None:
    """List the sites of a model that can be patched: kinds, layers, heads, axes, and sizes of cones.

    With --kind, every site of one kind; "all" lists modules and operations too.

    Examples:
      conewise sites tiny
      conewise sites smollm2-135m --kind z
      conewise sites ./my-model --kind all --json

    Options:
        --kind KIND: Every site of this kind, or all.
    """
    found = ModelName(model, loading).capture(Status(output.quiet))
    listing = found.sites
    if not output.json and kind is None:
        stdout().print(listing.text("--kind all", as_option), markup=False, soft_wrap=True)
        return
    rows = _of_kind(list(listing.rows()), kind, listing.kinds, listing.missing())
    if output.json:
        print_json("sites", {"model": found.label, "kinds": listing.kinds, "sites": rows})
        return
    texts = [
        [*("" if row[name] is None else row[name] for name in ("name", "kind", "layer", "head", "shape")),
         f"{row['cone']:,}"]
        for row in rows
    ]  # fmt: skip
    title = f"{len(rows)} sites{'' if kind == 'all' else f' of the kind {kind}'}"
    show_table(stdout(), title, ("name", "kind", "layer", "heads", "axes", "cone"), texts, right=(2, 3, 5))


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


@command
def cone(
    model: str, site: str, *, output: Path | None = None, how: OutputOptions, loading: LoadOptions
) -> None:
    """Draw the cone of a site: everything that a patch there recomputes.

    Prints a row for each layer; -o writes a drawing (.svg) or an interactive page (.html).

    Examples:
      conewise cone tiny 'z[layer=1]'
      conewise cone smollm2-135m 'mlp_out[layer=12]' -o cone.svg
      conewise cone smollm2-135m blocks.29.attn.hook_z -o cone.html

    Options:
        SITE: 'z[layer=1]', 'z[layer=1, head=2]', or a name.
        --output, -o FILE: A .svg or .html file.
    """
    if output is not None and output.suffix.lower() not in {".svg", ".html"}:
        raise CommandError(f"-o {output}: a cone is drawn as .svg or as .html.")
    expect_writable_file(output, "-o")
    status = Status(how.quiet)
    found = ModelName(model, loading).capture(status)
    place = placed(site, found)
    from conewise.report.folding import fold
    from conewise.report.wave import cone_text
    from conewise.runs.inputs import token_rows
    from conewise.sweeps.planning.planner import facts_of

    base = found.run(input_ids=token_rows([range(8)], facts_of(found).input_device))
    base[place]  # says what is wrong with its part
    folded = fold(found, [place], base=base)
    if output is not None:
        _draw(output, folded, str(place))
        status(f"wrote {output}")
    if how.json:
        body = {"model": found.label, "site": str(place), **_cone_json(folded, str(place)), "file": output}
        print_json("cone", body)
    else:
        stdout().print(cone_text(folded, str(place)), markup=False)


def _draw(path: Path, folded: Folded, site: str) -> None:
    from conewise.files import write_whole
    from conewise.report.wave import cone_svg, wave_page

    text = cone_svg(folded, site) if path.suffix.lower() == ".svg" else wave_page(folded)
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise CommandError(f"the cone cannot be written to {path}: {error.strerror}.") from None


def _cone_json(folded: Folded, site: str) -> dict[str, Any]:
    one = folded.cone(site)
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


@command
def verify(
    model: str, *, n: Positive = 3, seed: int = 0, output: OutputOptions, loading: LoadOptions
) -> None:
    """Check the captured graph against the model itself, on random inputs, bit for bit.

    Exit code 1 if they differ, unless the module itself computes differently while it is captured and the
    difference is rounding. The output says what was found.

    Examples:
      conewise verify tiny
      conewise verify ./my-model --n 10 --dtype bfloat16 --json

    Options:
        --n N: Random inputs of the captured size.
    """
    status = Status(output.quiet)
    found = ModelName(model, loading).capture(status)
    with status.doing("comparing with the model itself"):
        check = found.verify(seed=seed, n=n)
    if output.json:
        body = {**asdict(check), "notes": check.notes, "ok": check.ok, "seed": seed}
        print_json("verify", {"model": found.label, "fingerprint": found.fingerprint(), **body})
    else:
        stdout().print(f"{found.label}: {check}", markup=False)
    if not check.ok:
        raise typer.Exit(FAILURE)


@command
def task(
    task: str,
    model: str,
    *,
    n: int = 100,
    split: str = "all",
    seed: int = 0,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Print prompts of one of the field's tasks as JSON, as the other commands read them with --prompts.

    A row has clean, corrupted, answers, wrong_answers and template.

    Tasks: ioi, greater_than, gendered_pronoun, country_capital, arithmetic, mcqa, subject_verb. Every row is
    well-formed for the model's tokenizer: both prompts have equally many tokens, and an answer is one token.
    --split train and --split test share no template.

    Examples:
      conewise task ioi tiny --n 20
      conewise task ioi smollm2-135m --n 100 > pairs.json
      conewise task greater_than ./my-model --split test

    Options:
        TASK: The task, for one: ioi.
        --n N: Number of rows.
        --split SPLIT: all, train or test, by template.
    """
    loaded = ModelName(model, loading).load(Status(output.quiet))
    from conewise.text.tasks import make

    rows = make(task.replace("-", "_"), loaded, n, seed=seed, split=split)
    print_json("task", {"task": task, "model": model, "prompts": rows})
