"""The page on coverage lists the zoo as it is, and no cell of it says that something differs."""

from __future__ import annotations

import json

from tests.program.coverage_table import (
    COLUMNS,
    KINDS,
    ON_CUDA,
    PAGE,
    Row,
    cuda_section,
    page,
)
from tests.program.zoo import ZOO


def table() -> list[list[str]]:
    lines = PAGE.read_text().split("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_page_lists_every_architecture_of_the_zoo() -> None:
    heading, _, *rows = table()
    assert tuple(heading) == COLUMNS
    assert [(row[0], row[1]) for row in rows] == [(name, case.model) for name, case in ZOO.items()]


def test_everything_on_the_page_is_equal() -> None:
    for row in table()[2:]:
        found = dict(zip(COLUMNS, row, strict=True))
        attention = ZOO[row[0]].attention
        for column in ("eager", "sdpa"):
            expected = (
                "equal" if column in attention or (attention == ("",) and column == "eager") else "none"
            )
            assert found[column] == expected, row
        assert (found["bf16"], found["patch"], found["batch"]) == ("equal", "equal", "any"), row
        assert float(found["rows"]) <= 1e-5, row


def test_a_page_is_made_of_its_rows() -> None:
    cells = ("one", "OneModel", *["equal"] * (len(COLUMNS) - 2))
    text = page({"one": Row(cells, ("z", "rot_q"), ("`pattern`: fused",))})
    assert "| one | OneModel | equal |" in text
    plus = ["+" if kind == "z" else "" for kind in KINDS]
    assert f"| {' | '.join(['one', *plus, '`rot_q`'])} |" in text
    assert "- **one**: `pattern`: fused." in text


ROW = {"architecture": "one", "attention": "sdpa", "bitwise": True, "worst": 0.0, "passed": True}
SWEEP = {"passed": True, "cells": 12, "hooked": 12, "an error of 5 % is found": True}


def test_a_page_says_what_was_found_on_a_gpu() -> None:
    rows = [
        {**ROW, "dtype": "float32", "sweeps": {"serial": SWEEP}},
        {**ROW, "dtype": "bfloat16", "bitwise": False, "worst": 0.047, "passed": False},
        {**ROW, "architecture": "two", "dtype": "float32", "passed": False, "error": "Bad|one\nmore"},
    ]
    text = page({}, {"device": "A GPU", "torch": "2", "transformers": "5", "rows": rows})
    swept = "serial passed, 12 of 12 cells hooked, 1 wrong found"
    assert "A GPU, torch 2, transformers 5." in text
    assert f"| one | sdpa | equal; {swept} | FAILED (4.7e-02) |" in text
    assert "| two | sdpa | ERROR: Bad/one | not tried |" in text
    assert text.index("## On CUDA") < text.index("## Sites")


def test_what_was_found_on_a_gpu_is_on_the_page() -> None:
    if ON_CUDA.exists():
        assert "\n".join(cuda_section(json.loads(ON_CUDA.read_text()))) in PAGE.read_text()
    else:
        assert "## On CUDA" not in PAGE.read_text()
