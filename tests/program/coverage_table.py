"""What works on which architecture, found out by trying: `python -m tests.program.coverage_table`.

Writes docs/coverage.md. `make coverage` runs it; a test checks that the page lists the zoo as it is.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves

import conewise as cw
from conewise.errors import CaptureError, InputMismatchError, MissingSiteError
from conewise.model import Model
from tests.program.zoo import ZOO, Case
from tests.runs.test_architectures import patched_place
from tests.sweeps.captured import hooked, module_outputs

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
ON_CUDA = Path(__file__).parents[1] / "gpu" / "coverage.json"
"""What `python -m tests.gpu.verify_coverage` found, where it was run."""

KINDS = (
    "resid_pre",
    "resid_mid",
    "resid_post",
    "attn_out",
    "mlp_out",
    "q",
    "k",
    "v",
    "z",
    "result",
    "attn_scores",
    "pattern",
    "pre",
    "post",
)

INTRO = """# Coverage

What was captured, and what was found when it was tried. `make coverage` writes this page
(`tests/program/coverage_table.py`). The models are small ones of the real architecture, with
random weights; SmolLM2 with its real weights is checked by `make test-smollm2`.

- **eager, sdpa**: the graph equals the module bit for bit, in float32. *none*: the class has none.
- **bf16**: the same in bfloat16 on the CPU.
- **batch, length**: the same graph at other batch sizes and other lengths, bit for bit. *fixed*: a run must
  have the length of the example; capture again for another one.
- **rows**: the largest difference between a row of a batch and the row alone, relative to its largest output.
- **patch**: one patched head, as a world computes it, equals a PyTorch hook on the module bit for bit (where
  there are no heads: the output of a module).
"""


@dataclass(frozen=True)
class Row:
    """One architecture: a cell for each column, the kinds of sites it has, and why others are missing."""

    cells: tuple[str, ...]
    kinds: tuple[str, ...]
    missing: tuple[str, ...]


COLUMNS = ("architecture", "class", "eager", "sdpa", "bf16", "batch", "length", "rows", "patch")


def row(name: str) -> Row:
    """Try everything on one architecture."""
    case = ZOO[name]
    equal = {attention: _equality(case, attention, torch.float32) for attention in case.attention}
    only = equal.get("", "")
    model = _capture(case, case.attention[-1], torch.float32)
    verification = model.verify(n=1)
    fixed = any("length is fixed" in note for note in verification.notes)
    has_length = any(case.inputs is other.inputs for other in ZOO.values() if len(other.lengths) > 1)
    deviation = verification.row_deviation
    eager = _capture(case, case.attention[0], torch.float32)
    cells = (
        name,
        case.model,
        equal.get("eager", only or "none"),
        equal.get("sdpa", "none"),
        _equality(case, case.attention[-1], torch.bfloat16),
        "any" if not model.batch_is_fixed else "fixed",
        "fixed" if fixed else "any" if has_length else "no positions",
        "" if deviation is None else f"{deviation:.0e}" if deviation else "0",
        " and ".join(dict.fromkeys(_patch(_capture(case, a, torch.float32), name) for a in case.attention)),
    )
    return Row(cells, eager.sites.kinds, tuple(_missing(eager, name)))


def _capture(case: Case, attention: str, dtype: torch.dtype) -> Model:
    return cw.capture(case.make(attention, dtype), **case.example(1, 12, dtype))


def _equality(case: Case, attention: str, dtype: torch.dtype) -> str:
    try:
        model = _capture(case, attention, dtype)
    except CaptureError as error:
        return f"not captured: {str(error).splitlines()[0]}"
    for batch, length in zip((3, 2, 1, 4), case.lengths, strict=False):
        given = case.example(batch, length, dtype)
        try:
            found = tree_leaves(model.run(**given).outputs)
        except InputMismatchError as error:
            return f"refused: {error}"
        expected = module_outputs(model, given)
        if not all(map(torch.equal, found, expected)):
            return "DIFFERS"
    return "equal"


def _patch(model: Model, name: str) -> str:
    place, (way, path, call), index = patched_place(name)
    torch.manual_seed(1)
    given, other = ZOO[name].example(2, ZOO[name].lengths[0]), ZOO[name].example(2, ZOO[name].lengths[0])
    base, source = model.run(**given), model.run(**other)
    part = source[place].clone()

    def change(value: Tensor) -> Tensor:
        shown = value.view(*value.shape[:2], 4, -1) if "head" in place.part else value
        shown[index] = part
        return value

    with hooked(model.module, way, path, change, call):
        expected = module_outputs(model, given)
    with base.fork() as world:
        world.patch(place, source)
        found = tree_leaves(world.outputs)
    return "equal" if all(map(torch.equal, found, expected)) else "DIFFERS"


def _missing(model: Model, name: str) -> list[str]:
    """Why a kind of the list is not there, in the model's own words."""
    reasons: list[str] = []
    for kind in KINDS:
        try:
            model.locate(cw.site(kind, layer=1, stack="decoder" if name == "t5" else ""))
        except MissingSiteError as error:
            reasons.append(f"`{kind}`: {str(error).partition(': ')[2] or error}")
    return reasons


def page(rows: dict[str, Row], on_cuda: dict[str, Any] | None = None) -> str:
    """The page of these rows, and of what was found on a GPU."""
    lines = [INTRO]
    lines += [
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}.",
        "",
        _line(COLUMNS),
        _line(["---"] * len(COLUMNS)),
        *(_line(found.cells) for found in rows.values()),
        "",
        *(cuda_section(on_cuda) if on_cuda else ()),
        "## Sites",
        "By name where the architecture has them, found from the graph; `model.sites` says where each lies.",
        "Modules by path and operations by name are there for every module.",
        "",
        _line(["architecture", *(f"`{kind}`" for kind in KINDS), "others"]),
        _line(["---"] * (len(KINDS) + 2)),
    ]
    for name, found in rows.items():
        others = ", ".join(f"`{kind}`" for kind in found.kinds if kind not in KINDS)
        lines.append(_line([name, *("+" if kind in found.kinds else "" for kind in KINDS), others]))
    lines += ["", "## What is not there, and why", ""]
    for name, found in rows.items():
        if not found.kinds:
            lines.append(f"- **{name}**: no attention, so no kinds; modules and operations only.")
        elif found.missing:
            lines.append(f"- **{name}**: {'; '.join(reason.rstrip('.') for reason in found.missing)}.")
    lines += [
        "",
        '`attn_scores` and `pattern` are there with `attn_implementation="eager"` only: the fused',
        "operation never holds them. Generation with a cache, training mode, and modules that choose what",
        "to compute by the values of their tensors are not captured; the error says so, with torch's reason.",
        "",
    ]
    return "\n".join(lines)


CUDA_INTRO = """The same architectures, captured and verified on a GPU
(`PYTHONPATH=src python -m tests.gpu.verify_coverage`). *equal*: bit for bit, on all inputs and sizes that
were tried. A number: the largest difference between an output of the graph and the module's own; it passed
where that is no more than rounding. *sweep*: cells of a wavefront and of a serial sweep, checked with hooks
on the module; *1 wrong found*: an error of 5 % of the largest value in one cell does not pass."""


def cuda_section(found: dict[str, Any]) -> list[str]:
    """What was found on a GPU: a line for each architecture and attention."""
    by_line: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        by_line.setdefault((row["architecture"], row["attention"]), {})[row["dtype"]] = row
    dtypes = list(dict.fromkeys(row["dtype"] for row in found["rows"]))
    lines = [
        "## On CUDA",
        CUDA_INTRO,
        "",
        f"{found['device']}, torch {found['torch']}, transformers {found['transformers']}.",
        "",
        _line(["architecture", "attention", *(f"{dtype}, sweep" for dtype in dtypes)]),
        _line(["---"] * (2 + len(dtypes))),
    ]
    for (name, attention), own in by_line.items():
        lines.append(_line([name, attention, *(_on_cuda(own.get(dtype)) for dtype in dtypes)]))
    return [*lines, ""]


def _on_cuda(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not tried"
    if "error" in row:
        return f"ERROR: {str(row['error']).splitlines()[0]}".replace("|", "/")
    outcome = "equal" if row["bitwise"] else f"{row['worst']:.1e}"
    parts = [outcome if row["passed"] else f"FAILED ({outcome})"]
    for evaluator, sweep in row.get("sweeps", {}).items():
        checked = f"{sweep['hooked']} of {sweep['cells']} cells hooked"
        found = "1 wrong found" if sweep["an error of 5 % is found"] else "1 wrong NOT FOUND"
        parts.append(f"{evaluator} {'passed' if sweep['passed'] else 'FAILED'}, {checked}, {found}")
    return "; ".join(parts)


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = {}
    for name in ZOO:
        rows[name] = row(name)
        sys.stdout.write(_line(rows[name].cells) + "\n")
        sys.stdout.flush()
    PAGE.write_text(page(rows, json.loads(ON_CUDA.read_text()) if ON_CUDA.exists() else None))


if __name__ == "__main__":
    main()
