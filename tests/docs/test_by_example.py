"""Every public name has an example, and is in the reference; test_blocks.py runs the examples."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import pytest

import conewise as cw
from tests.docs.pages import ROOT, Block, blocks

FOLDER = ROOT / "docs/reference"
PAGE = FOLDER / "by-example.md"
CLASSES = ("Circuit", "Graph", "Model", "Result", "Run", "Sweep", "SweepPlan", "World")

INTERNAL = {
    "Graph": "add_node add_source attach guard guards removal take_away unguard",
    "Model": (
        "changed_sites each_call expect_known_ids expect_own expect_program behind "
        "estimated_bytes identity_parts "
        "planned read_by_patches_at support"
    ),
    "Run": "edits expect_same_weights identity_parts made_with read trusted value_at world",
    "Sweep": "batch expect_room forget of_cells read_metrics rerun targets",
    "World": "approve follow",
}
"""What other rooms call, and people have no use for."""

MOST_LINES = 13

NOT_RUN = {"Processes", "Ray", "Result.save_image", "Result.to_xarray"}
"""What takes seconds, or a package that is not there; the pages of guides run it where it is."""


def _members(name: str) -> set[str]:
    """The public methods and properties of a class; of a dataclass not its fields."""
    kind = getattr(cw, name)
    fields = {one.name for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return (
        {one for one in dir(kind) if not one.startswith("_")} - fields - set(INTERNAL.get(name, "").split())
    )


def _examples() -> dict[str, Block]:
    """The block of code under each heading, by every name in it."""
    found: dict[str, Block] = {}
    lines = PAGE.read_text("utf-8").splitlines()
    code = [block for block in blocks(PAGE) if block.language == "python"]
    for number, line in enumerate(lines, start=1):
        if line.startswith("### "):
            block = next(one for one in code if one.line > number)
            for name in re.findall(r"`([\w.]+)`", line):
                assert name not in found, f"{name} has two examples"
                found[name] = block
    return found


EXAMPLES = _examples()
PUBLIC = sorted({*cw.__all__, *(f"{name}.{one}" for name in CLASSES for one in _members(name))})


def test_every_public_name_has_an_example() -> None:
    assert [name for name in PUBLIC if name not in EXAMPLES] == [], f"put a few lines into {PAGE.name}"
    assert [name for name in EXAMPLES if name not in PUBLIC] == []


def test_every_example_is_short_and_uses_its_name() -> None:
    unused, long, wrongly_marked = [], [], []
    for name, block in EXAMPLES.items():
        # What is made by others, as a result is, goes by its own name in small letters.
        written = rf"\b{name.rpartition('.')[2].removeprefix('Sweep') or 'sweep'}\b"
        if not re.search(written, block.code, re.IGNORECASE):
            unused.append(name)
        if block.code.count("\n") > MOST_LINES:
            long.append(name)
        if block.remark.startswith("not run: ") != (name in NOT_RUN):
            wrongly_marked.append(name)
    assert (unused, long, wrongly_marked) == ([], [], [])


def test_what_is_internal_is_there() -> None:
    for name, members in INTERNAL.items():
        kind: Any = getattr(cw, name)
        assert [one for one in members.split() if not hasattr(kind, one)] == []


def test_the_reference_lists_every_public_member() -> None:
    text = "".join(page.read_text("utf-8") for page in FOLDER.glob("*.md"))
    found = {}
    for name in CLASSES:
        shown = rf"^::: conewise\.{name}\n    options:\n      members: \[(.*)\]$"
        listed = re.search(shown, text, re.MULTILINE)
        if listed is not None:  # else all are shown
            found[name] = _members(name) - set(listed[1].split(", "))
    assert {name: missing for name, missing in found.items() if missing} == {}


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("conewise.paper.theory", "theory.md"),
        ("conewise.paper.ops", "ops.md"),
        ("conewise.compat.transformer_lens", "compat.md"),
    ],
)
def test_every_name_of_a_public_module_is_in_the_reference_once(module: str, page: str) -> None:
    listed = re.findall(
        rf"^::: {re.escape(module)}\.(\w+)$", (FOLDER / page).read_text("utf-8"), flags=re.MULTILINE
    )
    assert sorted(listed) == sorted(importlib.import_module(module).__all__)
